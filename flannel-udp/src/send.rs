//! From pods to nodes: reads packets of the device, and sends them in datagrams.

use std::collections::HashMap;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::counters::{Counters, add};
use crate::ends::{Device, Wire};
use crate::forwarder::Next;
use crate::icmp;
use crate::limit::RateLimit;
use crate::mtus::Mtus;
use crate::packet::{Header, decrement_ttl};
use crate::split::{Refused, split};
use crate::table::Table;
use crate::vnet::Vnet;

/// The largest packet of a device with its vnet header.
const MOST_PACKET: usize = Vnet::LEN + 65_535;
/// The size of the buffer, in bytes: so that small packets can wait for each other.
const ARENA: usize = 3 * MOST_PACKET;
/// The limits of the kernel for datagrams that are sent at once. Before Linux 6.9 it takes 64.
const MOST_DATAGRAMS: usize = 64;
const MOST_BYTES: usize = 65_507;
/// The time until several datagrams are sent at once again to a node after a refusal.
const RETRY: Duration = Duration::from_secs(10);

/// A datagram: the headers that were made for it, and the rest of a packet. The ranges belong to
/// [`Sender::headers`] and [`Sender::arena`].
#[derive(Debug, Clone)]
struct Part {
    headers: Range<usize>,
    payload: Range<usize>,
}

impl Part {
    fn len(&self) -> usize {
        self.headers.len() + self.payload.len()
    }
}

/// The state of one direction of a queue.
pub(crate) struct Sender<'a, D, W> {
    device: &'a D,
    /// The sockets for IPv4 and IPv6.
    wires: [Option<W>; 2],
    counters: &'a Counters,
    arena: Vec<u8>,
    used: usize,
    /// Headers that were made for the batch.
    headers: Vec<u8>,
    /// Datagrams of one size for one node, which are sent at once.
    batch: Vec<Part>,
    to: Option<SocketAddr>,
    /// The bytes in the batch.
    bytes: usize,
    /// The nodes to which the kernel does not send several datagrams at once, with the time of the
    /// next attempt. The cause may be a route or a policy for one node.
    alone: HashMap<SocketAddr, Instant>,
    mtus: Mtus,
    /// The time of the last look at the clock.
    now: Instant,
    limit: RateLimit,
}

impl<'a, D: Device, W: Wire> Sender<'a, D, W> {
    pub(crate) fn new(device: &'a D, wires: [Option<W>; 2], counters: &'a Counters) -> Self {
        Self {
            device,
            wires,
            counters,
            arena: vec![0; ARENA],
            used: 0,
            headers: Vec::new(),
            batch: Vec::new(),
            to: None,
            bytes: 0,
            alone: HashMap::new(),
            mtus: Mtus::default(),
            now: Instant::now(),
            limit: RateLimit::default(),
        }
    }

    /// Sends packets until there is none, at most `most`.
    ///
    /// # Errors
    /// The device cannot be read.
    pub(crate) fn run(&mut self, table: &Table, most: usize) -> Result<Next, Errno> {
        self.now = Instant::now();
        self.alone.retain(|_, until| *until > self.now);
        for _ in 0..most {
            if self.used + MOST_PACKET > ARENA {
                self.flush();
            }
            let end = self.used + MOST_PACKET;
            match self.device.read(&mut self.arena[self.used..end]) {
                Ok(len) => self.take(self.used..self.used + len, table),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => {
                    self.flush();
                    return Ok(Next::Wait);
                }
                Err(errno) => {
                    self.flush();
                    return Err(errno);
                }
            }
        }
        self.flush();
        Ok(Next::More)
    }

    /// Takes a packet with its vnet header, which is in the arena.
    fn take(&mut self, range: Range<usize>, table: &Table) {
        let start = range.start + Vnet::LEN;
        let whole = &mut self.arena[range.clone()];
        let Some((vnet, packet)) = whole.split_first_chunk_mut::<{ Vnet::LEN }>() else {
            return add(&self.counters.bad_packet, 1);
        };
        let Some(ip) = Header::parse(packet) else { return add(&self.counters.bad_packet, 1) };
        let vnet = Vnet::read(vnet);
        let packet = &mut packet[..ip.total];
        let Some(peer) = table.get(ip.dst) else {
            add(&self.counters.no_peer, 1);
            return self.answer(icmp::Cause::Unreachable, start, &ip);
        };
        if ip.ttl <= 1 {
            add(&self.counters.expired, 1);
            return self.answer(icmp::Cause::Expired, start, &ip);
        }
        decrement_ttl(packet, &ip);
        let segments = match split(packet, &ip, &vnet) {
            Ok(segments) => segments,
            Err(Refused::Malformed) => return add(&self.counters.bad_packet, 1),
            Err(Refused::TooMany) => return add(&self.counters.tiny_segments, 1),
        };
        self.used = range.end;
        let whole = start..start + ip.total;
        for n in 0..segments.count {
            let payload = segments.payload_of(n, &self.arena[whole.clone()]);
            self.make_room(peer.address, segments.headers + payload.len());
            let at = self.headers.len();
            let packet = &self.arena[whole.clone()];
            segments.write_headers(n, packet, &ip, &mut self.headers);
            let payload = start + payload.start..start + payload.end;
            self.push(peer.address, Part { headers: at..self.headers.len(), payload });
        }
    }

    /// Sends the batch, unless a datagram of this length for a node can join it.
    fn make_room(&mut self, to: SocketAddr, len: usize) {
        let fits = match (self.batch.first(), self.batch.last()) {
            (Some(first), Some(last)) => {
                self.to == Some(to)
                    && (self.alone.is_empty() || !self.alone.contains_key(&to))
                    && len <= first.len()
                    && last.len() == first.len()
                    && self.batch.len() < MOST_DATAGRAMS
                    && self.bytes + len <= MOST_BYTES
            }
            _ => true,
        };
        if !fits {
            self.send();
        }
    }

    fn push(&mut self, to: SocketAddr, part: Part) {
        self.to = Some(to);
        self.bytes += part.len();
        self.batch.push(part);
    }

    /// Sends the batch, and makes the buffers empty.
    fn flush(&mut self) {
        self.send();
        self.used = 0;
    }

    /// Sends the batch.
    fn send(&mut self) {
        let Some(to) = self.to else { return };
        let Some(first) = self.batch.first() else { return };
        // At most 65,507.
        let size = (self.batch.len() > 1).then_some(first.len() as u16);
        if self.tell_if_too_large(to) {
            self.send_alone(to);
        } else {
            match self.send_parts(to, &self.batch, size) {
                Err(errno @ (Errno::EINVAL | Errno::EIO | Errno::EMSGSIZE | Errno::EOPNOTSUPP))
                    if size.is_some() =>
                {
                    // Some devices and kernels cannot do it, or a policy for this node forbids it.
                    // The path may also have become too small: kernels before 2025 call it EINVAL.
                    self.mtus.forget(to);
                    if !self.tell_if_too_large(to) && errno != Errno::EMSGSIZE {
                        self.alone.insert(to, self.now + RETRY);
                    }
                    self.send_alone(to);
                }
                Err(_) => add(&self.counters.send_failed, self.batch.len() as u64),
                Ok(()) => self.count(self.batch.len(), self.bytes),
            }
        }
        self.batch.clear();
        self.headers.clear();
        self.to = None;
        self.bytes = 0;
    }

    /// Sends each datagram of the batch in a call. The kernel fragments those that are larger than
    /// the path.
    fn send_alone(&self, to: SocketAddr) {
        for part in &self.batch {
            match self.send_parts(to, std::slice::from_ref(part), None) {
                Ok(()) => self.count(1, part.len()),
                Err(_) => add(&self.counters.send_failed, 1),
            }
        }
    }

    fn count(&self, packets: usize, bytes: usize) {
        add(&self.counters.sent_packets, packets as u64);
        add(&self.counters.sent_bytes, bytes as u64);
    }

    /// Whether the path is too small for the first packet in the batch, which is not smaller than
    /// the others. Tells its source, if the packet must not be fragmented.
    fn tell_if_too_large(&mut self, to: SocketAddr) -> bool {
        let Some(part) = self.batch.first() else { return false };
        let Some(wire) = &self.wires[usize::from(to.is_ipv6())] else { return false };
        let Some(mtu) = self.mtus.exceeded(wire, to, part.len(), self.now) else { return false };
        let mut packet = self.headers[part.headers.clone()].to_vec();
        packet.extend_from_slice(&self.arena[part.payload.clone()]);
        if let Some(ip) = Header::parse(&packet)
            && (ip.is_v6 || packet[6] & 0x40 != 0)
        {
            self.tell(icmp::Cause::TooBig(mtu), &packet, &ip);
        }
        true
    }

    fn send_parts(&self, to: SocketAddr, parts: &[Part], size: Option<u16>) -> Result<(), Errno> {
        let wire = self.wires[usize::from(to.is_ipv6())].as_ref().ok_or(Errno::EAFNOSUPPORT)?;
        let mut slices = [IoSlice::new(&[]); 2 * MOST_DATAGRAMS];
        for (place, part) in slices.chunks_exact_mut(2).zip(parts) {
            place[0] = IoSlice::new(&self.headers[part.headers.clone()]);
            place[1] = IoSlice::new(&self.arena[part.payload.clone()]);
        }
        let slices = &slices[..2 * parts.len()];
        loop {
            match wire.send(to, slices, size) {
                Err(Errno::EINTR) => {}
                // An error of an earlier datagram.
                Err(Errno::ECONNREFUSED) => return wire.send(to, slices, size),
                result => return result,
            }
        }
    }

    /// Sends an error to the source of the packet at an offset of the arena.
    fn answer(&mut self, error: icmp::Cause, start: usize, ip: &Header) {
        let packet = self.arena[start..start + ip.total].to_vec();
        self.tell(error, &packet, ip);
    }

    fn tell(&mut self, error: icmp::Cause, packet: &[u8], ip: &Header) {
        if let Some(message) = icmp::message(error, packet, ip, ip.dst)
            && self.limit.allows()
        {
            let vnet = Vnet::default().write();
            let _ = self.device.write(&[IoSlice::new(&vnet), IoSlice::new(&message)]);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fakes::{FakeDevice, FakeWire, from_pod};
    use crate::packet::{TCP, UDP, set_word};
    use crate::table::Peer;

    fn table() -> Table {
        let peer = |subnet: [u8; 4], n| Peer {
            subnet: subnet.into(),
            len: 24,
            address: ([192, 0, 2, n], 8285).into(),
        };
        Table::new(vec![peer([10, 1, 8, 0], 8), peer([10, 1, 9, 0], 9)])
    }

    /// Sends the packets. Returns the counters.
    fn send(device: &FakeDevice, wire: &FakeWire) -> crate::Counts {
        let counters = Counters::default();
        let mut sender = Sender::new(device, [Some(wire), None], &counters);
        while sender.run(&table(), 7).unwrap() == Next::More {}
        counters.read()
    }

    fn device(packets: &[Vec<u8>]) -> FakeDevice {
        FakeDevice {
            reads: std::cell::RefCell::new(packets.to_vec().into()),
            ..FakeDevice::default()
        }
    }

    /// The payloads of datagrams with a packet of TCP.
    fn payloads(wire: &FakeWire) -> Vec<u8> {
        wire.sent.borrow().iter().flat_map(|(_, datagram)| datagram[40..].to_vec()).collect()
    }

    const ALL: [Errno; 4] = [Errno::EINVAL, Errno::EIO, Errno::EMSGSIZE, Errno::EOPNOTSUPP];

    #[test]
    fn a_batch_that_the_kernel_refuses_is_sent_again_packet_by_packet() {
        let bytes: Vec<u8> = (0..60_000).map(|n| (n / 7) as u8).collect();
        let packets = [from_pod(TCP, &bytes, 1400), from_pod(TCP, &bytes, 1400)];
        let good = FakeWire::default();
        let plain = device(&packets);
        let counts = send(&plain, &good);
        assert_eq!((counts.sent_packets, counts.send_failed), (86, 0));
        assert_eq!(payloads(&good), [&bytes[..], &bytes].concat());
        assert!(*good.calls.borrow() <= 4, "{} calls", good.calls.borrow());
        for (errno, small_path) in ALL.into_iter().flat_map(|errno| [(errno, false), (errno, true)])
        {
            let wire = FakeWire { refuses_joined: Some(errno), small_path, ..FakeWire::default() };
            let device = device(&packets);
            assert_eq!(send(&device, &wire), counts, "{errno}");
            assert_eq!(*wire.sent.borrow(), *good.sent.borrow(), "{errno}");
            let told = device.written.borrow().len();
            assert_eq!(told > 0, small_path, "{errno}: the source learns the path MTU");
            // The batches that are tried. Those that are larger than the path are not.
            let batches = match (small_path, errno) {
                (true, _) => 0,
                (false, Errno::EMSGSIZE) => *good.calls.borrow(),
                // After the first refusal none goes to this node.
                _ => 1,
            };
            assert_eq!(*wire.calls.borrow(), batches + 86, "{errno}, {small_path}");
        }
    }

    /// A route or a policy for one node must not slow down packets to others.
    #[test]
    fn a_refusal_concerns_one_node() {
        let bytes = vec![7; 10_000];
        let first = from_pod(TCP, &bytes, 1000);
        let mut second = first.clone();
        let packet = &mut second[Vnet::LEN..];
        packet[18] = 9;
        let total = packet.len();
        crate::packet::set_total(packet, 20, false, total);
        let pseudo = crate::packet::pseudo_sum(packet, false, TCP, total - 20);
        set_word(packet, 36, pseudo);
        let wire = FakeWire {
            errors: std::cell::RefCell::new([Errno::EIO].into()),
            ..FakeWire::default()
        };
        let counts = send(&device(&[first.clone(), first, second]), &wire);
        assert_eq!((counts.sent_packets, counts.send_failed), (30, 0));
        // One call was refused. The other node gets its ten packets in one.
        assert_eq!(*wire.calls.borrow(), 1 + 20 + 1);
    }

    /// The kernel fragments the datagram of a packet that is alone, without an error.
    #[test]
    fn the_source_of_a_packet_that_is_larger_than_the_path_learns_it() {
        let full = from_pod(UDP, &[7; 1400], 0);
        let mut may_be_fragmented = full.clone();
        let packet = &mut may_be_fragmented[Vnet::LEN..];
        packet[6] = 0;
        let total = packet.len();
        crate::packet::set_total(packet, 20, false, total);
        let fits = from_pod(UDP, &[7; 1344], 0);
        for (packet, small_path, told) in [
            (&full, true, true),
            (&full, false, false),
            (&may_be_fragmented, true, false),
            (&fits, true, false),
        ] {
            let device = device(std::slice::from_ref(packet));
            let wire = FakeWire { small_path, ..FakeWire::default() };
            assert_eq!(send(&device, &wire).sent_packets, 1);
            let written = device.written.borrow();
            let messages = written.iter().map(|message| &message[Vnet::LEN..]);
            let mtus: Vec<[u8; 4]> = messages.map(|m| [m[20], m[21], m[26], m[27]]).collect();
            let [high, low] = (1400_u16 - 28).to_be_bytes();
            assert_eq!(mtus, if told { vec![[3, 4, high, low]] } else { vec![] });
        }
    }

    #[test]
    fn errors_of_single_datagrams_are_counted_and_stop_nothing() {
        let packets = vec![from_pod(UDP, &[1; 64], 0); 5];
        for (errno, failed) in [
            (Errno::ENOBUFS, 5),
            (Errno::EPERM, 5),
            (Errno::ENETUNREACH, 5),
            (Errno::EINTR, 0),
            // It belongs to an earlier datagram.
            (Errno::ECONNREFUSED, 0),
        ] {
            let wire =
                FakeWire { errors: std::cell::RefCell::new([errno].into()), ..FakeWire::default() };
            let counts = send(&device(&packets), &wire);
            assert_eq!((counts.send_failed, counts.sent_packets), (failed, 5 - failed), "{errno}");
        }
    }

    #[test]
    fn packets_without_a_way_are_answered() {
        let mut unknown = from_pod(UDP, &[7; 100], 0);
        unknown[Vnet::LEN + 18] = 200;
        let mut old = from_pod(UDP, &[7; 100], 0);
        old[Vnet::LEN + 8] = 1;
        for packet in [&mut unknown, &mut old] {
            let ip = Header::parse(&packet[Vnet::LEN..]).unwrap();
            crate::packet::set_total(&mut packet[Vnet::LEN..], 20, false, ip.total);
        }
        let device = device(&[unknown.clone(), old.clone()]);
        let wire = FakeWire::default();
        let counts = send(&device, &wire);
        assert_eq!((counts.no_peer, counts.expired, counts.sent_packets), (1, 1, 0));
        let written = device.written.borrow();
        // Its TTL, its source, its type and code, and the packet as it was.
        let [unreachable, expired] = &written[..] else { panic!("{}", written.len()) };
        for (message, kind, packet) in [(unreachable, [3, 0], &unknown), (expired, [11, 0], &old)] {
            let message = &message[Vnet::LEN..];
            assert_eq!(message[8], 8);
            assert_eq!(message[12..16], packet[Vnet::LEN + 16..][..4]);
            assert_eq!(message[16..20], [10, 1, 7, 2]);
            assert_eq!(message[20..22], kind);
            assert_eq!(message[28..56], packet[Vnet::LEN..][..28]);
            assert_eq!(crate::checksum::sum(&message[..20]), 0xffff);
            assert_eq!(crate::checksum::sum(&message[20..]), 0xffff);
        }
    }

    #[test]
    fn malformed_packets_are_counted() {
        let good = from_pod(TCP, &[1; 3000], 1000);
        let mut wrong_offset = good.clone();
        wrong_offset[6..8].copy_from_slice(&3_000_u16.to_ne_bytes());
        let mut wrong_size = good.clone();
        wrong_size[4..6].copy_from_slice(&0_u16.to_ne_bytes());
        let mut long = good.clone();
        set_word(&mut long[Vnet::LEN..], 2, 9000);
        let bad =
            [vec![], vec![1; 5], good[..Vnet::LEN + 9].to_vec(), wrong_offset, wrong_size, long];
        let counts = send(&device(&bad), &FakeWire::default());
        assert_eq!((counts.bad_packet, counts.sent_packets), (6, 0));
    }

    /// A pod with raw sockets has written the vnet header. No kernel makes such packets.
    #[test]
    fn a_packet_of_tiny_segments_is_dropped_and_others_pass() {
        let payload = vec![7; 65_000];
        let good = from_pod(UDP, &[1; 100], 0);
        for (protocol, size) in [(TCP, 1), (TCP, 47), (UDP, 1), (UDP, 500)] {
            let bad = from_pod(protocol, &payload, size);
            let packets: Vec<Vec<u8>> =
                std::iter::repeat_n(bad, 20).chain([good.clone()]).collect();
            let wire = FakeWire::default();
            let counts = send(&device(&packets), &wire);
            assert_eq!((counts.tiny_segments, counts.sent_packets), (20, 1), "{protocol} {size}");
            assert_eq!(wire.sent.borrow()[0].1[28..], [1; 100]);
        }
    }

    /// Segments of the smallest MSS, the most datagrams of one call, and small ones that the
    /// kernel has joined when it received them.
    #[test]
    fn small_segments_of_kernels_pass() {
        for (protocol, len, size) in
            [(TCP, 65_000, 48), (UDP, 128, 1), (UDP, 65_000, 508), (TCP, 128, 1)]
        {
            let counts =
                send(&device(&[from_pod(protocol, &vec![7; len], size)]), &FakeWire::default());
            let expected = len.div_ceil(usize::from(size)) as u64;
            assert_eq!((counts.sent_packets, counts.tiny_segments), (expected, 0), "{protocol}");
        }
        // The options of TCP count, as in the kernel.
        let mut packet = from_pod(TCP, &[7; 12 + 65_000], 36);
        packet[Vnet::LEN + 32] = 8 << 4;
        let counts = send(&device(&[packet]), &FakeWire::default());
        assert_eq!((counts.sent_packets, counts.tiny_segments), (65_000_u64.div_ceil(36), 0));
    }

    /// Headers are made for a batch, and not for all segments of a packet.
    #[test]
    fn many_segments_need_little_memory() {
        let packets = vec![from_pod(TCP, &[7; 65_000], 48); 20];
        let device = device(&packets);
        let wire = FakeWire::default();
        let counters = Counters::default();
        let mut sender = Sender::new(&device, [Some(&wire), None], &counters);
        while sender.run(&table(), 7).unwrap() == Next::More {}
        assert_eq!(counters.read().sent_packets, 20 * 65_000_u64.div_ceil(48));
        assert!(sender.headers.capacity() <= MOST_DATAGRAMS * 256, "{}", sender.headers.capacity());
    }

    proptest! {
        /// Any sequence of packets arrives as single packets in their order, with few calls.
        #[test]
        fn packets_of_all_sizes_keep_their_order(
            sizes in proptest::collection::vec((1_usize..3000, 0_u16..2, 8_u8..10), 1..60),
        ) {
            let mut expected = Vec::new();
            let packets: Vec<Vec<u8>> = sizes.iter().map(|(len, split, to)| {
                let payload: Vec<u8> = (0..*len).map(|n| (n * 3) as u8).collect();
                let size = split * 500;
                let mut packet = from_pod(UDP, &payload, size);
                // The address is part of the checksum, which is not looked at here.
                packet[Vnet::LEN + 18] = *to;
                let part = if size == 0 { *len } else { usize::from(size) };
                expected.extend(payload.chunks(part).map(|part| (*to, part.to_vec())));
                packet
            }).collect();
            let wire = FakeWire::default();
            let counts = send(&device(&packets), &wire);
            let sent = wire.sent.borrow();
            let got: Vec<(u8, Vec<u8>)> = sent.iter().map(|(to, datagram)| {
                let SocketAddr::V4(to) = to else { panic!("{to}") };
                (to.ip().octets()[3], datagram[28..].to_vec())
            }).collect();
            prop_assert_eq!(got, expected);
            prop_assert_eq!(counts.sent_packets as usize, sent.len());
            prop_assert!(sent.iter().all(|(_, datagram)| datagram[8] == 63));
        }
    }
}
