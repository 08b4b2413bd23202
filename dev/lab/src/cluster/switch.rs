//! The switch: one bridge with a port for each host. All hosts are on one link.

use std::fmt::Write;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};

use crate::cluster::addressing::{link_local_without_dad, mac, nodad, underlay, underlay_address};
use crate::cluster::host::Host;
use crate::error::Result;
use crate::system::namespace::Namespace;

/// The switch between the hosts. It is also the router of their default routes.
#[derive(Debug)]
pub struct Switch {
    namespace: Namespace,
    addresses: Dual<IpAddr>,
}

impl Switch {
    /// Makes the switch without ports.
    pub(crate) fn new(families: &[Family]) -> Result<Self> {
        let namespace = Namespace::new("switch")?;
        let addresses = families.iter().map(|family| underlay_address(*family, 254)).collect();
        Ok(Self { namespace, addresses })
    }

    /// Connects each namespace by a veth pair: `eth0` there, `port-N` here.
    pub(crate) fn plug(&self, hosts: &[Namespace], mtu: u32) -> Result<()> {
        let mut batch =
            String::from("link set lo up\nlink add br0 type bridge stp_state 0 mcast_snooping 0\n");
        for (n, namespace) in (1..).zip(hosts) {
            let mac = mac(n);
            let path = namespace.path();
            let write = writeln!(
                batch,
                "link add port-{n} mtu {mtu} type veth peer name eth0 address {mac} mtu {mtu} \
                 netns {}\nlink set port-{n} master br0 up",
                path.display()
            );
            write.expect("writing to a String never fails");
        }
        batch += &link_local_without_dad("br0", &self.addresses, 254);
        for (family, address) in self.addresses.iter() {
            let len = underlay(family).len();
            batch += &format!("addr add {address}/{len} dev br0{}\n", nodad(family));
        }
        batch += "link set br0 up\n";
        self.namespace.ip(&batch)
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Its addresses, which are the hosts' default gateways.
    pub fn addresses(&self) -> &Dual<IpAddr> {
        &self.addresses
    }

    /// Takes a host's link down: its `eth0` loses the carrier.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn cut(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} down\n", host.number()))
    }

    /// Ends [`Switch::cut`].
    ///
    /// # Errors
    /// `ip` failed.
    pub fn reconnect(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} up\n", host.number()))
    }

    /// Drops every frame from and to a host, whose `eth0` keeps the carrier.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn drop_frames(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} nomaster\n", host.number()))
    }

    /// Ends [`Switch::drop_frames`].
    ///
    /// # Errors
    /// `ip` failed.
    pub fn pass_frames(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} master br0\n", host.number()))
    }
}
