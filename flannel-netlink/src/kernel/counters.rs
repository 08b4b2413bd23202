//! The counters of devices.

use std::fs;

use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;

use super::NetlinkKernel;

impl NetlinkKernel {
    /// The number of packets that these devices have received since they were made. A device that
    /// does not exist counts as 0.
    ///
    /// # Errors
    /// `/proc/net/dev` of the network namespace cannot be read.
    ///
    /// # Blocking
    /// Reads a file of one line per device of the host.
    pub fn received(&self, devices: &[LinkName]) -> Result<u64, KernelError> {
        let table = self.namespace().run(|| fs::read_to_string("/proc/thread-self/net/dev"))??;
        Ok(devices.iter().filter_map(|device| packets(&table, device.as_str())).sum())
    }
}

/// The packets that a device has received. `None` if it is not in the table. A line is
/// `NAME: BYTES PACKETS …`.
fn packets(table: &str, device: &str) -> Option<u64> {
    let mut lines = table.lines().filter_map(|line| line.trim_start().split_once(':'));
    let (_, counters) = lines.find(|(name, _)| *name == device)?;
    counters.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{in_netns, ip};

    #[test]
    fn received_packets_are_counted_for_each_device() {
        in_netns(|| {
            ip("link set lo up");
            let kernel = NetlinkKernel::open().unwrap();
            let devices = ["lo", "flannel.1"].map(|name| name.parse().unwrap());
            assert_eq!(kernel.received(&devices), Ok(0));
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            for _ in 0..3 {
                socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
            }
            assert_eq!(kernel.received(&devices), Ok(3));
            assert_eq!(kernel.received(&devices[1..]), Ok(0));
        });
    }
}
