//! The store of all nodes, and the records that the invariants are checked with.
//!
//! An operator who deletes or overwrites the key of a node *evicts* the node, which the lease rules
//! do not allow. The node may own the subnet until it notices. No other node may.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Config, Error, Result, Subnet, Subnets};
use flannel_subnet::{Entry, HolderId, LeaseGrant, MemoryRegistry, Registry};

use crate::fault::{Counts, Fault};

/// A comparison that the store omits on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// Overwrites existing keys.
    Create,
    /// Overwrites any revision, and creates keys.
    Update,
    /// Deletes any revision.
    Delete,
    /// Confirms a holder that the store has forgotten.
    KeepAlive,
}

/// A node's public addresses, which it keeps.
pub(crate) fn addresses(node: usize) -> Dual<IpAddr> {
    let node = u8::try_from(node + 1).unwrap();
    let v6 = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, node.into());
    [IpAddr::from([192, 0, 2, node]), v6.into()].into_iter().collect()
}

/// One run of a node's daemon, under one holder ID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Run {
    pub(crate) node: usize,
    pub(crate) number: u64,
    pub(crate) holder: HolderId,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) registry: MemoryRegistry,
    /// The network configs that the operator changes between.
    pub(crate) configs: Vec<String>,
    parsed: Vec<Config>,
    broken: Option<Broken>,
    stats: Mutex<StoreStats>,
}

#[derive(Debug, Default)]
pub(crate) struct StoreStats {
    /// Faults happen only while this is true.
    pub(crate) storm: bool,
    pub(crate) counts: Counts,
    /// The run that each node is in, if any.
    pub(crate) running: BTreeMap<usize, Run>,
    evicted: BTreeSet<(usize, u64, Subnets)>,
    /// All evictions. A later write of the node does not remove them, because a late write of its
    /// own does not undo what the node knows.
    ever_evicted: BTreeSet<(usize, u64, Subnets)>,
    /// Entries whose holders, as far as they do not run, may find them in their cache.
    evicted_in_cache: Vec<Entry>,
    /// Deleted keys, with `since`. All other missing keys have expired.
    deleted: BTreeSet<(Subnets, Revision)>,
    /// The writes of each key.
    writes: BTreeMap<Subnets, Vec<Write>>,
    /// The keys that an earlier run of a node wrote during a later one.
    late: BTreeSet<(usize, Subnets)>,
    sequence: u64,
    pub(crate) wrong: Option<String>,
    /// The events, if they are recorded.
    pub(crate) trace: Option<Vec<String>>,
}

/// A write of a key.
#[derive(Debug, Clone, Copy)]
struct Write {
    /// The sequence number.
    when: u64,
    /// The node, or `None` for an operator or another program.
    by: Option<usize>,
}

/// Whether the entry is the lease of this run.
fn holds(entry: &Entry, run: &Run) -> bool {
    match entry.holder {
        Some(holder) => run.holder == holder,
        None => addresses(run.node) == entry.lease.attrs.preferred.public,
    }
}

impl StoreStats {
    pub(crate) fn is_evicted(&self, run: &Run, subnets: &Subnets) -> bool {
        self.evicted.contains(&(run.node, run.number, *subnets))
    }

    /// Notes that a run begins with these subnets in its cache.
    pub(crate) fn begins_with(&mut self, run: &Run, subnets: &Subnets) {
        if self
            .evicted_in_cache
            .iter()
            .any(|entry| entry.lease.subnets == *subnets && holds(entry, run))
        {
            let evicted = (run.node, run.number, *subnets);
            self.evicted.insert(evicted);
            self.ever_evicted.insert(evicted);
        }
    }

    pub(crate) fn was_evicted(&self, run: &Run, subnets: &Subnets) -> bool {
        self.ever_evicted.contains(&(run.node, run.number, *subnets))
    }

    /// Whether another node than `node` has written an overlapping key since then.
    pub(crate) fn others_wrote(&self, node: usize, subnets: &Subnets, since: u64) -> bool {
        self.writes
            .iter()
            .filter(|(key, _)| key.overlaps(subnets))
            .flat_map(|(_, writes)| writes)
            .any(|write| write.when > since && write.by != Some(node))
    }

    pub(crate) fn was_deleted(&self, key: &(Subnets, Revision)) -> bool {
        self.deleted.contains(key)
    }

    pub(crate) fn was_ever_deleted(&self, key: &Subnets) -> bool {
        self.deleted.iter().any(|(deleted, _)| deleted == key)
    }

    /// The time at which the node first wrote this key.
    pub(crate) fn first_write(&self, node: usize, key: &Subnets) -> Option<u64> {
        self.writes.get(key)?.iter().find(|write| write.by == Some(node)).map(|write| write.when)
    }

    /// Whether the node has written another key than this one.
    pub(crate) fn wrote_another(&self, node: usize, key: &Subnets) -> bool {
        self.writes
            .iter()
            .filter(|(other, _)| *other != key)
            .flat_map(|(_, writes)| writes)
            .any(|write| write.by == Some(node))
    }

    /// Whether an earlier run of the node wrote this key during a later one.
    pub(crate) fn came_late(&self, node: usize, key: &Subnets) -> bool {
        self.late.contains(&(node, *key))
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn fail(&mut self, what: String) {
        self.note(|| format!("WRONG: {what}"));
        self.wrong.get_or_insert(what);
    }

    pub(crate) fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push(what());
        }
    }

    fn wrote(&mut self, key: &Subnets, by: Option<usize>) {
        self.sequence += 1;
        let write = Write { when: self.sequence, by };
        self.writes.entry(*key).or_default().push(write);
    }
}

impl Store {
    pub(crate) fn new(configs: Vec<String>, broken: Option<Broken>, trace: bool) -> Self {
        let parsed = configs.iter().map(|text| Config::parse(text).unwrap()).collect();
        let stats =
            StoreStats { storm: true, trace: trace.then(Vec::new), ..StoreStats::default() };
        let registry = MemoryRegistry::with_config(&configs[0]);
        Self { registry, configs, parsed, broken, stats: Mutex::new(stats) }
    }

    pub(crate) fn fits_every_config(&self, subnets: &Subnets) -> bool {
        self.parsed.iter().all(|config| {
            subnets.iter().all(|subnet: Subnet| {
                config.networks[subnet.family()]
                    .is_some_and(|network| (network.min..=network.max).contains(&subnet))
            })
        })
    }

    /// The config that is in force at the end, the first one.
    pub(crate) fn network(&self) -> &Config {
        &self.parsed[0]
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, StoreStats> {
        self.stats.lock().unwrap()
    }

    pub(crate) fn count(&self, fault: Fault) {
        self.stats().counts.count(fault);
    }

    /// All entries, without faults.
    pub(crate) async fn entries(&self) -> Vec<Entry> {
        self.registry.list().await.map(|listing| listing.entries).unwrap_or_default()
    }

    async fn entry(&self, subnets: &Subnets) -> Option<Entry> {
        self.registry.entry(subnets).await.ok().flatten()
    }

    /// The holder will lose the lease without a fault of its own.
    fn evict(&self, entry: &Entry) {
        let mut stats = self.stats();
        stats.deleted.insert((entry.lease.subnets, entry.lease.since));
        stats.evicted_in_cache.push(entry.clone());
        let victims: Vec<Run> =
            stats.running.values().filter(|run| holds(entry, run)).cloned().collect();
        for victim in victims {
            let evicted = (victim.node, victim.number, entry.lease.subnets);
            stats.evicted.insert(evicted);
            stats.ever_evicted.insert(evicted);
        }
    }

    /// An operator or another program deletes a key.
    pub(crate) fn operator_deletes(&self, entry: &Entry) {
        self.evict(entry);
        self.registry.delete_key(&entry.lease.subnets.to_string());
    }

    /// An operator revokes a holder.
    pub(crate) async fn operator_revokes(&self, entry: &Entry) {
        let Some(holder) = entry.holder else { return self.evict(entry) };
        // A late write may have given it a second key, which is deleted too.
        self.entries()
            .await
            .iter()
            .filter(|entry| entry.holder == Some(holder))
            .for_each(|entry| self.evict(entry));
        self.registry.revoke(holder);
    }

    /// An operator or another program writes a key.
    pub(crate) fn operator_writes(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) {
        self.registry.put_raw(&subnets.to_string(), &attrs.to_json(), grant);
        self.stats().wrote(subnets, None);
    }

    async fn written(&self, run: &Run, subnets: &Subnets) {
        let was_evicted = self.stats().is_evicted(run, subnets);
        let alone = !was_evicted || {
            let entries = self.entries().await;
            entries.iter().filter(|entry| entry.lease.subnets.overlaps(subnets)).count() == 1
        };
        let mut stats = self.stats();
        stats.wrote(subnets, Some(run.node));
        if stats.running.get(&run.node).is_some_and(|now| now.number > run.number) {
            stats.late.insert((run.node, *subnets));
        }
        if alone {
            stats.evicted.remove(&(run.node, run.number, *subnets));
        }
        stats
            .evicted_in_cache
            .retain(|entry| entry.lease.subnets != *subnets || !holds(entry, run));
    }

    pub(crate) async fn create(
        &self,
        run: &Run,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let mut result = self.registry.create(subnets, attrs, grant).await;
        if self.broken == Some(Broken::Create) && matches!(result, Err(Error::Conflict { .. })) {
            result = self.write_blindly(subnets, attrs, grant).await;
        }
        if result.is_ok() {
            self.written(run, subnets).await;
        }
        result
    }

    pub(crate) async fn update(
        &self,
        run: &Run,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let mut result = self.registry.update(subnets, at, attrs, grant).await;
        if self.broken == Some(Broken::Update) && matches!(result, Err(Error::Conflict { .. })) {
            result = self.write_blindly(subnets, attrs, grant).await;
        }
        if result.is_ok() {
            self.written(run, subnets).await;
        }
        result
    }

    async fn write_blindly(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.registry.put_raw(&subnets.to_string(), &attrs.to_json(), grant);
        self.registry.entry(subnets).await?.ok_or(Error::Conflict { subnets: *subnets })
    }

    pub(crate) async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let before = self.entry(subnets).await;
        let result = self.registry.delete(subnets, at).await;
        if result.is_ok()
            && let Some(entry) = before
        {
            // Only the node itself deletes at the right revision, perhaps late.
            self.evict(&entry);
        } else if self.broken == Some(Broken::Delete)
            && matches!(result, Err(Error::Conflict { .. }))
        {
            self.registry.delete_key(&subnets.to_string());
            return Ok(());
        }
        result
    }

    pub(crate) async fn keep_alive(
        &self,
        subnets: &Subnets,
        holder: HolderId,
        ttl: Duration,
    ) -> Result<Option<Duration>> {
        let kept = self.registry.keep_alive(subnets, holder).await?;
        Ok(if self.broken == Some(Broken::KeepAlive) { Some(ttl) } else { kept })
    }
}

/// Shared by everything in one simulation.
pub(crate) type SharedStore = Arc<Store>;
