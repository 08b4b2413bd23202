//! Compares the clocks of this host and of its peers.

use flannel_core::Remedy;

use crate::finding::{Check, Finding};
use crate::remedy::SET_CLOCK;

/// The smallest difference that is a finding, in seconds. Certificates and tokens are made with a
/// margin of some minutes.
const LEAST: u64 = 300;

/// The finding on clocks that differ. `ahead` has the key of each peer with the seconds by which
/// its clock is ahead of this host's.
pub(crate) fn clocks(ahead: &[(&str, i64)]) -> Option<Finding> {
    let wrong: Vec<&(&str, i64)> =
        ahead.iter().filter(|(_, seconds)| seconds.unsigned_abs() >= LEAST).collect();
    let (key, seconds) = **wrong.first()?;
    let way = if seconds > 0 { "ahead of" } else { "behind" };
    let more = match wrong.len() - 1 {
        0 => String::new(),
        more => format!(", and those of {more} more nodes differ too"),
    };
    let text = format!(
        "the clock of {key} is {} s {way} this host's{more}: certificates and tokens may count as \
         expired or not valid yet",
        seconds.unsigned_abs()
    );
    // The clock of a single host is wrong, most likely: this host's, if all others agree.
    let agree = wrong.iter().all(|(_, other)| other.abs_diff(seconds) < LEAST);
    let at = match (wrong.len(), ahead.len()) {
        (1, 2..) => format!("on the node of {key}"),
        (differ, all) if all > 1 && differ == all && agree => "here".to_owned(),
        _ => "on the host whose date is wrong".to_owned(),
    };
    Some(Finding::warning(Check::Clock, text).with_remedy(Remedy::run(SET_CLOCK).remark(at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_differ_are_found_with_the_host_of_the_wrong_one() {
        let hour = 3_600;
        assert_eq!(clocks(&[]), None);
        assert_eq!(clocks(&[("a", 299), ("b", -299)]), None);
        for (ahead, text, at) in [
            (
                &[("a", hour)][..],
                "a is 3600 s ahead of this host's:",
                "the host whose date is wrong",
            ),
            (&[("a", 0), ("b", -hour)], "b is 3600 s behind this host's:", "the node of b"),
            (&[("a", hour), ("b", hour), ("c", 3_599)], "and those of 2 more nodes", "here"),
            (&[("a", hour), ("b", -hour), ("c", 0)], "and those of 1 more nodes", "the host whose"),
            (&[("a", hour), ("b", -hour)], "and those of 1 more nodes", "the host whose"),
            (&[("a", i64::MIN), ("b", i64::MAX)], "and those of 1 more nodes", "the host whose"),
            (&[("a", i64::MIN)], "9223372036854775808 s behind", "the host"),
        ] {
            let found = clocks(ahead).unwrap();
            assert!(!found.is_error() && found.text.contains(text), "{found:?}");
            let repair = found.repair().unwrap();
            assert!(
                repair.starts_with("timedatectl set-ntp true # ") && repair.contains(at),
                "{repair}"
            );
        }
    }
}
