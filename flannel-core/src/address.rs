//! Address families and subnets.
//!
//! The one thing to know: [`Dual`] holds "one of these per address family", and everything that exists
//! per family is held in one, so that IPv4, IPv6 and dual stack are the same code.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnetwork::IpNetwork;

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families, IPv4 first.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// Bits in an address: 32 or 128.
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// The smallest MTU with which the kernel runs the family on a device, in bytes.
    ///
    /// **Source**: RFC 791 (every module forwards 68 bytes), RFC 8200, section 5.
    pub const fn least_mtu(self) -> u32 {
        match self {
            Self::V4 => 68,
            Self::V6 => 1280,
        }
    }

    /// The family of an address.
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// The unspecified address of the family: `0.0.0.0` or `::`.
    pub const fn unspecified(self) -> IpAddr {
        match self {
            Self::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            Self::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        })
    }
}

/// At most one `T` per address family.
///
/// ```
/// use flannel_core::address::{Dual, Family};
/// use std::net::IpAddr;
///
/// let addresses: Dual<IpAddr> = ["192.0.2.1", "2001:db8::1"].iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
/// assert_eq!(addresses[Family::V6].unwrap().to_string(), "2001:db8::1");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dual<T> {
    /// The IPv4 one, if there is one.
    pub v4: Option<T>,
    /// The IPv6 one, if there is one.
    pub v6: Option<T>,
}

impl<T> Dual<T> {
    /// One `T` for each family for which `f` has one.
    pub fn from_fn(mut f: impl FnMut(Family) -> Option<T>) -> Self {
        Self { v4: f(Family::V4), v6: f(Family::V6) }
    }

    /// Neither family has one.
    pub const fn is_empty(&self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }

    /// What is there, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = (Family, &T)> {
        Family::BOTH.into_iter().filter_map(|family| Some((family, self[family].as_ref()?)))
    }

    /// The families that have one, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Family> {
        self.iter().map(|(family, _)| family)
    }

    /// The values, IPv4 first.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, value)| value)
    }

    /// Applies `f` to what is there.
    pub fn map<U>(&self, mut f: impl FnMut(Family, &T) -> U) -> Dual<U> {
        Dual::from_fn(|family| self[family].as_ref().map(|value| f(family, value)))
    }

    /// Applies a fallible `f` to what is there; the first error wins.
    ///
    /// # Errors
    /// The first error that `f` returns.
    pub fn try_map<U, E>(
        &self,
        mut f: impl FnMut(Family, &T) -> Result<U, E>,
    ) -> Result<Dual<U>, E> {
        let mut one =
            |family: Family| self[family].as_ref().map(|value| f(family, value)).transpose();
        Ok(Dual { v4: one(Family::V4)?, v6: one(Family::V6)? })
    }
}

impl<T> Default for Dual<T> {
    fn default() -> Self {
        Self { v4: None, v6: None }
    }
}

impl<T> std::ops::Index<Family> for Dual<T> {
    type Output = Option<T>;
    fn index(&self, family: Family) -> &Option<T> {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }
}

impl<T> std::ops::IndexMut<Family> for Dual<T> {
    fn index_mut(&mut self, family: Family) -> &mut Option<T> {
        match family {
            Family::V4 => &mut self.v4,
            Family::V6 => &mut self.v6,
        }
    }
}

/// A later address of one family replaces an earlier one.
impl FromIterator<IpAddr> for Dual<IpAddr> {
    fn from_iter<I: IntoIterator<Item = IpAddr>>(addresses: I) -> Self {
        let mut dual = Self::default();
        for address in addresses {
            dual[Family::of(address)] = Some(address);
        }
        dual
    }
}

/// A later subnet of one family replaces an earlier one.
impl FromIterator<Subnet> for Dual<Subnet> {
    fn from_iter<I: IntoIterator<Item = Subnet>>(subnets: I) -> Self {
        let mut dual = Self::default();
        for subnet in subnets {
            dual[subnet.family()] = Some(subnet);
        }
        dual
    }
}

/// Why a text is not a subnet, a MAC address or a link name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct ParseError {
    /// The text that was given.
    pub text: String,
    /// What would have been right, with its article: `an IPv4 subnet such as 10.1.0.0/16`.
    pub expected: &'static str,
}

impl ParseError {
    pub(crate) fn new(text: &str, expected: &'static str) -> Self {
        Self { text: text.to_owned(), expected }
    }
}

/// An IP subnet of either family, always canonical: bits behind the prefix are zero.
///
/// Parsing is as strict as Go's `net.ParseCIDR` (no missing length, no `+`, no leading zeros) and masks
/// host bits as flannel does: `10.1.2.3/16` is `10.1.0.0/16`. Ordered by family, then address, then length:
/// a subnet stands directly before the subnets inside it.
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

    /// Every address of the family lies in it (`0.0.0.0/0`, `::/0`), which flannel reads as "no network".
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

    /// The subnet of the same length `n` places on (0 is itself); `None` past the end of the address space.
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

    /// How many places after `first` it stands, in subnets of its length; `None` if it stands before it or
    /// the two differ in family or length.
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
        // Numbers: thousands of subnets are sorted at once.
        let key =
            |subnet: &Self| (subnet.family() == Family::V6, to_bits(subnet.base()), subnet.len());
        key(self).cmp(&key(other))
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
