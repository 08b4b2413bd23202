//! Finds a program that changes flannel's kernel objects again and again.

use flannel_api::{Finding, RepairReport, RepairsReport};

use crate::commands::{LOG, process};

/// Repairs that are closer together, in seconds, are of one change, such as a flush of all routes.
const APART: f64 = 1.0;
/// The smallest number of changes that make a contest.
const CHANGES: usize = 3;
/// The contest is over if there was no change for this time, in seconds, and for several times the
/// usual pause between two changes.
const OVER: f64 = 5.0;

/// The finding that another program changes objects again and again, at the time of the report in
/// seconds.
pub fn contest(repairs: &RepairsReport, now: f64) -> Option<Finding> {
    // Newest first.
    let mut changes: Vec<&RepairReport> = Vec::new();
    for repair in &repairs.last {
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
    Some(Finding::warning("repairs", text).with_command(stop(&last.text)))
}

/// The command that makes the program of a repair leave flannel's objects alone.
fn stop(repair: &str) -> String {
    let file = |path: &str, text: &str, service: &str| {
        format!(
            "mkdir -p {path} && printf '{text}' > {path}/flannel.conf && systemctl restart \
             {service}"
        )
    };
    // The kernel shortens a name to 15 bytes.
    if repair.contains("systemd-network ") {
        let text = r"[Network]\nManageForeignRoutes=no\nManageForeignNextHops=no\n";
        file("/etc/systemd/networkd.conf.d", text, "systemd-networkd")
    } else if repair.contains("NetworkManager ") {
        let text = r"[keyfile]\nunmanaged-devices=interface-name:flannel*\n";
        file("/etc/NetworkManager/conf.d", text, "NetworkManager")
    } else if let Some(pid) = process(repair) {
        format!("kill {pid} # or configure it so that it leaves flannel's objects alone")
    } else {
        format!("{LOG} # has all repairs; find the program, and make it leave them alone")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IP: &str = "restored neigh 10.1.7.0 lladdr 0a:00:00:00:00:07 dev flannel.1, deleted by \
        ip (process 4711)";

    fn repairs(text: &str, at: &[f64]) -> RepairsReport {
        let last = at.iter().rev().map(|at| RepairReport { at: *at, text: text.to_owned() });
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
        ] {
            assert_eq!(contest(&repairs(IP, at), now).is_some(), is_one, "{at:?} {now}");
        }
    }

    #[test]
    fn the_command_stops_the_program_or_configures_it() {
        for (text, repair) in [
            (IP, "kill 4711 #"),
            (
                "removed route x, added by probably (process 1) (process 47)",
                "kill 47 # or configure it",
            ),
            (
                "restored route x, deleted by systemd-network (process 47)",
                "mkdir -p /etc/systemd/networkd.conf.d && printf '[Network]\\n\
                 ManageForeignRoutes=no\\nManageForeignNextHops=no\\n' > \
                 /etc/systemd/networkd.conf.d/flannel.conf && systemctl restart systemd-networkd",
            ),
            (
                "restored route x, deleted by NetworkManager (process 47)",
                "mkdir -p /etc/NetworkManager/conf.d && printf '[keyfile]\\nunmanaged-devices=\
                 interface-name:flannel*\\n' > /etc/NetworkManager/conf.d/flannel.conf && \
                 systemctl restart NetworkManager",
            ),
            ("restored fdb x, deleted by somebody that the kernel does not name", LOG),
        ] {
            let found = contest(&repairs(text, &[1.0, 2.0, 3.0]), 3.0).unwrap();
            assert!(found.text.ends_with(&format!("3 times in 2 s: {text}")), "{}", found.text);
            assert!(found.repair.as_ref().unwrap().starts_with(repair), "{found:?}");
        }
    }
}
