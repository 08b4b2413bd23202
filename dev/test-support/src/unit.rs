//! The restrictions of the systemd unit.

use std::collections::BTreeSet;
use std::process::Command;

const UNIT: &str = include_str!("../../../deploy/systemd/flanneld.service");

/// The values of a directive.
fn values(directive: &str) -> Vec<&'static str> {
    let lines = UNIT.lines().filter_map(|line| line.strip_prefix(directive)?.strip_prefix('='));
    lines.collect()
}

/// The capabilities that the unit allows, as `net_admin`.
pub fn capabilities() -> impl Iterator<Item = String> {
    let names = values("CapabilityBoundingSet").into_iter().flat_map(str::split_whitespace);
    names.map(|name| name.trim_start_matches("CAP_").to_lowercase())
}

/// The numbers of the address families of sockets that the unit allows.
///
/// # Panics
/// The unit has a family that flanneld does not use.
pub fn socket_families() -> impl Iterator<Item = u32> {
    let names = values("RestrictAddressFamilies").into_iter().flat_map(str::split_whitespace);
    names.map(|name| match name {
        "AF_UNIX" => 1,
        "AF_INET" => 2,
        "AF_INET6" => 10,
        "AF_NETLINK" => 16,
        name => panic!("the number of {name} is not known"),
    })
}

/// The system calls that the unit allows, of all architectures.
///
/// # Panics
/// There is no `systemd-analyze`, or the unit lacks its filter.
pub fn allowed_calls() -> BTreeSet<String> {
    let filters = values("SystemCallFilter");
    let [granted, denied] = filters.as_slice() else { panic!("{filters:?}") };
    let groups =
        |text: &str| calls_of(&text.trim_start_matches('~').split(' ').collect::<Vec<_>>());
    &groups(granted) - &groups(denied)
}

/// The system calls of systemd's groups, with the system calls of the groups in them.
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
