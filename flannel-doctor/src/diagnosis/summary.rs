//! Bounds the number of findings of one check.

use std::collections::BTreeMap;

use flannel_api::Finding;

use crate::diagnosis::mtu::{Fault, narrowest};

/// The maximum number of findings of one check that are listed one by one.
const MAX_LISTED: usize = 5;

/// Replaces the faults of a check beyond the limit by one fault with their number. This fault has
/// the place with the smallest MTU, or the commands of all of them in one line.
pub(crate) fn bounded(faults: Vec<Fault>) -> Vec<Fault> {
    let mut kinds: BTreeMap<(String, bool), Vec<Fault>> = BTreeMap::new();
    let (mut few, mut counts) = (Vec::new(), BTreeMap::<String, usize>::new());
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
        let made = if more.iter().any(|fault| fault.finding.is_error()) {
            Finding::error
        } else {
            Finding::warning
        };
        let repair = all_of(more.iter().filter_map(|fault| fault.finding.repair.as_deref()));
        let narrow = narrowest(more.iter().filter_map(|fault| fault.narrow));
        few.push(Fault { finding: Finding { repair, ..made(&check, text) }, narrow });
    }
    few
}

/// One line with all commands and all remarks, each once; `None` without a command.
fn all_of<'a>(repairs: impl Iterator<Item = &'a str>) -> Option<String> {
    let (mut commands, mut remarks) = (Vec::new(), Vec::new());
    for repair in repairs {
        let (command, remark) =
            repair.split_once(" # ").map_or((repair, None), |(c, remark)| (c, Some(remark)));
        if !commands.contains(&command) {
            commands.push(command);
        }
        remarks.extend(remark.filter(|remark| !remarks.contains(remark)));
    }
    let remark =
        if remarks.is_empty() { String::new() } else { format!(" # {}", remarks.join("; ")) };
    (!commands.is_empty()).then(|| commands.join("; ") + &remark)
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
        let all =
            (0..9).map(|n| Fault::new(Finding::error("peer", format!("{n}")), narrow(n))).collect();
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
        let fault = |n: u32, repair: String| {
            Fault::from(Finding::error("peer", format!("{n}")).with_command(repair))
        };
        let repair_of = |all: Vec<Fault>| bounded(all).pop().unwrap().finding.repair;
        let each = (0..8).map(|n| fault(n, format!("release '{n}' # if it is gone"))).collect();
        assert_eq!(
            repair_of(each).as_deref(),
            Some("release '5'; release '6'; release '7' # if it is gone"),
            "each lease is another's"
        );
        let same = (0..8).map(|n| fault(n, "iptables -I INPUT -j ACCEPT".into())).collect();
        assert_eq!(repair_of(same).as_deref(), Some("iptables -I INPUT -j ACCEPT"));
        // Faults of sizes get their repair later. The others keep their own.
        let mixed = (0..9).map(|n| match n % 2 {
            0 => fault(n, format!("x {n}")),
            _ => Fault::new(Finding::warning("peer", format!("{n}")), narrow(n)),
        });
        let found = bounded(mixed.collect());
        let [others, sizes] = &found[MAX_LISTED..] else { panic!("{found:?}") };
        assert_eq!((others.finding.repair.as_deref(), others.narrow), (Some("x 6; x 8"), None));
        assert_eq!((sizes.narrow, sizes.finding.is_error()), (Some(narrow(7)), false));
    }
}
