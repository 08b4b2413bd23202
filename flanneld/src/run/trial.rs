//! Asks the kernel whether it can hold the devices of another network, before the network that
//! runs is given up.
//!
//! A device of the same kind and attributes is put under a temporary name, brought up, and deleted
//! again. So the kernel itself answers for everything that a device needs: the kind with its
//! module, the rights of this process, an identifier that no other device has, a free port, the
//! MTU, memory. Nothing stays.

mod device;
mod stand_ins;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

use flannel_core::backend::{Build, NodeLease, Prepared, Transport};
use flannel_core::kernel::{Footprint, KernelError, Outcome};
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::object::{Change, Link, LinkKind, LinkName, Object, ObjectSet};
use flannel_core::{Config, Error as Cause, Kernel, Lease, Subnets};
use flannel_netlink::NetlinkKernel;
use libc::{EADDRINUSE, EEXIST};

use self::device::TrialDevice;
pub(super) use self::stand_ins::{KnownStore, UnsavedSecrets};
use super::controllers::leftovers::log_removal;
use crate::blocking::BlockingQueue;
use crate::error::Error;

/// What the networks that run have, and what a device or a process of the next one may need.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) links: BTreeSet<LinkName>,
    pub(super) udp_ports: BTreeSet<u16>,
}

/// A network that is tried.
pub(super) struct Candidate<'a> {
    pub(super) config: &'a Config,
    pub(super) prepared: Prepared,
    pub(super) transports: Vec<Transport>,
}

/// Tries the devices of networks, one after the other. The work of a trial whose future was dropped
/// also ends before the next trial begins, because all trials use one device.
pub(super) struct DeviceTrials {
    kernel: Arc<NetlinkKernel>,
    device: Arc<TrialDevice>,
    queue: BlockingQueue,
}

impl DeviceTrials {
    /// Trials in the network namespace of `kernel`, which is the calling thread's.
    pub(super) fn new(kernel: Arc<NetlinkKernel>, queue: BlockingQueue) -> Self {
        Self { kernel, device: Arc::new(TrialDevice::lock()), queue }
    }

    /// Removes the devices of trials that a killed daemon could not end.
    pub(super) async fn remove_stale(&self) {
        let kernel = Arc::clone(&self.kernel);
        let device = Arc::clone(&self.device);
        self.queue.run(move || log_removal("a trial", device.remove_stale(&*kernel))).await;
    }

    /// Checks that the kernel can hold the devices of a network, while networks that have `held`
    /// run.
    ///
    /// # Errors
    /// The kernel refuses a device, or another program has the port of a process.
    pub(super) async fn check(&self, held: Held, candidate: Candidate<'_>) -> Result<(), Error> {
        let Candidate { config, prepared, transports } = candidate;
        let links = match prepared.build {
            Build::Blueprint(build) => devices(&build(&lease_of(config)?)?.base),
            Build::Network(_) => return Ok(()),
        };
        let is_v6 = config.networks.v6.is_some();
        let kernel = Arc::clone(&self.kernel);
        let device = Arc::clone(&self.device);
        self.queue
            .run(move || {
                let there = devices_there(&*kernel, &held.links, &links)?;
                for link in &links {
                    check_name(&kernel, &there, link)?;
                    check_device(&*kernel, &device, InUse { there: &there, held: &held }, link)?;
                }
                if !links.iter().any(|link| matches!(link.kind, LinkKind::Tun(_))) {
                    return Ok(());
                }
                transports
                    .into_iter()
                    .try_for_each(|transport| check_port(transport, &held.udp_ports, is_v6))
            })
            .await
    }
}

/// A lease that this node might have. The devices of a network do not depend on its lease.
fn lease_of(config: &Config) -> Result<NodeLease, Error> {
    let subnets = Subnets::new(config.networks.values().map(|pods| pods.min));
    let Some(subnets) = subnets else {
        return Err(Error::Stopped("a network config without networks was parsed".to_owned()));
    };
    let attrs = LeaseAttrs::default();
    let revision = Revision::default();
    Ok(NodeLease::Lapsed(Lease { subnets, attrs, expires: None, since: revision, revision }))
}

fn devices(objects: &ObjectSet) -> Vec<Link> {
    let link = |object: &Object| match object {
        Object::Link(link) => Some(link.clone()),
        _ => None,
    };
    objects.iter().filter_map(link).collect()
}

/// The devices with these names and those with the names of `links` that are in the kernel.
fn devices_there(
    kernel: &dyn Kernel,
    held: &BTreeSet<LinkName>,
    links: &[Link],
) -> Result<Vec<Link>, Error> {
    let names = held.iter().copied().chain(links.iter().map(|link| link.name));
    let footprint = Footprint { links: names.collect(), ..Footprint::default() };
    let state = kernel.snapshot(&footprint)?;
    Ok(devices(&state))
}

/// What is in use on this host during a trial.
#[derive(Clone, Copy)]
struct InUse<'a> {
    /// The devices in the kernel that are of this program, or have a name that is needed.
    there: &'a [Link],
    held: &'a Held,
}

/// Checks that no device of an unknown kind has the name of `link`.
fn check_name(kernel: &NetlinkKernel, there: &[Link], link: &Link) -> Result<(), Error> {
    let is_known = there.iter().any(|is| is.name == link.name);
    if is_known || !kernel.interfaces()?.iter().any(|interface| interface.name == link.name) {
        return Ok(());
    }
    let detail = format!("{} exists, and is a device of another kind", link.name);
    Err(refused(link, KernelError::explained(EEXIST, detail)))
}

/// Puts a device like `link` under the name of `device`, and deletes it again.
fn check_device(
    kernel: &dyn Kernel,
    device: &TrialDevice,
    in_use: InUse<'_>,
    link: &Link,
) -> Result<(), Error> {
    let is_there = |is: &Link| {
        let is_same_kind = std::mem::discriminant(&is.kind) == std::mem::discriminant(&link.kind);
        is.name == link.name && is_same_kind && port(is) == port(link)
    };
    if in_use.there.iter().any(is_there) {
        return Ok(());
    }
    let mut trial = Link { name: device.name, ..link.clone() };
    if let LinkKind::Vxlan(vxlan) = &mut trial.kind {
        vxlan.mac = device.mac;
    }
    let footprint = Footprint { links: [trial.name].into(), ..Footprint::default() };
    let made = kernel.apply(&footprint, &[Change::Put(trial.clone().into())]).pop();
    // This is needed also after a failure, which may have left a device that is down.
    let deleted = kernel.apply(&footprint, &[Change::Delete(trial.clone().into())]).pop();
    if let Some(Outcome::Failed(error)) = deleted
        && !error.is_absent()
    {
        tracing::warn!(link = %trial.name, %error, "the device of a trial is not deleted");
    }
    match made {
        Some(Outcome::Failed(error)) if !in_use.excuses(&error, link) => Err(refused(link, error)),
        _ => Ok(()),
    }
}

fn refused(link: &Link, source: KernelError) -> Error {
    let kind = link.kind.attributes().kind();
    Cause::Kernel { object: format!("{kind} device {}", link.name), source }.into()
}

impl InUse<'_> {
    /// Whether the kernel refuses `link` with this error because the network that runs has what it
    /// needs. That network goes before.
    fn excuses(&self, error: &KernelError, link: &Link) -> bool {
        // Two of them without a remote address exclude each other.
        let is_ipip = |link: &Link| matches!(link.kind, LinkKind::Ipip(_) | LinkKind::Fou(_));
        if error.is(EADDRINUSE) {
            return port(link).is_some_and(|port| self.has_port(port));
        }
        error.is(EEXIST) && is_ipip(link) && self.there.iter().any(is_ipip)
    }

    fn has_port(&self, wanted: u16) -> bool {
        let mut devices = self.there.iter();
        self.held.udp_ports.contains(&wanted) || devices.any(|is| port(is) == Some(wanted))
    }
}

/// The UDP port that the kernel gives to one device only.
fn port(link: &Link) -> Option<u16> {
    match &link.kind {
        LinkKind::Fou(fou) => Some(fou.port),
        LinkKind::Vxlan(vxlan) => Some(vxlan.port),
        LinkKind::Wireguard(wireguard) => Some(wireguard.port),
        _ => None,
    }
}

/// Checks that no other program has the port of a process. `held` are the ports of the networks
/// that run, whose processes go before.
fn check_port(transport: Transport, held: &BTreeSet<u16>, is_v6: bool) -> Result<(), Error> {
    let port = match transport {
        Transport::Udp(port) if !held.contains(&port) => port,
        _ => return Ok(()),
    };
    let v4 = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    let v6 = is_v6.then_some(Ipv6Addr::UNSPECIFIED.into());
    for address in [v4].into_iter().chain(v6) {
        UdpSocket::bind((address, port)).map_err(|error| Cause::Kernel {
            object: format!("UDP port {port}"),
            source: error.into(),
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use flannel_core::object::{Fou, Ipip, MacAddr, Tun, Vxlan};
    use flannel_core::testing::{FakeKernel, Operation};

    use super::*;

    fn vxlan(vni: u32, port: u16) -> Link {
        let mac = MacAddr::local([7; 6]);
        let local = None;
        let lower = None;
        let kind = Vxlan { vni, port, mac, local, lower, learning: false, gbp: false }.into();
        Link { name: format!("flannel.{vni}").parse().unwrap(), mtu: 1450, up: true, kind }
    }

    fn ipip() -> Link {
        let kind = LinkKind::Ipip(Ipip { local: [192, 0, 2, 1].into() });
        Link { name: "flannel.ipip".parse().unwrap(), mtu: 1480, up: true, kind }
    }

    fn fou(port: u16) -> Link {
        let local = [192, 0, 2, 1].into();
        let kind = Fou { local, lower: None, port, one_port: false }.into();
        Link { name: "flannel0".parse().unwrap(), mtu: 1472, up: true, kind }
    }

    fn tun() -> Link {
        let kind = LinkKind::Tun(Tun);
        Link { name: "flannel0".parse().unwrap(), mtu: 1472, up: true, kind }
    }

    /// The network that runs excuses what it holds, and nothing else.
    #[test]
    fn a_trial_leaves_nothing_and_tells_foreign_obstacles_from_its_own() {
        let device = TrialDevice::lock();
        let own = vxlan(1, 8472);
        let none = BTreeSet::new();
        let has_port = BTreeSet::from([8285]);
        for (there, udp_ports, link, errno, is_refused) in [
            (None, &none, own.clone(), None, false),
            (None, &none, own.clone(), Some(95), true),
            (Some(own.clone()), &none, own.clone(), Some(95), false),
            (Some(own.clone()), &none, vxlan(1, 9472), None, false),
            (Some(own.clone()), &none, vxlan(1, 9472), Some(EADDRINUSE), true),
            (Some(own.clone()), &none, vxlan(2, 8472), Some(EADDRINUSE), false),
            (Some(own.clone()), &none, vxlan(2, 8472), Some(EEXIST), true),
            (Some(own), &none, vxlan(2, 8472), Some(1), true),
            // A process has the port of a tun device.
            (Some(tun()), &has_port, fou(8285), Some(EADDRINUSE), false),
            (Some(tun()), &has_port, fou(8285), Some(EEXIST), true),
            (Some(tun()), &has_port, fou(8285), Some(95), true),
            (Some(tun()), &has_port, fou(9285), Some(EADDRINUSE), true),
            (Some(tun()), &none, fou(8285), Some(EADDRINUSE), true),
            (Some(tun()), &has_port, ipip(), Some(EEXIST), true),
            (Some(fou(8285)), &none, fou(8285), Some(1), false),
            (Some(fou(8285)), &none, fou(9285), Some(EEXIST), false),
            (Some(fou(8285)), &none, fou(9285), Some(EADDRINUSE), true),
            (Some(fou(8285)), &none, ipip(), Some(EEXIST), false),
            (Some(ipip()), &none, fou(8285), Some(EEXIST), false),
            (Some(ipip()), &none, fou(8285), Some(95), true),
            (Some(ipip()), &none, ipip(), Some(1), false),
        ] {
            let kernel = FakeKernel::with_uplink("eth0");
            if let Some(errno) = errno {
                kernel.fail(1, errno, |call| call.operation == Operation::Create);
            }
            let held = Held { udp_ports: udp_ports.clone(), ..Held::default() };
            let in_use = InUse { there: there.as_slice(), held: &held };
            let result = check_device(&kernel, &device, in_use, &link);
            let error = result.as_ref().err().map(ToString::to_string);
            assert_eq!(result.is_err(), is_refused, "{there:?} {link:?} {errno:?}: {error:?}");
            assert!(error.is_none_or(|error| error.contains(&format!("device {}", link.name))));
            assert_eq!(kernel.dump(), [""; 0]);
        }
    }

    #[test]
    fn the_port_of_a_process_is_free_or_its_own() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        let held = BTreeSet::from([port]);
        let transport = Transport::Udp(port);
        let error = check_port(transport, &BTreeSet::new(), false).unwrap_err().to_string();
        assert!(error.contains(&format!("UDP port {port}")), "{error}");
        check_port(transport, &held, false).unwrap();
        drop(socket);
        check_port(transport, &BTreeSet::new(), false).unwrap();
        check_port(Transport::Protocol(4), &BTreeSet::new(), true).unwrap();
    }
}
