#![doc = include_str!("../README.md")]

mod attributes;
mod chain;
mod expr;
mod set;
mod table;

use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, Kind, NetfilterSocket};

use self::attributes::number_in;
pub use self::chain::{Base, Chain, ChainChange, ChainHead, hook};
pub use self::expr::{
    Expr, address_of, arrived_by, is_device, is_other_device, kind, meta, octets, verdict,
};
pub use self::set::{Batches, Marks, Set, SetHead};
pub use self::table::{Table, TableFamily, TableHead};

/// `NFNLGRP_NFTABLES`: the multicast group with the changes of all tables.
pub const GROUP: u32 = 7;
/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u8 = 10;
/// `NFT_MSG_GETGEN`.
const GETGEN: u8 = 16;
/// The number of attempts of [`at_one_moment`].
const TRIES: usize = 16;

const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;

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

/// Repeats `read`, 16 times at most, until the ruleset does not change meanwhile. An error of a
/// `read` during which it changed does not count.
///
/// # Errors
/// An error of `read`. For errors of its own, this function calls `about`: the [`generation`]
/// cannot be read, or the ruleset changed during each attempt (`EAGAIN`).
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
        Err(error) if error.errno == ENOENT => Ok(None),
        answer => answer.map(Some),
    }
}
