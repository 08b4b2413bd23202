//! The guard of a tunnel: packets are taken only from peers, and only with sources of their own.

mod backend;
mod end;
mod keeper;
mod table;

use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::NetfilterSocket;
use flannel_netlink::nftables::{Table, TableFamily};

pub use self::backend::{Guarded, Usual};
pub use self::end::TunnelEnd;
pub use self::keeper::Guard;

/// The start of the names of the tables of guards. The table of the guard `guard-vxlan` is
/// `flannel-guard-vxlan`.
const TABLES: &str = "flannel-guard-";

/// The table with this name.
pub(crate) fn table_named(name: &str) -> Table<'_> {
    Table { family: TableFamily::Inet, name }
}

/// The names of the tables of all guards.
///
/// # Errors
/// The tables cannot be read.
pub(crate) fn tables(socket: &mut NetfilterSocket) -> Result<Vec<String>, KernelError> {
    let mut names = Table::names(socket, TableFamily::Inet)?;
    names.retain(|name| name.starts_with(TABLES));
    Ok(names)
}
