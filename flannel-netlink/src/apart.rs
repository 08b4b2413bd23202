//! Two threads that work at the same time get a processor each.
//!
//! The one thing to know: a kernel puts a thread that another one makes or wakes on the processor of that one more often
//! than not, in virtual machines above all, where it takes an idle processor for a taken one. Two threads that feed each
//! other then take turns for milliseconds while a processor is idle.

use nix::sched::{sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// What another thread is to call that works while this one does: from then on it stays off this one's processor, if it may
/// use others. Where that is not allowed all works as well, but more slowly.
pub(crate) fn beside() -> impl FnOnce() + Send {
    let here = sched_getcpu();
    move || {
        let this = Pid::from_raw(0);
        let outcome = here.and_then(|here| {
            let mut others = sched_getaffinity(this)?;
            others.unset(here)?;
            sched_setaffinity(this, &others)
        });
        if let Err(error) = outcome {
            tracing::debug!(%error, "two threads may share a processor");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_thread_stays_off_this_processor_if_there_are_others() {
        let this = Pid::from_raw(0);
        let processors = |of: &nix::sched::CpuSet| {
            (0..nix::sched::CpuSet::count()).filter(|n| of.is_set(*n).unwrap()).collect::<Vec<_>>()
        };
        let allowed = processors(&sched_getaffinity(this).unwrap());
        let apart = beside();
        let there = std::thread::spawn(move || {
            apart();
            sched_getaffinity(this).unwrap()
        });
        let there = processors(&there.join().unwrap());
        assert_eq!(there.len(), (allowed.len() - 1).max(1), "{there:?} of {allowed:?}");
        assert!(there.iter().all(|n| allowed.contains(n)));
        assert_eq!(processors(&sched_getaffinity(this).unwrap()), allowed, "only the other one is moved");
    }
}
