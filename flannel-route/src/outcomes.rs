//! One outcome for each change, whatever a kernel or a record keeper answers.

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, KernelError, Outcome};
use flannel_core::object::Change;

/// Applies changes. Returns exactly one outcome for each.
pub(crate) fn apply(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    changes: &[Change],
) -> Vec<Outcome> {
    one_for_each(changes.len(), kernel.apply(footprint, changes), "the kernel")
}

/// The outcomes of this number of changes. If `by` has answered with too few, the changes without
/// an outcome have failed. If there are too many, none of them can be assigned, so all changes have
/// failed.
pub(crate) fn one_for_each(changes: usize, mut outcomes: Vec<Outcome>, by: &str) -> Vec<Outcome> {
    let count = outcomes.len();
    if count == changes {
        return outcomes;
    }
    if count > changes {
        outcomes.clear();
    }
    let detail = format!("{by} gave {count} outcomes for {changes} changes, and none for this one");
    outcomes.resize(changes, Outcome::Failed(KernelError::Other(detail)));
    outcomes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_without_an_outcome_has_failed() {
        let done = |count| vec![Outcome::Done; count];
        assert_eq!(one_for_each(2, done(2), "it"), done(2));
        let short = one_for_each(3, done(1), "it");
        let [Outcome::Done, Outcome::Failed(second), Outcome::Failed(third)] = &short[..] else {
            panic!("{short:?}")
        };
        assert_eq!(second.to_string(), "it gave 1 outcomes for 3 changes, and none for this one");
        assert_eq!(second, third);
        let long = one_for_each(1, done(2), "it");
        assert!(matches!(&long[..], [Outcome::Failed(_)]), "{long:?}");
    }
}
