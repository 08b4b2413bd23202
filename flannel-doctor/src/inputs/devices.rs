//! Devices, programs on the tunnel's port, and checksum offload, as the kernel reports them.

use std::fs;
use std::path::Path;

use flannel_core::Kernel;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{Datapath, Transport};
use flannel_core::kernel::Footprint;
use flannel_core::object::{Link, LinkKind, LinkName, MacAddr, Object};
use flannel_netlink::iface::Selectors;
use flannel_netlink::{NetlinkKernel, PortHolder};

use super::network::Network;

/// The first kernel that computes right checksums of masqueraded packets in a tunnel.
///
/// **Source**: flannel#1279, calico `ChecksumOffloadBroken`; linux commit 4f710a4d3b.
const CHECKSUMS_FIXED: [u32; 2] = [5, 7];

/// The devices of this host. A value of `None` could not be read.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    /// The path of pods' packets.
    pub datapath: Datapath,
    /// The type of the backend that has the tunnel devices.
    pub backend: String,
    /// The tunnel devices that exist and are of the right kind.
    pub links: Vec<Link>,
    /// The reason why the tunnel devices cannot be read.
    pub unread: Option<String>,
    /// The names of all links, with their MTUs.
    pub all: Vec<(LinkName, u32)>,
    /// The external interface.
    pub uplink: Option<LinkName>,
    /// It is administratively down.
    pub uplink_down: bool,
    /// The MTU of pods, in bytes.
    pub mtu: Option<u32>,
    /// Programs with a socket on a UDP port of a tunnel: port, name, process id.
    pub port_users: Vec<(u16, String, u32)>,
    /// Devices of other programs on the UDP port of a tunnel device that is down.
    pub port_holders: Vec<(LinkName, PortHolder)>,
    /// The kernel's release.
    pub kernel: Option<[u32; 2]>,
    /// Tunnels with checksum offload. Read only on kernels where [`Devices::checksums_matter`].
    pub offloaded: Option<Vec<LinkName>>,
    /// The daemon runs.
    pub daemon: bool,
    /// The MAC addresses of the tunnels in this node's lease, if no daemon runs.
    pub published: Dual<MacAddr>,
}

impl Devices {
    /// The MTU of a device, in bytes.
    pub fn takes(&self, device: LinkName) -> Option<u32> {
        self.all.iter().find(|(name, _)| *name == device).map(|(_, mtu)| *mtu)
    }

    /// The size of a tunnel's header, in bytes; 0 without a tunnel.
    pub fn overhead(&self, family: Family) -> u32 {
        self.datapath.devices[family].and(self.datapath.overhead[family]).unwrap_or(0)
    }

    /// The tunnel devices that encrypt packets.
    pub fn encrypted(&self) -> Dual<LinkName> {
        let is = |name| {
            self.links
                .iter()
                .filter(|link| matches!(link.kind, LinkKind::Wireguard(_)))
                .any(|link| link.name == name)
        };
        Dual::from_fn(|family| self.datapath.devices[family].filter(|name| is(*name)))
    }

    /// Whether there are tunnels on a kernel that computes wrong checksums.
    pub fn checksums_matter(&self) -> bool {
        !self.links.is_empty() && self.kernel.is_some_and(|release| release < CHECKSUMS_FIXED)
    }
}

/// Reads the devices of a network.
///
/// # Blocking
/// Asks the kernel, and `ethtool` on kernels where checksums matter.
pub fn read(network: &Network) -> Devices {
    let Network { uplink, mtu, daemon, published, .. } = *network;
    let datapath = &network.datapath;
    let kernel = NetlinkKernel::open();
    let footprint =
        Footprint { links: datapath.devices.values().copied().collect(), ..Footprint::default() };
    let snapshot =
        kernel.as_ref().map_err(Clone::clone).and_then(|kernel| kernel.snapshot(&footprint));
    let unread = snapshot.as_ref().err().map(ToString::to_string);
    let snapshot = snapshot.unwrap_or_default();
    let links: Vec<Link> = snapshot
        .iter()
        .filter_map(
            |object| if let Object::Link(link) = object { Some(link.clone()) } else { None },
        )
        .collect();
    let port_holders =
        kernel.as_ref().map(|kernel| port_holders(kernel, &links)).unwrap_or_default();
    let facts = kernel.and_then(|kernel| kernel.facts(&Selectors::default())).unwrap_or_default();
    let mut devices = Devices {
        datapath: datapath.clone(),
        backend: network.backend.clone(),
        links,
        unread,
        all: facts.interfaces.iter().map(|found| (found.name, found.mtu)).collect(),
        uplink,
        uplink_down: facts.interfaces.iter().any(|found| Some(found.name) == uplink && !found.up),
        mtu,
        port_users: Vec::new(),
        port_holders,
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
            .ok()
            .and_then(|text| release(&text)),
        offloaded: None,
        daemon,
        published,
    };
    // The socket of a tun device's process belongs to the network.
    if devices.links.iter().any(|link| !matches!(link.kind, LinkKind::Tun(_))) {
        let port = |transport: &Transport| {
            if let Transport::Udp(port) = transport { Some(*port) } else { None }
        };
        devices.port_users =
            datapath.transports.iter().filter_map(port).flat_map(port_users).collect();
    }
    if devices.checksums_matter() {
        devices.offloaded = devices
            .links
            .iter()
            .map(|link| Some((link.name, offload(link.name)?)))
            .collect::<Option<Vec<_>>>()
            .map(|all| all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect());
    }
    devices
}

/// `6.1.0-18-amd64` is 6.1.
fn release(text: &str) -> Option<[u32; 2]> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some([numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?])
}

/// Whether checksum offload is on; `None` without `ethtool`.
fn offload(link: LinkName) -> Option<bool> {
    let mut command = flannel_core::process::command("ethtool", &[]);
    command.args(["-k", link.as_str()]);
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("tx-checksum-ip-generic:").map(str::trim))?;
    Some(line.starts_with("on"))
}

/// Devices of other programs on the ports of those of `links` that are down. A device that is up
/// has its port. A device that cannot be read is left out.
fn port_holders(kernel: &NetlinkKernel, links: &[Link]) -> Vec<(LinkName, PortHolder)> {
    let mut found = Vec::new();
    for link in links.iter().filter(|link| !link.up) {
        let port = match &link.kind {
            LinkKind::Fou(device) => device.port,
            LinkKind::Vxlan(device) => device.port,
            LinkKind::Wireguard(device) => device.port,
            _ => continue,
        };
        let holders = kernel.port_holders(port, links).unwrap_or_default();
        found.extend(holders.into_iter().map(|holder| (link.name, holder)));
    }
    found
}

/// Programs with a socket on a UDP port. The kernel's own sockets belong to no process.
fn port_users(port: u16) -> Vec<(u16, String, u32)> {
    let tables =
        ["udp", "udp6"].map(|file| fs::read_to_string(format!("/proc/thread-self/net/{file}")));
    let inodes: Vec<String> = tables
        .iter()
        .flatten()
        .flat_map(|table| inodes(table, port))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    if inodes.is_empty() {
        return Vec::new();
    }
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets
            .any(|target: std::path::PathBuf| inodes.iter().any(|inode| target == Path::new(inode)))
    };
    let name = |pid: u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
    };
    pids.filter(has).map(|pid| (port, name(pid), pid)).collect()
}

/// The inodes of the sockets on a port in the kernel's table of UDP sockets.
fn inodes(table: &str, port: u16) -> Vec<u64> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (_, local) = fields.get(1)?.rsplit_once(':')?;
            (u16::from_str_radix(local, 16).ok()? == port).then(|| fields.get(9)?.parse().ok())?
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use flannel_netlink::testing::{in_netns, ip};

    use super::*;

    #[test]
    fn checksum_offload_is_read() {
        in_netns(|| {
            ip("link add flannel.1 type vxlan id 1 dstport 8472");
            let link = "flannel.1".parse().unwrap();
            assert_eq!(offload(link), Some(true));
            // The command of the finding.
            let off = Command::new("ethtool").args(["-K", "flannel.1", "tx", "off"]).status();
            assert!(off.expect("this test needs ethtool").success());
            assert_eq!(offload(link), Some(false));
        });
    }

    #[test]
    fn releases_and_socket_tables_are_read() {
        assert_eq!(
            ["6.1.0-18-amd64\n", "5.4", "x"].map(release),
            [Some([6, 1]), Some([5, 4]), None]
        );
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when \
            retrnsmt   uid  timeout inode ref\n \
            12: 00000000:2118 00000000:0000 07 00000000:00000000 00:00000000 \
            00000000     0        0 4711 2 0\n \
            13: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 \
            00000000     0        0 4712 2 0\n";
        assert_eq!(inodes(table, 8472), [4711]);
        assert_eq!(inodes("", 8472), [0; 0]);
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = port_users(socket.local_addr().unwrap().port());
        assert!(found.iter().any(|(_, _, pid)| *pid == std::process::id()), "{found:?}");
    }
}
