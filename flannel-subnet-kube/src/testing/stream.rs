//! Answers that take their time: lists item by item, and watches.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::channel::Sender;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until};

use super::answer::status_object;
use super::{Cut, Shared, lock};

type Out = Sender<Bytes, io::Error>;

/// A list, with a pause before each item.
pub(crate) async fn items(mut out: Out, metadata: Value, items: Vec<Arc<str>>, slow: Duration) {
    let head = format!(r#"{{"kind":"NodeList","apiVersion":"v1","metadata":{metadata},"items":["#);
    let mut batch = head.into_bytes();
    for (n, item) in items.iter().enumerate() {
        if !slow.is_zero() {
            sleep(slow).await;
        }
        if n > 0 {
            batch.push(b',');
        }
        batch.extend_from_slice(item.as_bytes());
        if (batch.len() > 64 * 1024 || !slow.is_zero())
            && out.send_data(std::mem::take(&mut batch).into()).await.is_err()
        {
            return;
        }
    }
    batch.extend_from_slice(b"]}\n");
    let _ = out.send_data(batch.into()).await;
}

/// A watch from a version on.
pub(crate) async fn events(shared: Arc<Shared>, mut out: Out, mut at: u64, patience: Duration) {
    let until = Instant::now() + patience;
    let (mut changes, mut cuts, mut bookmarks) =
        (shared.changes.subscribe(), shared.cuts.subscribe(), shared.bookmarks.subscribe());
    loop {
        changes.mark_unchanged();
        let (lines, too_old) = {
            let store = lock(&shared.store);
            let from = store.events.partition_point(|(version, _)| *version <= at);
            let lines: Vec<(u64, Bytes)> = store.events.range(from..).cloned().collect();
            (lines, at < store.forgotten)
        };
        if too_old {
            let _ = out.send_data(gone()).await;
            return;
        }
        for (version, line) in lines {
            if out.send_data(line).await.is_err() {
                return;
            }
            at = version;
        }
        tokio::select! {
            biased;
            _ = cuts.changed() => {
                let (_, how) = *cuts.borrow_and_update();
                return cut(out, how).await;
            }
            _ = changes.changed() => {}
            _ = bookmarks.changed() => {
                let version = lock(&shared.store).version;
                let object = json!({ "kind": "Node", "apiVersion": "v1", "metadata": { "resourceVersion": version.to_string() } });
                at = at.max(version);
                if out.send_data(line("BOOKMARK", &object)).await.is_err() {
                    return;
                }
            }
            () = sleep_until(until) => return,
        }
    }
}

fn line(kind: &str, object: &Value) -> Bytes {
    format!("{}\n", json!({ "type": kind, "object": object })).into()
}

fn gone() -> Bytes {
    line("ERROR", &status_object(StatusCode::GONE, "too old resource version"))
}

async fn cut(mut out: Out, how: Cut) {
    match how {
        Cut::Clean => {}
        Cut::Gone => _ = out.send_data(gone()).await,
        Cut::MidEvent => {
            let half = r#"{"type":"MODIFIED","object":{"metadata":{"name":"half","annotations":{"flannel.al"#;
            let _ = out.send_data(half.into()).await;
            out.abort(io::Error::other("cut by the test"));
        }
    }
}
