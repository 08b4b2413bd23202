//! The guard of a tunnel: packets are taken only from peers, and only with sources of their own.

mod backend;
mod end;
mod keeper;
mod table;

use std::collections::BTreeSet;

use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::{Table, TableFamily, at_one_moment};

pub use self::backend::{Guarded, Usual};
pub use self::end::TunnelEnd;
pub use self::keeper::Guard;
use self::table::Sources;

/// The start of the names of the tables of guards. The table of the guard `guard-vxlan` is
/// `flannel-guard-vxlan`.
const TABLES: &str = "flannel-guard-";

/// The table with this name.
pub(crate) fn table_named(name: &str) -> Table<'_> {
    Table { family: TableFamily::Inet, name }
}

/// The names of the tables of guards whose tunnels have one of these devices, or a device that is
/// not known.
///
/// # Errors
/// The tables cannot be read.
pub(crate) fn tables(
    socket: &mut NetfilterSocket,
    devices: &BTreeSet<LinkName>,
) -> Result<Vec<String>, KernelError> {
    let mut names = Table::names(socket, TableFamily::Inet)?;
    names.retain(|name| name.starts_with(TABLES));
    let mut own = Vec::new();
    for name in names {
        let read = |socket: &mut _| Sources::read(socket, &table_named(&name), 0);
        let found = at_one_moment(socket, |error| error, read)?;
        let ends = found.map(|found| found.sources.ends).unwrap_or_default();
        let is_own = |end: &TunnelEnd| end.device.is_none_or(|device| devices.contains(&device));
        if ends.is_empty() || ends.values().any(is_own) {
            own.push(name);
        }
    }
    Ok(own)
}
