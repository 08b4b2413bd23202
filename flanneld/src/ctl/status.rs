//! How a node is, on one screen. The one thing to know: what is wrong comes first, in words, with what would help.

use flannel_api::Client;
use flannel_api::Finding;
use flannel_api::{
    FailureReport, NetworkReport, PeerReport, StatusReport, StoreReport, VERSION, request,
};
use flannel_backends::Backends;
use serde_json::{Value, json};

use super::options::Global;
use super::paper::{Ink, Paper, span};
use super::{Failure, Result, Said, offline};

/// `flannelctl status`.
pub(crate) async fn status(
    client: &Client,
    global: &Global,
    backends: &Backends,
    paper: &Paper,
) -> Result<Said> {
    match client.ask("GET", request::STATUS) {
        Ok(mut value) => {
            let report = report(&value)?;
            value["running"] = Value::Bool(true);
            Ok(Said { text: page(&report, paper), value, ok: report.ready })
        }
        Err(failure @ flannel_api::Error::NoDaemon { .. }) => {
            Ok(offline::status((global, backends), paper, &failure).await)
        }
        Err(failure) => Err(failure.into()),
    }
}

/// `flannelctl peers`.
pub(crate) async fn peers(client: &Client, global: &Global, paper: &Paper) -> Result<Said> {
    let value = match client.ask("GET", request::PEERS) {
        Ok(value) => value,
        Err(flannel_api::Error::NoDaemon { .. }) => offline::peers(global).await?,
        Err(failure) => return Err(failure.into()),
    };
    let peers: Vec<PeerReport> =
        serde_json::from_value(value["peers"].clone()).map_err(|error| skew(&error))?;
    let now = flannel_api::seconds(std::time::SystemTime::now());
    let stale =
        value["stale"].as_str().map(|text| paper.field("warning", Ink::Warning, text) + "\n");
    // Without a daemon nothing is known of states, which is no trouble by itself; that nobody answers is.
    let ok = stale.is_none()
        && peers.iter().all(|peer| peer.state == "in place" || peer.state == offline::UNKNOWN);
    Ok(Said { text: stale.unwrap_or_default() + &peers_page(&peers, now, paper), value, ok })
}

/// All peers, and what is wrong with those that are not in place.
fn peers_page(peers: &[PeerReport], now: f64, paper: &Paper) -> String {
    let (table, reasons) = (peer_table(peers, now, paper), reasons(peers, paper));
    if reasons.is_empty() { table } else { format!("{table}\n{reasons}") }
}

/// The daemon's report, read.
pub(crate) fn report(value: &Value) -> Result<StatusReport> {
    serde_json::from_value(value.clone()).map_err(|error| skew(&error))
}

fn skew(error: &serde_json::Error) -> Failure {
    Failure::Refused(format!(
        "the daemon's answer is not understood, is it older than this flannelctl? {error}"
    ))
}

/// The screen.
pub(crate) fn page(report: &StatusReport, paper: &Paper) -> String {
    let now = report.time;
    let mut out = headline(report, paper);
    for problem in &report.problems {
        let ink = if problem.is_error() { Ink::Bad } else { Ink::Warning };
        out += &paper.field(&problem.severity, ink, &problem.text);
        if let Some(hint) = &problem.hint {
            out += &paper.command("try", hint);
        }
    }
    out += &findings(&report.findings, paper);
    if !report.problems.is_empty() || !report.findings.is_empty() {
        out.push('\n');
    }
    if let Some(network) = &report.network {
        out += &network_fields(network, paper);
    }
    if let Some(store) = &report.store {
        out += &paper.field("store", Ink::Bold, &store_line(store, now));
    }
    if let Some(network) = &report.network {
        out += &kernel_fields(network, now, paper);
        out += &peers_of(network, now, paper);
    }
    out
}

/// What preflight and doctor found, with the commands that mend it.
pub(crate) fn findings(findings: &[Finding], paper: &Paper) -> String {
    let mut out = String::new();
    for finding in findings {
        let ink = if finding.is_error() { Ink::Bad } else { Ink::Warning };
        out += &paper.field(&finding.severity, ink, &finding.text);
        if let Some(mend) = &finding.mend {
            out += &paper.command("mend", mend);
        }
    }
    out
}

fn headline(report: &StatusReport, paper: &Paper) -> String {
    let state = match report.ready {
        true => paper.ink(Ink::Good, "READY"),
        false => paper.ink(Ink::Bad, "NOT READY"),
    };
    let daemon = &report.daemon;
    let up = span(report.time - daemon.started);
    format!("flanneld {}  {state}  up {up}  pid {}\n\n", daemon.version, daemon.pid)
}

fn network_fields(network: &NetworkReport, paper: &Paper) -> String {
    let lease = &network.lease;
    let term = match (lease.ownership.as_str(), lease.remaining) {
        ("held", Some(left)) => format!("held, {} left unless renewed", span(left)),
        ("reserved", _) => "reserved for this node".to_owned(),
        (word, _) => word.to_uppercase(),
    };
    let interface = &network.interface;
    let known = match interface.public == interface.addresses {
        true => String::new(),
        false => format!(", known to peers as {}", interface.public.join(", ")),
    };
    let chosen = format!(
        "{}, {}{known}, MTU {}: {}",
        interface.name,
        interface.addresses.join(", "),
        interface.mtu,
        interface.reason
    );
    let backend = format!("{}, pods may send {} bytes", network.backend, network.mtu);
    paper.field("lease", Ink::Bold, &format!("{}, {term}", lease.subnets.join(", ")))
        + &paper.field("interface", Ink::Bold, &chosen)
        + &paper.field("backend", Ink::Bold, &backend)
}

fn store_line(store: &StoreReport, now: f64) -> String {
    let answered = match (store.answered, &store.error) {
        (Some(at), None) => format!("last answer {} ago", span(now - at)),
        (Some(at), Some(_)) => format!("DOES NOT ANSWER, last answer {} ago", span(now - at)),
        (None, _) => "HAS NOT ANSWERED YET".to_owned(),
    };
    format!("{}, {answered}, {} of {} requests failed", store.name, store.failures, store.requests)
}

fn kernel_fields(network: &NetworkReport, now: f64, paper: &Paper) -> String {
    let state = match (network.failing.total, network.in_sync) {
        (0, true) => "all in place".to_owned(),
        (0, false) => "not all in place yet".to_owned(),
        (failing, _) => format!("{failing} REFUSED"),
    };
    let mut kernel = format!("{} objects, {state}", network.objects);
    let millis = |seconds: Option<f64>| match seconds {
        Some(seconds) => format!("{} ms", (seconds * 10_000.0).round() / 10.0),
        None => "more than 10 s".to_owned(),
    };
    let latency = &network.latency;
    if latency.count > 0 {
        let (all, half) = (millis(latency.p99), millis(latency.p50));
        kernel += &format!("; changes within {half} (half) or {all} (99%)");
    }
    let mut out = paper.field("kernel", Ink::Bold, &kernel);
    // The first one is told above, among the problems.
    for failure in network.failing.listed.iter().skip(1).take(4) {
        let FailureReport { change, error, since, tries, .. } = failure;
        let text = format!("{change}: {error}, since {}, tried {tries} times", span(now - since));
        out += &paper.field("", Ink::Plain, &text);
    }
    for (n, (pod_network, room)) in network.networks.iter().zip(&network.subnets).enumerate() {
        let text =
            format!("{pod_network}: {} of {} taken, {} free", room.used, room.total, room.free);
        out += &paper.field(if n == 0 { "subnets" } else { "" }, Ink::Bold, &text);
    }
    if let Some(last) = network.repairs.last.first() {
        let text = format!(
            "{}, the last one {} ago: {}",
            network.repairs.total,
            span(now - last.at),
            last.text
        );
        out += &paper.field("repairs", Ink::Bold, &text);
    }
    out
}

fn peers_of(network: &NetworkReport, now: f64, paper: &Paper) -> String {
    let peers = &network.peers;
    let disbelieved = match network.disbelieved {
        0 => String::new(),
        number => format!(", {number} NOT BELIEVED"),
    };
    let pending = match network.pending {
        0 => String::new(),
        number => format!(", {number} pending"),
    };
    let mut out =
        paper.field("peers", Ink::Bold, &format!("{}{disbelieved}{pending}", peers.total));
    if !peers.listed.is_empty() {
        out.push('\n');
        out += &peer_table(&peers.listed, now, paper);
    }
    let more = peers.total - (peers.listed.len() as u64).min(peers.total);
    if more > 0 {
        out += &format!("and {more} more: flannelctl peers\n");
    }
    out
}

/// One line for each peer, and one more for each further subnet.
fn peer_table(peers: &[PeerReport], now: f64, paper: &Paper) -> String {
    let row = |peer: &PeerReport| {
        let ink = match peer.state.as_str() {
            "in place" | offline::UNKNOWN => Ink::Plain,
            "pending" => Ink::Warning,
            _ => Ink::Bad,
        };
        let backend = if peer.backend.is_empty() { "-" } else { &peer.backend };
        let changed =
            peer.changed.map_or_else(|| "-".to_owned(), |at| format!("{} ago", span(now - at)));
        let words = [backend.to_owned(), peer.state.clone(), changed].map(|word| vec![word]);
        (ink, [peer.subnets.clone(), peer.public.clone()].into_iter().chain(words).collect())
    };
    let rows: Vec<_> = peers.iter().map(row).collect();
    paper.table(&["SUBNET", "ADDRESS", "BACKEND", "STATE", "CHANGED"], &rows)
}

/// What is wrong with each peer that is not in place.
fn reasons(peers: &[PeerReport], paper: &Paper) -> String {
    let wrong = peers.iter().filter_map(|peer| Some((peer, peer.reason.as_ref()?)));
    wrong
        .map(|(peer, reason)| {
            let text = format!("{} is {}: {reason}", peer.subnets.join(", "), peer.state);
            paper.field("reason", Ink::Bad, &text)
        })
        .collect()
}

/// What programs get when there is no daemon.
pub(crate) fn down(reason: &str) -> Value {
    json!({ "version": VERSION, "running": false, "ready": false, "reason": reason })
}

#[cfg(test)]
pub(crate) mod tests {
    use flannel_api::testing::status_report as sample;

    use super::*;
    use crate::ctl::paper::tests::looks;

    fn healthy() -> StatusReport {
        let mut report = sample();
        report.ready = true;
        report.problems.clear();
        report.findings.clear();
        let network = report.network.as_mut().unwrap();
        network.in_sync = true;
        (network.failing.total, network.failing.listed) = (0, Vec::new());
        network.peers.total = 2;
        (network.believed, network.disbelieved) = (2, 0);
        network.peers.listed.retain(|peer| peer.state == "in place");
        network.repairs.last.clear();
        report.store.as_mut().unwrap().error = None;
        report
    }

    #[test]
    fn trouble_at_80_columns() {
        let text = page(&sample(), &Paper { width: 80, colours: false });
        assert_eq!(text, include_str!("status_80.txt"), "\n{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80));
    }

    #[test]
    fn trouble_at_120_columns() {
        let text = page(&sample(), &Paper { width: 120, colours: false });
        assert_eq!(text, include_str!("status_120.txt"), "\n{text}");
    }

    #[test]
    fn a_healthy_node_at_80_columns() {
        let text = page(&healthy(), &Paper { width: 80, colours: false });
        assert_eq!(text, include_str!("status_healthy_80.txt"), "\n{text}");
    }

    #[test]
    fn peers_as_they_look() {
        let mut peers = sample().network.unwrap().peers.listed;
        let reasons = [
            (
                "failing",
                "put route 10.1.8.0/24 via 10.1.8.0 dev flannel.1 onlink: Nexthop has invalid gateway: Network is unreachable (os error 101)",
            ),
            (
                "not believed",
                "neigh 10.1.9.0 dev flannel.1 is defined otherwise by the earlier lease 10.1.7.0-24 of 192.0.2.7 (vxlan)",
            ),
            ("in place", ""),
            ("pending", "its lease has come, and waits for its turn"),
        ];
        for (peer, (state, reason)) in peers.iter_mut().zip(reasons) {
            peer.state = state.to_owned();
            peer.reason = Some(reason.to_owned()).filter(|reason| !reason.is_empty());
        }
        assert_eq!(peers.len(), reasons.len());
        let now = sample().time;
        looks("peers", |paper| peers_page(&peers, now, paper));
    }

    #[test]
    fn while_thousands_arrive_it_is_said_how_many_wait() {
        let mut report = healthy();
        report.ready = false;
        let network = report.network.as_mut().unwrap();
        (network.in_sync, network.pending, network.peers.total) = (false, 4_096, 9_000);
        looks("status_arriving", |paper| page(&report, paper));
    }

    #[test]
    fn a_peer_that_is_only_new_is_believed() {
        let mut report = healthy();
        report.network.as_mut().unwrap().peers.total += 1;
        let text = page(&report, &Paper { width: 80, colours: false });
        assert!(!text.contains("NOT BELIEVED"), "{text}");
    }

    #[test]
    fn colours_change_nothing_but_colours() {
        let plain = page(&sample(), &Paper { width: 80, colours: false });
        let mut bright = page(&sample(), &Paper { width: 80, colours: true });
        assert!(bright.contains("\x1b[1;31mNOT READY\x1b[0m"));
        while let Some(start) = bright.find('\x1b') {
            let end = start + bright[start..].find('m').unwrap();
            bright.replace_range(start..=end, "");
        }
        let trimmed =
            |text: &str| text.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>();
        assert_eq!(trimmed(&bright), trimmed(&plain));
    }
}
