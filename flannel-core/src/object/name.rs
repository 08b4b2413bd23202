//! Names and MAC addresses of devices.

use std::fmt;
use std::str::FromStr;

use crate::address::ParseError;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// A locally administered unicast address, made of any 6 bytes.
    ///
    /// **Source**: flannel `pkg/mac/mac.go: NewHardwareAddr`.
    pub const fn local(bytes: [u8; 6]) -> Self {
        let [first, rest @ ..] = bytes;
        let [b, c, d, e, g] = rest;
        Self([first & 0b1111_1100 | 0b10, b, c, d, e, g])
    }

    /// Whether it can be the address of a device: not multicast, and not all zero.
    pub fn is_unicast(&self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

impl FromStr for MacAddr {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let is_hex = |part: &&str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
        let parse = || {
            let mut bytes = [0; 6];
            let mut parts = text.split(':');
            for byte in &mut bytes {
                *byte = u8::from_str_radix(parts.next().filter(is_hex)?, 16).ok()?;
            }
            parts.next().is_none().then_some(Self(bytes))
        };
        parse().ok_or_else(|| ParseError::new(text, "a MAC address such as 0a:1b:2c:3d:4e:5f"))
    }
}

/// Lower case with colons, as in leases.
impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of a network interface: 1 to 15 bytes, no `/`, `:` or white space, not `.` or `..`.
///
/// **Source**: linux `net/core/dev.c: dev_valid_name`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkName {
    // Padded with zeros: no name contains one, so the derived order is that of the text.
    bytes: [u8; 15],
}

impl LinkName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|b| *b == 0).unwrap_or(self.bytes.len());
        std::str::from_utf8(&self.bytes[..len]).expect("made from a str")
    }
}

impl FromStr for LinkName {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let bad = |c: char| c == '/' || c == ':' || c == '\0' || c.is_ascii_whitespace();
        if text.is_empty() || text.len() > 15 || text == "." || text == ".." || text.contains(bad) {
            return Err(ParseError::new(
                text,
                "an interface name (1 to 15 bytes, no '/', ':' or space)",
            ));
        }
        let mut bytes = [0; 15];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self { bytes })
    }
}

impl fmt::Display for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for LinkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_names_follow_the_kernel() {
        assert_eq!("flannel-v6.1234".parse::<LinkName>().unwrap().as_str(), "flannel-v6.1234");
        for bad in ["", ".", "..", "a/b", "a b", "a:b", "0123456789abcdef"] {
            assert!(bad.parse::<LinkName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn mac_addresses_round_trip() {
        let mac: MacAddr = "AA:bb:cc:0d:EE:ff".parse().unwrap();
        assert_eq!(mac.to_string(), "aa:bb:cc:0d:ee:ff");
        for bad in
            ["", "aa:bb:cc:dd:ee", "aa:bb:cc:dd:ee:ff:00", "a:b:c:d:e:f", "+a:bb:cc:dd:ee:ff"]
        {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad:?}");
        }
        assert_eq!(MacAddr::local([0xff; 6]).to_string(), "fe:ff:ff:ff:ff:ff");
        assert!(MacAddr::local([1; 6]).is_unicast() && !MacAddr([0; 6]).is_unicast());
    }
}
