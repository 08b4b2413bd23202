//! The state of the kernel objects of a network.

mod advisory;
mod histogram;
mod rejection;
mod sorted_map;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

pub use self::advisory::Advisory;
pub use self::histogram::Histogram;
pub use self::rejection::Rejection;
pub use self::sorted_map::SortedMap;
use crate::kernel::{ChangedBy, KernelError};
use crate::lease::{Lease, LeaseSet, Subnets};
use crate::object::{Change, Key, LinkName, Object, ObjectKind};

/// The state of the kernel objects of a network. Objects in place are counted, and only the other
/// objects are listed. So a new status costs O(changes).
///
/// `Default` is the status before the first round. Every field is false, 0, empty or `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Whether the lease set is complete and live, and the kernel has exactly the desired objects.
    pub in_sync: bool,
    /// Whether each desired object is in place or failing. It has no meaning while there is a
    /// `kernel_error`.
    pub settled: bool,
    /// Whether the devices of this node, their addresses and the routes of last resort of this node
    /// are in place.
    pub own_in_place: bool,
    /// Whether the leases come from the store and not from a cache, and are complete.
    pub live: bool,
    /// The leases that the network has taken in. The status does not cover newer leases.
    pub leases: LeaseSet,
    /// The number of peers whose leases are accepted.
    pub peers: usize,
    /// The number of desired objects.
    pub objects: usize,
    /// The number of desired objects of each kind. A kind without objects is not in the map.
    pub by_kind: BTreeMap<ObjectKind, usize>,
    /// The rejected leases, with the reasons.
    pub rejected: SortedMap<Subnets, Rejection>,
    /// The objects that could not be put or deleted.
    pub failing: SortedMap<Key, Failure>,
    /// Why the kernel cannot be read or watched, or `None` if it can.
    pub kernel_error: Option<KernelError>,
    /// Conditions that are not errors, such as two peers with one public address.
    pub advisories: SortedMap<Advisory>,
    /// The number of changes because of leases that were applied since the network started.
    pub applied: u64,
    /// The number of changes that failed since the network started. A repeated change counts again.
    pub refused: u64,
    /// The number of repairs since the network started. A repair restores an object that another
    /// program changed or deleted, or deletes an object that another program added.
    pub repaired: u64,
    /// The number of repairs since the network started, by kind and damage.
    pub repairs: BTreeMap<(ObjectKind, Damage), u64>,
    /// Some repairs, oldest first: the last [`Status::NEWEST_REPAIRS`] repairs, and before them as
    /// many older repairs, which are at least a second apart.
    pub last_repairs: Vec<Arc<Repair>>,
    /// The times from the arrival of leases to the answer of the kernel, for each change because of
    /// leases.
    pub latency: Histogram,
}

impl Status {
    /// The number of newest repairs that [`Status::last_repairs`] always keeps. It keeps at most as
    /// many older ones, so its length is at most twice this number.
    pub const NEWEST_REPAIRS: usize = 16;
}

/// A change that fails.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The change.
    pub change: Change,
    /// The peer to which the object belongs. `None` for objects of this node, and for undesired
    /// objects.
    pub peer: Option<Subnets>,
    /// The error of the last attempt.
    pub error: KernelError,
    /// The time of the first attempt, by the wall clock.
    pub since: SystemTime,
    /// The number of attempts, at least 1.
    pub tries: u32,
}

impl Failure {
    /// The failure of a first attempt at `change`, now.
    pub fn new(change: &Change, peer: Option<Subnets>, error: KernelError) -> Self {
        Self { change: change.clone(), peer, error, since: SystemTime::now(), tries: 1 }
    }
}

/// The kind of change by another program that a repair has undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Damage {
    /// The object was deleted.
    Deletion,
    /// The object was changed or replaced.
    Modification,
    /// An object that is not desired was added.
    Addition,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deletion => "deleted",
            Self::Modification => "changed",
            Self::Addition => "added",
        })
    }
}

/// The repair of an object that another program changed, deleted or added.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repair {
    /// The number of the repair, counted from 1 since the network started.
    pub number: u64,
    /// The time of the repair, by the wall clock.
    pub at: SystemTime,
    /// The kind of change that was undone.
    pub damage: Damage,
    /// The object that was put again, or for [`Damage::Addition`] deleted.
    pub object: Object,
    /// The peer to which the object belongs. `None` for objects of this node, and for undesired
    /// objects.
    pub peer: Option<Subnets>,
    /// The author of the change, or `None` if it is not known. Linux does not name the author for
    /// links and forwarding entries, and for objects that it deletes together with another object.
    /// The author is not known either if messages were lost.
    pub changed_by: Option<ChangedBy>,
}

impl Repair {
    /// A repair made now, without `peer` and `changed_by`.
    pub fn new(number: u64, damage: Damage, object: impl Into<Object>) -> Self {
        Self {
            number,
            at: SystemTime::now(),
            damage,
            object: object.into(),
            peer: None,
            changed_by: None,
        }
    }
}

/// A sentence without a full stop: `restored route 10.1.7.0/24 nhid 7 of the lease 10.1.7.0-24,
/// deleted by ip (process 4711)`.
impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.damage == Damage::Addition { "removed" } else { "restored" };
        write!(f, "{verb} {}", self.object)?;
        self.peer.map_or(Ok(()), |peer| write!(f, " of the lease {peer}"))?;
        write!(f, ", {}", self.damage)?;
        match &self.changed_by {
            Some(changed_by) => write!(f, " by {changed_by}"),
            None => f.write_str(" by somebody that the kernel does not name"),
        }
    }
}

/// The peers with objects that are neither in the kernel nor failing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Whether all peers wait, because the kernel must be read first: at the start, or after lost
    /// events.
    pub all: bool,
    /// The peers that wait, with the reasons.
    pub peers: BTreeMap<Subnets, Wait>,
}

impl Waiting {
    /// These peers wait, or all peers if `all` is true.
    pub const fn new(all: bool, peers: BTreeMap<Subnets, Wait>) -> Self {
        Self { all, peers }
    }
}

/// Why a peer's objects are not all in the kernel yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Wait {
    /// Its lease or its objects are in a queue of the engine.
    #[error("its lease has come, and waits for its turn")]
    Turn,
    /// Another program changed its objects.
    #[error("another program changed its kernel objects, which will be restored")]
    Repair,
    /// Its objects need this link, which does not exist.
    #[error("there is no link {0}, which it needs")]
    Link(LinkName),
}

/// One lease and its kernel objects.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The lease.
    pub lease: Arc<Lease>,
    /// Why the lease is rejected, or `None` if it is accepted.
    pub rejection: Option<Rejection>,
    /// The objects that the plan defines for the lease, even if the lease is rejected.
    pub objects: Vec<(Object, ObjectState)>,
}

impl Explanation {
    /// An explanation of a lease that defines `objects`.
    pub const fn new(
        lease: Arc<Lease>,
        rejection: Option<Rejection>,
        objects: Vec<(Object, ObjectState)>,
    ) -> Self {
        Self { lease, rejection, objects }
    }
}

/// The state of an object that a plan defines.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectState {
    /// The object is in the kernel.
    InPlace,
    /// The object was not put yet, or another program may have changed it.
    Pending,
    /// The object could not be put.
    Failing(Failure),
    /// The object is not desired, because its lease is rejected.
    Unwanted,
}
