//! One simulation: nodes, a store, a phase with faults, and one without.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use flannel_core::lease::{LeaseAttrs, Offer, Origin, Revision};
use flannel_core::{Subnet, Subnets};
use flannel_subnet::{Entry, LeaseGrant, Registry};
use tokio::time::{Instant, sleep};

use crate::clock;
use crate::fault::{Counts, Fault};
use crate::node::{Disk, Node, new_cache, random_holder};
use crate::store::{Broken, SharedStore, Store};
use crate::{MARGIN, TTL};

const NODES: usize = 20;
const STEPS: usize = 200;
/// The time after the faults within which all invariants hold again.
const CALM: Duration = Duration::from_secs(10 * 60);

/// The result of a simulation.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) counts: Counts,
    pub(crate) wrong: Option<String>,
    pub(crate) trace: Vec<String>,
}

/// Runs one simulation. The result depends only on the seed.
pub(crate) fn simulate(seed: u64, broken: Option<Broken>, trace: bool) -> Outcome {
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        // From the first timer on, tokio rounds time to milliseconds.
        sleep(Duration::from_millis(1)).await;
        clock::begin();
        let store = Arc::new(Store::new(configs(), broken, trace));
        let mut world = World::new(store);
        world.run().await;
        let mut stats = world.store.stats();
        Outcome {
            counts: stats.counts,
            wrong: stats.wrong.take(),
            trace: stats.trace.take().unwrap_or_default(),
        }
    })
}

/// Two overlapping networks with about as many subnets as nodes, so that a freed subnet is taken at
/// once.
fn configs() -> Vec<String> {
    let family = fastrand::u8(..3);
    let total = fastrand::usize(NODES - 3..NODES + 6);
    let config = |first: usize| {
        let last = first + total - 1;
        let v4 = format!(
            r#""Network":"10.1.0.0/16","SubnetMin":"10.1.{first}.0","SubnetMax":"10.1.{last}.0""#
        );
        let v6 = format!(
            r#""EnableIPv6":true,"IPv6Network":"fd00::/48",
            "IPv6SubnetMin":"fd00:0:0:{first:x}::","IPv6SubnetMax":"fd00:0:0:{last:x}::""#
        );
        match family {
            0 => format!("{{{v4}}}"),
            1 => format!(r#"{{"EnableIPv4":false,{v6}}}"#),
            _ => format!("{{{v4},{v6}}}"),
        }
    };
    vec![config(1), config(4)]
}

struct World {
    store: SharedStore,
    nodes: Vec<Arc<Node>>,
    /// The repairs of faults, with their times.
    repairs: Vec<(Instant, Repair)>,
    /// The operator's reservations.
    reserved: Vec<Subnets>,
    config: usize,
}

#[derive(Debug, Clone, Copy)]
enum Repair {
    PowerOn(usize),
    Heal(usize),
    Resume(usize),
    CorrectClock(usize),
    StoreBack,
}

fn up_to(longest: Duration) -> Duration {
    // Uniform on a logarithmic scale, because interesting times differ by orders of magnitude.
    longest.mul_f64(fastrand::f64().powi(3))
}

impl World {
    fn new(store: SharedStore) -> Self {
        let nodes: Vec<_> = (0..NODES).map(|id| Arc::new(Node::new(id))).collect();
        nodes.iter().for_each(|node| node.power_on(&store));
        Self { store, nodes, repairs: Vec::new(), reserved: Vec::new(), config: 0 }
    }

    async fn run(&mut self) {
        let mut keys = BTreeSet::new();
        for step in 0..STEPS {
            let fault = self.act().await;
            let pause = self.pause();
            self.store.stats().note(|| format!("step {step}: {fault:?}, then {pause:?}"));
            sleep(pause).await;
            self.repair();
            self.notice_expiries(&mut keys).await;
            self.check_owners();
            if self.is_wrong() {
                return;
            }
        }
        self.recover().await;
    }

    fn is_wrong(&self) -> bool {
        self.store.stats().wrong.is_some()
    }

    fn node(&self) -> &Arc<Node> {
        &self.nodes[fastrand::usize(..NODES)]
    }

    async fn entry(&self) -> Option<Entry> {
        let entries = self.store.entries().await;
        (!entries.is_empty()).then(|| entries[fastrand::usize(..entries.len())].clone())
    }

    /// The time until the next step: often until about the end of a lease.
    fn pause(&self) -> Duration {
        if fastrand::u8(..4) > 0 {
            return up_to(Duration::from_secs(20)) + Duration::from_millis(1);
        }
        let daemon = self.node().daemon.lock().unwrap();
        match daemon.as_ref().and_then(|daemon| daemon.manager.remaining()) {
            Some(left) if left <= TTL - MARGIN => {
                left.saturating_sub(Duration::from_millis(fastrand::u64(0..200)))
            }
            _ => Duration::from_millis(fastrand::u64(1..200)),
        }
    }

    fn repair_later(&mut self, longest: Duration, repair: Repair) {
        self.repairs.push((Instant::now() + up_to(longest), repair));
    }

    fn repair(&mut self) {
        let now = Instant::now();
        let due: Vec<Repair> =
            self.repairs.extract_if(.., |(when, _)| *when <= now).map(|(_, what)| what).collect();
        for repair in due {
            self.apply(repair);
            if let Repair::PowerOn(id) = repair
                && self.nodes[id].clock.lock().unwrap().error() != 0
            {
                self.repair_later(3 * TTL, Repair::CorrectClock(id));
            }
        }
    }

    fn apply(&self, repair: Repair) {
        self.store.stats().note(|| format!("{repair:?}"));
        match repair {
            Repair::PowerOn(id) => self.nodes[id].power_on(&self.store),
            Repair::Heal(id) => self.nodes[id].link.set(|now| now.cut = false),
            Repair::Resume(id) => self.nodes[id].link.set(|now| now.suspended = false),
            Repair::CorrectClock(id) => {
                self.nodes[id].clock.lock().unwrap().set_error(0);
                self.store.count(Fault::WallCorrected);
            }
            Repair::StoreBack => self.store.registry.set_outage(false),
        }
    }

    /// At most one fault per step.
    async fn act(&mut self) -> Option<Fault> {
        let fault = match fastrand::u8(..100) {
            0..4 => Fault::CrashKeepingState,
            4..6 => Fault::CrashLosingHolderId,
            6..8 => Fault::CrashLosingSubnetFile,
            8..10 => Fault::CrashLosingState,
            10..18 => Fault::Partition,
            18..26 => Fault::Suspension,
            26..28 => Fault::StoreOutage,
            28..30 => Fault::StoreRestart,
            30..32 => Fault::Compaction,
            32..34 => Fault::KeyDeleted,
            34..36 => Fault::HolderRevoked,
            36..39 => Fault::Reserved,
            39..41 => Fault::Overwritten,
            41..43 => Fault::ForeignLease,
            43..45 => Fault::WallForward,
            45..47 => Fault::WallBack,
            47..50 => Fault::Published,
            50..53 => Fault::ConfigChanged,
            _ => return None,
        };
        let happened = match fault {
            Fault::CrashKeepingState
            | Fault::CrashLosingHolderId
            | Fault::CrashLosingSubnetFile
            | Fault::CrashLosingState => self.crash(fault),
            Fault::Partition | Fault::Suspension => self.cut_off(fault),
            Fault::StoreOutage | Fault::StoreRestart | Fault::Compaction | Fault::ConfigChanged => {
                self.disturb_store(fault)
            }
            Fault::WallForward | Fault::WallBack | Fault::Published => self.disturb_node(fault),
            _ => self.act_as_operator(fault).await.is_some(),
        };
        if happened {
            self.store.count(fault);
        }
        happened.then_some(fault)
    }

    fn crash(&mut self, fault: Fault) -> bool {
        let node = Arc::clone(self.node());
        if !node.is_on() {
            return false;
        }
        node.crash(&self.store);
        let mut disk = node.disk.lock().unwrap();
        let kept = disk.clone();
        let holder = if matches!(fault, Fault::CrashLosingHolderId | Fault::CrashLosingState) {
            random_holder()
        } else {
            kept.holder
        };
        let lost = matches!(fault, Fault::CrashLosingSubnetFile | Fault::CrashLosingState);
        // The holder ID and the cache are in one directory.
        let cache = if holder == kept.holder { kept.cache } else { new_cache(node.id) };
        *disk = Disk { holder, previous: kept.previous.filter(|_| !lost), cache };
        self.repair_later(5 * TTL, Repair::PowerOn(node.id));
        true
    }

    fn cut_off(&mut self, fault: Fault) -> bool {
        let node = Arc::clone(self.node());
        let now = node.link.now();
        if now.cut || now.suspended {
            return false;
        }
        if fault == Fault::Partition {
            node.link.set(|now| now.cut = true);
            self.repair_later(3 * TTL, Repair::Heal(node.id));
        } else {
            node.link.set(|now| now.suspended = true);
            self.repair_later(3 * TTL, Repair::Resume(node.id));
        }
        true
    }

    fn disturb_store(&mut self, fault: Fault) -> bool {
        let registry = self.store.registry.clone();
        match fault {
            Fault::StoreOutage => {
                registry.set_outage(true);
                self.repair_later(TTL * 3 / 2, Repair::StoreBack);
            }
            Fault::StoreRestart => {
                registry.set_outage(true);
                registry.forget_history();
                self.repair_later(Duration::from_secs(5), Repair::StoreBack);
            }
            Fault::Compaction => registry.forget_history(),
            _ => {
                self.config = (self.config + 1) % self.store.configs.len();
                registry.set_config(Some(&self.store.configs[self.config]));
            }
        }
        true
    }

    fn disturb_node(&mut self, fault: Fault) -> bool {
        let node = Arc::clone(self.node());
        if fault == Fault::Published {
            node.publish.notify_one();
        } else {
            let by = up_to(Duration::from_secs(400 * 86_400));
            node.clock.lock().unwrap().jump(fault == Fault::WallForward, by);
            self.repair_later(3 * TTL, Repair::CorrectClock(node.id));
        }
        true
    }

    /// Actions of operators and other programs on the store.
    async fn act_as_operator(&mut self, fault: Fault) -> Option<()> {
        let entry = self.entry().await?;
        let subnets = entry.lease.subnets;
        let mut attrs = entry.lease.attrs.clone();
        match fault {
            Fault::KeyDeleted => self.store.operator_deletes(&entry),
            Fault::HolderRevoked => self.store.operator_revokes(&entry).await,
            Fault::Reserved if self.reserved.len() > 2 => {
                let subnets = self.reserved.remove(0);
                let entries = self.store.entries().await;
                let entry = entries.iter().find(|entry| entry.lease.subnets == subnets)?;
                self.store.operator_deletes(entry);
            }
            Fault::Reserved => {
                // Two overlapping reservations would be the operator's mistake.
                let entries = self.store.entries().await;
                let overlapping =
                    entries.iter().filter(|entry| entry.lease.subnets.overlaps(&subnets));
                if overlapping.count() > 1 {
                    return None;
                }
                self.store.operator_writes(&subnets, &attrs, None);
                self.reserved.push(subnets);
            }
            Fault::Overwritten => {
                attrs.preferred.data.v4 = Some(r#"{"VNI":0}"#.into());
                self.store.operator_writes(
                    &subnets,
                    &attrs,
                    entry.holder.map(|holder| LeaseGrant { holder, ttl: TTL }),
                );
            }
            _ => {
                let free = self.free().await;
                let subnets = *free.first()?;
                let foreign = LeaseAttrs::from(Offer::default().with_kind("vxlan"));
                let ttl = up_to(2 * TTL) + Duration::from_secs(1);
                self.store.operator_writes(
                    &subnets,
                    &foreign,
                    Some(LeaseGrant { holder: random_holder(), ttl }),
                );
            }
        }
        Some(())
    }

    /// Subnets of the first config without an overlapping key.
    async fn free(&self) -> Vec<Subnets> {
        let entries = self.store.entries().await;
        let is_free = |subnet: &Subnet| {
            !entries
                .iter()
                .any(|entry| entry.lease.subnets.iter().any(|other| other.overlaps(subnet)))
        };
        let families: Vec<Vec<Subnet>> = self
            .store
            .network()
            .networks
            .values()
            .map(|network| {
                (0..network.subnets()).filter_map(|n| network.min.step(n)).filter(is_free).collect()
            })
            .collect();
        let pairs = families.iter().map(Vec::len).min().unwrap_or(0);
        (0..pairs).filter_map(|n| Subnets::new(families.iter().map(|family| family[n]))).collect()
    }

    async fn notice_expiries(&self, keys: &mut BTreeSet<(Subnets, Revision)>) {
        let is_outage = self.repairs.iter().any(|(_, repair)| matches!(repair, Repair::StoreBack));
        if is_outage {
            return;
        }
        let now: BTreeSet<_> =
            self.store.entries().await.iter().map(|e| (e.lease.subnets, e.lease.since)).collect();
        let mut stats = self.store.stats();
        let expired = keys.difference(&now).filter(|key| !stats.was_deleted(key)).count();
        (0..expired).for_each(|_| stats.counts.count(Fault::Expiry));
        *keys = now;
    }

    /// No two nodes own overlapping subnets at a moment of true time.
    fn check_owners(&self) {
        let owners: Vec<_> = self
            .nodes
            .iter()
            .filter(|node| !node.is_misled())
            .filter_map(|node| node.owns())
            .collect();
        let mut stats = self.store.stats();
        for (place, (subnets, run)) in owners.iter().enumerate() {
            for (other, other_run) in &owners[..place] {
                if subnets.overlaps(other)
                    && !stats.is_evicted(run, subnets)
                    && !stats.is_evicted(other_run, other)
                {
                    stats.fail(format!(
                        "two owners: {run:?} of {subnets} and {other_run:?} of {other}"
                    ));
                }
            }
        }
    }

    /// After the faults, all nodes get a subnet if possible, and all views are equal.
    async fn recover(&mut self) {
        self.store.stats().storm = false;
        self.store.stats().note(|| "calm".into());
        for (_, repair) in std::mem::take(&mut self.repairs) {
            self.apply(repair);
        }
        self.store.registry.set_config(Some(&self.store.configs[0]));
        let begin = Instant::now();
        loop {
            sleep(Duration::from_secs(10)).await;
            self.check_owners();
            if self.is_wrong() {
                return;
            }
            let Some(violation) = self.violation().await else { return };
            if begin.elapsed() > CALM {
                return self.store.stats().fail(format!("{CALM:?} after the faults: {violation}"));
            }
        }
    }

    /// A violated invariant.
    async fn violation(&self) -> Option<String> {
        let listing = self.store.registry.list().await.unwrap();
        let owners: Vec<_> = self.nodes.iter().map(|node| node.owns()).collect();
        for (node, owner) in self.nodes.iter().zip(&owners) {
            let daemon = node.daemon.lock().unwrap();
            if let Some((subnets, run)) = owner {
                let entry = listing.entries.iter().find(|entry| entry.lease.subnets == *subnets);
                if entry.is_none_or(|entry| entry.holder.is_some_and(|holder| holder != run.holder))
                {
                    return Some(format!("{run:?} owns {subnets}, but the store holds {entry:?}"));
                }
                let view = daemon.as_ref()?.views.borrow().clone();
                let stored = listing.entries.iter().map(|entry| entry.lease.clone());
                if !matches!(view.origin, Origin::Live { .. }) || view.leases != stored.collect() {
                    return Some(format!(
                        "node {} sees {view:?}, but the store holds {listing:?}",
                        node.id
                    ));
                }
            }
        }
        let without = self
            .nodes
            .iter()
            .zip(&owners)
            .filter(|(node, owner)| {
                owner.is_none() && !node.waits_for_operator.load(Ordering::Relaxed)
            })
            .count();
        let free = self.free().await.len();
        if without > 0 && free > 0 {
            return Some(format!("{without} nodes have no subnet, while {free} are free"));
        }
        let has_owner = |entry: &Entry| {
            owners.iter().flatten().any(|(subnets, _)| *subnets == entry.lease.subnets)
        };
        listing
            .entries
            .iter()
            .find(|entry| entry.holder.is_some() && !has_owner(entry))
            .map(|entry| format!("no node owns {entry:?}, but it stays"))
    }
}
