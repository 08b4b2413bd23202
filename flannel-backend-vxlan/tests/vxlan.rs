//! The vxlan backend on the fake kernel: its objects for different leases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{Link, MacAddr, Object, Vxlan};
use flannel_core::subnet::Hints;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Config, Network, Result, SubnetManager};
use flannel_route::{Host, JoinOptions};

const DUAL: &str = r#"{
    "Network": "10.1.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:1::/48",
    "Backend": {"Type":"vxlan"}
}"#;

/// A host whose kernel uses no nexthop objects, so that the kernel has the objects of the plan.
fn host(kernel: &FakeKernel, subnets: &FakeSubnets) -> Host {
    kernel.use_nexthops(false);
    let address: Dual<IpAddr> =
        ["192.0.2.1", "2001:db8::1"].into_iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
    Host::new(
        ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("it has the default route"),
        Arc::new(kernel.clone()),
        Arc::new(subnets.clone()),
    )
    .with_machine_id("machine")
}

fn peer(public: [&str; 2], macs: [&str; 2]) -> LeaseAttrs {
    let data = |mac: &str| Some(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#).into());
    LeaseAttrs::from(
        Offer::new(public.into_iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
            .with_kind("vxlan")
            .with_data(Dual { v4: data(macs[0]), v6: data(macs[1]) }),
    )
}

/// Joins and runs a network until it is in sync. Returns the kernel's objects as text.
async fn dump(config: &str, prepare: impl FnOnce(&FakeKernel, &FakeSubnets)) -> Vec<String> {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(config);
    prepare(&kernel, &subnets);
    let network = register(&kernel, &subnets).await.unwrap();
    let mut status = network.handle().status;
    tokio::select! {
        ended = network.run(subnets.watch_leases().await.unwrap()) => panic!("{ended:?}"),
        settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
    }
    kernel.dump()
}

async fn register(kernel: &FakeKernel, subnets: &FakeSubnets) -> Result<Box<dyn Network>> {
    let config = subnets.network_config().await?;
    let joined = host(kernel, subnets).join(&VxlanBackend, &config, JoinOptions::default()).await?;
    Ok(joined.network)
}

fn without_macs(dump: &[String]) -> Vec<String> {
    dump.iter().map(|line| line.split(" address ").next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn dual_stack_objects() {
    let objects = dump(DUAL, |_, subnets| {
        let attrs =
            peer(["198.51.100.7", "2001:db8:7::7"], ["0a:00:00:00:00:07", "0a:00:00:00:06:07"]);
        subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", attrs);
    });
    let objects = objects.await;
    assert_eq!(
        without_macs(&objects[..2]),
        ["link flannel-v6.1 mtu 1430 up", "link flannel.1 mtu 1450 up"],
        "70 bytes for IPv6, 50 for IPv4"
    );
    assert!(
        objects[0].ends_with("type vxlan id 1 dstport 8472 local 2001:db8::1 dev eth0 nolearning")
    );
    assert_eq!(
        objects[2..],
        [
            "address fd00:1:0:1::/128 dev flannel-v6.1",
            "address 10.1.1.0/32 dev flannel.1",
            "neigh fd00:1:0:7:: lladdr 0a:00:00:00:06:07 dev flannel-v6.1",
            "neigh 10.1.7.0 lladdr 0a:00:00:00:00:07 dev flannel.1",
            "fdb 0a:00:00:00:06:07 dst 2001:db8:7::7 dev flannel-v6.1",
            "fdb 0a:00:00:00:00:07 dst 198.51.100.7 dev flannel.1",
            "route 10.1.7.0/24 via 10.1.7.0 dev flannel.1 onlink",
            "route fd00:1:0:7::/64 via fd00:1:0:7:: dev flannel-v6.1 onlink",
        ]
    );
}

#[tokio::test]
async fn one_family_alone() {
    for (config, key, device) in [
        (r#"{"Network":"10.1.0.0/16"}"#, "10.1.7.0-24", "link flannel.1 mtu 1450 up"),
        (
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#,
            "0.0.0.0-0&fd00:1:0:7::-64",
            "link flannel-v6.1 mtu 1430 up",
        ),
    ] {
        let put = |_: &FakeKernel, subnets: &FakeSubnets| {
            let attrs =
                peer(["198.51.100.7", "2001:db8:7::7"], ["0a:00:00:00:00:07", "0a:00:00:00:06:07"]);
            subnets.put_attrs(key, attrs);
        };
        let objects = dump(config, put).await;
        assert_eq!(objects.len(), 5, "{objects:?}");
        assert_eq!(without_macs(&objects)[0], device);
    }
}

#[tokio::test]
async fn direct_routing_needs_no_tunnel_to_peers_on_the_link() {
    let config = r#"{
        "Network": "10.1.0.0/16",
        "Backend": {"Type": "vxlan", "DirectRouting": true, "VNI": 9, "MTU": 1400}
    }"#;
    let put = |_: &FakeKernel, subnets: &FakeSubnets| {
        for (key, public) in [("10.1.7.0-24", "198.51.100.7"), ("10.1.8.0-24", "192.0.2.8")] {
            let last = public.rsplit('.').next().unwrap();
            subnets.put_attrs(
                key,
                peer(
                    [public, "2001:db8::9"],
                    [&format!("0a:00:00:00:00:0{last}"), "0a:00:00:00:00:99"],
                ),
            );
        }
    };
    let objects = dump(config, put).await;
    assert!(objects[0].starts_with("link flannel.9 mtu 1350 "), "{objects:?}");
    assert_eq!(
        objects[2..],
        [
            "neigh 10.1.7.0 lladdr 0a:00:00:00:00:07 dev flannel.9",
            "fdb 0a:00:00:00:00:07 dst 198.51.100.7 dev flannel.9",
            "route 10.1.7.0/24 via 10.1.7.0 dev flannel.9 onlink",
            "route 10.1.8.0/24 via 192.0.2.8 dev eth0",
        ]
    );
}

fn both(attrs: &mut LeaseAttrs, data: &str) {
    attrs.preferred.data = Dual::from_fn(|_| Some(data.into()));
}

#[tokio::test]
async fn a_bad_peer_is_rejected_with_a_reason_and_affects_no_other() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(DUAL);
    let good = peer(["198.51.100.7", "2001:db8:7::7"], ["0a:00:00:00:00:07", "0a:00:00:00:06:07"]);
    let change = |edit: fn(&mut LeaseAttrs)| {
        let mut attrs =
            peer(["198.51.100.8", "2001:db8:7::8"], ["0a:00:00:00:00:08", "0a:00:00:00:06:08"]);
        edit(&mut attrs);
        attrs
    };
    let bad = [
        (
            change(|a| a.preferred.kind = "host-gw".into()),
            r#"its backend type is "host-gw", this node's is "vxlan""#,
        ),
        (change(|a| a.preferred.kind = "".into()), "its backend type is empty (udp or alloc)"),
        (change(|a| a.preferred.data = Dual::default()), "no public address with backend data"),
        (change(|a| a.preferred.public = Dual::default()), "no public address with backend data"),
        (change(|a| both(a, "[]")), "field BackendData: [] is not valid"),
        (change(|a| both(a, r#"{"VNI":1}"#)), "field BackendData.VtepMAC: nothing"),
        (change(|a| both(a, r#"{"VtepMAC":"ff:ff:ff:ff:ff:ff"}"#)), "ff:ff:ff:ff:ff:ff"),
    ];
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", good);
    for (n, (attrs, _)) in bad.iter().enumerate() {
        subnets
            .put_attrs(&format!("10.1.{}.0-24&fd00:1:0:{:x}::-64", n + 20, n + 20), attrs.clone());
    }
    let network = register(&kernel, &subnets).await.unwrap();
    let mut status = network.handle().status;
    let views = subnets.watch_leases().await.unwrap();
    tokio::select! {
        ended = network.run(views) => panic!("{ended:?}"),
        settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
    }
    assert_eq!(
        kernel.dump().len(),
        4 + 6,
        "only the objects of the valid peer: {:#?}",
        kernel.dump()
    );
    let status = status.borrow().clone();
    for (n, (_, says)) in bad.iter().enumerate() {
        let subnets = format!("10.1.{}.0-24&fd00:1:0:{:x}::-64", n + 20, n + 20).parse().unwrap();
        let why = status.rejected.get(&subnets).unwrap().to_string();
        assert!(why.contains(says), "{says}: {why}");
    }
}

#[tokio::test]
async fn one_bad_family_of_a_peer_leaves_the_other() {
    let objects = dump(DUAL, |_, subnets| {
        let mut attrs =
            peer(["198.51.100.7", "2001:db8:7::7"], ["0a:00:00:00:00:07", "0a:00:00:00:06:07"]);
        attrs.preferred.data.v6 = Some(r#"{"VtepMAC":"x"}"#.into());
        subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", attrs);
    });
    assert_eq!(objects.await[4..].len(), 3);
}

#[tokio::test]
async fn a_peer_that_published_one_family_is_reached_by_it() {
    let objects = dump(DUAL, |_, subnets| {
        let mut attrs =
            peer(["198.51.100.7", "2001:db8:7::7"], ["0a:00:00:00:00:07", "0a:00:00:00:06:07"]);
        attrs.preferred.public.v6 = None;
        attrs.preferred.data.v6 = None;
        subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", attrs);
    });
    assert_eq!(objects.await[4..].len(), 3);
}

fn device(name: &str, mac: MacAddr, vni: u32) -> Link {
    let vxlan =
        Vxlan { vni, port: 8472, mac, local: None, lower: None, learning: true, gbp: false };
    Link { name: name.parse().unwrap(), mtu: 1000, up: false, kind: vxlan.into() }
}

fn own_mac(attrs: &LeaseAttrs) -> String {
    attrs.preferred.data.v4.as_deref().unwrap().to_owned()
}

#[tokio::test]
async fn the_mac_is_the_published_the_existing_or_a_stable_one() {
    let config = r#"{"Network":"10.1.0.0/16"}"#;
    let mac = |n: u8| MacAddr([0x0a, 0, 0, 0, 0, n]);
    let lease_of = |kernel: FakeKernel, subnets: FakeSubnets| async move {
        own_mac(&register(&kernel, &subnets).await.unwrap().handle().lease.attrs)
    };
    let fresh = || (FakeKernel::with_uplink("eth0"), FakeSubnets::with_config(config));

    let (kernel, subnets) = fresh();
    let derived = lease_of(kernel, subnets).await;
    let (kernel, subnets) = fresh();
    assert_eq!(lease_of(kernel, subnets).await, derived, "the same machine, the same address");

    let (kernel, subnets) = fresh();
    kernel.foreign_put(device("flannel.1", mac(5), 1), 0);
    assert_eq!(
        lease_of(kernel.clone(), subnets.clone()).await,
        r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:05"}"#
    );

    let attrs = peer(["192.0.2.1", "2001:db8::1"], ["0a:00:00:00:00:06", "0a:00:00:00:00:07"]);
    subnets.set_hints(Hints::default().with_last_published(Some(attrs)));
    assert_eq!(
        lease_of(kernel.clone(), subnets.clone()).await,
        r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:06"}"#
    );

    let clone = peer(["192.0.2.9", "2001:db8::9"], ["0a:00:00:00:00:06", "0a:00:00:00:00:05"]);
    subnets.put_attrs("10.1.9.0-24", clone);
    assert_eq!(lease_of(kernel, subnets).await, derived, "another node uses both");
}

/// A lease that was edited by hand has the MAC address of this node. That one of its two addresses
/// is this node's too does not make it this node's lease.
#[tokio::test]
async fn a_mac_that_clashes_in_one_family_is_given_up() {
    let mac = |n: u8| MacAddr([0x0a, 0, 0, 0, 0, n]);
    let macs = ["0a:00:00:00:00:05", "0a:00:00:00:00:06"];
    for (public, kept) in [
        (["192.0.2.9", "2001:db8::1"], [false, true]),
        (["192.0.2.1", "2001:db8::9"], [true, false]),
        (["192.0.2.9", "2001:db8::9"], [false, false]),
        (["192.0.2.1", "2001:db8::1"], [true, true]),
    ] {
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(DUAL);
        kernel.foreign_put(device("flannel.1", mac(5), 1), 0);
        kernel.foreign_put(device("flannel-v6.1", mac(6), 1), 0);
        let last = peer(["192.0.2.1", "2001:db8::1"], macs);
        let previous = "10.1.5.0-24&fd00:1:0:5::-64".parse().ok();
        subnets.set_hints(Hints::default().with_last_published(Some(last)).with_previous(previous));
        subnets.put_attrs("10.1.9.0-24&fd00:1:0:9::-64", peer(public, macs));
        let attrs = register(&kernel, &subnets).await.unwrap().handle().lease.attrs.clone();
        let data = [attrs.preferred.data.v4.unwrap(), attrs.preferred.data.v6.unwrap()];
        let keeps = [0, 1].map(|n| data[n].contains(macs[n]));
        assert_eq!(keeps, kept, "{public:?}: {data:?}");
    }
}

/// Two nodes behind different gateways may have one private address. Peers see their others.
#[tokio::test]
async fn the_mac_of_a_new_device_names_the_address_that_peers_see() {
    let advertised = |texts: [Option<&str>; 2]| -> Dual<IpAddr> {
        texts.into_iter().flatten().map(|text| text.parse::<IpAddr>().unwrap()).collect()
    };
    let own = ["192.0.2.1", "2001:db8::1"];
    for texts in [
        [None, None],
        [Some("203.0.113.9"), None],
        [None, Some("2001:db8:9::9")],
        [Some("203.0.113.9"), Some("2001:db8:9::9")],
    ] {
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(DUAL);
        subnets.set_hints(Hints::default().with_advertised(advertised(texts)));
        // The other node with this private address.
        let named = own.map(|text| MacAddr::derived_from(text.parse().unwrap()).to_string());
        let other = peer(["203.0.113.7", "2001:db8:9::7"], [&named[0], &named[1]]);
        subnets.put_attrs("10.1.9.0-24&fd00:1:0:9::-64", other);
        let attrs = register(&kernel, &subnets).await.unwrap().handle().lease.attrs.clone();
        for (family, (text, own)) in Family::BOTH.into_iter().zip(texts.into_iter().zip(own)) {
            let expected = MacAddr::derived_from(text.unwrap_or(own).parse().unwrap()).to_string();
            let data = attrs.preferred.data[family].as_deref().unwrap();
            assert!(data.contains(&expected), "{texts:?} {family}: {data}");
        }
        assert_eq!(attrs.preferred.public, advertised(own.map(Some)), "as the node knows it");
    }
}

#[tokio::test]
async fn an_existing_device_is_replaced_only_if_necessary() {
    let config = r#"{"Network":"10.1.0.0/16"}"#;
    for vni in [1, 2] {
        let objects = dump(config, |kernel, _| {
            kernel.foreign_put(device("flannel.1", MacAddr([0x0a, 0, 0, 0, 0, 5]), vni), 0);
        });
        let expected = "link flannel.1 mtu 1450 up address 0a:00:00:00:00:05 type vxlan id 1 \
            dstport 8472 local 192.0.2.1 dev eth0 nolearning";
        assert_eq!(objects.await[0], expected);
    }
}

#[tokio::test]
async fn an_unsuitable_config_is_refused_with_the_reason() {
    let kernel = FakeKernel::with_uplink("eth0");
    for (config, says) in [
        (r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","VNI":0}}"#, "Backend.VNI"),
        (
            r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","MTU":100}}"#,
            "Backend.MTU 100 is too small for IPv4: at least 118",
        ),
        (
            r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
                "Backend":{"Type":"vxlan","MTU":1349}}"#,
            "Backend.MTU 1349 is too small for IPv6: at least 1350",
        ),
        (
            r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
                "Backend":{"Type":"vxlan","VNI":10000}}"#,
            "flannel-v6.10000 is too long",
        ),
    ] {
        let subnets = FakeSubnets::with_config(config);
        let error = register(&kernel, &subnets).await.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        // `validate` returns the same error, also without a node if only the config is wrong.
        let config = Config::parse(config).unwrap();
        let iface = host(&kernel, &subnets).uplink;
        assert_eq!(VxlanBackend.validate(&config, Some(&iface)).unwrap_err().to_string(), error);
        let anywhere = VxlanBackend.validate(&config, None).map_err(|error| error.to_string());
        assert_eq!(anywhere, Err(error));
    }
    let subnets = FakeSubnets::with_config(DUAL);
    let mut host = host(&kernel, &subnets);
    let config = Config::parse(DUAL).unwrap();
    let small = host.uplink.clone().with_mtu(1349);
    let error = VxlanBackend.validate(&config, Some(&small)).unwrap_err().to_string();
    assert!(
        error.contains("the interface's MTU 1349 is too small for IPv6: at least 1350"),
        "{error}"
    );
    for iface in [&small.with_mtu(1350), &host.uplink] {
        VxlanBackend.validate(&config, Some(iface)).unwrap();
    }
    host.uplink.address.v6 = None;
    let config = subnets.network_config().await.unwrap();
    let error =
        host.join(&VxlanBackend, &config, JoinOptions::default()).await.unwrap_err().to_string();
    assert!(error.contains("eth0 has no IPv6 address"), "{error}");
    assert!(
        kernel.state().iter().all(|object| !matches!(object, Object::Link(_))),
        "no object was written"
    );
}
