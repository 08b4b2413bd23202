//! Names and MAC addresses of devices.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use crate::address::ParseError;

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Turns any 6 bytes into a locally administered unicast address.
    ///
    /// **Source**: flannel `pkg/mac/mac.go: NewHardwareAddr`.
    pub const fn local(bytes: [u8; 6]) -> Self {
        let [first, rest @ ..] = bytes;
        let [b, c, d, e, g] = rest;
        Self([first & 0b1111_1100 | 0b10, b, c, d, e, g])
    }

    /// The MAC address that is derived from an IP address. It is locally administered and unicast,
    /// and equal in every version. If the VTEP at `address` has it, peers know from its lease that
    /// no other VTEP can have this MAC address; see [`Fdb::is_derived`](super::Fdb::is_derived).
    ///
    /// For IPv4 it is `0a:58` followed by the address, so it is unique. For IPv6 it is `06`
    /// followed by 40 bits of the SipHash-2-4 of the address.
    pub fn derived_from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => {
                let [a, b, c, d] = v4.octets();
                Self([0x0a, 0x58, a, b, c, d])
            }
            IpAddr::V6(v6) => {
                let [_, _, _, a, b, c, d, e] = siphash(v6.octets()).to_be_bytes();
                Self([0x06, a, b, c, d, e])
            }
        }
    }

    /// Reads each form of 6 bytes that Go's `net.ParseMAC` reads: `0a:1b:2c:3d:4e:5f`,
    /// `0a-1b-2c-3d-4e-5f` and `0a1b.2c3d.4e5f`.
    fn parse(text: &str) -> Option<Self> {
        let (separator, group) = match text.as_bytes().get(2)? {
            b':' => (':', 2),
            b'-' => ('-', 2),
            _ => ('.', 4),
        };
        let mut digits = String::new();
        for part in text.split(separator) {
            // `from_str_radix` would accept a sign.
            if part.len() != group || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return None;
            }
            digits.push_str(part);
        }
        if digits.len() != 12 {
            return None;
        }
        let mut bytes = [0; 6];
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * n..2 * n + 2], 16).ok()?;
        }
        Some(Self(bytes))
    }

    /// Whether it can be the address of a device: it is not multicast, and not zero.
    pub fn is_unicast(&self) -> bool {
        self.0[0] & 1 == 0 && self.0 != [0; 6]
    }
}

/// SipHash-2-4 with a fixed key. The hash must be equal in every version, on every node.
///
/// **Source**: Aumasson and Bernstein, *SipHash: a fast short-input PRF*, section 2.
fn siphash(input: [u8; 16]) -> u64 {
    let words = [&input[..8], &input[8..]];
    let words = words.map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
    siphash_of(SIPHASH_KEY, words)
}

/// `flannel` and `vtep-mac` as text.
const SIPHASH_KEY: [u64; 2] = [u64::from_le_bytes(*b"flannel "), u64::from_le_bytes(*b"vtep-mac")];

fn siphash_of(key: [u64; 2], words: [u64; 2]) -> u64 {
    let mut state = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    // The last word has the length, 16 bytes.
    for word in words.into_iter().chain([16 << 56]) {
        state[3] ^= word;
        sip_rounds(&mut state, 2);
        state[0] ^= word;
    }
    state[2] ^= 0xff;
    sip_rounds(&mut state, 4);
    state.into_iter().fold(0, |hash, part| hash ^ part)
}

fn sip_rounds(state: &mut [u64; 4], rounds: u32) {
    let [a, b, c, d] = state;
    for _ in 0..rounds {
        *a = a.wrapping_add(*b);
        *c = c.wrapping_add(*d);
        *b = b.rotate_left(13) ^ *a;
        *d = d.rotate_left(16) ^ *c;
        *a = a.rotate_left(32);
        *c = c.wrapping_add(*b);
        *a = a.wrapping_add(*d);
        *b = b.rotate_left(17) ^ *c;
        *d = d.rotate_left(21) ^ *a;
        *c = c.rotate_left(32);
    }
}

impl FromStr for MacAddr {
    type Err = ParseError;
    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text)
            .ok_or_else(|| ParseError::new(text, "a MAC address such as 0a:1b:2c:3d:4e:5f"))
    }
}

/// Lower case with colons, as in the data of leases.
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
    // Padded with zeros. A name does not contain a zero, so the derived order is the order of
    // texts.
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
        let has_bad_character =
            text.contains(|c: char| matches!(c, '/' | ':' | '\0') || c.is_ascii_whitespace());
        if !(1..=15).contains(&text.len()) || text == "." || text == ".." || has_bad_character {
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
    fn a_mac_address_names_an_ip_address() {
        let derived = |text: &str| MacAddr::derived_from(text.parse().unwrap()).to_string();
        assert_eq!(derived("192.0.2.7"), "0a:58:c0:00:02:07");
        // Nodes of all versions must agree on it.
        assert_eq!(derived("2001:db8::7"), "06:b2:bf:0a:30:f3");
        assert_ne!(derived("2001:db8::7"), derived("2001:db8::8"));
        for text in ["192.0.2.7", "2001:db8::7"] {
            let mac = MacAddr::derived_from(text.parse().unwrap());
            assert!(mac.is_unicast() && mac.0[0] & 2 == 2, "locally administered: {mac}");
        }
    }

    /// **Source**: the authors' implementation, `vectors.h`, for 16 bytes.
    #[test]
    fn the_hash_is_siphash_2_4() {
        let bytes: [u8; 16] = std::array::from_fn(|n| n as u8);
        let [low, high] =
            [&bytes[..8], &bytes[8..]].map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
        let expected = [0xdb, 0x9b, 0xc2, 0x57, 0x7f, 0xcc, 0x2a, 0x3f];
        assert_eq!(siphash_of([low, high], [low, high]).to_le_bytes(), expected);
    }

    #[test]
    fn mac_addresses_round_trip() {
        let mac: MacAddr = "AA:bb:cc:0d:EE:ff".parse().unwrap();
        assert_eq!(mac.to_string(), "aa:bb:cc:0d:ee:ff");
        for form in ["AA-BB-CC-0D-EE-FF", "aabb.cc0d.eeff", "AABB.CC0D.EEFF"] {
            assert_eq!(form.parse::<MacAddr>().unwrap(), mac, "{form}");
        }
        for bad in [
            "",
            "aa:bb:cc:dd:ee",
            "aa:bb:cc:dd:ee:ff:00",
            "a:b:c:d:e:f",
            "+a:bb:cc:dd:ee:ff",
            "aa:bb-cc:dd:ee:ff",
            "aabb.ccdd",
            "aabb.ccdd.eeff.0011",
            "aabb:ccdd:eeff",
            "aabbccddeeff",
            "aa:bb:cc:dd:ee:é",
        ] {
            assert!(bad.parse::<MacAddr>().is_err(), "{bad:?}");
        }
        assert_eq!(MacAddr::local([0xff; 6]).to_string(), "fe:ff:ff:ff:ff:ff");
        assert!(MacAddr::local([1; 6]).is_unicast() && !MacAddr([0; 6]).is_unicast());
    }
}
