//! Checks of devices, the tunnel's port and checksums.

use flannel_core::Remedy;
use flannel_core::address::Family;
use flannel_core::object::{Link, LinkKind};
use flannel_netlink::PortHolder;

use crate::diagnosis::mtu::{Fault, Narrow};
use crate::finding::{Check, Finding};
use crate::inputs::devices::Devices;

/// All faults of the devices.
pub fn check(devices: &Devices) -> Vec<Fault> {
    let mut found: Vec<Fault> = Vec::new();
    for (family, name) in devices.datapath.devices.iter() {
        match devices.links.iter().find(|link| link.name == *name) {
            Some(link) => found.extend(check_link(devices, family, link)),
            None if devices.unread.is_some() => {}
            None if devices.all.iter().any(|(other, _)| other == name) => {
                let text = format!(
                    "{name} exists, but is not a {} device: flannel cannot use it",
                    devices.backend
                );
                found.push(
                    Finding::error(Check::Device, text)
                        .with_command(format!("ip link delete {name}"))
                        .into(),
                );
            }
            None => {
                let text = format!(
                    "{name} is not there: no {family} packet of a pod reaches another host"
                );
                let remedy = if devices.daemon { Remedy::ShowStatus } else { Remedy::StartDaemon };
                found.push(Finding::error(Check::Device, text).with_remedy(remedy).into());
            }
        }
    }
    for (port, program, pid) in &devices.port_users {
        let text = format!(
            "UDP port {port} is taken by {program} (process {pid}): the kernel cannot receive \
             tunnel packets of peers"
        );
        let remedy = Remedy::run(format!("kill {pid}")).mention(
            "or ",
            Remedy::SetConfig,
            ", with another \"Port\" in its Backend",
        );
        found.push(Finding::error(Check::Port, text).with_remedy(remedy).into());
    }
    for name in devices.offloaded.iter().flatten().filter(|_| devices.checksums_matter()) {
        let text = format!(
            "this kernel offloads checksums of packets through {name} wrongly if they are \
             masqueraded: connections hang"
        );
        let repair = format!("ethtool -K {name} tx-checksum-ip-generic off");
        found.push(Finding::error(Check::Checksum, text).with_command(repair).into());
    }
    found
}

fn check_link(devices: &Devices, family: Family, link: &Link) -> Vec<Fault> {
    let name = link.name;
    let mut found: Vec<Fault> = Vec::new();
    if !link.up {
        let holder = devices.port_holders.iter().find(|(ours, _)| *ours == name);
        found.push(down(family, link, holder.map(|(_, holder)| holder)).into());
    }
    if let Some(mac) = link.kind.attributes().mac()
        && let Some(published) = devices.published[family].filter(|published| *published != mac)
    {
        let text = format!(
            "{name} has the MAC address {mac}, and this node's lease has {published}: {name} drops \
             all packets of peers"
        );
        found.push(Finding::error(Check::Device, text).with_remedy(Remedy::RestartDaemon).into());
    }
    if let Some(mtu) = devices.mtu.filter(|mtu| link.mtu < *mtu) {
        let text =
            format!("{name} takes packets of {} bytes, and pods have an MTU of {mtu}", link.mtu);
        found.push(
            Finding::error(Check::Mtu, text)
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
        found.push(Fault::new(
            Finding::error(Check::Mtu, text),
            Narrow::Uplink { takes: *mtu, needed },
        ));
    }
    found
}

/// The finding about a tunnel device that is down, because of the device that has its port if there
/// is one.
fn down(family: Family, link: &Link, holder: Option<&PortHolder>) -> Finding {
    let name = link.name;
    let lost = format!("no {family} packet of a pod reaches another host");
    let Some(holder) = holder else {
        let text = format!("{name} is down: {lost}");
        return Finding::error(Check::Device, text).with_command(format!("ip link set {name} up"));
    };
    let text =
        format!("{name} is down, because {holder} has UDP port {} already: {lost}", holder.port);
    let option = if matches!(link.kind, LinkKind::Wireguard(_)) { "ListenPort" } else { "Port" };
    let rest = format!(", with another \"{option}\" in its Backend");
    let remedy = Remedy::run(format!("ip link delete {}", holder.link));
    Finding::error(Check::Port, text).with_remedy(remedy.mention("or ", Remedy::SetConfig, rest))
}

#[cfg(test)]
mod tests {
    use flannel_core::object::Vxlan;

    use flannel_core::address::Dual;
    use flannel_core::object::{LinkName, MacAddr};

    use super::*;
    use crate::diagnosis::mtu::settle;
    use crate::fixture::devices;

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
        let device = Link { name: link("flannel.1"), mtu: 1450, up: true, kind: vxlan.into() };
        Devices {
            links: vec![device],
            all: vec![(link("eth0"), 1500), (link("flannel.1"), 1450)],
            uplink: Some(link("eth0")),
            mtu: Some(1450),
            kernel: Some([6, 1]),
            daemon: true,
            published: Dual { v4: Some(MacAddr::local([1; 6])), v6: None },
            ..devices()
        }
    }

    #[test]
    fn each_fault_of_a_device_is_found_with_its_repair() {
        assert_eq!(check(&healthy()), []);
        assert_eq!(check(&Devices::default()), []);
        type Change = fn(&mut Devices);
        for (change, text, repair) in [
            (
                (|d| d.links[0].up = false) as Change,
                "flannel.1 is down",
                "ip link set flannel.1 up",
            ),
            (
                |d| {
                    d.links[0].up = false;
                    let link = "cilium_vxlan".parse().unwrap();
                    let holder = PortHolder { link, kind: "vxlan".into(), port: 8472 };
                    d.port_holders.push((d.links[0].name, holder));
                },
                "flannel.1 is down, because cilium_vxlan (vxlan) has UDP port 8472 already",
                "ip link delete cilium_vxlan # or flannelctl config set FILE, with another \
                 \"Port\" in its Backend",
            ),
            (
                |d| d.links[0].mtu = 1400,
                "takes packets of 1400 bytes, and pods",
                "ip link set flannel.1 mtu 1450",
            ),
            (
                |d| d.all[0].1 = 1480,
                "eth0 takes packets of 1480 bytes",
                "flannelctl config patch '{\"Backend\": {\"MTU\": 1480}}' # if the MTU of eth0 is \
                 a mistake: ip link set eth0 mtu 1500; to keep it over a reboot, change the host's \
                 network settings: mtu: 1500 (netplan), MTUBytes=1500 (networkd)",
            ),
            (
                |d| (d.links.clear(), d.all.truncate(1)).1,
                "flannel.1 is not there",
                "flannelctl status",
            ),
            (
                |d| d.published.v4 = Some(MacAddr::local([2; 6])),
                "flannel.1 has the MAC address 02:01:01:01:01:01, and this node's lease has",
                "systemctl restart flanneld",
            ),
            (|d| d.links.clear(), "is not a vxlan device", "ip link delete flannel.1"),
            (
                |d| d.port_users.push((8472, "iperf".into(), 47)),
                "UDP port 8472 is taken by iperf",
                "kill 47 # or flannelctl config set FILE, with another \"Port\" in its Backend",
            ),
            (
                |d| {
                    d.kernel = Some([5, 4]);
                    d.offloaded = Some(vec!["flannel.1".parse().unwrap()]);
                },
                "offloads checksums of packets through flannel.1",
                "ethtool -K flannel.1 tx-checksum-ip-generic off",
            ),
        ] {
            let mut devices = healthy();
            change(&mut devices);
            let found = settle(check(&devices), &devices, &[Family::V4]);
            assert!(found.len() == 1 && found[0].text.contains(text), "{text}: {found:?}");
            assert_eq!(found[0].repair().as_deref(), Some(repair));
        }
        let mut devices = healthy();
        devices.kernel = Some([5, 4]);
        assert_eq!(check(&devices), [], "a value that cannot be read is no finding");
        devices.links.clear();
        devices.unread = Some("reading a WireGuard device needs CAP_NET_ADMIN".into());
        assert_eq!(check(&devices), [], "the device may be there");
        devices = healthy();
        devices.kernel = Some([5, 7]);
        devices.offloaded = Some(vec!["flannel.1".parse().unwrap()]);
        assert_eq!(check(&devices), [], "it is fixed there");
    }
}
