//! The wire between the hosts: one bridge with one port for each. All hosts are on one link.

use std::fmt::Write;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::MacAddr;

use crate::error::Result;
use crate::host::Host;
use crate::namespace::Namespace;

/// The switch that the hosts are plugged into, and the router of their default routes.
#[derive(Debug)]
pub struct Switch {
    namespace: Namespace,
    addresses: Dual<IpAddr>,
}

/// The hosts' network; the 250 first addresses are hosts', the one before the last the switch's.
pub(crate) fn underlay(family: Family) -> Subnet {
    let text = match family {
        Family::V4 => "192.168.77.0/24",
        Family::V6 => "fd00:77::/64",
    };
    text.parse().expect("a constant that is a subnet")
}

/// The address of host number `n` from 1, or of the switch if `n` is 254.
pub(crate) fn underlay_address(family: Family, n: usize) -> IpAddr {
    underlay(family).nth(n as u128).expect("hosts are numbered below 255")
}

/// The MAC address of host number `n`'s `eth0`.
pub(crate) fn mac(n: usize) -> MacAddr {
    MacAddr([0x02, 0xf1, 0, 0, 0, n as u8])
}

impl Switch {
    /// Makes the switch without ports.
    pub(crate) fn new(families: &[Family]) -> Result<Self> {
        let namespace = Namespace::new("switch")?;
        let addresses = families.iter().map(|family| underlay_address(*family, 254)).collect();
        Ok(Self { namespace, addresses })
    }

    /// Lays one wire to each namespace: `eth0` there, `port-N` here.
    pub(crate) fn plug(&self, hosts: &[Namespace], mtu: u32) -> Result<()> {
        let mut batch =
            String::from("link set lo up\nlink add br0 type bridge stp_state 0 mcast_snooping 0\n");
        for (n, namespace) in (1..).zip(hosts) {
            let (mac, path) = (mac(n), namespace.path());
            let write = writeln!(
                batch,
                "link add port-{n} mtu {mtu} type veth peer name eth0 address {mac} mtu {mtu} netns {}\n\
                 link set port-{n} master br0 up",
                path.display()
            );
            write.expect("a String takes everything");
        }
        batch += &quiet_link_local("br0", &self.addresses, 254);
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

    /// Its addresses, the hosts' default routers.
    pub fn addresses(&self) -> &Dual<IpAddr> {
        &self.addresses
    }

    /// Pulls a host's wire: its `eth0` loses the carrier.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn cut(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} down\n", host.number()))
    }

    /// Plugs a host's wire in again.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn reconnect(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} up\n", host.number()))
    }

    /// Loses every frame from and to a host without a sign of it at the host: its `eth0` keeps the carrier.
    /// [`Switch::listen`] ends it.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn ignore(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} nomaster\n", host.number()))
    }

    /// Ends [`Switch::ignore`].
    ///
    /// # Errors
    /// `ip` failed.
    pub fn listen(&self, host: &Host) -> Result<()> {
        self.namespace.ip(&format!("link set port-{} master br0\n", host.number()))
    }
}

/// Gives a link that is still down a link-local address that is usable at once: a host whose link-local address
/// is tentative cannot ask for its neighbours, and the kernel takes more than a second to find that nobody else
/// has it.
pub(crate) fn quiet_link_local(link: &str, addresses: &Dual<IpAddr>, n: usize) -> String {
    match addresses.v6 {
        Some(_) => {
            format!("link set {link} addrgenmode none\naddr add fe80::{n:x}/64 dev {link} nodad\n")
        }
        None => String::new(),
    }
}

/// The same for an address; there is nothing to wait for in IPv4.
pub(crate) fn nodad(family: Family) -> &'static str {
    match family {
        Family::V4 => "",
        Family::V6 => " nodad",
    }
}
