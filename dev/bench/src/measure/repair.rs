//! One object of a random peer is deleted or changed by another program: the time until it is
//! restored.
//!
//! An object is restored when the kernel's message about it on a socket of the bench has the same
//! bytes as before the damage, except for its age. The time includes the damage itself. The kernel
//! needs milliseconds to delete a nexthop object.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::Context;
use flannel_core::address::Family;

use crate::parts::cluster::{Families, Peer, device, leases};
use crate::parts::damage::{Damage, Victim};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::floor::index_of;
use crate::parts::raw::{
    AF_BRIDGE, DUMP, EventSocket, GETNEIGH, GETNEXTHOP, GETROUTE, Id, Raw, RawObject,
    last_acknowledged, message, ndmsg, nhmsg, objects_in, octets, rtmsg,
};
use crate::parts::report::{Latency, Report};
use crate::parts::witness::compare;

/// The maximum time in milliseconds, up to a number of peers.
const P99_MS: [(u32, f64); 2] = [(15_000, 5.0), (50_000, 10.0)];
/// The pause between two repairs. The engine limits the rate of repairs if there are hundreds in a
/// second.
const PAUSE: Duration = Duration::from_millis(2);
/// The minimum number of samples of each kind.
const LEAST: usize = 200;

pub(crate) fn run(peers: u32, families: Families, samples: usize) -> anyhow::Result<Report> {
    let fixture = Fixture::new()?;
    let mut engine = Engine::start(&fixture, families)?;
    engine.send(leases(peers, families));
    engine.wait(peers as usize)?;
    let mut wrong = compare(&fixture.netns, peers, families)?;
    let figures = fixture.netns.run(|| damage(peers, families, samples, &mut engine))?;
    wrong.extend(compare(&fixture.netns, peers, families)?);
    drop(engine);
    let floor = fixture.netns.run(|| floor(peers, families))?;
    wrong.extend(compare(&fixture.netns, peers, families)?);
    fixture.clear(peers, families, &mut wrong);
    let all: Vec<f64> = figures.values().flatten().copied().collect();
    let kinds: BTreeMap<String, Latency> =
        figures.into_iter().map(|(kind, figures)| (kind, Latency::of(&figures))).collect();
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        samples: Some(all.len()),
        p50_ms: Some(Latency::of(&all).p50_ms),
        p99_ms: kinds.values().map(|kind| kind.p99_ms).max_by(f64::total_cmp),
        floor_p99_ms: floor
            .values()
            .map(|figures| Latency::of(figures).p99_ms)
            .max_by(f64::total_cmp),
        wrong,
        ..Report::default()
    };
    if let Some((_, limit)) = P99_MS.iter().find(|(most, _)| peers <= *most) {
        for (kind, latency) in &kinds {
            report.at_most(&format!("p99_ms of {kind}"), Some(latency.p99_ms), *limit);
        }
    }
    report.kinds = kinds;
    Ok(report)
}

/// Milliseconds by kind of damage.
#[expect(clippy::disallowed_methods, reason = "a pause between two damages is needed")]
fn damage(
    peers: u32,
    families: Families,
    samples: usize,
    engine: &mut Engine,
) -> anyhow::Result<BTreeMap<String, Vec<f64>>> {
    let mut raw = Raw::open()?;
    let tables = Tables::read(&mut raw, families)?;
    let kinds: Vec<(Family, Damage)> = families
        .iter()
        .flat_map(|family| Damage::all().map(move |damage| (family, damage)))
        .filter(|(family, damage)| !damage.needs_nexthop() || tables.has_nexthops(Peer(2), *family))
        .filter(|(_, damage)| !damage.needs_another() || peers > 1)
        .filter(|(family, damage)| damage.needs_family().is_none_or(|only| only == *family))
        .collect();
    let rounds = samples.div_ceil(kinds.len()).max(LEAST);
    let mut events = EventSocket::open()?;
    let mut figures = BTreeMap::<String, Vec<f64>>::new();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for _ in 0..rounds {
        for (family, damage) in &kinds {
            let number = dice.below(peers);
            // Another peer, if there is one.
            let other = (number + 1 + dice.below(peers.max(2) - 1)) % peers;
            let peer = Peer(2 + number);
            let other = Peer(2 + other);
            let victim = tables.victim(peer, other, *family)?;
            let message = damage.message(&victim)?;
            // The kernel may report a correct object before the repair.
            let mut victims: Vec<_> =
                damage.victims(&victim)?.into_iter().map(|victim| (victim, false)).collect();
            std::thread::sleep(PAUSE);
            events.forget()?;
            let start = Instant::now();
            raw.carry_out(&message).with_context(|| format!("{family} {damage} of {peer:?}"))?;
            let restored = events.listen(|object| {
                for (victim, is_restored) in
                    victims.iter_mut().filter(|(victim, _)| victim.id == object.id)
                {
                    *is_restored = **victim == object;
                }
                victims.iter().all(|(_, is_restored)| *is_restored)
            });
            restored.with_context(|| format!("{family} {damage} of {peer:?}"))?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            figures.entry(format!("{family} {damage}")).or_default().push(took);
            engine.wait(peers as usize)?;
        }
    }
    Ok(figures)
}

/// Milliseconds by kind of damage to nexthop objects. The raw writer does and undoes each damage at
/// once, after the same pauses, and nobody listens to events. For other objects the kernel needs
/// almost no time.
#[expect(clippy::disallowed_methods, reason = "a pause between two damages is needed")]
fn floor(peers: u32, families: Families) -> anyhow::Result<BTreeMap<String, Vec<f64>>> {
    let mut raw = Raw::open()?;
    let tables = Tables::read(&mut raw, families)?;
    let with_nexthops = families.iter().filter(|family| tables.has_nexthops(Peer(2), *family));
    let kinds: Vec<_> = with_nexthops
        .flat_map(|family| Damage::all().map(move |damage| (family, damage)))
        .filter(|(_, damage)| matches!(damage, Damage::Nexthop(_)))
        .collect();
    let mut figures = BTreeMap::<String, Vec<f64>>::new();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for _ in 0..LEAST {
        for (family, damage) in &kinds {
            let peer = Peer(2 + dice.below(peers));
            let victim = tables.victim(peer, peer, *family)?;
            let message = damage.message(&victim)?;
            let undo = damage.undo(&victim)?.unwrap_or_default();
            std::thread::sleep(PAUSE);
            let start = Instant::now();
            raw.carry_out(&message)?;
            raw.exchange(&last_acknowledged(&undo))?;
            let took = start.elapsed().as_secs_f64() * 1e3;
            figures.entry(format!("{family} {damage}")).or_default().push(took);
        }
    }
    Ok(figures)
}

/// The objects in the kernel before the damage.
struct Tables {
    indexes: HashMap<Family, u32>,
    uplink: u32,
    objects: HashMap<Id, RawObject>,
}

impl Tables {
    fn read(raw: &mut Raw, families: Families) -> anyhow::Result<Self> {
        let mut requests = vec![message(GETNEXTHOP, DUMP, &nhmsg(0, 0, 0), &[])];
        let mut indexes = HashMap::new();
        for family in families.iter() {
            let index = index_of(device(family))?;
            indexes.insert(family, index);
            requests.push(message(
                GETNEIGH,
                DUMP,
                &ndmsg(0, 0, 0, 0),
                &[(8, &index.to_ne_bytes())],
            ));
            requests.push(message(GETNEIGH, DUMP, &ndmsg(AF_BRIDGE, index, 0, 0), &[]));
            let mut header = rtmsg(family, 0, 0, 0);
            header[7] = 0;
            requests.push(message(GETROUTE, DUMP, &header, &[(15, &254u32.to_ne_bytes())]));
        }
        let mut all = HashMap::new();
        for request in requests {
            raw.dump(&request, |datagram| {
                all.extend(
                    objects_in(datagram).into_iter().map(|object| (object.id.clone(), object)),
                );
            })?;
        }
        Ok(Self { indexes, uplink: index_of("eth0")?, objects: all })
    }

    fn has_nexthops(&self, peer: Peer, family: Family) -> bool {
        let route = self.objects.get(&Id::Route(octets(peer.subnet(family).base())));
        route.is_some_and(|route| route.attribute(30).is_some())
    }

    fn victim(&self, peer: Peer, other: Peer, family: Family) -> anyhow::Result<Victim<'_>> {
        let index = *self.indexes.get(&family).context("the family is not enabled")?;
        let find =
            |id: Id| self.objects.get(&id).with_context(|| format!("the kernel has no {id:?}"));
        let base = |peer: Peer| octets(peer.subnet(family).base());
        let route = find(Id::Route(base(peer)))?;
        let nexthop = |route: &RawObject| {
            let id =
                route.attribute(30).and_then(|id| Some(u32::from_ne_bytes(id.try_into().ok()?)));
            id.map(|id| find(Id::Nexthop(id))).transpose()
        };
        Ok(Victim {
            peer,
            other,
            family,
            index,
            uplink: self.uplink,
            neigh: find(Id::Neigh(index, base(peer)))?,
            fdb: find(Id::Fdb(index, peer.mac(family).0.to_vec()))?,
            route,
            nexthop: nexthop(route)?,
            other_nexthop: nexthop(find(Id::Route(base(other)))?)?,
        })
    }
}

/// Random numbers to pick peers (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % u64::from(limit)) as u32
    }
}
