//! Netlink messages as bytes.
//!
//! This module writes headers and attributes to the buffer, and reads them from it, without neli.
//! neli allocates a `Vec` for each attribute, which is too slow for hundreds of thousands of them.

use std::net::IpAddr;
use std::ops::Range;

use flannel_core::kernel::KernelError;
use flannel_core::object::MacAddr;
use neli::consts::nl::NlmF;

/// `NLMSG_ERROR`.
pub(crate) const ERROR: u16 = 2;
/// `NLMSG_DONE`.
pub(crate) const DONE: u16 = 3;

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
/// `NLA_F_NESTED`. Newer kernels require it on some attributes that contain others.
const NESTED: u16 = 1 << 15;
/// The flag bits in an attribute's type.
const FLAGS: u16 = 0b11 << 14;
/// `NLMSGERR_ATTR_MSG`.
const ERROR_TEXT: u16 = 1;

/// Requests, one after the other in one buffer.
#[derive(Debug, Default)]
pub struct Messages {
    bytes: Vec<u8>,
    /// The offset of each message in `bytes`.
    starts: Vec<usize>,
}

impl Messages {
    /// A single request with the type `kind` and the fixed header `header`.
    pub(crate) fn one(kind: impl Into<u16>, flags: NlmF, header: &[u8]) -> Self {
        let mut messages = Self::default();
        messages.begin(kind, flags, header);
        messages
    }

    /// The number of messages.
    pub(crate) fn len(&self) -> usize {
        self.starts.len()
    }

    /// The length in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.starts.clear();
    }

    /// Starts a message. Attributes that are added next belong to it.
    pub(crate) fn begin(&mut self, kind: impl Into<u16>, flags: NlmF, header: &[u8]) -> &mut Self {
        self.starts.push(self.bytes.len());
        // `ready` fills in length and sequence number.
        let mut fixed = [0; HEADER];
        fixed[4..6].copy_from_slice(&kind.into().to_ne_bytes());
        fixed[6..8].copy_from_slice(&(flags | NlmF::REQUEST).bits().to_ne_bytes());
        self.bytes.extend_from_slice(&fixed);
        self.bytes.extend_from_slice(header);
        self
    }

    /// Adds an attribute of the type `kind` to the last message. Pads it to a multiple of 4 bytes.
    ///
    /// # Panics
    /// `value` has more than 65,531 bytes.
    pub fn attr(&mut self, kind: impl Into<u16>, value: &[u8]) -> &mut Self {
        let len = u16::try_from(4 + value.len()).expect("an attribute is shorter than 64 KiB");
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.into().to_ne_bytes());
        self.bytes.extend_from_slice(value);
        if !value.len().is_multiple_of(4) {
            self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        }
        self
    }

    /// Adds a number in the machine's byte order, as an attribute of the type `kind`.
    pub fn u32(&mut self, kind: impl Into<u16>, value: u32) -> &mut Self {
        self.attr(kind, &value.to_ne_bytes())
    }

    /// Adds an IP address.
    pub(crate) fn ip(&mut self, kind: impl Into<u16>, address: IpAddr) -> &mut Self {
        match address {
            IpAddr::V4(a) => self.attr(kind, &a.octets()),
            IpAddr::V6(a) => self.attr(kind, &a.octets()),
        }
    }

    /// Adds a text with a terminating zero byte.
    pub fn text(&mut self, kind: impl Into<u16>, value: &str) -> &mut Self {
        self.attr(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds an attribute that contains the attributes that `fill` adds (`NLA_F_NESTED`).
    ///
    /// # Panics
    /// The attributes have more than 65,531 bytes in total.
    pub fn nest(&mut self, kind: impl Into<u16>, fill: impl FnOnce(&mut Self)) -> &mut Self {
        let start = self.bytes.len();
        self.attr(kind.into() | NESTED, &[]);
        fill(self);
        let len = u16::try_from(self.bytes.len() - start).expect("a few short attributes");
        self.bytes[start..start + 2].copy_from_slice(&len.to_ne_bytes());
        self
    }

    /// The bytes of a part of the messages, ready to be sent. Their sequence numbers count up from
    /// `sequence`. Only the last one has the flags `last`.
    pub(crate) fn ready(&mut self, part: Range<usize>, sequence: u32, last: NlmF) -> &[u8] {
        let bytes = &mut self.bytes;
        let end_of = |n: usize, all: usize| self.starts.get(n + 1).copied().unwrap_or(all);
        for (number, n) in (0_u32..).zip(part.clone()) {
            let start = self.starts[n];
            let len = u32::try_from(end_of(n, bytes.len()) - start).expect("a message is short");
            let mut flags =
                NlmF::from_bits_retain(u16::from_ne_bytes([bytes[start + 6], bytes[start + 7]]));
            flags.set(last, n + 1 == part.end);
            bytes[start..start + 4].copy_from_slice(&len.to_ne_bytes());
            bytes[start + 6..start + 8].copy_from_slice(&flags.bits().to_ne_bytes());
            bytes[start + 8..start + 12]
                .copy_from_slice(&sequence.wrapping_add(number).to_ne_bytes());
        }
        let end = end_of(part.end - 1, bytes.len());
        &bytes[self.starts[part.start]..end]
    }
}

/// A received message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: NlmF,
    pub(crate) sequence: u32,
    /// The port id of the socket that requested the change, or 0 if the kernel does not report it.
    pub(crate) port: u32,
    pub(crate) payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Whether it reports a deletion. The types of rtnetlink messages about one kind of object are
    /// four numbers that begin at a multiple of 4: NEW, DEL, GET, SET.
    pub(crate) fn is_deletion(&self) -> bool {
        self.kind % 4 == 1
    }

    /// The fixed header of `N` bytes and the attributes after it. `None` if the message is shorter.
    pub(crate) fn split<const N: usize>(&self) -> Option<(&'a [u8; N], Attributes<'a>)> {
        let (header, rest) = self.payload.split_first_chunk()?;
        Some((header, Attributes(rest)))
    }
}

/// The messages in a datagram. A truncated message gives an error, after which the iterator ends.
pub(crate) fn messages(datagram: &[u8]) -> impl Iterator<Item = Result<Message<'_>, KernelError>> {
    let mut rest = datagram;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let message = message(rest).map(|(message, len)| {
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
            message
        });
        Some(message.ok_or_else(|| {
            rest = &[];
            KernelError::unreadable("the kernel sent a message that is cut short")
        }))
    })
}

/// The first message in `bytes`, and its length without padding. `None` if it is truncated.
fn message(bytes: &[u8]) -> Option<(Message<'_>, usize)> {
    let len = usize::try_from(u32_at(bytes, 0)?).ok()?;
    let payload = bytes.get(HEADER..len)?;
    let message = Message {
        kind: u16_at(bytes, 4)?,
        flags: NlmF::from_bits_retain(u16_at(bytes, 6)?),
        sequence: u32_at(bytes, 8)?,
        port: u32_at(bytes, 12)?,
        payload,
    };
    Some((message, len))
}

/// The result in an `NLMSG_ERROR` or `NLMSG_DONE` message: success, or the errno with the text of
/// the kernel.
pub(crate) fn outcome(message: &Message<'_>) -> Result<(), KernelError> {
    let errno = u32_at(message.payload, 0).map_or(0, u32::cast_signed);
    if errno == 0 {
        return Ok(());
    }
    Err(KernelError::Errno {
        errno: errno.wrapping_neg(),
        detail: error_text(message).filter(|_| message.flags.contains(NlmF::ACK_TLVS)),
    })
}

/// The text of an extended acknowledgement. It follows the errno. In `NLMSG_ERROR` it also follows
/// a copy of the request, or of the header alone (`NLM_F_CAPPED`).
fn error_text(message: &Message<'_>) -> Option<String> {
    let request = match message.kind {
        ERROR if message.flags.contains(NlmF::CAPPED) => HEADER,
        ERROR => usize::try_from(u32_at(message.payload, 4)?).ok()?,
        _ => 0,
    };
    let start = request.checked_next_multiple_of(4)?.checked_add(4)?;
    let mut attributes = Attributes(message.payload.get(start..)?);
    attributes.find(|(kind, _)| *kind == ERROR_TEXT).and_then(|(_, value)| text_of(value))
}

/// An iterator over attributes, in the bytes of a message after its fixed header, or in the value
/// of another attribute. An item is the type of an attribute, without flags, and its value. A
/// malformed attribute ends the iterator.
#[derive(Debug, Clone, Copy)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let len = usize::from(u16_at(self.0, 0)?);
        let kind = u16_at(self.0, 2)? & !FLAGS;
        let value = self.0.get(4..len)?;
        self.0 = self.0.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number at an offset, in the machine's byte order. `None` if there are too few bytes.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The number in the first four bytes, in the machine's byte order. `None` if there are fewer.
pub(crate) fn u32_of(value: &[u8]) -> Option<u32> {
    u32_at(value, 0)
}

/// The number in the first two bytes, in the machine's byte order. `None` if there are fewer.
pub(crate) fn u16_of(value: &[u8]) -> Option<u16> {
    u16_at(value, 0)
}

/// An IP address. 4 bytes are an IPv4 address, 16 bytes are an IPv6 address. `None` for other
/// lengths.
pub(crate) fn ip_of(value: &[u8]) -> Option<IpAddr> {
    if let Ok(octets) = <[u8; 4]>::try_from(value) {
        return Some(octets.into());
    }
    <[u8; 16]>::try_from(value).ok().map(IpAddr::from)
}

/// A MAC address. `None` unless there are 6 bytes.
pub(crate) fn mac_of(value: &[u8]) -> Option<MacAddr> {
    <[u8; 6]>::try_from(value).map(MacAddr).ok()
}

/// The text before the first zero byte. `None` if it is not UTF-8.
pub(crate) fn text_of(value: &[u8]) -> Option<String> {
    let text = value.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::Nlmsg;
    use proptest::prelude::*;

    use super::*;

    /// The payload of `NLMSG_ERROR`: ENODEV, a copy of the request (`request` bytes), and a text.
    fn refusal(flags: NlmF, request: usize) -> Vec<u8> {
        let mut payload = (-19i32).to_ne_bytes().to_vec();
        payload.extend((request as u32).to_ne_bytes());
        payload.resize(4 + if flags.contains(NlmF::CAPPED) { HEADER } else { request }, 7);
        let text = b"no device\0";
        payload.extend(14u16.to_ne_bytes());
        payload.extend(1u16.to_ne_bytes());
        payload.extend(text);
        payload
    }

    #[test]
    fn message_types_are_those_of_neli() {
        assert_eq!(ERROR, u16::from(Nlmsg::Error));
        assert_eq!(DONE, u16::from(Nlmsg::Done));
    }

    #[test]
    fn the_kernels_explanation_is_found() {
        for flags in [NlmF::ACK_TLVS, NlmF::ACK_TLVS | NlmF::CAPPED] {
            let payload = refusal(flags, 44);
            let message = Message { kind: 2, flags, sequence: 1, port: 0, payload: &payload };
            assert_eq!(outcome(&message), Err(KernelError::explained(19, "no device")));
        }
        let payload = refusal(NlmF::empty(), 44);
        let message =
            Message { kind: 2, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
        assert_eq!(outcome(&message), Err(KernelError::new(19)));
    }

    #[test]
    fn a_success_with_attributes_is_a_success() {
        let mut payload = vec![0; 4 + HEADER];
        payload.extend([8, 0, 3, 0, 1, 2, 3, 4]);
        let message = Message {
            kind: 2,
            flags: NlmF::ACK_TLVS | NlmF::CAPPED,
            sequence: 1,
            port: 0,
            payload: &payload,
        };
        assert_eq!(outcome(&message), Ok(()));
    }

    #[test]
    fn a_failed_dump_ends_with_its_errno() {
        let payload = (-16i32).to_ne_bytes();
        let message =
            Message { kind: 3, flags: NlmF::MULTI, sequence: 1, port: 0, payload: &payload };
        assert_eq!(outcome(&message), Err(KernelError::new(16)));
    }

    proptest! {
        #[test]
        fn attributes_round_trip(
            values in prop::collection::vec(
                (1..100u16, prop::collection::vec(any::<u8>(), 0..40)),
                0..20,
            ),
        ) {
            let mut sent = Messages::one(24u16, NlmF::empty(), &[7; 4]);
            for (kind, value) in &values {
                sent.attr(*kind, value);
            }
            let bytes = sent.ready(0..1, 5, NlmF::ACK).to_vec();
            let got: Vec<_> = messages(&bytes).collect::<Result<_, _>>().unwrap();
            prop_assert_eq!(got.len(), 1);
            prop_assert_eq!(got[0].kind, 24);
            prop_assert_eq!(got[0].sequence, 5);
            prop_assert_eq!(got[0].flags, NlmF::REQUEST | NlmF::ACK);
            let attributes = Attributes(&got[0].payload[4..]);
            let read: Vec<_> = attributes.map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(read, values);
        }

        #[test]
        fn no_bytes_make_the_reader_panic_or_loop(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
            flags in any::<u16>(),
        ) {
            prop_assert!(messages(&bytes).count() <= bytes.len() + 1);
            prop_assert!(Attributes(&bytes).count() <= bytes.len());
            for kind in [ERROR, DONE] {
                let flags = NlmF::from_bits_retain(flags);
                let message = Message { kind, flags, sequence: 0, port: 0, payload: &bytes };
                let _ = outcome(&message);
            }
        }
    }
}
