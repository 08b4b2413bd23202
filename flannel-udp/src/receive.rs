//! From nodes to pods: receives datagrams, and writes their packets to the device.

use std::io::IoSlice;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::counters::{Counters, add};
use crate::ends::{Device, Received, Wire};
use crate::forwarder::Next;
use crate::icmp;
use crate::join::{Group, Joins, join};
use crate::learned::{Learned, Source};
use crate::limit::RateLimit;
use crate::mtus::Mtus;
use crate::packet::{Header, TCP, decrement_ttl, partial_checksum};
use crate::split::split;
use crate::table::{Peer, Table};
use crate::vnet::{GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, Vnet};

/// The most bytes that are received at once: datagrams that the kernel has joined.
const BURST: usize = 65_535;
/// The number of bursts whose packets are joined with each other. A packet of 64 KiB of the
/// sender's pod arrives in two of them, because so many datagrams cannot be sent at once.
const BURSTS: usize = 4;
/// The most calls before packets are written, so that a flood of small datagrams delays nothing.
const RECEIVES: usize = 64;
/// The time without packets of nodes after which the packets of strangers may wait.
const QUIET: Duration = Duration::from_millis(10);
/// The most parts of a write: the vnet header, the headers, and 128 payloads.
const PARTS: usize = 130;

/// What happens to a packet that does not come from the node of its source address. The node may
/// send from its public address, and from an address that it has proved.
#[derive(Debug, Clone, Copy)]
pub(crate) enum SourceCheck<'a> {
    /// It passes, and is not counted.
    Off,
    /// It is counted, and passes.
    Count(&'a Learned),
    /// It is counted, and dropped.
    Drop(&'a Learned),
}

/// A received packet.
#[derive(Debug)]
struct Packet {
    /// Its bytes, in the buffer.
    range: Range<usize>,
    ip: Header,
}

pub(crate) struct Receiver<'a, D, W> {
    device: &'a D,
    wire: W,
    /// The addresses of the device, from which errors are sent.
    own: [Option<IpAddr>; 2],
    counters: &'a Counters,
    check: SourceCheck<'a>,
    buffer: Vec<u8>,
    packets: Vec<Packet>,
    groups: Vec<Group>,
    /// Whether the kernel takes several packets of a flow at once.
    joins: Joins,
    mtus: Mtus,
    limit: RateLimit,
    /// The last time at which a packet has passed.
    last_passed: Option<Instant>,
    may_rest: bool,
}

impl<'a, D: Device, W: Wire> Receiver<'a, D, W> {
    pub(crate) fn new(
        device: &'a D,
        wire: W,
        own: [Option<IpAddr>; 2],
        counters: &'a Counters,
        check: SourceCheck<'a>,
    ) -> Self {
        Self {
            device,
            may_rest: wire.may_rest(),
            wire,
            own,
            counters,
            check,
            buffer: vec![0; BURSTS * BURST],
            packets: Vec::new(),
            groups: Vec::new(),
            joins: Joins { tcp: true, udp: true },
            mtus: Mtus::default(),
            limit: RateLimit::default(),
            last_passed: None,
        }
    }

    /// Receives datagrams until there is none, at most `most` times.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub(crate) fn run(&mut self, table: &Table, most: usize) -> Result<Next, Errno> {
        let mut has_received = false;
        for _ in 0..most {
            self.packets.clear();
            let burst = self.fill(table);
            has_received |= burst.has_received;
            self.deliver();
            if burst.has_passed {
                self.last_passed = Some(Instant::now());
            }
            match burst.stopped {
                None => {}
                Some(Errno::EAGAIN) => {
                    let is_quiet = self.last_passed.is_none_or(|last| last.elapsed() > QUIET);
                    let rests = self.may_rest && has_received && is_quiet;
                    return Ok(if rests { Next::Rest } else { Next::Wait });
                }
                Some(errno) => return Err(errno),
            }
        }
        Ok(Next::More)
    }

    /// Receives datagrams until the buffer is full or there is none.
    fn fill(&mut self, table: &Table) -> Burst {
        let mut burst = Burst::default();
        let mut used = 0;
        for _ in 0..RECEIVES {
            if used + BURST > self.buffer.len() {
                break;
            }
            match self.wire.receive(&mut self.buffer[used..used + BURST]) {
                Ok(received) => {
                    burst.has_received = true;
                    burst.has_passed |= self.take(received, used, table);
                    used += received.len;
                }
                // The second is an error of an earlier datagram.
                Err(Errno::EINTR | Errno::ECONNREFUSED) => {}
                Err(errno) => {
                    burst.stopped = Some(errno);
                    break;
                }
            }
        }
        burst
    }

    /// Takes the packets of datagrams that were received at an offset of the buffer. Returns
    /// whether one of them passes.
    fn take(&mut self, Received { len, size, from }: Received, at: usize, table: &Table) -> bool {
        let mut has_passed = false;
        if len == 0 {
            add(&self.counters.bad_datagram, 1);
        }
        let all = at + len;
        for start in (at..all).step_by(size) {
            let end = all.min(start + size);
            let Some(ip) = Header::parse(&self.buffer[start..end]) else {
                add(&self.counters.bad_datagram, 1);
                continue;
            };
            let peer = table.get(ip.src);
            // Nodes also answer pods with their own addresses.
            let is_of_node = peer.is_none() && ip.src == from.ip() && table.has_node(ip.src);
            if !is_of_node && !self.may_pass(peer, start..start + ip.total, &ip, from.ip()) {
                continue;
            }
            let packet = &mut self.buffer[start..end];
            if ip.ttl <= 1 {
                add(&self.counters.expired, 1);
                if let Some(peer) = peer {
                    self.answer(start..start + ip.total, &ip, peer.address);
                }
                continue;
            }
            has_passed = true;
            decrement_ttl(packet, &ip);
            let range = start..start + ip.total;
            // Unknown nodes count by address, not by port, so that strangers do not fill the
            // memory.
            let node = match peer {
                Some(peer) => Some(peer.address),
                None => is_of_node.then(|| SocketAddr::new(from.ip(), 0)),
            };
            if !node.is_some_and(|node| self.write_unsegmented(range.clone(), &ip, node)) {
                self.packets.push(Packet { range, ip });
            }
        }
        has_passed
    }

    /// Writes a packet of TCP that the kernel of a node has left to its network card to segment.
    /// Over links without a card such packets arrive whole. They are larger than the path, so that
    /// the kernel has to segment them here. Returns `false` if the packet is not of this kind.
    fn write_unsegmented(&mut self, range: Range<usize>, ip: &Header, node: SocketAddr) -> bool {
        let packet = &self.buffer[range.clone()];
        // Only TCP segments whose checksum was left too are segmented here.
        let Some(place) = partial_checksum(packet, ip).filter(|_| ip.protocol == TCP) else {
            return false;
        };
        let Some(mtu) = self.mtus.exceeded(&self.wire, node, range.len(), Instant::now()) else {
            return false;
        };
        let headers = ip.len + usize::from(packet[ip.len + 12] >> 4) * 4;
        let Some(size) = usize::from(mtu).checked_sub(headers).filter(|size| *size > 0) else {
            return false;
        };
        // The order of the packets stays.
        self.deliver();
        self.packets.clear();
        // At most 65,535.
        let vnet = Vnet {
            flags: NEEDS_CSUM,
            gso_type: if ip.is_v6 { GSO_TCPV6 } else { GSO_TCPV4 },
            hdr_len: headers as u16,
            gso_size: size as u16,
            csum_start: ip.len as u16,
            csum_offset: (place - ip.len) as u16,
        };
        let packet = &self.buffer[range.clone()];
        let header = vnet.write();
        let parts = [&header[..], packet].map(IoSlice::new);
        match self.joins.tcp.then(|| self.device.write(&parts)) {
            Some(Ok(())) => self.count(1, range.len()),
            refused => {
                self.joins.tcp &= refused != Some(Err(Errno::EINVAL));
                self.write_segments(range, ip, &vnet);
            }
        }
        true
    }

    /// Writes the segments of a packet one by one.
    fn write_segments(&mut self, range: Range<usize>, ip: &Header, vnet: &Vnet) {
        let vnet_of_each = Vnet::default().write();
        let len = range.len();
        let packet = &mut self.buffer[range];
        let Ok(made) = split(packet, ip, vnet) else {
            return add(&self.counters.write_failed, 1);
        };
        let mut headers = Vec::new();
        let mut failed = 0;
        for n in 0..made.count {
            headers.clear();
            made.write_headers(n, packet, ip, &mut headers);
            let payload = &packet[made.payload_of(n, packet)];
            let parts = [&vnet_of_each[..], &headers, payload].map(IoSlice::new);
            failed += u64::from(self.device.write(&parts).is_err());
        }
        match failed {
            0 => self.count(1, len),
            _ => add(&self.counters.write_failed, failed),
        }
    }

    /// Whether a packet passes the check of its source address.
    fn may_pass(
        &self,
        peer: Option<&Peer>,
        range: Range<usize>,
        ip: &Header,
        from: IpAddr,
    ) -> bool {
        let (learned, counts_only) = match self.check {
            SourceCheck::Off => return true,
            SourceCheck::Count(learned) => (learned, true),
            SourceCheck::Drop(learned) => (learned, false),
        };
        let Some(peer) = peer else {
            add(&self.counters.foreign_source, 1);
            return counts_only;
        };
        if peer.address.ip() == from {
            return true;
        }
        let own = self.own[usize::from(ip.is_v6)];
        let answer = own
            .filter(|_| ip.src == peer.subnet)
            .and_then(|own| icmp::echo_number(&self.buffer[range], ip, own));
        let checked = learned.check(peer, from, answer, Instant::now());
        if let Some(own) = own
            && let Some(number) = checked.request
            && let Some(request) = icmp::echo_request(own, peer.subnet, number)
        {
            add(&self.counters.proofs_requested, 1);
            let _ = self.wire.send(peer.address, &[IoSlice::new(&request)], None);
        }
        match checked.source {
            Source::Learned => {
                add(&self.counters.learned_node, 1);
                true
            }
            Source::Foreign => {
                self.counters.add_foreign(ip.src, from, peer.address.ip());
                counts_only
            }
            Source::Proof => false,
        }
    }

    /// Writes the packets that were taken.
    fn deliver(&mut self) {
        let buffer = &self.buffer;
        let packets = &self.packets;
        if self.joins.tcp || self.joins.udp {
            let packet = |n: usize| (&buffer[packets[n].range.clone()], &packets[n].ip);
            join(packets.len(), self.joins, packet, &mut self.groups);
        } else {
            self.groups.clear();
        }
        let mut written = 0;
        for n in 0..self.groups.len() {
            let group = self.groups[n].clone();
            if group.packets.len() > 1 && self.write_group(&group) {
                written = group.packets.end;
            }
            for n in written.max(group.packets.start)..group.packets.end {
                self.write_packet(n);
            }
            written = group.packets.end;
        }
        for n in written..self.packets.len() {
            self.write_packet(n);
        }
    }

    fn write_packet(&self, n: usize) {
        let Packet { range, ip } = &self.packets[n];
        let packet = &self.buffer[range.clone()];
        let vnet = match partial_checksum(packet, ip) {
            // All are at most 65,535.
            Some(place) => Vnet {
                flags: NEEDS_CSUM,
                csum_start: ip.len as u16,
                csum_offset: (place - ip.len) as u16,
                ..Vnet::default()
            },
            None => Vnet::default(),
        };
        match self.device.write(&[IoSlice::new(&vnet.write()), IoSlice::new(packet)]) {
            Ok(()) => self.count(1, range.len()),
            Err(_) => add(&self.counters.write_failed, 1),
        }
    }

    /// Writes packets at once. Returns whether the kernel has taken them.
    fn write_group(&mut self, group: &Group) -> bool {
        let packets = &self.packets[group.packets.clone()];
        let first = &packets[0];
        let last = &packets[packets.len() - 1];
        let is_tcp = first.ip.protocol == TCP;
        let last_flags = group.flags_at().map_or(0, |at| self.buffer[last.range.start + at]);
        // The original stays, in case that the kernel refuses the group.
        let start = first.range.start;
        let mut headers = self.buffer[start..start + group.headers].to_vec();
        let vnet = group.finish(&mut headers, last_flags).write();
        let mut parts = [IoSlice::new(&[]); PARTS];
        parts[0] = IoSlice::new(&vnet);
        parts[1] = IoSlice::new(&headers);
        let mut bytes = 0;
        for (part, Packet { range, .. }) in parts[2..].iter_mut().zip(packets) {
            *part = IoSlice::new(&self.buffer[range.start + group.headers..range.end]);
            bytes += range.len();
        }
        match self.device.write(&parts[..2 + group.packets.len()]) {
            Ok(()) => {
                self.count(group.packets.len(), bytes);
                true
            }
            Err(errno) => {
                // Kernels of mid-2024 refuse all groups, and kernels before 6.2 groups of UDP.
                let joins = if is_tcp { &mut self.joins.tcp } else { &mut self.joins.udp };
                *joins &= errno != Errno::EINVAL;
                false
            }
        }
    }

    fn count(&self, packets: usize, bytes: usize) {
        add(&self.counters.received_packets, packets as u64);
        add(&self.counters.received_bytes, bytes as u64);
    }

    /// Tells the source of a packet that its lifetime has ended. Its node gets the message.
    fn answer(&mut self, range: Range<usize>, ip: &Header, to: SocketAddr) {
        let Some(own) = self.own[usize::from(ip.is_v6)] else { return };
        let packet = &self.buffer[range];
        if let Some(message) = icmp::message(icmp::Cause::Expired, packet, ip, own)
            && self.limit.allows()
        {
            let _ = self.wire.send(to, &[IoSlice::new(&message)], None);
        }
    }
}

/// What was received before packets are written.
#[derive(Debug, Default)]
struct Burst {
    has_received: bool,
    has_passed: bool,
    /// The error that ended it; `EAGAIN` after the last datagram.
    stopped: Option<Errno>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fakes::{FakeDevice, FakeWire, from_pod};
    use crate::send::Sender;
    use crate::table::Peer;

    fn node(n: u8) -> SocketAddr {
        ([192, 0, 2, n], 8285).into()
    }

    fn table(subnet: [u8; 4], n: u8) -> Table {
        Table::new(vec![Peer { subnet: subnet.into(), len: 24, address: node(n) }])
    }

    /// The datagrams for a packet of a pod.
    fn datagrams(packet: Vec<u8>) -> Vec<Vec<u8>> {
        let device = FakeDevice::default();
        let wire = FakeWire::default();
        device.reads.borrow_mut().push_back(packet);
        let counters = Counters::default();
        let mut sender = Sender::new(&device, [Some(&wire), None], &counters);
        sender.run(&table([10, 1, 8, 0], 8), 2).unwrap();
        wire.sent.take().into_iter().map(|(_, datagram)| datagram).collect()
    }

    fn receive(device: &FakeDevice, from: SocketAddr, datagrams: &[Vec<u8>]) -> crate::Counts {
        receive_on(&FakeWire::default(), device, from, datagrams)
    }

    fn receive_on(
        wire: &FakeWire,
        device: &FakeDevice,
        from: SocketAddr,
        datagrams: &[Vec<u8>],
    ) -> crate::Counts {
        let counters = Counters::default();
        let size = datagrams.first().map_or(0, Vec::len).max(1);
        wire.receives.borrow_mut().push_back((from, size, datagrams.concat()));
        let own = [Some([10, 1, 8, 0].into()), None];
        let learned = Learned::default();
        let mut receiver = Receiver::new(device, wire, own, &counters, SourceCheck::Drop(&learned));
        while receiver.run(&table([10, 1, 7, 0], 7), 1).unwrap() == Next::More {}
        counters.read()
    }

    #[test]
    fn packets_that_are_refused_together_are_written_one_by_one() {
        let bytes: Vec<u8> = (0..50_000).map(|n| (n / 3) as u8).collect();
        let datagrams = datagrams(from_pod(TCP, &bytes, 1000));
        assert_eq!(datagrams.len(), 50);
        let device = FakeDevice::default();
        let counts = receive(&device, node(7), &datagrams);
        assert_eq!((counts.received_packets, device.written.borrow().len()), (50, 1));
        assert_eq!(device.written.borrow()[0][Vnet::LEN + 40..], bytes);
        for errno in [Errno::EINVAL, Errno::EIO] {
            let device = FakeDevice { refuses_joined: Some(errno), ..FakeDevice::default() };
            assert_eq!(receive(&device, node(7), &datagrams), counts, "{errno}");
            let written = device.written.borrow();
            let payload = written.iter().flat_map(|packet| packet[Vnet::LEN + 40..].to_vec());
            assert_eq!((written.len(), payload.collect::<Vec<u8>>() == bytes), (50, true));
        }
        let device = FakeDevice::default();
        device.errors.borrow_mut().extend([Errno::ENOBUFS, Errno::ENOMEM]);
        let counts = receive(&device, node(7), &datagrams);
        assert_eq!((counts.write_failed, counts.received_packets), (1, 49), "the group, then one");
    }

    /// The kernel of a node without a network card in between leaves the checksum undone.
    #[test]
    fn a_checksum_of_the_pseudo_header_alone_is_left_to_the_kernel() {
        for (protocol, offset) in [(TCP, 16), (UDP, 6)] {
            let mut datagrams = datagrams(from_pod(protocol, &[7; 64], 0));
            for is_partial in [false, true] {
                let packet = &mut datagrams[0];
                if is_partial {
                    let transport = packet.len() - 20;
                    let sum = crate::packet::pseudo_sum(packet, false, protocol, transport);
                    crate::packet::set_word(packet, 20 + offset, sum);
                }
                let device = FakeDevice::default();
                assert_eq!(receive(&device, node(7), &datagrams).received_packets, 1);
                let written = device.written.borrow();
                let vnet = Vnet::read(written[0].first_chunk().unwrap());
                let fields = (vnet.flags, vnet.csum_start, usize::from(vnet.csum_offset));
                assert_eq!(fields, if is_partial { (NEEDS_CSUM, 20, offset) } else { (0, 0, 0) });
            }
        }
    }

    /// That kernel also leaves the segmentation to a card.
    #[test]
    fn a_packet_that_was_not_segmented_is_segmented_by_the_kernel() {
        let of_pod = |len: usize| from_pod(TCP, &vec![7; len], 0)[Vnet::LEN..].to_vec();
        for (len, size) in [(9000, 1472 - 40), (1433, 1472 - 40), (1432, 0)] {
            // The sender of the data plane would complete the checksum.
            let packet = of_pod(len);
            let total = packet.len();
            let device = FakeDevice::default();
            let small = datagrams(from_pod(TCP, &[1; 99], 0)).remove(0);
            let wire = FakeWire::default();
            wire.receives.borrow_mut().push_back((node(7), small.len(), small));
            let counts = receive_on(&wire, &device, node(7), &[packet]);
            assert_eq!(counts.received_packets, 2);
            let written = device.written.borrow();
            let [before, packet] = &written[..] else { panic!("{}", written.len()) };
            let vnet = Vnet::read(packet.first_chunk().unwrap());
            assert_eq!((vnet.gso_size, packet.len()), (size, Vnet::LEN + total), "{len}");
            assert_eq!((vnet.flags, vnet.csum_start, vnet.csum_offset), (NEEDS_CSUM, 20, 16));
            assert!(before.len() < 200, "the order stays");
        }
        // A kernel that refuses it gets segments.
        let payload: Vec<u8> = (0..9000).map(|n| (n / 7) as u8).collect();
        let packet = from_pod(TCP, &payload, 0)[Vnet::LEN..].to_vec();
        let device = FakeDevice { refuses_joined: Some(Errno::EINVAL), ..FakeDevice::default() };
        assert_eq!(receive(&device, node(7), &[packet]).received_packets, 1);
        let written = device.written.borrow();
        let parts = written.iter().flat_map(|packet| packet[Vnet::LEN + 40..].to_vec());
        assert_eq!((written.len(), parts.collect::<Vec<u8>>() == payload), (7, true));
        let complete = datagrams(from_pod(TCP, &[7; 9000], 0)).remove(0);
        let device = FakeDevice::default();
        receive(&device, node(7), &[complete]);
        assert_eq!(Vnet::read(device.written.borrow()[0].first_chunk().unwrap()), Vnet::default());
    }

    #[test]
    fn a_node_may_send_from_its_own_address() {
        for (src, passes) in [([192, 0, 2, 7], 1), ([192, 0, 2, 9], 0)] {
            let mut datagram = datagrams(from_pod(UDP, &[1; 64], 0)).remove(0);
            datagram[12..16].copy_from_slice(&src);
            for from in [7, 9] {
                let counts = receive(&FakeDevice::default(), node(from), &[datagram.clone()]);
                let passes = if from == 7 { passes } else { 0 };
                assert_eq!((counts.received_packets, counts.foreign_source), (passes, 1 - passes));
            }
        }
    }

    #[test]
    fn a_thread_rests_while_only_strangers_send() {
        let good = datagrams(from_pod(UDP, &[1; 64], 0)).remove(0);
        let counters = Counters::default();
        let learned = Learned::default();
        let check = SourceCheck::Drop(&learned);
        for (nodes, next) in [
            (&[][..], Next::Wait),
            (&[9, 9], Next::Rest),
            (&[9, 7, 9], Next::Wait),
            (&[7], Next::Wait),
        ] {
            let wire = FakeWire::default();
            let device = FakeDevice::default();
            for n in nodes {
                wire.receives.borrow_mut().push_back((node(*n), good.len(), good.clone()));
            }
            let own = [Some([10, 1, 8, 0].into()), None];
            let mut receiver = Receiver::new(&device, &wire, own, &counters, check);
            assert_eq!(receiver.run(&table([10, 1, 7, 0], 7), 9), Ok(next), "{nodes:?}");
        }
        // A small buffer would overflow meanwhile.
        let wire = FakeWire { small_buffer: true, ..FakeWire::default() };
        let device = FakeDevice::default();
        wire.receives.borrow_mut().push_back((node(9), good.len(), good));
        let mut receiver = Receiver::new(&device, &wire, [None; 2], &counters, check);
        assert_eq!(receiver.run(&table([10, 1, 7, 0], 7), 9), Ok(Next::Wait));
    }

    /// Neither packets of others nor the stop wait for the end of a flood.
    #[test]
    fn a_flood_of_empty_datagrams_delays_nothing() {
        let wire = FakeWire::default();
        let device = FakeDevice::default();
        let good = datagrams(from_pod(UDP, &[1; 64], 0)).remove(0);
        wire.receives.borrow_mut().push_back((node(7), good.len(), good));
        for _ in 0..10 * RECEIVES {
            wire.receives.borrow_mut().push_back((node(9), 1, Vec::new()));
        }
        let counters = Counters::default();
        let learned = Learned::default();
        let own = [Some([10, 1, 8, 0].into()), None];
        let mut receiver =
            Receiver::new(&device, &wire, own, &counters, SourceCheck::Drop(&learned));
        assert_eq!(receiver.run(&table([10, 1, 7, 0], 7), 1), Ok(Next::More));
        assert_eq!(device.written.borrow().len(), 1);
        assert_eq!(counters.read().bad_datagram, 63);
    }

    #[test]
    fn only_the_node_of_a_source_address_is_believed() {
        let good = datagrams(from_pod(UDP, &[1; 64], 0));
        let device = FakeDevice::default();
        assert_eq!(receive(&device, node(7), &good).received_packets, 1);
        assert_eq!(receive(&device, node(9), &good).foreign_node, 1);
        let mut foreign = good[0].clone();
        foreign[14] = 99;
        assert_eq!(receive(&device, node(7), &[foreign]).foreign_source, 1);
        assert_eq!(receive(&device, node(7), &[Vec::new()]).bad_datagram, 1);
        let counts = receive(&device, node(7), &[vec![0; 64]]);
        assert_eq!((counts.bad_datagram, device.written.borrow().len()), (1, 1));
        let cut = good[0][..60].to_vec();
        assert_eq!(receive(&device, node(7), &[cut]).bad_datagram, 1);
        let wire = FakeWire::default();
        let mut old = good[0].clone();
        old[8] = 1;
        assert_eq!(receive_on(&wire, &device, node(7), &[old.clone()]).expired, 1);
        // Its source learns it, from an address of this node.
        let sent = wire.sent.take();
        let [(to, message)] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((*to, device.written.borrow().len()), (node(7), 1));
        assert_eq!(&message[12..20], &[10, 1, 8, 0, 10, 1, 7, 2]);
        assert_eq!((message[20], &message[28..56]), (11, &old[..28]));
    }

    const UDP: u8 = crate::packet::UDP;
}
