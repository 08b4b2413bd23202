//! `KernelNetwork` on the fake kernel: every scenario, and every scenario with every kind of call
//! failing once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::{Footprint, ROUTE_PROTOCOL};
use flannel_core::lease::{LeaseAttrs, Offer, Origin, Revision, View};
use flannel_core::network::NetworkHandle;
use flannel_core::object::{
    self, Addr, Fdb, Ipip, Key, Link, LinkKind, LinkName, MacAddr, Neigh, Nexthop, Object,
    ObjectKind, ObjectSet, PeerAttributes, PublicKey, Route, Secret, Via, Vxlan, Wireguard,
};
use flannel_core::status::Damage;
use flannel_core::testing::{Call, FakeKernel, FakeSubnets, Operation, diff};
use flannel_core::{Kernel, Network, Subnet, SubnetManager};
use flannel_route::admission::PathMtus;
use flannel_route::{EngineOptions, KernelNetwork};
use libc::{EINTR, EINVAL};
use tokio::sync::watch;

const CONFIG: &str = r#"{
    "Network": "10.1.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:1::/48",
    "Backend": {"Type":"test"}
}"#;

fn uplink() -> LinkName {
    "eth0".parse().unwrap()
}

fn tunnel(family: Family) -> LinkName {
    if family == Family::V4 {
        "flannel.1".parse().unwrap()
    } else {
        "flannel-v6.1".parse().unwrap()
    }
}

/// The device of peers that are reached by ipip.
fn ipip() -> LinkName {
    "flannel.ipip".parse().unwrap()
}

/// The device of peers that are reached by WireGuard.
fn wireguard() -> LinkName {
    "flannel-wg".parse().unwrap()
}

/// A device with a name of this network that is not desired.
fn unwanted_link(family: Family) -> LinkName {
    if family == Family::V4 {
        "flannel.9".parse().unwrap()
    } else {
        "flannel-v6.9".parse().unwrap()
    }
}

/// The number of a subnet in its network: 7 for 10.1.7.0/24 and fd00:1:0:7::/64.
fn place(subnet: Subnet) -> u8 {
    match subnet.base() {
        std::net::IpAddr::V4(a) => a.octets()[2],
        std::net::IpAddr::V6(a) => a.segments()[3] as u8,
    }
}

/// Every kind of object that a plan may define. Peers with an even number have routes with a
/// nexthop object, peers with an odd number have routes with a gateway. Those from 50 to 59 have an
/// IPv4 route of ipip, whose gateway is their public address. Those from 60 to 69 have an IPv4 peer
/// of WireGuard.
fn plan_peer(mac: MacAddr, subnet: Subnet, public: std::net::IpAddr, direct: bool) -> Vec<Object> {
    let family = subnet.family();
    let base = subnet.base();
    let link = tunnel(family);
    if direct {
        let via = Via::Gateway { gateway: public, link: uplink(), onlink: false };
        return vec![Route { dst: subnet, via, mtu: None }.into()];
    }
    if family == Family::V4 && (50..60).contains(&place(subnet)) {
        let via = Via::Gateway { gateway: public, link: ipip(), onlink: true };
        return vec![Route { dst: subnet, via, mtu: None }.into()];
    }
    if family == Family::V4 && (60..70).contains(&place(subnet)) {
        let allowed = Dual { v4: Some(subnet), v6: None };
        let endpoint = (public, 51820).into();
        let psk = Some(Secret::new([5; 32]));
        let attributes = Box::new(PeerAttributes { endpoint, allowed, psk, keepalive: 0 });
        let key = PublicKey([mac.0[1]; 32]);
        let via = Via::Link(wireguard());
        let peer = object::Peer { link: wireguard(), key, attributes };
        return vec![peer.into(), Route { dst: subnet, via, mtu: None }.into()];
    }
    let id = 1000 * u32::from(family.bits()) + u32::from(place(subnet));
    let via = if id % 2 == 0 {
        Via::Nexthop(id)
    } else {
        Via::Gateway { gateway: base, link, onlink: true }
    };
    let mut objects = vec![
        Neigh { link, address: base, mac }.into(),
        Fdb { link, mac, dst: public }.into(),
        Route { dst: subnet, via, mtu: None }.into(),
    ];
    if id % 2 == 0 {
        objects.push(Nexthop { id, link, gateway: base, onlink: true }.into());
    }
    objects
}

fn base(own: u8) -> ObjectSet {
    let mut state = ObjectSet::default();
    for family in Family::BOTH {
        let vxlan = Vxlan {
            vni: 1,
            port: 8472,
            mac: MacAddr::local([if family == Family::V4 { 1 } else { 2 }; 6]),
            local: None,
            lower: Some(uplink()),
            learning: false,
            gbp: false,
        };
        let name = tunnel(family);
        state.insert(Link { name, mtu: 1430, up: true, kind: vxlan.into() });
        state.insert(Addr { link: name, address: subnet(family, own).base(), len: family.bits() });
    }
    let kind = LinkKind::Ipip(Ipip { local: [192, 0, 2, 1].into() });
    state.insert(Link { name: ipip(), mtu: 1430, up: true, kind });
    let kind = Wireguard { key: Secret::new([1; 32]), port: 51820 }.into();
    state.insert(Link { name: wireguard(), mtu: 1430, up: true, kind });
    let address = subnet(Family::V4, own).base();
    for link in [ipip(), wireguard()] {
        state.insert(Addr { link, address, len: Family::V4.bits() });
    }
    state
}

fn subnet(family: Family, n: u8) -> Subnet {
    match family {
        Family::V4 => format!("10.1.{n}.0/24").parse().unwrap(),
        Family::V6 => format!("fd00:1:0:{n:x}::/64").parse().unwrap(),
    }
}

#[derive(Clone, Copy, PartialEq)]
struct Peer {
    n: u8,
    mac: u8,
    public: u8,
}

impl Peer {
    fn new(n: u8) -> Self {
        Self { n, mac: n, public: n }
    }

    fn key(self) -> String {
        format!("10.1.{n}.0-24&fd00:1:0:{n:x}::-64", n = self.n)
    }

    /// Peers up to 99 are behind a router, later ones on the link.
    fn public(self, family: Family) -> std::net::IpAddr {
        let direct = self.n >= 100;
        match (family, direct) {
            (Family::V4, false) => [198, 51, 100, self.public].into(),
            (Family::V4, true) => [192, 0, 2, self.public].into(),
            (Family::V6, false) => [0x2001, 0xdb8, 7, 0, 0, 0, 0, u16::from(self.public)].into(),
            (Family::V6, true) => [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(self.public)].into(),
        }
    }

    fn mac(self, family: Family) -> MacAddr {
        MacAddr::local([2, self.mac, 0, 0, 0, if family == Family::V4 { 4 } else { 6 }])
    }

    fn attrs(self) -> LeaseAttrs {
        LeaseAttrs::from(
            Offer::new(Dual::from_fn(|family| Some(self.public(family))))
                .with_kind("test")
                .with_data(Dual::from_fn(|family| {
                    Some(format!("\"{}\"", self.mac(family)).into())
                })),
        )
    }

    fn objects(self) -> Vec<Object> {
        let mut objects = Vec::new();
        for family in Family::BOTH {
            let public = self.public(family);
            objects.extend(plan_peer(
                self.mac(family),
                subnet(family, self.n),
                public,
                self.n >= 100,
            ));
        }
        objects
    }
}

struct World {
    kernel: FakeKernel,
    subnets: FakeSubnets,
    handle: NetworkHandle,
    task: tokio::task::JoinHandle<()>,
    mtus: watch::Sender<PathMtus>,
    peers: Vec<Peer>,
    foreign: ObjectSet,
}

impl World {
    async fn new() -> Self {
        Self::on(FakeKernel::with_uplink("eth0"), FakeSubnets::with_config(CONFIG)).await
    }

    async fn on(kernel: FakeKernel, subnets: FakeSubnets) -> Self {
        Self::compared(None, kernel, subnets).await
    }

    /// A network with this period of complete comparisons.
    async fn compared(period: Option<Duration>, kernel: FakeKernel, subnets: FakeSubnets) -> Self {
        let attrs = LeaseAttrs::from(Offer::default().with_kind("test"));
        let lease = subnets.acquire_lease(&attrs).await.unwrap();
        let networks: Dual<Subnet> =
            subnets.network_config().await.unwrap().pod_networks().collect();
        let footprint = Footprint {
            links: Family::BOTH
                .map(tunnel)
                .into_iter()
                .chain(Family::BOTH.map(unwanted_link))
                .chain([ipip(), wireguard()])
                .collect(),
            networks: networks.values().copied().collect(),
            routes_on: [uplink()].into(),
            blackholes: true,
            ..Footprint::default()
        };
        let blueprint = Blueprint::new(1430, |subnets, offer, env, objects| {
            for peer in offer.endpoints(subnets) {
                let (Some(public), Some(data)) = (peer.public, peer.data) else { continue };
                let mac = data.trim_matches('"').parse().unwrap();
                let direct = env.on_link(public) == Some(uplink());
                objects.extend(plan_peer(mac, peer.subnet, public, direct));
            }
            Ok(())
        })
        .with_footprint(footprint)
        .with_base(base(1));
        let (mtus, receiver) = watch::channel(PathMtus::default());
        let network = KernelNetwork::new(
            Arc::new(kernel.clone()),
            NodeLease::Held(lease),
            networks,
            vec![blueprint],
        )
        .with_options(EngineOptions::default().with_resync(period).with_path_mtus(receiver));
        let handle = network.handle();
        let views = subnets.watch_leases().await.unwrap();
        let task = tokio::spawn(async move { drop(Box::new(network).run(views).await) });
        Self { kernel, subnets, handle, task, mtus, peers: Vec::new(), foreign: Default::default() }
    }

    /// Sets the MTUs of paths: by a nexthop object of the plan, by one of the engine, and without
    /// the tunnel; in both families.
    fn set_mtus(&self, mtu: Option<u16>) {
        let dsts = [2, 3, 101].into_iter().flat_map(|n| Family::BOTH.map(|f| subnet(f, n)));
        let mtus = dsts.filter_map(|dst| Some((dst, mtu?)));
        self.mtus.send_replace(Arc::new(mtus.collect()));
    }

    fn put(&mut self, peer: Peer) {
        self.peers.retain(|old| old.n != peer.n);
        self.peers.push(peer);
        self.subnets.put_attrs(&peer.key(), peer.attrs());
    }

    fn delete(&mut self, n: u8) {
        self.peers.retain(|old| old.n != n);
        self.subnets.delete(&Peer::new(n).key());
    }

    fn want(&self) -> ObjectSet {
        let mut want = base(1);
        let mtus = self.mtus.borrow().clone();
        for mut object in self.peers.iter().flat_map(|peer| peer.objects()) {
            if let Object::Route(route) = &mut object {
                route.mtu = mtus.get(&route.dst).copied();
            }
            want.insert(object);
        }
        want.extend(self.foreign.iter().cloned());
        want
    }

    /// Waits (in virtual time) until the kernel has the desired state and the status shows it.
    async fn settled(&mut self, what: &str) {
        let want = self.want();
        let converge = async {
            // The comparison takes long without optimization, and mostly the status says enough.
            while !self.handle.status.borrow().in_sync
                || without_nexthops(&self.kernel.state()) != want
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(600), converge).await.is_err() {
            let changes = diff(&want, &without_nexthops(&self.kernel.state()));
            let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
            panic!("{what}: never converged: {changes:#?}\n{:#?}", self.handle.status.borrow());
        }
        let mut by_kind = BTreeMap::new();
        let mut told = self.handle.status.borrow().by_kind.clone();
        assert_eq!(told.values().sum::<usize>(), self.handle.status.borrow().objects, "{what}");
        let peers = self.peers.iter().flat_map(|peer| peer.objects());
        peers.for_each(|object| *by_kind.entry(object.key().kind()).or_default() += 1);
        // The base has these objects, and not every route has a nexthop object of its own.
        for kinds in [&mut told, &mut by_kind] {
            kinds.retain(|kind, _| {
                matches!(kind, ObjectKind::Neigh | ObjectKind::Fdb | ObjectKind::Route)
            });
        }
        assert_eq!(told, by_kind, "{what}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The state with routes with gateways, as the plan defines them, instead of the network's nexthop
/// objects. Each of these must be used by one route.
fn without_nexthops(state: &ObjectSet) -> ObjectSet {
    let mut state = state.clone();
    let nexthops = state.iter().filter_map(|object| match object {
        Object::Nexthop(nexthop) if nexthop.id >= 1 << 30 => Some(*nexthop),
        _ => None,
    });
    for Nexthop { id, link, gateway, onlink } in nexthops.collect::<Vec<_>>() {
        let routes = state.iter().filter(
            |object| matches!(object, Object::Route(route) if route.via == Via::Nexthop(id)),
        );
        let routes: Vec<Object> = routes.cloned().collect();
        if let [Object::Route(route)] = routes.as_slice() {
            state.remove(&Key::Nexthop(id));
            state.insert(Route { via: Via::Gateway { gateway, link, onlink }, ..*route });
        }
    }
    state
}

type Step = Box<dyn Fn(&mut World)>;

/// Events that can change a settled world, by name. They cover each kind of object of each family.
fn scenarios() -> Vec<(String, Step)> {
    let mut all: Vec<(String, Step)> = Vec::new();
    let mut add = |name: String, step: Step| all.push((name, step));
    add("peers arrive".into(), Box::new(|w| (10..14).for_each(|n| w.put(Peer::new(n)))));
    add("a peer leaves".into(), Box::new(|w| w.delete(3)));
    add("a peer by nexthop object leaves".into(), Box::new(|w| w.delete(2)));
    add(
        "an unwanted device of our name".into(),
        Box::new(|w| {
            let Some(Object::Link(mut link)) = base(1).get(&Key::Link(tunnel(Family::V4))).cloned()
            else {
                panic!()
            };
            link.name = "flannel.9".parse().unwrap();
            w.kernel.foreign_put(link, 0);
        }),
    );
    add("paths have MTUs".into(), Box::new(|w| w.set_mtus(Some(1300))));
    add("a peer on the link leaves".into(), Box::new(|w| w.delete(101)));
    add("a peer has another MAC".into(), Box::new(|w| w.put(Peer { mac: 77, ..Peer::new(3) })));
    add("a peer moves".into(), Box::new(|w| w.put(Peer { public: 77, ..Peer::new(3) })));
    add(
        "a peer on the link moves".into(),
        Box::new(|w| w.put(Peer { public: 77, ..Peer::new(101) })),
    );
    add(
        "a foreign route in the pod network".into(),
        Box::new(|w| {
            let via =
                Via::Gateway { gateway: [192, 0, 2, 9].into(), link: uplink(), onlink: false };
            let route = Route { dst: subnet(Family::V4, 200), via, mtu: None };
            w.kernel.foreign_put(route, 3);
            w.foreign.insert(route);
        }),
    );
    add(
        "messages are lost".into(),
        Box::new(|w| {
            w.kernel.lose_messages();
        }),
    );
    for n in [3, 50, 101] {
        type Damage = fn(&mut World, Nexthop);
        let steps: [(&str, Damage); 4] = [
            ("deleted", |w, nexthop| w.kernel.foreign_delete(Key::Nexthop(nexthop.id))),
            ("changed", |w, nexthop| {
                w.kernel.foreign_put(Nexthop { onlink: !nexthop.onlink, ..nexthop }, 3);
            }),
            ("taken by another protocol", |w, nexthop| w.kernel.foreign_put(nexthop, 3)),
            ("moved", |w, nexthop| {
                let link = if nexthop.link == uplink() { tunnel(Family::V4) } else { uplink() };
                w.kernel.foreign_put(Nexthop { link, ..nexthop }, ROUTE_PROTOCOL);
            }),
        ];
        for (what, step) in steps {
            let name = format!("the nexthop object of peer {n} {what}");
            add(name, Box::new(move |w| step(w, nexthop_of(w, n))));
        }
    }
    add(
        "the routes of two peers exchange their nexthop objects".into(),
        Box::new(|w| {
            let ids = [3, 101].map(|n| nexthop_of(w, n).id);
            for (n, id) in [(3, ids[1]), (101, ids[0])] {
                let route = Route { dst: subnet(Family::V4, n), via: Via::Nexthop(id), mtu: None };
                w.kernel.foreign_put(route, 3);
            }
        }),
    );
    add(
        "a stray nexthop object and a route by one of ours".into(),
        Box::new(|w| {
            let nexthop = nexthop_of(w, 3);
            w.kernel.foreign_put(Nexthop { id: nexthop.id + 77, ..nexthop }, ROUTE_PROTOCOL);
            let route =
                Route { dst: subnet(Family::V4, 222), via: Via::Nexthop(nexthop.id), mtu: None };
            w.kernel.foreign_put(route, ROUTE_PROTOCOL);
        }),
    );
    add("peers by ipip arrive".into(), Box::new(|w| (52..54).for_each(|n| w.put(Peer::new(n)))));
    add("a peer by ipip leaves".into(), Box::new(|w| w.delete(50)));
    add("a peer by ipip moves".into(), Box::new(|w| w.put(Peer { public: 77, ..Peer::new(50) })));
    add(
        format!("{} gets another local address", ipip()),
        Box::new(|w| {
            let link = w.want().get(&Key::Link(ipip())).cloned();
            let Some(Object::Link(link)) = link else { panic!() };
            let kind = LinkKind::Ipip(Ipip { local: [192, 0, 2, 9].into() });
            w.kernel.foreign_put(Link { kind, ..link }, 0);
        }),
    );
    let key = Key::Addr(ipip(), subnet(Family::V4, 1).base());
    add(format!("{key} deleted by another"), Box::new(move |w| w.kernel.foreign_delete(key)));
    add(
        "peers by WireGuard arrive".into(),
        Box::new(|w| (62..64).for_each(|n| w.put(Peer::new(n)))),
    );
    add("a peer by WireGuard leaves".into(), Box::new(|w| w.delete(60)));
    add(
        "a peer by WireGuard moves".into(),
        Box::new(|w| w.put(Peer { public: 77, ..Peer::new(60) })),
    );
    add(
        "a peer by WireGuard gets another key".into(),
        Box::new(|w| w.put(Peer { mac: 77, ..Peer::new(60) })),
    );
    for link in [tunnel(Family::V4), tunnel(Family::V6), ipip(), wireguard()] {
        add(format!("{link} deleted"), Box::new(move |w| w.kernel.delete_link(link.as_str())));
        add(format!("{link} down"), Box::new(move |w| w.kernel.set_up(link.as_str(), false)));
        add(
            format!("{link} down and up"),
            Box::new(move |w| {
                w.kernel.set_up(link.as_str(), false);
                w.kernel.set_up(link.as_str(), true);
            }),
        );
        add(
            format!("{link} gets another MTU"),
            Box::new(move |w| {
                let link = w.want().get(&Key::Link(link)).cloned();
                if let Some(Object::Link(mut link)) = link {
                    link.mtu = 1280;
                    w.kernel.foreign_put(link, 0);
                }
            }),
        );
    }
    for family in Family::BOTH {
        let link = tunnel(family);
        add(
            format!("something unwanted on {link}"),
            Box::new(move |w| {
                let mac = MacAddr::local([9; 6]);
                w.kernel.foreign_put(Neigh { link, address: subnet(family, 99).base(), mac }, 0);
                w.kernel.foreign_put(Fdb { link, mac, dst: subnet(family, 99).base() }, 0);
                w.kernel.foreign_put(
                    Addr { link, address: subnet(family, 99).base(), len: family.bits() },
                    0,
                );
            }),
        );
        add(
            "the uplink down".into(),
            Box::new(|w| {
                w.kernel.set_up("eth0", false);
                w.kernel.set_up("eth0", true);
            }),
        );
        for n in [2, 3, 50, 60, 101] {
            for object in Peer::new(n).objects().into_iter().filter(|o| of_family(o, family)) {
                let key = object.key();
                add(
                    format!("{key} deleted by another"),
                    Box::new(move |w| w.kernel.foreign_delete(key)),
                );
                let other = modified(&object);
                let name = format!("{key} changed by another");
                add(name, Box::new(move |w| w.kernel.foreign_put(other.clone(), 3)));
            }
        }
        let address = subnet(family, 1).base();
        let len = family.bits() - 8;
        let wider =
            Box::new(move |w: &mut World| w.kernel.foreign_put(Addr { link, address, len }, 0));
        add(format!("address on {link} with another length"), wider);
        let key = Key::Addr(link, address);
        add(format!("{key} deleted by another"), Box::new(move |w| w.kernel.foreign_delete(key)));
    }
    all
}

/// The nexthop object that a settled world has for a peer's IPv4 route.
fn nexthop_of(world: &World, n: u8) -> Nexthop {
    let state = world.kernel.state();
    let Some(Object::Route(Route { via: Via::Nexthop(id), .. })) =
        state.get(&Key::Route(subnet(Family::V4, n)))
    else {
        panic!("peer {n} has no nexthop object: {:#?}", world.kernel.dump())
    };
    let Some(Object::Nexthop(nexthop)) = state.get(&Key::Nexthop(*id)) else { panic!("{id}") };
    *nexthop
}

fn of_family(object: &Object, family: Family) -> bool {
    match object {
        Object::Neigh(o) => o.link == tunnel(family),
        Object::Fdb(o) => o.link == tunnel(family),
        Object::Nexthop(o) => o.link == tunnel(family),
        Object::Peer(o) => o.attributes.allowed[family].is_some(),
        Object::Route(o) => o.dst.family() == family,
        _ => false,
    }
}

/// The object with another value.
fn modified(object: &Object) -> Object {
    let mut object = object.clone();
    match &mut object {
        Object::Neigh(o) => o.mac = MacAddr::local([99; 6]),
        Object::Fdb(o) => o.dst = [203, 0, 113, 1].into(),
        Object::Nexthop(o) => o.onlink = !o.onlink,
        Object::Peer(o) => o.attributes.keepalive = 7,
        Object::Route(o) => o.mtu = Some(1200),
        other => panic!("no scenario modifies {other}"),
    }
    object
}

async fn settled_world() -> World {
    let mut world = World::new().await;
    [2, 3, 4, 50, 60, 100, 101].into_iter().for_each(|n| world.put(Peer::new(n)));
    world.settled("start").await;
    world
}

#[tokio::test(start_paused = true)]
async fn every_scenario_converges() {
    for (name, step) in scenarios() {
        let mut world = settled_world().await;
        step(&mut world);
        world.settled(&name).await;
    }
}

type Is = fn(&Key) -> bool;

/// The operations of every kind of object, as a fault sees them.
fn operations() -> Vec<(String, impl Fn(&Call) -> bool + Clone + Send + 'static)> {
    let kinds: [(&str, Is); 6] = [
        ("link", |key| matches!(key, Key::Link(_))),
        ("address", |key| matches!(key, Key::Addr(..))),
        ("neigh", |key| matches!(key, Key::Neigh(..))),
        ("fdb", |key| matches!(key, Key::Fdb(..))),
        ("nexthop", |key| matches!(key, Key::Nexthop(_))),
        ("route", |key| matches!(key, Key::Route(_))),
    ];
    let mut all = Vec::new();
    for operation in [Operation::Create, Operation::Replace, Operation::Delete] {
        for (kind, is) in kinds {
            all.push((format!("{operation:?} {kind}"), operation, Some(is)));
        }
    }
    for operation in
        [Operation::NexthopIds, Operation::Snapshot, Operation::Lookup, Operation::Listen]
    {
        all.push((format!("{operation:?}"), operation, None));
    }
    let with_matcher = all.into_iter().map(|(name, operation, is)| {
        let fails = move |call: &Call| {
            call.operation == operation && is.is_none_or(|is| call.key.is_some_and(|k| is(&k)))
        };
        (name, fails)
    });
    with_matcher.collect()
}

struct Faults {
    /// How often each fault happened.
    fired: BTreeMap<String, usize>,
    runs: usize,
}

/// Runs the `n`th scenario and every `step`th one after it with each fault.
async fn with_every_call_failing_once(n: usize, step: usize) -> Faults {
    // The first call fails with EEXIST, ENOENT, ENODEV, ENOBUFS and EINTR, or the second or third
    // call fails with ENOBUFS.
    const FAULTS: [(usize, i32); 7] =
        [(0, 17), (0, 2), (0, 19), (0, 105), (0, EINTR), (1, 105), (2, 105)];
    let mut fired = BTreeMap::<String, usize>::new();
    let mut runs = 0;
    for (scenario, change) in scenarios().into_iter().skip(n).step_by(step) {
        let mut world = settled_world().await;
        world.kernel.take_calls();
        change(&mut world);
        world.settled(&scenario).await;
        let without_faults = world.kernel.take_calls();
        for (operation, fails) in operations() {
            let made = without_faults.iter().filter(|call| fails(call)).count();
            // Later calls are not made, so their faults would change nothing.
            for (before, errno) in FAULTS.into_iter().filter(|(before, _)| *before < made) {
                let mut world = settled_world().await;
                let fails = fails.clone();
                let calls = AtomicUsize::new(0);
                world.kernel.fail(1, errno, move |call| {
                    fails(call) && calls.fetch_add(1, Ordering::Relaxed) == before
                });
                change(&mut world);
                let what = format!(
                    "{scenario}; {operation} fails once with errno {errno} after {before} calls"
                );
                world.settled(&what).await;
                *fired.entry(operation.clone()).or_default() +=
                    usize::from(world.kernel.clear_faults());
                runs += 1;
            }
        }
    }
    Faults { fired, runs }
}

/// Two threads, because it takes longer than all other tests together.
#[test]
fn every_scenario_converges_with_every_call_failing_once() {
    let halves = std::thread::scope(|scope| {
        [0, 1].map(|n| scope.spawn(move || half_of_the_scenarios(n))).map(|it| it.join().unwrap())
    });
    let runs: usize = halves.iter().map(|faults| faults.runs).sum();
    for (operation, _) in operations() {
        let fired: usize = halves.iter().filter_map(|faults| faults.fired.get(&operation)).sum();
        // A settled world has a stream of events and its ids. The start has its own test.
        assert!(
            ["Listen", "NexthopIds"].contains(&operation.as_str()) || fired > 0,
            "the fault {operation} never fired in {runs} runs"
        );
    }
}

fn half_of_the_scenarios(n: usize) -> Faults {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().start_paused(true).build().unwrap();
    runtime.block_on(with_every_call_failing_once(n, 2))
}

/// A step that makes the network do `operation` on an object of this kind and family, and the key
/// of that object.
fn occasion(operation: Operation, kind: ObjectKind, family: Family) -> (Step, Key) {
    let link = tunnel(family);
    let of_kind = |n: u8| {
        let mut objects = Peer::new(n).objects().into_iter().filter(move |o| of_family(o, family));
        objects.find(|object| object.key().kind() == kind).unwrap()
    };
    let spare = subnet(family, 99).base();
    match (operation, kind) {
        (Operation::Create, ObjectKind::Link) => {
            (Box::new(move |w| w.kernel.delete_link(link.as_str())), Key::Link(link))
        }
        (_, ObjectKind::Link) => {
            let Some(Object::Link(mut changed)) = base(1).get(&Key::Link(link)).cloned() else {
                panic!()
            };
            match operation {
                Operation::Replace => changed.mtu = 1280,
                _ => changed.name = unwanted_link(family),
            }
            let key = Key::Link(changed.name);
            (Box::new(move |w| w.kernel.foreign_put(changed.clone(), 0)), key)
        }
        (_, ObjectKind::Addr) => {
            let own = Key::Addr(link, subnet(family, 1).base());
            let address =
                if operation == Operation::Delete { spare } else { subnet(family, 1).base() };
            let put = Addr { link, address, len: family.bits() - 8 };
            match operation {
                Operation::Create => (Box::new(move |w| w.kernel.foreign_delete(own)), own),
                _ => (Box::new(move |w| w.kernel.foreign_put(put, 0)), Key::Addr(link, address)),
            }
        }
        (Operation::Create, _) => (Box::new(|w| w.put(Peer::new(12))), of_kind(12).key()),
        (Operation::Replace, _) => {
            let changed = modified(&of_kind(2));
            let key = changed.key();
            (Box::new(move |w| w.kernel.foreign_put(changed.clone(), 3)), key)
        }
        _ => (Box::new(|w| w.delete(2)), of_kind(2).key()),
    }
}

/// A way in which a call may fail.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Once(i32),
    /// All changes from this one to the end of the next batch.
    RestOfBatch,
}

impl Fault {
    // EEXIST, ENOENT, ENODEV, ENOBUFS, EINTR.
    const ALL: [Self; 6] = [
        Self::Once(17),
        Self::Once(2),
        Self::Once(19),
        Self::Once(105),
        Self::Once(EINTR),
        Self::RestOfBatch,
    ];

    fn plant(self, kernel: &FakeKernel, operation: Operation, key: Key) {
        let is_it = move |call: &Call| call.operation == operation && call.key == Some(key);
        match self {
            Self::Once(errno) => kernel.fail(1, errno, is_it),
            Self::RestOfBatch => {
                let begun = std::sync::atomic::AtomicBool::new(false);
                let fails = move |call: &Call| {
                    begun.fetch_or(is_it(call), Ordering::Relaxed) && call.key.is_some()
                        || is_it(call)
                };
                kernel.fail(6, 105, fails);
            }
        }
    }
}

/// {create, replace, delete} of every kind of object, in both families, each failing in every way.
#[tokio::test(start_paused = true)]
async fn every_operation_on_every_kind_may_fail_in_every_way() {
    use ObjectKind::{Addr, Fdb, Link, Neigh, Nexthop, Route};
    let mut runs = 0;
    for operation in [Operation::Create, Operation::Replace, Operation::Delete] {
        for kind in [Link, Addr, Neigh, Fdb, Nexthop, Route] {
            for family in Family::BOTH {
                for fault in Fault::ALL {
                    let what = format!("{operation:?} {kind} {family}: {fault:?}");
                    let mut world = settled_world().await;
                    let (step, key) = occasion(operation, kind, family);
                    fault.plant(&world.kernel, operation, key);
                    world.kernel.take_calls();
                    step(&mut world);
                    // After a failed call there must be a second one. The exception is a deletion
                    // that fails because the object is absent: it counts as a success, and another
                    // change may remove the object.
                    let lied =
                        matches!((operation, fault), (Operation::Delete, Fault::Once(2 | 19)));
                    world.settled(&what).await;
                    let mut calls = world.kernel.take_calls();
                    calls.retain(|call| call.operation == operation && call.key == Some(key));
                    let tries = calls.len();
                    assert!(
                        (if lied { 1 } else { 2 }..=12).contains(&tries),
                        "{what}: tried {tries} times"
                    );
                    runs += 1;
                }
            }
        }
    }
    assert_eq!(runs, 3 * 6 * 2 * 6);
}

#[tokio::test(start_paused = true)]
async fn the_start_converges_with_every_call_failing() {
    for (operation, fails) in operations() {
        for (times, errno) in [(1, 105), (3, 105), (1, 17), (1, 2), (1, 19), (1, EINTR)] {
            let kernel = FakeKernel::with_uplink("eth0");
            kernel.fail(times, errno, fails.clone());
            let mut world = World::on(kernel, FakeSubnets::with_config(CONFIG)).await;
            [2, 3, 50, 60, 100].into_iter().for_each(|n| world.put(Peer::new(n)));
            world
                .settled(&format!("start; {operation} fails {times} times with errno {errno}"))
                .await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_adopts_right_objects_and_removes_wrong_ones() {
    let kernel = FakeKernel::with_uplink("eth0");
    let mut want = base(1);
    want.extend(Peer::new(2).objects());
    for object in want.iter() {
        // The routes of an earlier run may have any protocol. Nexthop objects have our protocol.
        let nexthop = matches!(
            object,
            Object::Nexthop(_) | Object::Route(Route { via: Via::Nexthop(_), .. })
        );
        kernel.foreign_put(object.clone(), if nexthop { ROUTE_PROTOCOL } else { 3 });
    }
    Peer::new(3)
        .objects()
        .into_iter()
        .for_each(|object| kernel.foreign_put(object, ROUTE_PROTOCOL));
    let subnets = FakeSubnets::with_config(CONFIG);
    subnets.put_attrs(&Peer::new(2).key(), Peer::new(2).attrs());
    let mut world = World::on(kernel.clone(), subnets).await;
    world.peers.push(Peer::new(2));
    world.settled("adoption").await;
    let touched: Vec<_> =
        kernel.take_calls().into_iter().filter(|call| call.key.is_some()).collect();
    let stale: Vec<Key> = Peer::new(3).objects().iter().map(Object::key).collect();
    let only_stale =
        |call: &Call| call.operation == Operation::Delete && stale.contains(&call.key.unwrap());
    assert!(!touched.is_empty() && touched.iter().all(only_stale), "{touched:?}");
}

#[tokio::test(start_paused = true)]
async fn the_status_says_when_the_own_objects_are_in_place() {
    let start = async |kernel: &FakeKernel| {
        let mut world = World::on(kernel.clone(), FakeSubnets::with_config(CONFIG)).await;
        [2, 3, 100].into_iter().for_each(|n| world.put(Peer::new(n)));
        world
    };
    let kernel = FakeKernel::with_uplink("eth0");
    kernel.fail(3, 105, |call| call.operation == Operation::Snapshot);
    let world = start(&kernel).await;
    let mut status = world.handle.status.clone();
    let blind = status.wait_for(|status| status.kernel_error.is_some()).await.unwrap().clone();
    assert!(!blind.own_in_place, "nothing is known");
    status.wait_for(|status| status.own_in_place).await.unwrap();
    assert!(base(1).iter().all(|object| kernel.state().get(&object.key()) == Some(object)));

    for refused in base(1).iter().map(Object::key) {
        let kernel = FakeKernel::with_uplink("eth0");
        kernel.fail(3, 105, move |call| call.key == Some(refused));
        let world = start(&kernel).await;
        let mut status = world.handle.status.clone();
        let failing =
            status.wait_for(|status| status.failing.contains_key(&refused)).await.unwrap().clone();
        assert!(!failing.own_in_place, "{refused}");
        status.wait_for(|status| status.own_in_place).await.unwrap();
        assert!(
            base(1).iter().all(|object| kernel.state().get(&object.key()) == Some(object)),
            "{refused}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_cached_view_deletes_nothing() {
    let kernel = FakeKernel::with_uplink("eth0");
    for object in base(1).iter().cloned().chain(Peer::new(3).objects()) {
        kernel.foreign_put(object, ROUTE_PROTOCOL);
    }
    let subnets = FakeSubnets::with_config(CONFIG);
    let mut world = World::on(kernel.clone(), subnets.clone()).await;
    let mut view = subnets.watch_leases().await.unwrap().borrow().clone();
    view.origin = Origin::Cached { written: None };
    subnets.set_view(view.clone());
    let mut status = world.handle.status.clone();
    status.wait_for(|status| status.objects == base(1).len() && !status.live).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1000)).await;
    assert!(
        Peer::new(3).objects().iter().all(|object| kernel.state().get(&object.key()).is_some())
    );
    assert!(!status.borrow().in_sync, "a cache is never in sync");
    assert!(status.borrow().settled, "the objects of the cached leases are in place");
    subnets.set_view(View { origin: Origin::Live { revision: Revision(9) }, ..view });
    world.settled("live").await;
}

#[tokio::test(start_paused = true)]
async fn a_change_of_one_peer_costs_one_peer() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    world.put(Peer::new(9));
    world.settled("one more").await;
    let calls = world.kernel.take_calls();
    let of = |operation| calls.iter().filter(|call| call.operation == operation).count();
    assert_eq!(of(Operation::Snapshot), 0, "{calls:?}");
    // The objects of the peer, and each forwarding entry at most once more, because its events name
    // no author.
    assert!(calls.len() <= Peer::new(9).objects().len() + 2 + 2, "{calls:?}");
}

#[tokio::test(start_paused = true)]
async fn changes_of_foreign_objects_cost_nothing() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    for n in 0..200u8 {
        let dst: Subnet = format!("172.16.{n}.0/24").parse().unwrap();
        let via = Via::Gateway { gateway: [192, 0, 2, 9].into(), link: uplink(), onlink: false };
        world.kernel.foreign_put(Route { dst, via, mtu: None }, 3);
        world.foreign.insert(Route { dst, via, mtu: None });
    }
    world.settled("churn").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(world.kernel.take_calls(), vec![]);
}

#[tokio::test(start_paused = true)]
async fn an_idle_network_only_reads_the_kernel_once_in_a_period() {
    for (period, expected) in [(None, 10), (Some(60), 50), (Some(0), 0)] {
        let period = period.map(Duration::from_secs);
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(CONFIG);
        let mut world = World::compared(period, kernel, subnets).await;
        [2, 3, 4].into_iter().for_each(|n| world.put(Peer::new(n)));
        world.settled("start").await;
        tokio::time::sleep(Duration::from_secs(301)).await;
        world.kernel.take_calls();
        tokio::time::sleep(Duration::from_secs(3000)).await;
        let calls = world.kernel.take_calls();
        let snapshots = calls.iter().filter(|call| call.operation == Operation::Snapshot).count();
        let lookups = calls.iter().filter(|call| call.operation == Operation::Lookup).count();
        let per_snapshot = 2 * world.peers.len();
        assert_eq!((snapshots, lookups), (expected, expected * per_snapshot), "{period:?}");
        assert_eq!(snapshots + lookups, calls.len(), "{calls:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_refused_change_is_reported_and_tried_again() {
    let mut world = settled_world().await;
    let key = Peer::new(9).objects()[1].key();
    world.kernel.fail(3, 22, move |call| call.key == Some(key));
    world.put(Peer::new(9));
    let mut status = world.handle.status.clone();
    let failing =
        status.wait_for(|status| status.failing.contains_key(&key)).await.unwrap().clone();
    let failure = failing.failing.get(&key).unwrap();
    assert!(failure.error.is(EINVAL));
    assert!(
        failure.change.to_string().starts_with("put fdb")
            && failure.error.to_string().contains("planted fault")
    );
    assert!(!failing.in_sync && failing.failing.len() == 1);
    assert!(failing.settled, "all objects that do not fail are in place");
    world.settled("after three refusals").await;
    assert!(world.handle.status.borrow().failing.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_foreign_device_with_the_name_of_the_tunnel_is_reported_and_gets_no_objects() {
    let kernel = FakeKernel::with_uplink("eth0");
    kernel.add_foreign_link("flannel.1", &[]);
    let mut world = World::on(kernel.clone(), FakeSubnets::with_config(CONFIG)).await;
    (2..30).for_each(|n| world.put(Peer::new(n)));
    let mut status = world.handle.status.clone();
    let status = status.wait_for(|s| !s.failing.is_empty()).await.unwrap().clone();
    let failing: Vec<String> = status.failing.values().map(|f| f.error.to_string()).collect();
    assert!(
        failing.len() == 1 && failing[0].contains("exists and is not a vxlan device"),
        "{failing:?}"
    );
    let on_the_other: Vec<Object> = (2..30)
        .flat_map(|n| Peer::new(n).objects())
        .filter(|object| of_family(object, Family::V6))
        .collect();
    let there = |object: &Object| kernel.state().get(&object.key()) == Some(object);
    let arrived = async {
        while !on_the_other.iter().all(there) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), arrived)
        .await
        .expect("the other device carries its peers");
    kernel.delete_link("flannel.1");
    world.settled("the other link is gone").await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_run_leaves_all_objects_and_writes_no_more() {
    let mut world = settled_world().await;
    let before = world.kernel.state();
    world.task.abort();
    let _ = (&mut world.task).await;
    world.kernel.take_calls();
    world.put(Peer::new(9));
    world.kernel.foreign_delete(Peer::new(2).objects()[0].key());
    tokio::time::sleep(Duration::from_secs(1000)).await;
    assert_eq!(world.kernel.take_calls(), vec![]);
    assert_eq!(world.kernel.state().len(), before.len() - 1);
}

#[tokio::test(start_paused = true)]
async fn two_networks_on_one_kernel_do_not_touch_each_other() {
    let mut world = settled_world().await;
    let other = Footprint { links: ["other.1".parse().unwrap()].into(), ..Footprint::default() };
    let Some(Object::Link(mut link)) = base(1).get(&Key::Link(tunnel(Family::V4))).cloned() else {
        panic!()
    };
    link.name = "other.1".parse().unwrap();
    let neigh =
        Neigh { link: link.name, address: [10, 9, 0, 1].into(), mac: MacAddr::local([5; 6]) };
    for object in [Object::from(link), neigh.into()] {
        assert!(
            world.kernel.other().apply(&other, &[object::Change::Put(object.clone())])[0].is_done()
        );
        world.foreign.insert(object);
    }
    world.kernel.lose_messages();
    world.settled("both").await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_lookup_moves_no_peer() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    world.kernel.fail(6, 105, |call| call.operation == Operation::Lookup);
    world.kernel.lose_messages();
    tokio::time::sleep(Duration::from_secs(5)).await;
    world.settled("lookups failed").await;
    let calls = world.kernel.take_calls();
    let changes: Vec<_> = calls.iter().filter(|call| call.key.is_some()).collect();
    assert!(world.kernel.clear_faults() && changes.is_empty(), "{changes:?}");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_changes_while_lookups_fail_keeps_its_path() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    let direct = *world.peers.iter().find(|peer| peer.n >= 100).unwrap();
    world.kernel.fail(usize::MAX, 105, |call| call.operation == Operation::Lookup);
    // The public address is the same, the data differ.
    world.put(Peer { mac: 77, ..direct });
    // A new peer has no earlier result. The lookup is repeated until it succeeds.
    let new = Peer::new(110);
    world.put(new);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let calls = world.kernel.take_calls();
    let touched = |peer: Peer| {
        let subnets = Family::BOTH.map(|family| Key::Route(subnet(family, peer.n)));
        calls.iter().filter(|call| call.key.is_some_and(|key| subnets.contains(&key))).count()
    };
    assert_eq!((touched(direct), touched(new) > 0), (0, true), "{calls:?}");
    assert!(!world.handle.status.borrow().in_sync);
    world.kernel.clear_faults();
    world.settled("the kernel answers again").await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_kernel_delays_no_peer() {
    let mut world = settled_world().await;
    world.kernel.fail(1000, 11, |call| call.operation == Operation::Snapshot);
    world.kernel.lose_messages();
    world.put(Peer::new(9));
    let there = |world: &World| {
        Peer::new(9)
            .objects()
            .iter()
            .all(|o| without_nexthops(&world.kernel.state()).get(&o.key()) == Some(o))
    };
    let arrived = async {
        while !there(&world) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(1), arrived)
        .await
        .expect("the new peer's objects are put");
    assert!(!world.handle.status.borrow().in_sync);
    world.kernel.clear_faults();
    world.settled("readable again").await;
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_kernel_is_read_with_backoff() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    world.kernel.fail(usize::MAX, 11, |call| call.operation == Operation::Snapshot);
    world.kernel.lose_messages();
    tokio::time::sleep(Duration::from_secs(100)).await;
    let tries =
        world.kernel.take_calls().iter().filter(|c| c.operation == Operation::Snapshot).count();
    assert!((5..=15).contains(&tries), "{tries} tries in a hundred seconds");
    world.kernel.clear_faults();
    world.settled("readable again").await;
}

#[tokio::test(start_paused = true)]
async fn a_new_failure_starts_with_the_shortest_backoff() {
    let mut world = settled_world().await;
    let [old, new] = [9, 10].map(|n| Peer::new(n).objects()[1].key());
    world.kernel.fail(usize::MAX, 22, move |call| call.key == Some(old));
    world.put(Peer::new(9));
    tokio::time::sleep(Duration::from_secs(300)).await;
    world.kernel.fail(1, 105, move |call| call.key == Some(new));
    world.put(Peer::new(10));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let failing: Vec<Key> = world.handle.status.borrow().failing.keys().copied().collect();
    assert_eq!((failing, world.kernel.state().get(&new).is_some()), (vec![old], true));
    world.kernel.clear_faults();
    world.settled("nothing fails any more").await;
}

#[tokio::test(start_paused = true)]
async fn a_listener_that_keeps_breaking_is_opened_with_backoff() {
    let mut world = settled_world().await;
    world.kernel.take_calls();
    for _ in 0..1000 {
        world.kernel.break_listeners();
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let snapshots =
        world.kernel.take_calls().iter().filter(|c| c.operation == Operation::Snapshot).count();
    assert!((1..=20).contains(&snapshots), "{snapshots} snapshots in a second");
    world.kernel.foreign_delete(Peer::new(2).objects()[0].key());
    world.settled("listening again").await;
}

/// A route of another protocol on our device, or one with a preferred source, is owned too, so it
/// is repaired.
#[tokio::test(start_paused = true)]
async fn an_inexact_route_is_repaired_after_an_event_or_a_snapshot() {
    let mut world = settled_world().await;
    let footprint =
        Footprint { links: Family::BOTH.into_iter().map(tunnel).collect(), ..Footprint::default() };
    let cases =
        Family::BOTH.into_iter().flat_map(|family| [4, ROUTE_PROTOCOL].map(|by| (family, by)));
    let cases = cases.flat_map(|(family, by)| [false, true].map(|lost| (family, by, lost)));
    for (family, protocol, lost) in cases {
        let key = Key::Route(subnet(family, 3));
        let Some(Object::Route(route)) = world.kernel.state().get(&key).cloned() else { panic!() };
        if protocol == ROUTE_PROTOCOL {
            world.kernel.foreign_put_inexact(route, protocol);
        } else {
            world.kernel.foreign_put(route, protocol);
        }
        let there = world.kernel.snapshot(&footprint).unwrap();
        assert!(there.get(&key) == Some(&route.into()) && there.is_inexact(&key));
        if lost {
            world.kernel.lose_messages();
        }
        let put_right = async {
            while world.kernel.snapshot(&footprint).unwrap().is_inexact(&key) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), put_right).await.expect("it is put again");
        world.settled("repaired").await;
    }
    let status = world.handle.status.borrow().clone();
    let modified = status.repairs.get(&(ObjectKind::Route, Damage::Modification));
    assert_eq!((status.repaired, modified), (8, Some(&8)));
}

/// Undesired routes inside the pod networks with a preferred source, metrics and so on. Routes on
/// the tunnel and routes of our protocol are removed. Foreign routes stay.
#[tokio::test(start_paused = true)]
async fn an_undesired_inexact_route_is_deleted_after_an_event_or_a_snapshot() {
    let mut world = settled_world().await;
    world.kernel.add_foreign_link("cali1", &[]);
    let pod = "cali1".parse().unwrap();
    for (family, lost) in
        Family::BOTH.into_iter().flat_map(|family| [(family, false), (family, true)])
    {
        let unwanted = [
            (
                Via::Gateway {
                    gateway: subnet(family, 3).base(),
                    link: tunnel(family),
                    onlink: true,
                },
                3,
            ),
            (
                Via::Gateway {
                    gateway: Peer::new(100).public(family),
                    link: uplink(),
                    onlink: false,
                },
                ROUTE_PROTOCOL,
            ),
            (Via::Link(pod), ROUTE_PROTOCOL),
        ];
        for (via, protocol) in unwanted {
            let route = Route { dst: subnet(family, 222), via, mtu: None };
            world.kernel.foreign_put_inexact(route, protocol);
            if lost {
                world.kernel.lose_messages();
            }
            let gone = async {
                while world.kernel.state().get(&Key::Route(route.dst)).is_some() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            let what = format!("{route:?} of protocol {protocol} is removed");
            tokio::time::timeout(Duration::from_secs(5), gone).await.expect(&what);
            world.settled(&what).await;
            let alone = Route { dst: subnet(family, 223), via: Via::Link(pod), mtu: None };
            world.kernel.foreign_put_inexact(alone, 3);
            world.foreign.insert(alone);
            world.settled("others' stay").await;
        }
    }
    let repairs = world.handle.status.borrow().repairs.clone();
    assert_eq!(repairs, BTreeMap::from([((ObjectKind::Route, Damage::Addition), 12)]));
}

#[tokio::test(start_paused = true)]
async fn routes_have_the_mtus_of_their_paths_while_there_are_some() {
    let mut world = settled_world().await;
    let mut repaired = 0;
    for mtu in [Some(1350), Some(1300), None] {
        world.set_mtus(mtu);
        world.settled(&format!("{mtu:?}")).await;
        // Another program sets another MTU, or removes it.
        for other in [Some(1200), mtu.map_or(Some(1400), |_| None)] {
            for n in [2, 3, 101] {
                for family in Family::BOTH {
                    let state = world.kernel.state();
                    let there = state.get(&Key::Route(subnet(family, n)));
                    let Some(Object::Route(route)) = there else { panic!("{there:?}") };
                    world.kernel.foreign_put(Route { mtu: other, ..*route }, 3);
                    world.settled(&format!("{mtu:?}, then {other:?}")).await;
                    repaired += 1;
                }
            }
        }
    }
    assert_eq!(world.handle.status.borrow().repaired, repaired);
    // A peer that comes later has the MTU of its path, also after the sender is gone.
    world.mtus.send_replace(Arc::new([(subnet(Family::V4, 9), 1280)].into()));
    world.settled("nobody has that subnet").await;
    world.put(Peer::new(9));
    world.settled("a peer with an MTU").await;
    let (gone, _) = watch::channel(world.mtus.borrow().clone());
    world.mtus = gone;
    world.put(Peer::new(10));
    world.settled("a peer without an MTU").await;
}

#[tokio::test(start_paused = true)]
async fn routes_to_pods_cause_no_snapshot() {
    let mut world = settled_world().await;
    world.kernel.add_foreign_link("cali1", &[]);
    world.settled("a pod's link").await;
    world.kernel.take_calls();
    for n in 1..50u8 {
        let dst = Subnet::host([10, 1, 1, n].into());
        let route = Route { dst, via: Via::Link("cali1".parse().unwrap()), mtu: None };
        // Every second route has a preferred source.
        if n % 2 == 0 {
            world.kernel.foreign_put(route, 3);
        } else {
            world.kernel.foreign_put_inexact(route, 3);
        }
        world.foreign.insert(route);
    }
    world.settled("pods").await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(world.kernel.take_calls(), vec![]);
}

#[tokio::test(start_paused = true)]
async fn a_device_that_cannot_be_changed_still_gets_its_peers() {
    let mut world = settled_world().await;
    let name = tunnel(Family::V4);
    world.kernel.fail(1000, 22, move |call| {
        call.operation == Operation::Replace && call.key == Some(Key::Link(name))
    });
    let Some(Object::Link(mut link)) = base(1).get(&Key::Link(name)).cloned() else { panic!() };
    link.mtu = 1300;
    world.kernel.foreign_put(link, 0);
    let mut status = world.handle.status.clone();
    status.wait_for(|status| status.failing.contains_key(&Key::Link(name))).await.unwrap();
    world.put(Peer::new(9));
    let objects = Peer::new(9).objects();
    let arrived = async {
        while !objects
            .iter()
            .all(|o| without_nexthops(&world.kernel.state()).get(&o.key()) == Some(o))
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(1), arrived)
        .await
        .expect("the new peer's objects are put");
    world.kernel.clear_faults();
    world.settled("the device may be changed again").await;
}
