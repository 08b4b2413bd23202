//! nf_tables expressions: the instructions of a rule.
//!
//! They are compared as values and not as bytes, because the kernel adds attributes.

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::object::LinkName;

use crate::netfilter::{Attributes, Messages};
use crate::nftables::attributes::{find, number, number_in, text_in};

/// Properties of a packet (`NFT_META_…`).
pub mod meta {
    /// The mark, in the machine's byte order.
    pub const MARK: u32 = 3;
    /// The name of the device by which the packet arrived, 16 bytes.
    pub const IIFNAME: u32 = 6;
    /// The name of the device by which the packet leaves, 16 bytes.
    pub const OIFNAME: u32 = 7;
    /// The family (`NFPROTO_…`), one byte.
    pub const NFPROTO: u32 = 15;
    /// The protocol after all extension headers, one byte.
    pub const L4PROTO: u32 = 16;
}

/// Verdicts, which end a rule or a chain (`NF_…` and `NFT_…`).
pub mod verdict {
    /// The packet is dropped.
    pub const DROP: u32 = 0;
    /// The packet goes on to the chains of other tables.
    pub const ACCEPT: u32 = 1;
    /// A base chain ends with its policy. A regular chain returns to the chain that jumped to it.
    pub const RETURN: u32 = (-5i32).cast_unsigned();
}

/// Kinds of addresses (`RTN_…`).
pub mod kind {
    /// The address belongs to this host, or to the device.
    pub const LOCAL: u32 = 2;
}

/// `NFT_REG_VERDICT` and `NFT_REG_1`: the verdict, and a register of 16 bytes.
const VERDICT: u32 = 0;
const REGISTER: u32 = 1;
/// `NFT_REG32_01`: the second 4 bytes of [`REGISTER`].
const SECOND: u32 = 9;
/// `NFT_REG_2` and `NFT_REG_3`: the registers of [`Expr::FirstPort`] and [`Expr::LastPort`].
const FIRST_PORT: u32 = 2;
const LAST_PORT: u32 = 3;
/// `NF_NAT_RANGE_MAP_IPS` and `NF_NAT_RANGE_PROTO_SPECIFIED`, which kernels add themselves.
const MAPS_ADDRESS: u32 = 1;
const MAPS_PORTS: u32 = 2;
/// `NFT_NAT_SNAT`.
const OF_SOURCE: u32 = 0;
/// `NFT_PAYLOAD_NETWORK_HEADER` and `NFT_PAYLOAD_TRANSPORT_HEADER`.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
/// `NFT_CMP_EQ` and `NFT_CMP_NEQ`.
const EQUAL: u32 = 0;
const NOT_EQUAL: u32 = 1;
/// `NFT_FIB_RESULT_OIF` and `NFT_FIB_RESULT_ADDRTYPE`.
const FIB_DEVICE: u32 = 1;
const FIB_KIND: u32 = 3;
/// `NFTA_FIB_F_SADDR` and `NFTA_FIB_F_DADDR`, and each one with `NFTA_FIB_F_IIF`.
const FIB_SOURCE: u32 = 1;
const FIB_DESTINATION: u32 = 2;
const FIB_SOURCE_AND_DEVICE: u32 = 1 | 8;
const FIB_DESTINATION_AND_DEVICE: u32 = 2 | 8;
/// `NFT_LOOKUP_F_INV`.
const INVERTED: u32 = 1;
/// `NFTA_COUNTER_PACKETS`.
const PACKETS: u16 = 2;
/// `IFNAMSIZ`: the length of the name of a device, with zero bytes at its end.
const NAME_LEN: usize = 16;

/// `NFTA_LIST_ELEM`, `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`, `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`,
/// `NFTA_VERDICT_CODE`, `NFTA_VERDICT_CHAIN`.
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;
const VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const CODE: u16 = 1;
const TO_CHAIN: u16 = 2;

/// One instruction. All loads use one register, so a load overwrites the value of the load before.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expr {
    /// Loads a property of the packet ([`meta`]).
    Meta(u32),
    /// Loads a value.
    Value(Vec<u8>),
    /// Sets a property of the packet ([`meta`]) to the loaded value.
    SetMeta(u32),
    /// Loads bytes of the network header.
    Header {
        /// The offset of the first byte.
        offset: u32,
        /// The number of bytes, at most 16.
        len: u32,
    },
    /// Loads bytes of the transport header or after it. Ends the rule if the packet is shorter.
    Transport {
        /// The offset of the first byte.
        offset: u32,
        /// The number of bytes, at most 16.
        len: u32,
    },
    /// Loads bytes of the network header, and appends them to a loaded value of 4 bytes, such as a
    /// mark. A [`Self::Lookup`] after it looks for both parts as one key.
    AppendHeader {
        /// The offset of the first byte.
        offset: u32,
        /// The number of bytes, at most 16.
        len: u32,
    },
    /// Clears the bits of the value of [`Self::AppendHeader`] that the mask lacks.
    MaskAppended(Vec<u8>),
    /// Loads the index of the device by which the packet arrived, 4 bytes, if the route back to its
    /// source leaves by that device, else 0. The kernel accepts it only in chains of the hooks
    /// [`PREROUTING`](crate::nftables::hook::PREROUTING), [`INPUT`](crate::nftables::hook::INPUT)
    /// and [`FORWARD`](crate::nftables::hook::FORWARD).
    WayBack,
    /// Loads the [`kind`] of the source address, 4 bytes in the machine's byte order.
    SourceKind,
    /// Loads the [`kind`] of the destination address at the device by which the packet arrived, 4
    /// bytes in the machine's byte order. The kernel accepts it in the same chains as
    /// [`Self::WayBack`].
    KindAtArrival,
    /// Clears the bits of the loaded value that the mask lacks.
    Mask(Vec<u8>),
    /// Compares the loaded value.
    Compare {
        /// Continues only if both are equal (true), or only if they are not.
        equal: bool,
        /// The other value.
        value: Vec<u8>,
    },
    /// Looks for the loaded value in a set of the table.
    Lookup {
        /// The name of the set.
        set: String,
        /// Continues only if it has the value (true), or only if it does not.
        is_in: bool,
    },
    /// Loads the index of the device by which a packet to its destination leaves, as 4 bytes in the
    /// machine's byte order. It is 0 without a route, or if the route drops packets. It works
    /// only before the kernel has chosen the route. Not every kernel has this instruction
    /// (`nft_fib_ipv4`, `nft_fib_ipv6`).
    OutDevice,
    /// Loads the value of the loaded key in a map of the table. Ends the rule if the map lacks the
    /// key.
    Map {
        /// The name of the map.
        map: String,
    },
    /// Counts the packets that reach it. The count is not part of the value. See
    /// [`Table::counted`](crate::nftables::Table::counted).
    Counter,
    /// Ends the rule with a [`verdict`].
    Verdict(u32),
    /// Gives the packet the address of the device by which it leaves.
    Masquerade {
        /// `NF_NAT_RANGE_…`.
        flags: u32,
    },
    /// Loads the first port for [`Self::SourceNat`]. It does not overwrite the loaded value.
    FirstPort(u16),
    /// Loads the last port for [`Self::SourceNat`]. It does not overwrite the loaded value.
    LastPort(u16),
    /// Gives the packet another source.
    SourceNat {
        /// The loaded value is the address, of this family. `None` for the address of the device by
        /// which the packet leaves.
        address: Option<Family>,
        /// The source port is one from [`Self::FirstPort`] to [`Self::LastPort`]. Without address
        /// and ports, it is [`Self::Masquerade`].
        ports: bool,
        /// `NF_NAT_RANGE_…`, without the flags that say whether there are addresses and ports.
        flags: u32,
    },
    /// An instruction that this crate does not know.
    Other {
        /// Its name.
        name: String,
        /// Its attributes, as the kernel sent them.
        data: Vec<u8>,
    },
}

/// Continues only if the packet has arrived by this device.
pub fn arrived_by(device: LinkName) -> [Expr; 2] {
    [Expr::Meta(meta::IIFNAME), is_device(device)]
}

/// Continues only if the loaded name is the name of the device.
pub fn is_device(device: LinkName) -> Expr {
    Expr::Compare { equal: true, value: padded(device) }
}

/// Continues only if the loaded name names another device.
pub fn is_other_device(device: LinkName) -> Expr {
    Expr::Compare { equal: false, value: padded(device) }
}

/// A name as the kernel loads it.
fn padded(device: LinkName) -> Vec<u8> {
    let mut value = device.as_str().as_bytes().to_vec();
    value.resize(NAME_LEN, 0);
    value
}

/// Loads the source or destination address.
pub fn address_of(family: Family, is_source: bool) -> Expr {
    let (offset, len) = match (family, is_source) {
        (Family::V4, true) => (12, 4),
        (Family::V4, false) => (16, 4),
        (Family::V6, true) => (8, 16),
        (Family::V6, false) => (24, 16),
    };
    Expr::Header { offset, len }
}

/// The bytes of an address, as they are in packets and in elements of sets.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

/// Writes a list of instructions as attribute `kind`.
pub(crate) fn write(message: &mut Messages, kind: u16, exprs: &[Expr]) {
    message.nest(kind, |list| {
        for expr in exprs {
            list.nest(ELEMENT, |element| {
                element.text(NAME, expr.name()).nest(DATA, |data| expr.write(data));
            });
        }
    });
}

/// Reads a list of instructions.
pub(crate) fn read(list: &[u8]) -> Vec<Expr> {
    elements(list).map(Expr::read).collect()
}

/// The number of packets that the counters in a list of instructions have counted.
pub(crate) fn packets(list: &[u8]) -> u64 {
    elements(list).filter_map(counted).fold(0, u64::saturating_add)
}

/// The instructions in a list.
fn elements(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    Attributes(list).filter(|(kind, _)| *kind == ELEMENT).map(|(_, element)| element)
}

/// The number of packets that an instruction has counted. `None` if it is not a counter.
fn counted(element: &[u8]) -> Option<u64> {
    if find(element, NAME)? != b"counter\0" {
        return None;
    }
    let packets = find(find(element, DATA)?, PACKETS)?;
    Some(u64::from_be_bytes(packets.try_into().ok()?))
}

impl Expr {
    fn name(&self) -> &str {
        match self {
            Self::Meta(_) | Self::SetMeta(_) => "meta",
            Self::Value(_) => "immediate",
            Self::Header { .. } | Self::Transport { .. } | Self::AppendHeader { .. } => "payload",
            Self::Mask(_) | Self::MaskAppended(_) => "bitwise",
            Self::Compare { .. } => "cmp",
            Self::Lookup { .. } | Self::Map { .. } => "lookup",
            Self::WayBack | Self::OutDevice | Self::SourceKind | Self::KindAtArrival => "fib",
            Self::Counter => "counter",
            Self::Verdict(_) => "immediate",
            Self::FirstPort(_) | Self::LastPort(_) => "immediate",
            Self::Masquerade { .. } | Self::SourceNat { address: None, .. } => "masq",
            Self::SourceNat { address: Some(_), .. } => "nat",
            Self::Other { name, .. } => name,
        }
    }

    fn write(&self, data: &mut Messages) {
        match self {
            Self::Meta(key) => {
                number(number(data, 1, REGISTER), 2, *key);
            }
            Self::SetMeta(key) => {
                number(number(data, 2, *key), 3, REGISTER);
            }
            Self::Value(value) => {
                number(data, 1, REGISTER).nest(2u16, |data| _ = data.attr(VALUE, value));
            }
            Self::Header { offset, len } => load(data, REGISTER, NETWORK_HEADER, *offset, *len),
            Self::Transport { offset, len } => {
                load(data, REGISTER, TRANSPORT_HEADER, *offset, *len);
            }
            Self::AppendHeader { offset, len } => load(data, SECOND, NETWORK_HEADER, *offset, *len),
            Self::WayBack => fib(data, FIB_DEVICE, FIB_SOURCE_AND_DEVICE),
            Self::OutDevice => fib(data, FIB_DEVICE, FIB_DESTINATION),
            Self::SourceKind => fib(data, FIB_KIND, FIB_SOURCE),
            Self::KindAtArrival => fib(data, FIB_KIND, FIB_DESTINATION_AND_DEVICE),
            Self::Map { map } => {
                number(number(data.text(1u16, map), 2, REGISTER), 3, REGISTER);
            }
            Self::Mask(mask) => clear(data, REGISTER, mask),
            Self::MaskAppended(mask) => clear(data, SECOND, mask),
            Self::Compare { equal, value } => {
                let operation = if *equal { EQUAL } else { NOT_EQUAL };
                number(number(data, 1, REGISTER), 2, operation);
                data.nest(3u16, |data| _ = data.attr(VALUE, value));
            }
            Self::Lookup { set, is_in } => {
                number(data.text(1u16, set), 2, REGISTER);
                if !is_in {
                    number(data, 5, INVERTED);
                }
            }
            Self::Verdict(code) => {
                number(data, 1, VERDICT);
                data.nest(2u16, |data| {
                    _ = data.nest(DATA_VERDICT, |verdict| _ = number(verdict, CODE, *code));
                });
            }
            Self::Masquerade { flags: 0 } | Self::Counter => {}
            Self::Other { data: attributes, .. } => {
                for (kind, value) in Attributes(attributes) {
                    data.attr(kind, value);
                }
            }
            Self::Masquerade { flags } => _ = number(data, 1, *flags),
            Self::FirstPort(port) => load_port(data, FIRST_PORT, *port),
            Self::LastPort(port) => load_port(data, LAST_PORT, *port),
            Self::SourceNat { address, ports, flags } => {
                write_source_nat(data, *address, *ports, *flags);
            }
        }
    }

    fn read(element: &[u8]) -> Self {
        let name = find(element, NAME).and_then(|name| name.split_last()).map(|(_, name)| name);
        let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
        let data = find(element, DATA).unwrap_or_default();
        Self::known(&name, data).unwrap_or_else(|| Self::Other { name, data: data.to_vec() })
    }

    /// Reads an instruction. `None` for an instruction that this crate does not write.
    fn known(name: &str, data: &[u8]) -> Option<Self> {
        let is = |kind, value| number_in(data, kind) == Some(value);
        match name {
            "meta" if is(1, REGISTER) => Some(Self::Meta(number_in(data, 2)?)),
            "meta" if is(3, REGISTER) => Some(Self::SetMeta(number_in(data, 2)?)),
            "immediate" if is(1, REGISTER) => Some(Self::Value(value_in(data, 2)?)),
            "immediate" if is(1, FIRST_PORT) => Some(Self::FirstPort(port_in(data)?)),
            "immediate" if is(1, LAST_PORT) => Some(Self::LastPort(port_in(data)?)),
            "immediate" if is(1, VERDICT) => read_verdict(data),
            "payload" => read_payload(data),
            "bitwise" => read_bitwise(data),
            "cmp" if is(1, REGISTER) => {
                let equal = match number_in(data, 2)? {
                    EQUAL => true,
                    NOT_EQUAL => false,
                    _ => return None,
                };
                Some(Self::Compare { equal, value: value_in(data, 3)? })
            }
            "lookup" if is(2, REGISTER) => read_lookup(data),
            "fib" if is(1, REGISTER) => match (number_in(data, 2)?, number_in(data, 3)?) {
                (FIB_DEVICE, FIB_SOURCE_AND_DEVICE) => Some(Self::WayBack),
                (FIB_DEVICE, FIB_DESTINATION) => Some(Self::OutDevice),
                (FIB_KIND, FIB_SOURCE) => Some(Self::SourceKind),
                (FIB_KIND, FIB_DESTINATION_AND_DEVICE) => Some(Self::KindAtArrival),
                _ => None,
            },
            "counter" => Some(Self::Counter),
            "masq" if find(data, 2).is_none() && find(data, 3).is_none() => {
                Some(Self::Masquerade { flags: number_in(data, 1).unwrap_or(0) })
            }
            "masq" => read_source_nat(data, None, [2, 3], 1),
            "nat" if is(1, OF_SOURCE) && is(3, REGISTER) && is(4, REGISTER) => {
                let family = number_in(data, 2)?;
                let family = Family::BOTH.into_iter().find(|it| protocol_of(*it) == family)?;
                read_source_nat(data, Some(family), [5, 6], 7)
            }
            _ => None,
        }
    }
}

/// The value in the attribute `kind`.
fn value_in(data: &[u8], kind: u16) -> Option<Vec<u8>> {
    Some(find(find(data, kind)?, VALUE)?.to_vec())
}

fn read_verdict(data: &[u8]) -> Option<Expr> {
    let verdict = find(find(data, 2)?, DATA_VERDICT)?;
    // A verdict with a chain is a jump.
    if find(verdict, TO_CHAIN).is_some() {
        return None;
    }
    Some(Expr::Verdict(number_in(verdict, CODE)?))
}

/// The port that an instruction loads.
fn port_in(data: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(value_in(data, 2)?.try_into().ok()?))
}

/// Writes a load of a port.
fn load_port(data: &mut Messages, register: u32, port: u16) {
    number(data, 1, register).nest(2u16, |data| _ = data.attr(VALUE, &port.to_be_bytes()));
}

/// Reads an instruction that gives a packet another source. `registers` are the attributes of the
/// registers of its ports.
fn read_source_nat(
    data: &[u8],
    address: Option<Family>,
    registers: [u16; 2],
    flags: u16,
) -> Option<Expr> {
    let ports = match registers.map(|kind| number_in(data, kind)) {
        [None, None] => false,
        [Some(FIRST_PORT), Some(LAST_PORT)] => true,
        _ => return None,
    };
    let flags = number_in(data, flags).unwrap_or(0) & !(MAPS_ADDRESS | MAPS_PORTS);
    Some(Expr::SourceNat { address, ports, flags })
}

/// Writes an instruction that gives a packet another source.
fn write_source_nat(data: &mut Messages, address: Option<Family>, ports: bool, flags: u32) {
    let mut flags = flags;
    let (registers, of_flags) = match address {
        None => ([2, 3], 1),
        Some(family) => {
            number(number(data, 1, OF_SOURCE), 2, protocol_of(family));
            number(number(data, 3, REGISTER), 4, REGISTER);
            flags |= MAPS_ADDRESS;
            ([5, 6], 7)
        }
    };
    if ports {
        number(number(data, registers[0], FIRST_PORT), registers[1], LAST_PORT);
        flags |= MAPS_PORTS;
    }
    if flags != 0 {
        number(data, of_flags, flags);
    }
}

/// `NFPROTO_…`.
fn protocol_of(family: Family) -> u32 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

fn read_payload(data: &[u8]) -> Option<Expr> {
    let offset = number_in(data, 3)?;
    let len = number_in(data, 4)?;
    match (number_in(data, 1)?, number_in(data, 2)?) {
        (REGISTER, NETWORK_HEADER) => Some(Expr::Header { offset, len }),
        (REGISTER, TRANSPORT_HEADER) => Some(Expr::Transport { offset, len }),
        (SECOND, NETWORK_HEADER) => Some(Expr::AppendHeader { offset, len }),
        _ => None,
    }
}

fn read_bitwise(data: &[u8]) -> Option<Expr> {
    // Operation 0 is mask and xor. Older kernels have no other operation, and omit it.
    let operation = number_in(data, 6).unwrap_or(0);
    let xor = value_in(data, 5)?;
    if operation != 0 || xor.iter().any(|byte| *byte != 0) {
        return None;
    }
    let mask = value_in(data, 4)?;
    match (number_in(data, 1)?, number_in(data, 2)?) {
        (REGISTER, REGISTER) => Some(Expr::Mask(mask)),
        (SECOND, SECOND) => Some(Expr::MaskAppended(mask)),
        _ => None,
    }
}

/// Reads a lookup in a set, or in a map if it has a register for the value.
fn read_lookup(data: &[u8]) -> Option<Expr> {
    let name = text_in(data, 1)?;
    let has_value = find(data, 3).is_some();
    match number_in(data, 5).unwrap_or(0) {
        0 if has_value && number_in(data, 3) == Some(REGISTER) => Some(Expr::Map { map: name }),
        0 if !has_value => Some(Expr::Lookup { set: name, is_in: true }),
        INVERTED if !has_value => Some(Expr::Lookup { set: name, is_in: false }),
        _ => None,
    }
}

/// Writes a lookup in the routes.
fn fib(data: &mut Messages, result: u32, flags: u32) {
    number(number(number(data, 1, REGISTER), 2, result), 3, flags);
}

/// Writes a load of bytes from a header.
fn load(data: &mut Messages, register: u32, header: u32, offset: u32, len: u32) {
    number(number(data, 1, register), 2, header);
    number(number(data, 3, offset), 4, len);
}

/// Writes an instruction that clears the bits of a register that the mask lacks.
fn clear(data: &mut Messages, register: u32, mask: &[u8]) {
    // The kernel refuses a mask that is longer than a register.
    let len = u32::try_from(mask.len()).unwrap_or(u32::MAX);
    number(number(number(data, 1, register), 2, register), 3, len);
    data.nest(4u16, |value| _ = value.attr(VALUE, mask));
    data.nest(5u16, |value| _ = value.attr(VALUE, &vec![0; mask.len()]));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_bytes_make_the_reader_panic() {
        for len in 0..64u8 {
            let bytes: Vec<u8> = (0..len).map(|n| n.wrapping_mul(37) % 7).collect();
            let _ = (read(&bytes), packets(&bytes));
            let _ = Expr::read(&bytes);
        }
    }
}
