//! ICMP echoes of an exact size that must not be fragmented, to many addresses at once.
//! It needs `CAP_NET_RAW`.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use flannel_core::address::Family;

use super::echo_socket::{Echo, EchoSocket, IcmpMessage};
use crate::token::token;

/// The maximum number of attempts for each echo.
const ROUNDS: u32 = 3;
/// The maximum number of echoes in flight. With more, answers would overflow the receive buffer.
const GROUP: usize = 64;
/// The number of echoes after which answers are read.
const BURST: usize = 16;
const BURST_PAUSE: Duration = Duration::from_millis(1);
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
pub enum EchoResult {
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

/// Sends the echoes of each family in groups of 64. The time `patience` is divided evenly among the
/// groups. Each group waits at least 750 ms, or `patience` if that is shorter. So many groups
/// together may take longer than `patience`.
///
/// # Errors
/// No echo can be sent, usually because `CAP_NET_RAW` is missing.
///
/// # Blocking
/// Until all answers are there, or the time is over. The echoes of a family are sent in groups of
/// 64, and both families at once.
pub fn echo(probes: &[Probe], patience: Duration) -> io::Result<Vec<EchoResult>> {
    let mut answers = vec![EchoResult::Nothing; probes.len()];
    let of = |family| -> io::Result<Vec<(usize, EchoResult)>> {
        let ours = probes.iter().enumerate().filter(|(_, probe)| Family::of(probe.to) == family);
        let ours: Vec<(usize, Probe)> = ours.map(|(n, probe)| (n, *probe)).collect();
        if ours.is_empty() {
            return Ok(Vec::new());
        }
        let socket = EchoSocket::open(family)?;
        let each = share(patience, ours.len().div_ceil(GROUP));
        let mut found = Vec::new();
        for group in ours.chunks(GROUP) {
            found.extend(Group::new(&socket, group).run(each)?);
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

/// Echoes that are sent together.
struct Group<'a> {
    socket: &'a EchoSocket,
    echoes: Vec<Waiting>,
}

/// An echo, with its answer so far.
struct Waiting {
    /// Its place among the probes of the call.
    place: usize,
    echo: Echo,
    size: u16,
    sent: Instant,
    answer: EchoResult,
}

impl<'a> Group<'a> {
    fn new(socket: &'a EchoSocket, probes: &[(usize, Probe)]) -> Self {
        // The answers to an earlier group are late.
        let token = token();
        let waiting = |(sequence, (place, probe)): (u16, &(usize, Probe))| Waiting {
            place: *place,
            echo: Echo { to: probe.to, sequence, token },
            size: probe.size,
            sent: Instant::now(),
            answer: EchoResult::Nothing,
        };
        Self { socket, echoes: (0..).zip(probes).map(waiting).collect() }
    }

    /// Sends the echoes, repeats those without an answer, and returns all answers.
    fn run(mut self, patience: Duration) -> io::Result<Vec<(usize, EchoResult)>> {
        let start = Instant::now();
        for round in 1..=ROUNDS {
            for k in 0..self.echoes.len() {
                let waiting = &mut self.echoes[k];
                if waiting.answer != EchoResult::Nothing {
                    continue;
                }
                waiting.sent = Instant::now();
                if let Err(answer) = self.socket.send(&waiting.echo, waiting.size) {
                    waiting.answer = answer;
                }
                if k % BURST == BURST - 1 {
                    self.listen(Instant::now() + BURST_PAUSE)?;
                }
            }
            self.listen(start + patience * round / ROUNDS)?;
        }
        Ok(self.echoes.into_iter().map(|waiting| (waiting.place, waiting.answer)).collect())
    }

    /// Reads answers until all are there, or until `end`.
    fn listen(&mut self, end: Instant) -> io::Result<()> {
        while self.echoes.iter().any(|waiting| waiting.answer == EchoResult::Nothing) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let Some((echo, message)) = self.receive(left)? else { continue };
            let waiting = self.echoes.get_mut(usize::from(echo.sequence));
            let is_asked = |waiting: &&mut Waiting| {
                waiting.echo == echo && waiting.answer == EchoResult::Nothing
            };
            if let Some(waiting) = waiting.filter(is_asked) {
                waiting.answer = match message {
                    IcmpMessage::Reply => EchoResult::Reply(waiting.sent.elapsed()),
                    IcmpMessage::TooBig(most) => EchoResult::TooBig(Some(most)),
                };
            }
        }
        Ok(())
    }

    /// Waits at most `left` for a message. Returns `None` if no message came, or it is not about an
    /// echo of ours.
    fn receive(&self, left: Duration) -> io::Result<Option<(Echo, IcmpMessage)>> {
        self.socket.inbox().set_read_timeout(Some(left))?;
        match self.socket.receive() {
            Ok(message) => Ok(message),
            // A signal interrupts a call that has a timeout.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use flannel_netlink::testing::{Netns, in_netns, ip};
    use test_support::forge::{EchoRequest, RawIcmp, packet, reply, too_big};

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
            assert!(
                answers.iter().all(|answer| matches!(answer, EchoResult::Reply(_))),
                "{answers:?}"
            );
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
                    assert!(matches!(near[0], EchoResult::Reply(_)), "{near:?}");
                }
                for thread in silent {
                    assert_eq!(thread.join().unwrap(), [EchoResult::Nothing]);
                }
            });
        });
    }

    /// The addresses of this host, of the host that is asked, and of a third one.
    fn hosts(family: Family) -> [IpAddr; 3] {
        let text = match family {
            Family::V4 => ["192.0.2.1", "192.0.2.2", "192.0.2.3"],
            Family::V6 => ["2001:db8::1", "2001:db8::2", "2001:db8::3"],
        };
        text.map(|address| address.parse().unwrap())
    }

    /// The message, with another byte at this offset.
    fn with_other(icmp: &[u8], at: usize) -> Vec<u8> {
        let mut other = icmp.to_vec();
        other[at] ^= 1;
        other
    }

    /// Sends messages about an echo that each have one thing wrong.
    fn forge(family: Family, raw: &RawIcmp, request: &EchoRequest) {
        let [host, asked, third] = hosts(family);
        let is_v6 = family == Family::V6;
        let quote = |to, icmp: &[u8]| too_big(is_v6, &packet(host, to, icmp), 600);
        raw.send(third, host, &reply(&request.icmp));
        raw.send(third, host, &quote(third, &request.icmp));
        // The sequence number, the secret and the token.
        for at in (6..8).chain(8..24) {
            let other = with_other(&request.icmp, at);
            raw.send(asked, host, &reply(&other));
            raw.send(asked, host, &quote(asked, &other));
        }
        // RFC 792 demands eight bytes, and these end before the token.
        for bytes in [8, 16, 23] {
            raw.send(asked, host, &quote(asked, &request.icmp[..bytes]));
        }
    }

    #[test]
    fn an_answer_counts_only_with_all_numbers_of_the_echo_and_from_the_address_asked() {
        in_netns(|| {
            let far = Netns::new().unwrap();
            ip(&format!("link add eth0 type veth peer name eth0 netns {}", far.path().display()));
            for family in Family::BOTH {
                let [host, asked, third] = hosts(family);
                let len = if family == Family::V4 { "/24" } else { "/64 nodad" };
                ip(&format!("addr add {host}{len} dev eth0"));
                far.run(|| {
                    ip(&format!("addr add {asked}{len} dev eth0"));
                    ip(&format!("addr add {third}{len} dev eth0"));
                });
            }
            ip("link set eth0 up");
            far.run(|| {
                ip("link set eth0 up");
                for file in ["ipv4/icmp_echo_ignore_all", "ipv6/icmp/echo_ignore_all"] {
                    std::fs::write(format!("/proc/sys/net/{file}"), "1").unwrap();
                }
            });
            let over = AtomicBool::new(false);
            // Sends every message that is forged, and then those that `right` makes.
            let answer = |family, right: fn(Family, &RawIcmp, &EchoRequest)| {
                let raw = RawIcmp::open(family == Family::V6);
                while !over.load(Ordering::Relaxed) {
                    if let Some(request) = raw.next_echo(Duration::from_millis(50)) {
                        forge(family, &raw, &request);
                        right(family, &raw, &request);
                    }
                }
            };
            let probes = Family::BOTH.map(|family| Probe { to: hosts(family)[1], size: 1400 });
            let asked = |right: fn(Family, &RawIcmp, &EchoRequest), patience| {
                std::thread::scope(|scope| {
                    over.store(false, Ordering::Relaxed);
                    for family in Family::BOTH {
                        let far = &far;
                        let answer = &answer;
                        scope.spawn(move || far.run(|| answer(family, right)));
                    }
                    let answers = echo(&probes, patience);
                    over.store(true, Ordering::Relaxed);
                    answers.unwrap()
                })
            };
            let nothing = asked(|_, _, _| {}, Duration::from_secs(3));
            assert_eq!(nothing, [EchoResult::Nothing, EchoResult::Nothing]);
            let replied = asked(
                |family, raw, request| {
                    let [host, asked, _] = hosts(family);
                    raw.send(asked, host, &reply(&request.icmp));
                },
                Duration::from_secs(20),
            );
            assert!(
                replied.iter().all(|answer| matches!(answer, EchoResult::Reply(_))),
                "{replied:?}"
            );
            let reported = asked(
                |family, raw, request| {
                    let [host, asked, router] = hosts(family);
                    let quoted = packet(host, asked, &request.icmp[..24]);
                    raw.send(router, host, &too_big(family == Family::V6, &quoted, 1300));
                },
                Duration::from_secs(20),
            );
            assert_eq!(reported, [EchoResult::TooBig(Some(1300)), EchoResult::TooBig(Some(1300))]);
        });
    }

    /// A host behind a router whose far side takes only 1400 bytes.
    #[test]
    fn sizes_are_exact_and_the_mtu_of_a_router_is_reported() {
        in_netns(|| {
            let router = Netns::new().unwrap();
            let far = Netns::new().unwrap();
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
            let replied = |n: usize| matches!(answers[n], EchoResult::Reply(_));
            assert!([0, 1, 3, 6, 7, 10, 11].into_iter().all(replied), "{answers:?}");
            for n in [2, 8] {
                assert_eq!(answers[n], EchoResult::TooBig(Some(1400)), "{:?}", probes[n]);
            }
            for n in [4, 9] {
                assert_eq!(answers[n], EchoResult::TooBig(None), "{:?}", probes[n]);
            }
            assert!(matches!(answers[5], EchoResult::NotSent(_)), "{answers:?}");
            // A route's MTU limits no echo.
            for router in ["192.0.2.2", "2001:db8:1::2"] {
                ip(&format!("route replace default via {router} mtu 1300"));
            }
            let full = [probe("198.51.100.9", 1400), probe("2001:db8:2::9", 1400)];
            let answers = echo(&full, Duration::from_secs(20)).unwrap();
            assert!(
                answers.iter().all(|answer| matches!(answer, EchoResult::Reply(_))),
                "{answers:?}"
            );
            let nobody = echo(&[probe("192.0.2.99", 64)], Duration::from_millis(100)).unwrap();
            assert_eq!(nobody, [EchoResult::Nothing]);
        });
    }
}
