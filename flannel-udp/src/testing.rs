//! For tests: properties of the code that reads packets of strangers, and a process whose answers
//! are given. Fuzz targets check random bytes, and `cargo test` checks packets that were changed.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;

use nix::errno::Errno;

use crate::checksum;
use crate::control::{Prefix, Status, VERSION};
use crate::counters::{Counters, Counts};
use crate::fakes::{FakeDevice, FakeWire};
use crate::forwarder::Next;
use crate::learned::Learned;
use crate::options::Options;
use crate::packet::{Header, set_word, word};
use crate::receive::{Receiver, SourceCheck};
use crate::send::Sender;
use crate::split::split;
use crate::table::{Peer, Table};
use crate::vnet::{GSO_ECN, GSO_NONE, GSO_UDP_L4, Vnet};

/// Peers that have all addresses, so that no packet is dropped for want of a way.
fn everywhere() -> (Table, SocketAddr) {
    let node = ([192, 0, 2, 7], 8285).into();
    let subnets = ["0.0.0.0", "::"].map(|subnet| subnet.parse().expect("an address"));
    let peers = subnets.map(|subnet| Peer { subnet, len: 0, address: node });
    (Table::new(peers.to_vec()), node)
}

/// Receives datagrams of any bytes. The first two bytes are the size of each datagram but the last.
/// The packets are the same whether the data plane joins them or not. Returns the number of packets
/// that passed.
///
/// # Panics
/// The packets differ.
pub fn receive(bytes: &[u8]) -> u64 {
    let Some((size, datagrams)) = bytes.split_first_chunk() else { return 0 };
    let datagrams = &datagrams[..datagrams.len().min(65_535)];
    let size = usize::from(u16::from_le_bytes(*size)).max(1);
    let (table, node) = everywhere();
    let run = |refuses_joined, check: SourceCheck<'_>| {
        let counters = Counters::default();
        let wire = FakeWire::default();
        let device = FakeDevice { refuses_joined, ..FakeDevice::default() };
        wire.receives.borrow_mut().push_back((node, size, datagrams.to_vec()));
        let own = [Some([10, 1, 8, 0].into()), Some([0xfd; 16].into())];
        let mut receiver = Receiver::new(&device, &wire, own, &counters, check);
        while receiver.run(&table, 7).expect("the socket never fails") == Next::More {}
        (device.written.take(), counters.read())
    };
    let (joined, counts) = run(None, SourceCheck::Off);
    let (alone, counts_alone) = run(Some(Errno::EIO), SourceCheck::Off);
    assert_eq!(counts, counts_alone);
    assert_eq!(counts.received_packets, alone.len() as u64);
    assert_eq!(segments(joined), segments(alone));
    let (_, counts_checked) = run(None, SourceCheck::Drop(&Learned::default()));
    assert_eq!(counts_checked, counts, "the node has all addresses");
    counts.received_packets
}

/// The packets that the kernel makes of written ones.
fn segments(written: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for mut packet in written {
        let (vnet, packet) = packet.split_first_chunk_mut().expect("it has a vnet header");
        let ip = Header::parse(packet).expect("a packet");
        let made = split(packet, &ip, &Vnet::read(vnet)).expect("it is what the header says");
        for n in 0..made.count {
            let mut segment = Vec::new();
            made.write_headers(n, packet, &ip, &mut segment);
            segment.extend_from_slice(&packet[made.payload_of(n, packet)]);
            // Without fragments the id has no meaning.
            if !ip.is_v6 && word(&segment, 6) & 0x4000 != 0 {
                set_word(&mut segment, 4, 0);
                set_word(&mut segment, 10, 0);
            }
            all.push(segment);
        }
    }
    all
}

/// Sends a packet of any bytes, with a vnet header of any bytes. Each datagram is a packet of the
/// length in its header, and no byte of a payload is lost. Returns the counts.
///
/// # Panics
/// A datagram is not such a packet, or a byte is lost.
pub fn send(bytes: &[u8]) -> Counts {
    let bytes = &bytes[..bytes.len().min(Vnet::LEN + 65_535)];
    let (table, _) = everywhere();
    let counters = Counters::default();
    let wire = FakeWire::default();
    let device = FakeDevice { reads: RefCell::new([bytes.to_vec()].into()), ..Default::default() };
    let mut sender = Sender::new(&device, [Some(&wire), None], &counters);
    while sender.run(&table, 7).expect("the device never fails") == Next::More {}
    let counts = counters.read();
    let sent = wire.sent.take();
    assert_eq!(counts.sent_packets, sent.len() as u64);
    let dropped = counts.expired + counts.bad_packet + counts.tiny_segments;
    assert_eq!(dropped + counts.sent_packets.min(1), 1, "{counts:?}");
    assert_eq!(counts.send_failed, 0, "{counts:?}");
    let Some((vnet, packet)) = bytes.split_first_chunk().filter(|_| !sent.is_empty()) else {
        return counts;
    };
    let vnet = Vnet::read(vnet);
    let whole = Header::parse(packet).expect("it was sent");
    let headers = match (usize::from(vnet.csum_start), vnet.gso_type & !GSO_ECN) {
        (_, GSO_NONE) => 0,
        (start, GSO_UDP_L4) => start + 8,
        (start, _) => start + usize::from(packet[start + 12] >> 4) * 4,
    };
    let mut payload = Vec::new();
    for (_, datagram) in &sent {
        let ip = Header::parse(datagram).expect("a packet");
        assert_eq!((ip.total, ip.ttl), (datagram.len(), whole.ttl - 1));
        assert_eq!((ip.src, ip.dst, ip.protocol), (whole.src, whole.dst, whole.protocol));
        assert!(headers == 0 || ip.is_v6 || checksum::sum(&datagram[..ip.len]) == 0xffff);
        payload.extend_from_slice(&datagram[headers..]);
    }
    // A packet that is not split has another lifetime and perhaps a checksum.
    assert_eq!(payload.len(), whole.total - headers);
    assert!(headers == 0 || payload == packet[headers..whole.total]);
    counts
}

/// The options of a node with the subnet `10.1.7.0/24`.
pub fn options() -> Options {
    let subnet = Prefix { address: [10, 1, 7, 0].into(), len: 24 };
    Options {
        device: "flannel0".into(),
        local: vec![[192, 0, 2, 7].into()],
        port: 8285,
        own: vec![subnet],
        one_port: false,
        checks_source: true,
        counts_only: false,
        queues: None,
    }
}

/// Serves on a socket as a process with the given answers, and returns the requests, each with the
/// number of its connection. In an answer, `STATUS` stands for a state with these options. The
/// answer `None` breaks the connection.
pub fn process(
    socket: &Path,
    program: &str,
    options: &Options,
    answer: impl Fn(&str) -> Option<&'static str> + Send + Sync + 'static,
) -> mpsc::Receiver<(usize, String)> {
    let listener = UnixListener::bind(socket).expect("it works");
    let answer = Arc::new(answer);
    let mut status = serde_json::to_value(Status::default()).expect("it works");
    status["version"] = VERSION.into();
    status["program"] = program.into();
    status["options"] = serde_json::to_value(options).expect("it works");
    let status = serde_json::json!({ "status": status }).to_string();
    let (requests, received) = mpsc::channel();
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let mut stream = stream.expect("it works");
            let requests = requests.clone();
            let answer = Arc::clone(&answer);
            let status = status.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream.try_clone().expect("it works")).lines() {
                    let line = line.expect("it works");
                    let Some(text) = answer(&line) else { return };
                    let text = text.replace("STATUS", &status);
                    let _ = requests.send((n, line));
                    writeln!(stream, "{text}").expect("it works");
                }
            });
        }
    });
    received
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fakes::from_pod;
    use crate::packet::{TCP, UDP};

    /// The datagrams of a packet of a pod, as [`receive`] takes them.
    fn datagrams(packet: Vec<u8>) -> Vec<u8> {
        let wire = FakeWire::default();
        let device = FakeDevice { reads: RefCell::new([packet].into()), ..Default::default() };
        let counters = Counters::default();
        Sender::new(&device, [Some(&wire), None], &counters).run(&everywhere().0, 7).unwrap();
        let sent = wire.sent.take();
        let size = (sent[0].1.len() as u16).to_le_bytes();
        let datagrams = sent.into_iter().map(|(_, datagram)| datagram);
        std::iter::once(size.to_vec()).chain(datagrams).flatten().collect()
    }

    /// The results for the files in the corpus of a fuzz target that a fuzzer has not added. Those
    /// have hexadecimal names.
    fn corpus(target: &str, check: impl Fn(&[u8]) -> u64) -> Vec<String> {
        let dir = format!("{}/../dev/fuzz/corpus/{target}", env!("CARGO_MANIFEST_DIR"));
        let mut results = Vec::new();
        for file in std::fs::read_dir(dir).unwrap() {
            let path = file.unwrap().path();
            let packets = check(&std::fs::read(&path).unwrap());
            let name = path.file_name().unwrap().to_str().unwrap();
            if !name.bytes().all(|b| b.is_ascii_hexdigit()) {
                results.push(format!("{name} {packets}"));
            }
        }
        results.sort();
        results
    }

    #[test]
    fn the_packets_of_the_corpora_pass() {
        let expected = ["echo-v6 1", "tcp 3", "tcp-alone 1", "udp 3", "udp-alone 1"];
        assert_eq!(corpus("udp_packet", |bytes| send(bytes).sent_packets), expected);
        assert_eq!(corpus("udp_datagram", receive), expected);
    }

    fn changed(mut bytes: Vec<u8>, changes: &[(prop::sample::Index, u8)]) -> Vec<u8> {
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        bytes
    }

    fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)
    }

    proptest! {
        #[test]
        fn changed_packets_pass_or_are_counted(
            is_tcp: bool,
            len in 0_usize..6000,
            size in 0_u16..1400,
            changes in changes(),
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let protocol = if is_tcp { TCP } else { UDP };
            let packet = from_pod(protocol, &vec![7; len], size);
            send(&packet);
            send(&changed(packet.clone(), &changes));
            send(&bytes);
            receive(&bytes);
            if send(&packet).sent_packets > 0 {
                let datagrams = datagrams(packet);
                prop_assert!(receive(&datagrams) > 0);
                receive(&changed(datagrams, &changes));
            }
        }
    }
}
