//! Finds a program that changes flannel's kernel objects again and again.

use flannel_api::{Finding, RepairReport, RepairsReport};

use crate::commands::{LOG, quoted};

/// Repairs that are closer together, in seconds, are of one change, such as a flush of all routes.
const APART: f64 = 1.0;
/// The smallest number of changes that make a contest.
const CHANGES: usize = 3;
/// The contest is over if there was no change for this time, in seconds, and for several times the
/// usual pause between two changes.
const OVER: f64 = 5.0;
/// Older changes, in seconds, belong to no contest.
const RECENT: f64 = 600.0;

/// The finding that another program changes objects again and again, at the time of the report in
/// seconds.
pub fn contest(repairs: &RepairsReport, now: f64) -> Option<Finding> {
    // Newest first.
    let mut changes: Vec<&RepairReport> = Vec::new();
    for repair in repairs.last.iter().filter(|repair| now - repair.at <= RECENT) {
        if changes.last().is_none_or(|later| later.at - repair.at >= APART) {
            changes.push(repair);
        }
    }
    let (last, first) = (*changes.first()?, *changes.last()?);
    let span = last.at - first.at;
    let pause = span / changes.len().saturating_sub(1) as f64;
    if changes.len() < CHANGES || now - last.at > OVER.max(3.0 * pause) {
        return None;
    }
    let text = format!(
        "another program changes objects of flannel again and again, {} times in {span:.0} s: {}",
        changes.len(),
        last.text
    );
    Some(Finding::warning("repairs", text).with_command(stop(last.process.as_deref())))
}

/// The command that makes a process leave flannel's objects alone.
fn stop(process: Option<&str>) -> String {
    let file = |path: &str, text: &str, service: &str| {
        format!(
            "mkdir -p {path} && printf '{text}' > {path}/flannel.conf && systemctl restart \
             {service}"
        )
    };
    match process.and_then(name_and_id) {
        // The kernel shortens a name to 15 bytes.
        Some(("systemd-network" | "probably systemd-network", _)) => {
            let text = r"[Network]\nManageForeignRoutes=no\nManageForeignNextHops=no\n";
            file("/etc/systemd/networkd.conf.d", text, "systemd-networkd")
        }
        Some(("NetworkManager" | "probably NetworkManager", _)) => {
            let text = r"[keyfile]\nunmanaged-devices=interface-name:flannel*\n";
            file("/etc/NetworkManager/conf.d", text, "NetworkManager")
        }
        Some((name, pid)) if name.starts_with("probably ") => format!(
            "ps -fp {pid} # it may be another process with this id: find the program, and make it \
             leave flannel's objects alone"
        ),
        // The process may have ended, and another one may have its id now.
        Some((name, pid)) => format!(
            "grep -xFe {} /proc/{pid}/comm && kill {pid} # or configure it so that it leaves \
             flannel's objects alone",
            quoted(name)
        ),
        None => format!("{LOG} # has all repairs; find the program, and make it leave them alone"),
    }
}

/// `ip` and 4711 of `ip (process 4711)`. The name begins with `probably ` if it may be another
/// program.
fn name_and_id(process: &str) -> Option<(&str, u32)> {
    let (name, id) = process.strip_suffix(')')?.rsplit_once(" (process ")?;
    Some((name, id.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repairs(process: Option<&str>, at: &[f64]) -> RepairsReport {
        let process = process.map(str::to_owned);
        let (text, last) = ("restored x, deleted by y".to_owned(), at.iter().rev());
        let last =
            last.map(|at| RepairReport { at: *at, text: text.clone(), process: process.clone() });
        RepairsReport { total: at.len() as u64, last: last.collect() }
    }

    #[test]
    fn changes_again_and_again_are_a_contest_until_they_end() {
        for (at, now, is_one) in [
            (&[][..], 9.0, false),
            (&[1.0, 2.0], 2.0, false),
            // One flush of many routes.
            (&[1.0, 1.0, 1.1, 1.2, 1.3], 1.3, false),
            (&[1.0, 2.0, 3.0], 8.0, true),
            (&[1.0, 2.0, 3.0], 8.1, false),
            (&[1.0, 61.0, 121.0], 301.0, true),
            (&[1.0, 61.0, 121.0], 301.1, false),
            // The first one is too old after ten minutes.
            (&[1.0, 300.0, 599.0], 601.0, true),
            (&[1.0, 300.0, 599.0], 601.1, false),
        ] {
            assert_eq!(contest(&repairs(None, at), now).is_some(), is_one, "{at:?} {now}");
        }
    }

    #[test]
    fn the_command_stops_the_program_or_configures_it() {
        for (process, repair) in [
            (
                Some("ip (process 4711)"),
                "grep -xFe ip /proc/4711/comm && kill 4711 # or configure it",
            ),
            (
                Some("a 'b (process 1) (process 47)"),
                r"grep -xFe 'a '\''b (process 1)' /proc/47/comm && kill 47 #",
            ),
            (
                Some("probably ip (process 47)"),
                "ps -fp 47 # it may be another process with this id",
            ),
            (
                Some("systemd-network (process 47)"),
                "mkdir -p /etc/systemd/networkd.conf.d && printf '[Network]\\n\
                 ManageForeignRoutes=no\\nManageForeignNextHops=no\\n' > \
                 /etc/systemd/networkd.conf.d/flannel.conf && systemctl restart systemd-networkd",
            ),
            (
                Some("NetworkManager (process 47)"),
                "mkdir -p /etc/NetworkManager/conf.d && printf '[keyfile]\\nunmanaged-devices=\
                 interface-name:flannel*\\n' > /etc/NetworkManager/conf.d/flannel.conf && \
                 systemctl restart NetworkManager",
            ),
            (None, LOG),
        ] {
            let found = contest(&repairs(process, &[1.0, 2.0, 3.0]), 3.0).unwrap();
            assert!(found.text.ends_with("3 times in 2 s: restored x, deleted by y"), "{found:?}");
            assert!(found.repair.as_ref().unwrap().starts_with(repair), "{found:?}");
        }
    }
}
