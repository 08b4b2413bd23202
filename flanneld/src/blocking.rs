//! Blocking work on another thread, so that it does not block the runtime.
//!
//! A busy disk may need seconds to write a file. Routes must be repaired within milliseconds
//! meanwhile.

use std::sync::Arc;

use flannel_core::runtime::blocking;
use flannel_subnet::FileLock;
use tokio::sync::Mutex;

/// Runs blocking work in the order of the calls, even if a caller drops its future, so old content
/// of a file never replaces new content. Clones are the same queue.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockingQueue {
    turn: Arc<Mutex<()>>,
    /// Work that goes on after its daemon was dropped keeps the lock. So the next daemon with this
    /// state directory begins after it.
    state_dir: Option<Arc<FileLock>>,
}

impl BlockingQueue {
    /// A queue whose work needs the lock of the state directory.
    pub(crate) fn new(state_dir: FileLock) -> Self {
        Self { turn: Arc::default(), state_dir: Some(Arc::new(state_dir)) }
    }

    /// Another queue, whose work needs the same lock.
    pub(crate) fn another(&self) -> Self {
        Self { turn: Arc::default(), state_dir: self.state_dir.clone() }
    }

    /// [`blocking`], after the work of all earlier calls.
    ///
    /// # Cancel safety
    /// Work that has begun is done before the work of later calls, unless the process ends.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let state_dir = self.state_dir.clone();
        blocking(move || {
            let done = work();
            drop(turn);
            drop(state_dir);
            done
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use flannel_options::state_dir;

    use super::*;

    #[tokio::test]
    async fn writes_do_not_block_the_runtime_and_keep_their_order() {
        let (disk, busy) = channel::<()>();
        let (written, order) = channel();
        let older = written.clone();
        let (began, begin) = tokio::sync::oneshot::channel();
        let queue = BlockingQueue::default();
        let first = tokio::spawn({
            let queue = queue.clone();
            async move {
                queue
                    .run(move || {
                        let _ = began.send(());
                        busy.recv().unwrap();
                        older.send("older").unwrap();
                    })
                    .await;
            }
        });
        begin.await.unwrap();
        // This thread continues, and the first caller drops its future.
        first.abort();
        let second =
            tokio::spawn(async move { queue.run(move || written.send("newer").unwrap()).await });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        disk.send(()).unwrap();
        second.await.unwrap();
        assert_eq!(order.iter().collect::<Vec<_>>(), ["older", "newer"]);
    }

    #[tokio::test]
    async fn work_of_a_daemon_that_was_dropped_keeps_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let queue = BlockingQueue::new(state_dir::lock(dir.path()).await.unwrap());
        let (disk, busy) = channel::<()>();
        let (began, begin) = tokio::sync::oneshot::channel();
        let writer = tokio::spawn(async move {
            queue
                .run(move || {
                    let _ = began.send(());
                    busy.recv().unwrap();
                })
                .await;
        });
        begin.await.unwrap();
        writer.abort();
        let mut next = std::pin::pin!(state_dir::lock(dir.path()));
        tokio::select! {
            biased;
            locked = &mut next => panic!("{locked:?}"),
            () = tokio::task::yield_now() => {}
        }
        disk.send(()).unwrap();
        next.await.unwrap();
    }
}
