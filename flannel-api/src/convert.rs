//! Fills in reports from values of flannel-core.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use flannel_core::address::Dual;
use flannel_core::backend::{ExternalInterface, Transport};
use flannel_core::config::PodNetwork;
use flannel_core::kernel::{Process, Refused, Traffic};
use flannel_core::lease::LeaseSet;
use flannel_core::object::Key;
use flannel_core::status::{Failure, Histogram, Rejection, Repair};
use flannel_core::subnet::{self, Loss, StoreStatus};
use flannel_core::{Config, Lease, Subnet, Subnets};

use crate::{
    FailureReport, GuardReport, InterfaceReport, LatencyReport, LeaseReport, More, Ownership,
    PeerReport, PeerState, ProcessReport, RejectionCause, RejectionReport, RepairReport,
    StoreFailure, StoreKind, StoreReport, SubnetsReport, TrafficReport, TransportReport, rounded,
    seconds,
};

/// The largest number of skipped entries in a report.
const SKIPPED: usize = 20;

/// Each item as text.
pub fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

/// The values of each family, by the family's name.
pub fn by_family<T, U>(values: &Dual<T>, report: impl Fn(&T) -> U) -> BTreeMap<String, U> {
    values.iter().map(|(family, value)| (family.to_string(), report(value))).collect()
}

impl TransportReport {
    /// The report of a transport, or `None` if this version of the API has no name for its kind.
    pub const fn new(transport: &Transport) -> Option<Self> {
        match transport {
            Transport::Udp(port) => Some(Self::Udp(*port)),
            Transport::Protocol(number) => Some(Self::Protocol(*number)),
            _ => None,
        }
    }
}

impl PeerReport {
    /// The report of the peer that holds a lease.
    pub fn new(
        lease: &Lease,
        state: PeerState,
        reason: Option<String>,
        changed: Option<SystemTime>,
    ) -> Self {
        Self {
            key: lease.subnets.to_string(),
            subnets: texts(lease.subnets.iter()),
            public: texts(lease.attrs.preferred.public.values()),
            backend: lease.attrs.preferred.kind.to_string(),
            state,
            reason,
            rejection: None,
            changed: changed.map(seconds),
            tunnels: Vec::new(),
            more: More::new(),
        }
    }
}

impl LeaseReport {
    /// The report of this node's lease. `lapsed` says that the lease expired while the store did
    /// not answer.
    pub fn new(
        own: Subnets,
        ownership: &subnet::Ownership,
        lapsed: bool,
        time: SystemTime,
    ) -> Self {
        let report = match (ownership, ownership.remaining(time)) {
            _ if lapsed => Ownership::Lapsed,
            (subnet::Ownership::Held { .. }, Some(remaining)) => {
                Ownership::Held { remaining: rounded(remaining) }
            }
            (subnet::Ownership::Held { .. }, None) => Ownership::Reserved,
            (subnet::Ownership::Lost { why: Loss::Unconfirmed, .. }, _) => Ownership::Lapsed,
            _ => Ownership::None,
        };
        Self { key: own.to_string(), subnets: texts(own.iter()), ownership: report }
    }
}

impl From<&ExternalInterface> for InterfaceReport {
    fn from(iface: &ExternalInterface) -> Self {
        Self {
            name: iface.name.to_string(),
            mtu: iface.mtu,
            addresses: texts(iface.address.values()),
            public: texts(iface.public.values()),
            reason: iface.reason.clone(),
        }
    }
}

impl FailureReport {
    /// The report of an object that the kernel refuses.
    pub fn new(key: &Key, failure: &Failure) -> Self {
        Self {
            object: key.to_string(),
            change: failure.change.to_string(),
            peer: failure.peer.map(|peer| peer.to_string()),
            errno: failure.error.errno().unwrap_or(0),
            error: failure.error.to_string(),
            since: seconds(failure.since),
            tries: failure.tries,
        }
    }
}

impl From<&Repair> for RepairReport {
    fn from(repair: &Repair) -> Self {
        let process = repair.changed_by.as_ref().and_then(|by| by.process.as_deref());
        Self {
            at: seconds(repair.at),
            text: repair.to_string(),
            process: process.map(ToString::to_string),
            author: process.map(ProcessReport::from),
        }
    }
}

impl From<&Process> for ProcessReport {
    fn from(process: &Process) -> Self {
        let Process { name, pid, is_certain } = process;
        Self { name: name.clone(), pid: *pid, certain: *is_certain }
    }
}

impl From<&Refused> for GuardReport {
    fn from(refused: &Refused) -> Self {
        let packets = refused.packets.iter().map(|(reason, count)| ((*reason).to_owned(), *count));
        Self { drops: refused.drops, packets: packets.collect() }
    }
}

impl From<&Traffic> for TrafficReport {
    fn from(Traffic { sent, received, dropped, .. }: &Traffic) -> Self {
        Self {
            sent_packets: sent.map(|sent| sent.packets),
            sent_bytes: sent.map(|sent| sent.bytes),
            received_packets: received.map(|received| received.packets),
            received_bytes: received.map(|received| received.bytes),
            dropped: dropped.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect(),
        }
    }
}

impl From<&Histogram> for LatencyReport {
    fn from(latency: &Histogram) -> Self {
        Self { count: latency.count(), p50: quantile(latency, 0.5), p99: quantile(latency, 0.99) }
    }
}

/// An upper bound for this `share` of the durations, from 0 to 1, in seconds: the bound of a
/// bucket. `None` without durations, or if the bucket has no bound.
fn quantile(latency: &Histogram, share: f64) -> Option<f64> {
    let wanted = (share * latency.count() as f64).ceil().max(1.0);
    let mut seen = 0;
    let (bound, _) = latency.buckets().find(|(_, count)| {
        seen += count;
        seen as f64 >= wanted
    })?;
    (bound < Duration::MAX).then_some(bound.as_secs_f64())
}

impl From<&StoreStatus> for StoreReport {
    fn from(store: &StoreStatus) -> Self {
        let last_error = store.last_error.as_ref();
        let skipped = store.skipped.iter().take(SKIPPED);
        Self {
            name: store.store.clone(),
            kind: StoreKind::from(&store.kind),
            answered: store.confirmed.map(|answer| seconds(answer.at)),
            revision: store.confirmed.map(|answer| answer.revision.0),
            requests: store.requests(),
            failures: store.failures(),
            error: last_error.map(|error| error.text.clone()),
            failure: last_error.map(|error| StoreFailure::from(&error.failure)),
            error_at: last_error.map(|error| seconds(error.at)),
            skipped: skipped.map(|entry| (entry.key.clone(), entry.reason.clone())).collect(),
            more: More::new(),
        }
    }
}

impl From<&subnet::StoreKind> for StoreKind {
    fn from(kind: &subnet::StoreKind) -> Self {
        match kind {
            subnet::StoreKind::Directory { path } => Self::Directory { path: path.clone() },
            subnet::StoreKind::Etcd { endpoints } => Self::Etcd { endpoints: endpoints.clone() },
            subnet::StoreKind::Kubernetes { url } => Self::Kubernetes { url: url.clone() },
            _ => Self::Other,
        }
    }
}

impl From<&subnet::StoreFailure> for StoreFailure {
    fn from(failure: &subnet::StoreFailure) -> Self {
        match failure {
            subnet::StoreFailure::CertificateTime => Self::CertificateTime,
            subnet::StoreFailure::ReadOnly => Self::ReadOnly,
            subnet::StoreFailure::NoSpace => Self::NoSpace,
            subnet::StoreFailure::Locked { by } => Self::Locked {
                program: by.as_ref().map(|by| by.name.clone()),
                pid: by.as_ref().map(|by| by.pid),
            },
            subnet::StoreFailure::QuotaExceeded => Self::QuotaExceeded,
            subnet::StoreFailure::Unauthorized => Self::Unauthorized,
            subnet::StoreFailure::Forbidden => Self::Forbidden,
            subnet::StoreFailure::ServerCertificate => Self::ServerCertificate,
            subnet::StoreFailure::Token { path } => Self::Token { path: path.clone() },
            subnet::StoreFailure::RivalHost { lease, reserved } => {
                Self::RivalHost { lease: lease.to_string(), reserved: *reserved }
            }
            _ => Self::Other,
        }
    }
}

impl From<&Rejection> for RejectionCause {
    fn from(why: &Rejection) -> Self {
        match why {
            Rejection::Outside { subnet, network } => {
                Self::Outside { subnet: subnet.to_string(), network: network.to_string() }
            }
            Rejection::NoEnabledFamily => Self::NoEnabledFamily,
            Rejection::OverlapsOwn(lease) => Self::OverlapsOwn { lease: lease.to_string() },
            Rejection::Overlaps { earlier, holder } => {
                Self::Overlaps { lease: earlier.to_string(), holder: holder.clone() }
            }
            Rejection::Contradicts { key, earlier, holder } => Self::Contradicts {
                object: key.to_string(),
                lease: earlier.to_string(),
                holder: holder.clone(),
            },
            Rejection::BelongsToAnother { key, owner, holder } => Self::BelongsToAnother {
                object: key.to_string(),
                lease: owner.to_string(),
                holder: holder.clone(),
            },
            Rejection::ContradictsOwn(key) => Self::ContradictsOwn { object: key.to_string() },
            Rejection::OwnAddress(address) => Self::OwnAddress { address: address.to_string() },
            Rejection::BadData(_) => Self::BadData,
            _ => Self::Rejected,
        }
    }
}

impl From<&Rejection> for RejectionReport {
    fn from(why: &Rejection) -> Self {
        Self { cause: RejectionCause::from(why), text: why.to_string() }
    }
}

impl SubnetsReport {
    /// The use of each pod network. A number that does not fit into 64 bits is reported as the
    /// largest number of 64 bits. `given` are this node's subnets if the store assigns subnets from
    /// the whole network, as Kubernetes does. Then subnets of that size are counted, because nodes
    /// may have smaller or larger subnets.
    pub fn all(config: &Config, leases: &LeaseSet, given: Option<Subnets>) -> Vec<Self> {
        let mut reports = Vec::new();
        for (family, pods) in config.networks.iter() {
            let taken: Vec<Subnet> =
                leases.iter().filter_map(|lease| lease.subnets.family(family)).collect();
            reports.push(match given.and_then(|given| given.family(family)) {
                Some(unit) => Self::in_units(pods, &taken, unit),
                None => Self::from_min_to_max(pods, &taken),
            });
        }
        reports
    }

    /// Counts the subnets from `SubnetMin` to `SubnetMax`.
    fn from_min_to_max(pods: &PodNetwork, taken: &[Subnet]) -> Self {
        let used = taken.iter().filter(|subnet| (pods.min..=pods.max).contains(*subnet)).count();
        Self::new(pods, Some(pods.subnets()), used as u64)
    }

    /// Counts the subnets of the size of `unit` in the whole pod network.
    fn in_units(pods: &PodNetwork, taken: &[Subnet], unit: Subnet) -> Self {
        let total = 1_u128.checked_shl(unit.len().saturating_sub(pods.network.len()).into());
        let inside = taken.iter().filter(|subnet| pods.network.covers(subnet));
        let used: f64 = inside.map(|subnet| parts(unit, *subnet)).sum();
        Self::new(pods, total, used.ceil() as u64)
    }

    /// A report with `total` subnets, or with more than fit into 128 bits (`None`).
    fn new(pods: &PodNetwork, total: Option<u128>, used: u64) -> Self {
        let total = total.and_then(|total| u64::try_from(total).ok()).unwrap_or(u64::MAX);
        let family = pods.network.family().to_string();
        Self { family, total, used, free: total.saturating_sub(used) }
    }
}

/// The number of subnets of the size of `unit` in `subnet`. It is less than 1 if `subnet` is
/// smaller. Does not use `exp2`, because that would load all of libm.
fn parts(unit: Subnet, subnet: Subnet) -> f64 {
    let power = |more: u8| (0..more).fold(1.0, |product, _| product * 2.0);
    power(unit.len().saturating_sub(subnet.len())) / power(subnet.len().saturating_sub(unit.len()))
}
