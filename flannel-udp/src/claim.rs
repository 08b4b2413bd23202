//! The claim of a data plane on its device: two processes with the same device and port would take
//! each other's packets.
//!
//! A queue of the device is the claim, because only a process with `CAP_NET_ADMIN` can have one. A
//! socket with an abstract name keeps two processes from opening queues at the same time. Every
//! process can have that name, so a process that has the name but no queue is no obstacle.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::in_use;

/// The longest time for the end of a process that was killed.
const ENDING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// A claim on a device of this network namespace. It lasts as long as its descriptor is open in any
/// process.
#[derive(Debug)]
pub(crate) struct Claim(OwnedFd);

impl Claim {
    /// Claims a device. Waits for another process that is ending, at most a second.
    ///
    /// # Errors
    /// Another process has a queue of the device, or the device cannot be looked at.
    pub(crate) fn new(device: &str) -> Result<Self, Error> {
        let named = |error: io::Error| Error::device(device, error);
        let name = format!("flannel-udp/{device}");
        // Abstract names belong to a network namespace, as devices do, and end with the socket.
        let address = SocketAddr::from_abstract_name(&name).map_err(named)?;
        let begin = Instant::now();
        let mut claim = None;
        loop {
            if claim.is_none() {
                claim = match UnixDatagram::bind_addr(&address) {
                    Ok(socket) => Some(socket),
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
                    Err(error) => return Err(named(error)),
                };
            }
            let is_in_use = in_use::is_in_use(device).map_err(named)?;
            let is_late = begin.elapsed() >= ENDING;
            match claim.take() {
                Some(socket) if !is_in_use => return Ok(Self(socket.into())),
                _ if is_late && is_in_use => {
                    return Err(Error::Claimed { device: device.to_owned() });
                }
                None if is_late => break,
                waiting => claim = waiting,
            }
            std::thread::park_timeout(PAUSE);
        }
        crate::report(&format!("a program without a queue of {device} has the socket @{name}"));
        let nameless = UnixDatagram::unbound().map_err(named)?;
        Ok(Self(nameless.into()))
    }

    /// The claim of another process, which has sent its descriptor.
    pub(crate) const fn adopt(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Claim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use flannel_netlink::testing::{in_netns, ip};
    use tun_rs::{DeviceBuilder, SyncDevice};

    use super::*;

    const DEVICE: &str = "flannel0";

    /// A queue of the device, which stays when the queue is closed.
    fn queue() -> SyncDevice {
        let builder = DeviceBuilder::new().name(DEVICE).multi_queue(true);
        let queue = builder.inherit_enable_state().build_sync().unwrap();
        queue.persist().unwrap();
        queue
    }

    #[test]
    fn a_device_has_one_claim_and_a_process_that_ends_is_awaited() {
        in_netns(|| {
            let first = Claim::new(DEVICE).unwrap();
            let first_queue = queue();
            // Also while the device is down.
            for state in ["down", "up"] {
                ip(&format!("link set {DEVICE} {state}"));
                let second = Claim::new(DEVICE);
                assert!(matches!(second, Err(Error::Claimed { .. })), "{state}: {second:?}");
            }
            let adopted = Claim::adopt(first.as_fd().try_clone_to_owned().unwrap());
            drop(first);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| Claim::new(DEVICE));
                // It also passes if the thread begins later.
                std::thread::park_timeout(ENDING / 10);
                drop((adopted, first_queue));
                waiting.join().unwrap().unwrap();
            });
        });
    }

    /// A data plane that found the name taken has only its queue.
    #[test]
    fn a_queue_alone_is_a_claim() {
        in_netns(|| {
            let _queue = queue();
            let claim = Claim::new(DEVICE);
            assert!(matches!(claim, Err(Error::Claimed { .. })), "{claim:?}");
        });
    }

    /// A program without rights must not keep the data plane from its device.
    #[test]
    fn a_name_without_a_queue_is_no_claim() {
        in_netns(|| {
            let address = SocketAddr::from_abstract_name(format!("flannel-udp/{DEVICE}")).unwrap();
            let _stranger = UnixDatagram::bind_addr(&address).unwrap();
            Claim::new(DEVICE).unwrap();
            // The device may exist without a process.
            drop(queue());
            Claim::new(DEVICE).unwrap();
        });
    }

    /// The error of the attempt to open it is better.
    #[test]
    fn a_device_of_another_kind_is_not_claimed() {
        in_netns(|| {
            ip("link add flannel0 type bridge");
            ip("link set flannel0 up");
            Claim::new(DEVICE).unwrap();
        });
    }
}
