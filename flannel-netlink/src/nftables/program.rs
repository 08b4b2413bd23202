//! Rules of any program, as instructions of the register machine that the kernel runs.
//!
//! [`Expr`](crate::nftables::Expr) has only the instructions that this project writes. The types
//! here are for a reader that asks what foreign rules do with a packet.
//!
//! **Source**: linux `include/uapi/linux/netfilter/nf_tables.h`, `net/netfilter/nft_*.c`.

use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use libc::{EINVAL, ENOENT};

use crate::netfilter::{Attributes, NetfilterMessage, NetfilterSocket};
use crate::nftables::Table;
use crate::nftables::attributes::{find, number, number_in, text_in};
use crate::nftables::chain::RULE_CHAIN;
use crate::nftables::table::{GETRULE, RULE_EXPRESSIONS, RULE_HANDLE, TABLE};

/// `NFT_MSG_GETSET` and `NFT_MSG_GETSETELEM`.
const GETSET: u8 = 10;
const GETSETELEM: u8 = 13;
/// `NFTA_SET_NAME`, `NFTA_SET_KEY_LEN`, `NFTA_SET_ELEM_LIST_ELEMENTS`.
const SET_NAME: u16 = 2;
const SET_KEY_LEN: u16 = 5;
const ELEMENTS: u16 = 3;
/// `NFTA_LIST_ELEM`, `NFTA_SET_ELEM_KEY`, `NFTA_SET_ELEM_DATA`, `NFTA_SET_ELEM_FLAGS`.
const ELEMENT: u16 = 1;
const KEY: u16 = 1;
const ELEMENT_DATA: u16 = 2;
const ELEMENT_FLAGS: u16 = 3;
/// `NFT_SET_ELEM_CATCHALL`.
const CATCH_ALL: u32 = 2;
/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`, `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`, `NFTA_VERDICT_…`.
const NAME: u16 = 1;
const DATA: u16 = 2;
const VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const CODE: u16 = 1;
const TO_CHAIN: u16 = 2;
/// `NFT_REG_VERDICT`, `NFT_REG_1`, `NFT_REG_4`, `NFT_REG32_00`.
const VERDICT: u32 = 0;
const FIRST: u32 = 1;
const FOURTH: u32 = 4;
const FIRST_WORD: u32 = 8;
/// The bytes of all registers of a packet.
pub const REGISTERS: usize = 64;

/// A rule of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Program {
    /// The number by which `nft` names the rule.
    pub handle: u64,
    /// The instructions in their order.
    pub instructions: Vec<Instruction>,
}

/// An instruction. A place of a register is the offset of its first byte, less than [`REGISTERS`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Instruction {
    /// Loads a property of the packet.
    Load {
        /// The property.
        from: Property,
        /// The place.
        to: usize,
        /// The bytes. `None` if the property determines them.
        len: Option<usize>,
    },
    /// Loads a value.
    Value {
        /// The place.
        to: usize,
        /// The value.
        value: Vec<u8>,
    },
    /// Masks a value, and inverts bits of it.
    Mask {
        /// The place of the value.
        from: usize,
        /// The place of the result.
        to: usize,
        /// The bits that stay.
        mask: Vec<u8>,
        /// The bits that are inverted then.
        xor: Vec<u8>,
    },
    /// Turns the order of bytes between the network and the machine.
    Reorder {
        /// The place of the values.
        from: usize,
        /// The place of the result.
        to: usize,
        /// The bytes of all values.
        len: usize,
        /// The bytes of each value.
        size: usize,
    },
    /// Continues only if a comparison holds.
    Compare {
        /// The place of the left value.
        at: usize,
        /// The comparison.
        how: Comparison,
        /// The right value.
        value: Vec<u8>,
    },
    /// Continues only if a value is in a range, or only if it is not.
    Range {
        /// The place of the value.
        at: usize,
        /// Whether it must be in the range.
        inside: bool,
        /// The lowest value of the range.
        low: Vec<u8>,
        /// The highest value of the range.
        high: Vec<u8>,
    },
    /// Looks for a key in a set or a map.
    Lookup {
        /// The name of the set.
        set: String,
        /// The place of the key.
        at: usize,
        /// What it does if the set has the key.
        then: Lookup,
    },
    /// A verdict.
    Verdict(Jump),
    /// Sets the mark of the packet.
    SetMark {
        /// The place of the value.
        from: usize,
    },
    /// Translates an address.
    Nat(Translation),
    /// Drops the packet with an answer to its sender.
    Reject,
    /// Gives the packet to a program.
    Queue {
        /// The number of the queue. `None` if it is computed, or one of several.
        number: Option<u16>,
        /// Accepts the packet if no program reads the queue.
        bypass: bool,
    },
    /// Excludes the packet from connection tracking.
    Untrack,
    /// A match of iptables.
    Match(Extension),
    /// A target of iptables.
    Target(Extension),
    /// Has no effect on where the packet goes, such as a counter.
    Neutral,
    /// Another instruction, which may end the rule or the packet's way.
    Other(String),
}

/// A property of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Property {
    /// `NFT_META_…`.
    Meta(u32),
    /// Bytes of a header.
    Header {
        /// `NFT_PAYLOAD_…`: 0 of the link, 1 of the network, 2 of the transport.
        base: u32,
        /// The offset of the first byte.
        offset: usize,
    },
    /// `NFT_CT_…`, for one direction of the connection: 0 of the first packet, 1 of the answer.
    Connection {
        /// The key.
        key: u32,
        /// The direction.
        direction: Option<u8>,
    },
    /// A look-up in the routes.
    Route {
        /// `NFT_FIB_RESULT_…`.
        result: u32,
        /// `NFTA_FIB_F_…`.
        flags: u32,
    },
    /// Another property, by the name of the instruction.
    Other(String),
}

/// A comparison of bytes, the first one the most significant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names say it")]
pub enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// What a look-up does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Lookup {
    /// Continues only if the set has the key (true), or only if it does not.
    Continue(bool),
    /// Loads the value of the key to this place. Without the key the rule ends.
    Load(usize),
    /// The value of the key is the verdict. Without the key the rule ends.
    Verdict,
}

/// A verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Jump {
    /// `NF_…` in the lower 16 bits, or `NFT_…`: see [`verdict`](crate::nftables::verdict).
    pub code: u32,
    /// The chain of a jump or goto.
    pub chain: Option<String>,
}

/// `NFT_JUMP`.
pub const JUMP: u32 = (-3i32).cast_unsigned();
/// `NFT_GOTO`.
pub const GOTO: u32 = (-4i32).cast_unsigned();

/// A translation of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Translation {
    /// Of the source, to a chosen address (`snat`).
    Source,
    /// Of the source, to the address of the device (`masquerade`).
    Masquerade,
    /// Of the destination (`dnat`).
    Destination,
    /// Of the destination, to this host (`redirect`).
    Redirect,
}

/// A match or a target of iptables.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extension {
    /// The name.
    pub name: String,
    /// The version of `info`.
    pub revision: u32,
    /// `struct xt_…_info`.
    pub info: Vec<u8>,
}

/// An element of a set.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Element {
    /// The value of the key in a map.
    pub value: Vec<u8>,
    /// The verdict of the key in a map of verdicts.
    pub verdict: Option<Jump>,
}

impl Table<'_> {
    /// The rules of a chain in their order. A chain that does not exist has none.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn programs(
        &self,
        socket: &mut NetfilterSocket,
        chain: &str,
    ) -> Result<Vec<Program>, KernelError> {
        let read = |message: &NetfilterMessage<'_>| {
            let attributes = message.attributes.0;
            // Older kernels filter neither by table nor by chain.
            let is_asked = message.kind.family == self.family.protocol()
                && text_in(attributes, TABLE).as_deref() == Some(self.name)
                && text_in(attributes, RULE_CHAIN).as_deref() == Some(chain);
            is_asked.then(|| Program {
                handle: find(attributes, RULE_HANDLE)
                    .and_then(|handle| Some(u64::from_be_bytes(handle.try_into().ok()?)))
                    .unwrap_or_default(),
                instructions: instructions(find(attributes, RULE_EXPRESSIONS).unwrap_or_default()),
            })
        };
        let fill = |request: &mut crate::netfilter::Messages| {
            request.text(TABLE, self.name).text(RULE_CHAIN, chain);
        };
        match socket.dump(self.kind(GETRULE), fill, read) {
            Err(error) if error.is(ENOENT) => Ok(Vec::new()),
            rules => rules,
        }
    }

    /// The length of the keys of a set in bytes. `None` if the set does not exist.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn key_len(
        &self,
        socket: &mut NetfilterSocket,
        set: &str,
    ) -> Result<Option<usize>, KernelError> {
        let read = |message: &NetfilterMessage<'_>| number_in(message.attributes.0, SET_KEY_LEN);
        let answer = socket.ask(
            self.kind(GETSET),
            |request| _ = request.text(TABLE, self.name).text(SET_NAME, set),
            read,
        );
        Ok(super::present(answer)?.map(|len| len as usize))
    }

    /// The element of a set with this key, or whose range has the key. `None` if there is none. The
    /// kernel looks it up, so that the size of the set does not matter.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn element(
        &self,
        socket: &mut NetfilterSocket,
        set: &str,
        key: &[u8],
    ) -> Result<Option<Element>, KernelError> {
        match self.ask_element(socket, set, Some(key)) {
            Ok(None) => match self.ask_element(socket, set, None) {
                // Before Linux 5.13 there are no elements for all keys.
                Err(error) if error.is(EINVAL) => Ok(None),
                catch_all => catch_all,
            },
            found => found,
        }
    }

    /// The element with a key, or the element for all other keys.
    fn ask_element(
        &self,
        socket: &mut NetfilterSocket,
        set: &str,
        key: Option<&[u8]>,
    ) -> Result<Option<Element>, KernelError> {
        let fill = |request: &mut crate::netfilter::Messages| {
            request.text(TABLE, self.name).text(SET_NAME, set).nest(ELEMENTS, |list| {
                list.nest(ELEMENT, |element| match key {
                    Some(key) => _ = element.nest(KEY, |data| _ = data.attr(VALUE, key)),
                    None => _ = number(element, ELEMENT_FLAGS, CATCH_ALL),
                });
            });
        };
        let read = |message: &NetfilterMessage<'_>| {
            let elements = find(message.attributes.0, ELEMENTS)?;
            let data = find(find(elements, ELEMENT)?, ELEMENT_DATA);
            Some(Element {
                value: data.and_then(|data| find(data, VALUE)).unwrap_or_default().to_vec(),
                verdict: data.and_then(jump),
            })
        };
        super::present(socket.ask(self.kind(GETSETELEM), fill, read))
    }
}

/// The bytes that the kernel loads for the index of a device, in the network namespace of the
/// calling thread. `None` if the device does not exist.
pub fn index_of(device: LinkName) -> Option<[u8; 4]> {
    nix::net::if_::if_nametoindex(device.as_str()).ok().map(u32::to_ne_bytes)
}

/// Reads a list of instructions.
fn instructions(list: &[u8]) -> Vec<Instruction> {
    let elements = Attributes(list).filter(|(kind, _)| *kind == ELEMENT);
    elements
        .map(|(_, element)| {
            let name = text_in(element, NAME).unwrap_or_default();
            let data = find(element, DATA).unwrap_or_default();
            instruction(&name, data).unwrap_or(Instruction::Other(name))
        })
        .collect()
}

/// Reads an instruction. `None` for one that this module does not know.
fn instruction(name: &str, data: &[u8]) -> Option<Instruction> {
    match name {
        "immediate" if number_in(data, 1) == Some(VERDICT) => {
            Some(Instruction::Verdict(jump(find(data, 2)?)?))
        }
        "immediate" => Some(Instruction::Value { to: place(data, 1)?, value: value_in(data, 2)? }),
        "cmp" => Some(Instruction::Compare {
            at: place(data, 1)?,
            how: comparison(number_in(data, 2)?)?,
            value: value_in(data, 3)?,
        }),
        "range" => Some(Instruction::Range {
            at: place(data, 1)?,
            inside: number_in(data, 2)? == 0,
            low: value_in(data, 3)?,
            high: value_in(data, 4)?,
        }),
        "bitwise" if number_in(data, 6).unwrap_or(0) == 0 => Some(Instruction::Mask {
            from: place(data, 1)?,
            to: place(data, 2)?,
            mask: value_in(data, 4)?,
            xor: value_in(data, 5)?,
        }),
        "byteorder" => Some(Instruction::Reorder {
            from: place(data, 1)?,
            to: place(data, 2)?,
            len: number_in(data, 4)? as usize,
            size: number_in(data, 5)? as usize,
        }),
        "lookup" => lookup(data),
        "meta" if find(data, 3).is_some() => match number_in(data, 2)? {
            super::meta::MARK => Some(Instruction::SetMark { from: place(data, 3)? }),
            _ => Some(Instruction::Neutral),
        },
        "meta" | "payload" | "ct" | "fib" | "rt" | "exthdr" | "socket" | "osf" | "hash"
        | "numgen" | "xfrm" | "tunnel" | "bitwise"
            if find(data, target_of(name)).is_some() =>
        {
            let (from, len) = property(name, data)?;
            Some(Instruction::Load { from, to: place(data, target_of(name))?, len })
        }
        "nat" if number_in(data, 1)? == 0 => Some(Instruction::Nat(Translation::Source)),
        "nat" => Some(Instruction::Nat(Translation::Destination)),
        "masq" => Some(Instruction::Nat(Translation::Masquerade)),
        "redir" => Some(Instruction::Nat(Translation::Redirect)),
        "reject" => Some(Instruction::Reject),
        "queue" => Some(queue(data)),
        "notrack" => Some(Instruction::Untrack),
        "match" => Some(Instruction::Match(extension(data)?)),
        "target" => Some(Instruction::Target(extension(data)?)),
        // The last three write a property or a header.
        "counter" | "log" | "last" | "dynset" | "flow_offload" | "dup" | "ct" | "payload"
        | "exthdr" => Some(Instruction::Neutral),
        _ => None,
    }
}

/// The number of the attribute that has the register for the result.
fn target_of(name: &str) -> u16 {
    match name {
        "bitwise" | "hash" | "socket" | "tunnel" => 2,
        _ => 1,
    }
}

/// The property that an instruction loads, and its length if the instruction has it.
fn property(name: &str, data: &[u8]) -> Option<(Property, Option<usize>)> {
    let found = match name {
        "meta" => (Property::Meta(number_in(data, 2)?), None),
        "payload" => {
            let offset = number_in(data, 3)? as usize;
            let base = number_in(data, 2)?;
            (Property::Header { base, offset }, Some(number_in(data, 4)? as usize))
        }
        "ct" => {
            let direction = find(data, 3).and_then(|bytes| bytes.first().copied());
            (Property::Connection { key: number_in(data, 2)?, direction }, None)
        }
        "fib" => {
            let flags = number_in(data, 3).unwrap_or_default();
            (Property::Route { result: number_in(data, 2)?, flags }, None)
        }
        _ => (Property::Other(name.to_owned()), None),
    };
    Some(found)
}

fn comparison(number: u32) -> Option<Comparison> {
    use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
    let all = [Equal, NotEqual, Less, LessOrEqual, Greater, GreaterOrEqual];
    all.get(number as usize).copied()
}

fn lookup(data: &[u8]) -> Option<Instruction> {
    let is_in = number_in(data, 5).unwrap_or(0) & 1 == 0;
    let then = match number_in(data, 3) {
        None => Lookup::Continue(is_in),
        Some(VERDICT) => Lookup::Verdict,
        Some(_) => Lookup::Load(place(data, 3)?),
    };
    Some(Instruction::Lookup { set: text_in(data, 1)?, at: place(data, 2)?, then })
}

fn queue(data: &[u8]) -> Instruction {
    let short =
        |kind| find(data, kind).and_then(|it| Some(u16::from_be_bytes(it.try_into().ok()?)));
    let is_one = short(2).is_none_or(|total| total <= 1);
    let number = short(1).filter(|_| is_one && find(data, 4).is_none());
    Instruction::Queue { number, bypass: short(3).unwrap_or_default() & 1 != 0 }
}

fn extension(data: &[u8]) -> Option<Extension> {
    Some(Extension {
        name: text_in(data, 1)?,
        revision: number_in(data, 2).unwrap_or_default(),
        info: find(data, 3).unwrap_or_default().to_vec(),
    })
}

/// The verdict in an attribute with data.
fn jump(data: &[u8]) -> Option<Jump> {
    let verdict = find(data, DATA_VERDICT)?;
    Some(Jump { code: number_in(verdict, CODE)?, chain: text_in(verdict, TO_CHAIN) })
}

fn value_in(data: &[u8], kind: u16) -> Option<Vec<u8>> {
    Some(find(find(data, kind)?, VALUE)?.to_vec())
}

/// The offset of the register in the attribute `kind`.
fn place(data: &[u8], kind: u16) -> Option<usize> {
    let register = number_in(data, kind)?;
    let offset = match register {
        FIRST..=FOURTH => (register - FIRST) * 16,
        FIRST_WORD.. => (register - FIRST_WORD).checked_mul(4)?,
        _ => return None,
    };
    Some(offset as usize).filter(|offset| *offset < REGISTERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_make_the_reader_panic() {
        for len in 0..64u8 {
            let bytes: Vec<u8> = (0..len).map(|n| n.wrapping_mul(37) % 7).collect();
            let _ = instructions(&bytes);
            for name in ["immediate", "cmp", "range", "bitwise", "lookup", "payload", "queue"] {
                let _ = instruction(name, &bytes);
            }
        }
    }
}
