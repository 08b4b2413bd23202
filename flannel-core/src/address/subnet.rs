//! The value of a subnet.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnetwork::IpNetwork;

use super::{Family, ParseError};

/// An IP subnet of either family, without host bits.
///
/// Parsing is as strict as Go's `net.ParseCIDR` (no missing length, no `+`, no leading zeros) and
/// masks host bits as flannel does: `10.1.2.3/16` is `10.1.0.0/16`. The order is by family, address
/// and length, so that a subnet comes directly before the subnets inside it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subnet(IpNetwork);

impl Subnet {
    /// The subnet with a prefix of `len` bits that contains `address`. `None` if the family has
    /// fewer bits.
    pub fn new(address: IpAddr, len: u8) -> Option<Self> {
        let base = IpNetwork::new(address, len).ok()?.network();
        IpNetwork::new(base, len).ok().map(Self)
    }

    fn parse(text: &str) -> Option<Self> {
        let (address, len) = text.split_once('/')?;
        Self::new(address.parse().ok()?, parse_len(len)?)
    }

    /// The subnet with exactly one address.
    pub fn host(address: IpAddr) -> Self {
        Self(address.into())
    }

    /// The subnet with every address of the family; see [`Subnet::is_everything`].
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

    /// The first address. In a node's subnet, it is the address of the tunnel device.
    pub fn base(&self) -> IpAddr {
        self.0.ip()
    }

    /// The prefix length in bits.
    #[expect(clippy::len_without_is_empty, reason = "no subnet is empty")]
    pub fn len(&self) -> u8 {
        self.0.prefix()
    }

    /// Whether it contains every address of the family. Go uses `0.0.0.0/0` and `::/0` for "no
    /// network".
    pub fn is_everything(&self) -> bool {
        self.len() == 0
    }

    /// The last address.
    pub fn last(&self) -> IpAddr {
        self.0.broadcast()
    }

    /// The `n`th address, where 0 is the base. `None` if the subnet has fewer addresses.
    pub fn nth(&self, n: u128) -> Option<IpAddr> {
        let bits = to_bits(self.base()).checked_add(n)?;
        (bits <= to_bits(self.last())).then(|| from_bits(self.family(), bits))
    }

    /// Whether it contains `address`.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(address)
    }

    /// Whether it contains all addresses of `other`.
    pub fn covers(&self, other: &Self) -> bool {
        self.len() <= other.len() && self.contains(other.base())
    }

    /// Whether the two subnets share an address. Then one covers the other.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.covers(other) || other.covers(self)
    }

    /// The `n`th subnet of the same length after this one, where 0 is the subnet itself. `None` if
    /// it would lie behind the last address of the family.
    pub fn step(&self, n: u128) -> Option<Self> {
        if n == 0 {
            return Some(*self);
        }
        let family = self.family();
        let distance = n.checked_mul(1u128.checked_shl(self.host_bits())?)?;
        let bits = to_bits(self.base()).checked_add(distance)?;
        let last = to_bits(Self::everything(family).last());
        (bits <= last).then(|| Self::from_bits(family, bits, self.len()))
    }

    /// The `n` for which `first.step(n)` is this subnet. `None` if `first` comes after this subnet,
    /// or has another family or length.
    pub fn steps_from(&self, first: &Self) -> Option<u128> {
        let is_alike = self.family() == first.family() && self.len() == first.len();
        let distance = to_bits(self.base()).checked_sub(to_bits(first.base()));
        let distance = distance.filter(|_| is_alike)?;
        Some(distance.checked_shr(self.host_bits()).unwrap_or(0))
    }

    fn host_bits(&self) -> u32 {
        u32::from(self.family().bits() - self.len())
    }
}

/// The bits of an address as a number; IPv4 in the low 32 bits.
fn to_bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(a) => u128::from(a.to_bits()),
        IpAddr::V6(a) => a.to_bits(),
    }
}

/// The address with these bits. For IPv4 the number must be below 2^32.
fn from_bits(family: Family, bits: u128) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
        Family::V6 => IpAddr::V6(Ipv6Addr::from_bits(bits)),
    }
}

impl From<Subnet> for IpNetwork {
    fn from(subnet: Subnet) -> Self {
        subnet.0
    }
}

/// Clears the bits behind the prefix.
impl From<IpNetwork> for Subnet {
    fn from(network: IpNetwork) -> Self {
        Self::new(network.ip(), network.prefix()).expect("its prefix fits its family")
    }
}

impl FromStr for Subnet {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text)
            .ok_or_else(|| ParseError::new(text, "a subnet such as 10.1.0.0/16 or fd00:1::/48"))
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

/// Hashes one number: large maps have subnets as keys.
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
    fn a_subnet_contains_its_addresses() {
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
