//! Record keepers: state of peers outside the kernel.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use super::{Changes, KernelError, Outcome};
use crate::object::{Change, Key, Record};
use crate::remedy::Trouble;

/// Keeps the [`Record`]s of a backend: commands for each peer, a table in another process, rules
/// about its packets.
///
/// The route engine treats records as kernel objects
/// (`flannel_route::record_keepers::WithRecordKeepers`): it puts and deletes them, retries
/// failures, shows them in the status, and adopts the records of earlier runs. All methods are
/// idempotent or read-only, and block. Any thread may call them. A keeper only starts a change that
/// takes long, so that other changes need not wait for it.
#[doc = include_str!("../../docs/record_keeper.md")]
pub trait RecordKeeper: fmt::Debug + Send + Sync {
    /// The name of the keeper in its records ([`Record::keeper`]), unique among all record keepers.
    fn name(&self) -> &'static str;

    /// The records that are in place, also records of an earlier run. A record whose change is
    /// still under way is not included.
    ///
    /// # Errors
    /// The records could not be read.
    fn records(&self) -> Result<Vec<Record>, KernelError>;

    /// Applies changes of the keeper's records as [`Kernel::apply`](super::Kernel::apply) does. A
    /// network that stops waits for this call.
    ///
    /// The outcome of a change that is only started is [`Outcome::Started`]. If the same change of
    /// a record is under way already, it is not started again. Another change of the record begins
    /// after it.
    ///
    /// The end of a started change is an event of [`changes`](Self::changes):
    /// [`Present`](super::KernelEvent::Present) with exactly the record that was put,
    /// [`Deleted`](super::KernelEvent::Deleted) or [`Failed`](super::KernelEvent::Failed). Report
    /// only the end of the change of a record that was started last. The engine would take the end
    /// of an earlier change for the end of the last one, or for a change by another program.
    fn apply(&self, changes: &[Change]) -> Vec<Outcome>;

    /// Opens a stream of the ends of changes, and of changes of records by other programs. Callers
    /// often drop the futures of the stream, so it must be cancel safe ([`Changes::next`]).
    ///
    /// # Errors
    /// The keeper cannot listen.
    fn changes(&self) -> Result<Box<dyn Changes>, KernelError>;

    /// Waits at most `timeout` for the end of all changes of this record that were started, and
    /// returns the outcome of the last one. If it has not ended in time, the outcome is still
    /// [`Outcome::Started`], and the change continues. Blocks. With a `timeout` of zero it returns
    /// at once.
    ///
    /// It is called only for a change for which [`apply`](Self::apply) returned
    /// [`Outcome::Started`]. The default returns [`Outcome::Started`], and is for a keeper that
    /// never returns it.
    fn wait(&self, _key: &Key, _timeout: Duration) -> Outcome {
        Outcome::Started
    }

    /// The packets that this keeper moves or drops itself. `None` if it does not handle packets, or
    /// if their numbers cannot be read now. Blocks. The default is `None`.
    fn traffic(&self) -> Option<Traffic> {
        None
    }

    /// The tunnel packets that this keeper refuses because no accepted peer may send them
    /// ([`SourceCheck`](crate::backend::SourceCheck)). `None` if it does not refuse packets, or if
    /// their numbers cannot be read now. Blocks. The default is `None`.
    fn refused(&self) -> Option<Refused> {
        None
    }

    /// Called when an operator stops the daemon. Records stay in place. A keeper may tell other
    /// programs that this node leaves the network. Blocks. The default does nothing.
    ///
    /// The process may run a daemon again. It then asks
    /// [`Backend::record_keepers`](crate::Backend::record_keepers) for new handles, which must
    /// work.
    fn stop(&self) {}
}

/// The packets that a [`RecordKeeper`] moves or drops itself. The numbers grow. They begin with 0
/// again if the process that counts them was started anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Traffic {
    /// The packets and bytes that were sent to other nodes. `None` if the kernel moves the packets,
    /// and counts them at its device.
    pub sent: Option<PacketCount>,
    /// The packets and bytes that were received from other nodes, or `None` as in [`Self::sent`].
    pub received: Option<PacketCount>,
    /// The number of dropped packets for each reason, such as `no_peer`. A reason without packets
    /// has the number 0.
    pub dropped: BTreeMap<&'static str, u64>,
    /// Problems that make this node drop packets now.
    pub problems: Vec<Trouble>,
}

/// A number of packets, and their size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PacketCount {
    /// The number of packets.
    pub packets: u64,
    /// The number of bytes in all packets together.
    pub bytes: u64,
}

/// The tunnel packets that a [`RecordKeeper`] refuses. The numbers grow. They begin with 0 again if
/// the rules that count them were put anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Refused {
    /// Whether the packets are dropped. If not, they are only counted.
    pub drops: bool,
    /// The number of packets for each reason, such as `stranger`. A reason without packets has the
    /// number 0.
    pub packets: BTreeMap<&'static str, u64>,
    /// Problems: packets are refused for long, or the keeper cannot refuse packets.
    pub problems: Vec<Trouble>,
}

/// Packets that are dropped for a shorter time are not a problem: a new node may send before this
/// node accepts its lease.
const LONG: Duration = Duration::from_secs(30);
/// If the last dropped packet is older, the problem is over. A daemon reads the counts more often.
const RECENT: Duration = Duration::from_secs(310);

/// Finds out from counts of dropped packets whether packets are dropped for long.
///
/// Call [`note`](Self::note) at least every 310 seconds. Otherwise it may miss that packets are
/// dropped all the time.
#[derive(Debug, Default)]
pub struct LongDrops(BTreeMap<&'static str, Seen>);

/// The packets that are dropped for one reason.
#[derive(Debug, Clone, Copy)]
struct Seen {
    count: u64,
    /// When packets were being dropped, or `None` if the count has not grown recently.
    grew: Option<Growth>,
}

/// The times of the first and of the last count that was larger than the count before it.
#[derive(Debug, Clone, Copy)]
struct Growth {
    first: Instant,
    last: Instant,
}

impl LongDrops {
    /// Takes in the present count of a reason. Returns whether packets were dropped for at least 30
    /// seconds, and the last one less than 310 seconds ago.
    pub fn note(&mut self, reason: &'static str, count: u64, now: Instant) -> bool {
        let seen = self.0.entry(reason).or_insert(Seen { count, grew: None });
        seen.grew = seen.grew.filter(|grew| now - grew.last < RECENT);
        // A smaller count comes from a new process or table, which begins with 0.
        if count > seen.count || count > 0 && count < seen.count {
            let first = seen.grew.map_or(now, |grew| grew.first);
            seen.grew = Some(Growth { first, last: now });
        }
        seen.count = count;
        seen.grew.is_some_and(|grew| grew.last - grew.first >= LONG)
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
