//! The lock of a device: two processes with the same device and port would take each other's
//! packets.
//!
//! A process that has a queue of the device holds the lock, because only a process with
//! `CAP_NET_ADMIN` can have one. A socket with an abstract name keeps two processes from opening
//! queues at the same time. Every process can have that name, so a process that has the name but
//! no queue does not hold the lock.

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

/// The lock of a device of this network namespace. It lasts as long as its descriptor is open in
/// any process.
#[derive(Debug)]
pub(crate) struct DeviceLock(OwnedFd);

impl DeviceLock {
    /// Locks a device. Waits for another process that is ending, at most a second.
    ///
    /// # Errors
    /// Another process has a queue of the device, or the device cannot be looked at.
    pub(crate) fn new(device: &str) -> Result<Self, Error> {
        let named = |error: io::Error| Error::device(device, error);
        let name = format!("flannel-udp/{device}");
        // Abstract names belong to a network namespace, as devices do, and end with the socket.
        let address = SocketAddr::from_abstract_name(&name).map_err(named)?;
        let begin = Instant::now();
        let mut bound = None;
        loop {
            if bound.is_none() {
                bound = match UnixDatagram::bind_addr(&address) {
                    Ok(socket) => Some(socket),
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => None,
                    Err(error) => return Err(named(error)),
                };
            }
            let is_in_use = in_use::is_in_use(device).map_err(named)?;
            let is_late = begin.elapsed() >= ENDING;
            match bound.take() {
                Some(socket) if !is_in_use => return Ok(Self(socket.into())),
                _ if is_late && is_in_use => {
                    return Err(Error::DeviceTaken { device: device.to_owned() });
                }
                None if is_late => break,
                waiting => bound = waiting,
            }
            std::thread::park_timeout(PAUSE);
        }
        crate::report(&format!("a program without a queue of {device} has the socket @{name}"));
        let nameless = UnixDatagram::unbound().map_err(named)?;
        Ok(Self(nameless.into()))
    }

    /// The lock of another process, which has sent its descriptor.
    pub(crate) const fn adopt(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for DeviceLock {
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
    fn a_device_has_one_lock_and_a_process_that_ends_is_awaited() {
        in_netns(|| {
            let first = DeviceLock::new(DEVICE).unwrap();
            let first_queue = queue();
            // Also while the device is down.
            for state in ["down", "up"] {
                ip(&format!("link set {DEVICE} {state}"));
                let second = DeviceLock::new(DEVICE);
                assert!(matches!(second, Err(Error::DeviceTaken { .. })), "{state}: {second:?}");
            }
            let adopted = DeviceLock::adopt(first.as_fd().try_clone_to_owned().unwrap());
            drop(first);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| DeviceLock::new(DEVICE));
                // It also passes if the thread begins later.
                std::thread::park_timeout(ENDING / 10);
                drop(adopted);
                drop(first_queue);
                waiting.join().unwrap().unwrap();
            });
        });
    }

    /// A data plane that found the name taken has only its queue.
    #[test]
    fn a_queue_alone_locks_the_device() {
        in_netns(|| {
            let _queue = queue();
            let lock = DeviceLock::new(DEVICE);
            assert!(matches!(lock, Err(Error::DeviceTaken { .. })), "{lock:?}");
        });
    }

    /// A program without rights must not keep the data plane from its device.
    #[test]
    fn a_name_without_a_queue_locks_nothing() {
        in_netns(|| {
            let address = SocketAddr::from_abstract_name(format!("flannel-udp/{DEVICE}")).unwrap();
            let _stranger = UnixDatagram::bind_addr(&address).unwrap();
            DeviceLock::new(DEVICE).unwrap();
            // The device may exist without a process.
            drop(queue());
            DeviceLock::new(DEVICE).unwrap();
        });
    }

    /// The error of the attempt to open it is better.
    #[test]
    fn a_device_of_another_kind_is_not_locked() {
        in_netns(|| {
            ip("link add flannel0 type bridge");
            ip("link set flannel0 up");
            DeviceLock::new(DEVICE).unwrap();
        });
    }
}
