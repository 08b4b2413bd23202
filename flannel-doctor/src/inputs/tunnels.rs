//! Encrypted tunnels, as the kernel reports them.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use flannel_api::{TunnelReport, rounded};
use flannel_core::Subnet;
use flannel_core::address::Dual;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_netlink::{NetlinkKernel, Session, Tunnel};

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
    /// Reads devices. Families may have the same one.
    ///
    /// # Errors
    /// A device is missing, or the process lacks `CAP_NET_ADMIN`.
    ///
    /// # Blocking
    /// Takes some microseconds for each peer.
    pub fn read(kernel: &NetlinkKernel, devices: &Dual<LinkName>) -> Result<Self, KernelError> {
        let links: BTreeSet<LinkName> = devices.values().copied().collect();
        let read = |link| Ok((link, kernel.tunnel(link)?));
        links.into_iter().map(read).collect::<Result<_, _>>().map(Self)
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
    /// The report for the control API at this time.
    pub fn report(&self, now: SystemTime) -> TunnelReport {
        let Session { handshake, endpoint, put, received, sent, .. } = *self.session;
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
