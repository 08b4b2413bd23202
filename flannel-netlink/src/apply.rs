//! Carries out changes: names become indexes, changes become requests, requests go in batches.
//!
//! The one thing to know: links and whatever must be looked at before it is changed are done one at a time, after
//! all that stands before them in the list; everything else goes 128 to a `send`.

mod nexthop_conflict;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, btree_map};
use std::path::Path;
use std::{fs, io};

use flannel_core::Subnet;
use flannel_core::kernel::{Footprint, GO_ROUTE_PROTOCOL, KernelError, ROUTE_PROTOCOL};
use flannel_core::object::{
    Addr, Change, Link, LinkKind, LinkName, Nexthop, Object, Route, Via, Vxlan,
};
use neli::consts::rtnl::Rtprot;

use crate::ask::{ENODEV, find_link};
use crate::codec::addr::AddrMessage;
use crate::codec::nexthop::NexthopMessage;
use crate::codec::{addr, link, neigh, nexthop, route};
use crate::foreign_routes::{Double, ForeignRoutes, Odd};
use crate::namespace::Namespace;
use crate::socket::Socket;
use crate::wire::Messages;

/// More gains nothing, and one `send` stays below a millisecond.
const BATCH: usize = 128;

const EBUSY: i32 = 16;
const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// One call of [`Kernel::apply`](flannel_core::Kernel::apply).
pub(crate) struct Writer<'a> {
    socket: &'a mut Socket,
    namespace: &'a Namespace,
    footprint: &'a Footprint,
    foreign: &'a ForeignRoutes,
    /// Routes say that they have no metrics.
    metrics: bool,
    results: Vec<Result<(), KernelError>>,
    requests: Messages,
    /// For each of `requests`, the number of its change, and whether it deletes.
    pending: Vec<(usize, bool)>,
    indexes: BTreeMap<LinkName, Result<u32, KernelError>>,
    /// What addresses there are on a link.
    addrs: HashMap<u32, Vec<AddrMessage>>,
    /// What nexthop objects there are with ids that are to be deleted next.
    nexthops: HashMap<u32, Result<NexthopMessage, KernelError>>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(
        socket: &'a mut Socket,
        namespace: &'a Namespace,
        footprint: &'a Footprint,
        foreign: &'a ForeignRoutes,
    ) -> Self {
        Self {
            socket,
            namespace,
            footprint,
            foreign,
            metrics: foreign.has_metrics(),
            results: Vec::new(),
            requests: Messages::default(),
            pending: Vec::new(),
            indexes: BTreeMap::new(),
            addrs: HashMap::new(),
            nexthops: HashMap::new(),
        }
    }

    pub(crate) fn apply(mut self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        self.results = vec![Ok(()); changes.len()];
        for (n, change) in changes.iter().enumerate() {
            let result = match change {
                Change::Put(object) => self.put(changes, n, object),
                Change::Delete(object) => accept_absence(self.delete(changes, n, object)),
            };
            if result.is_err() {
                self.results[n] = result;
            }
            if self.requests.len() >= BATCH {
                self.flush(changes);
            }
        }
        self.flush(changes);
        self.results
    }

    fn put(&mut self, changes: &[Change], n: usize, object: &Object) -> Result<(), KernelError> {
        let index = match object {
            Object::Link(link) => {
                self.flush(changes);
                return self.put_link(link);
            }
            object => self.index_of(object)?,
        };
        let requests = &mut self.requests;
        match object {
            Object::Addr(addr) => return self.put_addr(n, addr, index),
            Object::Neigh(neigh) => neigh::put(requests, neigh, index),
            Object::Fdb(fdb) => {
                if self.foreign.take_in_the_way(index, fdb.mac) == Some(Odd::Led) {
                    neigh::delete_any_fdb(requests, fdb.mac, index);
                    self.pending.push((n, true));
                }
                neigh::put_fdb(requests, fdb, index);
            }
            Object::Nexthop(nexthop) => nexthop::put(requests, nexthop, index),
            Object::Route(route) if route::is_known(route) => {
                self.delete_doubles(n, route, |_| true);
                // One of last resort replaces nothing, and nothing replaces it: what is ours there must go first.
                if route.via == Via::LastResort {
                    self.delete_on_our_links(changes, n, &route.dst)?;
                    route::delete_any(&mut self.requests, &route.dst, ROUTE_PROTOCOL);
                    self.pending.push((n, true));
                    self.foreign.see_last_resort(route.dst);
                } else {
                    self.delete_behind(n, route);
                }
                route::put(&mut self.requests, route, index, self.metrics);
            }
            other => return Err(unknown(other)),
        }
        self.pending.push((n, false));
        Ok(())
    }

    fn delete(&mut self, changes: &[Change], n: usize, object: &Object) -> Result<(), KernelError> {
        let index = match object {
            Object::Link(link) => {
                self.flush(changes);
                return self.delete_link(link);
            }
            object => self.index_of(object)?,
        };
        match object {
            Object::Addr(addr) => return self.delete_addr(n, addr, index),
            Object::Neigh(neigh) => neigh::delete(&mut self.requests, neigh, index),
            Object::Fdb(fdb) if self.foreign.take_in_the_way(index, fdb.mac).is_some() => {
                neigh::delete_any_fdb(&mut self.requests, fdb.mac, index);
            }
            Object::Fdb(fdb) => neigh::delete_fdb(&mut self.requests, fdb, index),
            Object::Nexthop(nexthop) => {
                if !self.is_there(changes, n, nexthop, index)? {
                    return Ok(());
                }
                nexthop::delete(&mut self.requests, nexthop.id);
            }
            Object::Route(route) => {
                if route.via != Via::LastResort {
                    self.delete_behind(n, route);
                }
                self.delete_doubles(n, route, |double| double.is_ours);
                let protocol = self.protocol(route);
                route::delete(&mut self.requests, route, index, protocol);
            }
            other => return Err(unknown(other)),
        }
        self.pending.push((n, true));
        Ok(())
    }

    /// One of last resort of ours that may be behind a route which change `n` is about. Outside our pod networks it would be another
    /// network's.
    fn delete_behind(&mut self, n: usize, route: &Route) {
        let inside = self.footprint.networks.iter().any(|network| network.covers(&route.dst));
        if self.footprint.blackholes && inside && self.foreign.may_have_last_resort(&route.dst) {
            let behind = Route { via: Via::LastResort, mtu: None, ..*route };
            route::delete(&mut self.requests, &behind, 0, ROUTE_PROTOCOL);
            self.pending.push((n, true));
        }
    }

    /// What leads into a tunnel of ours is ours, whoever put it there (see [`Footprint::owns_route`]), and would take the packets before one of
    /// last resort. That is put so seldom that the kernel is asked.
    fn delete_on_our_links(
        &mut self,
        changes: &[Change],
        n: usize,
        dst: &Subnet,
    ) -> Result<(), KernelError> {
        // One that is not there has no routes.
        let links = self.footprint.links.iter().filter_map(|link| self.index(*link).ok());
        let links: Vec<u32> = links.collect();
        if links.is_empty() {
            return Ok(());
        }
        self.flush(changes);
        let there = self.socket.dump(route::all(dst.family()), |message| {
            let found = route::read(message).filter(|found| found.dst == *dst && found.main)?;
            let is_ours =
                found.default_metric && found.nexthop.is_none() && links.contains(&found.index);
            (is_ours && found.protocol != u8::from(Rtprot::Kernel)).then_some(found)
        })?;
        for told in &there {
            route::delete_told(&mut self.requests, told);
            self.pending.push((n, true));
        }
        Ok(())
    }

    /// Those that stand beside a route which change `n` is about.
    fn delete_doubles(&mut self, n: usize, route: &Route, goes: impl Fn(&Double) -> bool) {
        for double in self.foreign.take_doubles(&route.dst).iter().filter(|double| goes(double)) {
            route::delete_told(&mut self.requests, &double.told);
            self.pending.push((n, true));
        }
    }

    /// Sends what is pending.
    fn flush(&mut self, changes: &[Change]) {
        let results = self.socket.send(&mut self.requests);
        self.requests.clear();
        let sent = std::mem::take(&mut self.pending);
        // The last of several puts of a route. One that was sent already has the place that the earlier ones were to have.
        let last_of = |n: usize, route: &Route| {
            let later = sent.iter().rev().filter(|(m, deletes)| *m > n && !deletes);
            later.map(|(m, _)| (*m, &changes[*m])).find_map(|(m, change)| match change {
                Change::Put(Object::Route(last)) if last.dst == route.dst => Some((m, *last)),
                _ => None,
            })
        };
        let (mut taken, mut hidden) = (Vec::new(), Vec::new());
        for ((n, deletes), result) in sent.iter().copied().zip(results) {
            let result = match (result, &changes[n]) {
                (result, _) if deletes => accept_absence(result),
                (Err(error), Change::Put(Object::Route(route))) if error.errno == EEXIST => {
                    match last_of(n, route) {
                        Some((last, place)) => {
                            hidden.push((last, *route, place));
                            Ok(())
                        }
                        None => self.unhide(route, route),
                    }
                }
                // Putting it would undo what was sent after it.
                (Err(error), Change::Put(Object::Route(route)))
                    if stands_in_its_own_way(route, &error) && last_of(n, route).is_none() =>
                {
                    self.make_way(route).map_err(|_| error)
                }
                (Err(error), Change::Put(Object::Nexthop(_)))
                    if nexthop_conflict::stands_in_the_way(&error) =>
                {
                    taken.push(n);
                    Err(error)
                }
                (result, _) => result,
            };
            if result.is_err() {
                self.results[n] = result;
            }
        }
        if !taken.is_empty() {
            self.take_ids_back(changes, &sent, &taken);
        }
        // If the last one did not arrive, the step is the only one of ours.
        for (last, step, route) in hidden {
            if self.results[last].is_ok() && step != route {
                self.results[last] = self.unhide(&step, &route);
            }
        }
    }

    /// The index of the link that an object is on; 0 if it needs none.
    fn index_of(&mut self, object: &Object) -> Result<u32, KernelError> {
        object.link().map_or(Ok(0), |name| self.index(name))
    }

    fn index(&mut self, name: LinkName) -> Result<u32, KernelError> {
        match self.indexes.entry(name) {
            btree_map::Entry::Occupied(known) => known.get().clone(),
            btree_map::Entry::Vacant(unknown) => {
                let found = find_link(self.socket, name).map(|link| link.index);
                unknown.insert(found).clone()
            }
        }
    }

    /// The protocol that a route must have to be ours to delete; 0 is any. See [`Footprint::owns_route`].
    fn protocol(&self, route: &Route) -> u8 {
        match route.via {
            _ if self.footprint.go_routes.is_some() => GO_ROUTE_PROTOCOL,
            Via::Gateway { link, .. } | Via::Link(link) if self.footprint.links.contains(&link) => {
                0
            }
            // Nobody else has a reason to name an id of ours.
            Via::Nexthop(_) => 0,
            _ => ROUTE_PROTOCOL,
        }
    }

    /// The nexthop has this id, device and our protocol: the kernel deletes by id alone. All deletions of nexthops in a
    /// row are asked about at once.
    fn is_there(
        &mut self,
        changes: &[Change],
        n: usize,
        nexthop: &Nexthop,
        index: u32,
    ) -> Result<bool, KernelError> {
        if !self.nexthops.contains_key(&nexthop.id) {
            if self.pending.iter().any(|(_, deletes)| !deletes) {
                self.flush(changes);
            }
            let row = changes[n..].iter().map_while(|change| match change {
                Change::Delete(Object::Nexthop(nexthop)) => Some(nexthop.id),
                _ => None,
            });
            let row: Vec<u32> = row.take(BATCH).collect();
            let mut requests = Messages::default();
            row.iter().for_each(|id| nexthop::get(&mut requests, *id));
            self.nexthops =
                row.into_iter().zip(self.socket.ask_each(&mut requests, nexthop::read)).collect();
        }
        let found = self.nexthops.remove(&nexthop.id).expect("the row begins with it")?;
        Ok(found.index == index && found.protocol == ROUTE_PROTOCOL)
    }

    /// A route of ours, `hidden`, is there but another one stood before it, so that a replacement would make a second one of ours. It is
    /// taken out, then `route` is put in the place of the other, if it is not there yet.
    fn unhide(&mut self, hidden: &Route, route: &Route) -> Result<(), KernelError> {
        let mut requests = Messages::default();
        let index = self.index_of(&Object::Route(*hidden))?;
        route::delete(&mut requests, hidden, index, ROUTE_PROTOCOL);
        if hidden.mtu != route.mtu {
            route::only_with_mtu(&mut requests, hidden.mtu);
        }
        let index = self.index_of(&Object::Route(*route))?;
        // If the kernel cannot tell them apart, this was deleted, and takes the place of `hidden`.
        route::put(&mut requests, route, index, self.metrics);
        let mut results = self.socket.send(&mut requests);
        results.remove(1)
    }

    /// The gateway is said to be on the link as long as it takes to put the route, which replaces whatever stands at its
    /// destination: that is never without a route.
    fn make_way(&mut self, route: &Route) -> Result<(), KernelError> {
        let Via::Gateway { gateway, link, .. } = route.via else {
            return Err(KernelError::new(EINVAL));
        };
        let index = self.index(link)?;
        let step = Route { dst: Subnet::host(gateway), via: Via::Link(link), mtu: None };
        let mut requests = Messages::default();
        route::add(&mut requests, &step, index);
        route::put(&mut requests, route, index, self.metrics);
        route::delete(&mut requests, &step, index, ROUTE_PROTOCOL);
        let mut results = self.socket.send(&mut requests);
        results.remove(1)
    }

    /// What addresses there are on a link.
    fn addrs_on(&mut self, index: u32) -> Result<&mut Vec<AddrMessage>, KernelError> {
        Ok(match self.addrs.entry(index) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                unknown.insert(self.socket.dump(addr::on(index), addr::read)?)
            }
        })
    }

    /// IPv4 takes an address with another prefix length or far end for another address, IPv6 keeps what it has: in both
    /// cases the old one must go. IPv4 first puts the new one, because with the last address all routes go.
    fn put_addr(&mut self, n: usize, addr: &Addr, index: u32) -> Result<(), KernelError> {
        let there = self.addrs_on(index)?;
        let is_other = |a: &AddrMessage| {
            let is_same = a.len == addr.len && a.far.is_none() && a.is_universal();
            a.index == index && a.address == addr.address && !is_same
        };
        let others: Vec<AddrMessage> = there.iter().copied().filter(is_other).collect();
        // Lengths that were put in this call are told apart too.
        there.retain(|a| a.address != addr.address);
        there.push(AddrMessage::of(addr, index));
        // What only its scope tells apart is the same entry, which keeps that.
        let stays =
            |a: &&AddrMessage| a.address.is_ipv6() || (a.len == addr.len && a.far.is_none());
        let (before, after): (Vec<&AddrMessage>, Vec<_>) = others.iter().partition(stays);
        let last = before.iter().any(|a| a.address.is_ipv4());
        let step = last.then(|| Addr { len: addr.len.saturating_sub(1), ..*addr });
        if let Some(step) = &step {
            addr::put_step(&mut self.requests, step, index);
            self.pending.push((n, false));
        }
        for old in before {
            addr::delete(&mut self.requests, old);
            self.pending.push((n, true));
        }
        addr::put(&mut self.requests, addr, index);
        self.pending.push((n, false));
        let step = step.map(|step| AddrMessage::of(&step, index));
        for old in after.into_iter().chain(&step) {
            addr::delete(&mut self.requests, old);
            self.pending.push((n, true));
        }
        Ok(())
    }

    /// Whatever else is said of it.
    fn delete_addr(&mut self, n: usize, addr: &Addr, index: u32) -> Result<(), KernelError> {
        let there = self.addrs_on(index)?;
        let is_it =
            |a: &AddrMessage| (a.index, a.address, a.len) == (index, addr.address, addr.len);
        let gone: Vec<AddrMessage> = there.extract_if(.., |a| is_it(a)).collect();
        for told in &gone {
            addr::delete(&mut self.requests, told);
            self.pending.push((n, true));
        }
        Ok(())
    }

    /// With another MAC address the kernel drops all neighbours on the device, permanent ones too. Routes stay.
    fn put_link(&mut self, want: &Link) -> Result<(), KernelError> {
        let LinkKind::Vxlan(vxlan) = &want.kind else {
            return Err(unknown(&Object::Link(want.clone())));
        };
        let lower = vxlan.lower.map_or(Ok(0), |name| self.index(name))?;
        let is = match find_link(self.socket, want.name) {
            Ok(is) => is,
            Err(error) if error.errno == ENODEV => return self.create_link(want, vxlan, lower),
            Err(error) => return Err(error),
        };
        if !is.is_vxlan() {
            let kind = if is.kind.is_empty() { "physical or built-in" } else { &is.kind };
            let detail = format!(
                "{} exists and is no vxlan device but a {kind} one: rename or remove it",
                want.name
            );
            return Err(KernelError::explained(EEXIST, detail));
        }
        if link::is_changeable(&is, vxlan) {
            let mut send = |mut requests| self.socket.send(&mut requests).into_iter().collect();
            let changed: Result<(), KernelError> = send(link::change_vxlan(&is, vxlan, lower));
            match changed {
                // What this kernel cannot change in place is made anew.
                Err(error) if error.errno == EOPNOTSUPP => {
                    tracing::debug!(link = %want.name, %error, "a change in place was refused");
                }
                changed => {
                    let released =
                        send(link::release(&is)).map_err(|error| unreleased(want.name, error));
                    let common = send(link::change(&is, want, vxlan));
                    return changed.and(released).and(common);
                }
            }
        }
        self.socket.send_one(link::delete(is.index))?;
        self.create_link(want, vxlan, lower)
    }

    fn create_link(&mut self, want: &Link, vxlan: &Vxlan, lower: u32) -> Result<(), KernelError> {
        self.forget(want.name);
        match self.socket.send_one(link::create(want, vxlan, lower)) {
            Err(error) if error.errno == EEXIST => return self.take_back(want, vxlan, error),
            created => created?,
        }
        let index = self.index(want.name)?;
        self.ignore_router_advertisements(want.name);
        if want.up { self.socket.send_one(link::set_up(index, true)) } else { Ok(()) }
    }

    /// Our device, which somebody gave another name, gets its own again: all that is on it stays. Of another device `error` is the
    /// reason not to make one.
    fn take_back(
        &mut self,
        want: &Link,
        vxlan: &Vxlan,
        error: KernelError,
    ) -> Result<(), KernelError> {
        let mut there = self.socket.dump(link::all(), link::read)?;
        there.retain(|is| link::is_in_the_way(is, vxlan));
        let Some(is) = there.iter().find(|is| link::is_vtep(is, vxlan)) else {
            let Some(is) = there.first() else { return Err(error) };
            let (vni, port) = (vxlan.vni, vxlan.port);
            let detail =
                format!("{} has the VNI {vni} and the UDP port {port} already: remove it", is.name);
            return Err(KernelError::explained(EEXIST, detail));
        };
        tracing::warn!("{} was given the name {}: it gets its own again", want.name, is.name);
        match self.socket.send_one(link::rename(is.index, want.name)) {
            // On kernels before 6.2 one that is up keeps its name.
            Err(error) if error.errno == EBUSY => {
                self.socket.send_one(link::set_up(is.index, false))?;
                self.socket.send_one(link::rename(is.index, want.name))?;
            }
            renamed => renamed?,
        }
        self.put_link(want)
    }

    /// The far end of a tunnel must not configure this host. Containers may not write there, mostly.
    fn ignore_router_advertisements(&self, name: LinkName) {
        let path = Path::new("/proc/sys/net/ipv6/conf").join(name.as_str());
        let outcome = self.namespace.run(|| (fs::write(path.join("accept_ra"), "0"), heeds(&path)));
        match outcome {
            Ok((Ok(()), _)) => {}
            Ok((Err(error), Ok(true))) => tracing::warn!(
                "{name} heeds router advertisements, so that whoever reaches into the tunnel may give this host addresses and \
                 routes: {}/accept_ra cannot be written: {error}; right would be 0: on the host, \
                 sysctl -w net/ipv6/conf/{name}/accept_ra=0",
                path.display()
            ),
            // There is no such file without IPv6, which is as good.
            Ok((Err(error), heeds)) => {
                tracing::debug!(%error, ?heeds, link = %name, "accept_ra is left as it is");
            }
            Err(error) => tracing::debug!(%error, link = %name, "accept_ra is left as it is"),
        }
    }

    /// Deletes the device if it is the one described; MTU and the like may differ.
    fn delete_link(&mut self, link: &Link) -> Result<(), KernelError> {
        let is = find_link(self.socket, link.name)?;
        if !link::is_same_device(&is, link) {
            return Ok(());
        }
        self.forget(link.name);
        self.socket.send_one(link::delete(is.index))
    }

    /// What is known of a link is about to be wrong.
    fn forget(&mut self, name: LinkName) {
        if let Some(Ok(index)) = self.indexes.remove(&name) {
            self.addrs.remove(&index);
        }
    }
}

/// Who made the device a port of another one may be the only one who can undo that.
fn unreleased(name: LinkName, error: KernelError) -> KernelError {
    let detail = format!(
        "{name} is a port of another device, which does not let go of it: take it out there"
    );
    if error.errno == EOPNOTSUPP { KernelError::explained(EOPNOTSUPP, detail) } else { error }
}

/// Whether a device with these IPv6 settings lets router advertisements configure the host.
fn heeds(settings: &Path) -> io::Result<bool> {
    let number = |name| fs::read_to_string(settings.join(name)).map(|text| text.trim().to_owned());
    let accepts = match number("accept_ra")?.as_str() {
        "0" => false,
        // Hosts that forward are routers themselves; 2 is for those that are both.
        "1" => number("forwarding")? == "0",
        _ => true,
    };
    Ok(accepts && number("disable_ipv6")? == "0")
}

/// IPv6 looks for the gateway in the routing table even if the route says `onlink`, and refuses a gateway that is
/// reached by another device. Inside the destination itself, that is a foreign route in the place of ours.
fn stands_in_its_own_way(route: &Route, error: &KernelError) -> bool {
    let inside = matches!(route.via, Via::Gateway { gateway, .. } if route.dst.contains(gateway));
    error.errno == EINVAL && route.dst.base().is_ipv6() && inside
}

/// That something to be deleted is not there is as good.
fn accept_absence(result: Result<(), KernelError>) -> Result<(), KernelError> {
    match result {
        Err(error) if error.is_absent() => Ok(()),
        // Without its nexthop object a route by it is gone as well, but the kernel calls it a mistake to ask.
        Err(KernelError { errno: EINVAL, detail: Some(text) })
            if text.contains("Nexthop id does not exist") =>
        {
            Ok(())
        }
        result => result,
    }
}

fn unknown(object: &Object) -> KernelError {
    KernelError::explained(EOPNOTSUPP, format!("this version cannot handle {object}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_netns, ip};

    #[test]
    fn a_device_heeds_router_advertisements_as_its_settings_say() {
        in_netns(|| {
            ip("link add up0 type veth peer name far0");
            let settings = Path::new("/proc/sys/net/ipv6/conf/up0");
            for (accept_ra, forwarding, disable_ipv6, expected) in [
                ("0", "0", "0", false),
                ("1", "0", "0", true),
                ("1", "1", "0", false),
                ("2", "1", "0", true),
                ("2", "0", "1", false),
            ] {
                let values = [
                    ("forwarding", forwarding),
                    ("accept_ra", accept_ra),
                    ("disable_ipv6", disable_ipv6),
                ];
                for (name, value) in values {
                    fs::write(settings.join(name), value).unwrap();
                }
                assert_eq!(heeds(settings).unwrap(), expected, "{values:?}");
            }
            assert!(heeds(&settings.with_file_name("absent0")).is_err());
        });
    }

    /// The question whether there is one is a message and an answer more for each route.
    #[test]
    fn a_last_resort_is_looked_for_only_where_one_may_be() {
        in_netns(|| {
            ip("link set lo up");
            let namespace = Namespace::current().unwrap();
            let (mut socket, foreign) = (Socket::open().unwrap(), ForeignRoutes::default());
            let networks = vec!["10.0.0.0/8".parse().unwrap()];
            let footprint = Footprint { blackholes: true, networks, ..Footprint::default() };
            let route = |n: u8, via| {
                Change::Put(
                    Route { dst: Subnet::new([10, 1, n, 0].into(), 24).unwrap(), via, mtu: None }
                        .into(),
                )
            };
            let routes: Vec<Change> = (0..BATCH).map(|n| route(n as u8, Via::Blackhole)).collect();
            let exchanges = |socket: &mut Socket, changes: &[Change]| {
                let before = socket.exchanges;
                let results = Writer::new(socket, &namespace, &footprint, &foreign).apply(changes);
                assert!(results.iter().all(Result::is_ok), "{results:?}");
                socket.exchanges - before
            };
            assert_eq!(exchanges(&mut socket, &routes), 2, "nobody has looked");
            crate::snapshot::snapshot(&mut socket, &footprint, &foreign).unwrap();
            assert_eq!(exchanges(&mut socket, &routes), 1, "a message for each");
            exchanges(&mut socket, &[route(7, Via::LastResort)]);
            assert_eq!(exchanges(&mut socket, &routes), 2, "one more");
            assert_eq!(ip("route show 10.1.7.0/24").lines().count(), 1);
        });
    }

    #[test]
    fn peers_that_leave_together_cost_two_exchanges_a_batch() {
        in_netns(|| {
            ip("link add up0 type veth peer name far0");
            ip("link set far0 up");
            ip("address add 192.0.2.1/24 dev up0");
            ip("link set up0 up");
            let namespace = Namespace::current().unwrap();
            let mut socket = Socket::open().unwrap();
            let first = 1 << 30;
            let link = "up0".parse().unwrap();
            let nexthop = |n: u32| Nexthop {
                id: first + n,
                link,
                gateway: [192, 0, 2, 2 + n as u8].into(),
                onlink: false,
            };
            let (footprint, foreign) = (Footprint::default(), ForeignRoutes::default());
            let there = || ip("nexthop show").lines().count();
            let mut apply = |changes: &[Change]| {
                let before = socket.exchanges;
                let results =
                    Writer::new(&mut socket, &namespace, &footprint, &foreign).apply(changes);
                (results, socket.exchanges - before)
            };
            let objects = || (0..200).map(|n| Object::Nexthop(nexthop(n)));
            let (results, puts) = apply(&objects().map(Change::Put).collect::<Vec<_>>());
            assert!(results.iter().all(Result::is_ok), "{results:?}");
            assert_eq!((there(), puts), (200, 3), "the index, and two batches");
            // Some are gone, and one is another's by now.
            ip(&format!("nexthop del id {first}"));
            ip(&format!("nexthop del id {}", first + 150));
            ip(&format!("nexthop replace id {} via 192.0.2.77 dev up0 protocol static", first + 5));
            let (results, deletions) = apply(&objects().map(Change::Delete).collect::<Vec<_>>());
            assert!(results.iter().all(Result::is_ok), "{results:?}");
            assert_eq!(there(), 1, "{}", ip("nexthop show"));
            assert_eq!(deletions, 5, "the index, two rows of questions, two batches");
        });
    }
}
