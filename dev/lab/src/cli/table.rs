//! The result as tables. They fit into 80 columns.

use std::fmt::Write;

use flannelctl::terminal::{Style, Terminal};

use crate::cli::outcome::{HostRow, Outcome, PairRow};

/// The maximum number of hosts whose matrix fits into 80 columns.
const MATRIX_HOSTS: usize = 8;

/// The maximum number of hosts in the table, and of pairs that are listed as not reached.
const LISTED: usize = 20;

/// Renders a result. The width of the terminal has no effect.
pub(crate) fn render(outcome: &Outcome, terminal: &Terminal) -> String {
    let mut text = format!(
        "{} on {} · {} · {}\n\n",
        count(outcome.hosts.len(), "pod"),
        count(outcome.hosts.len(), "host"),
        outcome.backend,
        outcome.family
    );
    text += &hosts(&outcome.hosts, terminal);
    for family in ["ipv4", "ipv6"] {
        let pairs: Vec<&PairRow> =
            outcome.pairs.iter().filter(|pair| pair.family == family).collect();
        if pairs.is_empty() {
            continue;
        }
        let title = if family == "ipv4" { "IPv4" } else { "IPv6" };
        if outcome.hosts.len() <= MATRIX_HOSTS {
            text += &matrix(title, &outcome.hosts, &pairs, terminal);
        } else {
            text += &summary(title, &pairs, terminal);
        }
    }
    text += &reasons(outcome);
    text + &verdict(outcome, terminal)
}

fn count(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

fn hosts(hosts: &[HostRow], terminal: &Terminal) -> String {
    let row = |[host, address, subnet, mtu, memory]: [&str; 5]| {
        format!("{host:<9} {address:<15} {subnet:<26} {mtu:>5}  {memory:>9}").trim_end().to_owned()
    };
    let mut text =
        terminal.style(Style::Bold, &row(["HOST", "ADDRESS", "LEASE", "MTU", "MEMORY"])) + "\n";
    for host in hosts.iter().take(LISTED) {
        let memory = host
            .vm_rss_kib
            .map_or_else(|| "-".to_owned(), |kib| format!("{:.1} MiB", kib as f64 / 1024.0));
        for line in 0..host.subnets.len().max(1) {
            let subnet = host.subnets.get(line).map_or("", String::as_str);
            // The line of a lease has the address of the same family.
            let address = host
                .addresses
                .iter()
                .find(|address| address.is_ipv6() == subnet.contains(':'))
                .map(ToString::to_string)
                .unwrap_or_default();
            let mtu = host.mtu.to_string();
            let first = [host.name.as_str(), &address, subnet, &mtu, &memory];
            text += &row(if line == 0 { first } else { ["", &address, subnet, "", ""] });
            text += "\n";
        }
    }
    if hosts.len() > LISTED {
        let _ = writeln!(text, "… and {} more (--json lists all)", hosts.len() - LISTED);
    }
    text
}

fn matrix(title: &str, hosts: &[HostRow], pairs: &[&PairRow], terminal: &Terminal) -> String {
    let mut text = format!("\n{title}: round trips between pods in ms, from the left to the top\n");
    let header: String = hosts.iter().map(|host| format!(" {:>8}", host.pod)).collect();
    text += &(terminal.style(Style::Bold, &format!("{:<8}{header}", "")) + "\n");
    for from in hosts {
        text += &format!("{:<8}", from.pod);
        for to in hosts {
            let pair = pairs.iter().find(|pair| pair.from == from.pod && pair.to == to.pod);
            text += &match pair {
                Some(pair) if pair.ok => format!(" {:>8}", pair.cell),
                Some(pair) => {
                    format!(" {}", terminal.style(Style::Failed, &format!("{:>8}", pair.cell)))
                }
                None => format!(" {:>8}", "·"),
            };
        }
        text += "\n";
    }
    text
}

fn summary(title: &str, pairs: &[&PairRow], terminal: &Terminal) -> String {
    let mut reached: Vec<&&PairRow> = pairs.iter().filter(|pair| pair.ok).collect();
    reached.sort_by(|a, b| b.rtt_ms.unwrap_or(0.0).total_cmp(&a.rtt_ms.unwrap_or(0.0)));
    let count = format!("{} of {} pairs reached", reached.len(), pairs.len());
    let count =
        if reached.len() == pairs.len() { count } else { terminal.style(Style::Failed, &count) };
    let mut text = format!("\n{title}: {count}\n");
    if let Some(slowest) = reached.first()
        && let Some(fastest) = reached.last()
    {
        let min = &fastest.cell;
        let median = &reached[reached.len() / 2].cell;
        let max = &slowest.cell;
        let _ = writeln!(
            text,
            "round trips in ms: min {min}, median {median}, max {max}; the slowest:"
        );
        for pair in reached.iter().take(5) {
            let _ = writeln!(text, "  {:<8} → {:<8} {:>8}", pair.from, pair.to, pair.cell);
        }
    }
    text
}

/// The reasons of the pairs that are not reached.
fn reasons(outcome: &Outcome) -> String {
    let failures: Vec<&PairRow> = outcome.pairs.iter().filter(|pair| !pair.ok).collect();
    let mut text = String::new();
    for pair in failures.iter().take(LISTED) {
        let reason = pair.error.as_deref().unwrap_or("unknown");
        let start = if text.is_empty() { "\n" } else { "" };
        let _ =
            writeln!(text, "{start}{:<8} → {:<8} {}: {reason}", pair.from, pair.to, pair.family);
    }
    if failures.len() > LISTED {
        let _ = writeln!(text, "… and {} more (--json lists all)", failures.len() - LISTED);
    }
    text
}

fn verdict(outcome: &Outcome, terminal: &Terminal) -> String {
    let pairs = outcome.pairs.len();
    let missed = outcome.pairs.iter().filter(|pair| !pair.ok).count();
    let text = match outcome.seconds_to_ready {
        Some(seconds) if outcome.ok => terminal.style(
            Style::Good,
            &format!("✓ every pod reached every pod {seconds:.2} s after the last daemon's start"),
        ),
        _ => terminal.style(Style::Failed, &format!("✗ {missed} of {pairs} pairs not reached")),
    };
    format!("\n{text}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Terminal = Terminal { width: 80, colours: false };

    fn outcome(hosts: usize, broken: Option<(&str, &str)>) -> Outcome {
        let row = |n: usize| HostRow {
            name: format!("host-{n}"),
            addresses: vec![
                format!("192.168.77.{n}").parse().unwrap(),
                format!("fd00:77::{n:x}").parse().unwrap(),
            ],
            subnets: vec![format!("10.244.{n}.0/24"), format!("fd00:10:244:ff{n:02x}::/64")],
            mtu: 1430,
            pod: format!("pod-{n}"),
            pod_addresses: Vec::new(),
            daemon_pid: Some(1),
            vm_rss_kib: Some(6 * 1024 + 512),
        };
        let mut pairs = Vec::new();
        for family in ["ipv4", "ipv6"] {
            for (from, to) in
                (1..=hosts).flat_map(|f| (1..=hosts).map(move |t| (f, t))).filter(|(f, t)| f != t)
            {
                let from = format!("pod-{from}");
                let to = format!("pod-{to}");
                let ok = broken != Some((&from, &to));
                pairs.push(PairRow {
                    from,
                    to,
                    family,
                    ok,
                    rtt_ms: ok.then_some(0.071),
                    tcp_bytes: 66_000,
                    error: (!ok).then(|| "TCP stalled after 0 bytes".to_owned()),
                    cell: if ok { "0.071".into() } else { "stalled".into() },
                });
            }
        }
        let backend = "vxlan".to_owned();
        let family = "dual".to_owned();
        let seconds_to_ready = broken.is_none().then_some(0.512);
        let hosts = (1..=hosts).map(row).collect();
        Outcome {
            ok: broken.is_none(),
            error: None,
            backend,
            family,
            seconds_to_ready,
            hosts,
            pairs,
        }
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap()
    }

    #[test]
    fn the_table_fits_80_columns_for_any_number_of_hosts() {
        for hosts in [1, 2, 3, 8, 9, 250] {
            let text = render(&outcome(hosts, None), &PLAIN);
            assert!(widest(&text) <= 80 && !text.contains('\x1b'), "{hosts} hosts:\n{text}");
            assert!(text.contains("every pod reached every pod 0.51 s"), "{text}");
            assert!(
                text.lines().count() <= 70,
                "{hosts} hosts take {} lines",
                text.lines().count()
            );
        }
    }

    /// `UPDATE_PAGES=1` writes the files.
    #[test]
    fn pages_equal_the_stored_pages_at_80_and_120_columns() {
        let broken = Some(("pod-2", "pod-1"));
        for (name, outcome) in [
            ("complete", outcome(3, None)),
            ("unreached", outcome(3, broken)),
            ("many_hosts", outcome(30, broken)),
        ] {
            let file = format!("{}/src/cli/pages/{name}.txt", env!("CARGO_MANIFEST_DIR"));
            for width in [80, 120] {
                let text = render(&outcome, &Terminal { width, ..PLAIN });
                if std::env::var_os("UPDATE_PAGES").is_some() {
                    std::fs::write(&file, &text).unwrap();
                }
                let stored = std::fs::read_to_string(&file).unwrap_or_default();
                assert_eq!(text, stored, "{file}:\n{text}");
            }
        }
    }

    #[test]
    fn unreached_pairs_are_listed_with_the_reason() {
        for hosts in [3, 30] {
            let text = render(&outcome(hosts, Some(("pod-2", "pod-1"))), &PLAIN);
            assert!(text.contains("pod-2    → pod-1    ipv4: TCP stalled after 0 bytes"), "{text}");
            assert!(text.contains("✗ 2 of "), "{text}");
        }
        let coloured =
            render(&outcome(3, Some(("pod-2", "pod-1"))), &Terminal { colours: true, ..PLAIN });
        assert!(coloured.contains("\x1b[31m stalled\x1b[0m"), "{coloured}");
    }
}
