//! The system calls that the systemd unit allows, and those that a daemon under strace makes.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use test_support::unit::allowed_calls;

/// The command of a daemon under strace, which writes the system calls to `trace`. The daemon has
/// the unit's capabilities, because the unit forbids the call that drops others. With -D strace is
/// the background process, and ends with the daemon.
pub(crate) fn traced(trace: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--bounding-set=-all,+net_admin,+net_raw", "strace", "-D", "-f", "-qq", "-o"])
        .arg(trace);
    command
        .arg(std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into()));
    command
}

/// The system calls of a daemon that has ended, and of its programs. Waits for the last ones, which
/// strace may write late.
pub(crate) fn of_ended(trace: &Path, daemon: u32) -> String {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let text = std::fs::read_to_string(trace).unwrap();
        let its_own =
            |line: &str| line.strip_prefix(&daemon.to_string()).map(|rest| rest.trim().to_owned());
        if text.lines().filter_map(its_own).any(|call| call.starts_with("exit_group(")) {
            return text;
        }
        assert!(Instant::now() < deadline, "{text}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The system calls that the unit forbids.
pub(crate) fn forbidden(trace: &str) -> Vec<String> {
    let called: BTreeSet<String> = trace
        .lines()
        .filter_map(|line| {
            let (name, _) = line.split_once(' ')?.1.trim().split_once('(')?;
            name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_').then(|| name.to_owned())
        })
        .collect();
    assert!(called.len() > 20, "{called:?}");
    (&called - &allowed_calls()).into_iter().collect()
}
