//! The claim of a data plane on its device: two processes with the same device and port would take
//! each other's packets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::unistd::geteuid;

use crate::error::Error;

/// The longest time for the end of a process that was killed.
const ENDING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);
/// The most who can ask between two looks (linux `net.core.somaxconn`).
const MOST_ASKERS: usize = 4096;

/// A claim on a device of this network namespace. It lasts as long as its descriptor is open in any
/// process.
#[derive(Debug)]
pub(crate) struct Claim(UnixListener);

impl Claim {
    /// Claims a device. Waits for another process that is ending, at most a second.
    ///
    /// # Errors
    /// Another process of this user has claimed it.
    pub(crate) fn new(device: &str) -> Result<Self, Error> {
        let named = |error: io::Error| Error::device(device, error);
        let name = format!("flannel-udp/{device}");
        // Abstract names are those of a network namespace, as devices are, and end with the socket.
        let address = SocketAddr::from_abstract_name(&name).map_err(named)?;
        let begin = Instant::now();
        loop {
            match UnixListener::bind_addr(&address) {
                Ok(listener) => {
                    listener.set_nonblocking(true).map_err(named)?;
                    return Ok(Self(listener));
                }
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => return Err(named(error)),
                Err(_) if begin.elapsed() < ENDING => {}
                Err(_) => match is_of_this_user(&name) {
                    // The owner is ending, or has not begun to listen.
                    Err(_) if begin.elapsed() < 2 * ENDING => {}
                    Ok(false) | Err(_) => break,
                    Ok(true) => return Err(Error::Claimed { device: device.to_owned() }),
                },
            }
            std::thread::park_timeout(PAUSE);
        }
        // Every user can have the name, but not the device.
        crate::report(&format!("a program of another user has the socket @{name}"));
        let socket = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
        socket.map(|socket| Self(socket.into())).map_err(|errno| named(errno.into()))
    }

    /// The claim of another process, which has sent its descriptor.
    pub(crate) fn adopt(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// Forgets those who have asked for the owner. Otherwise nobody could ask after some thousand.
    pub(crate) fn forget_askers(&self) {
        // Others may ask all the time.
        for _ in 0..MOST_ASKERS {
            if self.0.accept().is_err() {
                break;
            }
        }
    }
}

impl AsFd for Claim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether the user of this process has the socket with an abstract name.
fn is_of_this_user(name: &str) -> nix::Result<bool> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new_abstract(name.as_bytes())?)?;
    let owner = getsockopt(&socket, sockopt::PeerCredentials)?;
    Ok(owner.uid() == geteuid().as_raw())
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::bind;

    use super::*;

    #[test]
    fn a_device_has_one_claim_and_that_of_a_process_that_ends_is_awaited() {
        // The namespace of the test is that of the host, perhaps.
        let device = format!("test{}", std::process::id());
        let first = Claim::new(&device).unwrap();
        for _ in 0..3 {
            let second = Claim::new(&device);
            assert!(matches!(second, Err(Error::Claimed { .. })), "{second:?}");
        }
        first.forget_askers();
        let adopted = Claim::adopt(first.as_fd().try_clone_to_owned().unwrap());
        drop(first);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| Claim::new(&device));
            // It also passes if the thread begins later.
            std::thread::park_timeout(ENDING / 10);
            drop(adopted);
            waiting.join().unwrap().unwrap();
        });
    }

    /// A program without rights must not keep the data plane from its device.
    #[test]
    fn the_claim_of_another_user_does_not_count() {
        let name = format!("flannel-udp/none{}", std::process::id());
        assert!(is_of_this_user(&name).is_err(), "nobody has it");
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        assert_eq!(is_of_this_user(&name), Ok(true));
        drop(listener);
        // A socket that does not listen tells no owner, as one whose queue is full.
        let flags = SockFlag::SOCK_CLOEXEC;
        let silent = socket(AddressFamily::Unix, SockType::Stream, flags, None).unwrap();
        let address = UnixAddr::new_abstract(name.as_bytes()).unwrap();
        bind(silent.as_raw_fd(), &address).unwrap();
        assert!(Claim::new(&name["flannel-udp/".len()..]).is_ok());
    }
}
