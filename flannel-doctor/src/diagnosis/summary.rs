//! Bounds the number of findings of one check.

use std::collections::BTreeMap;

use flannel_api::Severity;
use flannel_core::Remedy;

use crate::diagnosis::mtu::{Fault, narrowest};
use crate::finding::{Check, Finding};

/// The maximum number of findings of one check that are listed one by one.
const MAX_LISTED: usize = 5;

/// Replaces the faults of a check beyond the limit by one fault with their number. This fault has
/// the place with the smallest MTU, or the remedies of all of them.
pub(crate) fn bounded(faults: Vec<Fault>) -> Vec<Fault> {
    let mut kinds: BTreeMap<(Check, bool), Vec<Fault>> = BTreeMap::new();
    let mut few = Vec::new();
    let mut counts: BTreeMap<Check, usize> = BTreeMap::new();
    for fault in faults {
        let check = &fault.finding.check;
        let count = counts.entry(check.clone()).or_default();
        *count += 1;
        if *count <= MAX_LISTED {
            few.push(fault);
        } else {
            kinds.entry((check.clone(), fault.narrow.is_some())).or_default().push(fault);
        }
    }
    for ((check, _), more) in kinds {
        let text = format!("{} more peers have the same fault: --json lists them", more.len());
        let severities = more.iter().map(|fault| fault.finding.severity);
        let severity = severities.min().unwrap_or(Severity::Warning);
        let narrow = narrowest(more.iter().filter_map(|fault| fault.narrow));
        let remedies: Vec<Remedy> =
            more.into_iter().filter_map(|fault| fault.finding.remedy).collect();
        let remedy = (!remedies.is_empty()).then_some(Remedy::All(remedies));
        let finding = Finding { remedy, ..Finding::new(check, severity, text) };
        few.push(Fault { finding, narrow });
    }
    few
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;
    use crate::diagnosis::mtu::Narrow;

    #[test]
    fn findings_beyond_the_limit_are_counted() {
        let to = IpAddr::from([192, 0, 2, 7]);
        let narrow = |n: u32| Narrow::Way { to, takes: Some(1409 - n) };
        let all = (0..9)
            .map(|n| Fault::new(Finding::error(Check::Peer, format!("{n}")), narrow(n)))
            .collect();
        let found = bounded(all);
        assert_eq!(found.len(), MAX_LISTED + 1);
        assert!(
            found[MAX_LISTED].finding.text.starts_with("4 more peers have the same fault"),
            "{found:?}"
        );
        assert_eq!(
            found[MAX_LISTED].narrow,
            Some(narrow(8)),
            "the narrowest of those that are not listed"
        );
        // The repairs of those that are listed repair the others too.
        let fault = |n: u32, repair: Remedy| {
            Fault::from(Finding::error(Check::Peer, format!("{n}")).with_remedy(repair))
        };
        let repair_of = |all: Vec<Fault>| bounded(all).pop().unwrap().finding.repair();
        let each = (0..8)
            .map(|n| fault(n, Remedy::run(format!("release '{n}'")).remark("if it is gone")))
            .collect();
        assert_eq!(
            repair_of(each).as_deref(),
            Some("release '5'; release '6'; release '7' # if it is gone"),
            "each lease is another's"
        );
        let same = (0..8).map(|n| fault(n, Remedy::run("iptables -I INPUT -j ACCEPT"))).collect();
        assert_eq!(repair_of(same).as_deref(), Some("iptables -I INPUT -j ACCEPT"));
        // Faults of sizes get their repair later. The others keep their own.
        let mixed = (0..9).map(|n| match n % 2 {
            0 => fault(n, Remedy::run(format!("x {n}"))),
            _ => Fault::new(Finding::warning(Check::Peer, format!("{n}")), narrow(n)),
        });
        let found = bounded(mixed.collect());
        let [others, sizes] = &found[MAX_LISTED..] else { panic!("{found:?}") };
        assert_eq!((others.finding.repair().as_deref(), others.narrow), (Some("x 6; x 8"), None));
        assert_eq!((sizes.narrow, sizes.finding.is_error()), (Some(narrow(7)), false));
    }
}
