//! Slow answers: lists item by item, and watches.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body_util::channel::Sender;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::answer::status_object;
use super::store::StoredEvent;
use super::{Cut, Shared, lock};

type Out = Sender<Bytes, io::Error>;

/// A list with a pause before each item. With `cut` the connection breaks in the middle.
pub(crate) async fn items(
    mut out: Out,
    metadata: Value,
    items: Vec<Arc<str>>,
    slow: Duration,
    cut: bool,
) {
    let head = format!(r#"{{"kind":"NodeList","apiVersion":"v1","metadata":{metadata},"items":["#);
    let mut batch = head.into_bytes();
    for (n, item) in items.iter().enumerate() {
        if !slow.is_zero() {
            sleep(slow).await;
        }
        if n > 0 {
            batch.push(b',');
        }
        if cut && n >= items.len() / 2 {
            batch.extend_from_slice(&item.as_bytes()[..item.len() / 2]);
            let _ = out.send_data(batch.into()).await;
            return out.abort(io::Error::other("cut by the test"));
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

/// The inputs of a watch, from the time of its start.
pub(crate) struct Signals {
    changes: watch::Receiver<u64>,
    cuts: watch::Receiver<Cut>,
    bookmarks: watch::Receiver<()>,
}

impl Signals {
    pub(crate) fn of(shared: &Shared) -> Self {
        Self {
            changes: shared.changes.subscribe(),
            cuts: shared.cuts.subscribe(),
            bookmarks: shared.bookmarks.subscribe(),
        }
    }
}

/// A watch from a version on.
pub(crate) async fn events(
    shared: Arc<Shared>,
    mut signals: Signals,
    mut out: Out,
    mut at: u64,
    patience: Duration,
) {
    let until = Instant::now() + patience;
    loop {
        signals.changes.mark_unchanged();
        if at < lock(&shared.store).forgotten {
            let _ = out.send_data(error(StatusCode::GONE)).await;
            return;
        }
        for event in since(&shared, at) {
            if out.send_data(event.line).await.is_err() {
                return;
            }
            at = event.version;
        }
        tokio::select! {
            biased;
            _ = signals.cuts.changed() => {
                let how = *signals.cuts.borrow_and_update();
                let last: Vec<Bytes> =
                    since(&shared, at).into_iter().map(|event| event.line).collect();
                return cut(out, last.concat(), how).await;
            }
            _ = signals.changes.changed() => {}
            _ = signals.bookmarks.changed() => {
                let version = lock(&shared.store).version;
                let metadata = json!({ "resourceVersion": version.to_string() });
                let object = json!({ "kind": "Node", "apiVersion": "v1", "metadata": metadata });
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

fn error(code: StatusCode) -> Bytes {
    let text = if code == StatusCode::GONE {
        "too old resource version"
    } else {
        "an error that the test has set"
    };
    line("ERROR", &status_object(code, text))
}

/// The events after a version.
fn since(shared: &Shared, at: u64) -> Vec<StoredEvent> {
    let store = lock(&shared.store);
    let from = store.events.partition_point(|event| event.version <= at);
    let last = store.late.as_ref().map_or(u64::MAX, |late| late.version);
    store.events.range(from..).take_while(|event| event.version <= last).cloned().collect()
}

/// Sends the last events and the end in one part.
async fn cut(mut out: Out, mut last: Vec<u8>, how: Cut) {
    match how {
        Cut::Clean => {}
        Cut::Gone => last.extend(error(StatusCode::GONE)),
        Cut::Error(code) => {
            last.extend(error(StatusCode::from_u16(code).expect("a status that exists")));
        }
        Cut::MidEvent => last.extend_from_slice(
            br#"{"type":"MODIFIED","object":{"metadata":{"name":"half","annotations":{"flannel.al"#,
        ),
    }
    if !last.is_empty() {
        let _ = out.send_data(last.into()).await;
    }
    if how == Cut::MidEvent {
        out.abort(io::Error::other("cut by the test"));
    }
}
