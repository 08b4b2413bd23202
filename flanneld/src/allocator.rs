//! Memory that was freed goes back to the system.
//!
//! The one thing to know: glibc keeps what is freed for the process that freed it, and what thousands of peers need
//! while they arrive (snapshots, listings, batches) is as much as what they leave behind. A daemon that has nothing to do for
//! days is to take no more than it needs: large pieces are given back as they are freed, the rest when the network
//! has come to rest after many changes. Nobody is woken for that otherwise.
//!
//! The only module with `unsafe` code: glibc's functions for this are C functions, and there is no safe binding of them. They
//! take and return numbers, and may be called at any time from any thread.

use std::convert::Infallible;
use std::time::Duration;

use flannel_core::Status;
use tokio::time::sleep;

use crate::observe::{Changes, Observer};

/// After so many changes, or with so many objects more or less, it is worth looking for free pages.
const MANY: u64 = 2048;
/// The network must have been at rest for so long.
const REST: Duration = Duration::from_secs(2);

/// Sets up the allocator of this process; to be called before it has a second thread.
pub(crate) fn set_up() {
    #[cfg(target_env = "gnu")]
    glibc::set_up();
}

/// Gives back what is free whenever a network has come to rest after many changes.
pub(crate) async fn give_back(observer: &Observer) -> Infallible {
    let mut changes = observer.changes();
    let mut seen = Work::default();
    loop {
        seen = rest_after(seen, observer, &mut changes).await;
        #[cfg(target_env = "gnu")]
        glibc::give_back();
        tracing::debug!("free memory was given back");
    }
}

/// What a network has done, and what it holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Work {
    objects: u64,
    changes: u64,
}

impl Work {
    fn of(status: &Status) -> Self {
        Self { objects: status.objects as u64, changes: status.applied + status.repaired }
    }

    fn is_far_from(self, other: Self) -> bool {
        self.objects.abs_diff(other.objects) >= MANY || self.changes.abs_diff(other.changes) >= MANY
    }
}

/// Waits until a network has done much since `seen` and nothing happens any more: what it has done by then.
async fn rest_after(seen: Work, observer: &Observer, changes: &mut Changes) -> Work {
    loop {
        let work = observer
            .status()
            .map(|status| Work::of(&status.borrow()))
            .filter(|work| work.is_far_from(seen));
        tokio::select! {
            () = changes.next() => {}
            () = sleep(REST), if work.is_some() => return work.unwrap_or_default(),
        }
    }
}

#[cfg(target_env = "gnu")]
mod glibc {
    use nix::libc;

    /// What is at least as large is a mapping of its own, in bytes. glibc's own value, but for good: left alone, it grows with
    /// each mapping that is freed.
    const MAPPED: libc::c_int = 128 * 1024;

    pub(super) fn set_up() {
        for (option, value) in [
            // A heap for each thread would keep what the thread once needed; thousands of peers arrive as fast with one.
            (libc::M_ARENA_MAX, 1),
            (libc::M_MMAP_THRESHOLD, MAPPED),
        ] {
            // It fails only for options that this glibc does not have; then all is as it was.
            #[expect(unsafe_code, reason = "mallopt has no safe binding")]
            // SAFETY: it takes two numbers, keeps no reference, and takes the allocator's lock.
            let _ = unsafe { libc::mallopt(option, value) };
        }
    }

    /// Takes as long as it takes to look at each free piece of memory: some milliseconds after 50,000 peers.
    pub(super) fn give_back() {
        #[expect(unsafe_code, reason = "malloc_trim has no safe binding")]
        // SAFETY: it takes a number and touches only memory that is free, under the allocator's lock.
        let _ = unsafe { libc::malloc_trim(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::tests::network;
    use std::sync::Arc;
    use tokio::sync::watch;
    use tokio::time::{Instant, timeout};

    fn status(objects: usize, applied: u64) -> Arc<Status> {
        let mut status = Status::default();
        (status.objects, status.applied) = (objects, applied);
        Arc::new(status)
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_that_rests_after_many_changes_is_waited_for() {
        let observer = Observer::default();
        let mut changes = observer.changes();
        let (_subnets, mut running) = network(Status::default()).await;
        let (sender, receiver) = watch::channel(status(0, 0));
        running.handle.status = receiver;
        let _guard = observer.running(running);
        let day = Duration::from_secs(86_400);
        let mut seen = Work::default();
        // Thousands arrive, for longer than a rest takes; then a few of them go, then most, then all is replaced.
        let story = async {
            for n in 1..=10 {
                sender.send_replace(status(n * 1000, n as u64 * 1000));
                sleep(REST / 2).await;
            }
            std::future::pending::<()>().await;
        };
        let started = Instant::now();
        tokio::select! {
            work = rest_after(seen, &observer, &mut changes) => seen = work,
            () = story => {}
        }
        assert_eq!(
            (seen, started.elapsed() >= REST * 5),
            (Work { objects: 10_000, changes: 10_000 }, true)
        );
        for (objects, applied, many) in
            [(9_900, 10_100, false), (300, 10_100, true), (300, 19_700, true)]
        {
            sender.send_replace(status(objects, applied));
            let work = timeout(day, rest_after(seen, &observer, &mut changes)).await;
            assert_eq!(work.is_ok(), many, "{objects} objects, {applied} changes");
            seen = work.unwrap_or(seen);
        }
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn what_is_free_is_given_back() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        };
        // Small pieces, below one that stays.
        let pieces: Vec<Box<[u8]>> = (0..1 << 18).map(|n| vec![n as u8; 100].into()).collect();
        let last: Box<[u8]> = vec![1; 100].into();
        let before = resident();
        drop(pieces);
        glibc::give_back();
        let after = resident();
        drop(last);
        assert!(
            after + 20_000 < before,
            "{before} KiB with 26 MB of small pieces, {after} KiB without"
        );
    }
}
