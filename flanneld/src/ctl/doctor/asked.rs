//! Asking all peers at once: for echoes, and their daemons.
//!
//! The one thing to know: echoes take a privilege and what the daemons report takes none, so that one of them goes without the
//! other.

use std::time::Duration;

use super::echo::{Answer, Probe, echo};
use super::peers::{Question, Target};
use crate::sounding::{Sounding, sound};

/// So long all echoes together are waited for.
const PATIENCE: Duration = Duration::from_secs(3);

/// What became of one question: the echoes as they were asked for, and what both ends report.
pub(super) struct Asked {
    pub(super) echoes: Vec<(Probe, Answer)>,
    pub(super) sounding: Sounding,
}

/// What became of all of them, and why nobody was asked for echoes, if so.
pub(super) type AllAsked = (Vec<Asked>, Option<String>);

/// Asks all questions at once, one answer for each, in order.
///
/// # Errors
/// Nobody can be asked, and this is why.
pub(super) async fn ask(questions: &[(&Target, Vec<Question>)], port: u16) -> Result<AllAsked, String> {
    let all = || questions.iter().flat_map(|(_, asked)| asked);
    let probes: Vec<Probe> = all().flat_map(Question::probes).collect();
    if probes.is_empty() {
        return Err("nobody was asked: how much pods may send is not known".to_owned());
    }
    let asked = probes.clone();
    let echoes = tokio::task::spawn_blocking(move || echoes(&asked, || echo(&asked, PATIENCE)));
    let soundings: Vec<_> = all()
        .map(|question| (question.tunnel.filter(|_| port != 0), question.public.map(|(address, _)| address)))
        .map(|(tunnel, public)| {
            tokio::spawn(async move { Some(sound(tunnel?.0, public, port, tunnel?.1).await) })
        })
        .collect();
    let (echoes, mute) = echoes.await.map_err(|error| error.to_string())?;
    let mut echoes = probes.into_iter().zip(echoes);
    let mut found = Vec::new();
    for (question, sounding) in all().zip(soundings) {
        let echoes = echoes.by_ref().take(question.probes().count()).collect();
        let sounding = sounding.await.ok().flatten().unwrap_or_default();
        found.push(Asked { echoes, sounding });
    }
    Ok((found, mute))
}

/// The answers to all echoes. What the daemons report needs no privilege, and counts without them.
fn echoes(
    probes: &[Probe],
    echo: impl FnOnce() -> std::io::Result<Vec<Answer>>,
) -> (Vec<Answer>, Option<String>) {
    match echo() {
        Ok(answers) => (answers, None),
        Err(error) => {
            let why = format!("nobody can be asked for echoes: {error} (it takes CAP_NET_RAW)");
            (vec![Answer::NotAsked; probes.len()], Some(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn without_the_privilege_for_echoes_there_are_answers_all_the_same() {
        let probes = [Probe { to: IpAddr::from([10, 1, 7, 0]), size: 64 }; 3];
        let (answers, mute) = echoes(&probes, || Err(std::io::ErrorKind::PermissionDenied.into()));
        assert_eq!(answers, vec![Answer::NotAsked; 3]);
        assert!(mute.unwrap().contains("CAP_NET_RAW"));
        assert_eq!(echoes(&probes[..1], || Ok(vec![Answer::Nothing])), (vec![Answer::Nothing], None));
    }
}
