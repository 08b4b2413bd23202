//! Sets of leases, and how complete they are.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use super::{Lease, Revision, Subnets};

/// A set of leases, one per [`Subnets`].
///
/// Cloning is O(1), and [`LeaseSet::changes_since`] is O(changes). Iteration is in the order of the
/// subnets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseSet(imbl::OrdMap<BySubnets, Arc<Lease>>);

/// A lease as the key of the map: a second pointer instead of a copy of the subnets.
#[derive(Clone)]
struct BySubnets(Arc<Lease>);

impl fmt::Debug for BySubnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.subnets, f)
    }
}

impl Borrow<Subnets> for BySubnets {
    fn borrow(&self) -> &Subnets {
        &self.0.subnets
    }
}

impl PartialEq for BySubnets {
    fn eq(&self, other: &Self) -> bool {
        self.0.subnets == other.0.subnets
    }
}

impl Eq for BySubnets {}

impl PartialOrd for BySubnets {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BySubnets {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.subnets.cmp(&other.0.subnets)
    }
}

impl LeaseSet {
    /// Puts `lease` in, replacing the one with the same subnets.
    pub fn insert(&mut self, lease: impl Into<Arc<Lease>>) {
        let lease = lease.into();
        self.0.insert(BySubnets(Arc::clone(&lease)), lease);
    }

    /// Takes a lease out and returns it.
    pub fn remove(&mut self, subnets: &Subnets) -> Option<Arc<Lease>> {
        self.0.remove(subnets)
    }

    /// The lease with exactly these subnets.
    pub fn get(&self, subnets: &Subnets) -> Option<&Arc<Lease>> {
        self.0.get(subnets)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All leases, in the order of their subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.values()
    }

    /// The differences from `older`: `(subnets, lease now)`, with `None` for a lease that is gone.
    ///
    /// O(changes) if one set was made from a clone of the other.
    pub fn changes_since<'a>(
        &'a self,
        older: &'a Self,
    ) -> impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)> {
        use imbl::ordmap::DiffItem;
        older.0.diff(&self.0).map(|item| match item {
            DiffItem::Add(_, lease) => (lease.subnets, Some(lease)),
            DiffItem::Update { new: (_, lease), .. } => (lease.subnets, Some(lease)),
            DiffItem::Remove(_, lease) => (lease.subnets, None),
        })
    }
}

impl<L: Into<Arc<Lease>>> FromIterator<L> for LeaseSet {
    fn from_iter<I: IntoIterator<Item = L>>(leases: I) -> Self {
        let mut set = Self::default();
        leases.into_iter().for_each(|lease| set.insert(lease));
        set
    }
}

/// The source of a lease set, which decides whether an absent lease is known to be gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From the disk cache of an earlier run, or empty because the store has not answered yet.
    /// Objects may be created and replaced because of it, but not deleted.
    Cached {
        /// When it was written; `None` before anything was read.
        written: Option<SystemTime>,
    },
    /// A complete set, as the store held it at `revision`.
    Live {
        /// The store's revision.
        revision: Revision,
    },
}

/// A lease set with its source. A subnet manager publishes it, and a network follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// All leases, our own included.
    pub leases: LeaseSet,
    /// Where they come from.
    pub origin: Origin,
}

impl View {
    /// Nothing is known yet.
    pub fn unknown() -> Self {
        Self { leases: LeaseSet::default(), origin: Origin::Cached { written: None } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseAttrs;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn lease(key: &str, since: u64) -> Lease {
        Lease {
            subnets: key.parse().unwrap(),
            attrs: LeaseAttrs::default(),
            expires: None,
            since: Revision(since),
            revision: Revision(since),
        }
    }

    proptest! {
        #[test]
        fn changes_since_says_exactly_what_changed(
            before in prop::collection::btree_map(0..60u8, 0..3u64, 0..60),
            steps in prop::collection::vec((0..60u8, prop::option::of(0..3u64)), 0..40),
        ) {
            let key = |n: u8| format!("10.0.{n}.0-24");
            let old: LeaseSet = before.iter().map(|(n, since)| lease(&key(*n), *since)).collect();
            let (mut new, mut model) = (old.clone(), before.clone());
            for (n, to) in steps {
                match to {
                    Some(since) => { new.insert(lease(&key(n), since)); model.insert(n, since); }
                    None => { new.remove(&key(n).parse().unwrap()); model.remove(&n); }
                }
            }
            let changed: BTreeMap<String, Option<u64>> =
                new.changes_since(&old).map(|(s, l)| (s.to_string(), l.map(|l| l.since.0))).collect();
            let expected: BTreeMap<String, Option<u64>> = (0..60u8)
                .filter(|n| before.get(n) != model.get(n))
                .map(|n| (key(n), model.get(&n).copied()))
                .collect();
            prop_assert_eq!(changed, expected);
        }
    }
}
