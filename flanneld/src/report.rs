//! Fills in the answers of the control API: what `flannel-api` defines, from a [`Snapshot`].

mod peers;

use std::collections::BTreeMap;
use std::time::Duration;

use flannel_api::{
    Counted, DaemonReport, FailureReport, InletReport, InterfaceReport, LatencyReport, LeaseReport,
    NetworkReport, Problem, RepairReport, RepairsReport, StatusReport, StoreReport, SubnetsReport,
    VERSION, rounded, seconds,
};
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Inlet;
use flannel_core::object::Key;
use flannel_core::status::Status;
use flannel_core::subnet::{Loss, Ownership, StoreStatus};
use flannel_core::{Subnet, Subnets};
use flannel_doctor::commands::is_kubernetes;

use crate::observe::{NetworkSnapshot, Snapshot};
use crate::problems::problems;
use peers::interesting_peers;

pub(crate) use peers::peers;

/// Lists in a report have at most so many entries; their totals stand beside them.
const MOST: usize = 20;

/// The report of a moment.
pub(crate) fn status_report(snapshot: &Snapshot) -> StatusReport {
    let problems = problems(snapshot);
    StatusReport {
        version: VERSION,
        time: seconds(snapshot.time),
        daemon: DaemonReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: seconds(snapshot.started),
        },
        ready: !problems.iter().any(Problem::is_error),
        problems,
        findings: Vec::new(),
        unread: Vec::new(),
        network: snapshot.network.as_ref().map(|network| network_report(network, snapshot)),
        store: snapshot.store.as_ref().map(|store| StoreReport {
            name: store.store.clone(),
            answered: store.confirmed.map(|(_, at)| seconds(at)),
            revision: store.confirmed.map(|(revision, _)| revision.0),
            requests: store.requests(),
            failures: store.failures(),
            error: store.last_error.as_ref().map(|(text, _)| text.clone()),
            error_at: store.last_error.as_ref().map(|(_, at)| seconds(*at)),
            skipped: store.skipped.iter().take(MOST).cloned().collect(),
        }),
    }
}

fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

fn by_family<T, U>(values: &Dual<T>, report: impl Fn(&T) -> U) -> BTreeMap<String, U> {
    values.iter().map(|(family, value)| (family.to_string(), report(value))).collect()
}

/// An inlet; `None` if the API has no word for its kind.
const fn inlet_report(inlet: &Inlet) -> Option<InletReport> {
    match inlet {
        Inlet::Udp(port) => Some(InletReport::Udp(*port)),
        Inlet::Protocol(number) => Some(InletReport::Protocol(*number)),
        _ => None,
    }
}

fn network_report(network: &NetworkSnapshot, snapshot: &Snapshot) -> NetworkReport {
    let NetworkSnapshot { running, status, view, .. } = network;
    let own = running.handle.lease.subnets;
    let all = view.leases.iter().filter(|lease| lease.subnets != own).count() as u64;
    let (interesting, pending) = interesting_peers(network, snapshot);
    let quantile = |share| {
        let bound = status.latency.quantile(share)?;
        (bound < Duration::MAX).then_some(bound.as_secs_f64())
    };
    NetworkReport {
        since: seconds(running.since),
        backend: running.backend.to_owned(),
        lease_type: running.handle.lease.attrs.preferred.kind.to_string(),
        mtu: running.handle.mtu,
        networks: texts(running.config.pod_networks()),
        lease: own_lease(own, running.lapsed, snapshot),
        interface: InterfaceReport {
            name: running.iface.name.to_string(),
            mtu: running.iface.mtu,
            addresses: texts(running.iface.address.values()),
            public: texts(running.iface.public.values()),
            reason: running.iface.reason.clone(),
        },
        devices: by_family(&running.datapath.devices, ToString::to_string),
        overhead: by_family(&running.datapath.overhead, |bytes| *bytes),
        inlets: running.datapath.inlets.iter().filter_map(inlet_report).collect(),
        bare_routes: running.datapath.bare,
        in_sync: status.in_sync,
        live: status.live,
        objects: status.objects as u64,
        failing: Counted { total: status.failing.len() as u64, listed: failures(status) },
        peers: Counted { total: all, listed: interesting },
        believed: status.peers as u64,
        disbelieved: status.rejected.len() as u64,
        pending,
        subnets: subnets_used(network, snapshot.store.as_ref()),
        repairs: RepairsReport {
            total: status.repaired,
            last: status
                .last_repairs
                .iter()
                .rev()
                .map(|repair| RepairReport { at: seconds(repair.at), text: repair.to_string() })
                .collect(),
        },
        latency: LatencyReport {
            count: status.latency.count(),
            p50: quantile(0.5),
            p99: quantile(0.99),
        },
    }
}

fn own_lease(own: Subnets, lapsed: bool, snapshot: &Snapshot) -> LeaseReport {
    let remaining = snapshot.ownership.remaining(snapshot.time).filter(|_| !lapsed).map(rounded);
    let word = match &snapshot.ownership {
        _ if lapsed => "lapsed",
        Ownership::Held { until: Some(_) } => "held",
        Ownership::Held { until: None } => "reserved",
        Ownership::Lost { why: Loss::Unconfirmed, .. } => "lapsed",
        _ => "none",
    };
    LeaseReport {
        key: own.to_string(),
        subnets: texts(own.iter()),
        ownership: word.to_owned(),
        remaining,
    }
}

fn failures(status: &Status) -> Vec<FailureReport> {
    let report = |(key, failure): (&Key, &flannel_core::status::Failure)| FailureReport {
        object: key.to_string(),
        change: failure.change.clone(),
        peer: failure.peer.map(|peer| peer.to_string()),
        errno: failure.error.errno,
        error: failure.error.to_string(),
        since: seconds(failure.since),
        tries: failure.tries,
    };
    status.failing.iter().take(MOST).map(report).collect()
}

/// How many subnets as large as `own` make `subnet`. Powers of two by `exp2` would bring all of libm into memory.
fn parts(own: Subnet, subnet: Subnet) -> f64 {
    let power = |more: u8| (0..more).fold(1.0, |product, _| product * 2.0);
    power(own.len().saturating_sub(subnet.len())) / power(subnet.len().saturating_sub(own.len()))
}

/// How full each pod network is; one that is too large to count is as large as can be counted. Kubernetes gives subnets out of the
/// whole network, whose size this node's own tells.
pub(crate) fn subnets_used(
    network: &NetworkSnapshot,
    store: Option<&StoreStatus>,
) -> Vec<SubnetsReport> {
    let running = &network.running;
    let own = running.handle.lease.subnets;
    let given = is_kubernetes(store.map(|store| store.store.as_str()));
    let config = &running.config;
    let report = |(family, pod): (Family, &flannel_core::config::PodNetwork)| {
        let own = own.family(family).filter(|_| given);
        // Of the own size: a node may have been given a smaller part or a larger one.
        let size = |subnet: Subnet| own.map_or(1.0, |own| parts(own, subnet));
        let inside = |subnet: &Subnet| match own {
            Some(_) => pod.network.covers(subnet),
            None => *subnet >= pod.min && *subnet <= pod.max,
        };
        let taken = network
            .view
            .leases
            .iter()
            .filter_map(|lease| lease.subnets.family(family))
            .filter(inside);
        let used = taken.map(size).sum::<f64>().ceil() as u64;
        let total = match own {
            Some(own) => 1_u128.checked_shl(own.len().saturating_sub(pod.network.len()).into()),
            None => Some(pod.subnets()),
        };
        let total = total.and_then(|total| u64::try_from(total).ok()).unwrap_or(u64::MAX);
        SubnetsReport { family: family.to_string(), total, used, free: total.saturating_sub(used) }
    };
    config.networks.iter().map(report).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use flannel_core::Lease;
    use flannel_core::status::{Wait, Waiting};

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    async fn snapshot(status: Status) -> Snapshot {
        let observer = Observer::default();
        let guard = observer.running(network(status).await.1);
        let snapshot = observer.snapshot();
        drop(guard);
        snapshot
    }

    /// Of which size they are its own subnet tells.
    #[tokio::test]
    async fn subnets_that_kubernetes_gives_are_counted_too() {
        let snapshot = snapshot(Status::default()).await;
        let mut store =
            StoreStatus { store: "kube:https://10.96.0.1:443".into(), ..StoreStatus::default() };
        let mut network = snapshot.network.unwrap();
        let mut counted = |config: &str, store: &StoreStatus| {
            let running = Arc::get_mut(&mut network.running).unwrap();
            running.config = flannel_core::Config::parse(config).unwrap();
            let room = subnets_used(&network, Some(store)).pop().unwrap();
            (room.total, room.used, room.free)
        };
        assert_eq!(counted(r#"{"Network":"10.1.0.0/16","SubnetLen":28}"#, &store), (256, 4, 252));
        assert_eq!(counted(r#"{"Network":"10.1.0.0/20"}"#, &store), (16, 4, 12));
        store.store = "etcd:http://127.0.0.1:2379".into();
        let some = r#"{"Network":"10.1.0.0/16","SubnetLen":24,"SubnetMin":"10.1.7.0","SubnetMax":"10.1.9.0"}"#;
        assert_eq!(counted(some, &store), (3, 3, 0));
        // Parts of other sizes.
        let lease = Lease::clone(network.view.leases.iter().next().unwrap());
        for part in ["10.1.200.0/26", "10.1.200.64/26", "10.1.200.128/26", "10.1.202.0/23"] {
            let subnets = Subnets::new([part.parse().unwrap()]).unwrap();
            network.view.leases.insert(Lease { subnets, ..lease.clone() });
        }
        store.store = "kube:https://10.96.0.1:443".into();
        let room = subnets_used(&network, Some(&store)).pop().unwrap();
        assert_eq!((room.total, room.used, room.free), (256, 4 + 3, 249));
    }

    #[tokio::test]
    async fn a_report_survives_json_and_says_what_the_network_is() {
        let mut status = Status::default();
        (status.in_sync, status.settled, status.live) = (true, true, true);
        (status.peers, status.objects) = (3, 11);
        let report = status_report(&snapshot(status).await);
        let again: StatusReport =
            serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(again, report);
        let network = report.network.unwrap();
        assert_eq!((network.peers.total, network.believed, network.objects), (3, 3, 11));
        assert!(network.peers.listed.iter().all(|peer| peer.state == "in place"));
        let used = &network.subnets[0];
        assert_eq!((used.family.as_str(), used.total, used.used, used.free), ("IPv4", 255, 4, 251));
    }

    #[tokio::test]
    async fn before_the_first_round_peers_are_pending_and_it_is_not_ready() {
        // That something is wanted does not mean that it was put.
        for objects in [0, 11] {
            let mut status = Status::default();
            (status.live, status.objects) = (true, objects);
            let report = status_report(&snapshot(status).await);
            assert!(!report.ready);
            let peers = report.network.unwrap().peers.listed;
            assert!(
                peers.iter().all(|peer| peer.state == "pending" && peer.reason.is_some()),
                "{peers:?}"
            );
        }
    }

    #[tokio::test]
    async fn of_those_that_wait_each_is_told_what_for() {
        let mut status = Status::default();
        status.live = true;
        let mut snapshot = snapshot(status).await;
        let network = snapshot.network.as_mut().unwrap();
        let mut waiting = Waiting::default();
        waiting
            .peers
            .insert("10.1.8.0-24".parse().unwrap(), Wait::Link("flannel.1".parse().unwrap()));
        network.waiting = Some(waiting);
        // Told after the status was.
        let mut changed =
            Lease::clone(network.view.leases.get(&"10.1.9.0-24".parse().unwrap()).unwrap());
        changed.attrs.preferred.public.v4 = Some("192.0.2.99".parse().unwrap());
        network.view.leases.insert(changed);
        let states = |snapshot: &Snapshot| -> Vec<(String, String, String)> {
            let all = peers(snapshot).into_iter();
            all.map(|peer| (peer.key, peer.state, peer.reason.unwrap_or_default())).collect()
        };
        let texts = [
            ("10.1.7.0-24", "in place", ""),
            ("10.1.8.0-24", "pending", "there is no link flannel.1, which it needs"),
            ("10.1.9.0-24", "pending", "its lease has come, and waits for its turn"),
        ];
        assert_eq!(
            states(&snapshot),
            texts.map(|(key, state, why)| (key.into(), state.into(), why.into()))
        );
        let network = status_report(&snapshot).network.unwrap();
        let first: Vec<&str> = network.peers.listed.iter().map(|peer| peer.key.as_str()).collect();
        assert_eq!(
            (network.pending, first),
            (2, vec!["10.1.8.0-24", "10.1.9.0-24", "10.1.7.0-24"])
        );
        // A settled status knows better than what was asked before it.
        let status = &mut snapshot.network.as_mut().unwrap().status;
        Arc::make_mut(status).settled = true;
        assert_eq!(states(&snapshot)[1].1, "in place");
        snapshot.network.as_mut().unwrap().waiting.as_mut().unwrap().all = true;
        assert_eq!(states(&snapshot).iter().filter(|(_, state, _)| state == "pending").count(), 1);
    }

    #[tokio::test]
    async fn nobody_is_in_place_in_a_kernel_that_cannot_be_read() {
        let mut status = Status::default();
        (status.live, status.objects) = (true, 11);
        status.kernel_error = Some(flannel_core::kernel::KernelError::explained(105, "x"));
        let report = status_report(&snapshot(status).await).network.unwrap();
        assert!(
            report.peers.listed.iter().all(|peer| peer.state == "pending" && peer.reason.is_some())
        );
    }
}
