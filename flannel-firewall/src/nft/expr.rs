//! nf_tables expressions: the instructions of a rule.
//!
//! They are compared as values and not as bytes, because the kernel adds attributes. Unknown
//! expressions are [`Expr::Other`], which differs from each expression of flannel.
//!
//! **Source**: linux `include/uapi/linux/netfilter/nf_tables.h`.

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::object::LinkName;
use flannel_netlink::netfilter::{Attributes, Messages};
use std::net::IpAddr;

use crate::rules::{Rule, Side, Verdict};

/// `NFT_REG_VERDICT` and `NFT_REG_1`: the verdict, and a register of 16 bytes.
const VERDICT: u32 = 0;
const REGISTER: u32 = 1;
/// `NFT_REG32_01`: the second 4 bytes of [`REGISTER`].
const SECOND: u32 = 9;
/// `NFT_META_MARK`, `NFT_META_IIFNAME`, `NFT_META_OIFNAME`, `NFT_META_NFPROTO`.
pub(crate) const MARK: u32 = 3;
pub(crate) const IN: u32 = 6;
const OUT: u32 = 7;
pub(crate) const NFPROTO: u32 = 15;
/// `NFT_META_L4PROTO`: the protocol after all extension headers.
pub(crate) const L4PROTO: u32 = 16;
/// `NFT_PAYLOAD_NETWORK_HEADER` and `NFT_PAYLOAD_TRANSPORT_HEADER`.
const NETWORK_HEADER: u32 = 1;
const TRANSPORT_HEADER: u32 = 2;
/// `NFT_CMP_EQ` and `NFT_CMP_NEQ`.
const COMPARE: [u32; 2] = [0, 1];
/// `NF_DROP`, `NF_ACCEPT` and `NFT_RETURN`.
pub(crate) const DROP: u32 = 0;
pub(crate) const ACCEPT: u32 = 1;
const RETURN: u32 = (-5i32).cast_unsigned();
/// `NFT_LOOKUP_F_INV`.
const INVERTED: u32 = 1;
/// `NFTA_COUNTER_PACKETS`.
const PACKETS: u16 = 2;
/// `IFNAMSIZ`: the length of the name of a device, with zero bytes at its end.
const NAME_LEN: usize = 16;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const FULLY_RANDOM: u32 = 1 << 4;

/// `NFTA_LIST_ELEM`, `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`, `NFTA_DATA_VALUE`, `NFTA_DATA_VERDICT`,
/// `NFTA_VERDICT_CODE`.
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;
const VALUE: u16 = 1;
const DATA_VERDICT: u16 = 2;
const CODE: u16 = 1;

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Expr {
    /// Loads the property `NFT_META_…` of the packet.
    Meta(u32),
    /// Loads a value.
    Value(Vec<u8>),
    /// Sets the property `NFT_META_…` of the packet to the loaded value.
    SetMeta(u32),
    /// Loads bytes of the network header.
    Header { offset: u32, len: u32 },
    /// Loads bytes from the transport header on. Ends the rule if the packet is shorter.
    Transport { offset: u32, len: u32 },
    /// Loads 4 bytes like [`Self::Transport`], and puts them after the 4 bytes of the loaded value.
    Second { offset: u32 },
    /// Clears the bits of the value of [`Self::Second`] that the mask lacks.
    SecondMask([u8; 4]),
    /// Clears the bits of the loaded value that the mask lacks.
    Mask(Vec<u8>),
    /// Continues only if the loaded value is equal to `value`, or if it is not (`equal`: false).
    Compare { equal: bool, value: Vec<u8> },
    /// Continues only if the set has the loaded value (`is_in`), or if it does not.
    Set { name: String, is_in: bool },
    /// Counts the packets that come so far. The number is not part of the value ([`packets`]).
    Counter,
    /// Ends the rule with the verdict `NF_…` or `NFT_…`.
    Verdict(u32),
    /// Masquerades, with flags `NF_NAT_RANGE_…`.
    Masquerade { flags: u32 },
    /// An expression that flannel does not use.
    Other(String),
}

/// The instructions of a rule.
pub(crate) fn of(rule: &Rule) -> Vec<Expr> {
    let mut exprs = Vec::new();
    if let Some(mark) = rule.mark {
        // A mark is in the machine's byte order.
        let bits = mark.to_ne_bytes().to_vec();
        exprs.extend([
            Expr::Meta(MARK),
            Expr::Mask(bits.clone()),
            Expr::Compare { equal: true, value: bits },
        ]);
    }
    for (side, is_source) in [(rule.source, true), (rule.destination, false)] {
        let (subnet, equal) = match side {
            None => continue,
            Some(Side::In(subnet)) => (subnet, true),
            Some(Side::NotIn(subnet)) => (subnet, false),
        };
        exprs.push(address_of(subnet.family(), is_source));
        if subnet.len() < subnet.family().bits() {
            exprs.push(Expr::Mask(mask(subnet)));
        }
        exprs.push(Expr::Compare { equal, value: octets(subnet.base()) });
    }
    if let Some(device) = rule.device {
        exprs.extend([Expr::Meta(OUT), is_device(device)]);
    }
    exprs.extend((rule.verdict == Verdict::Drop).then_some(Expr::Counter));
    exprs.push(match rule.verdict {
        Verdict::Return => Expr::Verdict(RETURN),
        Verdict::Accept => Expr::Verdict(ACCEPT),
        Verdict::Drop => Expr::Verdict(DROP),
        Verdict::Masquerade { fully_random } => {
            Expr::Masquerade { flags: if fully_random { FULLY_RANDOM } else { 0 } }
        }
    });
    exprs
}

/// Continues only if the packet has arrived by this device.
pub(crate) fn arrived_by(device: LinkName) -> [Expr; 2] {
    [Expr::Meta(IN), is_device(device)]
}

/// Continues only if the loaded name is that of the device.
fn is_device(device: LinkName) -> Expr {
    let mut value = device.as_str().as_bytes().to_vec();
    value.resize(NAME_LEN, 0);
    Expr::Compare { equal: true, value }
}

/// Loads the source or destination address.
pub(crate) fn address_of(family: Family, is_source: bool) -> Expr {
    let (offset, len) = match (family, is_source) {
        (Family::V4, true) => (12, 4),
        (Family::V4, false) => (16, 4),
        (Family::V6, true) => (8, 16),
        (Family::V6, false) => (24, 16),
    };
    Expr::Header { offset, len }
}

/// Drops packets of an IP protocol to an address (`None`: any) whose source is not in the set.
pub(crate) fn drop_others(
    family: Family,
    protocol: u8,
    local: Option<IpAddr>,
    set: &str,
) -> Vec<Expr> {
    let mut exprs = vec![Expr::Meta(L4PROTO), Expr::Compare { equal: true, value: vec![protocol] }];
    if let Some(local) = local {
        let value = octets(local);
        exprs.extend([address_of(family, false), Expr::Compare { equal: true, value }]);
    }
    let others = [address_of(family, true), Expr::Set { name: set.to_owned(), is_in: false }];
    exprs.extend(others);
    exprs.extend([Expr::Counter, Expr::Verdict(DROP)]);
    exprs
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().into(),
        IpAddr::V6(address) => address.octets().into(),
    }
}

fn mask(subnet: Subnet) -> Vec<u8> {
    let bits = u32::from(subnet.family().bits() - subnet.len());
    let mask = u128::MAX.checked_shl(bits).unwrap_or(0).to_be_bytes();
    mask[16 - usize::from(subnet.family().bits() / 8)..].to_vec()
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
    let elements = Attributes(list).filter(|(kind, _)| *kind == ELEMENT);
    elements.map(|(_, element)| Expr::read(element)).collect()
}

/// The number of packets that the counters in a list of instructions have counted.
pub(crate) fn packets(list: &[u8]) -> u64 {
    let elements = Attributes(list).filter(|(kind, _)| *kind == ELEMENT);
    let counted = |element| {
        let is_counter = find(element, NAME) == Some(b"counter\0");
        let packets = find(find(element, DATA).filter(|_| is_counter)?, PACKETS)?;
        Some(u64::from_be_bytes(packets.try_into().ok()?))
    };
    elements.filter_map(|(_, element)| counted(element)).fold(0, u64::saturating_add)
}

impl Expr {
    fn name(&self) -> &str {
        match self {
            Self::Meta(_) | Self::SetMeta(_) => "meta",
            Self::Value(_) => "immediate",
            Self::Header { .. } | Self::Transport { .. } | Self::Second { .. } => "payload",
            Self::Mask(_) | Self::SecondMask(_) => "bitwise",
            Self::Compare { .. } => "cmp",
            Self::Set { .. } => "lookup",
            Self::Counter => "counter",
            Self::Verdict(_) => "immediate",
            Self::Masquerade { .. } => "masq",
            Self::Other(name) => name,
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
            Self::Second { offset } => load(data, SECOND, TRANSPORT_HEADER, *offset, 4),
            Self::Mask(mask) => clear(data, REGISTER, mask),
            Self::SecondMask(mask) => clear(data, SECOND, mask),
            Self::Compare { equal, value } => {
                number(number(data, 1, REGISTER), 2, COMPARE[usize::from(!equal)]);
                data.nest(3u16, |data| _ = data.attr(VALUE, value));
            }
            Self::Set { name, is_in } => {
                number(data.text(1u16, name), 2, REGISTER);
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
            Self::Masquerade { flags: 0 } | Self::Counter | Self::Other(_) => {}
            Self::Masquerade { flags } => _ = number(data, 1, *flags),
        }
    }

    fn read(element: &[u8]) -> Self {
        let name = find(element, NAME).and_then(|name| name.split_last()).map(|(_, name)| name);
        let name = String::from_utf8_lossy(name.unwrap_or_default()).into_owned();
        let data = find(element, DATA).unwrap_or_default();
        Self::known(&name, data).unwrap_or(Self::Other(name))
    }

    /// `None` for an expression that flannel does not write.
    fn known(name: &str, data: &[u8]) -> Option<Self> {
        let is = |kind, value| number_in(data, kind) == Some(value);
        let value = |kind| Some(find(find(data, kind)?, VALUE)?.to_vec());
        match name {
            "meta" if is(1, REGISTER) => Some(Self::Meta(number_in(data, 2)?)),
            "meta" if is(3, REGISTER) => Some(Self::SetMeta(number_in(data, 2)?)),
            "immediate" if is(1, REGISTER) => Some(Self::Value(value(2)?)),
            "payload" => {
                let (offset, len) = (number_in(data, 3)?, number_in(data, 4)?);
                match (number_in(data, 1)?, number_in(data, 2)?) {
                    (REGISTER, NETWORK_HEADER) => Some(Self::Header { offset, len }),
                    (REGISTER, TRANSPORT_HEADER) => Some(Self::Transport { offset, len }),
                    (SECOND, TRANSPORT_HEADER) if len == 4 => Some(Self::Second { offset }),
                    _ => None,
                }
            }
            // Operation 0 is mask and xor. Older kernels have no other operation, and omit it.
            "bitwise" if number_in(data, 6).unwrap_or(0) == 0 => {
                let flips_nothing = value(5)?.iter().all(|byte| *byte == 0);
                let mask = value(4).filter(|_| flips_nothing)?;
                match (number_in(data, 1)?, number_in(data, 2)?) {
                    (REGISTER, REGISTER) => Some(Self::Mask(mask)),
                    (SECOND, SECOND) => Some(Self::SecondMask(mask.try_into().ok()?)),
                    _ => None,
                }
            }
            "cmp" if is(1, REGISTER) => {
                let operation = number_in(data, 2)?;
                let equal = COMPARE.iter().position(|known| *known == operation)? == 0;
                Some(Self::Compare { equal, value: value(3)? })
            }
            "lookup" if is(2, REGISTER) && find(data, 3).is_none() => {
                let is_in = match number_in(data, 5) {
                    Some(INVERTED) => false,
                    None | Some(0) => true,
                    Some(_) => return None,
                };
                Some(Self::Set { name: text_in(data, 1)?, is_in })
            }
            "counter" => Some(Self::Counter),
            "immediate" if is(1, VERDICT) => {
                Some(Self::Verdict(number_in(find(find(data, 2)?, DATA_VERDICT)?, CODE)?))
            }
            // The expression that flannel writes has no port registers.
            "masq" if find(data, 2).is_none() && find(data, 3).is_none() => {
                Some(Self::Masquerade { flags: number_in(data, 1).unwrap_or(0) })
            }
            _ => None,
        }
    }
}

/// Writes a load of bytes from a header.
fn load(data: &mut Messages, register: u32, header: u32, offset: u32, len: u32) {
    number(number(data, 1, register), 2, header);
    number(number(data, 3, offset), 4, len);
}

/// Writes the clearing of the bits of a register that the mask lacks.
fn clear(data: &mut Messages, register: u32, mask: &[u8]) {
    let len = u32::try_from(mask.len()).expect("a register has 16 bytes");
    number(number(number(data, 1, register), 2, register), 3, len);
    data.nest(4u16, |value| _ = value.attr(VALUE, mask));
    data.nest(5u16, |value| _ = value.attr(VALUE, &vec![0; mask.len()]));
}

/// Adds a number in network byte order.
pub(crate) fn number(message: &mut Messages, kind: u16, value: u32) -> &mut Messages {
    message.attr(kind, &value.to_be_bytes())
}

/// The value of the first attribute of the type `kind`.
pub(crate) fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    Attributes(attributes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// The text, without its terminating zero byte, in the first attribute of the type `kind`.
pub(crate) fn text_in(attributes: &[u8], kind: u16) -> Option<String> {
    let text = find(attributes, kind)?.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// The number, in network byte order, in the first attribute of the type `kind`.
pub(crate) fn number_in(attributes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(find(attributes, kind)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_mask_of_its_familys_length() {
        for (subnet, want) in [
            ("10.1.0.0/16", vec![255, 255, 0, 0]),
            ("10.1.64.0/19", vec![255, 255, 0xe0, 0]),
            ("10.1.2.3/32", vec![255; 4]),
            ("fd00::/8", [vec![255], vec![0; 15]].concat()),
            ("fd00::/127", [vec![255; 15], vec![254]].concat()),
        ] {
            assert_eq!(mask(subnet.parse().unwrap()), want, "{subnet}");
        }
    }

    #[test]
    fn a_rule_is_loads_comparisons_and_a_verdict() {
        let side = |text: &str| Side::In(text.parse().unwrap());
        let rule = Rule {
            mark: None,
            source: Some(side("10.1.0.0/16")),
            destination: Some(Side::NotIn("10.2.0.9/32".parse().unwrap())),
            device: None,
            verdict: Verdict::Masquerade { fully_random: true },
        };
        assert_eq!(
            of(&rule),
            [
                Expr::Header { offset: 12, len: 4 },
                Expr::Mask(vec![255, 255, 0, 0]),
                Expr::Compare { equal: true, value: vec![10, 1, 0, 0] },
                Expr::Header { offset: 16, len: 4 },
                Expr::Compare { equal: false, value: vec![10, 2, 0, 9] },
                Expr::Masquerade { flags: 16 },
            ]
        );
    }

    #[test]
    fn no_bytes_make_the_reader_panic() {
        for len in 0..64u8 {
            let bytes: Vec<u8> = (0..len).map(|n| n.wrapping_mul(37) % 7).collect();
            let _ = (read(&bytes), packets(&bytes));
            let _ = Expr::read(&bytes);
        }
    }
}
