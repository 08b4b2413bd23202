//! A pod: a namespace with one interface on its host's bridge. Its addresses and MTU come from the
//! host's `subnet.env`, as with the CNI plugin.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};

use crate::cluster::addressing::{link_local_without_dad, nodad};
use crate::error::{Error, Result};
use crate::probe::echo::EchoServer;
use crate::subnet_env::SubnetEnv;
use crate::system::namespace::Namespace;
use crate::system::privilege::nsenter;

/// A pod with an echo service. Dropping it removes its namespace.
#[derive(Debug)]
pub struct Pod {
    namespace: Namespace,
    addresses: Dual<IpAddr>,
    mtu: u32,
    /// Lines for `ip` that remove its links from the host.
    unplug: &'static str,
    _echo: EchoServer,
}

impl Pod {
    /// Makes the pod, and the bridge `cni0` on its host if it is missing.
    pub(crate) fn new(name: &str, host: &Namespace, env: &SubnetEnv) -> Result<Self> {
        let namespace = Namespace::new(name)?;
        let address = |_: Family, subnet: &Subnet| {
            let address = subnet
                .nth(2)
                .filter(|address| *address != subnet.last() || subnet.family() == Family::V6);
            address.ok_or_else(|| {
                Error::Unsuitable(format!("{name}: {subnet} has no room for a bridge and a pod"))
            })
        };
        let addresses = env.subnets.try_map(address)?;
        host.ip(&on_the_host(&namespace, env))?;
        namespace.ip(&inside(&addresses, env))?;
        Ok(Self {
            unplug: "link del veth0\nlink del cni0\n",
            ..Self::adopt(namespace, addresses, env.mtu)?
        })
    }

    /// Makes a pod of a namespace that another program connected.
    pub(crate) fn adopt(namespace: Namespace, addresses: Dual<IpAddr>, mtu: u32) -> Result<Self> {
        // Ping sockets of both families use this sysctl.
        namespace.sysctl("net/ipv4/ping_group_range", "0 0")?;
        let echo = EchoServer::start(&namespace)?;
        Ok(Self { namespace, addresses, mtu, unplug: "", _echo: echo })
    }

    pub(crate) fn unplug(&self) -> &'static str {
        self.unplug
    }

    /// The name, such as `pod-1` on host 1.
    pub fn name(&self) -> &str {
        self.namespace.name()
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Its addresses.
    pub fn addresses(&self) -> &Dual<IpAddr> {
        &self.addresses
    }

    /// The MTU of its interface, in bytes.
    pub fn mtu(&self) -> u32 {
        self.mtu
    }

    /// The prefix of a command that runs it in the pod, from another terminal.
    pub fn enter_command(&self) -> String {
        nsenter(&self.namespace, None)
    }
}

fn on_the_host(pod: &Namespace, env: &SubnetEnv) -> String {
    let mtu = env.mtu;
    let path = pod.path();
    let mut batch = format!("link add cni0 mtu {mtu} type bridge stp_state 0 mcast_snooping 0\n");
    batch += &link_local_without_dad("cni0", &env.gateways, 1);
    batch += &addresses_on("cni0", &env.gateways, env);
    batch += &format!(
        "link add veth0 mtu {mtu} type veth peer name eth0 mtu {mtu} netns {}\n",
        path.display()
    );
    batch += "link set veth0 master cni0 up\nlink set cni0 up\n";
    batch
}

fn inside(addresses: &Dual<IpAddr>, env: &SubnetEnv) -> String {
    let mut batch = String::from("link set lo up\n");
    batch += &link_local_without_dad("eth0", addresses, 2);
    batch += &addresses_on("eth0", addresses, env);
    batch += "link set eth0 up\n";
    for gateway in env.gateways.values() {
        batch += &format!("route add default via {gateway}\n");
    }
    batch
}

/// Lines for `ip` that add each address with the prefix length of its family's subnet.
fn addresses_on(link: &str, addresses: &Dual<IpAddr>, env: &SubnetEnv) -> String {
    let mut batch = String::new();
    for (family, subnet) in env.subnets.iter() {
        if let Some(address) = addresses[family] {
            let len = subnet.len();
            batch += &format!("addr add {address}/{len} dev {link}{}\n", nodad(family));
        }
    }
    batch
}
