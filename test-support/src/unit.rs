//! The restrictions of the systemd unit.

use std::collections::BTreeSet;
use std::process::Command;

/// The system calls that the unit allows, of all architectures.
///
/// # Panics
/// There is no `systemd-analyze`, or the unit lacks its filter.
pub fn allowed_calls() -> BTreeSet<String> {
    let unit = include_str!("../../dist/flanneld.service");
    let filters: Vec<&str> =
        unit.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")).collect();
    let [granted, denied] = filters.as_slice() else { panic!("{filters:?}") };
    let groups =
        |text: &str| calls_of(&text.trim_start_matches('~').split(' ').collect::<Vec<_>>());
    &groups(granted) - &groups(denied)
}

/// The system calls of systemd's groups, with those of the groups in them.
fn calls_of(groups: &[&str]) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    let mut groups: Vec<String> = groups.iter().map(ToString::to_string).collect();
    while let Some(group) = groups.pop() {
        let output =
            Command::new("systemd-analyze").args(["syscall-filter", "--no-pager", &group]).output();
        let output = output.expect("systemd-analyze is needed (Debian: apt-get install systemd)");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for word in text
            .lines()
            .skip(1)
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
        {
            if word.starts_with('@') {
                groups.push(word.to_owned());
            } else {
                _ = all.insert(word.to_owned());
            }
        }
    }
    assert!(all.len() > 5, "{all:?}");
    all
}
