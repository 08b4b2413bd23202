//! How far the kernel is what the leases say, as data.
//!
//! The one thing to know: a [`Status`] lists what is wrong and counts the rest, so that publishing
//! one costs what changed; once it is settled, whatever is wanted and not listed is in place. It is
//! published in a watch channel: the latest wins, and nothing queues for a reader that is slow.

mod histogram;
mod listing;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

pub use self::histogram::Histogram;
pub use self::listing::Listing;
use crate::kernel::{ChangedBy, KernelError};
use crate::lease::{Lease, LeaseSet, Subnets};
use crate::network::Rejection;
use crate::object::LinkName;
use crate::object::{Key, Object, ObjectKind};

/// How far the kernel is what the leases say. Lists only what is wrong: an empty status is a good
/// one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// Everything that is wanted is in place, by a complete, live lease set.
    pub in_sync: bool,
    /// Nothing waits for its turn: every object that is wanted is in place, or listed as failing.
    pub settled: bool,
    /// This node's own objects are in place: its devices, their addresses, its routes of last
    /// resort. Peers' may still wait for their turn.
    pub own_in_place: bool,
    /// The leases come from the store, not from a cache, and are complete.
    pub live: bool,
    /// The leases that this is about: of one that is newer nothing is said.
    pub leases: LeaseSet,
    /// Peers whose leases are accepted.
    pub peers: usize,
    /// Objects that are wanted.
    pub objects: usize,
    /// The same by their kind; kinds of which there are none are left out.
    pub by_kind: BTreeMap<ObjectKind, usize>,
    /// Leases that are rejected, with the reason.
    pub rejected: Listing<Subnets, Rejection>,
    /// Objects that the kernel refused, or that could not be deleted. Every other object is in
    /// place if `settled`, unless `kernel_error` says that this cannot be known.
    pub failing: Listing<Key, Failure>,
    /// Why the kernel could not be read or watched; `None` if it can.
    pub kernel_error: Option<KernelError>,
    /// Things that are in order but worth knowing, such as a public address used by two peers:
    /// sentences.
    pub advisories: Listing<String>,
    /// Changes applied so far because of leases.
    pub applied: u64,
    /// Objects put back or removed so far after somebody else changed, deleted or added them.
    pub repaired: u64,
    /// The same, by the kind of the object and what had been done to it; at most one entry for each
    /// combination.
    pub repairs: BTreeMap<(ObjectKind, Damage), u64>,
    /// The last few repairs, oldest first; at most [`Status::LAST_REPAIRS`].
    pub last_repairs: Vec<Arc<Repair>>,
    /// From the moment that a view of the leases was there to the moment that the kernel had
    /// acknowledged what it changed: one entry for each object that a lease put or deleted.
    pub latency: Histogram,
}

impl Status {
    /// How many repairs are kept at most.
    pub const LAST_REPAIRS: usize = 16;

    /// What fails of one peer's objects. Costs what fails altogether.
    pub fn failing_of(&self, peer: &Subnets) -> impl Iterator<Item = (&Key, &Failure)> {
        self.failing.iter().filter(move |(_, failure)| failure.peer.as_ref() == Some(peer))
    }

    /// The repairs that `older` did not know yet, as far as they are kept.
    pub fn repairs_since(&self, older: &Self) -> impl Iterator<Item = &Repair> {
        let known = older.repaired;
        self.last_repairs.iter().map(|repair| &**repair).filter(move |repair| repair.number > known)
    }
}

/// An object that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// The change that fails, as text.
    pub change: String,
    /// Whose object it is; `None` for this node's own, and for one that no lease defines any more.
    pub peer: Option<Subnets>,
    /// What the kernel says: the errno and its own explanation.
    pub error: KernelError,
    /// Since when, by the wall clock.
    pub since: SystemTime,
    /// How many times it was tried.
    pub tries: u32,
}

impl Failure {
    /// A failure of `change`, first seen now.
    pub fn new(change: &crate::object::Change, peer: Option<Subnets>, error: KernelError) -> Self {
        Self { change: change.to_string(), peer, error, since: SystemTime::now(), tries: 1 }
    }
}

/// What somebody else had done to an object that had to be repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Damage {
    /// It was deleted, and was created again.
    Deletion,
    /// It was changed or replaced by another, and was changed back.
    Modification,
    /// It is none that is wanted, and was deleted.
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

/// One object that was put right after somebody else had changed it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repair {
    /// Which one it is, counted from 1 since the network started.
    pub number: u64,
    /// When it was put right, by the wall clock.
    pub at: SystemTime,
    /// What had been done to it.
    pub damage: Damage,
    /// The object: as it is again, or for [`Damage::Addition`] as it was found.
    pub object: Object,
    /// Whose object it is; `None` for this node's own, and for what nobody wants.
    pub peer: Option<Subnets>,
    /// Who did it, as far as the kernel tells. It does not say of links and forwarding entries, nor
    /// of what it removed itself together with something else, nor when messages were lost.
    pub changed_by: Option<ChangedBy>,
}

impl Repair {
    /// A repair made now, by nobody known, of an object that is nobody's.
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

/// A sentence without a full stop: `put back route 10.1.7.0/24 nhid 7 of the lease 10.1.7.0-24,
/// deleted by ip (process 4711)`.
impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.damage == Damage::Addition { "removed" } else { "put back" };
        write!(f, "{verb} {}", self.object)?;
        self.peer.map_or(Ok(()), |peer| write!(f, " of the lease {peer}"))?;
        write!(f, ", {}", self.damage)?;
        match &self.changed_by {
            Some(changed_by) => write!(f, " by {changed_by}"),
            None => f.write_str(" by somebody that the kernel does not name"),
        }
    }
}

/// Which peers wait for something, neither refused nor known to be in place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// Of no peer anything is known to be in place: the kernel is to be read first.
    pub all: bool,
    /// The peers that wait, and what for.
    pub peers: BTreeMap<Subnets, Wait>,
}

impl Waiting {
    /// These peers wait; with `all`, of no peer anything is known to be in place.
    pub const fn new(all: bool, peers: BTreeMap<Subnets, Wait>) -> Self {
        Self { all, peers }
    }
}

/// What a peer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Wait {
    /// Its lease is taken in, and others are before it.
    #[error("its lease has come, and waits for its turn")]
    Turn,
    /// Something of it was damaged.
    #[error("somebody changed what it has in the kernel, which is about to be put back")]
    Repair,
    /// What it wants cannot be put without this link.
    #[error("there is no link {0}, which it needs")]
    Link(LinkName),
}

/// What is known of one lease, and of what it wants of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The lease.
    pub lease: Arc<Lease>,
    /// Why it is not believed; `None` if it is.
    pub rejection: Option<Rejection>,
    /// What its plan wants in the kernel, and how that stands. Nothing of it is wanted of a lease
    /// that is not believed.
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

/// How one wanted object stands.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ObjectState {
    /// It is in the kernel, as far as the kernel told.
    InPlace,
    /// It has not been put yet, or is in doubt.
    Pending,
    /// The kernel refuses it.
    Failing(Failure),
    /// It is not wanted, because its lease is not believed.
    Unwanted,
}
