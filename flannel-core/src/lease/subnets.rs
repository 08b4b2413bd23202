//! The identity of a lease.

use std::fmt;
use std::str::FromStr;

use crate::address::{Dual, Family, ParseError, Subnet, parse_len};

/// The identity of a lease: its subnets, one of either family or one of each.
///
/// `Display` and `FromStr` are the key in the store: `10.5.34.0-24`,
/// `10.5.34.0-24&fd00:0:0:5::-64`, and for IPv6 alone `0.0.0.0-0&fd00:0:0:5::-64`. Prefix lengths
/// are 1 to 31 and 1 to 127.
///
/// **Source**: flannel `pkg/subnet/subnet.go: MakeSubnetKey, ParseSubnetKey`. Stricter than Go:
/// no text may precede the key, host bits must be zero, and `0.0.0.0-0` alone is not a lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnets(Dual<Subnet>);

impl Subnets {
    /// The identity of a lease with these subnets. `None` if the list is empty, or if a prefix
    /// length is out of range. A later subnet of one family replaces an earlier one.
    pub fn new(subnets: impl IntoIterator<Item = Subnet>) -> Option<Self> {
        let subnets: Dual<Subnet> = subnets.into_iter().collect();
        let fit =
            subnets.values().all(|subnet| (1..subnet.family().bits()).contains(&subnet.len()));
        (fit && !subnets.is_empty()).then_some(Self(subnets))
    }

    /// The subnets, IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = Subnet> {
        self.0.values().copied()
    }

    /// The subnet of one family, or `None` if the lease has no subnet of this family.
    pub fn family(&self, family: Family) -> Option<Subnet> {
        self.0[family]
    }

    /// Whether any subnet shares an address with a subnet of `other`.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.iter().any(|a| other.iter().any(|b| a.overlaps(&b)))
    }
}

impl fmt::Display for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.v4 {
            Some(v4) => write!(f, "{}-{}", v4.base(), v4.len())?,
            None => f.write_str("0.0.0.0-0")?,
        }
        match self.0.v6 {
            Some(v6) => write!(f, "&{}-{}", v6.base(), v6.len()),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Subnets {
    type Err = ParseError;
    fn from_str(key: &str) -> Result<Self, ParseError> {
        let error = |reason| {
            let example = "10.5.34.0-24 or 10.5.34.0-24&fd00:0:0:5::-64";
            ParseError::new(key, format!("a lease key such as {example}: {reason}"))
        };
        let part = |text: &str, family: Family| {
            let (address, len) =
                text.rsplit_once('-').ok_or_else(|| error("a subnet is ADDRESS-LENGTH"))?;
            let len = parse_len(len).ok_or_else(|| error("the length is not a plain number"))?;
            if address.contains(|c: char| c.is_ascii_uppercase()) {
                return Err(error("IPv6 addresses are written in lower case"));
            }
            let address = address.parse().map_err(|_| error("the address is not an IP address"))?;
            if Family::of(address) != family {
                return Err(error("IPv4 stands first, IPv6 behind '&'"));
            }
            if len >= family.bits() {
                return Err(error("the length is at most 31, or 127 for IPv6"));
            }
            let subnet = Subnet::new(address, len).filter(|subnet| subnet.base() == address);
            subnet.ok_or_else(|| error("bits behind the prefix are set"))
        };
        let (v4, v6) = match key.split_once('&') {
            Some((v4, v6)) => (v4, Some(part(v6, Family::V6)?)),
            None => (key, None),
        };
        let v4 = Some(part(v4, Family::V4)?).filter(|v4| !v4.is_everything());
        let subnets =
            Self::new([v4, v6].into_iter().flatten()).ok_or_else(|| error("it names no subnet"))?;
        // The store compares keys as text: another spelling is another key.
        if subnets.to_string() == key {
            Ok(subnets)
        } else {
            Err(error("the address is not in its shortest form"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_store() {
        for key in [
            "10.5.34.0-24",
            "10.5.34.0-24&fd00:0:0:5::-64",
            "0.0.0.0-0&fd00:0:0:5::-64",
            "10.0.0.0-8",
        ] {
            assert_eq!(key.parse::<Subnets>().unwrap().to_string(), key);
        }
        for (bad, why) in [
            ("10.5.34.0", "ADDRESS-LENGTH"),
            ("10.5.34.0-32", "at most 31"),
            ("10.5.34.0-024", "plain number"),
            ("10.5.34.1-24", "bits behind"),
            ("10.5.034.0-24", "not an IP"),
            ("x10.5.34.0-24", "not an IP"),
            ("0.0.0.0-0", "names no subnet"),
            ("fd00::-64", "IPv4 stands first"),
            ("10.5.34.0-24&FD00::-64", "lower case"),
            ("10.5.34.0-24&fd00::-128", "at most 31, or 127"),
            ("10.5.34.0-24&10.6.0.0-24", "IPv4 stands first"),
            ("", "ADDRESS-LENGTH"),
            ("10.5.34.0-24&fd00:0:0:5:0::-64", "shortest form"),
        ] {
            let error = bad.parse::<Subnets>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&format!("{bad:?}")), "{bad}: {error}");
        }
    }
}
