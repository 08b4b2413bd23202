//! A model of a cluster whose nodes step in any order. It checks the invariants of a move.
//!
//! The store is a list of writes. The view of a node is a prefix of it, and never gets shorter.
//!
//! The kernel of a node may refuse the devices of a backend, and make them later. A config may name
//! a backend that no kernel has. As in the daemon, the node then runs its last target, and a
//! restarted one runs the first usable backend of its record.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::Subnets;
use flannel_core::config::BackendConfig;
use flannel_core::lease::{Lease, LeaseAttrs, LeaseSet, Offer, Origin, Revision, View};
use flannel_core::status::{Rejection, SortedMap};
use proptest::prelude::*;

use crate::moving::{AwaitedEvent, BackendUse, NodeBackends, Seen, Tunnels};

const KINDS: [&str; 3] = ["vxlan", "host-gw", TUNNEL];
/// It needs a handshake with each peer.
const TUNNEL: &str = "wireguard";
/// The kernel of no node has it.
const IMPOSSIBLE: &str = "nosuch";
const NODES: usize = 3;

/// One event. Nodes are numbers modulo the size of the cluster.
#[derive(Debug, Clone)]
enum Event {
    /// The store gets another config.
    Config(&'static str),
    /// The node reads the config. Its network is rebuilt with the new backend, if it can be.
    Read(usize),
    /// The node's kernel makes the devices of all backends. If it cannot make the devices of the
    /// target, the node goes back to the last target whose devices it could make.
    InPlace(usize),
    /// The node's kernel makes no device of this kind from now on. Those that it has stay.
    Break { node: usize, kind: &'static str },
    /// The node's kernel makes all devices.
    Repair(usize),
    /// The node tries the backends that were left out, or forgets them.
    Revive(usize),
    /// The node sees this many more writes.
    View(usize, usize),
    /// The node steps, and publishes its offers. With `crash`, it is killed before it publishes.
    Step { node: usize, crash: bool },
    /// Both nodes complete a handshake.
    Shake(usize, usize),
    /// The node drops the backends that nothing uses.
    Drop(usize),
    /// The daemon is killed. The objects stay in the kernel.
    Kill(usize),
    /// The daemon starts again.
    Start(usize),
}

fn event() -> impl Strategy<Value = Event> {
    let node = 0..NODES;
    prop_oneof![
        1 => prop::sample::select(&[KINDS[0], KINDS[1], KINDS[2], IMPOSSIBLE][..])
            .prop_map(Event::Config),
        1 => (node.clone(), prop::sample::select(&KINDS[..]))
            .prop_map(|(node, kind)| Event::Break { node, kind }),
        1 => node.clone().prop_map(Event::Repair),
        2 => node.clone().prop_map(Event::Revive),
        4 => node.clone().prop_map(Event::Read),
        4 => node.clone().prop_map(Event::InPlace),
        8 => (node.clone(), 1..4usize).prop_map(|(node, by)| Event::View(node, by)),
        10 => (node.clone(), prop::bool::weighted(0.1))
            .prop_map(|(node, crash)| Event::Step { node, crash }),
        6 => (node.clone(), node.clone()).prop_map(|(node, peer)| Event::Shake(node, peer)),
        3 => node.clone().prop_map(Event::Drop),
        1 => node.clone().prop_map(Event::Kill),
        3 => node.prop_map(Event::Start),
    ]
}

#[derive(Debug, Clone)]
struct Node {
    /// The backends that it runs. `<state-dir>/backends` has these and `aside`.
    kept: NodeBackends,
    /// The backends that were left out.
    aside: Vec<BackendUse>,
    /// The kind of the config that it follows.
    target: &'static str,
    /// The last one whose devices were in its kernel.
    proven: &'static str,
    /// The kinds whose devices its kernel does not make.
    broken: BTreeSet<&'static str>,
    runs: bool,
    in_place: bool,
    /// The kinds whose devices are in its kernel.
    kernel: BTreeSet<&'static str>,
    /// The number of writes that it has seen.
    seen: usize,
    /// The number of writes when its lease lost an offer last.
    withdrew: usize,
}

/// The offers of a node, at one moment.
type Offers = Vec<&'static str>;

#[derive(Debug)]
struct Cluster {
    config: &'static str,
    nodes: Vec<Node>,
    writes: Vec<(usize, Offers)>,
    /// The pairs of nodes with a completed handshake, the lower number first.
    shaken: BTreeSet<(usize, usize)>,
    /// A firewall between these two drops the packets of the tunnel.
    blocked: Option<(usize, usize)>,
}

fn backend(kind: &str) -> BackendConfig {
    BackendConfig::parse(&format!("{{\"Type\": \"{kind}\"}}")).unwrap()
}

fn known(kind: &str) -> &'static str {
    KINDS.into_iter().find(|known| *known == kind).unwrap()
}

fn subnets(node: usize) -> Subnets {
    format!("10.1.{}.0-24", node + 1).parse().unwrap()
}

fn lease(node: usize, offers: &[&'static str]) -> Lease {
    let mut offers = offers.iter().map(|kind| {
        Offer::new([[192, 0, 2, 1 + node as u8].into()].into_iter().collect()).with_kind(*kind)
    });
    let attrs = LeaseAttrs { preferred: offers.next().unwrap(), others: offers.collect() };
    let revision = Revision(1);
    Lease { subnets: subnets(node), attrs, expires: None, since: revision, revision }
}

impl Cluster {
    /// `go`: the offer of a node of Go flannel.
    fn new(go: Option<&'static str>) -> Self {
        let mut kept = NodeBackends::default();
        kept.aim_at(KINDS[0], &backend(KINDS[0]));
        let node = Node {
            kept,
            aside: Vec::new(),
            target: KINDS[0],
            proven: KINDS[0],
            broken: BTreeSet::new(),
            runs: true,
            in_place: true,
            kernel: [KINDS[0]].into(),
            seen: 0,
            withdrew: 0,
        };
        let nodes = vec![node; NODES];
        let writes = Vec::new();
        let config = KINDS[0];
        let mut cluster = Self { config, nodes, writes, shaken: BTreeSet::new(), blocked: None };
        (0..NODES).for_each(|node| cluster.publish(node));
        cluster.writes.extend(go.map(|kind| (NODES, vec![kind])));
        let all = cluster.writes.len();
        cluster.nodes.iter_mut().for_each(|node| node.seen = all);
        cluster
    }

    fn offers(&self, node: usize) -> Offers {
        self.nodes[node].kept.offered().map(|it| known(&it.lease_type)).collect()
    }

    fn publish(&mut self, node: usize) {
        let offers = self.offers(node);
        let before = self.published(self.writes.len(), node).cloned().unwrap_or_default();
        if before != offers {
            let withdraws = before.iter().any(|kind| !offers.contains(kind));
            self.writes.push((node, offers));
            if withdraws {
                self.nodes[node].withdrew = self.writes.len();
            }
        }
    }

    /// The offers of a node after the first `count` writes.
    fn published(&self, count: usize, node: usize) -> Option<&Offers> {
        self.writes[..count].iter().rev().find(|(of, _)| *of == node).map(|(_, offers)| offers)
    }

    fn view(&self, node: usize) -> View {
        let seen = self.nodes[node].seen;
        let leases: LeaseSet = (0..=NODES)
            .filter_map(|of| Some(Arc::new(lease(of, self.published(seen, of)?))))
            .collect();
        View { leases, origin: Origin::Live { revision: Revision(1) } }
    }

    /// Whether the kernel of a node has the other one as a peer of the tunnel.
    fn has_peer(&self, node: usize, peer: usize) -> bool {
        let it = &self.nodes[node];
        let offers = self.published(it.seen, peer);
        it.kernel.contains(TUNNEL) && offers.is_some_and(|offers| offers.contains(&TUNNEL))
    }

    fn is_shaken(&self, node: usize, peer: usize) -> bool {
        self.shaken.contains(&(node.min(peer), node.max(peer)))
    }

    fn tunnels(&self, node: usize) -> Tunnels {
        let subnets = |is_open| {
            let peers = (0..NODES).filter(|peer| self.has_peer(node, *peer));
            let peers = peers.filter(|peer| self.is_shaken(node, *peer) == is_open);
            peers.flat_map(|peer| subnets(peer).iter().collect::<Vec<_>>()).collect()
        };
        Tunnels { open: subnets(true), waiting: subnets(false) }
    }

    fn step_of(&self, node: usize) -> Option<Result<NodeBackends, AwaitedEvent>> {
        let view = self.view(node);
        let own = subnets(node);
        let tunnels = self.tunnels(node);
        let Node { kept, target, in_place, .. } = &self.nodes[node];
        let tunnels = (*target == TUNNEL).then_some(&tunnels);
        let in_place = *in_place;
        let rejected = &SortedMap::default();
        let step = kept.step(target, &Seen { in_place, view: &view, own, tunnels, rejected });
        step.map(|step| step.next)
    }

    /// Whether the kernel of a node can hold the devices of a kind.
    fn can_build(&self, node: usize, kind: &str) -> bool {
        let it = &self.nodes[node];
        it.kernel.contains(kind) || (kind != IMPOSSIBLE && !it.broken.contains(kind))
    }

    /// The backends of a network of a node with this target, and the backends that are left out.
    /// `None` if the network cannot be built, or if the node still needs the network that runs.
    fn lineup(&self, node: usize, target: &'static str) -> Option<(NodeBackends, Vec<BackendUse>)> {
        let it = &self.nodes[node];
        if !self.can_build(node, target) {
            return None;
        }
        let mut record = it.kept.clone();
        record.add(&it.aside);
        record.aim_at(target, &backend(target));
        let (kept, aside) =
            record.without(target, |usage| !self.can_build(node, &usage.lease_type));
        let view = self.view(node);
        let mut users =
            aside.iter().filter_map(|usage| kept.user_of(&usage.lease_type, subnets(node), &view));
        let is_needed = it.runs && users.next().is_some();
        (!is_needed).then_some((kept, aside))
    }

    /// Rebuilds the network of a node for this target, if it can be built.
    fn aim(&mut self, node: usize, target: &'static str) -> bool {
        let Some((kept, aside)) = self.lineup(node, target) else { return false };
        let it = &mut self.nodes[node];
        it.kept = kept;
        it.aside = aside;
        it.target = target;
        it.in_place = false;
        true
    }

    /// Makes the devices of a node. If it cannot make the devices of a target that the node does
    /// not offer yet, the node goes back.
    fn make_devices(&mut self, node: usize) {
        let made: Vec<_> = self.nodes[node].kept.iter().map(|it| known(&it.lease_type)).collect();
        let made: Vec<_> = made.into_iter().filter(|kind| self.can_build(node, kind)).collect();
        let it = &mut self.nodes[node];
        it.kernel.extend(made);
        it.in_place = it.kernel.contains(it.target);
        if it.in_place {
            it.proven = it.target;
            return;
        }
        let failed = it.target;
        let proven = it.proven;
        assert!(it.kept.offered().all(|usage| usage.lease_type != failed));
        it.kept.retain(|usage| usage.lease_type != failed);
        assert!(self.aim(node, proven), "{self:#?}");
    }

    /// A daemon starts: with the config, else with the proven one, else with the first usable
    /// backend of its record.
    fn start(&mut self, node: usize) {
        let record = &self.nodes[node].kept;
        let record: Vec<_> = record.iter().map(|it| known(&it.lease_type)).collect();
        let proven = self.nodes[node].proven;
        let mut targets = [self.config, proven].into_iter().chain(record);
        let found = targets.find(|target| self.aim(node, target));
        assert!(found.is_some(), "node {node} runs nothing: {self:#?}");
        let all = self.writes.len();
        let it = &mut self.nodes[node];
        it.runs = true;
        it.seen = all;
        self.publish(node);
    }

    /// Returns whether it changed anything.
    fn happens(&mut self, event: &Event) -> bool {
        match *event {
            Event::Config(kind) => {
                self.config = kind;
                true
            }
            Event::Read(node) => self.reads_config(node),
            Event::InPlace(node) => {
                let is_due = self.nodes[node].runs && !self.nodes[node].in_place;
                if is_due {
                    self.make_devices(node);
                }
                is_due
            }
            Event::Break { node, kind } => self.nodes[node].broken.insert(kind),
            Event::Repair(node) => {
                let is_due = !self.nodes[node].broken.is_empty();
                self.nodes[node].broken.clear();
                is_due
            }
            Event::Revive(node) => self.revives(node),
            Event::View(node, by) => self.sees_writes(node, by),
            Event::Step { node, crash } => self.steps(node, crash),
            Event::Shake(node, peer) => self.shake_hands(node, peer),
            Event::Drop(node) => self.drops_backends(node),
            Event::Kill(node) => std::mem::replace(&mut self.nodes[node].runs, false),
            Event::Start(node) => {
                let is_due = !self.nodes[node].runs;
                if is_due {
                    self.start(node);
                }
                is_due
            }
        }
    }

    fn reads_config(&mut self, node: usize) -> bool {
        let config = self.config;
        self.nodes[node].runs && self.nodes[node].target != config && self.aim(node, config)
    }

    fn revives(&mut self, node: usize) -> bool {
        let it = &self.nodes[node];
        if !it.runs || it.aside.is_empty() {
            return false;
        }
        if it.aside.iter().any(|usage| self.can_build(node, &usage.lease_type)) {
            let target = it.target;
            return self.aim(node, target);
        }
        let view = self.view(node);
        let is_used =
            |usage: &BackendUse| it.kept.user_of(&usage.lease_type, subnets(node), &view).is_some();
        if it.aside.iter().any(is_used) {
            return false;
        }
        self.nodes[node].aside.clear();
        true
    }

    fn sees_writes(&mut self, node: usize, more: usize) -> bool {
        let all = self.writes.len();
        let it = &mut self.nodes[node];
        if !it.runs || it.seen >= all {
            return false;
        }
        it.seen = all.min(it.seen + more);
        true
    }

    fn steps(&mut self, node: usize, crash: bool) -> bool {
        if !self.nodes[node].runs {
            return false;
        }
        let Some(Ok(next)) = self.step_of(node) else { return false };
        let before = self.offers(node);
        self.nodes[node].kept = next;
        let after = self.offers(node);
        let lists = |kind| {
            (0..=NODES).all(|of| {
                let seen = self.published(self.nodes[node].seen, of);
                seen.is_none_or(|offers| offers.contains(&kind))
            })
        };
        assert!(before[0] == after[0] || lists(after[0]), "{before:?} -> {after:?}");
        assert!(after.iter().all(|kind| self.nodes[node].kernel.contains(kind)));
        if crash {
            self.nodes[node].runs = false;
        } else {
            self.publish(node);
        }
        true
    }

    fn shake_hands(&mut self, node: usize, peer: usize) -> bool {
        let meet = node < peer && self.has_peer(node, peer) && self.has_peer(peer, node);
        meet && self.blocked != Some((node, peer)) && self.shaken.insert((node, peer))
    }

    fn drops_backends(&mut self, node: usize) -> bool {
        if !self.nodes[node].runs || self.step_of(node) != Some(Err(AwaitedEvent::Silence)) {
            return false;
        }
        // A minute has passed: all nodes have seen the withdrawal. No packet has come.
        let withdrew = self.nodes[node].withdrew;
        if self.nodes.iter().any(|it| it.seen < withdrew || !it.in_place) {
            return false;
        }
        let it = &mut self.nodes[node];
        it.kept.retain(|usage| usage.offered);
        it.kernel = it.kept.iter().map(|it| known(&it.lease_type)).collect();
        if !it.kernel.contains(TUNNEL) {
            self.shaken.retain(|(one, other)| ![*one, *other].contains(&node));
        }
        true
    }

    /// Two nodes have a common offer, and each path leads to a device that exists.
    fn check(&self) {
        for (node, it) in self.nodes.iter().enumerate() {
            for (peer, other) in self.nodes.iter().enumerate().filter(|(peer, _)| *peer != node) {
                let now = |of| self.published(self.writes.len(), of).unwrap();
                let common = now(node).iter().any(|kind| now(peer).contains(kind));
                assert!(common, "{node} and {peer} have no common offer: {self:#?}");
                let seen = self.published(it.seen, peer).unwrap();
                let is_open = self.is_shaken(node, peer);
                let is_blocked = !is_open && self.blocked == Some((node.min(peer), node.max(peer)));
                let usable = it.kept.by_use(it.target).map(|it| known(&it.lease_type));
                let usable = usable.filter(|kind| it.kernel.contains(kind) && seen.contains(kind));
                // Without a handshake, the next one is chosen too, and has the route.
                let usable: Vec<_> = usable.collect();
                let passes = |kind: &&&str| is_open || **kind != TUNNEL;
                let chosen = usable.iter().find(passes).or_else(|| usable.first()).copied();
                let arrives = chosen.is_some_and(|kind| {
                    other.kernel.contains(kind) && (kind != TUNNEL || !is_blocked)
                });
                assert!(arrives, "{node} sends to {peer} by {chosen:?}: {self:#?}");
            }
        }
    }

    /// All kernels make all devices from now on, and the store has a usable config.
    fn repair(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.broken.clear());
        if self.config == IMPOSSIBLE {
            self.config = KINDS[1];
        }
    }

    /// Everything happens that can happen, until nothing changes any more.
    fn comes_to_rest(&mut self) {
        for _ in 0..100 {
            let mut changed = false;
            for node in 0..NODES {
                for event in [
                    Event::Start(node),
                    Event::Read(node),
                    Event::InPlace(node),
                    Event::View(node, usize::MAX / 2),
                    Event::Step { node, crash: false },
                    Event::Shake(0, node),
                    Event::Shake(1, node),
                    Event::Revive(node),
                    Event::Drop(node),
                ] {
                    changed |= self.happens(&event);
                    self.check();
                }
            }
            if !changed {
                return;
            }
        }
        panic!("the cluster does not come to rest: {self:#?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn all_nodes_reach_each_other_until_the_move_ends_with_one_offer(
        events in prop::collection::vec(event(), 0..400),
    ) {
        let mut cluster = Cluster::new(None);
        for event in &events {
            cluster.happens(event);
            cluster.check();
        }
        // With the kernels as they are, the cluster rests too.
        cluster.comes_to_rest();
        cluster.repair();
        cluster.comes_to_rest();
        for (node, it) in cluster.nodes.iter().enumerate() {
            let kinds: Vec<_> = it.kept.iter().map(|it| &*it.lease_type).collect();
            prop_assert_eq!(kinds, [cluster.config]);
            prop_assert_eq!(it.target, cluster.config);
            prop_assert!(it.aside.is_empty());
            prop_assert_eq!(cluster.offers(node), [cluster.config]);
        }
    }

    #[test]
    fn two_nodes_without_a_handshake_keep_the_old_offers(
        events in prop::collection::vec(event(), 0..400),
    ) {
        let mut cluster = Cluster::new(None);
        cluster.blocked = Some((0, 1));
        for event in &events {
            cluster.happens(event);
            cluster.check();
        }
        cluster.repair();
        cluster.comes_to_rest();
        let target = cluster.config;
        for (node, it) in cluster.nodes.iter().enumerate() {
            let offers = cluster.offers(node);
            prop_assert_eq!(offers[0], target);
            let is_old = target == TUNNEL && node < 2;
            prop_assert_eq!(offers.len() > 1, is_old, "{:#?}", cluster);
            prop_assert_eq!(it.kept.is_moving(), target == TUNNEL, "{:#?}", cluster);
        }
        // The firewall lets the packets pass.
        cluster.blocked = None;
        cluster.comes_to_rest();
        for node in 0..NODES {
            prop_assert_eq!(cluster.offers(node), [target]);
        }
    }

    #[test]
    fn a_node_of_go_flannel_keeps_the_old_offers(
        events in prop::collection::vec(event(), 0..400),
    ) {
        let mut cluster = Cluster::new(Some(KINDS[0]));
        for event in &events {
            cluster.happens(event);
            cluster.check();
        }
        cluster.repair();
        cluster.comes_to_rest();
        for node in 0..NODES {
            prop_assert!(cluster.offers(node).contains(&KINDS[0]), "{:#?}", cluster);
            prop_assert_eq!(cluster.offers(node)[0], KINDS[0]);
        }
    }
}

#[test]
fn a_move_waits_for_each_step_of_the_other_nodes() {
    let mut cluster = Cluster::new(None);
    cluster.happens(&Event::Config(KINDS[1]));
    let step = |cluster: &mut Cluster, node| {
        cluster.happens(&Event::View(node, usize::MAX / 2));
        cluster.happens(&Event::Step { node, crash: false });
        let wait = cluster.step_of(node).unwrap().unwrap_err();
        let names = |blockers: crate::moving::Blockers| {
            let first: Vec<_> = blockers.first.iter().map(|it| it.subnets.to_string()).collect();
            format!("{} {}", blockers.total, first.join(" "))
        };
        let wait = match wait {
            AwaitedEvent::Offers(blockers) => format!("offers {}", names(blockers)),
            AwaitedEvent::Preference(blockers) => format!("preference {}", names(blockers)),
            AwaitedEvent::Withdrawal(blockers) => format!("withdrawal {}", names(blockers)),
            wait => format!("{wait:?}"),
        };
        format!("{} | {wait}", cluster.offers(node).join(" "))
    };
    cluster.happens(&Event::Read(0));
    assert_eq!(step(&mut cluster, 0), "vxlan | Devices");
    cluster.happens(&Event::InPlace(0));
    assert_eq!(step(&mut cluster, 0), "vxlan host-gw | Store");
    assert_eq!(step(&mut cluster, 0), "vxlan host-gw | offers 2 10.1.2.0-24 10.1.3.0-24");
    for node in 1..NODES {
        cluster.happens(&Event::Read(node));
        cluster.happens(&Event::InPlace(node));
        assert_eq!(step(&mut cluster, node), "vxlan host-gw | Store");
    }
    for node in 0..NODES {
        assert_eq!(step(&mut cluster, node), "host-gw vxlan | Store");
    }
    assert_eq!(step(&mut cluster, 0), "host-gw | Store");
    assert_eq!(step(&mut cluster, 0), "host-gw | withdrawal 2 10.1.2.0-24 10.1.3.0-24");
    for node in 1..NODES {
        assert_eq!(step(&mut cluster, node), "host-gw | Store");
    }
    assert_eq!(step(&mut cluster, 0), "host-gw | Silence");
}

#[test]
fn a_move_waits_for_handshakes_with_nodes_that_have_leases_and_the_old_offer() {
    let [tunnel, old] = [TUNNEL, KINDS[0]].map(backend);
    let mut kept = NodeBackends::default();
    kept.aim_at(TUNNEL, &tunnel);
    kept.aim_at(KINDS[0], &old);
    kept = NodeBackends::parse(&kept.to_json().replace("false", "true")).unwrap();
    let mut rejected = SortedMap::default();
    let step_with = |rejected: &SortedMap<_, _>,
                     leases: &[(usize, &[&'static str])],
                     open: &[usize],
                     waiting: &[usize]| {
        let leases = leases.iter().map(|(node, offers)| Arc::new(lease(*node, offers))).collect();
        let view = View { leases, origin: Origin::Live { revision: Revision(1) } };
        let subnets = |of: &[usize]| {
            of.iter().flat_map(|node| subnets(*node).iter().collect::<Vec<_>>()).collect()
        };
        let tunnels = Tunnels { open: subnets(open), waiting: subnets(waiting) };
        let own = self::subnets(0);
        let tunnels = Some(&tunnels);
        let seen = Seen { in_place: true, view: &view, own, tunnels, rejected };
        match kept.step(TUNNEL, &seen).unwrap().next {
            Ok(next) => {
                next.offered().map(|it| it.lease_type.clone()).collect::<Vec<_>>().join(" ")
            }
            Err(AwaitedEvent::Handshakes(blockers)) => {
                let first: Vec<_> =
                    blockers.first.iter().map(|it| it.subnets.to_string()).collect();
                format!("{} {}", blockers.total, first.join(" "))
            }
            Err(wait) => format!("{wait:?}"),
        }
    };
    let none = SortedMap::default();
    let step = |leases: &[_], open: &[_], waiting: &[_]| step_with(&none, leases, open, waiting);
    let both = &[TUNNEL, KINDS[0]][..];
    let all = [(0, both), (1, both), (2, both)];
    assert_eq!(step(&all, &[], &[]), "2 10.1.2.0-24 10.1.3.0-24", "the kernel has no peer yet");
    assert_eq!(step(&all, &[1], &[2]), "1 10.1.3.0-24");
    assert_eq!(step(&all, &[1, 2], &[2]), "1 10.1.3.0-24", "one of two tunnels waits");
    assert_eq!(step(&all, &[1, 2], &[]), TUNNEL);
    assert_eq!(step(&all[..2], &[1], &[]), TUNNEL, "its lease has expired");
    let new = [(0, both), (1, both), (2, &[TUNNEL][..])];
    assert_eq!(step(&new, &[1], &[2]), TUNNEL, "the old offer is of no use to it");
    rejected.insert(subnets(2), Rejection::NoEnabledFamily);
    assert_eq!(step_with(&rejected, &all, &[1], &[]), TUNNEL, "this node rejects its lease");
}

/// Backends from `type` or `(type)`: one that is not offered.
fn backends(text: &str) -> NodeBackends {
    let usage = |word: &str| {
        let kind = word.trim_matches(['(', ')']);
        let backend = serde_json::json!({ "Type": kind });
        serde_json::json!({ "lease_type": kind, "offered": kind == word, "backend": backend })
    };
    let all: Vec<_> = text.split_whitespace().map(usage).collect();
    NodeBackends::parse(&serde_json::json!({ "backends": all }).to_string()).unwrap()
}

fn shown<'a>(backends: impl Iterator<Item = &'a BackendUse>) -> String {
    let name = |it: &BackendUse| {
        if it.offered { it.lease_type.clone() } else { format!("({})", it.lease_type) }
    };
    backends.map(name).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_offered_backends_come_first() {
    let mut all = backends("(host-gw)");
    all.aim_at("vxlan", &backend("vxlan"));
    assert_eq!(shown(all.iter()), "vxlan (host-gw)");
    all.add(backends("vxlan host-gw ipip").iter());
    assert_eq!(shown(all.iter()), "vxlan (host-gw) (ipip)");
    let by_use = |text: &str| shown(backends(text).by_use("host-gw"));
    assert_eq!(by_use("vxlan host-gw ipip"), "host-gw vxlan ipip");
    assert_eq!(by_use("vxlan (host-gw)"), "vxlan (host-gw)", "peers do not expect it yet");
}

/// The next step of the node 0 to host-gw, if nodes from 0 on have these offers. There is a
/// reservation too.
fn next(text: &str, leases: &[&[&'static str]]) -> Result<String, AwaitedEvent> {
    let mut reserved = lease(leases.len(), &["vxlan"]);
    reserved.attrs.preferred.public = Default::default();
    let leases = leases.iter().enumerate().map(|(node, offers)| lease(node, offers));
    let leases = leases.chain([reserved]).map(Arc::new).collect();
    let view = View { leases, origin: Origin::Live { revision: Revision(1) } };
    let own = subnets(0);
    let rejected = &SortedMap::default();
    let seen = Seen { in_place: true, view: &view, own, tunnels: None, rejected };
    backends(text).step("host-gw", &seen).unwrap().next.map(|next| shown(next.iter()))
}

#[test]
fn a_node_that_comes_back_late_is_offered_what_it_knows() {
    let late = next("host-gw (vxlan) (ipip)", &[&["host-gw"], &["vxlan"]]);
    assert_eq!(late.unwrap(), "host-gw vxlan (ipip)");
    let both = &["vxlan", "host-gw"][..];
    assert_eq!(next("vxlan host-gw (ipip)", &[both, both]).unwrap(), "host-gw vxlan (ipip)");
}

#[test]
fn only_the_first_blockers_are_listed() {
    let old = &["vxlan"][..];
    let wait = next("vxlan host-gw", &[&["vxlan", "host-gw"], old, old, old, old]).unwrap_err();
    let AwaitedEvent::Offers(blockers) = wait else { panic!("{wait:?}") };
    assert_eq!((blockers.total, blockers.first.len()), (4, crate::moving::Blockers::LISTED));
}
