//! Changes of the findings of a host that is checked again and again.

use flannel_api::Finding;

/// Logs the findings that are new, and those that are gone.
pub fn log_changes(before: &[Finding], now: &[Finding]) {
    let (gone, new) = changes(before, now);
    for Finding { check, text, .. } in gone {
        tracing::info!(%check, finding = %text, "a finding about this host is gone");
    }
    for finding in new {
        let Finding { check, text, repair, .. } = finding;
        let repair = repair.as_ref().map(tracing::field::display);
        if finding.is_error() {
            tracing::error!(%check, repair, "{text}");
        } else {
            tracing::warn!(%check, repair, "{text}");
        }
    }
}

/// The findings that are gone, and the new ones. Findings with the same check and command are the
/// same, because a text may have an age.
fn changes<'a>(before: &'a [Finding], now: &'a [Finding]) -> (Vec<&'a Finding>, Vec<&'a Finding>) {
    let is_in = |all: &[Finding], one: &Finding| {
        all.iter().any(|other| (&other.check, &other.repair) == (&one.check, &one.repair))
    };
    (
        before.iter().filter(|finding| !is_in(now, finding)).collect(),
        now.iter().filter(|finding| !is_in(before, finding)).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_new_findings_and_those_that_are_gone_are_changes() {
        let finding =
            |text: &str, repair: &str| Finding::warning("forward-drop", text).with_command(repair);
        let before = [finding("a, 3 s ago", "a"), finding("b", "b")];
        let now = [finding("a, 9 s ago", "a"), finding("c", "c")];
        assert_eq!(changes(&before, &now), (vec![&before[1]], vec![&now[1]]));
        assert_eq!(changes(&now, &now), (vec![], vec![]));
        assert_eq!(changes(&[], &now), (vec![], now.iter().collect()));
    }
}
