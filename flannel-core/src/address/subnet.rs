//! The value of a subnet.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnetwork::IpNetwork;

use super::{Family, ParseError};

/// An IP subnet of either family, always canonical: bits behind the prefix are zero.
///
/// Parsing is as strict as Go's `net.ParseCIDR` (no missing length, no `+`, no leading zeros) and
/// masks host bits as flannel does: `10.1.2.3/16` is `10.1.0.0/16`. The order is by family, address
/// and length: a subnet comes directly before the subnets inside it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Subnet(IpNetwork);

impl Subnet {
    /// The subnet of `len` bits that `address` lies in; `None` if `len` exceeds the family's bits.
    pub fn new(address: IpAddr, len: u8) -> Option<Self> {
        let family = Family::of(address);
        if len > family.bits() {
            return None;
        }
        Some(Self::from_bits(family, to_bits(address) & mask(family, len), len))
    }

    /// The subnet that holds exactly one address.
    pub fn host(address: IpAddr) -> Self {
        Self::from_bits(Family::of(address), to_bits(address), Family::of(address).bits())
    }

    /// The subnet that holds every address of the family; see [`Subnet::is_everything`].
    pub fn everything(family: Family) -> Self {
        Self::from_bits(family, 0, 0)
    }

    /// `bits` must be masked and `len` within the family's bits.
    fn from_bits(family: Family, bits: u128, len: u8) -> Self {
        let network = IpNetwork::new(from_bits(family, bits), len);
        Self(network.expect("callers keep len within the bits of the family"))
    }

    /// The family.
    pub fn family(&self) -> Family {
        Family::of(self.0.ip())
    }

    /// The first address; flannel's hosts own it on their tunnel device.
    pub fn base(&self) -> IpAddr {
        self.0.ip()
    }

    /// The prefix length in bits.
    #[expect(clippy::len_without_is_empty, reason = "no subnet is empty")]
    pub fn len(&self) -> u8 {
        self.0.prefix()
    }

    /// Every address of the family lies in it (`0.0.0.0/0`, `::/0`), which flannel reads as "no
    /// network".
    pub fn is_everything(&self) -> bool {
        self.len() == 0
    }

    /// The last address.
    pub fn last(&self) -> IpAddr {
        from_bits(self.family(), self.last_bits())
    }

    /// The address `n` after the base; `None` if it lies outside.
    pub fn nth(&self, n: u128) -> Option<IpAddr> {
        let bits = to_bits(self.base()).checked_add(n).filter(|bits| *bits <= self.last_bits())?;
        Some(from_bits(self.family(), bits))
    }

    /// `address` lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        Family::of(address) == self.family()
            && to_bits(address) & mask(self.family(), self.len()) == to_bits(self.base())
    }

    /// All of `other` lies in it (true of itself).
    pub fn covers(&self, other: &Self) -> bool {
        self.len() <= other.len() && self.contains(other.base())
    }

    /// The two share an address: one covers the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }

    /// The subnet of `len` bits around it; `None` if `len` is longer than its own.
    pub fn supernet(&self, len: u8) -> Option<Self> {
        if len > self.len() { None } else { Self::new(self.base(), len) }
    }

    /// The `n`th subnet of the same length after it (0 is itself); `None` past the end of the
    /// address space.
    pub fn step(&self, n: u128) -> Option<Self> {
        let shift = u32::from(self.family().bits() - self.len());
        if n == 0 {
            return Some(*self);
        }
        let distance = n.checked_mul(1u128.checked_shl(shift)?)?;
        let bits = to_bits(self.base()).checked_add(distance)?;
        let end = if self.family() == Family::V4 { u128::from(u32::MAX) } else { u128::MAX };
        (bits <= end).then(|| Self::from_bits(self.family(), bits, self.len()))
    }

    /// Its distance from `first` in subnets of its length; `None` if it is before `first` or the
    /// two differ in family or length.
    pub fn steps_from(&self, first: &Self) -> Option<u128> {
        if self.family() != first.family() || self.len() != first.len() {
            return None;
        }
        let distance = to_bits(self.base()).checked_sub(to_bits(first.base()))?;
        let shift = u32::from(self.family().bits() - self.len());
        Some(distance.checked_shr(shift).unwrap_or(0))
    }

    fn last_bits(&self) -> u128 {
        let family = self.family();
        let all = mask(family, family.bits());
        to_bits(self.base()) | (all & !mask(family, self.len()))
    }
}

/// The bits of an address as a number; IPv4 in the low 32 bits.
fn to_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(a.to_bits()),
        IpAddr::V6(a) => a.to_bits(),
    }
}

fn from_bits(family: Family, bits: u128) -> IpAddr {
    match family {
        // The caller's bits come from an IPv4 address or are checked against u32::MAX.
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

/// The netmask of `len` bits, as a number.
fn mask(family: Family, len: u8) -> u128 {
    let all = if family == Family::V4 { u128::from(u32::MAX) } else { u128::MAX };
    all & all.checked_shl(u32::from(family.bits() - len)).unwrap_or(0)
}

impl From<Subnet> for IpNetwork {
    fn from(subnet: Subnet) -> Self {
        subnet.0
    }
}

/// Masks host bits.
impl From<IpNetwork> for Subnet {
    fn from(network: IpNetwork) -> Self {
        let family = Family::of(network.ip());
        let bits = to_bits(network.ip()) & mask(family, network.prefix());
        Self::from_bits(family, bits, network.prefix())
    }
}

impl FromStr for Subnet {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let parse = || {
            let (address, len) = text.split_once('/')?;
            Self::new(address.parse().ok()?, parse_len(len)?)
        };
        parse().ok_or_else(|| ParseError::new(text, "a subnet such as 10.1.0.0/16 or fd00:1::/48"))
    }
}

/// A prefix length: decimal digits, no sign, no leading zero.
pub(crate) fn parse_len(text: &str) -> Option<u8> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base(), self.len())
    }
}

impl fmt::Debug for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One number for the hasher: hundreds of thousands of subnets are keys of maps.
impl Hash for Subnet {
    fn hash<H: Hasher>(&self, state: &mut H) {
        match self.base() {
            IpAddr::V4(base) => {
                state.write_u64(u64::from(base.to_bits()) << 8 | u64::from(self.len()));
            }
            IpAddr::V6(base) => {
                state.write_u128(base.to_bits());
                state.write_u8(self.len());
            }
        }
    }
}

impl Ord for Subnet {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        match (self.base(), other.base()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => a.cmp(&b).then(self.len().cmp(&other.len())),
            (IpAddr::V6(a), IpAddr::V6(b)) => a.cmp(&b).then(self.len().cmp(&other.len())),
            (a, b) => a.is_ipv6().cmp(&b.is_ipv6()),
        }
    }
}

impl PartialOrd for Subnet {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    #[test]
    fn parses_as_strictly_as_go() {
        assert_eq!(subnet("10.1.2.3/16").to_string(), "10.1.0.0/16");
        assert_eq!(subnet("FD00:0:0:5::/64").to_string(), "fd00:0:0:5::/64");
        for bad in [
            "10.5.0.0",
            "10.5.0.0/255.255.0.0",
            "10.5.0.0/+16",
            "10.5.0.0/016",
            "010.5.0.0/16",
            "10.5.0.0/33",
            "::/129",
            "",
            "/",
            "10.5.0.0/",
        ] {
            assert!(bad.parse::<Subnet>().is_err(), "{bad}");
        }
    }

    #[test]
    fn knows_what_lies_inside() {
        let net = subnet("10.1.0.0/16");
        assert!(
            net.covers(&subnet("10.1.255.0/24"))
                && net.covers(&net)
                && !net.covers(&subnet("10.0.0.0/8"))
        );
        assert!(net.overlaps(&subnet("10.0.0.0/8")) && !net.overlaps(&subnet("10.2.0.0/16")));
        assert!(!net.contains("::ffff:10.1.0.1".parse().unwrap()));
        assert_eq!(net.last().to_string(), "10.1.255.255");
        assert_eq!(subnet("0.0.0.0/0").last().to_string(), "255.255.255.255");
        assert_eq!(net.nth(1).unwrap().to_string(), "10.1.0.1");
        assert_eq!(net.nth(65_536), None);
    }

    #[test]
    fn steps_end_with_the_address_space() {
        assert_eq!(subnet("255.255.255.0/24").step(1), None);
        assert_eq!(subnet("10.0.0.0/8").step(2).unwrap().to_string(), "12.0.0.0/8");
        assert_eq!(subnet("::/0").step(1), None);
        assert_eq!(subnet("::/0").step(0), Some(subnet("::/0")));
    }

    fn any_subnet() -> impl Strategy<Value = Subnet> {
        prop_oneof![
            (any::<u32>(), 0..=32u8)
                .prop_map(|(a, len)| Subnet::new(IpAddr::V4(a.into()), len).unwrap()),
            (any::<u128>(), 0..=128u8)
                .prop_map(|(a, len)| Subnet::new(IpAddr::V6(a.into()), len).unwrap()),
        ]
    }

    proptest! {
        #[test]
        fn text_round_trips(s in any_subnet()) {
            prop_assert_eq!(s.to_string().parse::<Subnet>().unwrap(), s);
        }

        #[test]
        fn subnets_nest_or_are_disjoint(a in any_subnet(), b in any_subnet()) {
            let share = a.contains(b.base()) || b.contains(a.base());
            prop_assert_eq!(a.overlaps(&b), share);
            prop_assert!(a.contains(a.base()) && a.contains(a.last()));
        }

        #[test]
        fn steps_are_counted(s in any_subnet(), n in 0..1000u128) {
            if let Some(later) = s.step(n) {
                prop_assert_eq!(later.steps_from(&s), Some(n));
                prop_assert!(n == 0 || !s.overlaps(&later));
            }
        }
    }
}
