//! Sends echoes to all peers and probes the paths to their daemons, concurrently.
//!
//! Echoes need a privilege, path probes need none. Each works without the other.

use std::net::IpAddr;
use std::time::Duration;

use crate::inputs::devices::Devices;
use crate::inputs::echo::{EchoResult, Probe, echo};
use crate::inputs::handshakes::{self, Handshake, Watch};
use crate::inputs::network::Target;
use crate::inputs::peers::Question;
use crate::path_probe::client::{PathProbe, probe};

/// The timeout of the echoes to up to 64 peers.
const ECHO_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout of one step of a search. It is short, because small echoes were answered.
const SEARCH_TIMEOUT: Duration = Duration::from_millis(600);
/// The maximum number of paths that are searched. One repair serves all of them.
const MAX_PATHS: usize = 4;
/// A step of a search divides the remaining range into this many parts.
const PARTS: u32 = 16;
/// The largest number of steps, up to packets of 9,000 bytes.
const STEPS: u32 = 4;
/// The longest time for the questions to up to 64 peers. The looks at encrypted tunnels take it.
/// Probes of paths and echoes take less.
pub const LONGEST: Duration = handshakes::LONGEST;
const _: () = assert!(
    LONGEST.as_millis()
        > ECHO_TIMEOUT.saturating_add(SEARCH_TIMEOUT.saturating_mul(STEPS)).as_millis()
);

/// The answers to one question.
pub struct PeerResults {
    /// The echoes, with their answers.
    pub echoes: Vec<(Probe, EchoResult)>,
    /// The result of the path probe.
    pub path: PathProbe,
    /// The largest echo that passes, in bytes; `None` if the path was not searched. Only paths on
    /// which large echoes are lost are searched.
    pub passes: Option<u16>,
    /// The state of the encrypted tunnel, or `None` without a tunnel, or if it cannot be read.
    pub handshake: Option<Handshake>,
}

impl PeerResults {
    /// Whether the first echo, a small one, has no answer.
    fn is_silent(&self) -> bool {
        self.echoes.first().is_some_and(|(_, answer)| *answer == EchoResult::Nothing)
    }
}

/// The answers to all questions.
pub struct QueryResults {
    /// One for each question, in their order.
    pub peers: Vec<PeerResults>,
    /// Why echoes cannot be sent, or tunnels not be read.
    pub unread: Vec<String>,
}

/// Asks all questions at once. With `bare` some nodes
/// are reached without a tunnel. Their daemons are probed at their public addresses, because
/// nothing may answer at their tunnel addresses.
///
/// # Errors
/// No question can be asked, for this reason.
pub async fn query_peers(
    questions: &[(&Target, Vec<Question>)],
    devices: &Devices,
    bare: bool,
    port: u16,
) -> Result<QueryResults, String> {
    let all = || questions.iter().flat_map(|(_, of_peer)| of_peer);
    let probes: Vec<Probe> = all().flat_map(Question::probes).collect();
    if probes.is_empty() {
        return Err("no peer was asked: the MTU of pods is not known".to_owned());
    }
    // The first look comes before the packets whose arrival the second one shows.
    let watch = Watch::begin(questions, devices, port).await;
    let sent = probes.clone();
    let echoes = tokio::task::spawn_blocking(move || echoes(&sent, || echo(&sent, ECHO_TIMEOUT)));
    let probes_of_paths: Vec<_> = all()
        .map(|question| {
            let tunnel = question.tunnel.filter(|_| question.by_tunnel(devices));
            (tunnel, question.public.map(|(address, _)| address))
        })
        .map(|(tunnel, public)| {
            tokio::spawn(async move {
                if port == 0 { None } else { Some(probe(tunnel, public, bare, port).await) }
            })
        })
        .collect();
    let (echoes, echo_error) = echoes.await.map_err(|error| error.to_string())?;
    let all_echoes: Vec<(Probe, EchoResult)> = probes.into_iter().zip(echoes).collect();
    let paths = lossy(all().map(|question| question.probes().count()), &all_echoes);
    let passes = tokio::task::spawn_blocking(move || {
        search(paths, |probes| echo(probes, SEARCH_TIMEOUT).ok())
    });
    let searched = passes.await.ok().flatten().unwrap_or_default();
    let mut echoes = all_echoes.into_iter();
    let mut found = Vec::new();
    for (question, path) in all().zip(probes_of_paths) {
        let echoes = echoes.by_ref().take(question.probes().count()).collect();
        let path = path.await.ok().flatten().unwrap_or_default();
        let passes = passes_to(question, &searched);
        found.push(PeerResults { echoes, path, passes, handshake: None });
    }
    let mut unread: Vec<String> = echo_error.into_iter().collect();
    let handshakes = match watch {
        Ok(Some(watch)) => {
            let silent: Vec<bool> = found.iter().map(PeerResults::is_silent).collect();
            watch.end(&silent).await
        }
        Ok(None) => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    match handshakes {
        Ok(all) => found.iter_mut().zip(all).for_each(|(found, of)| found.handshake = of),
        Err(error) => unread.push(error),
    }
    Ok(QueryResults { peers: found, unread })
}

/// A path on which packets of `passes` bytes arrive, and packets of `lost` bytes do not.
#[derive(Debug, Clone, Copy)]
struct Path {
    to: IpAddr,
    passes: u16,
    lost: u16,
}

/// At most `MAX_PATHS` paths on which only small packets arrive and no router reports its MTU.
/// `counts` is the number of echoes of each question. The first two take the path of packets of
/// pods.
fn lossy(counts: impl Iterator<Item = usize>, echoes: &[(Probe, EchoResult)]) -> Vec<Path> {
    let mut rest = echoes;
    counts
        .filter_map(|count| {
            let (mine, others) = rest.split_at(count);
            rest = others;
            match mine {
                [
                    (small, EchoResult::Reply(_)),
                    (full, EchoResult::Nothing | EchoResult::TooBig(None | Some(0))),
                    ..,
                ] => Some(Path { to: small.to, passes: small.size, lost: full.size }),
                _ => None,
            }
        })
        .take(MAX_PATHS)
        .collect()
}

/// The size that passes to the peer of a question, if its path was searched.
fn passes_to(question: &Question, searched: &[Path]) -> Option<u16> {
    let to = question.probes().next()?.to;
    searched.iter().find(|path| path.to == to).map(|path| path.passes)
}

/// Finds the largest packet that passes on each path; `None` if no echo can be sent.
fn search(
    mut paths: Vec<Path>,
    echo: impl Fn(&[Probe]) -> Option<Vec<EchoResult>>,
) -> Option<Vec<Path>> {
    while paths.iter().any(|path| path.lost - path.passes > 1) {
        let sizes = |path: &Path| {
            let from = u32::from(path.passes);
            let room = u32::from(path.lost - path.passes);
            let mut sizes: Vec<u32> = (1..PARTS).map(|part| from + room * part / PARTS).collect();
            // At least the next size, if there is less room than parts.
            sizes.push(from + 1);
            sizes.retain(|size| *size > from && *size < from + room);
            sizes.sort_unstable();
            sizes.dedup();
            sizes.into_iter().filter_map(|size| u16::try_from(size).ok()).collect::<Vec<_>>()
        };
        let probes: Vec<Probe> = paths
            .iter()
            .flat_map(|path| sizes(path).into_iter().map(|size| Probe { to: path.to, size }))
            .collect();
        let mut answers = echo(&probes)?.into_iter();
        for path in &mut paths {
            let sent = sizes(path);
            let arrived: Vec<u16> = sent
                .iter()
                .zip(answers.by_ref())
                .filter_map(|(size, answer)| {
                    matches!(answer, EchoResult::Reply(_)).then_some(*size)
                })
                .collect();
            path.passes = arrived.last().copied().unwrap_or(path.passes);
            path.lost = sent.into_iter().find(|size| *size > path.passes).unwrap_or(path.lost);
        }
    }
    Some(paths)
}

/// The answers to all echoes. Without the privilege each is [`EchoResult::NotAllowed`].
fn echoes(
    probes: &[Probe],
    echo: impl FnOnce() -> std::io::Result<Vec<EchoResult>>,
) -> (Vec<EchoResult>, Option<String>) {
    match echo() {
        Ok(answers) => (answers, None),
        Err(error) => {
            let why = format!("echoes cannot be sent: {error} (they need CAP_NET_RAW)");
            (vec![EchoResult::NotAllowed; probes.len()], Some(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_privilege_each_echo_is_reported_as_not_allowed() {
        let probes = [Probe { to: IpAddr::from([10, 1, 7, 0]), size: 64 }; 3];
        let (answers, echo_error) =
            echoes(&probes, || Err(std::io::ErrorKind::PermissionDenied.into()));
        assert_eq!(answers, vec![EchoResult::NotAllowed; 3]);
        assert!(echo_error.unwrap().contains("CAP_NET_RAW"));
        assert_eq!(
            echoes(&probes[..1], || Ok(vec![EchoResult::Nothing])),
            (vec![EchoResult::Nothing], None)
        );
    }

    #[test]
    fn a_size_that_passes_counts_for_its_peer_only() {
        use crate::fixture::{devices, target};

        let of = |subnet: &str| {
            let target = Target { subnets: vec![subnet.parse().unwrap()], ..target("vxlan") };
            target.questions(&devices()).remove(0)
        };
        let path =
            |n: u8, passes| Path { to: IpAddr::from([10, 1, n, 0]), passes, lost: passes + 1 };
        let searched = [path(7, 1400), path(8, 1300)];
        let passes = ["10.1.7.0/24", "10.1.8.0/24", "10.1.9.0/24"]
            .map(|subnet| passes_to(&of(subnet), &searched));
        assert_eq!(passes, [Some(1400), Some(1300), None]);
    }

    #[test]
    fn the_largest_size_that_passes_is_found_exactly() {
        let to = |n: u8| IpAddr::from([10, 1, n, 0]);
        let path = |n, lost| Path { to: to(n), passes: 64, lost };
        for (most, lost) in [
            ([1350, 1400], 1450),
            ([64, 1449], 1450),
            ([65, 65], 1450),
            ([8000, 8949], 8950),
            ([64, 64], 66),
        ] {
            let steps = std::cell::Cell::new(0_u32);
            let found = search(vec![path(7, lost), path(8, lost)], |probes| {
                steps.set(steps.get() + 1);
                assert!(probes.len() <= 64, "one group of echoes");
                let answer = |probe: &Probe| {
                    if probe.size <= most[usize::from(probe.to == to(8))] {
                        EchoResult::Reply(Duration::ZERO)
                    } else {
                        EchoResult::Nothing
                    }
                };
                Some(probes.iter().map(answer).collect())
            });
            assert_eq!(found.unwrap().iter().map(|path| path.passes).collect::<Vec<_>>(), most);
            assert!(steps.get() <= STEPS, "{} steps", steps.get());
        }
        assert_eq!(search(Vec::new(), |_| None).unwrap().len(), 0);
        assert!(search(vec![path(7, 1450)], |_| None).is_none());
    }

    #[test]
    fn only_paths_that_lose_large_packets_silently_are_searched() {
        let probe = |n: u8, size| Probe { to: IpAddr::from([10, 1, n, 0]), size };
        let ok = EchoResult::Reply(Duration::ZERO);
        let none = EchoResult::Nothing;
        let echoes: Vec<_> = [
            (probe(7, 64), ok.clone()),
            (probe(7, 1450), none.clone()),
            (probe(107, 64), ok.clone()),
            (probe(107, 1500), ok.clone()),
            (probe(8, 64), ok.clone()),
            (probe(8, 1450), EchoResult::TooBig(Some(1400))),
            (probe(9, 64), none.clone()),
            (probe(9, 1450), none.clone()),
            (probe(10, 64), ok.clone()),
            (probe(10, 1450), ok),
        ]
        .into();
        let found: Vec<_> = lossy([4, 2, 2, 2].into_iter(), &echoes)
            .iter()
            .map(|path| (path.to.to_string(), path.lost))
            .collect();
        assert_eq!(found, [("10.1.7.0".to_owned(), 1450)]);
    }
}
