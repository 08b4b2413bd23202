//! The difference between two sets of objects, as an oracle for tests.

use crate::object::{Change, ObjectSet};

/// The changes that turn `actual` into `want`: puts in the order of creation, then deletions in the
/// reverse order. An object that is inexact in `actual` is put again.
pub fn diff(want: &ObjectSet, actual: &ObjectSet) -> Vec<Change> {
    let different = want.iter().filter(|object| {
        actual.get(&object.key()) != Some(object) || actual.is_inexact(&object.key())
    });
    let puts = different.cloned().map(Change::Put);
    let stale = actual.iter().rev().filter(|object| want.get(&object.key()).is_none());
    puts.chain(stale.cloned().map(Change::Delete)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::any_object;
    use proptest::prelude::*;

    fn any_state() -> impl Strategy<Value = ObjectSet> {
        prop::collection::vec(any_object(), 0..40).prop_map(ObjectSet::from_iter)
    }

    fn apply(state: &ObjectSet, changes: &[Change]) -> ObjectSet {
        let mut state = state.clone();
        for change in changes {
            match change {
                Change::Put(object) => drop(state.insert(object.clone())),
                Change::Delete(object) => drop(state.remove(&object.key())),
            }
        }
        state
    }

    proptest! {
        #[test]
        fn diff_converges(want in any_state(), actual in any_state()) {
            prop_assert_eq!(apply(&actual, &diff(&want, &actual)), want);
        }

        #[test]
        fn diff_is_idempotent(want in any_state(), actual in any_state()) {
            prop_assert_eq!(diff(&want, &want), vec![]);
            let changes = diff(&want, &actual);
            prop_assert_eq!(apply(&apply(&actual, &changes), &changes), want);
        }

        #[test]
        fn diff_is_ordered_and_minimal(want in any_state(), actual in any_state()) {
            let changes = diff(&want, &actual);
            let is_delete = |change: &Change| matches!(change, Change::Delete(_));
            let split = changes.iter().position(is_delete).unwrap_or(changes.len());
            let keys = |part: &[Change]| part.iter().map(|c| c.object().key()).collect::<Vec<_>>();
            let puts = keys(&changes[..split]);
            let deletes = keys(&changes[split..]);
            prop_assert!(changes[split..].iter().all(is_delete));
            prop_assert!(puts.is_sorted() && deletes.iter().rev().is_sorted());
            for change in &changes {
                let key = change.object().key();
                prop_assert!(want.get(&key) != actual.get(&key));
            }
        }
    }
}
