//! Ends for tests that fail as kernels and devices do.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::IoSlice;
use std::net::SocketAddr;

use nix::errno::Errno;

use crate::ends::{Device, Received, Wire};
use crate::packet::{TCP, UDP, pseudo_sum, set_total, set_word};
use crate::vnet::{GSO_TCPV4, GSO_UDP_L4, NEEDS_CSUM, Vnet};

/// A device with packets to read. It keeps those that are written.
#[derive(Debug, Default)]
pub(crate) struct FakeDevice {
    pub(crate) reads: RefCell<VecDeque<Vec<u8>>>,
    pub(crate) written: RefCell<Vec<Vec<u8>>>,
    /// Refuses packets that the kernel would have to segment.
    pub(crate) refuses_joined: Option<Errno>,
    /// The errors of the next writes.
    pub(crate) errors: RefCell<VecDeque<Errno>>,
}

impl Device for FakeDevice {
    fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        let packet = self.reads.borrow_mut().pop_front().ok_or(Errno::EAGAIN)?;
        buffer[..packet.len()].copy_from_slice(&packet);
        Ok(packet.len())
    }

    fn write(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        if let Some(errno) = self.errors.borrow_mut().pop_front() {
            return Err(errno);
        }
        let packet = parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>();
        match self.refuses_joined {
            Some(errno) if packet[1] != 0 => Err(errno),
            _ => {
                self.written.borrow_mut().push(packet);
                Ok(())
            }
        }
    }
}

/// A socket that keeps the datagrams that are sent.
#[derive(Debug, Default)]
pub(crate) struct FakeWire {
    pub(crate) sent: RefCell<Vec<(SocketAddr, Vec<u8>)>>,
    pub(crate) calls: RefCell<usize>,
    pub(crate) receives: RefCell<VecDeque<(SocketAddr, usize, Vec<u8>)>>,
    /// Refuses several datagrams at once.
    pub(crate) refuses_joined: Option<Errno>,
    pub(crate) errors: RefCell<VecDeque<Errno>>,
    /// The path has an MTU of 1400, not of 1500.
    pub(crate) small_path: bool,
    pub(crate) small_buffer: bool,
}

impl Wire for &FakeWire {
    fn may_rest(&self) -> bool {
        !self.small_buffer
    }

    fn send(&self, to: SocketAddr, parts: &[IoSlice<'_>], size: Option<u16>) -> Result<(), Errno> {
        *self.calls.borrow_mut() += 1;
        if let Some(errno) = self.errors.borrow_mut().pop_front() {
            return Err(errno);
        }
        if let Some(errno) = self.refuses_joined.filter(|_| size.is_some()) {
            return Err(errno);
        }
        let bytes = parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>();
        let size = size.map_or(bytes.len(), usize::from);
        // The limits of the kernel.
        if bytes.len() > 65_507 || bytes.len().div_ceil(size) > 64 {
            return Err(Errno::EMSGSIZE);
        }
        let datagrams = bytes.chunks(size).map(|datagram| (to, datagram.to_vec()));
        self.sent.borrow_mut().extend(datagrams);
        Ok(())
    }

    fn path_mtu(&self, _: SocketAddr) -> Option<u16> {
        Some(if self.small_path { 1400 } else { 1500 })
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let next = self.receives.borrow_mut().pop_front();
        let (from, size, bytes) = next.ok_or(Errno::EAGAIN)?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(Received { len: bytes.len(), size, from })
    }
}

/// A packet of IPv4 from 10.1.7.2 to 10.1.8.2 with its vnet header. If `size` is not 0, the kernel
/// has left it to the device to make segments of this size.
#[cfg_attr(not(test), expect(dead_code, reason = "fuzz targets have their own packets"))]
pub(crate) fn from_pod(protocol: u8, payload: &[u8], size: u16) -> Vec<u8> {
    let mut packet =
        vec![0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, protocol, 0, 0, 10, 1, 7, 2, 10, 1, 8, 2];
    packet.extend([0x12, 0x34, 0x14, 0x51]);
    if protocol == TCP {
        packet.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 2, 0, 0, 0, 0]);
    } else {
        packet.extend([0; 4]);
    }
    packet.extend(payload);
    let total = packet.len();
    set_word(&mut packet, 24, if protocol == UDP { (total - 20) as u16 } else { 0 });
    set_total(&mut packet, 20, false, total);
    let place = if protocol == TCP { 36 } else { 26 };
    let pseudo = pseudo_sum(&packet, false, protocol, total - 20);
    set_word(&mut packet, place, pseudo);
    let gso_type = match (size, protocol) {
        (0, _) => 0,
        (_, TCP) => GSO_TCPV4,
        _ => GSO_UDP_L4,
    };
    let vnet = Vnet {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: 0,
        gso_size: size,
        csum_start: 20,
        csum_offset: (place - 20) as u16,
    };
    [&vnet.write()[..], &packet].concat()
}
