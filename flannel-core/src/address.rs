//! Address families and subnets.

mod subnet;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::text::{MAX_VALUE_CHARS, shorten};

pub use subnet::Subnet;
pub(crate) use subnet::parse_len;

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

    /// The number of bits of an address: 32 or 128.
    pub const fn bits(self) -> u8 {
        match self {
            Self::V4 => 32,
            Self::V6 => 128,
        }
    }

    /// The smallest MTU of a device with this family, in bytes.
    ///
    /// **Source**: RFC 791, RFC 8200 section 5.
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
#[doc = include_str!("../docs/dual.md")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dual<T> {
    /// The IPv4 value.
    pub v4: Option<T>,
    /// The IPv6 value.
    pub v6: Option<T>,
}

impl<T> Dual<T> {
    /// Calls `f` for each family, and keeps the values that it returns.
    pub fn from_fn(mut f: impl FnMut(Family) -> Option<T>) -> Self {
        Self { v4: f(Family::V4), v6: f(Family::V6) }
    }

    /// Whether neither family has a value.
    pub const fn is_empty(&self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }

    /// The values with their families, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = (Family, &T)> {
        Family::BOTH.into_iter().filter_map(|family| Some((family, self[family].as_ref()?)))
    }

    /// The families with a value, IPv4 first.
    pub fn families(&self) -> impl Iterator<Item = Family> {
        self.iter().map(|(family, _)| family)
    }

    /// The values, IPv4 first.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.iter().map(|(_, value)| value)
    }

    /// Applies `f` to each value.
    pub fn map<U>(&self, mut f: impl FnMut(Family, &T) -> U) -> Dual<U> {
        Dual::from_fn(|family| self[family].as_ref().map(|value| f(family, value)))
    }

    /// Applies a fallible `f` to each value, IPv4 first.
    ///
    /// # Errors
    /// The first error of `f`.
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

/// The error of a text that is not a subnet, a lease key, a MAC address or a link name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not {expected}")]
pub struct ParseError {
    /// The first 120 characters of the text. A key in a store may have any length.
    pub text: String,
    /// A description of the expected value: `an IPv4 subnet such as 10.1.0.0/16`.
    pub expected: String,
}

impl ParseError {
    pub(crate) fn new(text: &str, expected: impl Into<String>) -> Self {
        Self { text: shorten(text, MAX_VALUE_CHARS).into_owned(), expected: expected.into() }
    }
}
