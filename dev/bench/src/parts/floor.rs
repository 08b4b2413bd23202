//! The floor: the same objects, encoded beforehand, sent in batches of which only the last message
//! is acknowledged.
//!
//! It resolves no names, compares nothing and stores nothing.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::address::{Dual, Family};
use flannel_netlink::testing::ip;

use crate::parts::cluster::{Families, Peer, device, peers};
use crate::parts::engine::REST;
use crate::parts::fixture::Fixture;
use crate::parts::raw::{
    AF_BRIDGE, DELNEIGH, DELROUTE, NEWNEIGH, NEWNEXTHOP, NEWROUTE, ONLINK, PERMANENT, PLAIN,
    PROTOCOL, PUT, Raw, SELF, af, last_acknowledged, message, ndmsg, nhmsg, octets, rtmsg,
};
use crate::parts::report::median;
use crate::parts::witness::compare;

/// A way of writing.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    /// The number of peers whose objects are put kind by kind.
    pub(crate) group: usize,
    /// The number of messages that are sent at once.
    pub(crate) batch: usize,
}

/// The ways of writing that are measured. The [best] one is the floor.
pub(crate) const WAYS: [Way; 6] = [
    Way { group: usize::MAX, batch: 16 },
    Way { group: usize::MAX, batch: 64 },
    Way { group: usize::MAX, batch: 128 },
    Way { group: usize::MAX, batch: 256 },
    Way { group: 64, batch: 64 },
    Way { group: 64, batch: 128 },
];

/// The time of the raw writer for each way.
pub(crate) type Took = [Duration; WAYS.len()];

/// The kind of IPv4 routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As nexthop objects and routes that name them. IPv6 routes name their gateways, which costs
    /// no more.
    Nexthops,
    /// With a gateway each, as in other overlay daemons.
    Classic,
}

/// Measures the raw writer in a new namespace.
pub(crate) fn measure(
    peers: u32,
    families: Families,
    form: Form,
    way: Way,
    wrong: &mut Vec<String>,
) -> anyhow::Result<Duration> {
    let fixture = Fixture::new()?;
    let took = fixture.netns.run(|| {
        let batches = encode(peers, families, form, way, &make_devices(families)?);
        rest();
        send(&batches)
    })?;
    wrong.extend(compare(&fixture.netns, peers, families)?);
    fixture.clear(peers, families, wrong);
    Ok(took)
}

/// Makes the devices and writes the objects of all peers.
pub(crate) fn fill(fixture: &Fixture, peers: u32, families: Families) -> anyhow::Result<()> {
    fixture.netns.run(|| {
        let batches = encode(peers, families, Form::Nexthops, WAYS[0], &make_devices(families)?);
        send(&batches).map(drop)
    })
}

/// Pauses as long as the engine before its peers arrive. Meanwhile the kernel removes the last
/// namespace.
#[expect(
    clippy::disallowed_methods,
    reason = "the kernel does not report when it has removed a namespace"
)]
fn rest() {
    std::thread::sleep(REST);
}

/// The index of the way with the smallest median over several runs. The fastest single run would be
/// a chance result.
pub(crate) fn best(measured: &[&Took]) -> usize {
    let median_of = |way: &usize| median(measured.iter().map(|took| took[*way].as_secs_f64()));
    (0..WAYS.len()).min_by(|a, b| median_of(a).total_cmp(&median_of(b))).unwrap_or_default()
}

/// Makes a device for each family, and returns their indexes.
fn make_devices(families: Families) -> anyhow::Result<Dual<u32>> {
    let mut indexes = Dual::default();
    for family in families.iter() {
        let dev = device(family);
        let (local, mtu) = match family {
            Family::V4 => ("192.0.2.1", 1450),
            Family::V6 => ("2001:db8::1", 1430),
        };
        ip(&format!(
            "link add {dev} mtu {mtu} type vxlan id 1 local {local} dev eth0 dstport 8472 \
             nolearning"
        ));
        ip(&format!("link set {dev} up"));
        let own = Peer(1).subnet(family).base();
        ip(&format!("address add {own}/{} dev {dev}", family.bits()));
        indexes[family] = Some(index_of(dev)?);
    }
    Ok(indexes)
}

/// A link's index, in the network namespace of this thread.
pub(crate) fn index_of(link: &str) -> anyhow::Result<u32> {
    let shown = Command::new("ip").args(["-j", "link", "show", link]).output().context("ip")?;
    ensure!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr).trim());
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout)?;
    let index = shown[0]["ifindex"].as_u64();
    Ok(index.with_context(|| format!("{link} has no index"))? as u32)
}

/// All messages for these peers on the devices with these indexes, in batches of which only the
/// last message asks for an answer.
fn encode(
    count: u32,
    families: Families,
    form: Form,
    way: Way,
    indexes: &Dual<u32>,
) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    let all: Vec<Peer> = peers(count).collect();
    for group in all.chunks(way.group.min(all.len()).max(1)) {
        for family in families.iter() {
            let index = indexes[family].unwrap_or_default();
            let mut put = |message: fn(Peer, Family, u32) -> Vec<u8>| {
                messages.extend(group.iter().map(|peer| message(*peer, family, index)));
            };
            put(neigh);
            put(fdb);
            if form == Form::Nexthops && family == Family::V4 {
                put(nexthop);
                put(route_by_id);
            } else {
                put(route);
            }
        }
    }
    messages.chunks(way.batch).map(last_acknowledged).collect()
}

/// Sends batches, and returns how long it took from the first byte to the last acknowledgement.
fn send(batches: &[Vec<u8>]) -> anyhow::Result<Duration> {
    let mut raw = Raw::open()?;
    let start = Instant::now();
    for bytes in batches {
        raw.exchange(bytes)?;
    }
    Ok(start.elapsed())
}

/// Deletes the routes of all peers, so that their devices can be deleted quickly. Deletes the
/// forwarding entries in the order in which they were put, unlike the deletion of the device.
pub(crate) fn delete(count: u32, families: Families) -> anyhow::Result<()> {
    let mut messages = Vec::new();
    for family in families.iter() {
        let entry = ndmsg(AF_BRIDGE, index_of(device(family))?, PERMANENT, SELF);
        messages.extend(peers(count).map(|peer| {
            let subnet = peer.subnet(family);
            message(
                DELROUTE,
                PLAIN,
                &rtmsg(family, subnet.len(), 0, 0),
                &[(1, &octets(subnet.base()))],
            )
        }));
        messages.extend(
            peers(count).map(|peer| message(DELNEIGH, PLAIN, &entry, &[(2, &peer.mac(family).0)])),
        );
    }
    send(&messages.chunks(128).map(last_acknowledged).collect::<Vec<_>>()).map(drop)
}

/// NDA_DST, NDA_LLADDR.
fn neigh(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let dst = octets(peer.subnet(family).base());
    let header = ndmsg(af(family), index, PERMANENT, 0);
    message(NEWNEIGH, PUT, &header, &[(1, &dst), (2, &peer.mac(family).0)])
}

fn fdb(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let dst = octets(peer.public(family));
    message(
        NEWNEIGH,
        PUT,
        &ndmsg(AF_BRIDGE, index, PERMANENT, SELF),
        &[(1, &dst), (2, &peer.mac(family).0)],
    )
}

/// NHA_ID, NHA_OIF, NHA_GATEWAY.
fn nexthop(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let gateway = octets(peer.subnet(family).base());
    let header = nhmsg(af(family), PROTOCOL, ONLINK);
    let id = peer.0.to_ne_bytes();
    let index = index.to_ne_bytes();
    message(NEWNEXTHOP, PUT, &header, &[(1, &id), (5, &index), (6, &gateway)])
}

/// RTA_DST, RTA_NH_ID.
fn route_by_id(peer: Peer, family: Family, _: u32) -> Vec<u8> {
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
