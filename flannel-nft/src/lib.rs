#![doc = include_str!("../README.md")]

mod attributes;
mod chain;
mod expr;
mod set;
mod table;

use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Kind, NetfilterSocket};

use self::attributes::number_in;
pub use self::chain::{BaseChain, ChainChange, ChainHead, chains, hook, rules};
pub use self::expr::{Expr, address_of, arrived_by, is_device, meta, octets, verdict};
pub use self::set::{Batches, Set};
pub use self::table::{Table, protocol};

/// `NFNL_SUBSYS_NFTABLES`.
pub const SUBSYSTEM: u8 = 10;
/// `NFNLGRP_NFTABLES`: the multicast group with the changes of all tables.
pub const GROUP: u32 = 7;
/// `NFT_MSG_GETGEN`.
const GETGEN: u8 = 16;
/// The number of attempts of [`at_one_moment`].
const TRIES: usize = 16;

const ENOENT: i32 = 2;
const EAGAIN: i32 = 11;

/// The generation of the ruleset, a number that changes with each transaction of any program.
///
/// # Errors
/// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
pub fn generation(socket: &mut NetfilterSocket) -> Result<u32, KernelError> {
    let any = Kind { subsystem: SUBSYSTEM, number: GETGEN, family: 0 };
    socket.ask(any, |_| (), |message| number_in(message.attributes.0, 1))
}

/// Repeats `read` until the ruleset does not change meanwhile.
///
/// # Errors
/// Those of `read`, and `about` of an error of this function. The ruleset changed during each of 16
/// attempts (`EAGAIN`), or its [`generation`] cannot be read.
pub fn at_one_moment<T, E>(
    socket: &mut NetfilterSocket,
    about: impl Fn(KernelError) -> E,
    mut read: impl FnMut(&mut NetfilterSocket) -> Result<T, E>,
) -> Result<T, E> {
    for _ in 0..TRIES {
        let before = generation(socket).map_err(&about)?;
        let found = read(socket)?;
        if generation(socket).map_err(&about)? == before {
            return Ok(found);
        }
    }
    let detail = format!("another program changed it during each of {TRIES} attempts");
    Err(about(KernelError::explained(EAGAIN, detail)))
}

/// `None` if the object does not exist.
fn present<T>(answer: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match answer {
        Err(error) if error.errno == ENOENT => Ok(None),
        answer => answer.map(Some),
    }
}
