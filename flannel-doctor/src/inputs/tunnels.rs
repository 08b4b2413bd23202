//! Encrypted tunnels, as the kernel reports them.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use flannel_api::{TunnelReport, rounded};
use flannel_core::Subnet;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_netlink::{NetlinkKernel, Session, Tunnel};
use ring::hmac;

/// The WireGuard devices of this host, each once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tunnels(pub Vec<(LinkName, Tunnel)>);

/// The tunnel to one peer, with its device.
#[derive(Debug, Clone, Copy)]
pub struct TunnelToPeer<'a> {
    /// The device.
    pub link: LinkName,
    /// The device with all of its peers.
    pub tunnel: &'a Tunnel,
    /// The state of the tunnel to this peer.
    pub session: &'a Session,
}

impl Tunnels {
    /// Reads devices. Families may have the same one. The second part has the devices that cannot
    /// be read, each with the reason: it is missing, or the process lacks `CAP_NET_ADMIN`.
    ///
    /// # Blocking
    /// Takes some microseconds for each peer.
    pub fn read(
        kernel: &NetlinkKernel,
        links: impl IntoIterator<Item = LinkName>,
    ) -> (Self, Vec<(LinkName, KernelError)>) {
        Self::read_by(links, |link| kernel.tunnel(link))
    }

    fn read_by(
        links: impl IntoIterator<Item = LinkName>,
        read: impl Fn(LinkName) -> Result<Tunnel, KernelError>,
    ) -> (Self, Vec<(LinkName, KernelError)>) {
        let links: BTreeSet<LinkName> = links.into_iter().collect();
        let mut found = Vec::new();
        let mut unread = Vec::new();
        for link in links {
            match read(link) {
                Ok(tunnel) => found.push((link, tunnel)),
                Err(error) => unread.push((link, error)),
            }
        }
        (Self(found), unread)
    }

    /// The tunnels by the subnets of their peers.
    pub fn by_subnet(&self) -> HashMap<Subnet, TunnelToPeer<'_>> {
        let mut found = HashMap::new();
        for (link, tunnel) in &self.0 {
            for session in &tunnel.sessions {
                let to = TunnelToPeer { link: *link, tunnel, session };
                found.extend(session.allowed.values().map(|subnet| (*subnet, to)));
            }
        }
        found
    }
}

impl TunnelToPeer<'_> {
    /// A number by which both ends can tell whether their preshared keys differ, or `None` without
    /// a preshared key. It is public: 32 bits of a keyed hash say nothing about 256 random bits.
    pub fn psk_digest(&self) -> Option<u32> {
        let key = hmac::Key::new(hmac::HMAC_SHA256, self.session.psk.as_ref()?.expose());
        let mut ends = [self.tunnel.key, self.session.key];
        ends.sort_unstable();
        let text = [&b"flannel psk"[..], &ends[0].0, &ends[1].0].concat();
        let tag = hmac::sign(&key, &text);
        tag.as_ref().first_chunk().copied().map(u32::from_be_bytes)
    }

    /// The report for the control API at this time.
    pub fn report(&self, now: SystemTime) -> TunnelReport {
        let &Session { handshake, endpoint, put, received, sent, .. } = self.session;
        TunnelReport {
            device: self.link.to_string(),
            handshake: handshake.map(|at| rounded(now.duration_since(at).unwrap_or_default())),
            endpoint: endpoint
                .filter(|used| put.is_some_and(|put| put != *used))
                .map(|used| used.to_string()),
            received,
            sent,
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::object::{PublicKey, Secret};

    use flannel_core::address::Dual;

    use super::*;

    fn digest(own: u8, peer: u8, psk: Option<u8>) -> Option<u32> {
        let session = &Session {
            key: PublicKey([peer; 32]),
            allowed: Dual::default(),
            psk: psk.map(|byte| Secret::new([byte; 32])),
            put: None,
            endpoint: None,
            handshake: None,
            received: 0,
            sent: 0,
        };
        let tunnel = &Tunnel { key: PublicKey([own; 32]), port: 51820, sessions: Vec::new() };
        TunnelToPeer { link: "flannel-wg".parse().unwrap(), tunnel, session }.psk_digest()
    }

    #[test]
    fn a_device_that_cannot_be_read_hides_no_other_one() {
        let link = |name: &str| name.parse::<LinkName>().unwrap();
        let first = link("flannel-wg");
        let second = link("flannel-wg-v6");
        let tunnel = Tunnel { key: PublicKey([1; 32]), port: 51820, sessions: Vec::new() };
        let absent = KernelError::explained(19, "it is gone");
        for gone in [first, second] {
            let read = |link| if link == gone { Err(absent.clone()) } else { Ok(tunnel.clone()) };
            let other = if gone == first { second } else { first };
            let expected = (Tunnels(vec![(other, tunnel.clone())]), vec![(gone, absent.clone())]);
            assert_eq!(Tunnels::read_by([first, second, first], read), expected);
        }
    }

    #[test]
    fn both_ends_compute_one_digest_of_a_preshared_key() {
        assert_eq!(digest(1, 2, Some(7)), digest(2, 1, Some(7)));
        assert_ne!(digest(1, 2, Some(7)), digest(2, 1, Some(8)), "another key");
        assert_ne!(digest(1, 2, Some(7)), digest(1, 3, Some(7)), "other nodes");
        assert_eq!(digest(1, 2, None), None);
        // HMAC-SHA256 by Python. Nodes of all versions compute it alike.
        assert_eq!(digest(1, 2, Some(7)), Some(0xe3db_5bd0));
    }
}
