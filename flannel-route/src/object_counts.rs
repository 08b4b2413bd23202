//! The number of objects of each kind.

use std::collections::BTreeMap;

use flannel_core::object::{Object, ObjectKind};

/// Counts objects one by one, as they come and go.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ObjectCounts([usize; ObjectKind::ALL.len()]);

impl ObjectCounts {
    pub(crate) fn add(&mut self, kind: ObjectKind) {
        self.0[kind as usize] += 1;
    }

    /// An object that was added is gone.
    pub(crate) fn remove(&mut self, kind: ObjectKind) {
        self.0[kind as usize] -= 1;
    }

    pub(crate) fn total(&self) -> usize {
        self.0.iter().sum()
    }

    /// The counts with those of `more`. Kinds without objects are left out.
    pub(crate) fn by_kind<'a>(
        mut self,
        more: impl Iterator<Item = &'a Object>,
    ) -> BTreeMap<ObjectKind, usize> {
        more.for_each(|object| self.add(object.kind()));
        ObjectKind::ALL.into_iter().zip(self.0).filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_its_place() {
        for (n, kind) in ObjectKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
            let mut tally = ObjectCounts::default();
            tally.add(kind);
            tally.add(kind);
            tally.remove(kind);
            assert_eq!((tally.total(), tally.by_kind([].into_iter())), (1, [(kind, 1)].into()));
        }
    }
}
