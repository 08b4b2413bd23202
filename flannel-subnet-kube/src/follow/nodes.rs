//! All nodes, as a set of leases.
//!
//! Each node has a fingerprint of the parts that its lease is made of, so an event that changes
//! none of them costs one look-up. If two nodes have one PodCIDR, the node created first has the
//! lease.
//!
//! A program that removes the annotations of a node must not cut it off. So its last lease stays
//! for a short time, in which its daemon restores the annotations.

use std::collections::{BTreeMap, HashMap};
use std::hash::RandomState;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_core::lease::LeaseSet;
use flannel_core::subnet::SkippedEntry;
use flannel_core::text::{MAX_REASON_CHARS, shorten};
use flannel_core::{Lease, Subnets};
use tokio::time::Instant;

use crate::node::annotations::MANAGED;
use crate::node::prefix::Prefix;
use crate::node::{Node, NodeLease, Wire};

/// The time for which the last lease of a node stays after its annotations were removed.
const GRACE: Duration = Duration::from_secs(30);

/// The options for reading nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadOptions {
    pub(crate) prefix: Prefix,
    /// The families that the network config enables.
    pub(crate) families: Vec<Family>,
}

/// All nodes.
#[derive(Debug)]
pub(crate) struct Nodes {
    read_options: ReadOptions,
    /// The name of this node, whose lease needs no grace.
    own: String,
    known: HashMap<Box<str>, Known>,
    leases: LeaseSet,
    /// The problems of each node.
    problems: BTreeMap<Box<str>, Vec<String>>,
    /// Nodes whose annotations were removed, and the end of their last leases.
    wiped: BTreeMap<Box<str>, Instant>,
    /// Nodes whose PodCIDR belongs to an older node.
    shadowed: BTreeMap<Box<str>, Subnets>,
    hasher: RandomState,
    /// The number of lists so far.
    list: u32,
}

#[derive(Debug)]
struct Known {
    fingerprint: u64,
    lease: Option<Arc<Lease>>,
    /// The number of the last list that had it.
    list: u32,
}

impl Nodes {
    /// An empty set. `own` is the name of this node.
    pub(crate) fn new(read_options: ReadOptions, own: String) -> Self {
        Self {
            read_options,
            own,
            known: HashMap::new(),
            leases: LeaseSet::default(),
            problems: BTreeMap::new(),
            wiped: BTreeMap::new(),
            shadowed: BTreeMap::new(),
            hasher: RandomState::new(),
            list: 0,
        }
    }

    pub(crate) fn leases(&self) -> &LeaseSet {
        &self.leases
    }

    /// The problems of nodes, by the kind of the problem.
    pub(crate) fn problems(&self) -> Vec<SkippedEntry> {
        let mut all = Vec::new();
        for (name, problems) in &self.problems {
            let key = format!("node {name}");
            all.extend(problems.iter().map(|why| SkippedEntry::new(key.as_str(), why.as_str())));
        }
        for name in self.wiped.keys() {
            let reason = format!(
                "its annotations were removed: its last lease stays for {} s, in which its daemon \
                 should restore them",
                GRACE.as_secs()
            );
            let entry = SkippedEntry::new(format!("node {name}"), reason);
            all.push(SkippedEntry { wiped_node: Some(name.to_string()), ..entry });
        }
        for (name, subnets) in &self.shadowed {
            let reason =
                format!("its PodCIDR is the lease {subnets}, which an earlier node holds already");
            all.push(SkippedEntry::new(format!("node {name}"), reason));
        }
        all
    }

    /// Begins a list.
    pub(crate) fn begin(&mut self) {
        self.list += 1;
    }

    /// Ends a list. Nodes that are not in it were deleted.
    pub(crate) fn complete(&mut self) {
        let deleted: Vec<Box<str>> = self
            .known
            .iter()
            .filter(|(_, known)| known.list != self.list)
            .map(|(name, _)| name.clone())
            .collect();
        for name in deleted {
            self.remove(&name);
        }
    }

    /// Sets a node. Returns whether a lease or a problem may have changed.
    pub(crate) fn put(&mut self, wire: &Wire<'_>) -> bool {
        let fingerprint = wire.fingerprint(&self.read_options.prefix, &self.hasher);
        let name: &str = &wire.metadata.name;
        if let Some(known) = self.known.get_mut(name) {
            known.list = self.list;
            if known.fingerprint == fingerprint {
                return false;
            }
        }
        let ReadOptions { prefix, families } = &self.read_options;
        let decoded = wire.node(prefix);
        let NodeLease { lease, mut problems } = match &decoded {
            Ok(node) => node.lease(wire.revision(), families, prefix),
            Err(problem) => NodeLease { lease: None, problems: vec![problem.clone()] },
        };
        let mut lease = lease.map(Arc::new);
        let before = self.known.get(name).and_then(|known| known.lease.clone());
        match before.as_ref().filter(|last| decoded.is_ok_and(|node| self.is_wiped(&node, last))) {
            Some(last) => {
                lease = Some(Arc::clone(last));
                self.wiped.entry(name.into()).or_insert_with(|| Instant::now() + GRACE);
            }
            None => _ = self.wiped.remove(name),
        }
        // A problem quotes annotations, of which a node may have a megabyte.
        for problem in &mut problems {
            *problem = shorten(problem, MAX_REASON_CHARS).into_owned();
        }
        self.known.insert(name.into(), Known { fingerprint, lease, list: self.list });
        if problems.is_empty() {
            self.problems.remove(name);
        } else {
            self.problems.insert(name.into(), problems);
        }
        self.update(name, before.as_ref());
        true
    }

    /// Whether the annotations of another node were removed, while its creation time and its
    /// PodCIDRs are still the same as in its `last` lease.
    fn is_wiped(&self, node: &Node, last: &Lease) -> bool {
        *node.name != *self.own
            && !node.values.contains_key(MANAGED)
            && node.created == last.since.0
            && node.subnets(&self.read_options.families) == Ok(Some(last.subnets))
    }

    /// The time at which [`Self::expire`] removes the next lease, or `None` if it will remove none.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.wiped.values().min().copied()
    }

    /// Removes the leases of nodes that have not restored their annotations in time. Returns
    /// whether it removed a lease.
    pub(crate) fn expire(&mut self) -> bool {
        let now = Instant::now();
        let expired: Vec<Box<str>> = self
            .wiped
            .iter()
            .filter(|(_, end)| **end <= now)
            .map(|(name, _)| name.clone())
            .collect();
        for name in &expired {
            self.wiped.remove(name);
            self.problems.remove(name);
            let before = self.known.get_mut(name).and_then(|known| known.lease.take());
            self.update(name, before.as_ref());
        }
        !expired.is_empty()
    }

    /// Removes a node. Returns whether it was known.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let Some(known) = self.known.remove(name) else { return false };
        self.problems.remove(name);
        self.wiped.remove(name);
        self.update(name, known.lease.as_ref());
        true
    }

    /// Updates the set after the lease of a node changed from `before`.
    fn update(&mut self, name: &str, before: Option<&Arc<Lease>>) {
        let now = self.known.get(name).and_then(|known| known.lease.clone());
        let shadowed = self.shadowed.remove(name);
        let old = before.map(|lease| lease.subnets);
        let new = now.as_ref().map(|lease| lease.subnets);
        for subnets in [old.filter(|old| Some(*old) != new), new].into_iter().flatten() {
            let is_free_or_ours = self
                .leases
                .get(&subnets)
                .is_none_or(|holding| before.is_some_and(|before| Arc::ptr_eq(holding, before)));
            let is_disputed =
                shadowed == Some(subnets) || self.shadowed.values().any(|other| *other == subnets);
            match now.as_ref().filter(|now| now.subnets == subnets) {
                _ if is_disputed || !is_free_or_ours => self.assign(subnets),
                Some(now) => self.leases.insert(Arc::clone(now)),
                None => _ = self.leases.remove(&subnets),
            }
        }
    }

    /// Gives the lease to the node with these subnets that was created first.
    fn assign(&mut self, subnets: Subnets) {
        self.shadowed.retain(|_, other| *other != subnets);
        let mut nodes: Vec<(&Box<str>, &Arc<Lease>)> = self
            .known
            .iter()
            .filter_map(|(name, known)| Some((name, known.lease.as_ref()?)))
            .filter(|(_, lease)| lease.subnets == subnets)
            .collect();
        nodes.sort_by_key(|(name, lease)| (lease.since, *name));
        let mut nodes = nodes.into_iter();
        match nodes.next() {
            Some((_, lease)) => self.leases.insert(Arc::clone(lease)),
            None => _ = self.leases.remove(&subnets),
        }
        self.shadowed.extend(nodes.map(|(name, _)| (name.clone(), subnets)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes() -> Nodes {
        let read_options = ReadOptions { prefix: Prefix::default(), families: vec![Family::V4] };
        Nodes::new(read_options, "me".to_owned())
    }

    /// A node that runs flannel, created in this minute.
    fn node(name: &str, cidr: &str, minute: u8, public: &str) -> String {
        format!(
            r#"{{"metadata":{{"name":"{name}","resourceVersion":"1",
            "creationTimestamp":"2026-11-21T20:{minute:02}:00Z","annotations":{{
            "flannel.alpha.coreos.com/kube-subnet-manager":"true",
            "flannel.alpha.coreos.com/public-ip":"{public}"}}}},
            "spec":{{"podCIDR":"{cidr}"}}}}"#
        )
    }

    fn put(nodes: &mut Nodes, text: &str) -> bool {
        nodes.put(&serde_json::from_str(text).unwrap())
    }

    fn held(nodes: &Nodes) -> Vec<String> {
        nodes
            .leases()
            .iter()
            .map(|lease| format!("{} {}", lease.subnets, lease.attrs.preferred.public.v4.unwrap()))
            .collect()
    }

    #[test]
    fn a_set_without_changes_is_shared() {
        let mut nodes = nodes();
        let text = node("a", "10.1.1.0/24", 1, "192.0.2.1");
        assert!(put(&mut nodes, &text));
        let before = nodes.leases().clone();
        assert!(!put(&mut nodes, &text.replace("\"1\"", "\"2\"")), "a heartbeat");
        assert_eq!(nodes.leases().changes_since(&before).count(), 0);
        assert!(put(&mut nodes, &node("a", "10.1.1.0/24", 1, "192.0.2.9")));
        assert_eq!(held(&nodes), ["10.1.1.0-24 192.0.2.9"]);
        assert!(put(&mut nodes, &node("a", "10.1.2.0/24", 1, "192.0.2.9")));
        assert_eq!(held(&nodes), ["10.1.2.0-24 192.0.2.9"], "another PodCIDR is another lease");
    }

    #[test]
    fn nodes_missing_in_a_complete_list_are_removed() {
        let mut nodes = nodes();
        nodes.begin();
        put(&mut nodes, &node("a", "10.1.1.0/24", 1, "192.0.2.1"));
        put(&mut nodes, &node("b", "10.1.2.0/24", 1, "192.0.2.2"));
        nodes.complete();
        nodes.begin();
        put(&mut nodes, &node("b", "10.1.2.0/24", 1, "192.0.2.2"));
        assert_eq!(nodes.leases().len(), 2, "not before it is complete");
        nodes.complete();
        assert_eq!(held(&nodes), ["10.1.2.0-24 192.0.2.2"]);
    }

    #[test]
    fn the_older_of_two_nodes_with_one_pod_cidr_holds_it_in_any_order() {
        let a = node("a", "10.1.1.0/24", 7, "192.0.2.1");
        let b = node("b", "10.1.1.0/24", 3, "192.0.2.2");
        for order in [[&a, &b], [&b, &a]] {
            let mut nodes = nodes();
            order.iter().for_each(|text| _ = put(&mut nodes, text));
            assert_eq!(held(&nodes), ["10.1.1.0-24 192.0.2.2"]);
            let problems = nodes.problems();
            assert_eq!(problems.len(), 1, "{problems:?}");
            let SkippedEntry { key, reason, .. } = &problems[0];
            assert_eq!(key, "node a");
            assert!(reason.contains("an earlier node holds"), "{reason}");
            // The shadowed node changes, and gets the lease when the other node is deleted.
            put(&mut nodes, &node("a", "10.1.1.0/24", 7, "192.0.2.7"));
            assert_eq!(held(&nodes), ["10.1.1.0-24 192.0.2.2"]);
            assert_eq!(nodes.problems().len(), 1);
            assert!(nodes.remove("b"));
            assert_eq!(held(&nodes), ["10.1.1.0-24 192.0.2.7"]);
            assert_eq!(nodes.problems().len(), 0);
            assert!(nodes.remove("a") && !nodes.remove("a"));
            assert!(nodes.leases().is_empty());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_without_its_annotations_keeps_its_last_lease_for_a_short_time() {
        let text = node("a", "10.1.1.0/24", 1, "192.0.2.1");
        let held = |nodes: &Nodes| held(nodes).join(" ");
        let wiped = text.replace("flannel.alpha.coreos.com", "example.com");
        let mut nodes = nodes();
        put(&mut nodes, &text);
        let before = nodes.leases().clone();
        assert!(put(&mut nodes, &wiped));
        assert_eq!(nodes.leases().changes_since(&before).count(), 0);
        let problems = nodes.problems();
        assert!(
            problems.len() == 1 && problems[0].reason.contains("annotations were removed"),
            "{problems:?}"
        );
        let end = nodes.next_end().unwrap();
        assert_eq!(end, Instant::now() + GRACE);
        // The time begins again neither with another change of the node nor with a list.
        tokio::time::advance(GRACE / 2).await;
        let partly = "flannel.alpha.coreos.com/public-ip";
        assert!(put(&mut nodes, &wiped.replace("example.com/public-ip", partly)));
        nodes.begin();
        put(&mut nodes, &wiped);
        nodes.complete();
        assert!(!nodes.expire() && nodes.next_end() == Some(end));
        assert_eq!(held(&nodes), "10.1.1.0-24 192.0.2.1");
        tokio::time::advance(GRACE / 2).await;
        assert!(nodes.expire());
        assert_eq!(held(&nodes), "");
        assert_eq!(nodes.problems(), []);
        assert_eq!(nodes.next_end(), None);
        put(&mut nodes, &text);
        put(&mut nodes, &wiped);
        put(&mut nodes, &text);
        assert_eq!(nodes.problems(), [], "restored in time");
        assert_eq!(nodes.next_end(), None, "restored in time");
        // An operator does these changes on purpose.
        for gone in [
            wiped.replace("10.1.1.0", "10.1.2.0"),
            wiped.replace("T20:01", "T20:02"),
            text.replace("\"true\"", "\"false\""),
        ] {
            put(&mut nodes, &text);
            put(&mut nodes, &gone);
            assert_eq!(held(&nodes), "", "{gone}");
            assert_eq!(nodes.next_end(), None, "{gone}");
        }
        let own = |text: &str| text.replace("\"a\"", "\"me\"");
        put(&mut nodes, &own(&text));
        put(&mut nodes, &own(&wiped));
        assert_eq!(held(&nodes), "");
        assert_eq!(nodes.next_end(), None);
    }

    #[test]
    fn the_reasons_of_a_node_are_bounded_whatever_it_has() {
        let long = "é".repeat(100_000);
        let text = node("a", "10.1.1.0/24", 1, "192.0.2.1");
        for wrong in [
            text.replace("10.1.1.0/24", &long),
            text.replace("\"10.1.1.0/24\"", &format!("{{\"{long}\":1}}")),
            text.replace("192.0.2.1", &long),
        ] {
            let mut nodes = nodes();
            put(&mut nodes, &wrong);
            let problems = nodes.problems();
            assert!(
                problems.len() == 1 && problems[0].reason.chars().count() <= MAX_REASON_CHARS + 1,
                "{problems:?}"
            );
        }
    }

    #[test]
    fn a_wrong_node_affects_no_other() {
        let mut nodes = nodes();
        put(&mut nodes, &node("a", "10.1.1.0/24", 1, "192.0.2.1"));
        put(&mut nodes, &node("b", "10.1.2.0", 1, "192.0.2.2"));
        put(&mut nodes, &node("c", "10.1.3.0/24", 1, "nonsense"));
        assert_eq!(nodes.leases().len(), 2, "c has a subnet, although it has no address");
        let problems: Vec<String> =
            nodes.problems().into_iter().map(|it| format!("{}: {}", it.key, it.reason)).collect();
        assert!(problems[0].starts_with("node b: its PodCIDR \"10.1.2.0\""), "{problems:?}");
        assert!(
            problems[1]
                .starts_with("node c: annotation flannel.alpha.coreos.com/public-ip: \"nonsense\""),
            "{problems:?}"
        );
        put(&mut nodes, &node("c", "10.1.3.0/24", 1, "192.0.2.3"));
        assert_eq!(nodes.problems().len(), 1);
    }
}
