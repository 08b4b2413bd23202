//! The floor: the same objects, encoded beforehand by hand, sent in batches with only the last one acknowledged.
//!
//! No names are resolved, nothing is compared, nothing is kept.

use std::time::{Duration, Instant};

use flannel_core::{Dual, Family};
use flannel_netlink::testing::ip;

use crate::cluster::{Families, Peer, device, peers};
use crate::engine::REST;
use crate::ground::Ground;
use crate::raw::{
    AF_BRIDGE, DELNEIGH, DELROUTE, NEWNEIGH, NEWNEXTHOP, NEWROUTE, ONLINK, PERMANENT, PLAIN, PROTOCOL, PUT,
    Raw, SELF, af, last_acknowledged, message, ndmsg, nhmsg, octets, rtmsg,
};
use crate::report::median;
use crate::witness::compare;

/// Batch sizes that are tried; the [best] one is the floor.
pub(crate) const BATCHES: [usize; 4] = [16, 64, 128, 256];

/// How long the raw writer took with each batch size.
pub(crate) type Took = [Duration; BATCHES.len()];

/// How IPv4 routes are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As nexthop objects and routes that name them. IPv6 routes name their gateways, which costs no more.
    Nexthops,
    /// With a gateway each, as every other overlay daemon does it.
    Classic,
}

/// How long the raw writer takes, in a fresh namespace.
pub(crate) fn measure(
    peers: u32,
    families: Families,
    form: Form,
    batch: usize,
    wrong: &mut Vec<String>,
) -> anyhow::Result<Duration> {
    let ground = Ground::new()?;
    let took = fill(&ground, peers, families, form, batch)?;
    wrong.extend(compare(&ground.netns, peers, families)?);
    ground.clear(peers, families)?;
    Ok(took)
}

/// Makes the devices and writes the objects of all peers: how long the latter takes.
#[expect(
    clippy::disallowed_methods,
    reason = "the engine has its device for as long before there are any peers"
)]
pub(crate) fn fill(
    ground: &Ground,
    peers: u32,
    families: Families,
    form: Form,
    batch: usize,
) -> anyhow::Result<Duration> {
    ground.netns.run(|| {
        let mut indexes = Dual::default();
        for family in families.iter() {
            let dev = device(family);
            let (local, mtu) = match family {
                Family::V4 => ("192.0.2.1", 1450),
                Family::V6 => ("2001:db8::1", 1430),
            };
            ip(&format!(
                "link add {dev} mtu {mtu} type vxlan id 1 local {local} dev eth0 dstport 8472 nolearning"
            ));
            ip(&format!("link set {dev} up"));
            let own = Peer(1).subnet(family).base();
            ip(&format!("address add {own}/{} dev {dev}", family.bits()));
            indexes[family] = Some(index_of(dev)?);
        }
        std::thread::sleep(REST);
        let index = |family| indexes[family].unwrap_or_default();
        send(&encode(peers, families, form, index), batch)
    })
}

/// Which batch size is the best, by the medians of what was measured several times: the fastest of single runs would be the
/// one that the machine favoured.
pub(crate) fn best(measured: &[&Took]) -> usize {
    let median_of = |batch: &usize| median(measured.iter().map(|took| took[*batch].as_secs_f64()));
    (0..BATCHES.len()).min_by(|a, b| median_of(a).total_cmp(&median_of(b))).unwrap_or_default()
}

/// A link's index, in the network namespace of this thread.
pub(crate) fn index_of(link: &str) -> anyhow::Result<u32> {
    let shown: serde_json::Value = serde_json::from_str(&ip(&format!("-j link show {link}")))?;
    let index = shown[0]["ifindex"].as_u64();
    Ok(index.ok_or_else(|| anyhow::anyhow!("{link} has no index"))? as u32)
}

/// All messages for these peers, kind by kind. By groups of peers, as the engine puts them, takes the kernel longer.
fn encode(count: u32, families: Families, form: Form, index: impl Fn(Family) -> u32) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    for family in families.iter() {
        let (index, by_id) = (index(family), form == Form::Nexthops && family == Family::V4);
        messages.extend(peers(count).map(|peer| neigh(peer, family, index)));
        messages.extend(peers(count).map(|peer| fdb(peer, family, index)));
        if by_id {
            messages.extend(peers(count).map(|peer| nexthop(peer, family, index)));
            messages.extend(peers(count).map(|peer| route_by_id(peer, family)));
        } else {
            messages.extend(peers(count).map(|peer| route(peer, family, index)));
        }
    }
    messages
}

/// Sends them, and returns how long it took from the first byte to the last acknowledgement.
fn send(messages: &[Vec<u8>], batch: usize) -> anyhow::Result<Duration> {
    let mut raw = Raw::open()?;
    let batches: Vec<Vec<u8>> = messages.chunks(batch).map(last_acknowledged).collect();
    let start = Instant::now();
    for bytes in &batches {
        raw.exchange(bytes)?;
    }
    Ok(start.elapsed())
}

/// Takes the routes of all peers out, so that what they hang on goes quickly, and their forwarding entries in the order in which they were
/// put: with their device they would go in any.
pub(crate) fn delete(count: u32, families: Families) -> anyhow::Result<()> {
    let mut messages = Vec::new();
    for family in families.iter() {
        let entry = ndmsg(AF_BRIDGE, index_of(device(family))?, PERMANENT, SELF);
        messages.extend(peers(count).map(|peer| {
            let subnet = peer.subnet(family);
            message(DELROUTE, PLAIN, &rtmsg(family, subnet.len(), 0, 0), &[(1, &octets(subnet.base()))])
        }));
        let fdb = |peer: Peer| message(DELNEIGH, PLAIN, &entry, &[(2, &peer.mac(family).0)]);
        messages.extend(peers(count).map(fdb));
    }
    send(&messages, 128).map(drop)
}

/// NDA_DST, NDA_LLADDR.
fn neigh(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let dst = octets(peer.subnet(family).base());
    let header = ndmsg(af(family), index, PERMANENT, 0);
    message(NEWNEIGH, PUT, &header, &[(1, &dst), (2, &peer.mac(family).0)])
}

fn fdb(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let dst = octets(peer.public(family));
    message(NEWNEIGH, PUT, &ndmsg(AF_BRIDGE, index, PERMANENT, SELF), &[(1, &dst), (2, &peer.mac(family).0)])
}

/// NHA_ID, NHA_OIF, NHA_GATEWAY.
fn nexthop(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let gateway = octets(peer.subnet(family).base());
    let header = nhmsg(af(family), PROTOCOL, ONLINK);
    let (id, index) = (peer.0.to_ne_bytes(), index.to_ne_bytes());
    message(NEWNEXTHOP, PUT, &header, &[(1, &id), (5, &index), (6, &gateway)])
}

/// RTA_DST, RTA_NH_ID.
fn route_by_id(peer: Peer, family: Family) -> Vec<u8> {
    let subnet = peer.subnet(family);
    let header = rtmsg(family, subnet.len(), PROTOCOL, 0);
    message(NEWROUTE, PUT, &header, &[(1, &octets(subnet.base())), (30, &peer.0.to_ne_bytes())])
}

/// RTA_DST, RTA_OIF, RTA_GATEWAY.
fn route(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let subnet = peer.subnet(family);
    let base = octets(subnet.base());
    let header = rtmsg(family, subnet.len(), PROTOCOL, ONLINK);
    message(NEWROUTE, PUT, &header, &[(1, &base), (4, &index.to_ne_bytes()), (5, &base)])
}
