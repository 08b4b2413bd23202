//! Finds a program that changes flannel's kernel objects again and again.

use flannel_api::{ProcessReport, RepairReport, RepairsReport};
use flannel_core::Remedy;

use crate::finding::{Check, Finding};
use crate::remedy::quoted;

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
    let last = *changes.first()?;
    let first = *changes.last()?;
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
    Some(Finding::warning(Check::Repairs, text).with_remedy(stop(last.author.as_ref())))
}

/// Makes a process leave flannel's objects alone.
fn stop(process: Option<&ProcessReport>) -> Remedy {
    let Some(ProcessReport { name, pid, certain }) = process else {
        return Remedy::ReadLog
            .remark("has all repairs")
            .remark("find the program, and make it leave them alone");
    };
    // The kernel shortens a name to 15 bytes.
    match name.as_str() {
        "systemd-network" => configure(
            "/etc/systemd/networkd.conf.d",
            r"[Network]\nManageForeignRoutes=no\nManageForeignNextHops=no\n",
            "systemd-networkd",
        ),
        "NetworkManager" => configure(
            "/etc/NetworkManager/conf.d",
            r"[keyfile]\nunmanaged-devices=interface-name:flannel*\n",
            "NetworkManager",
        ),
        _ if !certain => Remedy::run(format!("ps -fp {pid}")).remark(
            "it may be another process with this id: find the program, and make it leave flannel's \
             objects alone",
        ),
        // The process may have ended, and another one may have its id now.
        name => {
            let is_it = format!("grep -xFe {} /proc/{pid}/comm", quoted(name));
            Remedy::run(format!("{is_it} && kill {pid}"))
                .remark("or configure it so that it leaves flannel's objects alone")
        }
    }
}

/// Writes a file to a directory of settings, and restarts the service that reads it.
fn configure(directory: &str, text: &str, service: &str) -> Remedy {
    Remedy::run(format!(
        "mkdir -p {directory} && printf '{text}' > {directory}/flannel.conf && systemctl restart \
         {service}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(name: &str, pid: u32, certain: bool) -> Option<ProcessReport> {
        Some(ProcessReport { name: name.to_owned(), pid, certain })
    }

    fn repairs(author: Option<&ProcessReport>, at: &[f64]) -> RepairsReport {
        let repair = |at: &f64| RepairReport {
            at: *at,
            text: "restored x, deleted by y".to_owned(),
            process: author.map(ToString::to_string),
            author: author.cloned(),
        };
        RepairsReport { total: at.len() as u64, last: at.iter().rev().map(repair).collect() }
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
        for (author, repair) in [
            (
                process("ip", 4711, true),
                "grep -xFe ip /proc/4711/comm && kill 4711 # or configure it",
            ),
            (
                process("a 'b (process 1)", 47, true),
                r"grep -xFe 'a '\''b (process 1)' /proc/47/comm && kill 47 #",
            ),
            (process("ip", 47, false), "ps -fp 47 # it may be another process with this id"),
            (
                process("systemd-network", 47, true),
                "mkdir -p /etc/systemd/networkd.conf.d && printf '[Network]\\n\
                 ManageForeignRoutes=no\\nManageForeignNextHops=no\\n' > \
                 /etc/systemd/networkd.conf.d/flannel.conf && systemctl restart systemd-networkd",
            ),
            (
                process("NetworkManager", 47, false),
                "mkdir -p /etc/NetworkManager/conf.d && printf '[keyfile]\\nunmanaged-devices=\
                 interface-name:flannel*\\n' > /etc/NetworkManager/conf.d/flannel.conf && \
                 systemctl restart NetworkManager",
            ),
            (None, "journalctl -u flanneld # has all repairs; find the program, and make it leave"),
        ] {
            let found = contest(&repairs(author.as_ref(), &[1.0, 2.0, 3.0]), 3.0).unwrap();
            assert!(found.text.ends_with("3 times in 2 s: restored x, deleted by y"), "{found:?}");
            assert!(found.repair().unwrap().starts_with(repair), "{found:?}");
        }
    }
}
