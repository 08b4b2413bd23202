//! What every [`Kernel`] must do, the real one and the fake alike.

use std::net::IpAddr;

use crate::address::{Family, Subnet};
use crate::kernel::NexthopBlock;
use crate::kernel::{Footprint, Invalidation, Kernel, KernelEvent};
use crate::object::{
    Addr, Change, Fdb, Key, Link, LinkKind, Neigh, Nexthop, Object, Route, State, Via, Vxlan,
};
use crate::object::{LinkName, MacAddr};

/// Where the suite runs: an empty network namespace, or what passes for one.
#[derive(Debug)]
pub struct Ground<'a> {
    /// The kernel under test.
    pub kernel: &'a dyn Kernel,
    /// The same kernel, as another process uses it.
    pub other: &'a dyn Kernel,
    /// A link of others that is up, with `192.0.2.1/24` and `2001:db8::1/64` on it.
    pub uplink: LinkName,
}

/// Runs the suite; one line per step that failed is the panic's message.
///
/// # Panics
/// The kernel does not behave.
pub async fn kernel_suite(ground: &Ground<'_>) {
    everything_is_created_and_read_back(ground);
    every_attribute_is_changed_in_place(ground);
    a_failure_in_the_middle_stops_nothing(ground);
    what_is_gone_is_as_good_as_deleted(ground);
    a_deletion_spares_what_took_the_place(ground);
    a_foreign_link_is_never_touched(ground);
    a_new_identity_makes_a_new_device(ground);
    lookup_tells_what_is_on_the_link(ground);
    routes_share_the_fate_of_their_nexthop(ground);
    nexthop_ids_are_told_apart(ground);
    others_are_heard_and_we_are_not(ground).await;
}

fn link(n: u8) -> LinkName {
    format!("flannel.{n}").parse().expect("a link name")
}

fn mac(n: u8) -> MacAddr {
    MacAddr::local([n; 6])
}

fn ip(family: Family, n: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([10, 1, n, 0]),
        Family::V6 => IpAddr::from([0xfd00, 1, u16::from(n), 0, 0, 0, 0, 0]),
    }
}

fn peer(family: Family, n: u8) -> IpAddr {
    match family {
        Family::V4 => IpAddr::from([192, 0, 2, n]),
        Family::V6 => IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(n)]),
    }
}

fn subnet(family: Family, n: u8) -> Subnet {
    let len = if family == Family::V4 { 24 } else { 64 };
    Subnet::new(ip(family, n), len).expect("a subnet")
}

fn footprint(uplink: LinkName) -> Footprint {
    Footprint {
        links: [link(1), link(2)].into(),
        networks: vec!["10.1.0.0/16".parse().expect("v4"), "fd00:1::/32".parse().expect("v6")],
        routes_on: [uplink].into(),
        blackholes: true,
        ..Footprint::default()
    }
}

fn device(family: Family, n: u8, uplink: LinkName) -> Link {
    let vxlan = Vxlan {
        vni: u32::from(n),
        port: 8470 + u16::from(n),
        mac: mac(n),
        local: Some(peer(family, 1)),
        lower: Some(uplink),
        learning: false,
        gbp: false,
    };
    Link { name: link(n), mtu: 1400, up: true, kind: LinkKind::Vxlan(vxlan) }
}

/// One object of every kind, each needing those before it.
fn one_of_each(family: Family, n: u8, uplink: LinkName) -> Vec<Object> {
    let len = family.bits();
    let route = |dst, via| Object::from(Route { dst: subnet(family, dst), via, mtu: None });
    let id = 0x0f1a_0000 + u32::from(n);
    vec![
        device(family, n, uplink).into(),
        Addr { link: link(n), address: ip(family, 0), len }.into(),
        Neigh { link: link(n), address: ip(family, 2), mac: mac(20) }.into(),
        Fdb { link: link(n), mac: mac(20), dst: peer(family, 2) }.into(),
        Nexthop { id, link: link(n), gateway: ip(family, 3), onlink: true }.into(),
        route(2, Via::Gateway { gateway: ip(family, 2), link: link(n), onlink: true }),
        route(3, Via::Nexthop(id)),
        route(4, Via::Gateway { gateway: peer(family, 4), link: uplink, onlink: false }),
        route(5, Via::Blackhole),
        route(6, Via::Link(link(n))),
    ]
}

fn puts(objects: &[Object]) -> Vec<Change> {
    objects.iter().cloned().map(Change::Put).collect()
}

fn apply(ground: &Ground<'_>, changes: &[Change]) {
    let results = ground.kernel.apply(&footprint(ground.uplink), changes);
    assert_eq!(results.len(), changes.len(), "one result for each change");
    for (change, result) in changes.iter().zip(results) {
        if let Err(error) = result {
            panic!("{change}: {error}");
        }
    }
}

fn snapshot(ground: &Ground<'_>) -> State {
    ground.kernel.snapshot(&footprint(ground.uplink)).expect("a snapshot")
}

fn text(state: &State) -> Vec<String> {
    state.iter().map(ToString::to_string).collect()
}

fn assert_state(ground: &Ground<'_>, want: &State) {
    assert_eq!(text(&snapshot(ground)), text(want));
}

fn clear(ground: &Ground<'_>) {
    let changes: Vec<Change> = snapshot(ground).iter().rev().cloned().map(Change::Delete).collect();
    apply(ground, &changes);
    assert_state(ground, &State::default());
}

fn everything(ground: &Ground<'_>) -> State {
    let both = [(Family::V4, 1), (Family::V6, 2)];
    both.iter().flat_map(|(family, n)| one_of_each(*family, *n, ground.uplink)).collect()
}

fn everything_is_created_and_read_back(ground: &Ground<'_>) {
    let want = everything(ground);
    assert_state(ground, &State::default());
    apply(ground, &want.diff(&State::default()));
    assert_state(ground, &want);
    let again: Vec<Change> = want.iter().cloned().map(Change::Put).collect();
    apply(ground, &again);
    assert_state(ground, &want);
    clear(ground);
}

fn every_attribute_is_changed_in_place(ground: &Ground<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let mut want: State = one_of_each(family, n, ground.uplink).into_iter().collect();
        apply(ground, &want.diff(&State::default()));
        let id = 0x0f1a_0000 + u32::from(n);
        let mut device = device(family, n, ground.uplink);
        device.mtu = 1350;
        let LinkKind::Vxlan(vxlan) = &mut device.kind;
        *vxlan = Vxlan { local: Some(peer(family, 9)), learning: true, ..*vxlan };
        let route = |dst, via, mtu| Object::from(Route { dst: subnet(family, dst), via, mtu });
        let gateway = |gateway, link, onlink| Via::Gateway { gateway, link, onlink };
        let mut down = device.clone();
        down.up = false;
        for change in [
            Object::from(device.clone()),
            Neigh { link: link(n), address: ip(family, 2), mac: mac(21) }.into(),
            Fdb { link: link(n), mac: mac(20), dst: peer(family, 3) }.into(),
            Nexthop { id, link: link(n), gateway: ip(family, 7), onlink: true }.into(),
            route(2, gateway(ip(family, 8), link(n), true), None),
            route(2, gateway(ip(family, 8), link(n), true), Some(1300)),
            route(2, gateway(peer(family, 8), ground.uplink, false), None),
            route(2, Via::Nexthop(id), None),
            route(2, Via::Blackhole, None),
            route(2, Via::Link(link(n)), None),
            route(3, gateway(ip(family, 3), link(n), true), None),
            route(5, gateway(ip(family, 5), link(n), true), None),
        ] {
            apply(ground, &[Change::Put(change.clone())]);
            want.insert(change);
            assert_state(ground, &want);
        }
        apply(ground, &[Change::Put(down.into())]);
        let found = snapshot(ground);
        assert!(
            found.get(&Key::Link(link(n))).is_some_and(|o| matches!(o, Object::Link(l) if !l.up))
        );
        assert_eq!(found.get(&Key::Neigh(link(n), ip(family, 2))), None, "down drops neighbours");
        assert!(found.get(&Key::Fdb(link(n), mac(20))).is_some(), "down keeps fdb entries");
        apply(ground, &[Change::Put(device.into())]);
        clear(ground);
    }
}

fn a_failure_in_the_middle_stops_nothing(ground: &Ground<'_>) {
    let neigh =
        |l: u8, n| Object::from(Neigh { link: link(l), address: ip(Family::V4, n), mac: mac(n) });
    let device: Object = device(Family::V4, 1, ground.uplink).into();
    let batch = puts(&[device.clone(), neigh(1, 1), neigh(2, 2), neigh(1, 3)]);
    let results = ground.kernel.apply(&footprint(ground.uplink), &batch);
    let ok: Vec<bool> = results.iter().map(Result::is_ok).collect();
    assert_eq!(ok, [true, true, false, true]);
    let error = results[2].as_ref().expect_err("no such link");
    assert_eq!(error.errno, 19, "ENODEV: {error}");
    assert!(error.to_string().contains("flannel.2"), "{error}");
    assert_state(ground, &[device, neigh(1, 1), neigh(1, 3)].into_iter().collect());
    clear(ground);
}

fn what_is_gone_is_as_good_as_deleted(ground: &Ground<'_>) {
    let want = everything(ground);
    let deletes: Vec<Change> = want.iter().rev().cloned().map(Change::Delete).collect();
    apply(ground, &deletes);
    assert_state(ground, &State::default());
}

fn a_deletion_spares_what_took_the_place(ground: &Ground<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let via = |gateway| Via::Gateway { gateway, link: link(n), onlink: true };
        let ours = Route { dst: subnet(family, 2), via: via(ip(family, 2)), mtu: None };
        let theirs = Route { via: via(ip(family, 9)), ..ours };
        apply(ground, &puts(&[device(family, n, ground.uplink).into(), theirs.into()]));
        apply(ground, &[Change::Delete(ours.into())]);
        assert_eq!(snapshot(ground).get(&Key::Route(ours.dst)), Some(&theirs.into()));
        clear(ground);
    }
}

fn a_foreign_link_is_never_touched(ground: &Ground<'_>) {
    let mut device = device(Family::V4, 1, ground.uplink);
    device.name = ground.uplink;
    let footprint = Footprint { links: [ground.uplink].into(), ..Footprint::default() };
    let result = ground.kernel.apply(&footprint, &[Change::Put(device.into())]).remove(0);
    let error = result.expect_err("a foreign link in the way");
    assert_eq!(error.errno, 17, "EEXIST: {error}");
    assert!(error.to_string().contains(ground.uplink.as_str()), "{error}");
    let found = ground.kernel.snapshot(&footprint).expect("a snapshot");
    assert_eq!(
        found.get(&Key::Link(ground.uplink)),
        None,
        "a link of unknown kind is not ours to see"
    );
}

fn a_new_identity_makes_a_new_device(ground: &Ground<'_>) {
    let mut link = device(Family::V4, 1, ground.uplink);
    let neigh = Neigh { link: link.name, address: ip(Family::V4, 2), mac: mac(2) };
    for change in 0..3 {
        apply(ground, &puts(&[link.clone().into(), neigh.into()]));
        let LinkKind::Vxlan(vxlan) = &mut link.kind;
        match change {
            0 => vxlan.vni += 100,
            1 => vxlan.port += 100,
            _ => vxlan.gbp = true,
        }
        apply(ground, &puts(&[link.clone().into()]));
        assert_state(ground, &[Object::from(link.clone())].into_iter().collect());
    }
    clear(ground);
}

fn lookup_tells_what_is_on_the_link(ground: &Ground<'_>) {
    for family in Family::BOTH {
        let answer = ground.kernel.lookup(peer(family, 77)).expect("an answer");
        assert_eq!(answer.on_link(), Some(ground.uplink), "{family}: {answer:?}");
        let answer = ground.kernel.lookup(ip(family, 77)).expect("an answer");
        assert_eq!(answer.on_link(), None, "{family}: {answer:?}");
    }
}

fn nexthop(family: Family, n: u8, on: LinkName, gateway: IpAddr) -> Nexthop {
    let id = 0x0f1a_1000 + u32::from(family.bits()) * 256 + u32::from(n);
    Nexthop { id, link: on, gateway, onlink: false }
}

fn routes_share_the_fate_of_their_nexthop(ground: &Ground<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let device = device(family, n, ground.uplink);
        let by = Nexthop { onlink: true, ..nexthop(family, 1, link(n), ip(family, 2)) };
        let route = Route { dst: subnet(family, 2), via: Via::Nexthop(by.id), mtu: None };
        let objects = [device.clone().into(), by.into(), Object::from(route)];
        let there = |object: &Object| snapshot(ground).get(&object.key()) == Some(object);
        apply(ground, &puts(&objects[..1]));
        let refused =
            ground.kernel.apply(&footprint(ground.uplink), &puts(&objects[2..])).remove(0);
        assert_eq!(
            refused.map_err(|error| error.errno),
            Err(22),
            "EINVAL: there is no such nexthop"
        );
        apply(ground, &puts(&objects[1..]));
        let moved = Nexthop { gateway: ip(family, 9), ..by };
        apply(ground, &puts(&[moved.into()]));
        assert!(
            there(&moved.into()) && there(&objects[2]),
            "a nexthop is replaced under its route"
        );
        apply(ground, &[Change::Delete(moved.into())]);
        assert!(!there(&objects[2]), "its route goes with it");
        apply(ground, &[Change::Delete(objects[2].clone())]);
        apply(ground, &puts(&objects[1..]));
        let down = Link { up: false, ..device };
        apply(ground, &puts(&[down.into()]));
        assert!(!there(&objects[1]) && !there(&objects[2]), "both go with the link");
        apply(ground, &puts(&objects[..1]));
        let result = ground.kernel.apply(&footprint(ground.uplink), &puts(&objects[1..]));
        assert!(result.iter().all(Result::is_ok), "{result:?}");
        clear(ground);
    }
    let astray = nexthop(Family::V4, 9, ground.uplink, IpAddr::from([198, 51, 100, 9]));
    let refused = ground.kernel.apply(&footprint(ground.uplink), &puts(&[astray.into()])).remove(0);
    assert!(refused.is_err(), "its gateway is not on the link");
}

fn nexthop_ids_are_told_apart(ground: &Ground<'_>) {
    let mut footprint = footprint(ground.uplink);
    let (chosen, there) = NexthopBlock::choose(ground.kernel, &footprint).expect("ids");
    assert_eq!((there.usable, there.ours, there.foreign), (true, vec![], vec![]));
    footprint.nexthops = chosen;
    let id = chosen.expect("a block").first() + 5;
    let gateway = |n| peer(Family::V4, n);
    let on_uplink = |id, n| Nexthop { id, link: ground.uplink, gateway: gateway(n), onlink: false };
    let (inside, outside) = (on_uplink(id, 7), on_uplink(77, 8));
    let by = |dst: Subnet, id| Object::from(Route { dst, via: Via::Nexthop(id), mtu: None });
    let elsewhere: Subnet = "10.99.0.0/24".parse().expect("a subnet");
    let objects = [inside.into(), outside.into(), by(subnet(Family::V4, 7), id), by(elsewhere, 77)];
    for result in ground.kernel.apply(&footprint, &puts(&objects)) {
        result.expect("put");
    }
    let found = ground.kernel.snapshot(&footprint).expect("a snapshot");
    assert_eq!(
        text(&found),
        [objects[0].to_string(), objects[2].to_string()],
        "by id, inside the networks"
    );
    let (again, there) = NexthopBlock::choose(ground.kernel, &footprint).expect("ids");
    assert_eq!((again, there.ours, there.foreign), (chosen, vec![id], vec![77]));
    let deletes: Vec<Change> = objects.iter().rev().cloned().map(Change::Delete).collect();
    for result in ground.kernel.apply(&footprint, &deletes) {
        result.expect("deleted");
    }
}

/// Collects what is told until `done`; fails if nothing more comes.
async fn listen(
    changes: &mut dyn crate::kernel::Changes,
    mut done: impl FnMut(&Invalidation) -> bool,
) -> Vec<Invalidation> {
    let mut heard = Vec::new();
    loop {
        let next = tokio::time::timeout(std::time::Duration::from_secs(60), changes.next()).await;
        let invalidation = next.unwrap_or_else(|_| panic!("nothing more was told after {heard:?}"));
        let invalidation = invalidation.expect("the stream goes on");
        heard.push(invalidation.clone());
        if done(&invalidation) {
            return heard;
        }
    }
}

async fn others_are_heard_and_we_are_not(ground: &Ground<'_>) {
    let footprint = footprint(ground.uplink);
    let base = [device(Family::V4, 1, ground.uplink), device(Family::V6, 2, ground.uplink)]
        .map(Object::from);
    apply(ground, &puts(&base));
    let mut changes = ground.kernel.changes().expect("a listener");
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let objects = &one_of_each(family, n, ground.uplink)[1..];
        let loud = |o: &Object| matches!(o, Object::Fdb(_));
        let ours: Vec<Change> =
            objects.iter().filter(|o| !loud(o)).cloned().map(Change::Put).collect();
        apply(ground, &ours);
        for object in objects.iter().rev() {
            let results = ground.other.apply(&footprint, &[Change::Delete(object.clone())]);
            assert!(results[0].is_ok(), "{object}: {:?}", results[0]);
        }
        let last = objects.first().expect("objects").key();
        let heard = listen(&mut *changes, |invalidation| mentions(invalidation, &last, true)).await;
        for object in objects.iter().filter(|o| !loud(o)) {
            let gone = heard.iter().any(|invalidation| mentions(invalidation, &object.key(), true));
            // The kernel deletes routes by a nexthop object with it, and says so only of some.
            let implied = matches!(object, Object::Route(Route { via: Via::Nexthop(_), .. }));
            assert!(gone || implied, "{object} was deleted by another: {heard:?}");
            let here =
                heard.iter().any(|invalidation| mentions(invalidation, &object.key(), false));
            // The kernel finishes an IPv6 address by itself, later, and does not say for whom.
            let late = matches!(object, Object::Addr(addr) if addr.address.is_ipv6());
            assert!(!here || late, "{object} was put by ourselves: {heard:?}");
        }
        let theirs = Neigh { link: link(n), address: ip(family, 9), mac: mac(9) };
        assert!(ground.other.apply(&footprint, &[Change::Put(theirs.into())])[0].is_ok());
        let want = KernelEvent::Present(theirs.into());
        listen(
            &mut *changes,
            |invalidation| matches!(invalidation, Invalidation::Objects(reports, _) if reports.contains(&want)),
        )
        .await;
    }
    assert!(ground.other.apply(&footprint, &[Change::Delete(base[0].clone())])[0].is_ok());
    listen(
        &mut *changes,
        |invalidation| matches!(invalidation, Invalidation::Link(name) if *name == link(1)),
    )
    .await;
    clear(ground);
}

fn mentions(invalidation: &Invalidation, key: &Key, gone: bool) -> bool {
    let Invalidation::Objects(reports, _) = invalidation else { return false };
    reports.iter().any(|report| match report {
        KernelEvent::Deleted(k) => gone && k == key,
        KernelEvent::Present(object)
        | KernelEvent::Inexact(object)
        | KernelEvent::Duplicate(object) => !gone && object.key() == *key,
        KernelEvent::Unrepresentable(k) | KernelEvent::Related(k) => !gone && k == key,
    })
}
