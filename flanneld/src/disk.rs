//! Writes to a disk without blocking the runtime: a busy disk takes seconds for a file, and a route is
//! repaired within milliseconds.
//!
//! Writes happen one after the other, in the order of the calls, even if a caller has given up. So old
//! content never replaces new content.

use std::panic::resume_unwind;

use tokio::sync::Mutex;

static TURN: Mutex<()> = Mutex::const_new(());

/// Does what may wait for the disk, on a thread of its own.
///
/// # Cancel safety
/// What has begun is done, before anything that is asked for later, unless the process ends.
pub(crate) async fn run_blocking_in_order<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let turn = TURN.lock().await;
    let work = move || {
        let done = work();
        drop(turn);
        done
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime ends, and whoever waits with it.
            Err(_) => std::future::pending().await,
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[tokio::test]
    async fn nobody_is_kept_waiting_and_the_newer_comes_last() {
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
        // This thread goes on, and who asked first has given up.
        first.abort();
        let second = tokio::spawn(run_blocking_in_order(move || written.send("newer").unwrap()));
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        disk.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(order.iter().collect::<Vec<_>>(), ["older", "newer"]);
    }
}
