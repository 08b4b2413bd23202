//! The check for devices that share a subnet of this node.

use std::collections::BTreeSet;
use std::path::Path;

use flannel_core::Remedy;
use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::object::LinkName;
use flannel_netlink::foreign::TableRoute;

use super::HostFacts;
use super::read::ports;
use crate::finding::{Check, Finding};

/// A device on which the kernel looks for the pods of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PodDevice {
    /// The number of its ports, each of a pod. 0 if it is no bridge.
    pub(super) ports: usize,
    pub(super) name: LinkName,
}

/// A subnet of this node with several devices. The kernel sends all packets to one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SharedSubnet {
    pub(super) subnet: Subnet,
    /// At least two, those with the fewest ports first.
    pub(super) devices: BTreeSet<PodDevice>,
}

/// A finding for each shared subnet.
pub(super) fn shared(facts: &HostFacts) -> Vec<Finding> {
    facts.shared.iter().filter_map(finding).collect()
}

fn finding(SharedSubnet { subnet, devices }: &SharedSubnet) -> Option<Finding> {
    let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
    let text = format!(
        "{} have addresses of this node's subnet {subnet}: the kernel sends the packets to all its \
         pods to one of them",
        names.join(" and ")
    );
    let PodDevice { ports, name } = devices.first()?;
    let remedy = Remedy::run(format!("ip link delete {name}"));
    let remedy = match (name.as_str(), ports) {
        ("docker0", _) => remedy.remark("and give dockerd another --bip, or it makes it again"),
        (_, 0) => remedy.remark("no pod is on it"),
        (_, ports) => remedy.remark(format!("after its {ports} pods were moved")),
    };
    Some(Finding::error(Check::Clash, text).with_remedy(remedy))
}

/// The devices that have addresses of a subnet of this node, if there are several. The others are
/// the tunnels.
pub(super) fn devices_with(facts: &HostFacts, subnet: Subnet) -> BTreeSet<LinkName> {
    let found = facts.addresses.iter().filter(|(_, address)| subnet.contains(*address));
    found.map(|(device, _)| *device).filter(|device| !facts.tunnels.contains(device)).collect()
}

/// The shared subnet, if the kernel has routes to it through several of `devices`. The plugin `ptp`
/// gives one address to the devices of all pods, with a route to one address each.
pub(super) fn shared_by(
    subnet: Subnet,
    devices: &BTreeSet<LinkName>,
    routes: &[TableRoute],
) -> Option<SharedSubnet> {
    let leads = |route: &&TableRoute| {
        let is_net = route.dst.len() < Family::of(route.dst.base()).bits();
        subnet.covers(&route.dst) && is_net && route.gateway.is_none() && !route.throw
    };
    let links = routes.iter().filter(leads).filter_map(|route| route.link);
    let net = Path::new("/sys/class/net");
    let device = |name| PodDevice { ports: ports(net, name).len(), name };
    let devices: BTreeSet<PodDevice> =
        links.filter(|link| devices.contains(link)).map(device).collect();
    (devices.len() > 1).then_some(SharedSubnet { subnet, devices })
}

#[cfg(test)]
mod tests {
    use flannel_netlink::NetlinkKernel;
    use flannel_netlink::testing::{in_netns, ip};

    use super::*;

    #[test]
    fn devices_that_share_a_subnet_are_read() {
        in_netns(|| {
            let subnet: Subnet = "10.1.5.0/24".parse().unwrap();
            for bridge in ["docker0", "cni0"] {
                ip(&format!("link add {bridge} type bridge"));
                ip(&format!("link set {bridge} up"));
            }
            ip("link add pod0 type veth peer name pod1");
            ip("address add 10.1.5.1/24 dev cni0");
            // As of the plugin `ptp`.
            ip("link set pod1 up");
            ip("address add 10.1.5.1/32 dev pod1");
            ip("route add 10.1.5.9/32 dev pod1 scope host");
            let kernel = NetlinkKernel::open().unwrap();
            let all = ["cni0", "docker0", "pod1"].map(|name| name.parse().unwrap()).into();
            let read = || shared_by(subnet, &all, &kernel.table(254, subnet).unwrap());
            assert_eq!(read(), None);
            ip("address add 10.1.5.129/25 dev docker0");
            // The files in `/sys` are of the namespace in which it was mounted.
            let shared = read().unwrap();
            let names: Vec<&str> =
                shared.devices.iter().map(|device| device.name.as_str()).collect();
            assert_eq!((shared.subnet, names), (subnet, vec!["cni0", "docker0"]));
        });
    }
}
