//! Reads all objects that one network owns.

mod nexthops;
mod routes;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use flannel_core::address::Family;
use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::object::{Key, LinkName, MacAddr, Neigh, Object, ObjectSet};

pub(crate) use self::nexthops::{nexthop_ids, nexthop_users};
use crate::codec::link::LinkMessage;
use crate::codec::{addr, fdb, neigh};
use crate::kernel::Place;
use crate::kernel::foreign_routes::ForeignRoutes;
use crate::kernel::fou;
use crate::kernel::query::{find_link, name_of};
use crate::kernel::wireguard::WireguardDevices;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;
use crate::transport::wire::{Message, Messages};

/// The owned objects of one table.
#[derive(Default)]
struct Table {
    objects: Vec<Object>,
    /// The keys of the inexact objects.
    inexact: Vec<Key>,
}

/// Reads the tables of one snapshot.
struct Reader<'a> {
    socket: &'a mut Socket,
    footprint: &'a Footprint,
    namespace: &'a Namespace,
    foreign: &'a ForeignRoutes,
    wireguard: &'a WireguardDevices,
    /// Sends each table to the thread that sorts them.
    tables: Sender<Table>,
    /// The names, by index, of the links that may have owned objects on them.
    names: BTreeMap<u32, LinkName>,
    /// The ids of the nexthop objects on these links, each with its link, sorted by id.
    nexthops: Vec<(u32, LinkName)>,
}

/// Reads all objects that `footprint` owns. Another thread sorts each table while the kernel dumps
/// the next one.
pub(crate) fn snapshot(
    socket: &mut Socket,
    place: &Place,
    footprint: &Footprint,
) -> Result<ObjectSet, KernelError> {
    let Place { namespace, foreign, wireguard } = place;
    let mut state = ObjectSet::default();
    let (tables, to_sort) = channel::<Table>();
    let sorted = &mut state;
    let mut sort = move || {
        for table in &to_sort {
            sorted.extend(table.objects);
            table.inexact.into_iter().for_each(|key| sorted.note_inexact(key));
        }
    };
    std::thread::scope(|scope| {
        let sorter = Builder::new().spawn_scoped(scope, &mut sort);
        if let Err(error) = sorter {
            tracing::debug!(%error, "tables are sorted when all are read");
        }
        let reader = Reader {
            socket,
            footprint,
            namespace,
            foreign,
            wireguard,
            tables,
            names: BTreeMap::new(),
            nexthops: Vec::new(),
        };
        reader.read()
    })?;
    // This sorts tables only if no thread could be started.
    sort();
    Ok(state)
}

impl Reader<'_> {
    /// Reads all tables.
    fn read(mut self) -> Result<(), KernelError> {
        for name in &self.footprint.links {
            self.read_link(*name)?;
        }
        for name in self.footprint.routes_on.difference(&self.footprint.links) {
            if let Some(found) = find_link(self.socket, *name)? {
                self.names.insert(found.index, *name);
            }
        }
        if !self.names.is_empty() || self.footprint.nexthops.is_some() {
            self.read_nexthops()?;
        }
        if !self.names.is_empty() || !self.footprint.networks.is_empty() {
            for family in Family::BOTH {
                self.read_routes(family)?;
            }
        }
        Ok(())
    }

    /// Gives a table to the thread that sorts the tables.
    fn hand_over(&self, table: Table) {
        // The receiver lives as long as this reader.
        let _ = self.tables.send(table);
    }

    /// Reads an owned link, and the addresses, neighbours and FDB entries on it.
    fn read_link(&mut self, name: LinkName) -> Result<(), KernelError> {
        let Some(mut found) = find_link(self.socket, name)? else { return Ok(()) };
        // A device of another kind is foreign, whatever its name, and so are the objects on it.
        if !found.is_known() {
            return Ok(());
        }
        self.names.insert(found.index, name);
        if found.is_wireguard() {
            self.read_wireguard(&mut found)?;
        }
        if found.fou_port().is_some() {
            found.add_fou_ports(&fou::ports(self.namespace)?);
        }
        let lower = if found.lower() == 0 { None } else { name_of(self.socket, found.lower())? };
        if let Some(object) = found.object(lower) {
            let inexact = if found.is_exact() { Vec::new() } else { vec![Key::Link(name)] };
            self.hand_over(Table { objects: vec![object.into()], inexact });
        }
        let footprint = self.footprint;
        let foreign = self.foreign;
        let index = found.index;
        self.read_table(addr::on(index), |message| {
            let found = addr::read(message).filter(|found| found.index == index)?;
            let addr = found.object(name);
            footprint.owns_addr(&addr).then(|| (addr.into(), found.is_exact()))
        })?;
        foreign.forget_entries(index);
        let proxied = self.read_proxies(name, index)?;
        for request in [neigh::on(index), fdb::on(index)] {
            self.read_table(request, |message| {
                let found = neigh::read(message).filter(|found| found.index == index)?;
                foreign.note_entry(&found);
                let owned = footprint.owns_entry(name, found.is_static);
                let object = found.object(name).filter(|_| owned)?;
                let is_proxied = proxied.contains(&object.key());
                Some((object, found.is_exact() && !is_proxied))
            })?;
        }
        Ok(())
    }

    /// Reads the attributes and the peers of a WireGuard device.
    fn read_wireguard(&self, found: &mut LinkMessage) -> Result<(), KernelError> {
        let device = self.wireguard.snapshot(self.namespace, found.name, found.index)?;
        found.add_wireguard(&device.device);
        let objects = device.peers.into_iter().map(Object::from).collect();
        self.hand_over(Table { objects, inexact: device.inexact });
        Ok(())
    }

    /// Reads the proxy entries on an owned link. The snapshot shows each as a neighbour with the
    /// MAC address 0, unless there is a neighbour with its address. A put or a deletion of the
    /// neighbour deletes the proxy entry. Returns the keys of these neighbours.
    fn read_proxies(&mut self, link: LinkName, index: u32) -> Result<BTreeSet<Key>, KernelError> {
        let proxies = self.socket.dump(neigh::proxies_on(index), |message| {
            neigh::read_proxy(message).filter(|proxy| proxy.index == index)
        })?;
        let mut table = Table::default();
        for proxy in proxies {
            self.foreign.note_proxy(proxy);
            let neigh = Neigh { link, address: proxy.address, mac: MacAddr([0; 6]) };
            let object = Object::from(neigh);
            table.inexact.push(object.key());
            table.objects.push(object);
        }
        let keys = table.inexact.iter().copied().collect();
        self.hand_over(table);
        Ok(keys)
    }

    /// Reads a table. `read` returns the owned object of a message, and whether it is exact.
    fn read_table(
        &mut self,
        request: Messages,
        mut read: impl FnMut(&Message<'_>) -> Option<(Object, bool)> + Send,
    ) -> Result<(), KernelError> {
        // If the dump is repeated, keys of its first attempt stay here, even if their objects are
        // exact by then. Such an object is put once more, which does no harm.
        let mut inexact = Vec::new();
        let objects = self.socket.dump(request, |message| {
            let (object, is_exact) = read(message)?;
            inexact.extend((!is_exact).then(|| object.key()));
            Some(object)
        })?;
        self.hand_over(Table { objects, inexact });
        Ok(())
    }

    /// Looks up the name of a link that this network does not own now. It may have owned objects of
    /// an earlier run. A link with the name of an owned link is left out: it is of another kind.
    fn learn_name(&mut self, index: u32) -> Result<(), KernelError> {
        if !self.names.contains_key(&index)
            && let Some(name) = name_of(self.socket, index)?
            && !self.footprint.links.contains(&name)
        {
            self.names.insert(index, name);
        }
        Ok(())
    }
}
