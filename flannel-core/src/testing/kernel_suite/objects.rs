//! Objects of all kinds are put, changed in place and deleted.

use libc::{EEXIST, ENODEV};

use super::*;
use crate::object::Key;
use crate::testing::diff;

pub(super) fn everything_is_created_and_read_back(fixture: &Fixture<'_>) {
    let want = everything(fixture);
    assert_state(fixture, &ObjectSet::default());
    apply(fixture, &diff(&want, &ObjectSet::default()));
    assert_state(fixture, &want);
    let again: Vec<Change> = want.iter().cloned().map(Change::Put).collect();
    apply(fixture, &again);
    assert_state(fixture, &want);
    clear(fixture);
}

pub(super) fn every_attribute_is_changed_in_place(fixture: &Fixture<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let mut want: ObjectSet = one_of_each(family, n, fixture.uplink).into_iter().collect();
        apply(fixture, &diff(&want, &ObjectSet::default()));
        let id = 0x0f1a_0000 + u32::from(n);
        let mut device = device(family, n, fixture.uplink);
        device.mtu = 1350;
        let LinkKind::Vxlan(vxlan) = &mut device.kind else { unreachable!("a vxlan device") };
        **vxlan = Vxlan { local: Some(peer(family, 9)), learning: true, ..**vxlan };
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
            route(2, gateway(peer(family, 8), fixture.uplink, false), None),
            route(2, Via::Nexthop(id), None),
            route(2, Via::Blackhole, None),
            route(2, Via::Link(link(n)), None),
            route(3, gateway(ip(family, 3), link(n), true), None),
            route(5, gateway(ip(family, 5), link(n), true), None),
        ] {
            apply(fixture, &[Change::Put(change.clone())]);
            want.insert(change);
            assert_state(fixture, &want);
        }
        apply(fixture, &[Change::Put(down.into())]);
        let found = snapshot(fixture);
        assert!(
            found.get(&Key::Link(link(n))).is_some_and(|o| matches!(o, Object::Link(l) if !l.up))
        );
        assert_eq!(found.get(&Key::Neigh(link(n), ip(family, 2))), None, "down drops neighbours");
        assert!(found.get(&Key::Fdb(link(n), mac(20))).is_some(), "down keeps fdb entries");
        apply(fixture, &[Change::Put(device.into())]);
        clear(fixture);
    }
}

pub(super) fn a_failed_change_does_not_stop_later_ones(fixture: &Fixture<'_>) {
    let neigh =
        |l: u8, n| Object::from(Neigh { link: link(l), address: ip(Family::V4, n), mac: mac(n) });
    let device: Object = device(Family::V4, 1, fixture.uplink).into();
    let batch = puts(&[device.clone(), neigh(1, 1), neigh(2, 2), neigh(1, 3)]);
    let outcomes = fixture.kernel.apply(&footprint(fixture.uplink), &batch);
    let [Outcome::Done, Outcome::Done, Outcome::Failed(error), Outcome::Done] = &outcomes[..]
    else {
        panic!("{outcomes:?}")
    };
    assert!(error.is(ENODEV), "{error}");
    assert!(error.to_string().contains("flannel.2"), "{error}");
    assert_state(fixture, &[device, neigh(1, 1), neigh(1, 3)].into_iter().collect());
    clear(fixture);
}

pub(super) fn a_deletion_of_an_absent_object_succeeds(fixture: &Fixture<'_>) {
    let want = everything(fixture);
    let deletes: Vec<Change> = want.iter().rev().cloned().map(Change::Delete).collect();
    apply(fixture, &deletes);
    assert_state(fixture, &ObjectSet::default());
}

pub(super) fn a_deletion_keeps_a_replacement(fixture: &Fixture<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let via = |gateway| Via::Gateway { gateway, link: link(n), onlink: true };
        let ours = Route { dst: subnet(family, 2), via: via(ip(family, 2)), mtu: None };
        let theirs = Route { via: via(ip(family, 9)), ..ours };
        apply(fixture, &puts(&[device(family, n, fixture.uplink).into(), theirs.into()]));
        apply(fixture, &[Change::Delete(ours.into())]);
        assert_eq!(snapshot(fixture).get(&Key::Route(ours.dst)), Some(&theirs.into()));
        clear(fixture);
    }
}

pub(super) fn a_foreign_link_is_not_changed(fixture: &Fixture<'_>) {
    let mut device = device(Family::V4, 1, fixture.uplink);
    device.name = fixture.uplink;
    let footprint = Footprint { links: [fixture.uplink].into(), ..Footprint::default() };
    let outcome = fixture.kernel.apply(&footprint, &[Change::Put(device.into())]).remove(0);
    let error = outcome.into_result().expect_err("a foreign link has the name");
    assert!(error.is(EEXIST), "{error}");
    assert!(error.to_string().contains(fixture.uplink.as_str()), "{error}");
    let found = fixture.kernel.snapshot(&footprint).expect("a snapshot");
    assert_eq!(
        found.get(&Key::Link(fixture.uplink)),
        None,
        "a snapshot does not show a link of an unknown kind"
    );
}

pub(super) fn a_new_identity_makes_a_new_device(fixture: &Fixture<'_>) {
    let mut link = device(Family::V4, 1, fixture.uplink);
    let neigh = Neigh { link: link.name, address: ip(Family::V4, 2), mac: mac(2) };
    for change in 0..3 {
        apply(fixture, &puts(&[link.clone().into(), neigh.into()]));
        let LinkKind::Vxlan(vxlan) = &mut link.kind else { unreachable!("a vxlan device") };
        match change {
            0 => vxlan.vni += 100,
            1 => vxlan.port += 100,
            _ => vxlan.gbp = true,
        }
        apply(fixture, &puts(&[link.clone().into()]));
        assert_state(fixture, &[Object::from(link.clone())].into_iter().collect());
    }
    clear(fixture);
}

pub(super) fn lookup_returns_the_link_of_an_address(fixture: &Fixture<'_>) {
    for family in Family::BOTH {
        let answer = fixture.kernel.lookup(peer(family, 77)).expect("an answer");
        assert_eq!(answer.on_link(), Some(fixture.uplink), "{family}: {answer:?}");
        let answer = fixture.kernel.lookup(ip(family, 77)).expect("an answer");
        assert_eq!(answer.on_link(), None, "{family}: {answer:?}");
    }
}
