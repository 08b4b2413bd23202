//! Changes of the findings of a host that is checked again and again.

use flannel_api::{Deployment, Severity};
use flannel_core::Remedy;

use crate::finding::{Check, Finding};

/// Logs the findings that are new, with the commands for the deployment, and the findings that are
/// gone.
pub fn log_changes(before: &[Finding], now: &[Finding], deployment: Deployment) {
    let (gone, new) = changes(before, now);
    for Finding { check, text, .. } in gone {
        tracing::info!(%check, finding = %text, "a finding about this host is gone");
    }
    for finding in new {
        let flannel_api::Finding { check, text, repair, .. } = finding.report(deployment);
        let repair = repair.as_ref().map(tracing::field::display);
        if finding.is_error() {
            tracing::error!(%check, repair, "{text}");
        } else {
            tracing::warn!(%check, repair, "{text}");
        }
    }
}

/// The findings that are gone, and the new ones. Findings with the same check, severity and remedy
/// are the same, because a text may have an age. Of several such findings, each counts.
fn changes<'a>(before: &'a [Finding], now: &'a [Finding]) -> (Vec<&'a Finding>, Vec<&'a Finding>) {
    (without(before, now), without(now, before))
}

/// The findings in `all` without one for each in `others` that is the same, if possible the one
/// with the same text.
fn without<'a>(all: &'a [Finding], others: &[Finding]) -> Vec<&'a Finding> {
    let mut left: Vec<&Finding> = all.iter().collect();
    let mut others: Vec<&Finding> = others.iter().collect();
    let is_same: [fn(&Finding, &Finding) -> bool; 2] = [|a, b| a == b, |a, b| key(a) == key(b)];
    for is_same in is_same {
        left.retain(|one| {
            let place = others.iter().position(|other| is_same(one, other));
            place.map(|place| others.remove(place)).is_none()
        });
    }
    left
}

fn key(finding: &Finding) -> (&Check, Severity, Option<&Remedy>) {
    (&finding.check, finding.severity, finding.remedy.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_findings_and_those_that_are_gone_are_changes() {
        let finding = |text: &str, repair: &str| {
            Finding::warning(Check::ForwardDrop, text).with_command(repair)
        };
        let before = [finding("a, 3 s ago", "a"), finding("b", "b")];
        let now = [finding("a, 9 s ago", "a"), finding("c", "c")];
        assert_eq!(changes(&before, &now), (vec![&before[1]], vec![&now[1]]));
        assert_eq!(changes(&now, &now), (vec![], vec![]));
        assert_eq!(changes(&[], &now), (vec![], now.iter().collect()));
    }

    #[test]
    fn each_of_several_findings_with_the_same_command_is_a_change() {
        let finding = |text: &str| Finding::warning(Check::Clash, text).with_command("a");
        let one = [finding("1")];
        let two = [finding("2"), finding("1")];
        assert_eq!(changes(&one, &two), (vec![], vec![&two[0]]));
        assert_eq!(changes(&two, &one), (vec![&two[0]], vec![]));
        assert_eq!(changes(&one, &two[..1]), (vec![], vec![]), "only the text is another");
        let error = [Finding::error(Check::Clash, "1").with_command("a")];
        assert_eq!(changes(&one, &error), (vec![&one[0]], vec![&error[0]]));
    }
}
