//! `flannelctl watch`: shows the status repeatedly.
//!
//! It polls the daemon, so a change in the daemon causes no work for this.

use std::time::Duration;

use crate::error::Result;
use crate::terminal::{self, Terminal};
use crate::{Context, Output, status};

/// Moves the cursor to the top left and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Shows the status every `interval` seconds, for ever. With `live`, redraws the screen.
pub(crate) async fn watch(context: Context<'_>, interval: u64, live: bool) -> Result<Output> {
    let mut shown = None;
    loop {
        let output = status::status(context).await?;
        let state = essence(&output);
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
fn essence(output: &Output) -> serde_json::Value {
    let value = &output.value;
    let network = &value["network"];
    serde_json::json!([
        value["running"],
        value["problems"],
        value["findings"],
        value["store"]["error"],
        network["in_sync"],
        network["lease"]["ownership"],
        network["peers"],
        network["failing"]["total"],
        network["paths"]["failing"],
        network["repairs"]["total"],
        network["interface"],
        network["mtu"],
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn a_screen_replaces_the_previous_one() {
        let output = |terminal: &Terminal| {
            let report = flannel_api::testing::status_report();
            Output {
                text: status::page(&report, terminal),
                value: serde_json::json!(report),
                ok: report.ready,
            }
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
        let output = |change: fn(&mut flannel_api::StatusReport)| {
            let mut report = flannel_api::testing::status_report();
            change(&mut report);
            Output { text: String::new(), value: serde_json::json!(report), ok: true }
        };
        let before = essence(&output(|_| {}));
        assert_eq!(essence(&output(|report| report.time += 60.0)), before);
        assert_ne!(essence(&output(|report| report.problems.clear())), before);
        assert_ne!(essence(&output(|report| report.network.as_mut().unwrap().mtu = 1400)), before);
    }
}
