//! The header before each packet of a tun device with offloads.
//!
//! **Source**: linux `include/uapi/linux/virtio_net.h`, `struct virtio_net_hdr`, in the byte order
//! of the host.

/// The checksum of the transport header is only the sum of the pseudo-header.
pub(crate) const NEEDS_CSUM: u8 = 1;
pub(crate) const GSO_NONE: u8 = 0;
pub(crate) const GSO_TCPV4: u8 = 1;
pub(crate) const GSO_TCPV6: u8 = 4;
pub(crate) const GSO_UDP_L4: u8 = 5;
/// Set besides a type for TCP with ECN.
pub(crate) const GSO_ECN: u8 = 0x80;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Vnet {
    pub(crate) flags: u8,
    pub(crate) gso_type: u8,
    /// The length of all headers. It is only a hint, and may be 0 or the length of the first
    /// packet.
    pub(crate) hdr_len: u16,
    /// The payload of each segment, in bytes.
    pub(crate) gso_size: u16,
    /// The offset of the transport header.
    pub(crate) csum_start: u16,
    /// The offset of the checksum in it.
    pub(crate) csum_offset: u16,
}

impl Vnet {
    pub(crate) const LEN: usize = 10;

    pub(crate) fn read(bytes: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    pub(crate) fn write(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type;
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset];
        for (place, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}
