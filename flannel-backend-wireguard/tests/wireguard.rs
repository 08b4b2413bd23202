//! The wireguard backend on the fake kernel: its objects for different leases.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::net::IpAddr;
use std::sync::Arc;

use flannel_backend_wireguard::{SECRET, WireguardBackend};
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{ExternalInterface, MemorySecrets, Secrets, Transport};
use flannel_core::lease::{LeaseAttrs, Offer, Origin};
use flannel_core::object::Secret;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Config, SubnetManager};
use flannel_route::{Host, JoinOptions};

/// RFC 7748, section 6.1.
const PRIVATE: &str = "dwdtCnMYpX08FsFyUbJmRd9ML4frwJkqsXf7pR25LCo=";
const PUBLIC: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";

fn config(backend: &str, families: &str) -> String {
    format!(
        r#"{{"Network":"10.1.0.0/16","IPv6Network":"fd00:1::/48",{families},"Backend":{{
            "Type":"wireguard"{backend}}}}}"#
    )
}

const V4: &str = r#""EnableIPv6":false"#;
const V6: &str = r#""EnableIPv4":false,"EnableIPv6":true"#;
const BOTH: &str = r#""EnableIPv6":true"#;

fn addresses(all: &[&str]) -> Dual<IpAddr> {
    all.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect()
}

fn uplink() -> ExternalInterface {
    ExternalInterface::new("eth0".parse().unwrap(), 1500, addresses(&["192.0.2.1", "2001:db8::1"]))
        .with_public(addresses(&["198.51.100.1", "2001:db8::1"]))
        .with_reason("it has the default route")
}

async fn host(kernel: &FakeKernel, subnets: &FakeSubnets) -> Host {
    let secrets = MemorySecrets::default();
    secrets.get_or_create(SECRET, &|| Ok(Secret::new(PRIVATE.as_bytes()))).await.unwrap();
    Host::new(uplink(), Arc::new(kernel.clone()), Arc::new(subnets.clone()))
        .with_secrets(Arc::new(secrets))
}

/// A lease as Go flannel writes it.
fn without_signatures(lease: &str) -> String {
    let mut parts = lease.split(r#","Signature":""#);
    let mut text = parts.next().unwrap().to_owned();
    // 64 bytes as base64, and a quotation mark.
    parts.for_each(|part| text.push_str(&part[89..]));
    text
}

/// A lease of another node.
fn peer(key: &str, public: &[&str]) -> LeaseAttrs {
    let data = |port| Some(format!(r#"{{"PublicKey":"{key}","Port":{port}}}"#).into());
    let data = Dual { v4: data(51820), v6: data(51821) };
    LeaseAttrs::from(Offer::new(addresses(public)).with_kind("wireguard").with_data(data))
}

const KEYS: [&str; 2] = [
    "BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=",
    "CAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg=",
];

/// The lease of this node as JSON, and its objects when the leases in `subnets` are in place.
async fn run(kernel: &FakeKernel, subnets: &FakeSubnets) -> (String, Vec<String>, Vec<String>) {
    run_host(&host(kernel, subnets).await, kernel, subnets).await
}

async fn run_host(
    host: &Host,
    kernel: &FakeKernel,
    subnets: &FakeSubnets,
) -> (String, Vec<String>, Vec<String>) {
    let config = subnets.network_config().await.unwrap();
    let network =
        host.join(&WireguardBackend, &config, JoinOptions::default()).await.unwrap().network;
    let handle = network.handle();
    let mut status = handle.status.clone();
    let views = subnets.watch_leases().await.unwrap();
    let status = tokio::select! {
        ended = network.run(views) => panic!("{ended:?}"),
        settled = status.wait_for(|status| status.in_sync) => settled.unwrap().clone(),
    };
    let objects = kernel.dump();
    let rejected = status.rejected.iter().map(|(at, why)| format!("{at}: {why}")).collect();
    (handle.lease.attrs.to_json(), objects, rejected)
}

#[tokio::test]
async fn one_route_and_a_peer_for_each_node() {
    let text = config(r#","PSK":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=""#, V4);
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&text);
    subnets.put_attrs("10.1.7.0-24", peer(KEYS[0], &["192.0.2.7"]));
    subnets.put_attrs("10.1.8.0-24", peer(KEYS[1], &["203.0.113.8"]));
    // With the key of an earlier lease, and with the key of this node.
    subnets.put_attrs("10.1.9.0-24", peer(KEYS[0], &["192.0.2.9"]));
    subnets.put_attrs("10.1.10.0-24", peer(PUBLIC, &["192.0.2.10"]));
    let (lease, objects, rejected) = run(&kernel, &subnets).await;
    assert!(lease.contains("Signature"), "{lease}");
    assert_eq!(
        without_signatures(&lease),
        [
            r#"{"PublicIP":"198.51.100.1","PublicIPv6":"2001:db8::1","BackendType":"wireguard","#,
            &format!(r#""BackendData":{{"PublicKey":"{PUBLIC}","Port":51820}}}}"#),
        ]
        .concat(),
        "as Go flannel writes it"
    );
    let own = &objects[1];
    assert!(own.starts_with("address 10.1.") && own.ends_with(".0/32 dev flannel-wg"), "{own}");
    let [first, second] = KEYS;
    assert_eq!(
        [&objects[..1], &objects[2..]].concat(),
        [
            "link flannel-wg mtu 1440 up type wireguard listen-port 51820 private-key (secret)",
            &format!(
                "peer {first} endpoint 192.0.2.7:51820 allowed-ips 10.1.7.0/24 preshared-key \
                 (secret) dev flannel-wg"
            ),
            &format!(
                "peer {second} endpoint 203.0.113.8:51820 allowed-ips 10.1.8.0/24 preshared-key \
                 (secret) dev flannel-wg"
            ),
            "route 10.1.0.0/16 dev flannel-wg scope link",
        ]
    );
    let [of_other, of_own] = &rejected[..] else { panic!("{rejected:?}") };
    assert!(of_other.contains("10.1.7.0-24") && of_other.contains(first), "{of_other}");
    assert!(of_own.starts_with("10.1.10.0-24") && of_own.contains(PUBLIC), "{of_own}");
}

#[tokio::test]
async fn each_family_has_a_tunnel_or_both_share_one() {
    for (backend, families, links, routes) in [
        ("", BOTH, vec!["flannel-wg mtu 1440", "flannel-wg-v6 mtu 1420"], vec!["", "-v6"]),
        (r#","MTU":1400"#, V6, vec!["flannel-wg-v6 mtu 1320"], vec!["-v6"]),
        (r#","Mode":"auto""#, BOTH, vec!["flannel-wg mtu 1420"], vec!["", ""]),
        (r#","Mode":"ipv4""#, BOTH, vec!["flannel-wg mtu 1440"], vec!["", ""]),
        (r#","Mode":"ipv6""#, V6, vec!["flannel-wg mtu 1420"], vec![""]),
    ] {
        let text = config(backend, families);
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(&text);
        let (lease, objects, _) = run(&kernel, &subnets).await;
        let start = |kind: &str| -> Vec<&String> {
            objects.iter().filter(|object| object.starts_with(kind)).collect()
        };
        for (link, expected) in start("link").into_iter().zip(&links) {
            assert!(link.starts_with(&format!("link {expected} up")), "{text}: {link}");
        }
        assert_eq!(start("link").len(), links.len(), "{text}: {objects:?}");
        for (route, expected) in start("route").into_iter().zip(&routes) {
            let device = format!(" dev flannel-wg{expected} scope link");
            assert!(route.ends_with(&device), "{text}: {route}");
        }
        assert_eq!(start("route").len(), routes.len(), "{text}: {objects:?}");
        assert_eq!(start("address").len(), routes.len(), "{text}: {objects:?}");
        let port_v6 = if backend.contains("Mode") { 51820 } else { 51821 };
        let v6 = format!(r#""BackendV6Data":{{"PublicKey":"{PUBLIC}","Port":{port_v6}}}"#);
        assert_eq!(without_signatures(&lease).contains(&v6), families != V4, "{text}: {lease}");
    }
}

#[test]
fn configs_that_cannot_work_are_refused() {
    let uplink = uplink();
    for (backend, families, reason) in [
        (r#","ListenPortV6":51820"#, BOTH, "Backend.ListenPortV6 51820: expected another port"),
        (r#","MTU":1300"#, BOTH, "Backend.MTU 1300 is too small for IPv6: at least 1360"),
        (r#","PSK":"short""#, V4, "Backend.PSK: (not shown) is not valid"),
    ] {
        let config = Config::parse(&config(backend, families)).unwrap();
        let error = WireguardBackend.validate(&config, Some(&uplink)).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let only_v4 = uplink.with_address(addresses(&["192.0.2.1"]));
    for (backend, families) in [("", BOTH), (r#","Mode":"ipv6""#, V4)] {
        let config = Config::parse(&config(backend, families)).unwrap();
        let error = WireguardBackend.validate(&config, Some(&only_v4)).unwrap_err().to_string();
        assert!(error.contains("eth0 has no IPv6 address"), "{error}");
    }
    let auto = Config::parse(&config(r#","Mode":"auto""#, BOTH)).unwrap();
    WireguardBackend.validate(&auto, Some(&only_v4)).unwrap();
}

#[test]
fn the_datapath_is_encrypted() {
    let both = Config::parse(&config("", BOTH)).unwrap();
    let datapath = WireguardBackend.datapath(&both).unwrap();
    assert!(datapath.encrypted.len() == 2 && !datapath.bare);
    assert_eq!(datapath.transports, [Transport::Udp(51820), Transport::Udp(51821)]);
    let outer = [(Transport::Udp(51820), Family::V4), (Transport::Udp(51821), Family::V6)];
    assert_eq!(datapath.outer, outer.into());
    let auto = Config::parse(&config(r#","Mode":"auto""#, BOTH)).unwrap();
    let datapath = WireguardBackend.datapath(&auto).unwrap();
    assert_eq!(datapath.transports, [Transport::Udp(51820)]);
    assert_eq!(datapath.devices.v4, datapath.devices.v6);
}

#[tokio::test]
async fn a_shared_key_in_a_file_is_read_at_the_start() {
    let text = config(r#","PSKFile":"/nonexistent/psk""#, V4);
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&text);
    let config = subnets.network_config().await.unwrap();
    let host = host(&kernel, &subnets).await;
    let joined = host.join(&WireguardBackend, &config, JoinOptions::default()).await;
    let error = joined.unwrap_err().to_string();
    assert!(error.contains("Backend.PSKFile: /nonexistent/psk: No such file"), "{error}");
}

/// A node signs the subnets of its lease with its key. So its lease is accepted beside an older one
/// with the same key, with or without a copy of the signature. Go flannel signs nothing: there the
/// age decides.
#[tokio::test]
async fn an_older_lease_cannot_take_the_key_of_another_node() {
    let text = config("", V4);
    let with_other_subnets = text.replacen('{', r#"{"SubnetMin":"10.1.7.0","#, 1);
    let victim = FakeSubnets::with_config(&with_other_subnets);
    let network_config = victim.network_config().await.unwrap();
    let host = host(&FakeKernel::with_uplink("eth0"), &victim).await;
    let joined = host.join(&WireguardBackend, &network_config, JoinOptions::default()).await;
    let signed = joined.unwrap().network.handle().lease;
    let unsigned = LeaseAttrs::from_json(&without_signatures(&signed.attrs.to_json())).unwrap();
    let signature_of_victim = signed.attrs.preferred.data.clone();
    let stolen = peer(PUBLIC, &["192.0.2.66"]);
    let mut copied = stolen.clone();
    copied.preferred.data = signature_of_victim;
    for (thief, victim, is_victim_accepted) in [
        (&stolen, &signed.attrs, true),
        (&copied, &signed.attrs, true),
        (&stolen, &unsigned, false),
    ] {
        for thief_comes_first in [true, false] {
            let kernel = FakeKernel::with_uplink("eth0");
            let subnets = FakeSubnets::with_config(&text);
            subnets.put_attrs("10.1.66.0-24", peer(KEYS[0], &["192.0.2.66"]));
            let steal = || subnets.put_attrs("10.1.66.0-24", thief.clone());
            if thief_comes_first {
                steal();
            }
            subnets.put_attrs(&signed.subnets.to_string(), victim.clone());
            if !thief_comes_first {
                steal();
            }
            let viewer = Host::new(
                uplink().with_public(addresses(&["192.0.2.1", "2001:db8::1"])),
                Arc::new(kernel.clone()),
                Arc::new(subnets.clone()),
            );
            let (_, objects, rejected) = run_host(&viewer, &kernel, &subnets).await;
            let [rejected] = &rejected[..] else { panic!("{rejected:?}") };
            let peers: Vec<_> = objects.iter().filter(|line| line.starts_with("peer")).collect();
            let [peer] = peers[..] else { panic!("{objects:?}") };
            if is_victim_accepted {
                assert!(rejected.starts_with("10.1.66.0-24"), "{rejected}");
                assert!(rejected.contains("which proves it"), "{rejected}");
                assert!(peer.contains("endpoint 198.51.100.1:51820"), "{peer}");
            } else {
                assert!(rejected.starts_with(&signed.subnets.to_string()), "{rejected}");
                assert!(peer.contains("endpoint 192.0.2.66:51820"), "{peer}");
            }
        }
    }
}

/// A node whose lease has the subnets that it expects writes its lease once, and signed.
#[tokio::test]
async fn a_lease_is_signed_when_it_is_written_again() {
    let text = config("", V4);
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&text);
    let (first, ..) = run(&kernel, &subnets).await;
    let mut views = subnets.watch_leases().await.unwrap();
    let own = views.borrow().leases.iter().next().unwrap().subnets;
    let before = views.borrow_and_update().origin;
    let config = subnets.network_config().await.unwrap();
    let options = JoinOptions::default().with_previous(Some(own));
    let joined = host(&kernel, &subnets).await.join(&WireguardBackend, &config, options).await;
    assert_eq!(joined.unwrap().network.handle().lease.attrs.to_json(), first);
    let writes = |origin: &Origin| match origin {
        Origin::Live { revision } => revision.0,
        other => panic!("{other:?}"),
    };
    assert_eq!(writes(&views.borrow().origin), writes(&before) + 1);
}

/// A lease that lacks only the signature has the same key, so it need not wait for the kernel.
#[tokio::test]
async fn a_lease_without_a_signature_is_signed_at_once() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&config("", V4));
    let config = subnets.network_config().await.unwrap();
    let host = host(&kernel, &subnets).await;
    let join = async |published: Option<LeaseAttrs>, previous: Option<&str>| {
        let previous = previous.map(|text| text.parse().unwrap());
        let options = JoinOptions::default().with_published(published).with_previous(previous);
        let joined = host.join(&WireguardBackend, &config, options).await.unwrap();
        (joined.withholds_offers, joined.network.handle().lease)
    };
    let (_, signed) = join(None, None).await;
    let unsigned = LeaseAttrs::from_json(&without_signatures(&signed.attrs.to_json())).unwrap();
    let own = signed.subnets.to_string();
    // An earlier version, or Go flannel, wrote the lease. Or the lease had other subnets before.
    for (published, previous) in [
        (unsigned.clone(), Some(&own[..])),
        (unsigned, None),
        (signed.attrs.clone(), Some(&own)),
        (signed.attrs.clone(), None),
    ] {
        let (withholds, lease) = join(Some(published), previous).await;
        assert!(!withholds);
        assert_eq!(lease.attrs, signed.attrs);
    }
}

/// An operator writes the lease, for example with the fields in another order. The daemon would
/// build its network again and again if its own offer differed.
#[tokio::test]
async fn a_lease_that_an_operator_writes_is_used_as_it_is() {
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&config("", V4));
    let network_config = subnets.network_config().await.unwrap();
    let mut written = peer(PUBLIC, &["198.51.100.1", "2001:db8::1"]);
    written.preferred.data.v4 = Some(format!(r#"{{"Port":51820,"PublicKey":"{PUBLIC}"}}"#).into());
    subnets.assign(written.clone());
    let host = host(&kernel, &subnets).await;
    let options = JoinOptions::default();
    let joined = host.join(&WireguardBackend, &network_config, options).await.unwrap();
    assert!(!joined.withholds_offers);
    assert_eq!(joined.network.handle().lease.attrs, written);
}

/// Peers that use the new key too early cannot reach this node.
#[tokio::test]
async fn another_key_is_in_the_kernel_before_it_is_published() {
    let text = config("", V4);
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&text);
    let config = subnets.network_config().await.unwrap();
    let host = host(&kernel, &subnets).await;
    let old = peer(KEYS[0], &["198.51.100.1", "2001:db8::1"]);
    let mut old = LeaseAttrs { others: [].into(), ..old };
    old.preferred.data.v6 = None;
    let join = async |published: Option<LeaseAttrs>| {
        let options = JoinOptions::default().with_published(published);
        host.join(&WireguardBackend, &config, options).await.unwrap()
    };
    let joined = join(Some(old.clone())).await;
    assert!(joined.withholds_offers);
    assert_eq!(joined.network.handle().lease.attrs, old);
    let again = join(None).await;
    let new = again.network.handle().lease.attrs;
    assert!(!again.withholds_offers && new.to_json().contains(PUBLIC), "{new:?}");
    // Equal offers, and offers of another backend, are published at once.
    assert!(!join(Some(new)).await.withholds_offers);
    old.preferred.kind = "vxlan".into();
    assert!(!join(Some(old)).await.withholds_offers);
}

/// Every node of a cluster writes leases.
#[tokio::test]
async fn hostile_leases_are_rejected_with_the_reason_and_change_nothing() {
    let text = config("", V4);
    let kernel = FakeKernel::with_uplink("eth0");
    let subnets = FakeSubnets::with_config(&text);
    subnets.put_attrs("10.1.7.0-24", peer(KEYS[0], &["192.0.2.7"]));
    let before = run(&kernel, &subnets).await.1;
    let with = |data: &str| {
        let data = Dual { v4: Some(data.into()), v6: None };
        let public = addresses(&["192.0.2.50"]);
        LeaseAttrs::from(Offer::new(public).with_kind("wireguard").with_data(data))
    };
    let [first, second] = KEYS;
    let hostile = [
        ("10.2.1.0-24", peer(second, &["192.0.2.50"]), "outside the pod network 10.1.0.0/16"),
        ("10.1.7.128-25", peer(second, &["192.0.2.50"]), "overlaps the earlier lease 10.1.7.0-24"),
        ("10.1.20.0-24", peer(second, &["127.0.0.1"]), "127.0.0.1 is not a unicast host address"),
        ("10.1.21.0-24", peer(second, &["224.0.0.1"]), "224.0.0.1 is not a unicast host address"),
        ("10.1.22.0-24", peer(second, &["10.1.22.9"]), "10.1.22.9 lies inside its own subnet"),
        ("10.1.23.0-24", peer(second, &["192.0.2.1"]), "192.0.2.1 is this node's own"),
        ("10.1.24.0-24", peer(first, &["192.0.2.50"]), "10.1.7.0-24"),
        ("10.1.25.0-24", peer(PUBLIC, &["192.0.2.50"]), "is this node's own"),
        ("10.1.26.0-24", with(r#"{"PublicKey":"short"}"#), "BackendData.PublicKey"),
        ("10.1.27.0-24", with(r#"{"PublicKey":"x\u001b[2J"}"#), "BackendData.PublicKey"),
        ("10.1.28.0-24", with("[]"), "BackendData"),
        ("10.1.29.0-24", LeaseAttrs::default(), "its backend type is empty (udp or alloc)"),
    ];
    for (key, attrs, _) in &hostile {
        subnets.put_attrs(key, attrs.clone());
    }
    let (_, after, rejected) = run(&kernel, &subnets).await;
    assert_eq!(after, before);
    for (key, _, says) in &hostile {
        let why = rejected.iter().find(|line| line.starts_with(key)).unwrap();
        assert!(why.contains(says), "{key}: {why}");
    }
    assert_eq!(rejected.len(), hostile.len(), "{rejected:?}");
}
