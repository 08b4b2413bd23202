//! All nodes, as a set of leases.
//!
//! Each node has a fingerprint of the parts that its lease is made of, so an event without a change
//! of them costs one look-up. Of two nodes with one PodCIDR, the one created first has the lease.

use std::collections::{BTreeMap, HashMap};
use std::hash::RandomState;
use std::sync::Arc;

use flannel_core::address::Family;
use flannel_core::lease::LeaseSet;
use flannel_core::{Lease, Subnets};

use crate::node::Wire;
use crate::node::prefix::Prefix;

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
    known: HashMap<Box<str>, Known>,
    leases: LeaseSet,
    /// The problems of each node.
    wrong: BTreeMap<Box<str>, Vec<String>>,
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
    pub(crate) fn new(read_options: ReadOptions) -> Self {
        Self {
            read_options,
            known: HashMap::new(),
            leases: LeaseSet::default(),
            wrong: BTreeMap::new(),
            shadowed: BTreeMap::new(),
            hasher: RandomState::new(),
            list: 0,
        }
    }

    pub(crate) fn leases(&self) -> &LeaseSet {
        &self.leases
    }

    /// The problems: nodes and reasons.
    pub(crate) fn wrong(&self) -> Vec<(String, String)> {
        let own = self
            .wrong
            .iter()
            .flat_map(|(name, all)| all.iter().map(move |why| (name, why.clone())));
        let shadowed = self.shadowed.iter().map(|(name, subnets)| {
            (
                name,
                format!("its PodCIDR is the lease {subnets}, which an earlier node holds already"),
            )
        });
        own.chain(shadowed).map(|(name, why)| (format!("node {name}"), why)).collect()
    }

    /// Begins a list.
    pub(crate) fn begin(&mut self) {
        self.list += 1;
    }

    /// Ends a list: nodes that are not in it were deleted.
    pub(crate) fn complete(&mut self) {
        let gone = self.known.iter().filter(|(_, known)| known.list != self.list);
        let gone: Vec<Box<str>> = gone.map(|(name, _)| name.clone()).collect();
        gone.iter().for_each(|name| _ = self.remove(name));
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
        let (lease, wrong) = match wire.node(prefix) {
            Ok(node) => node.lease(wire.revision(), families, prefix),
            Err(wrong) => (None, vec![wrong]),
        };
        let known = Known { fingerprint, lease: lease.map(Arc::new), list: self.list };
        let before = self.known.insert(name.into(), known).and_then(|known| known.lease);
        match wrong.is_empty() {
            true => drop(self.wrong.remove(name)),
            false => drop(self.wrong.insert(name.into(), wrong)),
        }
        self.changed(name, before.as_ref());
        true
    }

    /// Removes a node. Returns whether it was known.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let Some(known) = self.known.remove(name) else { return false };
        self.wrong.remove(name);
        self.changed(name, known.lease.as_ref());
        true
    }

    /// Updates the set after the lease of a node changed from `before`.
    fn changed(&mut self, name: &str, before: Option<&Arc<Lease>>) {
        let now = self.known.get(name).and_then(|known| known.lease.clone());
        let shadowed = self.shadowed.remove(name);
        let old = before.map(|lease| lease.subnets);
        let new = now.as_ref().map(|lease| lease.subnets);
        for subnets in [old.filter(|old| Some(*old) != new), new].into_iter().flatten() {
            let held = self.leases.get(&subnets);
            let ours =
                held.is_none_or(|held| before.is_some_and(|before| Arc::ptr_eq(held, before)));
            let disputed =
                shadowed == Some(subnets) || self.shadowed.values().any(|other| *other == subnets);
            match now.as_ref().filter(|now| now.subnets == subnets) {
                _ if disputed || !ours => self.assign(subnets),
                Some(now) => self.leases.insert(Arc::clone(now)),
                None => drop(self.leases.remove(&subnets)),
            }
        }
    }

    /// Gives the lease to the node with these subnets that was created first.
    fn assign(&mut self, subnets: Subnets) {
        self.shadowed.retain(|_, other| *other != subnets);
        let mut claims = Vec::new();
        for (name, known) in &self.known {
            if let Some(lease) = known.lease.as_ref().filter(|lease| lease.subnets == subnets) {
                claims.push((lease.since, name.clone(), Arc::clone(lease)));
            }
        }
        claims.sort_by(|(a, x, _), (b, y, _)| (a, x).cmp(&(b, y)));
        let mut claims = claims.into_iter();
        match claims.next() {
            Some((.., first)) => self.leases.insert(first),
            None => drop(self.leases.remove(&subnets)),
        }
        self.shadowed.extend(claims.map(|(_, name, _)| (name, subnets)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes() -> Nodes {
        Nodes::new(ReadOptions { prefix: Prefix::default(), families: vec![Family::V4] })
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
        let one = |lease: &Arc<Lease>| {
            format!("{} {}", lease.subnets, lease.attrs.preferred.public.v4.unwrap())
        };
        nodes.leases().iter().map(one).collect()
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
        let (a, b) =
            (node("a", "10.1.1.0/24", 7, "192.0.2.1"), node("b", "10.1.1.0/24", 3, "192.0.2.2"));
        for order in [[&a, &b], [&b, &a]] {
            let mut nodes = nodes();
            order.iter().for_each(|text| _ = put(&mut nodes, text));
            assert_eq!(held(&nodes), ["10.1.1.0-24 192.0.2.2"]);
            let wrong = nodes.wrong();
            assert_eq!(wrong[0].0, "node a");
            assert!(wrong.len() == 1 && wrong[0].1.contains("an earlier node holds"), "{wrong:?}");
            // The shadowed node changes, and gets the lease when the other node is deleted.
            put(&mut nodes, &node("a", "10.1.1.0/24", 7, "192.0.2.7"));
            assert_eq!(
                (held(&nodes), nodes.wrong().len()),
                (vec!["10.1.1.0-24 192.0.2.2".to_owned()], 1)
            );
            assert!(nodes.remove("b"));
            assert_eq!(
                (held(&nodes), nodes.wrong().len()),
                (vec!["10.1.1.0-24 192.0.2.7".to_owned()], 0)
            );
            assert!(nodes.remove("a") && !nodes.remove("a"));
            assert!(nodes.leases().is_empty());
        }
    }

    #[test]
    fn a_wrong_node_affects_no_other() {
        let mut nodes = nodes();
        put(&mut nodes, &node("a", "10.1.1.0/24", 1, "192.0.2.1"));
        put(&mut nodes, &node("b", "10.1.2.0", 1, "192.0.2.2"));
        put(&mut nodes, &node("c", "10.1.3.0/24", 1, "nonsense"));
        assert_eq!(nodes.leases().len(), 2, "c has a subnet, although it has no address");
        let wrong: Vec<String> =
            nodes.wrong().into_iter().map(|(node, why)| format!("{node}: {why}")).collect();
        assert!(wrong[0].starts_with("node b: its PodCIDR \"10.1.2.0\""), "{wrong:?}");
        assert!(
            wrong[1]
                .starts_with("node c: annotation flannel.alpha.coreos.com/public-ip: \"nonsense\""),
            "{wrong:?}"
        );
        put(&mut nodes, &node("c", "10.1.3.0/24", 1, "192.0.2.3"));
        assert_eq!(nodes.wrong().len(), 1);
    }
}
