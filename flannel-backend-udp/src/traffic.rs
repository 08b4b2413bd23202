//! The counts of the data plane, and what is wrong if some of them grow.

use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

use flannel_core::Remedy;
use flannel_core::kernel::{LongDrops, PacketCount, Refused, Traffic};
use flannel_core::remedy::Trouble;
use flannel_udp::{Options, Status};

/// The reasons of the check of sources, which only counts packets with `"SourceCheck": "count"`.
const FOREIGN: [&str; 2] = ["foreign_source", "foreign_node"];

/// The packets that a data plane would drop, if it only counts them.
pub(crate) fn counted(status: &Status) -> Option<Refused> {
    let counts = &status.counts;
    status.options.as_ref().filter(|options| options.counts_only)?;
    let packets = [("foreign_source", counts.foreign_source), ("stranger", counts.foreign_node)];
    Some(Refused { drops: false, packets: packets.into(), problems: Vec::new() })
}

/// The traffic of a data plane, or `None` if none runs in the process.
pub(crate) fn traffic(status: &Status, drops: &mut LongDrops, now: Instant) -> Option<Traffic> {
    let options = status.options.as_ref()?;
    let counts = &status.counts;
    let mut dropped: BTreeMap<&'static str, u64> = [
        ("no_peer", counts.no_peer),
        ("expired", counts.expired),
        ("bad_packet", counts.bad_packet),
        ("tiny_segments", counts.tiny_segments),
        ("send_failed", counts.send_failed),
        ("write_failed", counts.write_failed),
        ("read_failed", counts.read_failed),
        ("bad_datagram", counts.bad_datagram),
        ("foreign_source", counts.foreign_source),
        ("foreign_node", counts.foreign_node),
    ]
    .into();
    if options.counts_only {
        dropped.retain(|reason, _| !FOREIGN.contains(reason));
    }
    let mut problems = Vec::new();
    for (reason, count) in &dropped {
        if drops.note(reason, *count, now) {
            problems.extend(problem(reason, options, status));
        }
    }
    Some(Traffic {
        sent: Some(PacketCount { packets: counts.sent_packets, bytes: counts.sent_bytes }),
        received: Some(PacketCount {
            packets: counts.received_packets,
            bytes: counts.received_bytes,
        }),
        problems,
        dropped,
    })
}

/// The traffic of a process that cannot be asked.
pub(crate) fn unread(error: &io::Error) -> Traffic {
    let text = format!("the counts of the data plane cannot be read: {error}");
    let remedy =
        Remedy::run("pgrep -a flannel-udp").remark("does the process of the data plane run?");
    Traffic { problems: vec![Trouble::new(text, remedy)], ..Traffic::default() }
}

/// What is wrong if packets are dropped for this reason. Returns `None` if pods or other hosts can
/// cause it, so that nothing is wrong here.
fn problem(reason: &str, options: &Options, status: &Status) -> Option<Trouble> {
    let Options { device, port, .. } = options;
    Some(match reason {
        "foreign_node" => {
            let text = match &status.foreign {
                Some(packet) => format!(
                    "packets with the source {} were sent by {} and not by their node, {}",
                    packet.source, packet.host, packet.node
                ),
                None => "packets arrive that are not sent by the node of their source address"
                    .to_owned(),
            };
            let off = Remedy::PatchConfig("{\"Backend\": {\"SourceCheck\": false}}".to_owned());
            Trouble::new(
                format!(
                    "{text}, and are dropped: a host forges them, or a NAT changes the address of \
                     the node, and the node does not answer at its public address"
                ),
                off.remark("only if a NAT is the cause: it accepts packets of every host"),
            )
        }
        "foreign_source" => Trouble::new(
            format!(
                "packets whose source address no known node has arrive at UDP port {port}, and are \
                 dropped: the lease of their node is not accepted here, or a host forges packets"
            ),
            Remedy::ListPeers.remark("is the lease of a node rejected?"),
        ),
        "send_failed" => Trouble::new(
            format!(
                "the kernel refuses packets to other nodes: a firewall drops those to UDP port \
                 {port}, there is no route to a node, or the external interface is too slow"
            ),
            Remedy::run("nft list ruleset; iptables-save")
                .remark(format!("does a rule drop UDP port {port}?")),
        ),
        "write_failed" => Trouble::new(
            format!("the kernel refuses packets of other nodes at {device}"),
            Remedy::run(format!("ip -s link show {device}")),
        ),
        "read_failed" => Trouble::new(
            format!("the kernel fails reads of {device} or of UDP port {port}"),
            Remedy::run(format!("dmesg | tail; ip -s link show {device}")),
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn status(counts: serde_json::Value) -> Status {
        let foreign =
            serde_json::json!({"source": "10.1.8.3", "host": "192.0.2.99", "node": "192.0.2.8"});
        let options = serde_json::json!({
            "device": "flannel0", "local": ["192.0.2.7"], "port": 8285, "own": ["10.1.7.0/24"],
            "one_port": false, "checks_source": true, "queues": null,
        });
        let mut status = Status::default();
        status.options = serde_json::from_value(options).unwrap();
        status.counts = serde_json::from_value(counts).unwrap();
        status.foreign = serde_json::from_value(foreign).unwrap();
        status
    }

    #[test]
    fn every_count_is_traffic_or_a_reason() {
        let names = serde_json::to_value(flannel_udp::Counts::default()).unwrap();
        let names: Vec<String> = names.as_object().unwrap().keys().cloned().collect();
        let counts: BTreeMap<&String, usize> = names.iter().zip(1..).collect();
        let of = |name: &str| counts[&name.to_owned()] as u64;
        let status = status(serde_json::to_value(&counts).unwrap());
        let traffic = traffic(&status, &mut LongDrops::default(), Instant::now()).unwrap();
        let sent = PacketCount { packets: of("sent_packets"), bytes: of("sent_bytes") };
        assert_eq!(traffic.sent, Some(sent));
        let received = PacketCount { packets: of("received_packets"), bytes: of("received_bytes") };
        assert_eq!(traffic.received, Some(received));
        assert!(traffic.dropped.iter().all(|(reason, count)| *count == of(reason)));
        let others = names.iter().filter(|name| !traffic.dropped.contains_key(name.as_str()));
        let moved = ["received_bytes", "received_packets", "sent_bytes", "sent_packets"];
        // Received packets of nodes behind NAT, and packets that no pod has sent.
        let nat = ["learned_node", "proofs_requested"];
        let mut expected = [&moved[..], &nat[..]].concat();
        expected.sort_unstable();
        assert!(others.eq(expected), "{names:?}");
        assert_eq!(
            super::traffic(&Status::default(), &mut LongDrops::default(), Instant::now()),
            None
        );
    }

    #[test]
    fn packets_that_are_only_counted_are_not_dropped() {
        let counts = serde_json::json!({"foreign_source": 3, "foreign_node": 4, "no_peer": 5});
        let mut status = status(counts);
        assert_eq!(counted(&status), None);
        status.options.as_mut().unwrap().counts_only = true;
        let refused = counted(&status).unwrap();
        assert!(!refused.drops);
        assert_eq!(refused.packets, [("foreign_source", 3), ("stranger", 4)].into());
        let traffic = traffic(&status, &mut LongDrops::default(), Instant::now()).unwrap();
        assert_eq!(traffic.dropped["no_peer"], 5);
        assert!(FOREIGN.iter().all(|reason| !traffic.dropped.contains_key(reason)));
    }

    #[test]
    fn packets_that_are_dropped_for_long_are_a_problem() {
        let begin = Instant::now();
        let mut drops = LongDrops::default();
        let mut look = |seconds, count: u64| {
            let status = status(serde_json::json!({"foreign_node": count, "no_peer": count}));
            let now = begin + Duration::from_secs(seconds);
            traffic(&status, &mut drops, now).unwrap().problems
        };
        // Drops of an earlier daemon, and drops of a moment.
        for (seconds, count) in [(0, 7), (1, 7), (2, 8), (3, 9), (300, 9), (313, 9), (700, 10)] {
            assert_eq!(look(seconds, count), [], "{seconds}");
        }
        // A process that begins anew has fewer.
        let problems = look(1000, 5);
        let [Trouble { text, remedy }] = &problems[..] else { panic!("{problems:?}") };
        assert!(text.starts_with(
            "packets with the source 10.1.8.3 were sent by 192.0.2.99 and not by their node, \
             192.0.2.8, and are"
        ));
        let off = Remedy::PatchConfig(r#"{"Backend": {"SourceCheck": false}}"#.to_owned());
        assert_eq!(
            *remedy,
            off.remark("only if a NAT is the cause: it accepts packets of every host")
        );
        assert_eq!(look(1300, 5).len(), 1);
        assert_eq!(look(1311, 5), []);
    }

    #[test]
    fn problems_name_the_port_and_the_device() {
        let status = status(serde_json::json!({}));
        let options = status.options.as_ref().unwrap();
        for (reason, expected) in [
            ("foreign_source", "UDP port 8285"),
            ("send_failed", "UDP port 8285"),
            ("write_failed", "flannel0"),
        ] {
            let text = problem(reason, options, &status).unwrap().text;
            assert!(text.contains(expected), "{text}");
        }
        for usual in ["no_peer", "expired", "bad_packet", "tiny_segments", "bad_datagram"] {
            assert_eq!(problem(usual, options, &status), None);
        }
    }
}
