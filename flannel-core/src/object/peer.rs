//! Peers of WireGuard devices.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;

use base64::Engine;
use base64::prelude::BASE64_STANDARD as BASE64;

use super::{LinkName, Secret};
use crate::address::{Dual, ParseError, Subnet};

/// A peer of a WireGuard device: packets to its subnets are encrypted for its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    /// The WireGuard device.
    pub link: LinkName,
    /// The public key of the peer.
    pub key: PublicKey,
    /// The other attributes. They are boxed, because most objects are not peers.
    pub attributes: Box<PeerAttributes>,
}

/// The attributes of a [`Peer`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerAttributes {
    /// The address and UDP port to which packets are sent. While the peer sends from another
    /// address, the kernel uses the other address. A snapshot shows this address in any case.
    pub endpoint: SocketAddr,
    /// The subnets of the peer. Packets to these subnets are sent to the peer, and packets from the
    /// peer are accepted only if their source is in these subnets.
    pub allowed: Dual<Subnet>,
    /// The preshared key, 32 bytes, or `None` if the two ends do not use one.
    pub psk: Option<Secret>,
    /// The pause in seconds after which an idle device sends an empty packet, which keeps the
    /// mapping of a NAT open. 0 if it does not send such packets.
    pub keepalive: u16,
}

/// Writes the arguments of `wg set`, with the device last.
impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { link, key, attributes } = self;
        let PeerAttributes { endpoint, allowed, psk, keepalive } = &**attributes;
        write!(f, "peer {key} endpoint {endpoint} allowed-ips ")?;
        for (n, subnet) in allowed.values().enumerate() {
            write!(f, "{}{subnet}", if n == 0 { "" } else { "," })?;
        }
        if *keepalive != 0 {
            write!(f, " persistent-keepalive {keepalive}")?;
        }
        psk.as_ref().map_or(Ok(()), |psk| write!(f, " preshared-key {psk}"))?;
        write!(f, " dev {link}")
    }
}

/// The public key of a WireGuard device. As text it is base64, 44 characters long.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; 32]);

impl FromStr for PublicKey {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let bytes = BASE64.decode(text).ok().and_then(|bytes| bytes.try_into().ok());
        let expected = "32 bytes as base64 (44 characters)";
        bytes.map(Self).ok_or_else(|| ParseError::new(text, expected))
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&BASE64.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn keys_are_base64() {
        let text = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv8=";
        let mut bytes: [u8; 32] = std::array::from_fn(|n| n as u8);
        bytes[31] = 255;
        assert_eq!(PublicKey(bytes).to_string(), text);
        assert_eq!(text.parse(), Ok(PublicKey(bytes)));
        for bad in [
            "",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv8",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv8A",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv8==",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHv9=",
            "AAECAwQFBgcICQoL-A0ODxAREhMUFRYXGBkaGxwdHv8=",
        ] {
            assert!(bad.parse::<PublicKey>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_peer_reads_like_wg() {
        let peer = Peer {
            link: "flannel-wg".parse().unwrap(),
            key: PublicKey([0; 32]),
            attributes: Box::new(PeerAttributes {
                endpoint: "192.0.2.1:51820".parse().unwrap(),
                allowed: Dual { v4: "10.1.5.0/24".parse().ok(), v6: "fd00::/64".parse().ok() },
                psk: Some(Secret::new([7; 32])),
                keepalive: 25,
            }),
        };
        assert_eq!(
            peer.to_string(),
            "peer AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= endpoint 192.0.2.1:51820 \
             allowed-ips 10.1.5.0/24,fd00::/64 persistent-keepalive 25 preshared-key (secret) dev \
             flannel-wg"
        );
    }

    proptest! {
        #[test]
        fn keys_round_trip(bytes: [u8; 32]) {
            prop_assert_eq!(PublicKey(bytes).to_string().parse(), Ok(PublicKey(bytes)));
        }
    }
}
