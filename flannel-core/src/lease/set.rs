//! Sets of leases.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use super::{Lease, Revision, Subnets};

/// A set of leases, with at most one lease for each [`Subnets`], in their order. A clone is O(1).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseSet(imbl::OrdMap<BySubnets, Arc<Lease>>);

/// The key of a lease in the map. It shares the lease, so the subnets are not copied.
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
    /// Inserts `lease`. It replaces a lease with equal subnets.
    pub fn insert(&mut self, lease: impl Into<Arc<Lease>>) {
        let lease = lease.into();
        self.0.insert(BySubnets(Arc::clone(&lease)), lease);
    }

    /// Removes the lease with exactly these subnets and returns it, or `None` if it is absent.
    pub fn remove(&mut self, subnets: &Subnets) -> Option<Arc<Lease>> {
        self.0.remove(subnets)
    }

    /// The lease with exactly these subnets, or `None` if it is absent.
    pub fn get(&self, subnets: &Subnets) -> Option<&Arc<Lease>> {
        self.0.get(subnets)
    }

    /// The number of leases.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set has no leases.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All leases, by subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.values()
    }

    /// The differences from `older`: the subnets of each changed lease with the present lease, or
    /// with `None` if the lease was deleted. O(changes) if one set was made from a clone of the
    /// other.
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

/// The source of a lease set. Only if it is [`Origin::Live`], a lease that is not in the set is
/// gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The cache of an earlier run. Without a cache, the set is empty until the store answers. A
    /// network may create and replace kernel objects because of such a set, but must not delete
    /// objects.
    Cached {
        /// The time at which the cache was written, or `None` without a cache.
        written: Option<SystemTime>,
    },
    /// The store. The set has all leases of the store.
    Live {
        /// The revision of the store that the set shows.
        revision: Revision,
    },
}

/// A lease set with its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// All leases, also the lease of this node.
    pub leases: LeaseSet,
    /// The source of the leases.
    pub origin: Origin,
}

impl View {
    /// The empty view of a node without a cache, before the store answers.
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
        fn changes_since_returns_exactly_the_changes(
            before in prop::collection::btree_map(0..60u8, 0..3u64, 0..60),
            steps in prop::collection::vec((0..60u8, prop::option::of(0..3u64)), 0..40),
        ) {
            let key = |n: u8| format!("10.0.{n}.0-24");
            let old: LeaseSet = before.iter().map(|(n, since)| lease(&key(*n), *since)).collect();
            let mut new = old.clone();
            let mut model = before.clone();
            for (n, to) in steps {
                match to {
                    Some(since) => { new.insert(lease(&key(n), since)); model.insert(n, since); }
                    None => { new.remove(&key(n).parse().unwrap()); model.remove(&n); }
                }
            }
            let changed: BTreeMap<String, Option<u64>> =
                new
                    .changes_since(&old)
                    .map(|(subnets, lease)| (subnets.to_string(), lease.map(|l| l.since.0)))
                    .collect();
            let expected: BTreeMap<String, Option<u64>> = (0..60u8)
                .filter(|n| before.get(n) != model.get(n))
                .map(|n| (key(n), model.get(&n).copied()))
                .collect();
            prop_assert_eq!(changed, expected);
        }
    }
}
