//! The property that a hostile lease costs others nothing. The fuzz target and a test of
//! flannel-route use it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::address::Dual;
use flannel_core::backend::{Env, Reach};
use flannel_core::json::Fields;
use flannel_core::lease::{LARGEST_VALUE, LeaseAttrs, MOST_OFFERS, Offer, Revision};
use flannel_core::object::{
    Fdb, Key, MacAddr, Neigh, Object, Peer, PeerAttributes, PublicKey, Route, Via,
};
use flannel_core::status::Rejection;
use flannel_core::{Lease, Subnet, Subnets};
use flannel_route::admission::{Admission, AdmissionRules, BackendPlan};

/// The number of other nodes. Node `n` has the `n`th subnet.
const NODES: u8 = 20;
/// The subnets of the hostile node: none of another node's, and one of another node's.
const HOSTILE: [&str; 2] = ["10.1.200.0-24", "10.1.7.0-25"];

/// As the plan of `vxlan`: a neighbour, a forwarding entry and a route.
fn vxlan(
    subnets: &Subnets,
    offer: &Offer,
    _: &Env<'_>,
    out: &mut Vec<Object>,
) -> Result<(), Rejection> {
    let link = "flannel.1".parse().expect("a name");
    let wrong = |what: &str| Rejection::Rejected(what.into());
    for end in offer.endpoints(subnets) {
        let dst = end.public.ok_or_else(|| wrong("no public address"))?;
        let fields = Fields::parse(end.data.unwrap_or_default(), "BackendData")?;
        let mac: Option<MacAddr> = fields.parsed("VtepMAC", "a MAC address")?;
        let mac = mac.filter(MacAddr::is_unicast).ok_or_else(|| wrong("no MAC address"))?;
        let gateway = end.subnet.base();
        out.push(Neigh { link, address: gateway, mac }.into());
        out.push(Fdb { link, mac, dst }.into());
        let via = Via::Gateway { gateway, link, onlink: true };
        out.push(Route { dst: end.subnet, via, mtu: None }.into());
    }
    Ok(())
}

/// As the plan of `wireguard`: a peer.
fn wireguard(
    subnets: &Subnets,
    offer: &Offer,
    _: &Env<'_>,
    out: &mut Vec<Object>,
) -> Result<(), Rejection> {
    let link = "flannel-wg".parse().expect("a name");
    let wrong = |what: &str| Rejection::Rejected(what.into());
    let fields = Fields::parse(offer.data.v4.as_deref().unwrap_or_default(), "BackendData")?;
    let key: Option<PublicKey> = fields.parsed("PublicKey", "a key")?;
    let key = key.ok_or_else(|| wrong("no key"))?;
    let address = offer.public.v4.ok_or_else(|| wrong("no public address"))?;
    let allowed = subnets.iter().collect();
    let endpoint = (address, 51820).into();
    let attributes = PeerAttributes { endpoint, allowed, psk: None, keepalive: 0 };
    out.push(Peer { link, key, attributes: Box::new(attributes) }.into());
    Ok(())
}

/// As the proof of `vxlan`: the MAC address is derived from the public address.
fn is_derived(_: &Subnets, _: &Offer, object: &Object) -> bool {
    matches!(object, Object::Fdb(entry) if entry.is_derived())
}

/// As the proof of `wireguard`: the offer has a signature of the subnets by the key.
fn is_signed(subnets: &Subnets, offer: &Offer, object: &Object) -> bool {
    let Object::Peer(Peer { key, .. }) = object else { return false };
    let data = offer.data.v4.as_deref().unwrap_or_default();
    let Ok(fields) = Fields::parse(data, "BackendData") else { return false };
    let signed: Option<String> = fields.take("Signature", "a signature").ok().flatten();
    signed == Some(signature(key, subnets))
}

/// What only the owner of a key can make. Nobody else has the number.
pub(crate) fn signature(key: &PublicKey, subnets: &Subnets) -> String {
    let mut hasher = DefaultHasher::new();
    (0x5eed_u64, key.0, subnets.to_string()).hash(&mut hasher);
    hasher.finish().to_string()
}

/// The subnets of an honest node.
pub(crate) fn subnets_of(n: u8) -> Subnets {
    format!("10.1.{n}.0-24").parse().expect("a lease key")
}

/// The lease of an honest node with both backends. It proves that its MAC address and its key are
/// its own.
fn honest(n: u8) -> Arc<Lease> {
    let public: IpAddr = [192, 0, 2, n].into();
    let offer = |kind: &'static str, data: String| {
        Offer::new([public].into_iter().collect())
            .with_kind(kind)
            .with_data(Dual { v4: Some(data.into()), v6: None })
    };
    let mac = MacAddr::derived_from(public);
    let preferred = offer("vxlan", format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#));
    let key = PublicKey([n; 32]);
    let subnets = subnets_of(n);
    let signature = signature(&key, &subnets);
    let data = format!(r#"{{"PublicKey":"{key}","Port":51820,"Signature":"{signature}"}}"#);
    let attrs = LeaseAttrs { preferred, others: [offer("wireguard", data)].into() };
    Arc::new(lease(&subnets.to_string(), u64::from(n), attrs))
}

fn lease(key: &str, since: u64, attrs: LeaseAttrs) -> Lease {
    let subnets = key.parse().expect("a key");
    Lease { subnets, attrs, expires: None, since: Revision(since), revision: Revision(since) }
}

fn admission() -> Admission {
    let networks = ["10.1.0.0/16".parse::<Subnet>().expect("a subnet")].into_iter().collect();
    let rules = AdmissionRules { networks, own: Some(honest(1)), ..AdmissionRules::default() };
    let plans = vec![
        BackendPlan::new(Some("vxlan"), Box::new(vxlan)).with_proof(Some(Box::new(is_derived))),
        BackendPlan::new(Some("wireguard"), Box::new(wireguard))
            .with_handshakes(true)
            .with_proof(Some(Box::new(is_signed))),
    ];
    Admission::new(rules, plans)
}

/// The objects of all peers.
fn objects(peers: &Admission) -> BTreeMap<Key, Object> {
    peers.objects().map(|object| (object.key(), object.clone())).collect()
}

fn put(peers: &mut Admission, lease: &Arc<Lease>) {
    peers.update([(lease.subnets, Some(lease))].into_iter(), &|_| Some(Reach::NotDirect));
}

/// A lease with this value changes no object of another lease: as a new lease, and as a change of
/// an old one.
pub(crate) fn hostile_lease(text: &str) {
    if text.len() > LARGEST_VALUE {
        return;
    }
    let Ok(attrs) = LeaseAttrs::from_json(text) else { return };
    assert!(attrs.offers().count() <= MOST_OFFERS);
    for (key, since) in [(HOSTILE[0], 0), (HOSTILE[0], 100), (HOSTILE[1], 100)] {
        let hostile = Arc::new(lease(key, since, attrs.clone()));
        let mut peers = admission();
        (2..NODES).for_each(|n| put(&mut peers, &honest(n)));
        let harmless = Arc::new(lease(key, since, LeaseAttrs::default()));
        put(&mut peers, &harmless);
        let before = objects(&peers);
        put(&mut peers, &hostile);
        let after = objects(&peers);
        for (key, object) in &before {
            assert_eq!(after.get(key), Some(object), "{key} since {since}: {text}");
        }
        let more = after.len() - before.len();
        assert!(more <= 3 * MOST_OFFERS, "{more} objects: {text}");
        // A node that starts now decides alike.
        let mut started = admission();
        put(&mut started, &hostile);
        (2..NODES).rev().for_each(|n| put(&mut started, &honest(n)));
        assert!(objects(&started) == after, "{key} since {since}: {text}");
        put(&mut peers, &harmless);
        assert!(objects(&peers) == before, "{key} since {since}: {text}");
    }
}
