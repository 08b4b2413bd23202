//! A test suite for implementations of [`Kernel`].

mod changes;
mod nexthops;
mod objects;

use std::net::IpAddr;

use crate::address::{Family, Subnet};
use crate::kernel::{Footprint, Kernel, Outcome};
use crate::object::{
    Addr, Change, Fdb, Link, LinkKind, LinkName, MacAddr, Neigh, Nexthop, Object, ObjectSet, Route,
    Via, Vxlan,
};

/// The kernel on which the suite runs: an empty network namespace, or a fake one.
#[derive(Debug)]
pub struct Fixture<'a> {
    /// The kernel under test.
    pub kernel: &'a dyn Kernel,
    /// The kernel under test, as another process uses it.
    pub other: &'a dyn Kernel,
    /// A foreign link that is up, with the addresses `192.0.2.1/24` and `2001:db8::1/64`.
    pub uplink: LinkName,
}

/// Runs the suite. It needs a tokio runtime with time enabled, and blocks while the kernel works.
///
/// ```
/// use flannel_core::testing::{FakeKernel, Fixture, kernel_suite};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let kernel = FakeKernel::with_uplink("eth0");
/// let other = kernel.other();
/// let uplink = "eth0".parse().unwrap();
/// kernel_suite(&Fixture { kernel: &kernel, other: &other, uplink }).await;
/// # }
/// ```
///
/// # Panics
/// The kernel does not do what the documentation of [`Kernel`] says.
pub async fn kernel_suite(fixture: &Fixture<'_>) {
    objects::everything_is_created_and_read_back(fixture);
    objects::every_attribute_is_changed_in_place(fixture);
    objects::a_failed_change_does_not_stop_later_ones(fixture);
    objects::a_deletion_of_an_absent_object_succeeds(fixture);
    objects::a_deletion_keeps_a_replacement(fixture);
    objects::a_foreign_link_is_not_changed(fixture);
    objects::a_new_identity_makes_a_new_device(fixture);
    objects::lookup_returns_the_link_of_an_address(fixture);
    nexthops::routes_are_deleted_with_their_nexthop(fixture);
    nexthops::nexthop_ids_are_ours_or_foreign(fixture);
    changes::only_changes_by_others_are_reported(fixture).await;
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
    Link { name: link(n), mtu: 1400, up: true, kind: vxlan.into() }
}

/// One object of every kind. Each may need the objects before it.
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

fn apply(fixture: &Fixture<'_>, changes: &[Change]) {
    let outcomes = fixture.kernel.apply(&footprint(fixture.uplink), changes);
    assert_eq!(outcomes.len(), changes.len(), "one outcome for each change");
    for (change, outcome) in changes.iter().zip(outcomes) {
        assert_eq!(outcome, Outcome::Done, "{change}");
    }
}

fn snapshot(fixture: &Fixture<'_>) -> ObjectSet {
    fixture.kernel.snapshot(&footprint(fixture.uplink)).expect("a snapshot")
}

fn text(state: &ObjectSet) -> Vec<String> {
    state.iter().map(ToString::to_string).collect()
}

fn assert_state(fixture: &Fixture<'_>, want: &ObjectSet) {
    assert_eq!(text(&snapshot(fixture)), text(want));
}

fn clear(fixture: &Fixture<'_>) {
    let changes: Vec<Change> =
        snapshot(fixture).iter().rev().cloned().map(Change::Delete).collect();
    apply(fixture, &changes);
    assert_state(fixture, &ObjectSet::default());
}

fn everything(fixture: &Fixture<'_>) -> ObjectSet {
    let both = [(Family::V4, 1), (Family::V6, 2)];
    both.iter().flat_map(|(family, n)| one_of_each(*family, *n, fixture.uplink)).collect()
}
