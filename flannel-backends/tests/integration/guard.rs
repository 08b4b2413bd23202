//! The guard of a tunnel follows the config and the accepted peers, on the fake kernel, with the
//! table of a namespace.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::RecordKeeper;
use flannel_core::lease::{LeaseAttrs, Origin, View};
use flannel_core::status::Status;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Config, Network, SubnetManager};
use flannel_firewall::Guard;
use flannel_netlink::testing::in_netns_async;
use flannel_route::{Host, JoinOptions};
use tokio::sync::watch;

const PATIENCE: Duration = Duration::from_secs(20);

fn addresses(n: u8) -> Dual<IpAddr> {
    let v6 = format!("2001:db8::{n}").parse::<IpAddr>().unwrap();
    [IpAddr::from([192, 0, 2, n]), v6].into_iter().collect()
}

fn config(backend: &str) -> String {
    let v6 = if backend.contains("ipip") {
        ""
    } else {
        r#""EnableIPv6":true,"IPv6Network":"fd00:1::/48","#
    };
    format!(r#"{{"Network":"10.1.0.0/16",{v6}"Backend":{backend}}}"#)
}

/// The lease of a peer with this public address.
fn peer(kind: &str, n: u8) -> LeaseAttrs {
    let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{n:02x}"}}"#);
    let data = match kind {
        "vxlan" => format!(r#","BackendData":{data},"BackendV6Data":{data}"#),
        _ => String::new(),
    };
    let text = format!(
        r#"{{"PublicIP":"192.0.2.{n}","PublicIPv6":"2001:db8::{n}","BackendType":"{kind}"{data}}}"#
    );
    LeaseAttrs::from_json(&text).unwrap()
}

fn host(subnets: &FakeSubnets) -> Host {
    let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, addresses(1))
        .with_reason("it has the default route");
    let kernel = FakeKernel::with_uplink("eth0");
    Host::new(uplink, Arc::new(kernel), Arc::new(subnets.clone()))
}

/// A network of vxlan with `SourceCheck`, in a cluster with one peer.
async fn vxlan_with_a_peer() -> (FakeSubnets, Box<dyn Network>) {
    let subnets = FakeSubnets::with_config(&config(r#"{"Type":"vxlan","SourceCheck":true}"#));
    let config = subnets.network_config().await.unwrap();
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer("vxlan", 7));
    let backends = flannel_backends::all();
    let backend = backends.find("vxlan").unwrap();
    let network =
        host(&subnets).join(&**backend, &config, JoinOptions::default()).await.unwrap().network;
    (subnets, network)
}

/// The records of a guard, sorted.
fn records(name: &'static str) -> Vec<String> {
    let records = Guard::new(name).records().unwrap();
    let mut texts: Vec<_> =
        records.iter().map(|it| format!("{} {}", it.subnet, it.data())).collect();
    texts.sort();
    texts
}

/// Waits until the guard has these records.
async fn until(name: &'static str, expected: &[&str]) {
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    let wait = async {
        while records(name) != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(PATIENCE, wait).await;
    assert!(waited.is_ok(), "{:#?}\n{expected:#?}", records(name));
}

#[test]
fn the_guard_of_vxlan_follows_the_peers() {
    in_netns_async(|| async {
        let (subnets, network) = vxlan_with_a_peer().await;
        let views = subnets.watch_leases().await.unwrap();
        let ends = [
            "192.0.2.1/32 drops strangers at UDP port 8472 for flannel.1",
            "2001:db8::1/128 drops strangers at UDP port 8472 for flannel-v6.1",
        ];
        let steps = async {
            let with = |peers: &[&'static str]| [&ends[..], peers].concat();
            let seven = ["10.1.7.0/24 from 192.0.2.7", "fd00:1:0:7::/64 from 2001:db8::7"];
            until("guard-vxlan", &with(&seven)).await;
            // A peer comes. It has no IPv6 address.
            let mut eight = peer("vxlan", 8);
            eight.preferred.public.v6 = None;
            subnets.put_attrs("10.1.8.0-24&fd00:1:0:8::-64", eight);
            let both = [&seven[..], &["10.1.8.0/24 from 192.0.2.8"]].concat();
            until("guard-vxlan", &with(&both)).await;
            // Leases of other backends are not accepted.
            subnets.put_attrs("10.1.9.0-24&fd00:1:0:9::-64", peer("host-gw", 9));
            // A peer gets another address.
            subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer("vxlan", 77));
            let moved = [
                "10.1.7.0/24 from 192.0.2.77",
                "10.1.8.0/24 from 192.0.2.8",
                "fd00:1:0:7::/64 from 2001:db8::77",
            ];
            until("guard-vxlan", &with(&moved)).await;
            subnets.delete("10.1.7.0-24&fd00:1:0:7::-64");
            subnets.delete("10.1.8.0-24&fd00:1:0:8::-64");
            until("guard-vxlan", &ends).await;
        };
        tokio::select! {
            ended = network.run(views) => panic!("{ended:?}"),
            () = steps => {}
        }
    });
}

/// A guard without all peers would cut some off. The leases of the cache are not all.
#[test]
fn a_guard_refuses_nothing_before_the_leases_are_complete() {
    in_netns_async(|| async {
        let (subnets, network) = vxlan_with_a_peer().await;
        let live = subnets.watch_leases().await.unwrap().borrow().clone();
        let cached = View { origin: Origin::Cached { written: None }, ..live.clone() };
        let (sender, views) = watch::channel(cached);
        let mut status = network.handle().status;
        let steps = async {
            let peers = ["10.1.7.0/24 from 192.0.2.7", "fd00:1:0:7::/64 from 2001:db8::7"];
            until("guard-vxlan", &peers).await;
            let is_done = |status: &Arc<Status>| status.settled && status.own_in_place;
            status.wait_for(is_done).await.unwrap();
            assert_eq!(records("guard-vxlan"), peers);
            sender.send(live).unwrap();
            status.wait_for(|status| status.in_sync).await.unwrap();
            assert_eq!(records("guard-vxlan").len(), 4);
        };
        tokio::select! {
            ended = network.run(views) => panic!("{ended:?}"),
            () = steps => {}
        }
    });
}

/// What the option does, and what each backend does without it.
#[test]
fn the_option_decides_about_the_guard() {
    in_netns_async(|| async {
        let v4 = |verb: &str, transport: &str, device: &str| {
            format!("192.0.2.1/32 {verb} strangers at {transport}{device}")
        };
        let udp = "UDP port 8472";
        let ipip = "IP protocol 4";
        for (backend, name, expected) in [
            (r#"{"Type":"vxlan"}"#, "guard-vxlan", None),
            (
                r#"{"Type":"vxlan","SourceCheck":true}"#,
                "guard-vxlan",
                Some(v4("drops", udp, " for flannel.1")),
            ),
            (
                r#"{"Type":"vxlan","SourceCheck":"count"}"#,
                "guard-vxlan",
                Some(v4("counts", udp, " for flannel.1")),
            ),
            (r#"{"Type":"vxlan","SourceCheck":false}"#, "guard-vxlan", None),
            (r#"{"Type":"ipip"}"#, "guard-ipip", Some(v4("drops", ipip, " for flannel.ipip"))),
            (
                r#"{"Type":"ipip","SourceCheck":"count"}"#,
                "guard-ipip",
                Some(v4("counts", ipip, " for flannel.ipip")),
            ),
            (r#"{"Type":"ipip","SourceCheck":false}"#, "guard-ipip", None),
        ] {
            let subnets = FakeSubnets::with_config(&config(backend));
            let config = subnets.network_config().await.unwrap();
            let backends = flannel_backends::all();
            let backend = backends.find(&config.backend.kind).unwrap();
            let host = host(&subnets);
            let network =
                host.join(&**backend, &config, JoinOptions::default()).await.unwrap().network;
            let views = subnets.watch_leases().await.unwrap();
            let mut status = network.handle().status;
            tokio::select! {
                ended = network.run(views) => panic!("{ended:?}"),
                settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
            }
            let of_v4 = |text: &String| text.starts_with("192.0.2.1/32");
            let found = records(name).into_iter().find(of_v4);
            assert_eq!(found, expected, "{:?}", config.backend.options);
        }
    });
}

#[test]
fn values_that_the_option_does_not_have_are_refused() {
    let backends = flannel_backends::all();
    for kind in ["vxlan", "ipip", "udp"] {
        let text = config(&format!(r#"{{"Type":"{kind}","SourceCheck":"yes"}}"#));
        let config = Config::parse(&text).unwrap();
        let error = backends.find(kind).unwrap().validate(&config, None).unwrap_err().to_string();
        let expected =
            r#"Backend.SourceCheck: "yes" is not valid, expected true, false or "count""#;
        assert!(error.contains(expected), "{error}");
    }
}

/// The node's option changes the default of the tunnel without ports, and nothing else.
#[test]
fn a_node_can_switch_the_default_of_ipip_off() {
    in_netns_async(|| async {
        let backends = flannel_backends::with_ipip_check_off(flannel_backends::all());
        for (option, expected) in [("", false), (r#","SourceCheck":true"#, true)] {
            let text = config(&format!(r#"{{"Type":"ipip"{option}}}"#));
            let subnets = FakeSubnets::with_config(&text);
            let config = subnets.network_config().await.unwrap();
            let backend = backends.find("ipip").unwrap();
            let host = host(&subnets);
            let network =
                host.join(&**backend, &config, JoinOptions::default()).await.unwrap().network;
            let views = subnets.watch_leases().await.unwrap();
            let mut status = network.handle().status;
            tokio::select! {
                ended = network.run(views) => panic!("{ended:?}"),
                settled = status.wait_for(|status| status.in_sync) => drop(settled.unwrap()),
            }
            assert_eq!(!records("guard-ipip").is_empty(), expected, "{text}");
        }
    });
}

/// The extension replaces the mark by which the guard knows the sender.
#[test]
fn group_based_policy_excludes_the_guard() {
    let validate = |backend: &str| {
        let config = Config::parse(&config(backend)).unwrap();
        let backends = flannel_backends::all();
        backends.find("vxlan").unwrap().validate(&config, None).map_err(|error| error.to_string())
    };
    for check in ["true", r#""count""#] {
        let backend = format!(r#"{{"Type":"vxlan","GBP":true,"SourceCheck":{check}}}"#);
        let error = validate(&backend).unwrap_err();
        assert!(error.contains("SourceCheck cannot be used with GBP"), "{error}");
        validate(&backend.replace(r#""GBP":true"#, r#""GBP":false"#)).unwrap();
    }
    validate(r#"{"Type":"vxlan","GBP":true}"#).unwrap();
    validate(r#"{"Type":"vxlan","GBP":true,"SourceCheck":false}"#).unwrap();
}
