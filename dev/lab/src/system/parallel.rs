//! Work on many items with a few threads.

use std::sync::Mutex;

use flannel_core::runtime::lock;

use crate::error::Result;
use crate::system::interrupt::Interrupter;

/// Calls `work` for each item, on at most `workers` threads.
///
/// # Errors
/// The first error of an item, or [`Error::Interrupted`](crate::Error::Interrupted).
pub(crate) fn for_each<T: Sync>(
    items: &[T],
    workers: usize,
    interrupter: &Interrupter,
    work: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let queue = Mutex::new(items.iter());
    let take = || lock(&queue).next();
    let run = || {
        // `take` releases the lock before the work begins.
        while let Some(item) = take() {
            interrupter.check()?;
            work(item)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers.min(items.len())).map(|_| scope.spawn(run)).collect();
        let mut result = Ok(());
        for thread in threads {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(ended);
        }
        result
    })
}
