//! Nexthop objects, the routes that use them, and their ids.

use libc::EINVAL;

use super::*;
use crate::kernel::NexthopBlock;

fn nexthop(family: Family, n: u8, on: LinkName, gateway: IpAddr) -> Nexthop {
    let id = 0x0f1a_1000 + u32::from(family.bits()) * 256 + u32::from(n);
    Nexthop { id, link: on, gateway, onlink: false }
}

pub(super) fn routes_are_deleted_with_their_nexthop(fixture: &Fixture<'_>) {
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let device = device(family, n, fixture.uplink);
        let by = Nexthop { onlink: true, ..nexthop(family, 1, link(n), ip(family, 2)) };
        let route = Route { dst: subnet(family, 2), via: Via::Nexthop(by.id), mtu: None };
        let objects = [device.clone().into(), by.into(), Object::from(route)];
        let there = |object: &Object| snapshot(fixture).get(&object.key()) == Some(object);
        apply(fixture, &puts(&objects[..1]));
        let refused =
            fixture.kernel.apply(&footprint(fixture.uplink), &puts(&objects[2..])).remove(0);
        let error = refused.into_result().expect_err("there is no such nexthop");
        assert!(error.is(EINVAL), "{error}");
        apply(fixture, &puts(&objects[1..]));
        let moved = Nexthop { gateway: ip(family, 9), ..by };
        apply(fixture, &puts(&[moved.into()]));
        assert!(
            there(&moved.into()) && there(&objects[2]),
            "a nexthop is replaced, and its route stays"
        );
        apply(fixture, &[Change::Delete(moved.into())]);
        assert!(!there(&objects[2]), "the kernel deletes the route with its nexthop");
        apply(fixture, &[Change::Delete(objects[2].clone())]);
        apply(fixture, &puts(&objects[1..]));
        let down = Link { up: false, ..device };
        apply(fixture, &puts(&[down.into()]));
        assert!(!there(&objects[1]) && !there(&objects[2]), "a link that goes down loses both");
        apply(fixture, &puts(&objects[..1]));
        apply(fixture, &puts(&objects[1..]));
        clear(fixture);
    }
    let astray = nexthop(Family::V4, 9, fixture.uplink, IpAddr::from([198, 51, 100, 9]));
    let refused =
        fixture.kernel.apply(&footprint(fixture.uplink), &puts(&[astray.into()])).remove(0);
    assert!(matches!(refused, Outcome::Failed(_)), "its gateway is not on the link");
}

pub(super) fn nexthop_ids_are_ours_or_foreign(fixture: &Fixture<'_>) {
    let mut footprint = footprint(fixture.uplink);
    let (chosen, there) = NexthopBlock::choose(fixture.kernel, &footprint).expect("ids");
    assert_eq!((there.usable, there.ours, there.foreign), (true, vec![], vec![]));
    footprint.nexthops = chosen;
    let id = chosen.expect("a block").first() + 5;
    let gateway = |n| peer(Family::V4, n);
    let on_uplink =
        |id, n| Nexthop { id, link: fixture.uplink, gateway: gateway(n), onlink: false };
    let inside = on_uplink(id, 7);
    let outside = on_uplink(77, 8);
    let by = |dst: Subnet, id| Object::from(Route { dst, via: Via::Nexthop(id), mtu: None });
    let elsewhere: Subnet = "10.99.0.0/24".parse().expect("a subnet");
    let objects = [inside.into(), outside.into(), by(subnet(Family::V4, 7), id), by(elsewhere, 77)];
    for outcome in fixture.kernel.apply(&footprint, &puts(&objects)) {
        assert_eq!(outcome, Outcome::Done, "put");
    }
    let found = fixture.kernel.snapshot(&footprint).expect("a snapshot");
    assert_eq!(
        text(&found),
        [objects[0].to_string(), objects[2].to_string()],
        "only the id in the block, and the route inside the networks"
    );
    let (again, there) = NexthopBlock::choose(fixture.kernel, &footprint).expect("ids");
    assert_eq!((again, there.ours, there.foreign), (chosen, vec![id], vec![77]));
    let deletes: Vec<Change> = objects.iter().rev().cloned().map(Change::Delete).collect();
    for outcome in fixture.kernel.apply(&footprint, &deletes) {
        assert_eq!(outcome, Outcome::Done, "deleted");
    }
}
