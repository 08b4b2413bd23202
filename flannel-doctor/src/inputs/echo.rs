//! ICMP echoes of an exact size that must not be fragmented, to many addresses at once.
//! It needs `CAP_NET_RAW`.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use flannel_core::address::Family;

use super::echo_socket::{EchoSocket, IcmpMessage};

/// The maximum number of attempts for each echo.
const ROUNDS: u32 = 3;
/// The maximum number of echoes in flight. With more, answers would overflow the receive buffer.
const GROUP: usize = 64;
/// The number of echoes after which answers are read.
const BURST: usize = 16;
const BURST_PAUSE: Duration = Duration::from_millis(1);
/// The sequence number of the next echo. Calls that wait at the same time have different numbers,
/// because each raw socket gets the replies to all echoes of this process.
static NEXT: AtomicU16 = AtomicU16::new(0);
/// The shortest wait for the answers of one of several groups.
const LEAST: Duration = Duration::from_millis(750);

/// An echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The destination.
    pub to: IpAddr,
    /// The size of the whole IP packet, in bytes.
    pub size: u16,
}

/// The answer to an echo request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// A reply, after this time.
    Reply(Duration),
    /// A router or this host takes only smaller packets: of at most this many bytes, if known.
    TooBig(Option<u32>),
    /// No reply.
    Nothing,
    /// The request could not be sent, for this reason.
    NotSent(String),
    /// This process lacks the privilege to send echoes.
    NotAllowed,
}

/// Sends all echoes, and waits at most `patience` for the answers, but at least 750 ms for each of
/// several groups.
///
/// # Errors
/// No echo can be sent, usually because `CAP_NET_RAW` is missing.
///
/// # Blocking
/// Until all answers are there, or the time is over. The echoes of a family are sent in groups of
/// 64, and both families at once.
pub fn echo(probes: &[Probe], patience: Duration) -> io::Result<Vec<Answer>> {
    let mut answers = vec![Answer::Nothing; probes.len()];
    let of = |family| -> io::Result<Vec<(usize, Answer)>> {
        let ours = probes.iter().enumerate().filter(|(_, probe)| Family::of(probe.to) == family);
        let ours: Vec<(usize, Probe)> = ours.map(|(n, probe)| (n, *probe)).collect();
        if ours.is_empty() {
            return Ok(Vec::new());
        }
        let (round, mut found) = (Round::open(family)?, Vec::new());
        let each = share(patience, ours.len().div_ceil(GROUP));
        for group in ours.chunks(GROUP) {
            // A group has at most 64.
            let first = NEXT.fetch_add(group.len() as u16, Ordering::Relaxed);
            found.extend(round.run(first, group, each)?);
        }
        Ok(found)
    };
    // One thread for each family.
    let both = std::thread::scope(|scope| {
        Family::BOTH
            .map(|family| scope.spawn(move || of(family)))
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    for found in both {
        for (n, answer) in found? {
            answers[n] = answer;
        }
    }
    Ok(answers)
}

/// The part of the time for each of some groups.
fn share(patience: Duration, groups: usize) -> Duration {
    let groups = u32::try_from(groups).unwrap_or(u32::MAX).max(1);
    (patience / groups).max(LEAST.min(patience))
}

/// The sockets of a family.
struct Round(EchoSocket);

impl Round {
    fn open(family: Family) -> io::Result<Self> {
        // The low half of the process id is enough to distinguish processes.
        EchoSocket::open(family, std::process::id() as u16).map(Self)
    }

    /// Sends one group. `first` is the sequence number of its first echo.
    fn run(
        &self,
        first: u16,
        probes: &[(usize, Probe)],
        patience: Duration,
    ) -> io::Result<Vec<(usize, Answer)>> {
        let mut answers: Vec<(usize, Answer)> =
            probes.iter().map(|(n, _)| (*n, Answer::Nothing)).collect();
        let mut sent = vec![Instant::now(); probes.len()];
        let start = Instant::now();
        for round in 1..=ROUNDS {
            for (k, (_, probe)) in probes.iter().enumerate() {
                if answers[k].1 != Answer::Nothing {
                    continue;
                }
                sent[k] = Instant::now();
                if let Err(answer) = self.0.send(probe, first.wrapping_add(k as u16)) {
                    answers[k].1 = answer;
                }
                if k % BURST == BURST - 1 {
                    self.listen(first, (&mut answers, &sent), Instant::now() + BURST_PAUSE)?;
                }
            }
            self.listen(first, (&mut answers, &sent), start + patience * round / ROUNDS)?;
        }
        Ok(answers)
    }

    /// Reads answers until all are there, or until `end`.
    fn listen(
        &self,
        first: u16,
        (answers, sent): (&mut [(usize, Answer)], &[Instant]),
        end: Instant,
    ) -> io::Result<()> {
        while answers.iter().any(|(_, answer)| *answer == Answer::Nothing) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let Some((sequence, answer)) = self.receive(left)? else { continue };
            // Larger if it answers an echo of another group or call.
            let k = usize::from(sequence.wrapping_sub(first));
            if let Some((_, known)) =
                answers.get_mut(k).filter(|(_, known)| *known == Answer::Nothing)
            {
                *known = match answer {
                    IcmpMessage::Reply => Answer::Reply(sent[k].elapsed()),
                    IcmpMessage::TooBig(most) => Answer::TooBig(Some(most)),
                };
            }
        }
        Ok(())
    }

    /// Waits at most `left` for a message. `None`: none came, or it is not about an echo of ours.
    fn receive(&self, left: Duration) -> io::Result<Option<(u16, IcmpMessage)>> {
        self.0.inbox().set_read_timeout(Some(left))?;
        match self.0.receive() {
            Ok(message) => Ok(message),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_netlink::testing::{Netns, in_netns, ip};

    use super::*;

    fn probe(to: &str, size: u16) -> Probe {
        Probe { to: to.parse().unwrap(), size }
    }

    #[test]
    fn groups_share_the_time_unless_that_is_too_little() {
        let ms = Duration::from_millis;
        for (patience, groups, each) in [
            (3_000, 1, 3_000),
            (3_000, 2, 1_500),
            (3_000, 4, 750),
            (3_000, 600, 750),
            (100, 9, 100),
        ] {
            assert_eq!(share(ms(patience), groups), ms(each), "{groups} groups");
        }
    }

    #[test]
    fn thousands_of_echoes_are_sent_in_groups() {
        in_netns(|| {
            let probes: Vec<Probe> =
                (0..1000).map(|n| probe(["127.0.0.1", "::1"][n % 2], 1400)).collect();
            let answers = echo(&probes, Duration::from_secs(20)).unwrap();
            assert!(answers.iter().all(|answer| matches!(answer, Answer::Reply(_))), "{answers:?}");
        });
    }

    #[test]
    fn a_call_takes_no_answer_to_another_one() {
        in_netns(|| {
            ip("link add eth0 type veth peer name far");
            ip("link set far up");
            ip("addr add 192.0.2.1/24 dev eth0");
            ip("link set eth0 up");
            ip("neigh add 192.0.2.9 lladdr 0a:00:00:00:00:09 dev eth0");
            std::thread::scope(|scope| {
                let silent = |_| {
                    scope.spawn(|| echo(&[probe("192.0.2.9", 64)], Duration::from_secs(1)).unwrap())
                };
                let silent = [(); 4].map(silent);
                while silent.iter().any(|thread| !thread.is_finished()) {
                    let near = echo(&[probe("192.0.2.1", 64)], Duration::from_secs(9)).unwrap();
                    assert!(matches!(near[0], Answer::Reply(_)), "{near:?}");
                }
                for thread in silent {
                    assert_eq!(thread.join().unwrap(), [Answer::Nothing]);
                }
            });
        });
    }

    /// A host behind a router whose far side takes only 1400 bytes.
    #[test]
    fn sizes_are_exact_and_the_mtu_of_a_router_is_reported() {
        in_netns(|| {
            let (router, far) = (Netns::new().unwrap(), Netns::new().unwrap());
            ip(&format!(
                "link add eth0 type veth peer name near netns {}",
                router.path().display()
            ));
            router.run(|| {
                ip(&format!(
                    "link add far type veth peer name eth0 netns {}",
                    far.path().display()
                ));
                ip("link set far mtu 1400");
                for (link, v4, v6) in [
                    ("near", "192.0.2.2/24", "2001:db8:1::2/64"),
                    ("far", "198.51.100.2/24", "2001:db8:2::2/64"),
                ] {
                    ip(&format!("addr add {v4} dev {link}"));
                    ip(&format!("addr add {v6} dev {link} nodad"));
                    ip(&format!("link set {link} up"));
                }
                std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
            });
            let host = |v4: &str, v6: &str, via4: &str, via6: &str| {
                ip("link set eth0 up");
                ip(&format!("addr add {v4} dev eth0"));
                ip(&format!("addr add {v6} dev eth0 nodad"));
                ip(&format!("route add default via {via4}"));
                ip(&format!("route add default via {via6}"));
            };
            far.run(|| {
                host("198.51.100.9/24", "2001:db8:2::9/64", "198.51.100.2", "2001:db8:2::2");
            });
            host("192.0.2.1/24", "2001:db8:1::1/64", "192.0.2.2", "2001:db8:1::2");
            ip("route add blackhole 203.0.113.0/24");
            let probes = [
                probe("198.51.100.9", 64),
                probe("198.51.100.9", 1400),
                probe("198.51.100.9", 1401),
                probe("192.0.2.2", 1500),
                probe("192.0.2.2", 1501),
                probe("203.0.113.1", 64),
                probe("2001:db8:2::9", 64),
                probe("2001:db8:2::9", 1400),
                probe("2001:db8:2::9", 1401),
                probe("2001:db8:1::2", 1501),
                // An odd number of bytes.
                probe("198.51.100.9", 1399),
                probe("2001:db8:2::9", 1399),
            ];
            // IPv6 needs a moment before its addresses can send neighbour solicitations.
            let answers = echo(&probes, Duration::from_secs(20)).unwrap();
            let replied = |n: usize| matches!(answers[n], Answer::Reply(_));
            assert!([0, 1, 3, 6, 7, 10, 11].into_iter().all(replied), "{answers:?}");
            for n in [2, 8] {
                assert_eq!(answers[n], Answer::TooBig(Some(1400)), "{:?}", probes[n]);
            }
            for n in [4, 9] {
                assert_eq!(answers[n], Answer::TooBig(None), "{:?}", probes[n]);
            }
            assert!(matches!(answers[5], Answer::NotSent(_)), "{answers:?}");
            // A route's MTU limits no echo.
            for router in ["192.0.2.2", "2001:db8:1::2"] {
                ip(&format!("route replace default via {router} mtu 1300"));
            }
            let full = [probe("198.51.100.9", 1400), probe("2001:db8:2::9", 1400)];
            let answers = echo(&full, Duration::from_secs(20)).unwrap();
            let replied = |answer: &Answer| matches!(answer, Answer::Reply(_));
            assert!(answers.iter().all(replied), "{answers:?}");
            let nobody = echo(&[probe("192.0.2.99", 64)], Duration::from_millis(100)).unwrap();
            assert_eq!(nobody, [Answer::Nothing]);
        });
    }
}
