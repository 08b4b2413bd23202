//! Packets as bytes, as a process with raw sockets or a host on the underlay can make them.

use std::net::{IpAddr, SocketAddr};

/// The port from which the packets of [`udp`] come.
const SOURCE_PORT: u16 = 4000;
/// The number of the network of [`vxlan`].
const VNI: u8 = 1;
/// The source of the frames of [`vxlan`].
const SENDER: [u8; 6] = [2, 0, 0, 0, 0, 8];

/// An IP packet with a datagram of UDP.
///
/// # Panics
/// The addresses are of different families, or the packet is too long.
pub fn udp(from: IpAddr, to: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let len = u16::try_from(8 + payload.len()).expect("a packet has less than 64 KiB");
    let ports = [SOURCE_PORT.to_be_bytes(), to.port().to_be_bytes()].concat();
    let mut udp = [&ports[..], &len.to_be_bytes(), &[0, 0], payload].concat();
    match (from, to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let [high, low] = (20 + len).to_be_bytes();
            let mut header = vec![0x45, 0, high, low, 0, 1, 0, 0, 64, 17, 0, 0];
            header.extend([from.octets(), to.octets()].concat());
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            [header, udp].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let [high, low] = len.to_be_bytes();
            let addresses = [from.octets(), to.octets()].concat();
            let sum = checksum(&[&addresses[..], &[0, 0, high, low, 0, 0, 0, 17], &udp].concat());
            udp[6..8].copy_from_slice(&sum.to_be_bytes());
            [&[0x60, 0, 0, 0, high, low, 17, 64], &addresses[..], &udp].concat()
        }
        (from, to) => panic!("{from} and {to} are of different families"),
    }
}

/// The datagram of vxlan, network 1, with an IP packet to a device with this MAC address.
pub fn vxlan(target: [u8; 6], packet: &[u8]) -> Vec<u8> {
    let kind = if packet[0] >> 4 == 4 { [8, 0] } else { [0x86, 0xdd] };
    [&[8, 0, 0, 0, 0, 0, VNI, 0], &target[..], &SENDER, &kind, packet].concat()
}

/// The Internet checksum (RFC 1071).
pub(crate) fn checksum(data: &[u8]) -> u16 {
    let mut sum: u32 = data
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
