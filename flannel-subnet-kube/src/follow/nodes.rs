//! All nodes, as a set of leases.
//!
//! Each node has a fingerprint of the parts that its lease is made of, so an event without a change
//! of them costs one look-up. Of two nodes with one PodCIDR, the one created first has the lease.
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
use flannel_core::text::{REASON, shorten};
use flannel_core::{Lease, Subnets};
use tokio::time::Instant;

use crate::node::annotations::MANAGED;
use crate::node::prefix::Prefix;
use crate::node::{Node, Wire};

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
    wrong: BTreeMap<Box<str>, Vec<String>>,
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
    /// No nodes. `own` is the name of this node.
    pub(crate) fn new(read_options: ReadOptions, own: String) -> Self {
        Self {
            read_options,
            own,
            known: HashMap::new(),
            leases: LeaseSet::default(),
            wrong: BTreeMap::new(),
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
    pub(crate) fn wrong(&self) -> Vec<SkippedEntry> {
        let unreadable = self.wrong.iter().flat_map(|(name, all)| {
            all.iter().map(move |why| SkippedEntry::new(format!("node {name}"), why.as_str()))
        });
        let wiped = self.wiped.keys().map(|name| {
            let reason = format!(
                "its annotations were removed: its last lease stays for {} s, in which its daemon \
                 should restore them",
                GRACE.as_secs()
            );
            let entry = SkippedEntry::new(format!("node {name}"), reason);
            SkippedEntry { wiped_node: Some(name.to_string()), ..entry }
        });
        let shadowed = self.shadowed.iter().map(|(name, subnets)| {
            let reason =
                format!("its PodCIDR is the lease {subnets}, which an earlier node holds already");
            SkippedEntry::new(format!("node {name}"), reason)
        });
        unreadable.chain(wiped).chain(shadowed).collect()
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
        let decoded = wire.node(prefix);
        let (lease, mut wrong) = match &decoded {
            Ok(node) => node.lease(wire.revision(), families, prefix),
            Err(wrong) => (None, vec![wrong.clone()]),
        };
        let mut lease = lease.map(Arc::new);
        let before = self.known.get(name).and_then(|known| known.lease.clone());
        match before.as_ref().filter(|last| decoded.is_ok_and(|node| self.is_wiped(&node, last))) {
            Some(last) => {
                lease = Some(Arc::clone(last));
                self.wiped.entry(name.into()).or_insert_with(|| Instant::now() + GRACE);
            }
            None => drop(self.wiped.remove(name)),
        }
        // A reason quotes annotations, of which a node may have a megabyte.
        wrong.iter_mut().for_each(|why| *why = shorten(why, REASON).into_owned());
        let known = Known { fingerprint, lease, list: self.list };
        self.known.insert(name.into(), known);
        if wrong.is_empty() {
            drop(self.wrong.remove(name));
        } else {
            drop(self.wrong.insert(name.into(), wrong));
        }
        self.changed(name, before.as_ref());
        true
    }

    /// Whether the annotations of another node were removed, while the node and its PodCIDRs are
    /// those of its `last` lease.
    fn is_wiped(&self, node: &Node, last: &Lease) -> bool {
        *node.name != *self.own
            && !node.values.contains_key(MANAGED)
            && node.created == last.since.0
            && node.subnets(&self.read_options.families) == Ok(Some(last.subnets))
    }

    /// The time at which [`Self::expire`] removes the next lease; `None`: there is none to remove.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.wiped.values().min().copied()
    }

    /// Removes the leases of nodes that have not restored their annotations in time. Returns
    /// whether there are any.
    pub(crate) fn expire(&mut self) -> bool {
        let now = Instant::now();
        let over = self.wiped.iter().filter(|(_, end)| **end <= now);
        let over: Vec<Box<str>> = over.map(|(name, _)| name.clone()).collect();
        for name in &over {
            self.wiped.remove(name);
            self.wrong.remove(name);
            let before = self.known.get_mut(name).and_then(|known| known.lease.take());
            self.changed(name, before.as_ref());
        }
        !over.is_empty()
    }

    /// Removes a node. Returns whether it was known.
    pub(crate) fn remove(&mut self, name: &str) -> bool {
        let Some(known) = self.known.remove(name) else { return false };
        self.wrong.remove(name);
        self.wiped.remove(name);
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
        let families = vec![Family::V4];
        Nodes::new(ReadOptions { prefix: Prefix::default(), families }, "me".to_owned())
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
            assert_eq!(wrong[0].key, "node a");
            assert!(
                wrong.len() == 1 && wrong[0].reason.contains("an earlier node holds"),
                "{wrong:?}"
            );
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
        let wrong = nodes.wrong();
        assert!(
            wrong.len() == 1 && wrong[0].reason.contains("annotations were removed"),
            "{wrong:?}"
        );
        let end = nodes.next_end().unwrap();
        assert_eq!(end, Instant::now() + GRACE);
        // Another change of it begins no new time, and neither does a list.
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
        assert_eq!((held(&nodes), nodes.wrong(), nodes.next_end()), (String::new(), vec![], None));
        put(&mut nodes, &text);
        put(&mut nodes, &wiped);
        put(&mut nodes, &text);
        assert_eq!((nodes.wrong(), nodes.next_end()), (vec![], None), "restored in time");
        // These are no accident.
        for gone in [
            wiped.replace("10.1.1.0", "10.1.2.0"),
            wiped.replace("T20:01", "T20:02"),
            text.replace("\"true\"", "\"false\""),
        ] {
            put(&mut nodes, &text);
            put(&mut nodes, &gone);
            assert_eq!((held(&nodes), nodes.next_end()), (String::new(), None), "{gone}");
        }
        let own = |text: &str| text.replace("\"a\"", "\"me\"");
        put(&mut nodes, &own(&text));
        put(&mut nodes, &own(&wiped));
        assert_eq!((held(&nodes), nodes.next_end()), (String::new(), None));
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
            let wrong = nodes.wrong();
            assert!(wrong.len() == 1 && wrong[0].reason.chars().count() <= REASON + 1, "{wrong:?}");
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
            nodes.wrong().into_iter().map(|it| format!("{}: {}", it.key, it.reason)).collect();
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
