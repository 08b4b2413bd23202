//! Asks the kernel whether it can hold the devices of another network, before the network that
//! runs is given up.
//!
//! A device of the same kind and attributes is put under a temporary name, brought up, and deleted
//! again. So the kernel itself answers for everything that a device needs: the kind with its
//! module, the rights of this process, an identifier that no other device has, a free port, the
//! MTU, memory. Nothing stays.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use flannel_core::backend::{Built, Inlet, MakeSecret, NodeLease, Prepared, Secrets};
use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::lease::{LeaseAttrs, Revision, View};
use flannel_core::object::{Change, Link, LinkKind, LinkName, MacAddr, Object, Secret, State};
use flannel_core::runtime::blocking;
use flannel_core::subnet::{Hints, LeaseEnd, Ownership, StoreStatus};
use flannel_core::{Config, Error as Cause, Kernel, Lease, SubnetManager, Subnets};
use flannel_netlink::NetlinkKernel;
use flannel_options::FileSecrets;
use tokio::sync::watch;

use super::leftovers::log_removal;
use crate::error::Error;

/// The name of a device that exists only during a trial.
const NAME: &str = "flannel-trial";
/// It is not that of a device of a network. Otherwise the kernel handle would take a renamed device
/// for this one.
const MAC: MacAddr = MacAddr::local([0x0a, 0xf1, 0xa2, 0xe1, 0x7e, 0x57]);
const EEXIST: i32 = 17;
const EADDRINUSE: i32 = 98;

/// The store as this node knows it, so that a repeated trial sends it no request.
#[derive(Debug)]
pub(super) struct KnownStore {
    pub(super) subnets: Arc<dyn SubnetManager>,
    /// The hints of the last start.
    pub(super) hints: Hints,
}

#[async_trait]
impl SubnetManager for KnownStore {
    async fn network_config(&self) -> flannel_core::Result<Config> {
        self.subnets.network_config().await
    }

    async fn hints(&self) -> flannel_core::Result<Hints> {
        Ok(self.hints.clone())
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
        self.subnets.acquire_lease(attrs).await
    }

    fn publishes_attrs(&self) -> bool {
        self.subnets.publishes_attrs()
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
        self.subnets.publish(held, attrs).await
    }

    async fn hold_lease(&self, held: &Lease) -> flannel_core::Result<LeaseEnd> {
        self.subnets.hold_lease(held).await
    }

    async fn watch_leases(&self) -> flannel_core::Result<watch::Receiver<View>> {
        self.subnets.watch_leases().await
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.subnets.ownership()
    }

    fn store_status(&self) -> StoreStatus {
        self.subnets.store_status()
    }
}

/// The secrets of this node, without storing a new one.
#[derive(Debug)]
pub(super) struct UnsavedSecrets(pub(super) FileSecrets);

#[async_trait]
impl Secrets for UnsavedSecrets {
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret> {
        let is_missing = AtomicBool::new(false);
        let none = || {
            is_missing.store(true, Ordering::Relaxed);
            Err(io::Error::from(io::ErrorKind::NotFound))
        };
        match self.0.get_or_create(name, &none).await {
            Err(_) if is_missing.load(Ordering::Relaxed) => make(),
            stored => stored,
        }
    }
}

/// Removes the device of a trial that a killed daemon could not end.
pub(super) async fn clear(kernel: &Arc<NetlinkKernel>) {
    let kernel = Arc::clone(kernel);
    let footprint = Footprint { links: [name()].into(), ..Footprint::default() };
    let removal =
        move || log_removal("a trial", flannel_route::cleanup(&*kernel, &footprint, false));
    blocking(removal).await;
}

/// Checks that the kernel can hold the devices of a network with this config, while a network with
/// the devices of `running` runs.
///
/// # Errors
/// The kernel refuses a device, or another program has the port of a process.
pub(super) async fn check(
    kernel: &Arc<NetlinkKernel>,
    running: Footprint,
    (config, prepared, inlets): (&Config, Prepared, Vec<Inlet>),
) -> Result<(), Error> {
    let kernel = Arc::clone(kernel);
    let links = match (prepared.build)(&lease_of(config)?)? {
        Built::Kernel(blueprint) => devices(&blueprint.base),
        Built::Custom(_) => return Ok(()),
    };
    blocking(move || {
        let there = devices_there(&*kernel, running, &links)?;
        for link in &links {
            check_name(&kernel, &there, link)?;
            check_device(&*kernel, &there, link)?;
        }
        let has_process = links.iter().any(|link| matches!(link.kind, LinkKind::Tun(_)));
        // The process of a network that runs has its port.
        match has_process && there.is_empty() {
            true => inlets.into_iter().try_for_each(check_port),
            false => Ok(()),
        }
    })
    .await
}

fn name() -> LinkName {
    NAME.parse().expect("a valid name")
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

fn devices(objects: &State) -> Vec<Link> {
    let link = |object: &Object| match object {
        Object::Link(link) => Some(link.clone()),
        _ => None,
    };
    objects.iter().filter_map(link).collect()
}

/// The devices of `running` and those with the names of `links` that are in the kernel.
fn devices_there(
    kernel: &dyn Kernel,
    running: Footprint,
    links: &[Link],
) -> Result<Vec<Link>, Error> {
    let names = running.links.into_iter().chain(links.iter().map(|link| link.name));
    let footprint = Footprint { links: names.collect(), ..Footprint::default() };
    let state = kernel.snapshot(&footprint)?;
    Ok(devices(&state))
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

/// Puts a device like `link`, and deletes it again.
fn check_device(kernel: &dyn Kernel, there: &[Link], link: &Link) -> Result<(), Error> {
    let mut holders = there.iter().filter(|is| holds_what_it_needs(is, link));
    if holders.clone().any(|holder| holder.name == link.name) {
        return Ok(());
    }
    let is_held = holders.next().is_some();
    let mut trial = Link { name: name(), ..link.clone() };
    if let LinkKind::Vxlan(vxlan) = &mut trial.kind {
        vxlan.mac = MAC;
    }
    let footprint = Footprint { links: [trial.name].into(), ..Footprint::default() };
    let put = |kernel: &dyn Kernel, change| kernel.apply(&footprint, &[change]).pop();
    let made = put(kernel, Change::Put(trial.clone().into())).unwrap_or(Ok(()));
    // Also after a failure, which may have left a device that is down.
    let deleted = put(kernel, Change::Delete(trial.clone().into())).unwrap_or(Ok(()));
    if let Err(error) = deleted
        && !error.is_absent()
    {
        tracing::warn!(link = %trial.name, %error, "the device of a trial is not deleted");
    }
    match made {
        Err(error) if error.is_started() => Ok(()),
        // A device of the network that runs has it, and goes before.
        Err(error) if is_held && is_held_error(error.errno, link) => Ok(()),
        made => made.map_err(|error| refused(link, error)),
    }
}

fn refused(link: &Link, source: KernelError) -> Error {
    let kind = link.kind.attributes().kind();
    Cause::Kernel { object: format!("{kind} device {}", link.name), source }.into()
}

/// Whether `is` has what the kernel gives to one device only, and what `link` needs.
fn holds_what_it_needs(is: &Link, link: &Link) -> bool {
    match (&is.kind, &link.kind) {
        (LinkKind::Vxlan(is), LinkKind::Vxlan(link)) => is.port == link.port,
        (LinkKind::Wireguard(is), LinkKind::Wireguard(link)) => is.port == link.port,
        // Both are ipip devices without a remote address. A process has the port of a tun device.
        (
            LinkKind::Ipip(_) | LinkKind::Fou(_) | LinkKind::Tun(_),
            LinkKind::Ipip(_) | LinkKind::Fou(_) | LinkKind::Tun(_),
        ) => true,
        _ => false,
    }
}

/// Whether the kernel refuses `link` with this error while a device of the network that runs has
/// what it needs. A VNI is in the name of the device, so another device has it.
fn is_held_error(errno: i32, link: &Link) -> bool {
    let is_vxlan = matches!(link.kind, LinkKind::Vxlan(_));
    errno == EADDRINUSE || (errno == EEXIST && !is_vxlan)
}

/// Checks that no other program has the port of a process.
fn check_port(inlet: Inlet) -> Result<(), Error> {
    let Inlet::Udp(port) = inlet else { return Ok(()) };
    let bound = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port));
    bound.map(drop).map_err(|error| {
        Cause::Kernel { object: format!("UDP port {port}"), source: error.into() }.into()
    })
}

#[cfg(test)]
mod tests {
    use flannel_core::object::Vxlan;
    use flannel_core::testing::{FakeKernel, Operation};

    use super::*;

    fn vxlan(vni: u32, port: u16) -> Link {
        let mac = MacAddr::local([7; 6]);
        let local = None;
        let lower = None;
        let kind = Vxlan { vni, port, mac, local, lower, learning: false, gbp: false }.into();
        Link { name: format!("flannel.{vni}").parse().unwrap(), mtu: 1450, up: true, kind }
    }

    /// The devices of the network that runs excuse what they hold, and only that.
    #[test]
    fn a_trial_leaves_nothing_and_tells_foreign_obstacles_from_its_own() {
        let own = &vxlan(1, 8472);
        let other_port = &vxlan(1, 9472);
        let other_vni = &vxlan(2, 8472);
        let there = std::slice::from_ref(own);
        for (there, link, errno, is_refused) in [
            (&[][..], own, None, false),
            (&[][..], own, Some(95), true),
            (there, own, Some(95), false),
            (there, other_port, None, false),
            (there, other_port, Some(EADDRINUSE), true),
            (there, other_vni, Some(EADDRINUSE), false),
            (there, other_vni, Some(EEXIST), true),
            (there, other_vni, Some(1), true),
        ] {
            let kernel = FakeKernel::with_uplink("eth0");
            if let Some(errno) = errno {
                kernel.fail(1, errno, |call| call.operation == Operation::Create);
            }
            let result = check_device(&kernel, there, link);
            let error = result.as_ref().err().map(ToString::to_string);
            assert_eq!(result.is_err(), is_refused, "{link:?} {errno:?}: {error:?}");
            assert!(error.is_none_or(|error| error.contains("vxlan device flannel.")));
            assert_eq!(kernel.dump(), [""; 0]);
        }
    }

    #[tokio::test]
    async fn a_question_stores_no_secret_and_reads_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let files = || FileSecrets::new(dir.path());
        let unsaved = UnsavedSecrets(files());
        let make = |byte: u8| move || Ok(Secret::new([byte; 32]));
        let made = unsaved.get_or_create("wireguard", &make(7)).await.unwrap();
        assert_eq!(made.expose(), [7; 32]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        files().get_or_create("wireguard", &make(8)).await.unwrap();
        let read = unsaved.get_or_create("wireguard", &make(9)).await.unwrap();
        assert_eq!(read.expose(), [8; 32]);
    }
}
