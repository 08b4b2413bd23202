//! Blocking work on another thread, so that it does not block the runtime.
//!
//! A busy disk may need seconds to write a file. Routes must be repaired within milliseconds
//! meanwhile. Writes happen in the order of the calls, even if a caller drops its future, so old
//! content never replaces new content.

use flannel_core::runtime::blocking;
use tokio::sync::Mutex;

static TURN: Mutex<()> = Mutex::const_new(());

/// [`blocking`], after the work of all earlier calls.
///
/// # Cancel safety
/// Work that has begun is done before the work of later calls, unless the process ends.
pub(crate) async fn run_blocking_in_order<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let turn = TURN.lock().await;
    blocking(move || {
        let done = work();
        drop(turn);
        done
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn writes_do_not_block_the_runtime_and_keep_their_order() {
        let (disk, busy) = channel::<()>();
        let (written, order) = channel();
        let older = written.clone();
        let (began, begin) = tokio::sync::oneshot::channel();
        let first = tokio::spawn(run_blocking_in_order(move || {
            let _ = began.send(());
            busy.recv().unwrap();
            older.send("older").unwrap();
        }));
        begin.await.unwrap();
        // This thread continues, and the first caller drops its future.
        first.abort();
        let second = tokio::spawn(run_blocking_in_order(move || written.send("newer").unwrap()));
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        disk.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(order.iter().collect::<Vec<_>>(), ["older", "newer"]);
    }
}
