//! `flannelctl watch`: the status again and again. The one thing to know: the daemon is only asked; nothing waits for it
//! and nothing is woken in it.

use std::io::Write;
use std::time::Duration;

use super::client::Client;
use super::options::Global;
use super::paper::Paper;
use super::{Result, Said, status};

/// To the top left, and everything below goes.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Shows the status every `interval` seconds, for ever; with `live`, on one and the same screen.
pub(crate) async fn watch(
    client: &Client,
    global: &Global,
    paper: &Paper,
    interval: u64,
    live: bool,
) -> Result<Said> {
    let mut shown = None;
    loop {
        let said = status::status(client, global, paper).await?;
        let state = essence(&said);
        if live || shown.as_ref() != Some(&state) {
            let text = match (live, global.json) {
                (true, _) => format!("{CLEAR}{}", said.text),
                (false, true) => format!("{}\n", said.value),
                (false, false) => format!("{}\n", said.text),
            };
            let mut out = std::io::stdout();
            if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
                // Nobody reads on.
                return Ok(Said { text: String::new(), ..said });
            }
            shown = Some(state);
        }
        tokio::time::sleep(Duration::from_secs(interval)).await;
    }
}

/// What of a status is news when it differs: not the time, nor what follows from it.
fn essence(said: &Said) -> serde_json::Value {
    let value = &said.value;
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
        network["repairs"]["total"],
        network["interface"],
        network["mtu"],
    ])
}
