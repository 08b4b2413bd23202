//! The name and the MAC address of the device of a trial, which only one daemon in a network
//! namespace uses at a time.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::object::{LinkName, MacAddr};
use flannel_route::Cleanup;

use super::devices;

/// The device that exists only during a trial of this daemon.
#[derive(Debug)]
pub(super) struct TrialDevice {
    pub(super) name: LinkName,
    /// No network and no other daemon uses it. Otherwise the kernel handle would take their device
    /// for this one, which another program has renamed.
    pub(super) mac: MacAddr,
    /// `None` if no name could be locked.
    lock: Option<UnixDatagram>,
}

impl TrialDevice {
    /// Locks the first name that no other daemon of this network namespace has. The lock lasts
    /// until the value is dropped, or the process ends.
    pub(super) fn lock() -> Self {
        for number in 0..=LAST {
            if let Some(lock) = lock(name(number)) {
                return Self::new(number, Some(lock));
            }
        }
        // Every process can have the socket names. Without a lock, trials still work unless another
        // daemon tries a device at the same time.
        tracing::warn!("no name for the devices of trials can be locked");
        Self::new(0, None)
    }

    fn new(number: u8, lock: Option<UnixDatagram>) -> Self {
        let mac = MacAddr::local([0x0a, 0xf1, 0xa2, 0xe1, 0x7e, number]);
        Self { name: name(number), mac, lock }
    }

    /// Removes the devices of trials that a killed daemon could not end.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub(super) fn remove_stale(&self, kernel: &dyn Kernel) -> Result<Cleanup, KernelError> {
        let footprint = Footprint { links: (0..=LAST).map(name).collect(), ..Footprint::default() };
        let mut stale = Footprint::default();
        // The locks keep a daemon that starts now from using a name before its device is removed.
        let mut locks = Vec::new();
        for link in devices(&kernel.snapshot(&footprint)?) {
            // Without a lock of its own, another daemon may have the name.
            if link.name == self.name && self.lock.is_some() {
                stale.links.insert(link.name);
            } else if let Some(lock) = lock(link.name) {
                stale.links.insert(link.name);
                locks.push(lock);
            }
        }
        flannel_route::cleanup(kernel, &stale, false)
    }
}

/// The largest number of a name. A name has at most 15 bytes.
const LAST: u8 = 99;

/// The name of the device of a daemon. The first daemon has number 0.
fn name(number: u8) -> LinkName {
    let suffix = if number == 0 { String::new() } else { number.to_string() };
    format!("flannel-trial{suffix}").parse().expect("a name of at most 15 bytes")
}

/// Locks the name of a device, or returns `None` if a daemon that runs has it, or the socket is
/// refused. Abstract socket names belong to a network namespace, as devices do, and the kernel
/// frees them when the process ends.
fn lock(name: LinkName) -> Option<UnixDatagram> {
    let address = SocketAddr::from_abstract_name(format!("flanneld/{name}")).ok()?;
    UnixDatagram::bind_addr(&address).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use flannel_netlink::NetlinkKernel;
    use flannel_netlink::testing::{in_netns, ip};

    use super::*;

    fn is_there(name: &str) -> bool {
        ip("-o link show").contains(&format!(" {name}: "))
    }

    #[test]
    fn daemons_in_one_network_namespace_have_different_devices() {
        in_netns(|| {
            let daemons: Vec<TrialDevice> = (0..=LAST).map(|_| TrialDevice::lock()).collect();
            assert_eq!(daemons[0].name.as_str(), "flannel-trial");
            assert_eq!(daemons[99].name.as_str(), "flannel-trial99");
            let names: BTreeSet<LinkName> = daemons.iter().map(|daemon| daemon.name).collect();
            let macs: BTreeSet<MacAddr> = daemons.iter().map(|daemon| daemon.mac).collect();
            assert_eq!([names.len(), macs.len()], [100, 100]);
            assert_eq!(TrialDevice::lock().name, daemons[0].name, "all names are locked");
            drop(daemons);
            assert_eq!(TrialDevice::lock().name.as_str(), "flannel-trial");
        });
    }

    #[test]
    fn only_the_devices_of_daemons_that_no_longer_run_are_stale() {
        in_netns(|| {
            let kernel = NetlinkKernel::open().unwrap();
            let running = TrialDevice::lock();
            let killed = TrialDevice::lock();
            let own = TrialDevice::lock();
            for (number, device) in [&running, &killed, &own].into_iter().enumerate() {
                let port = 4000 + number;
                ip(&format!("link add {} type vxlan id {number} dstport {port}", device.name));
            }
            ip("link add flannel-trial42 type vxlan id 42 dstport 4042");
            drop(killed);
            let removed = own.remove_stale(&kernel).unwrap();
            assert_eq!((removed.done.len(), removed.failed.len()), (3, 0), "{removed:?}");
            assert!(is_there("flannel-trial"));
            for removed in ["flannel-trial1", "flannel-trial2", "flannel-trial42"] {
                assert!(!is_there(removed), "{removed}");
            }
        });
    }
}
