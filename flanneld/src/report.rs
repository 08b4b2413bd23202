//! Fills in the answers of the control API from a [`Snapshot`].

pub(crate) mod host;
mod peers;
pub(crate) mod problems;
pub(crate) mod why;

use flannel_api::{
    Counted, DaemonReport, FailureReport, GuardReport, InterfaceReport, LatencyReport, LeaseReport,
    MasqueradeReport, More, NetworkReport, Problem, RefusedConfig, RepairReport, RepairsReport,
    StatusReport, StoreReport, SubnetsReport, TrafficReport, TransportReport, VERSION, by_family,
    seconds, texts,
};
use flannel_core::address::Family;
use flannel_core::status::Status;
use flannel_core::subnet::StoreKind;
use flannel_doctor::paths::Paths;

use crate::observe::{NetworkSnapshot, Running, Snapshot};
use peers::interesting_peers;
use problems::problems;

pub(crate) use peers::peers;

/// The largest number of failures in a report.
const MOST: usize = 20;

/// The answer to `GET /v1/status`, without findings about the host.
pub(crate) fn status_report(snapshot: &Snapshot) -> StatusReport {
    let problems = problems(snapshot);
    StatusReport {
        version: VERSION,
        time: seconds(snapshot.time),
        daemon: DaemonReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: seconds(snapshot.started),
            deployment: snapshot.deployment(),
            more: More::new(),
        },
        ready: !problems.iter().any(Problem::is_error),
        problems,
        findings: Vec::new(),
        unread: Vec::new(),
        network: snapshot.network.as_ref().map(|network| network_report(network, snapshot)),
        store: snapshot.store.as_ref().map(StoreReport::from),
        more: More::new(),
    }
}

fn network_report(network: &NetworkSnapshot, snapshot: &Snapshot) -> NetworkReport {
    let NetworkSnapshot { running, status, .. } = network;
    let (interesting, pending) = interesting_peers(network, snapshot);
    NetworkReport {
        since: seconds(running.since),
        backend: running.config.backend.kind.clone(),
        lease_type: running.handle.lease.attrs.preferred.kind.to_string(),
        path: running.handle.path.to_owned(),
        moving: snapshot.facts.moving.clone(),
        refused_config: refused_config(snapshot),
        mtu: running.handle.mtu,
        networks: texts(running.config.pod_networks()),
        lease: LeaseReport::new(network.own(), &snapshot.ownership, running.lapsed, snapshot.time),
        interface: InterfaceReport::from(&running.iface),
        devices: by_family(&running.datapath.devices, ToString::to_string),
        overhead: by_family(&running.datapath.overhead, |bytes| *bytes),
        transports: running.datapath.transports.iter().filter_map(TransportReport::new).collect(),
        bare_routes: running.datapath.bare,
        in_sync: status.in_sync,
        live: status.live,
        objects: status.objects as u64,
        failing: Counted { total: status.failing.len() as u64, listed: failures(status) },
        peers: Counted { total: network.peers().count() as u64, listed: interesting },
        accepted: status.peers as u64,
        rejected: status.rejected.len() as u64,
        pending,
        paths: running.paths.as_ref().map(Paths::summary),
        subnets: subnets_used(network, snapshot.store_kind()),
        repairs: RepairsReport {
            total: snapshot.counters.repaired,
            last: status
                .last_repairs
                .iter()
                .rev()
                .map(|repair| RepairReport::from(&**repair))
                .collect(),
        },
        latency: LatencyReport::from(&status.latency),
        traffic: network.traffic.as_ref().map(TrafficReport::from),
        masquerade: masquerade(running),
        guard: network.refused.as_ref().filter(|it| !it.packets.is_empty()).map(GuardReport::from),
        more: More::new(),
    }
}

/// How the packets of pods are masqueraded, or `None` if they are not.
fn masquerade(running: &Running) -> Option<MasqueradeReport> {
    let options = &running.masquerade;
    let networks = &running.config.networks;
    let families: Vec<_> = networks.families().filter(|it| options.masquerade.has(*it)).collect();
    let is_used = |family: Family| families.contains(&family);
    let excluded = options.excluded(&running.excluded.borrow());
    let sources = options.masquerade_source.iter().filter(|(family, _)| is_used(*family));
    (!families.is_empty()).then(|| MasqueradeReport {
        families: texts(&families),
        exclude: texts(excluded.iter().filter(|subnet| is_used(subnet.family()))),
        sources: texts(sources.map(|(_, source)| source)),
        ports: options.masquerade_ports.map(|ports| ports.to_string()),
        interfaces: texts(&options.masquerade_devices),
    })
}

/// The config of the store that the network that runs does not follow.
pub(crate) fn refused_config(snapshot: &Snapshot) -> Option<RefusedConfig> {
    // An unmounted directory looks like a store without a config. None must be written there.
    let answers = snapshot.store.as_ref().filter(|store| store.last_error.is_none());
    let wrong = answers.and_then(|store| store.wrong_config.clone());
    let wrong = wrong.map(|reason| RefusedConfig { backend: String::new(), reason });
    wrong.or_else(|| snapshot.facts.refused_config.clone())
}

fn failures(status: &Status) -> Vec<FailureReport> {
    let listed = status.failing.iter().take(MOST);
    listed.map(|(key, failure)| FailureReport::new(key, failure)).collect()
}

/// The number of used subnets of each pod network.
pub(crate) fn subnets_used(network: &NetworkSnapshot, store: &StoreKind) -> Vec<SubnetsReport> {
    let given = store.is_kubernetes().then(|| network.own());
    SubnetsReport::all(&network.running.config, &network.view.leases, given)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use flannel_api::{PeerState, TunnelReport};
    use flannel_core::status::{Wait, Waiting};
    use flannel_core::{Lease, Subnets};

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::{network, tunnels_with};

    pub(crate) async fn snapshot(status: Status) -> Snapshot {
        let observer = Observer::default();
        let guard = observer.running(network(status).await.1);
        let snapshot = observer.snapshot();
        drop(guard);
        snapshot
    }

    /// All subnets have the size of this node's own subnet.
    #[tokio::test]
    async fn subnets_that_kubernetes_assigns_are_counted() {
        let snapshot = snapshot(Status::default()).await;
        let kube = StoreKind::Kubernetes { url: "https://10.96.0.1:443".into() };
        let mut network = snapshot.network.unwrap();
        let mut counted = |config: &str, store: &StoreKind| {
            let running = Arc::get_mut(&mut network.running).unwrap();
            running.config = flannel_core::Config::parse(config).unwrap();
            let room = subnets_used(&network, store).pop().unwrap();
            (room.total, room.used, room.free)
        };
        assert_eq!(counted(r#"{"Network":"10.1.0.0/16","SubnetLen":28}"#, &kube), (256, 4, 252));
        assert_eq!(counted(r#"{"Network":"10.1.0.0/20"}"#, &kube), (16, 4, 12));
        let some = r#"{"Network":"10.1.0.0/16","SubnetLen":24,
            "SubnetMin":"10.1.7.0","SubnetMax":"10.1.9.0"}"#;
        assert_eq!(counted(some, &StoreKind::Other), (3, 3, 0));
        // Parts of other sizes.
        let lease = Lease::clone(network.view.leases.iter().next().unwrap());
        for part in ["10.1.200.0/26", "10.1.200.64/26", "10.1.200.128/26", "10.1.202.0/23"] {
            let subnets = Subnets::new([part.parse().unwrap()]).unwrap();
            network.view.leases.insert(Lease { subnets, ..lease.clone() });
        }
        let room = subnets_used(&network, &kube).pop().unwrap();
        assert_eq!((room.total, room.used, room.free), (256, 4 + 3, 249));
    }

    #[tokio::test]
    async fn a_status_report_has_the_network_and_round_trips_through_json() {
        let mut status = Status::default();
        status.in_sync = true;
        status.settled = true;
        status.live = true;
        status.peers = 3;
        status.objects = 11;
        let report = status_report(&snapshot(status).await);
        let again: StatusReport =
            serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(again, report);
        let network = report.network.unwrap();
        assert_eq!((network.peers.total, network.accepted, network.objects), (3, 3, 11));
        assert!(network.peers.listed.iter().all(|peer| peer.state == PeerState::InPlace));
        let used = &network.subnets[0];
        assert_eq!((used.family.as_str(), used.total, used.used, used.free), ("IPv4", 255, 4, 251));
    }

    #[tokio::test]
    async fn before_the_first_round_peers_are_pending_and_the_node_is_not_ready() {
        // A desired object may not be installed yet.
        for objects in [0, 11] {
            let mut status = Status::default();
            status.live = true;
            status.objects = objects;
            let report = status_report(&snapshot(status).await);
            assert!(!report.ready);
            let peers = report.network.unwrap().peers.listed;
            assert!(
                peers.iter().all(|peer| peer.state == PeerState::Pending && peer.reason.is_some()),
                "{peers:?}"
            );
        }
    }

    #[tokio::test]
    async fn each_pending_peer_has_its_reason() {
        let mut status = Status::default();
        status.live = true;
        let mut snapshot = snapshot(status).await;
        let network = snapshot.network.as_mut().unwrap();
        let mut waiting = Waiting::default();
        waiting
            .peers
            .insert("10.1.8.0-24".parse().unwrap(), Wait::Link("flannel.1".parse().unwrap()));
        network.waiting = Some(waiting);
        // Reported after the status.
        let mut changed =
            Lease::clone(network.view.leases.get(&"10.1.9.0-24".parse().unwrap()).unwrap());
        changed.attrs.preferred.public.v4 = Some("192.0.2.99".parse().unwrap());
        network.view.leases.insert(changed);
        let states = |snapshot: &Snapshot| -> Vec<(String, PeerState, String)> {
            let all = peers(snapshot).into_iter();
            all.map(|peer| (peer.key, peer.state, peer.reason.unwrap_or_default())).collect()
        };
        let texts = [
            ("10.1.7.0-24", PeerState::InPlace, ""),
            ("10.1.8.0-24", PeerState::Pending, "there is no link flannel.1, which it needs"),
            ("10.1.9.0-24", PeerState::Pending, "its lease has come, and waits for its turn"),
        ];
        assert_eq!(
            states(&snapshot),
            texts.map(|(key, state, why)| (key.into(), state, why.into()))
        );
        let network = status_report(&snapshot).network.unwrap();
        let first: Vec<&str> = network.peers.listed.iter().map(|peer| peer.key.as_str()).collect();
        assert_eq!(
            (network.pending, first),
            (2, vec!["10.1.8.0-24", "10.1.9.0-24", "10.1.7.0-24"])
        );
        // A settled status replaces an earlier report of pending peers.
        let status = &mut snapshot.network.as_mut().unwrap().status;
        Arc::make_mut(status).settled = true;
        assert_eq!(states(&snapshot)[1].1, PeerState::InPlace);
        snapshot.network.as_mut().unwrap().waiting.as_mut().unwrap().all = true;
        assert_eq!(
            states(&snapshot).iter().filter(|(_, state, _)| *state == PeerState::Pending).count(),
            1
        );
    }

    #[tokio::test]
    async fn peers_have_the_state_of_their_tunnels() {
        let mut status = Status::default();
        status.settled = true;
        status.live = true;
        let mut snapshot = snapshot(status).await;
        let of_peers = |snapshot: &Snapshot| -> Vec<_> {
            peers(snapshot).into_iter().map(|peer| peer.tunnels).collect()
        };
        assert_eq!(of_peers(&snapshot), [[], [], []]);
        let at = |seconds| Some(snapshot.time - Duration::from_secs(seconds));
        let mut read = tunnels_with([(at(9), 7), (None, 0)]);
        // From behind a NAT.
        read.0[0].1.sessions[0].endpoint = "198.51.100.7:4000".parse().ok();
        snapshot.network.as_mut().unwrap().tunnels = Arc::new(read);
        let tunnel = |handshake, endpoint: Option<&str>, sent| TunnelReport {
            device: "flannel-wg".into(),
            handshake,
            endpoint: endpoint.map(str::to_owned),
            received: 1,
            sent,
        };
        assert_eq!(
            of_peers(&snapshot),
            [
                vec![tunnel(Some(9.0), Some("198.51.100.7:4000"), 7)],
                vec![tunnel(None, None, 0)],
                vec![]
            ]
        );
        let memory = flannel_firewall::LegacyMemory::default();
        let of = async |address: &str| {
            why::why(&snapshot, &memory, address.parse().unwrap()).await.tunnel
        };
        assert_eq!(of("10.1.8.9").await, Some(tunnel(None, None, 0)));
        assert_eq!(of("10.1.9.9").await, None);
    }

    #[tokio::test]
    async fn peers_are_pending_while_the_kernel_cannot_be_read() {
        let mut status = Status::default();
        status.live = true;
        status.objects = 11;
        status.kernel_error = Some(flannel_core::kernel::KernelError::explained(105, "x"));
        let report = status_report(&snapshot(status).await).network.unwrap();
        assert!(
            report
                .peers
                .listed
                .iter()
                .all(|peer| peer.state == PeerState::Pending && peer.reason.is_some())
        );
    }
}
