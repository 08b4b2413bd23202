//! Two threads that work at the same time get a processor each.
//!
//! The one thing to know: a kernel puts a thread that another one makes or wakes on the processor of that one more often
//! than not, in virtual machines above all, where it takes an idle processor for a taken one. Two threads that feed each
//! other then take turns for milliseconds while a processor is idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// The processor of a thread that another one works beside, as it was last noted. Clones are of one thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Here(Arc<AtomicUsize>);

impl Here {
    /// That of this thread.
    pub(crate) fn now() -> Self {
        let here = Self::default();
        here.note();
        here
    }

    /// This thread may have been moved since.
    pub(crate) fn note(&self) {
        if let Ok(processor) = sched_getcpu() {
            self.0.store(processor, Ordering::Relaxed);
        }
    }

    /// What another thread is to call before each part of its work: from then on it stays off the processor that was noted last, if it
    /// may use others. Where that is not allowed all works as well, but more slowly.
    pub(crate) fn beside(&self) -> impl FnMut() + Send + use<> {
        let (here, mut off, mut allowed) = (Arc::clone(&self.0), None, None);
        move || {
            let here = here.load(Ordering::Relaxed);
            if off.replace(here) == Some(here) {
                return;
            }
            if let Err(error) = stay_off(here, &mut allowed) {
                tracing::debug!(%error, "two threads may share a processor");
            }
        }
    }
}

/// `allowed` are the processors of this thread before it was kept off any.
fn stay_off(processor: usize, allowed: &mut Option<CpuSet>) -> nix::Result<()> {
    let this = Pid::from_raw(0);
    let mut others = match allowed {
        Some(allowed) => *allowed,
        None => *allowed.insert(sched_getaffinity(this)?),
    };
    others.unset(processor)?;
    sched_setaffinity(this, &others)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors(of: &CpuSet) -> Vec<usize> {
        (0..CpuSet::count()).filter(|n| of.is_set(*n).unwrap()).collect()
    }

    #[test]
    fn the_other_thread_stays_off_the_processor_of_this_one_wherever_that_is_if_there_are_others() {
        let this = Pid::from_raw(0);
        let allowed = processors(&sched_getaffinity(this).unwrap());
        let here = Here::now();
        let mut apart = here.beside();
        let there = std::thread::spawn({
            let (here, allowed) = (here.clone(), allowed.clone());
            let alone = allowed.len() == 1;
            move || {
                for processor in allowed {
                    here.0.store(processor, Ordering::Relaxed);
                    apart();
                    let there = processors(&sched_getaffinity(this).unwrap());
                    assert!(alone || !there.contains(&processor), "{there:?} beside {processor}");
                }
                processors(&sched_getaffinity(this).unwrap())
            }
        });
        let there = there.join().unwrap();
        assert_eq!(there.len(), (allowed.len() - 1).max(1), "{there:?} of {allowed:?}");
        assert!(there.iter().all(|n| allowed.contains(n)));
        assert_eq!(
            processors(&sched_getaffinity(this).unwrap()),
            allowed,
            "only the other one is moved"
        );
    }
}
