//! The metrics of the network that runs.

use std::collections::BTreeMap;

use flannel_api::SubnetsReport;
use flannel_core::kernel::{Refused, Traffic};
use flannel_core::object::{Change, ObjectKind};
use flannel_core::status::Rejection;
use flannel_core::subnet::StoreKind;
use flannel_doctor::Finding;
use flannel_doctor::checks::host::CHECKS;
use flannel_doctor::inputs::tunnels::Tunnels;
use flannel_doctor::paths::Paths;

use super::page::{Page, labels};
use crate::observe::{FirewallRules, NetworkSnapshot, Snapshot};
use crate::report::subnets_used;

/// The kinds of objects that the page always has.
const KINDS: [ObjectKind; 7] = [
    ObjectKind::Link,
    ObjectKind::Addr,
    ObjectKind::Neigh,
    ObjectKind::Fdb,
    ObjectKind::Peer,
    ObjectKind::Nexthop,
    ObjectKind::Route,
];

/// The metrics that exist only while a network runs.
pub(super) fn of_network(page: &mut Page, network: &NetworkSnapshot, snapshot: &Snapshot) {
    leases(page, network, snapshot.store_kind());
    kernel(page, network);
    firewall(page, &network.running.firewall_rules.borrow());
    if let Some(results) = &network.running.paths {
        paths(page, results);
    }
    if network.running.encrypted.is_some() {
        tunnels(page, &network.tunnels);
    }
    if let Some(packets) = &network.traffic {
        traffic(page, packets);
    }
    if let Some(refused) = network.refused.as_ref().filter(|it| !it.packets.is_empty()) {
        guard(page, refused);
    }
    findings(page, &snapshot.facts.findings);
}

/// The reasons of rejections that the page always has.
const REASONS: [&str; 8] = [
    "outside",
    "no_enabled_family",
    "overlaps_own",
    "overlaps",
    "contradicts",
    "contradicts_own",
    "own_address",
    "rejected",
];

/// The label of a rejection.
fn reason(why: &Rejection) -> &'static str {
    let [
        outside,
        no_family,
        overlaps_own,
        overlaps,
        contradicts,
        contradicts_own,
        own_address,
        rejected,
    ] = REASONS;
    match why {
        Rejection::Outside { .. } => outside,
        Rejection::NoEnabledFamily => no_family,
        Rejection::OverlapsOwn { .. } => overlaps_own,
        Rejection::Overlaps { .. } => overlaps,
        Rejection::Contradicts { .. } | Rejection::BelongsToAnother { .. } => contradicts,
        Rejection::ContradictsOwn { .. } => contradicts_own,
        Rejection::OwnAddress(_) => own_address,
        Rejection::BadData(_) | Rejection::Rejected(_) => rejected,
        _ => "other",
    }
}

/// Whether the lease conflicts with another lease.
fn is_conflict(why: &Rejection) -> bool {
    matches!(
        why,
        Rejection::OverlapsOwn(_)
            | Rejection::Overlaps { .. }
            | Rejection::Contradicts { .. }
            | Rejection::BelongsToAnother { .. }
            | Rejection::ContradictsOwn(_)
    )
}

fn leases(page: &mut Page, network: &NetworkSnapshot, store: &StoreKind) {
    let status = &network.status;
    page.gauge(
        "flannel_leases",
        "Leases in the store, this node's included",
        network.view.leases.len() as u64,
    );
    page.flag(
        "flannel_leases_live",
        "1 if the leases come from the store, 0 if they come from the cache",
        status.live,
    );
    page.gauge("flannel_peers", "Other nodes whose leases are accepted", status.peers as u64);
    let mut reasons: BTreeMap<&str, u64> = REASONS.map(|reason| (reason, 0)).into();
    let mut conflicts = 0;
    for why in status.rejected.values() {
        *reasons.entry(reason(why)).or_default() += 1;
        conflicts += u64::from(is_conflict(why));
    }
    page.gauges(
        "flannel_rejected_leases",
        "Leases that are rejected, by reason",
        reasons.iter().map(|(reason, count)| (labels(&[("reason", reason)]), *count)),
    );
    page.gauge("flannel_conflicts", "Leases that conflict with another lease", conflicts);
    subnets(page, &subnets_used(network, store));
}

fn subnets(page: &mut Page, rooms: &[SubnetsReport]) {
    let counts = rooms.iter().flat_map(|room| {
        let counts = [("total", room.total), ("used", room.used), ("free", room.free)];
        counts.map(|(state, count)| (labels(&[("family", &room.family), ("state", state)]), count))
    });
    page.gauges(
        "flannel_subnets",
        "Subnets between SubnetMin and SubnetMax; in Kubernetes, subnets of this node's size",
        counts,
    );
}

fn paths(page: &mut Page, results: &Paths) {
    let summary = results.summary();
    page.gauges(
        "flannel_paths",
        "Paths to peers, one for each peer and family, by state",
        summary.states.iter().map(|(state, count)| (labels(&[("state", state.name())]), *count)),
    );
    page.gauge("flannel_failing_paths", "Paths to peers that fail", summary.failing);
    if let Some(oldest) = summary.oldest {
        page.seconds(
            "flannel_paths_age_seconds",
            "Age of the oldest result of a path; absent until each path has a result",
            oldest,
        );
    }
}

/// The number of tunnels in each state. Tunnels that cannot be read do not count.
fn tunnels(page: &mut Page, tunnels: &Tunnels) {
    let sessions = || tunnels.0.iter().flat_map(|(_, tunnel)| &tunnel.sessions);
    let mut states = BTreeMap::from(["fresh", "stale", "unanswered", "unused"].map(|s| (s, 0)));
    for session in sessions() {
        let state = match session.handshake {
            Some(_) if session.is_fresh() => "fresh",
            Some(_) => "stale",
            None if session.sent > 0 => "unanswered",
            None => "unused",
        };
        *states.entry(state).or_default() += 1;
    }
    page.gauges(
        "flannel_tunnels",
        "Encrypted tunnels to peers, by the last handshake; unanswered: none, but packets are sent",
        states.into_iter().map(|(state, count)| (labels(&[("state", state)]), count)),
    );
    page.gauge(
        "flannel_tunnel_received_bytes",
        "Bytes that encrypted tunnels have received; the bytes of a peer go with it",
        sessions().map(|session| session.received).sum(),
    );
    page.gauge(
        "flannel_tunnel_sent_bytes",
        "Bytes that encrypted tunnels have sent; the bytes of a peer go with it",
        sessions().map(|session| session.sent).sum(),
    );
}

/// The packets that the backend moved and dropped. If the kernel moves the packets, the backend can
/// only drop some.
fn traffic(page: &mut Page, Traffic { sent, received, dropped, .. }: &Traffic) {
    if let Some(sent) = sent
        && let Some(received) = received
    {
        let both = |sent: u64, received: u64| {
            let label = |direction| labels(&[("direction", direction)]);
            [(label("sent"), sent), (label("received"), received)]
        };
        page.counters(
            "flannel_data_plane_packets_total",
            "Packets that the backend itself moved between nodes",
            both(sent.packets, received.packets),
        );
        page.counters(
            "flannel_data_plane_bytes_total",
            "Bytes of these packets, without the headers of datagrams",
            both(sent.bytes, received.bytes),
        );
    }
    page.counters(
        "flannel_data_plane_dropped_packets_total",
        "Packets that the backend itself dropped, by reason",
        dropped.iter().map(|(reason, count)| (labels(&[("reason", reason)]), *count)),
    );
}

/// The packets of a tunnel that a guard drops, and those that it only counts.
fn guard(page: &mut Page, refused: &Refused) {
    let packets = |drops: bool| {
        let count = move |count: u64| if drops == refused.drops { count } else { 0 };
        let packets = refused.packets.iter();
        packets.map(move |(reason, all)| (labels(&[("reason", reason)]), count(*all)))
    };
    page.counters(
        "flannel_tunnel_dropped_packets_total",
        "Packets of the tunnel that the guard dropped, by reason",
        packets(true),
    );
    page.counters(
        "flannel_tunnel_counted_packets_total",
        "Packets of the tunnel that the guard would drop, by reason",
        packets(false),
    );
}

/// If no rules are requested, the rules count as in place.
fn firewall(page: &mut Page, firewall_rules: &FirewallRules) {
    let in_place = match firewall_rules {
        FirewallRules::Unwanted => true,
        FirewallRules::Pending | FirewallRules::Missing { .. } => false,
        FirewallRules::Kept(status) => status.borrow().in_place,
    };
    page.flag(
        "flannel_firewall_in_place",
        "1 if the requested firewall rules are in place",
        in_place,
    );
}

/// The numbers of objects of one kind.
#[derive(Default)]
struct Counts {
    desired: u64,
    /// Refused by the kernel.
    failing: u64,
    /// The desired objects among the failing ones.
    absent: u64,
}

fn kernel(page: &mut Page, network: &NetworkSnapshot) {
    let status = &network.status;
    page.flag("flannel_in_sync", "1 if the kernel matches the leases", status.in_sync);
    page.flag(
        "flannel_kernel_readable",
        "1 if the kernel can be read and watched",
        status.kernel_error.is_none(),
    );
    let mut counts: BTreeMap<_, _> = KINDS.map(|kind| (kind, Counts::default())).into();
    for (kind, count) in &status.by_kind {
        counts.entry(*kind).or_default().desired = *count as u64;
    }
    for (key, failure) in status.failing.iter() {
        let counts = counts.entry(key.kind()).or_default();
        counts.failing += 1;
        // An object that cannot be deleted is failing, but it is not desired.
        counts.absent += u64::from(matches!(failure.change, Change::Put(_)));
    }
    let known = status.settled && status.kernel_error.is_none();
    let states = counts.iter().flat_map(|(kind, counts)| {
        let failing = counts.absent.min(counts.desired);
        let others = counts.desired - failing;
        let (in_place, pending) = if known { (others, 0) } else { (0, others) };
        let states = [("in place", in_place), ("pending", pending), ("failing", failing)];
        states.map(|(state, count)| {
            (labels(&[("object", &kind.to_string()), ("state", state)]), count)
        })
    });
    page.gauges(
        "flannel_objects",
        "Desired objects in the kernel, by kind and state; pending: not known to be in place",
        states,
    );
    page.gauges(
        "flannel_failing_objects",
        "Objects that the kernel refuses, by kind",
        counts
            .iter()
            .map(|(kind, counts)| (labels(&[("object", &kind.to_string())]), counts.failing)),
    );
}

fn findings(page: &mut Page, findings: &[Finding]) {
    let counts = CHECKS.map(|check| {
        let count = findings.iter().filter(|finding| finding.check == check).count();
        (labels(&[("check", check.name())]), count as u64)
    });
    page.gauges(
        "flannel_findings",
        "Findings about this host, by check; they are updated every five minutes",
        counts,
    );
}
