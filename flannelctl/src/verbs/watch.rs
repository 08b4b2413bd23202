//! `flannelctl watch`: shows the status repeatedly.
//!
//! It polls the daemon, so a change in the daemon causes no work for this.

use std::mem::{Discriminant, discriminant};
use std::time::Duration;

use flannel_api::{
    Counted, Finding, InterfaceReport, NetworkReport, Ownership, PeerReport, Problem,
};

use crate::error::Result;
use crate::terminal::{self, Terminal};
use crate::verbs::status::NodeStatus;
use crate::{Context, Output};

/// Moves the cursor to the top left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Shows the status every `interval` seconds, for ever. With `live`, redraws the screen.
pub(crate) async fn watch(context: Context<'_>, interval: u64, live: bool) -> Result<Output> {
    let mut shown = None;
    loop {
        let status = NodeStatus::read(context).await?;
        let output = status.output(context.terminal);
        let state = Essence::of(&status);
        if live || shown.as_ref() != Some(&state) {
            let text = screen(&output, live, context.global.json, context.terminal);
            if terminal::write(&text).is_err() {
                // The reader has closed the pipe.
                return Ok(Output { text: String::new(), ..output });
            }
            shown = Some(state);
        }
        tokio::time::sleep(Duration::from_secs(interval)).await;
    }
}

/// One status, printable, which on a terminal replaces the previous one.
fn screen(output: &Output, live: bool, json: bool, terminal: &Terminal) -> String {
    match (live, json) {
        (true, _) => CLEAR.to_owned() + &terminal.printable(&output.text),
        (false, true) => terminal.printable(&format!("{}\n", output.value)),
        (false, false) => terminal.printable(&format!("{}\n", output.text)),
    }
}

/// The part of a status that counts as a change: without times and durations.
#[derive(Debug, PartialEq)]
enum Essence {
    Running {
        problems: Vec<Problem>,
        findings: Vec<Finding>,
        store_error: Option<String>,
        network: Option<Box<NetworkEssence>>,
    },
    Down {
        findings: Vec<Finding>,
    },
}

/// The part of a network's status that counts as a change.
#[derive(Debug, PartialEq)]
struct NetworkEssence {
    in_sync: bool,
    /// The kind of ownership, without the remaining time, which changes all the time.
    ownership: Discriminant<Ownership>,
    peers: Counted<PeerReport>,
    failing: u64,
    failing_paths: Option<u64>,
    repairs: u64,
    interface: InterfaceReport,
    mtu: u32,
}

impl Essence {
    fn of(status: &NodeStatus) -> Self {
        match status {
            NodeStatus::Running(report) => Self::Running {
                problems: report.problems.clone(),
                findings: report.findings.clone(),
                store_error: report.store.as_ref().and_then(|store| store.error.clone()),
                network: report
                    .network
                    .as_ref()
                    .map(|network| Box::new(NetworkEssence::of(network))),
            },
            NodeStatus::Down(left) => Self::Down { findings: left.findings.clone() },
        }
    }
}

impl NetworkEssence {
    fn of(network: &NetworkReport) -> Self {
        Self {
            in_sync: network.in_sync,
            ownership: discriminant(&network.lease.ownership),
            peers: network.peers.clone(),
            failing: network.failing.total,
            failing_paths: network.paths.as_ref().map(|paths| paths.failing),
            repairs: network.repairs.total,
            interface: network.interface.clone(),
            mtu: network.mtu,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn a_screen_replaces_the_previous_one() {
        let output = |terminal: &Terminal| {
            let report = Box::new(flannel_api::testing::status_report());
            NodeStatus::Running(report).output(terminal)
        };
        assert_page("watch", |terminal| {
            let live = screen(&output(terminal), true, false, terminal);
            live.strip_prefix(CLEAR).unwrap().to_owned()
        });
        let terminal = Terminal { width: 80, colours: false };
        let below = screen(&output(&terminal), false, false, &terminal);
        assert!(below.starts_with("flanneld 0.1.0") && below.ends_with("\n\n"), "{below}");
        let json = screen(&output(&terminal), false, true, &terminal);
        assert_eq!((json.lines().count(), json.starts_with('{')), (1, true), "{json}");
        let hostile = Output { text: format!("{CLEAR}\n"), ..output(&terminal) };
        let shown = screen(&hostile, true, false, &terminal);
        assert_eq!(shown, format!("{CLEAR}\\u001b[H\\u001b[2J\n"), "only ours clears the screen");
    }

    #[test]
    fn elapsed_time_does_not_count_as_a_change() {
        let essence = |change: fn(&mut flannel_api::StatusReport)| {
            let mut report = flannel_api::testing::status_report();
            change(&mut report);
            Essence::of(&NodeStatus::Running(Box::new(report)))
        };
        let before = essence(|_| {});
        assert_eq!(essence(|report| report.time += 60.0), before);
        assert_eq!(
            essence(|report| {
                report.network.as_mut().unwrap().lease.ownership =
                    Ownership::Held { remaining: 9.0 };
            }),
            before
        );
        assert_ne!(essence(|report| report.problems.clear()), before);
        assert_ne!(essence(|report| report.network.as_mut().unwrap().mtu = 1400), before);
    }
}
