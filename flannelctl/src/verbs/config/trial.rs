//! The answer of this node's daemon: whether it could build a network from a config.

use flannel_api::{Client, ProblemCause};
use flannel_core::json::compact;
use serde_json::json;

use crate::Output;
use crate::terminal::{Style, Terminal};

/// What this node says about a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Trial {
    /// It can build the network, but does this differently than the config says.
    Fits(Vec<ProblemCause>),
    /// It cannot, for this reason.
    Obstacle(String),
    /// It could not be asked, for this reason.
    NotAsked(String),
}

impl Trial {
    /// Asks the daemon of this node. It makes the devices of the network and deletes them again.
    pub(super) fn of(client: &Client, config: &str) -> Self {
        match client.trial(&compact(config)) {
            Ok(report) if !report.tried => {
                Self::NotAsked("its daemon runs no network now".to_owned())
            }
            Ok(report) => match report.obstacle {
                Some(reason) => Self::Obstacle(reason),
                None => Self::Fits(report.warnings),
            },
            Err(error) => Self::NotAsked(error.to_string()),
        }
    }

    /// The reason for which this node cannot use the config, as a mistake.
    pub(super) fn mistake(&self) -> Option<String> {
        match self {
            Self::Obstacle(reason) => Some(format!("this node cannot build the network: {reason}")),
            Self::Fits(_) | Self::NotAsked(_) => None,
        }
    }

    /// Adds the answer to the output.
    pub(super) fn describe(&self, output: &mut Output, terminal: &Terminal) {
        let others = "other nodes were not asked";
        let (style, text) = match self {
            Self::Fits(warnings) if warnings.is_empty() => {
                (Style::Good, format!("it can build the network; {others}"))
            }
            Self::Fits(warnings) => {
                let texts: Vec<String> = warnings.iter().map(ToString::to_string).collect();
                let text = texts.join("; ");
                (Style::Warning, format!("it can build the network; {text}; {others}"))
            }
            Self::Obstacle(reason) => {
                (Style::Warning, format!("it cannot build the network: {reason}; {others}"))
            }
            Self::NotAsked(reason) => (Style::Warning, format!("it was not asked: {reason}")),
        };
        output.text += &terminal.field("this node", style, &text);
        let (obstacle, not_asked) = match self {
            Self::Fits(_) => (None, None),
            Self::Obstacle(reason) => (Some(reason), None),
            Self::NotAsked(reason) => (None, Some(reason)),
        };
        let asked = not_asked.is_none();
        let warnings = if let Self::Fits(warnings) = self { &warnings[..] } else { &[] };
        output.value["this_node"] = json!({
            "asked": asked,
            "obstacle": obstacle,
            "not_asked": not_asked,
            "warnings": warnings,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_obstacle_is_a_mistake_and_each_answer_is_shown() {
        let terminal = Terminal { width: 200, colours: false };
        let reason = || "no such device".to_owned();
        let interface = "eth0".to_owned();
        let reduced = ProblemCause::MtuReduced { interface, configured: 9000, used: 1500 };
        for (trial, part, mistake, asked) in [
            (
                Trial::Fits(vec![]),
                "it can build the network; other nodes were not asked",
                false,
                true,
            ),
            (
                Trial::Fits(vec![reduced]),
                "it can build the network; the config sets Backend.MTU 9000, but eth0 carries only",
                false,
                true,
            ),
            (Trial::Obstacle(reason()), "cannot build the network: no such device", true, true),
            (Trial::NotAsked(reason()), "it was not asked: no such device", false, false),
        ] {
            let mut output = Output { text: String::new(), value: json!({}), ok: true };
            trial.describe(&mut output, &terminal);
            assert!(output.text.contains(part), "{}", output.text);
            assert_eq!(trial.mistake().is_some(), mistake);
            assert_eq!(output.value["this_node"]["asked"], asked);
            assert_eq!(output.value["this_node"]["obstacle"].is_string(), mistake);
        }
    }

    #[test]
    fn a_node_without_a_daemon_is_not_asked() {
        let trial = Trial::of(&Client::at(None), r#"{"Network":"10.1.0.0/16"}"#);
        assert!(matches!(&trial, Trial::NotAsked(why) if why.contains("does not answer")));
    }
}
