//! The claim of a data plane on its device: two processes with the same device and port would take
//! each other's packets.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use crate::error::Error;

/// The longest time for the end of a process that was killed.
const ENDING: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(2);

/// Claims a device of this network namespace, as long as the descriptor is open in any process.
/// Waits for another process that is ending, at most a second.
///
/// # Errors
/// Another process has claimed it.
pub(crate) fn claim(device: &str) -> Result<OwnedFd, Error> {
    let named = |error: io::Error| Error::device(device, error);
    // Abstract names are those of a network namespace, as devices are, and end with the socket.
    let address = SocketAddr::from_abstract_name(format!("flannel-udp/{device}")).map_err(named)?;
    let begin = Instant::now();
    loop {
        match UnixDatagram::bind_addr(&address) {
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => return Err(named(error)),
            Err(_) if begin.elapsed() >= ENDING => {
                return Err(Error::Claimed { device: device.to_owned() });
            }
            Err(_) => std::thread::park_timeout(PAUSE),
            Ok(socket) => return Ok(socket.into()),
        }
    }
}
