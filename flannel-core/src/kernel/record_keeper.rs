//! Record keepers: the state of peers that is not in the kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::{Changes, KernelError, Outcome};
use crate::object::{Change, Key, Record};
use crate::remedy::Trouble;

/// Keeps the [`Record`]s of a backend: commands for each peer, a table in another process, rules
/// about its packets.
///
/// The route engine, with `flannel_route::record_keepers::WithRecordKeepers`, treats records as
/// kernel objects: it puts and deletes them, retries failures, shows them in the status, and adopts
/// those of earlier runs. The methods follow the rules of [`Kernel`](super::Kernel). A change that
/// takes long is only started, so that it delays no other change.
#[doc = include_str!("../../docs/record_keeper.md")]
pub trait RecordKeeper: fmt::Debug + Send + Sync {
    /// The name in its records, unique among all record keepers.
    fn name(&self) -> &'static str;

    /// The records that are in place, including those of an earlier run. A record whose change is
    /// still under way is not included.
    ///
    /// # Errors
    /// The records could not be read.
    fn records(&self) -> Result<Vec<Record>, KernelError>;

    /// Applies changes of its records as [`Kernel::apply`](super::Kernel::apply) does.
    ///
    /// The outcome of a change that is only started is [`Outcome::Started`]. A change that is under
    /// way already is not started again. Another change of the same record begins after it.
    ///
    /// The end of a change is an event: [`Present`](super::KernelEvent::Present) with exactly the
    /// record that was put, [`Deleted`](super::KernelEvent::Deleted) or
    /// [`Failed`](super::KernelEvent::Failed). It ends the change of this record that was started
    /// last. Do not report the ends of earlier changes. The engine would take such an event for the
    /// end of the last change, or for a change by another program.
    ///
    /// Called on any thread. A network that stops waits for this call.
    fn apply(&self, changes: &[Change]) -> Vec<Outcome>;

    /// Starts to listen for the ends of changes, and for changes of records by other programs. The
    /// futures of the stream are dropped often, so it must be cancel safe ([`Changes::next`]).
    ///
    /// # Errors
    /// The keeper cannot listen.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;

    /// Waits at most `timeout` for the end of all changes of this record that were started, and
    /// returns the result of the last one. Blocks. With a `timeout` of zero it returns at once.
    ///
    /// # Errors
    /// The last change failed. If it has not ended in time, the error is
    /// [`KernelError::TimedOut`], and the change continues.
    fn wait(&self, key: &Key, timeout: Duration) -> Result<(), KernelError>;

    /// The packets that it moves or drops itself; `None`: there are none, or they are not known
    /// now. Blocks. The default is `None`.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// The packets of a tunnel that it refuses because they do not come from a peer with a source
    /// of its own; `None`: it does not refuse any, or they are not known now. Blocks. The default
    /// is `None`.
    fn refused(&self) -> Option<Refused> {
        None
    }

    /// The daemon ends, because somebody stops it. Records stay in place. A record keeper may tell
    /// other programs that this node goes. Blocks. The default does nothing.
    ///
    /// The same program may run a daemon again. Then it asks `Backend::record_keepers` for new
    /// handles, and those must work.
    fn stop(&self) {}
}

/// The packets that a [`RecordKeeper`] moves or drops itself, counted since it began.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets that were sent to other nodes, and their bytes. `None`: the kernel moves them, and
    /// counts them at its device.
    pub sent: Option<(u64, u64)>,
    /// Packets that were received from other nodes, and their bytes. `None` as for [`Self::sent`].
    pub received: Option<(u64, u64)>,
    /// Packets that were dropped, by reason, such as `no_peer`. All reasons are there.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Why packets are being dropped that should not be.
    pub problems: Vec<Trouble>,
}

/// The packets of a tunnel that a [`RecordKeeper`] refuses, counted since it began.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refused {
    /// Whether they are dropped. If not, they are only counted.
    pub drops: bool,
    /// The packets by reason, such as `stranger`. All reasons are there.
    pub packets: BTreeMap<&'static str, u64>,
    /// What is wrong if some of them grow, or if the keeper cannot refuse packets.
    pub problems: Vec<Trouble>,
}

/// The time for which packets must be dropped before it is a problem. A new node may send before
/// its lease is accepted here.
const LONG: Duration = Duration::from_secs(30);
/// The age from which on dropped packets are no longer a problem. A daemon looks at this interval
/// at least.
const RECENT: Duration = Duration::from_secs(310);

/// Tells whether packets are dropped for long, from counts that somebody looks at now and then.
#[derive(Debug, Default)]
pub struct LongDrops(BTreeMap<&'static str, Seen>);

/// Packets that are dropped for one reason.
#[derive(Debug, Clone, Copy)]
struct Seen {
    count: u64,
    /// The first and the last time at which the count had grown; `None`: not recently.
    grew: Option<(Instant, Instant)>,
}

impl LongDrops {
    /// Takes in a count. Returns whether packets were dropped for 30 seconds at least, the last one
    /// less than 310 seconds ago.
    pub fn note(&mut self, reason: &'static str, count: u64, now: Instant) -> bool {
        let seen = self.0.entry(reason).or_insert(Seen { count, grew: None });
        seen.grew = seen.grew.filter(|(_, last)| now - *last < RECENT);
        // A new process or table begins with 0.
        if count > seen.count || count > 0 && count < seen.count {
            seen.grew = Some((seen.grew.map_or(now, |(first, _)| first), now));
        }
        seen.count = count;
        seen.grew.is_some_and(|(first, last)| last - first >= LONG)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_are_dropped_for_long_are_a_problem() {
        let start = Instant::now();
        let mut drops = LongDrops::default();
        let mut at =
            |seconds, count| drops.note("why", count, start + Duration::from_secs(seconds));
        assert_eq!(
            [at(0, 5), at(1, 6), at(20, 7), at(40, 8), at(60, 8)],
            [false, false, false, true, true]
        );
        assert!(!at(1000, 8), "it is over");
    }
}
