//! `flannelctl status` and `peers`. Problems come first, with commands that repair them.

use flannel_api::{
    FailureReport, Finding, GuardReport, MasqueradeReport, MoveReport, NetworkReport, Ownership,
    PeerReport, PeerState, Severity, StatusReport, StoreReport, TrafficReport, TunnelReport,
};
use flannel_options::printable::inline;
use serde::Serialize;
use serde_json::json;

use super::paths::numbers;
use crate::error::Result;
use crate::offline::{self, LeftState};
use crate::terminal::{Style, Terminal, bytes, span};
use crate::{Context, Output};

/// The status of this node.
#[derive(Debug)]
pub(crate) enum NodeStatus {
    /// The daemon runs.
    Running(Box<StatusReport>),
    /// No daemon runs.
    Down(Box<LeftState>),
}

/// A status of a daemon, with the word that one runs.
#[derive(Serialize)]
struct RunningReport<'a> {
    running: bool,
    #[serde(flatten)]
    report: &'a StatusReport,
}

impl NodeStatus {
    /// Asks the daemon, or reads the state that the last daemon left.
    ///
    /// # Errors
    /// It is not known whether a daemon runs, or its answer cannot be used.
    pub(crate) async fn read(context: Context<'_>) -> Result<Self> {
        match context.client.status() {
            Ok(report) => Ok(Self::Running(Box::new(report))),
            Err(failure @ flannel_api::Error::NoDaemon { .. }) => {
                Ok(Self::Down(Box::new(LeftState::read(context, &failure).await)))
            }
            Err(failure) => Err(failure.into()),
        }
    }

    /// The status as text and as JSON.
    pub(crate) fn output(&self, terminal: &Terminal) -> Output {
        match self {
            Self::Running(report) => Output {
                text: page(report, terminal),
                value: json!(RunningReport { running: true, report }),
                ok: report.ready,
            },
            Self::Down(left) => {
                Output { text: left.page(terminal), value: json!(left.report()), ok: false }
            }
        }
    }
}

/// `flannelctl status`.
pub(crate) async fn status(context: Context<'_>) -> Result<Output> {
    Ok(NodeStatus::read(context).await?.output(context.terminal))
}

/// `flannelctl peers`.
pub(crate) async fn peers(Context { client, global, terminal, .. }: Context<'_>) -> Result<Output> {
    let now = flannel_api::seconds(std::time::SystemTime::now());
    match client.peers() {
        Ok(report) => Ok(Output {
            text: peers_page(&report.peers, now, terminal),
            ok: report.peers.iter().all(|peer| peer.state == PeerState::InPlace),
            value: json!(report),
        }),
        Err(flannel_api::Error::NoDaemon { .. }) => {
            let left = offline::peers(global).await?;
            let stale = left.stale.as_ref();
            let warning = stale.map(|text| terminal.field("warning", Style::Warning, text) + "\n");
            Ok(Output {
                text: warning.unwrap_or_default() + &peers_page(&left.peers, now, terminal),
                // The states are not known, which is not a problem. A missing answer is one.
                ok: left.stale.is_none(),
                value: json!(left),
            })
        }
        Err(failure) => Err(failure.into()),
    }
}

/// All peers, with their encrypted tunnels, and the reasons of those that are not in place or have
/// a lease with a problem.
fn peers_page(peers: &[PeerReport], now: f64, terminal: &Terminal) -> String {
    let parts = [tunnel_table(peers, terminal), reasons(peers, terminal)];
    parts.iter().fold(peer_table(peers, now, terminal), |page, part| {
        if part.is_empty() { page } else { format!("{page}\n{part}") }
    })
}

/// The page of `status`.
pub(crate) fn page(report: &StatusReport, terminal: &Terminal) -> String {
    let now = report.time;
    let mut out = headline(report, terminal);
    for problem in &report.problems {
        out += &severity_field(problem.severity, &problem.text, terminal);
        if let Some(hint) = &problem.hint {
            out += &terminal.command("try", hint);
        }
    }
    out += &findings(&report.findings, terminal);
    if !report.problems.is_empty() || !report.findings.is_empty() {
        out.push('\n');
    }
    if let Some(network) = &report.network {
        out += &network_fields(network, terminal);
    }
    if let Some(store) = &report.store {
        out += &terminal.field("store", Style::Bold, &store_line(store, now));
    }
    if let Some(network) = &report.network {
        out += &kernel_fields(network, now, terminal);
        if let Some(traffic) = &network.traffic {
            out += &terminal.field("packets", Style::Bold, &traffic_line(traffic));
        }
        if let Some(guard) = &network.guard {
            out += &terminal.field("guard", Style::Bold, &guard_line(guard));
        }
        if let Some(paths) = &network.paths {
            out += &terminal.field("paths", Style::Bold, &numbers(paths));
            for text in &paths.lowered {
                out += &terminal.field("", Style::Plain, text);
            }
        }
        out += &peers_of(network, now, terminal);
    }
    out
}

/// A text with its severity as the label.
fn severity_field(severity: Severity, text: &str, terminal: &Terminal) -> String {
    let style = match severity {
        Severity::Error => Style::Bad,
        Severity::Warning => Style::Warning,
    };
    terminal.field(&severity.to_string(), style, text)
}

/// Findings, with the commands that repair them.
pub(crate) fn findings(findings: &[Finding], terminal: &Terminal) -> String {
    let mut out = String::new();
    for finding in findings {
        out += &severity_field(finding.severity, &finding.text, terminal);
        if let Some(repair) = &finding.repair {
            out += &terminal.command("repair", repair);
        }
    }
    out
}

fn headline(report: &StatusReport, terminal: &Terminal) -> String {
    let state = if report.ready {
        terminal.style(Style::Good, "READY")
    } else {
        terminal.style(Style::Bad, "NOT READY")
    };
    let daemon = &report.daemon;
    let version = inline(&daemon.version);
    let up = span(report.time - daemon.started);
    format!("flanneld {version}  {state}  up {up}  pid {}\n\n", daemon.pid)
}

fn network_fields(network: &NetworkReport, terminal: &Terminal) -> String {
    let lease = &network.lease;
    let term = match lease.ownership {
        Ownership::Held { remaining } => format!("held, {} left unless renewed", span(remaining)),
        Ownership::Reserved => "reserved for this node".to_owned(),
        Ownership::Lapsed => "LAPSED".to_owned(),
        _ => "NONE".to_owned(),
    };
    let interface = &network.interface;
    let known = if interface.public == interface.addresses {
        String::new()
    } else {
        format!(", known to peers as {}", interface.public.join(", "))
    };
    let chosen = format!(
        "{}, {}{known}, MTU {}: {}",
        interface.name,
        interface.addresses.join(", "),
        interface.mtu,
        interface.reason
    );
    let path = if network.path.is_empty() { "" } else { &format!(" by {}", network.path) };
    let backend = format!("{}{path}, pods may send {} bytes", network.backend, network.mtu);
    terminal.field("lease", Style::Bold, &format!("{}, {term}", lease.subnets.join(", ")))
        + &terminal.field("interface", Style::Bold, &chosen)
        + &terminal.field("backend", Style::Bold, &backend)
        + &network.masquerade.as_ref().map(|it| masquerade_line(it, terminal)).unwrap_or_default()
        + &network.moving.as_ref().map(|moving| move_line(moving, terminal)).unwrap_or_default()
}

fn masquerade_line(masquerade: &MasqueradeReport, terminal: &Terminal) -> String {
    let MasqueradeReport { families, exclude, sources, ports, interfaces } = masquerade;
    let mut text = families.join(" and ");
    for (words, list) in [(", as", sources), (", by", interfaces), (", except to", exclude)] {
        if !list.is_empty() {
            text += &format!("{words} {}", list.join(", "));
        }
    }
    if let Some(ports) = ports {
        text += &format!(", from ports {ports}");
    }
    terminal.field("masq", Style::Bold, &text)
}

fn move_line(moving: &MoveReport, terminal: &Terminal) -> String {
    let MoveReport { to, from, offers, leases, offering, waits_for } = moving;
    let waits = waits_for.as_ref().map(|it| format!("; waits for {it}")).unwrap_or_default();
    let text = format!(
        "from {} to {to}: this node offers {}; {offering} of {leases} nodes offer {to}{waits}",
        from.join(", "),
        offers.join(", "),
    );
    terminal.field("move", Style::Warning, &text)
}

fn store_line(store: &StoreReport, now: f64) -> String {
    let answered = match (store.answered, &store.error) {
        (Some(at), None) => format!("last answer {} ago", span(now - at)),
        (Some(at), Some(_)) => format!("DOES NOT ANSWER, last answer {} ago", span(now - at)),
        (None, _) => "HAS NOT ANSWERED YET".to_owned(),
    };
    format!("{}, {answered}, {} of {} requests failed", store.name, store.failures, store.requests)
}

fn kernel_fields(network: &NetworkReport, now: f64, terminal: &Terminal) -> String {
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
        let half = millis(latency.p50);
        let all = millis(latency.p99);
        kernel += &format!("; changes applied within {half} (p50), {all} (p99)");
    }
    let mut out = terminal.field("kernel", Style::Bold, &kernel);
    // The first one is among the problems above.
    for failure in network.failing.listed.iter().skip(1).take(4) {
        let FailureReport { change, error, since, tries, .. } = failure;
        let text = format!("{change}: {error}, since {}, tried {tries} times", span(now - since));
        out += &terminal.field("", Style::Plain, &text);
    }
    for (n, (pod_network, room)) in network.networks.iter().zip(&network.subnets).enumerate() {
        let text =
            format!("{pod_network}: {} of {} taken, {} free", room.used, room.total, room.free);
        out += &terminal.field(if n == 0 { "subnets" } else { "" }, Style::Bold, &text);
    }
    if let Some(last) = network.repairs.last.first() {
        let text = format!(
            "{}, the last one {} ago: {}",
            network.repairs.total,
            span(now - last.at),
            last.text
        );
        out += &terminal.field("repairs", Style::Bold, &text);
    }
    out
}

fn traffic_line(traffic: &TrafficReport) -> String {
    let TrafficReport { sent_packets, sent_bytes, received_packets, received_bytes, dropped } =
        traffic;
    let reasons = dropped.iter().filter(|(_, count)| **count > 0);
    let reasons: Vec<_> = reasons.map(|(reason, count)| format!("{count} {reason}")).collect();
    let dropped = match reasons.as_slice() {
        [] => "none dropped".to_owned(),
        reasons => format!("dropped: {}", reasons.join(", ")),
    };
    let moved = |packets: &Option<u64>, size: &Option<u64>, how| {
        Some(format!("{} {how} ({}), ", (*packets)?, bytes((*size)?)))
    };
    // The kernel counts those that it moves.
    let sent = moved(sent_packets, sent_bytes, "sent").unwrap_or_default();
    let received = moved(received_packets, received_bytes, "received").unwrap_or_default();
    format!("{sent}{received}{dropped}")
}

fn guard_line(guard: &GuardReport) -> String {
    let reasons = guard.packets.iter().filter(|(_, count)| **count > 0);
    let reasons: Vec<_> = reasons.map(|(reason, count)| format!("{count} {reason}")).collect();
    match (guard.drops, reasons.as_slice()) {
        (true, []) => "none dropped".to_owned(),
        (true, reasons) => format!("dropped: {}", reasons.join(", ")),
        (false, []) => "only counts, none".to_owned(),
        (false, reasons) => format!("only counted: {}", reasons.join(", ")),
    }
}

fn peers_of(network: &NetworkReport, now: f64, terminal: &Terminal) -> String {
    let peers = &network.peers;
    let rejected = match network.rejected {
        0 => String::new(),
        number => format!(", {number} REJECTED"),
    };
    let pending = match network.pending {
        0 => String::new(),
        number => format!(", {number} pending"),
    };
    let mut out =
        terminal.field("peers", Style::Bold, &format!("{}{rejected}{pending}", peers.total));
    if !peers.listed.is_empty() {
        out.push('\n');
        out += &peer_table(&peers.listed, now, terminal);
    }
    let more = peers.total - (peers.listed.len() as u64).min(peers.total);
    if more > 0 {
        out += &format!("and {more} more: flannelctl peers\n");
    }
    out
}

/// A row for each peer. A cell has a line for each subnet.
fn peer_table(peers: &[PeerReport], now: f64, terminal: &Terminal) -> String {
    let rows: Vec<_> = peers
        .iter()
        .map(|peer| {
            let style = match peer.state {
                PeerState::InPlace | PeerState::Unknown => Style::Plain,
                PeerState::Pending => Style::Warning,
                _ => Style::Bad,
            };
            let backend = if peer.backend.is_empty() { "-" } else { &peer.backend };
            let changed =
                peer.changed.map_or_else(|| "-".to_owned(), |at| format!("{} ago", span(now - at)));
            let words =
                [backend.to_owned(), peer.state.to_string(), changed].map(|word| vec![word]);
            (style, [peer.subnets.clone(), peer.public.clone()].into_iter().chain(words).collect())
        })
        .collect();
    terminal.table(&["SUBNET", "ADDRESS", "BACKEND", "STATE", "CHANGED"], &rows)
}

/// A row for each peer with encrypted tunnels.
fn tunnel_table(peers: &[PeerReport], terminal: &Terminal) -> String {
    let with_tunnels = peers.iter().filter(|peer| !peer.tunnels.is_empty());
    let rows: Vec<_> = with_tunnels.map(tunnel_row).collect();
    match rows.as_slice() {
        [] => String::new(),
        rows => terminal.table(&["SUBNET", "HANDSHAKE", "RECEIVED", "SENT", "ROAMED TO"], rows),
    }
}

/// The encrypted tunnels to a peer. A cell has a line for each tunnel.
fn tunnel_row(peer: &PeerReport) -> (Style, Vec<Vec<String>>) {
    let tunnels = &peer.tunnels;
    let is_unanswered = tunnels.iter().any(|tunnel| tunnel.handshake.is_none() && tunnel.sent > 0);
    let style = if is_unanswered { Style::Warning } else { Style::Plain };
    let each = |cell: fn(&TunnelReport) -> String| tunnels.iter().map(cell).collect();
    let cells = vec![
        peer.subnets.clone(),
        each(|tunnel| {
            tunnel.handshake.map_or_else(|| "none".into(), |age| format!("{} ago", span(age)))
        }),
        each(|tunnel| bytes(tunnel.received)),
        each(|tunnel| bytes(tunnel.sent)),
        each(|tunnel| tunnel.endpoint.clone().unwrap_or_else(|| "-".into())),
    ];
    (style, cells)
}

/// The reason of each peer that is not in place.
fn reasons(peers: &[PeerReport], terminal: &Terminal) -> String {
    let wrong = peers.iter().filter_map(|peer| Some((peer, peer.reason.as_ref()?)));
    wrong
        .map(|(peer, reason)| {
            let text = format!("{} is {}: {reason}", peer.subnets.join(", "), peer.state);
            terminal.field("reason", Style::Bad, &text)
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use flannel_api::PathState;
    use flannel_api::testing::status_report as sample;
    use serde_json::Value;

    use super::*;
    use crate::terminal::tests::assert_page;

    /// Sets the number of peers, of their objects and of taken subnets.
    fn set_peers(network: &mut NetworkReport, peers: u64) {
        network.peers.total = peers;
        // A neighbour, a forwarding entry and a route per peer; the device and its address.
        network.objects = 3 * peers + 2;
        let room = &mut network.subnets[0];
        room.used = peers + 1;
        room.free = room.total - (peers + 1);
        let paths = network.paths.as_mut().unwrap();
        paths.states = [(PathState::Ok, peers)].into();
        paths.failing = 0;
        paths.lowered.clear();
    }

    fn healthy() -> StatusReport {
        let mut report = sample();
        report.ready = true;
        report.problems.clear();
        report.findings.clear();
        let network = report.network.as_mut().unwrap();
        network.in_sync = true;
        network.moving = None;
        network.failing.total = 0;
        network.failing.listed = Vec::new();
        set_peers(network, 2);
        network.accepted = 2;
        network.rejected = 0;
        network.peers.listed.retain(|peer| peer.state == PeerState::InPlace);
        network.repairs.last.clear();
        report.store.as_mut().unwrap().error = None;
        report
    }

    #[test]
    fn problems_are_shown() {
        assert_page("status", |terminal| page(&sample(), terminal));
    }

    #[test]
    fn a_healthy_node_is_shown() {
        assert_page("status_healthy", |terminal| page(&healthy(), terminal));
    }

    #[test]
    fn peers_are_shown_with_their_encrypted_tunnels() {
        let mut peers = sample().network.unwrap().peers.listed;
        peers.truncate(3);
        let tunnel = |device: &str, handshake, endpoint: Option<&str>| TunnelReport {
            device: device.into(),
            handshake,
            endpoint: endpoint.map(str::to_owned),
            received: 92 * 12,
            sent: 3 << 30,
        };
        for peer in &mut peers {
            peer.backend = "wireguard".into();
            peer.state = PeerState::InPlace;
            peer.reason = None;
            peer.changed = None;
        }
        let ipv6 = tunnel("flannel-wg-v6", Some(7300.0), None);
        peers[0].subnets.push("fd00:1:0:8::/64".into());
        peers[0].tunnels = vec![tunnel("flannel-wg", Some(12.3), None), ipv6];
        peers[1].tunnels = vec![tunnel("flannel-wg", None, None)];
        peers[2].tunnels = vec![tunnel("flannel-wg", Some(0.0), Some("198.51.100.7:40000"))];
        assert_page("peers_tunnels", |terminal| peers_page(&peers, 1_700_000_100.0, terminal));
    }

    #[test]
    fn peers_are_shown_with_the_reasons_of_their_states() {
        let mut peers = sample().network.unwrap().peers.listed;
        let reasons = [
            (
                PeerState::Failing,
                "put route 10.1.8.0/24 via 10.1.8.0 dev flannel.1 onlink: Nexthop has invalid \
                 gateway: Network is unreachable (os error 101)",
            ),
            (
                PeerState::Rejected,
                "fdb 0a:00:00:00:00:07 dev flannel.1 is defined otherwise by the earlier lease \
                 10.1.7.0-24 of 192.0.2.7 (vxlan)",
            ),
            (PeerState::InPlace, ""),
            (PeerState::Pending, "its lease has come, and waits for its turn"),
        ];
        for (peer, (state, reason)) in peers.iter_mut().zip(reasons) {
            peer.state = state;
            peer.reason = Some(reason.to_owned()).filter(|reason| !reason.is_empty());
        }
        assert_eq!(peers.len(), reasons.len());
        let now = sample().time;
        assert_page("peers", |terminal| peers_page(&peers, now, terminal));
    }

    #[test]
    fn the_number_of_pending_peers_is_shown() {
        let mut report = healthy();
        report.ready = false;
        let network = report.network.as_mut().unwrap();
        network.in_sync = false;
        network.pending = 4_096;
        set_peers(network, 9_000);
        assert_page("status_arriving", |terminal| page(&report, terminal));
    }

    #[test]
    fn a_new_peer_is_not_shown_as_rejected() {
        let mut report = healthy();
        report.network.as_mut().unwrap().peers.total += 1;
        let text = page(&report, &Terminal { width: 80, colours: false });
        assert!(!text.contains("REJECTED"), "{text}");
    }

    #[test]
    fn no_value_acts_on_the_terminal_or_forges_a_line() {
        fn poison(value: &mut Value) {
            // These have no other values.
            let is_closed = |name: &str| matches!(name, "severity" | "deployment");
            match value {
                Value::String(text) => text.push_str("\x1b[2J\x1b[32m\x07\u{9b}\u{202e}\nFORGED"),
                Value::Array(values) => values.iter_mut().for_each(poison),
                Value::Object(fields) => {
                    let open = fields.iter_mut().filter(|(name, _)| !is_closed(name));
                    open.for_each(|(_, value)| poison(value));
                }
                _ => {}
            }
        }
        let mut report = json!(sample());
        poison(&mut report);
        let report: StatusReport = serde_json::from_value(report).unwrap();
        let peers = &report.network.as_ref().unwrap().peers.listed;
        let terminal = Terminal { width: 80, colours: true };
        for text in [page(&report, &terminal), peers_page(peers, report.time, &terminal)] {
            let text = terminal.printable(&text);
            for part in ["\x1b[2J", "\x1b[32m", "\x07", "\u{9b}", "\u{202e}", "\nFORGED"] {
                assert!(!text.contains(part), "{part:?}: {text:?}");
            }
            assert!(text.contains("vxlan\\u001b[2J\\u001b[32m\\u0007\\u009b\\u202e\\u000aFORGED"));
        }
    }

    #[test]
    fn colours_do_not_change_the_text() {
        let plain = page(&sample(), &Terminal { width: 80, colours: false });
        let mut bright = page(&sample(), &Terminal { width: 80, colours: true });
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
