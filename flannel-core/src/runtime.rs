//! Small additions to tokio and std: blocking work, tasks that end with their owner, and locks.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Locks a mutex whose data stay valid if a thread panics while it holds the lock.
pub fn lock<T: ?Sized>(mutex: &std::sync::Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A task that ends when its owner drops it.
#[derive(Debug)]
pub struct Task(AbortHandle);

impl Task {
    /// Spawns a task on the current runtime.
    ///
    /// # Panics
    /// The caller is outside a tokio runtime.
    pub fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(work).abort_handle())
    }

    /// Ends the task now.
    pub fn abort(&self) {
        self.0.abort();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Waits for `event`, or forever if it is `None`.
pub async fn or_never(event: Option<impl Future<Output = ()>>) {
    match event {
        Some(event) => event.await,
        None => std::future::pending().await,
    }
}

/// Runs `work` on a blocking thread of tokio. Dropping the future does not stop work that has
/// begun. If the runtime shuts down before the work begins, the future never ends.
///
/// # Panics
/// `work` panics, or the caller is outside a tokio runtime.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await.map_err(tokio::task::JoinError::try_into_panic) {
        Ok(done) => done,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        Err(Err(_)) => std::future::pending().await,
    }
}

/// Caches the answer to an expensive question. Only one question is under way at a time, and its
/// answer is used for all callers for some time. So many callers cost no more than a few. Clones
/// share the answer.
#[derive(Debug)]
pub struct SharedAnswer<T> {
    keep: Duration,
    known: Arc<Mutex<Option<Known<T>>>>,
}

/// An answer, and the time at which it arrived.
#[derive(Debug)]
struct Known<T> {
    since: Instant,
    answer: Arc<T>,
}

impl<T> Clone for SharedAnswer<T> {
    fn clone(&self) -> Self {
        Self { keep: self.keep, known: Arc::clone(&self.known) }
    }
}

impl<T: Send + Sync + 'static> SharedAnswer<T> {
    /// A cache without an answer. Each answer is used for the time `keep` after it arrived, by the
    /// monotonic clock.
    pub fn new(keep: Duration) -> Self {
        Self { keep, known: Arc::default() }
    }

    /// The cached answer if it is recent. Otherwise calls `ask` on a blocking thread ([`blocking`])
    /// and returns its answer. If another question is under way, waits for the answer to it.
    ///
    /// # Panics
    /// `ask` panics, or the caller is outside a tokio runtime.
    ///
    /// # Cancel safety
    /// Dropping the future does not stop a question that has begun. Other callers wait for it, and
    /// use its answer.
    pub async fn get(&self, ask: impl FnOnce() -> T + Send + 'static) -> Arc<T> {
        let mut known = Arc::clone(&self.known).lock_owned().await;
        if let Some(Known { since, answer }) = &*known
            && since.elapsed() < self.keep
        {
            return Arc::clone(answer);
        }
        blocking(move || {
            let answer = Arc::new(ask());
            *known = Some(Known { since: Instant::now(), answer: Arc::clone(&answer) });
            answer
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn concurrent_calls_share_one_question_also_after_the_first_is_dropped() {
        let shared = SharedAnswer::new(3600 * SECOND);
        let asked = Arc::new(AtomicU32::new(0));
        let (answer, awaited) = mpsc::channel();
        let ask = {
            let asked = Arc::clone(&asked);
            move || {
                asked.fetch_add(1, Ordering::Relaxed);
                awaited.recv().unwrap()
            }
        };
        let first = tokio::spawn({
            let shared = shared.clone();
            async move { shared.get(ask).await }
        });
        while asked.load(Ordering::Relaxed) == 0 {
            tokio::task::yield_now().await;
        }
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        let others: Vec<_> = (0..16)
            .map(|_| {
                let shared = shared.clone();
                let asked = Arc::clone(&asked);
                tokio::spawn(async move {
                    *shared.get(move || asked.fetch_add(1, Ordering::Relaxed)).await
                })
            })
            .collect();
        tokio::task::yield_now().await;
        answer.send(77).unwrap();
        for other in others {
            assert_eq!(other.await.unwrap(), 77);
        }
        assert_eq!(asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_used_for_its_time() {
        let shared = SharedAnswer::new(SECOND);
        let asked = Arc::new(AtomicU32::new(0));
        let ask = async || {
            let asked = Arc::clone(&asked);
            *shared.get(move || asked.fetch_add(1, Ordering::Relaxed)).await
        };
        assert_eq!((ask().await, ask().await), (0, 0));
        tokio::time::advance(SECOND - Duration::from_millis(1)).await;
        assert_eq!(ask().await, 0);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((ask().await, ask().await), (1, 1));
    }

    #[tokio::test]
    async fn a_question_that_panics_is_asked_again() {
        let shared = SharedAnswer::new(3600 * SECOND);
        let failing = shared.clone();
        let failed = tokio::spawn(async move { failing.get(|| panic!("no answer")).await }).await;
        assert!(failed.unwrap_err().is_panic());
        assert_eq!(*shared.get(|| 7).await, 7);
    }
}
