//! Devices, the tunnel's port and checksums: what lies between the pods of this host and the wire.

use std::fs;
use std::path::Path;
use std::process::Command;

use flannel_api::Finding;
use flannel_core::Kernel;
use flannel_core::address::Family;
use flannel_core::backend::{Datapath, Inlet};
use flannel_core::kernel::Footprint;
use flannel_core::object::{Link, LinkName, Object};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;

use crate::Network;
use crate::mtu::{Fault, Narrow};

/// Kernels before compute wrong checksums of masqueraded packets in a tunnel.
///
/// **Source**: flannel#1279, calico `ChecksumOffloadBroken`; linux commit 4f710a4d3b.
const CHECKSUMS_MENDED: [u32; 2] = [5, 7];
const EADDRINUSE: &str = "the kernel cannot receive what peers send";

/// What there is. What is `None` could not be read.
#[derive(Debug, Clone, Default)]
pub struct Devices {
    /// How packets of pods travel.
    pub datapath: Datapath,
    /// The type of the backend that has the tunnel devices.
    pub backend: String,
    /// The tunnel devices that exist and are of the right kind.
    pub links: Vec<Link>,
    /// The names of all links, with their MTUs.
    pub all: Vec<(LinkName, u32)>,
    /// The external interface.
    pub uplink: Option<LinkName>,
    /// What pods may send, in bytes.
    pub mtu: Option<u32>,
    /// Programs that have a UDP port that a tunnel needs: port, name, process id.
    pub takers: Vec<(u16, String, u32)>,
    /// The kernel's release.
    pub kernel: Option<[u32; 2]>,
    /// Tunnels whose checksums are left to the hardware; only looked at on kernels where that
    /// matters.
    pub offloaded: Option<Vec<LinkName>>,
    /// The daemon runs.
    pub daemon: bool,
}

impl Devices {
    /// What a device takes, in bytes.
    pub fn takes(&self, device: LinkName) -> Option<u32> {
        self.all.iter().find(|(name, _)| *name == device).map(|(_, mtu)| *mtu)
    }

    /// What a tunnel's header costs, in bytes; 0 without a tunnel.
    pub fn overhead(&self, family: Family) -> u32 {
        self.datapath.devices[family].and(self.datapath.overhead[family]).unwrap_or(0)
    }

    /// The checksum fault of old kernels matters here.
    pub fn checksums_matter(&self) -> bool {
        !self.links.is_empty() && self.kernel.is_some_and(|release| release < CHECKSUMS_MENDED)
    }
}

/// Everything that is to be said of them.
pub fn check(devices: &Devices) -> Vec<Fault> {
    let mut found: Vec<Fault> = Vec::new();
    for (family, name) in devices.datapath.devices.iter() {
        match devices.links.iter().find(|link| link.name == *name) {
            Some(link) => found.extend(check_link(devices, family, link)),
            None if devices.all.iter().any(|(other, _)| other == name) => {
                let text = format!(
                    "{name} is there, but is no {} device: nothing of flannel's can be put on it",
                    devices.backend
                );
                found.push(
                    Finding::error("device", text)
                        .with_command(format!("ip link delete {name}"))
                        .into(),
                );
            }
            None => {
                let text = format!(
                    "{name} is not there: no {family} packet of a pod reaches another host"
                );
                let mend =
                    if devices.daemon { "flannelctl status" } else { "systemctl start flanneld" };
                found.push(Finding::error("device", text).with_command(mend).into());
            }
        }
    }
    for (port, program, pid) in &devices.takers {
        let text = format!("UDP port {port} is taken by {program} (process {pid}): {EADDRINUSE}");
        let mend = format!(
            "kill {pid} # or flannelctl config set FILE, with another \"Port\" in its Backend"
        );
        found.push(Finding::error("port", text).with_command(mend).into());
    }
    for name in devices.offloaded.iter().flatten().filter(|_| devices.checksums_matter()) {
        let text = format!(
            "checksums of packets through {name} are left to the network card, which this kernel does wrongly where they \
             are masqueraded: connections hang"
        );
        let mend = format!("ethtool -K {name} tx-checksum-ip-generic off");
        found.push(Finding::error("checksum", text).with_command(mend).into());
    }
    found
}

fn check_link(devices: &Devices, family: Family, link: &Link) -> Vec<Fault> {
    let (name, mut found) = (link.name, Vec::<Fault>::new());
    if !link.up {
        let text = format!("{name} is down: no {family} packet of a pod reaches another host");
        found.push(
            Finding::error("device", text).with_command(format!("ip link set {name} up")).into(),
        );
    }
    if let Some(mtu) = devices.mtu.filter(|mtu| link.mtu < *mtu) {
        let text = format!(
            "{name} takes packets of {} bytes, and pods are told that they may send {mtu}",
            link.mtu
        );
        found.push(
            Finding::error("mtu", text)
                .with_command(format!("ip link set {name} mtu {mtu}"))
                .into(),
        );
    }
    let lower = devices.all.iter().find(|(other, _)| Some(*other) == devices.uplink);
    let needed = link.mtu + devices.overhead(family);
    if let Some((lower, mtu)) = lower.filter(|(_, mtu)| *mtu < needed) {
        let text = format!(
            "{lower} takes packets of {mtu} bytes, and full ones through {name} need {needed}"
        );
        found.push(Fault::new(Finding::error("mtu", text), Narrow::Uplink { takes: *mtu, needed }));
    }
    found
}

/// Reads the devices of a network.
///
/// # Blocking
/// Asks the kernel, and `ethtool` on kernels where checksums matter.
pub fn read(network: &Network) -> Devices {
    let Network { uplink, mtu, daemon, .. } = *network;
    let datapath = &network.datapath;
    let kernel = NetlinkKernel::open();
    let footprint =
        Footprint { links: datapath.devices.values().copied().collect(), ..Footprint::default() };
    let snapshot = kernel
        .as_ref()
        .ok()
        .and_then(|kernel| kernel.snapshot(&footprint).ok())
        .unwrap_or_default();
    let links: Vec<Link> = snapshot
        .iter()
        .filter_map(
            |object| if let Object::Link(link) = object { Some(link.clone()) } else { None },
        )
        .collect();
    let facts = kernel.and_then(|kernel| kernel.facts(&Selectors::default())).unwrap_or_default();
    let mut devices = Devices {
        datapath: datapath.clone(),
        backend: network.backend.clone(),
        links,
        all: facts.interfaces.iter().map(|found| (found.name, found.mtu)).collect(),
        uplink,
        mtu,
        takers: Vec::new(),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
            .ok()
            .and_then(|text| release(&text)),
        offloaded: None,
        daemon,
    };
    if !devices.links.is_empty() {
        let port = |inlet: &Inlet| if let Inlet::Udp(port) = inlet { Some(*port) } else { None };
        devices.takers = datapath.inlets.iter().filter_map(port).flat_map(takers).collect();
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

/// Whether checksums are left to the hardware; `None` if there is no `ethtool` to say it.
fn offload(link: LinkName) -> Option<bool> {
    let mut command = Command::new("ethtool");
    // A password is not its business.
    command.args(["-k", link.as_str()]).env_remove("FLANNELD_ETCD_PASSWORD");
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("tx-checksum-ip-generic:").map(str::trim))?;
    Some(line.starts_with("on"))
}

/// Programs with a socket on a UDP port. The kernel's own sockets are listed with those of
/// programs, but no process has them.
fn takers(port: u16) -> Vec<(u16, String, u32)> {
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
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = fields.get(1)?.rsplit_once(':')?;
        (u16::from_str_radix(local, 16).ok()? == port).then(|| fields.get(9)?.parse().ok())?
    };
    table.lines().skip(1).filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use flannel_core::object::{LinkKind, MacAddr, Vxlan};

    use super::*;
    use crate::fixture::devices;
    use crate::mtu::settle;

    fn healthy() -> Devices {
        let link = |name: &str| name.parse::<LinkName>().unwrap();
        let vxlan = Vxlan {
            vni: 1,
            port: 8472,
            mac: MacAddr::local([1; 6]),
            local: None,
            lower: Some(link("eth0")),
            learning: false,
            gbp: false,
        };
        let device =
            Link { name: link("flannel.1"), mtu: 1450, up: true, kind: LinkKind::Vxlan(vxlan) };
        Devices {
            links: vec![device],
            all: vec![(link("eth0"), 1500), (link("flannel.1"), 1450)],
            uplink: Some(link("eth0")),
            mtu: Some(1450),
            kernel: Some([6, 1]),
            daemon: true,
            ..devices()
        }
    }

    #[test]
    fn each_fault_of_a_device_is_found_with_its_mend() {
        assert_eq!(check(&healthy()), []);
        assert_eq!(check(&Devices::default()), []);
        type Change = fn(&mut Devices);
        for (change, text, mend) in [
            (
                (|d| d.links[0].up = false) as Change,
                "flannel.1 is down",
                "ip link set flannel.1 up",
            ),
            (
                |d| d.links[0].mtu = 1400,
                "takes packets of 1400 bytes, and pods",
                "ip link set flannel.1 mtu 1450",
            ),
            (
                |d| d.all[0].1 = 1480,
                "eth0 takes packets of 1480 bytes",
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1480}}' # if eth0 takes so little by mistake: \
                 ip link set eth0 mtu 1500; a reboot keeps it by the host's network settings only: mtu: 1500 (netplan), \
                 MTUBytes=1500 (networkd)",
            ),
            (
                |d| (d.links.clear(), d.all.truncate(1)).1,
                "flannel.1 is not there",
                "flannelctl status",
            ),
            (|d| d.links.clear(), "is no vxlan device", "ip link delete flannel.1"),
            (
                |d| d.takers.push((8472, "iperf".into(), 47)),
                "UDP port 8472 is taken by iperf",
                "kill 47 # or flannelctl config set FILE, with another \"Port\" in its Backend",
            ),
            (
                |d| {
                    (d.kernel, d.offloaded) =
                        (Some([5, 4]), Some(vec!["flannel.1".parse().unwrap()]));
                },
                "checksums of packets through flannel.1",
                "ethtool -K flannel.1 tx-checksum-ip-generic off",
            ),
        ] {
            let mut devices = healthy();
            change(&mut devices);
            let found = settle(check(&devices), &devices, &[Family::V4]);
            assert!(found.len() == 1 && found[0].text.contains(text), "{text}: {found:?}");
            assert_eq!(found[0].repair.as_deref(), Some(mend));
        }
        let mut devices = healthy();
        devices.kernel = Some([5, 4]);
        assert_eq!(check(&devices), [], "what cannot be read is no finding");
        devices.kernel = Some([5, 7]);
        devices.offloaded = Some(vec!["flannel.1".parse().unwrap()]);
        assert_eq!(check(&devices), [], "it is mended there");
    }

    #[test]
    fn releases_and_socket_tables_are_read() {
        assert_eq!(
            ["6.1.0-18-amd64\n", "5.4", "x"].map(release),
            [Some([6, 1]), Some([5, 4]), None]
        );
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref\n \
            12: 00000000:2118 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4711 2 0\n \
            13: 0100007F:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 4712 2 0\n";
        assert_eq!(inodes(table, 8472), [4711]);
        assert_eq!(inodes("", 8472), [0; 0]);
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let found = takers(socket.local_addr().unwrap().port());
        assert!(found.iter().any(|(_, _, pid)| *pid == std::process::id()), "{found:?}");
    }
}
