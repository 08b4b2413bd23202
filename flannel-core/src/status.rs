//! The state of a network's kernel objects.

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

/// The state of a network's kernel objects. Objects that are in place are counted, and only the
/// others are listed, so that a new status costs O(changes).
///
/// `Default` is the status before the first round: false, 0 or empty in every field.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The lease set is complete and live, and the kernel has exactly the desired objects.
    pub in_sync: bool,
    /// Each desired object is in place or failing. Without meaning if there is a `kernel_error`.
    pub settled: bool,
    /// This node's devices, their addresses and its routes of last resort are in place.
    pub own_in_place: bool,
    /// The leases come from the store, not from a cache, and are complete.
    pub live: bool,
    /// The leases that the network has taken in. The status does not cover newer leases.
    pub leases: LeaseSet,
    /// Peers whose leases are accepted.
    pub peers: usize,
    /// Desired objects.
    pub objects: usize,
    /// Desired objects by kind, without kinds that have none.
    pub by_kind: BTreeMap<ObjectKind, usize>,
    /// Leases that are rejected, with the reason.
    pub rejected: SortedMap<Subnets, Rejection>,
    /// Objects that the kernel refused to put or delete.
    pub failing: SortedMap<Key, Failure>,
    /// Why the kernel cannot be read or watched; `None` if it can.
    pub kernel_error: Option<KernelError>,
    /// Conditions that are not errors, such as two peers with one public address.
    pub advisories: SortedMap<Advisory>,
    /// Changes applied so far because of leases.
    pub applied: u64,
    /// Changes that the kernel refused so far, also repeated ones.
    pub refused: u64,
    /// Repairs so far: objects that another program changed, deleted or added.
    pub repaired: u64,
    /// Repairs so far by kind and damage.
    pub repairs: BTreeMap<(ObjectKind, Damage), u64>,
    /// The last repairs, oldest first: [`Status::NEWEST_REPAIRS`], and before them as many earlier
    /// ones, each at least a second after the one before it.
    pub last_repairs: Vec<Arc<Repair>>,
    /// For each change because of leases: the time from their arrival to the kernel's answer.
    pub latency: Histogram,
}

impl Status {
    /// The number of newest repairs that [`Status::last_repairs`] always keeps. It keeps at most as
    /// many older ones, so its length is at most twice this number.
    pub const NEWEST_REPAIRS: usize = 16;
}

/// A change that the kernel refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The change.
    pub change: Change,
    /// The peer whose object it is; `None` for this node's objects, and for undesired ones.
    pub peer: Option<Subnets>,
    /// The last error.
    pub error: KernelError,
    /// The time of the first attempt, by the wall clock.
    pub since: SystemTime,
    /// The number of attempts.
    pub tries: u32,
}

impl Failure {
    /// A first failure of `change`, now.
    pub fn new(change: &Change, peer: Option<Subnets>, error: KernelError) -> Self {
        Self { change: change.clone(), peer, error, since: SystemTime::now(), tries: 1 }
    }
}

/// The change by another program that a repair undid.
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
    /// Its number, counted from 1 since the network started.
    pub number: u64,
    /// Its time, by the wall clock.
    pub at: SystemTime,
    /// The change that it undid.
    pub damage: Damage,
    /// The object that was put, or for [`Damage::Addition`] deleted.
    pub object: Object,
    /// The peer whose object it is; `None` for this node's objects, and for undesired ones.
    pub peer: Option<Subnets>,
    /// The author of the damage. `None`: the kernel reports none for links and forwarding entries,
    /// for objects that it deleted together with another one, and if messages were lost.
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

/// The peers that have objects which are neither in the kernel nor failing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// All peers wait: the kernel must be read first, at the start or after lost events.
    pub all: bool,
    /// The peers that wait, with the reason.
    pub peers: BTreeMap<Subnets, Wait>,
}

impl Waiting {
    /// These peers wait, or all peers.
    pub const fn new(all: bool, peers: BTreeMap<Subnets, Wait>) -> Self {
        Self { all, peers }
    }
}

/// Why a peer's objects are not all in the kernel yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Wait {
    /// Its lease is in the queue, or its objects are.
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
    /// Why it is rejected; `None` if it is accepted.
    pub rejection: Option<Rejection>,
    /// The objects that its plan defines, even if the lease is rejected.
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
    /// It is in the kernel.
    InPlace,
    /// It was not put yet, or was invalidated.
    Pending,
    /// The kernel refuses it.
    Failing(Failure),
    /// It is not desired, because its lease is rejected.
    Unwanted,
}
