//! Tables, chains, rules and sets of nf_tables as values, over netlink. No program is run.
//!
//! A rule is a list of instructions ([`Expr`]). The module writes them to the kernel and reads them
//! again, so that a caller can compare a table with the desired one. An instruction that it
//! does not know is read as [`Expr::Other`], with its name and its attributes.
//!
//! [`Table`] is the address of a table. [`Chain`] is a chain with its rules. [`Set`] and
//! [`Batches`] change sets of addresses, and maps from addresses to marks, in as many transactions
//! as the elements need. [`at_one_moment`] repeats a read until no transaction of any program came
//! between its steps. [`GROUP`] is the multicast group of changes, for `NetfilterEvents`. That
//! type, the socket and the transaction are in [`netfilter`](crate::netfilter).
//!
//! [`program`] has the rules of other programs, which it reads instruction by instruction.
//!
//! The module knows tables of the families `ip`, `ip6`, `inet`, `bridge` and `netdev`. It cannot
//! write chains of devices, NAT of destinations, jumps, or sets and maps of other values than
//! addresses and marks. It does not repair a table that another program changes: `flannel-firewall`
//! does.
//!
//! A function that takes a socket blocks for one or more requests to the kernel. It needs
//! `CAP_NET_ADMIN`, and works in the network namespace of the thread that opened the socket. The
//! other functions only add changes to a transaction. They panic if a name or a value is longer
//! than 65,000 bytes.
//!
//! ```no_run
//! use flannel_core::kernel::KernelError;
//! use flannel_netlink::netfilter::NetfilterSocket;
//! use flannel_netlink::nftables::{Base, Chain, Expr, Table, TableFamily, batch, hook, verdict};
//!
//! fn main() -> Result<(), KernelError> {
//!     // Counts the packets that arrive for this host.
//!     let table = Table { family: TableFamily::Inet, name: "example" };
//!     let base = Base {
//!         kind: "filter".to_owned(),
//!         hook: hook::INPUT,
//!         priority: 0,
//!         policy: verdict::ACCEPT,
//!     };
//!     let chain = Chain {
//!         base: Some(base),
//!         rules: vec![vec![Expr::Counter]],
//!     };
//!     let mut socket = NetfilterSocket::open()?;
//!     let mut make = batch();
//!     table.make_new(&mut make, "counts packets");
//!     chain.make(&mut make, &table, "input", "counts packets");
//!     socket.commit(make)?;
//!     let found = Chain::read(&mut socket, &table, &["input"])?;
//!     assert_eq!(found, [Some(chain)]);
//!     println!("{} packets", table.counted(&mut socket)?);
//!     let mut remove = batch();
//!     table.remove(&mut remove);
//!     socket.commit(remove)?;
//!     Ok(())
//! }
//! ```
//!
//! **Source**: linux `include/uapi/linux/netfilter/nf_tables.h`.

mod attributes;
mod chain;
mod expr;
pub mod program;
mod set;
mod table;

use flannel_core::kernel::KernelError;

use crate::netfilter::{Batch, Kind, NetfilterSocket};
use libc::{EAGAIN, ENOENT};

use self::attributes::number_in;
pub use self::chain::{Base, Chain, ChainChange, ChainHead, hook};
pub use self::expr::{
    Expr, address_of, arrived_by, is_device, is_other_device, kind, meta, octets, verdict,
};
pub use self::set::{Batches, Marks, Set, SetHead};
pub use self::table::{Table, TableFamily, TableHead};

/// `NFNLGRP_NFTABLES`: the multicast group of the changes of all tables.
pub const GROUP: u32 = 7;
/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u8 = 10;
/// `NFT_MSG_GETGEN`.
const GETGEN: u8 = 16;
/// The number of attempts of [`at_one_moment`].
const TRIES: usize = 16;

/// An empty transaction. It has room for 200 changes.
pub fn batch() -> Batch {
    Batch::new(SUBSYSTEM)
}

/// The generation of the ruleset, a number that changes with each transaction of any program.
///
/// # Errors
/// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
pub fn generation(socket: &mut NetfilterSocket) -> Result<u32, KernelError> {
    let any = Kind { subsystem: SUBSYSTEM, number: GETGEN, family: 0 };
    socket.ask(any, |_| (), |message| number_in(message.attributes.0, 1))
}

/// Calls `read` until the ruleset does not change meanwhile, at most 16 times. The result of a call
/// during which the ruleset changed is ignored, even if it is an error.
///
/// # Errors
/// An error of `read`. Or the [`generation`] cannot be read, or the ruleset changed during each
/// attempt (`EAGAIN`): `about` converts these errors.
pub fn at_one_moment<T, E>(
    socket: &mut NetfilterSocket,
    about: impl Fn(KernelError) -> E,
    mut read: impl FnMut(&mut NetfilterSocket) -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..TRIES {
        let before = generation(socket).map_err(&about)?;
        let found = read(socket);
        if generation(socket).map_err(&about)? == before {
            return found;
        }
    }
    let detail = format!("the ruleset changed during each of {TRIES} attempts");
    Err(about(KernelError::explained(EAGAIN, detail)))
}

/// `None` if the object does not exist.
fn present<T>(answer: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match answer {
        Err(error) if error.is(ENOENT) => Ok(None),
        answer => answer.map(Some),
    }
}
