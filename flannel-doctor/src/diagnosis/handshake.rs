//! Tells apart the causes of a tunnel without handshakes, by the counters of both ends.
//!
//! **Source**: linux `drivers/net/wireguard/receive.c: wg_receive_handshake_packet`. A node counts
//! and answers the first packet of a handshake only if it knows the sender's key, and if the time
//! in it is later than that of the last one. It ignores an answer that another preshared key made.
//! A node that has sent an answer begins no handshake of its own for 5 s.

use std::net::SocketAddr;
use std::time::SystemTime;

use flannel_api::Severity;
use flannel_core::Remedy;

use crate::finding::Finding;

use crate::inputs::handshakes::Handshake;
use crate::path_probe::FarEnd;
use crate::remedy::SET_CLOCK;

/// The smallest difference that shows that a clock was set back, in seconds. The clocks of two
/// hosts differ by less.
const SET_BACK: i64 = 5;

/// The fault if the clock of one node was set back: the other one then ignores the handshakes that
/// it begins. A node whose clock is right may begin one itself. `silent`: nothing passes now.
pub(crate) fn clock(key: &str, facts: &Handshake, silent: bool) -> Option<Finding> {
    let seconds = |time: SystemTime| {
        time.duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_secs() as i64)
    };
    let (here, now) = (&facts.before, seconds(facts.time)?);
    let last_here = here.handshake.and_then(seconds);
    let there = facts.there[0].as_ref();
    let peer = there.and_then(|there| there.peer.as_ref());
    let last_there = peer.and_then(|peer| peer.handshake);
    // After a restart only the other end remembers the last handshake. Then clocks are compared.
    let unanswered = here.handshake.is_none() && here.sent > 0 && here.received == 0;
    let unanswered_there =
        peer.is_some_and(|peer| peer.handshake.is_none() && peer.sent > 0 && peer.received == 0);
    let is_back = last_here.is_some_and(|last| last > now)
        || unanswered && last_there.is_some_and(|last| last > now + SET_BACK);
    let is_back_there = there.is_some_and(|there| {
        last_there.is_some_and(|last| last > there.time)
            || unanswered_there && last_here.is_some_and(|last| last > there.time + SET_BACK)
    });
    let (whose, other, at, place, of) = match (is_back, is_back_there) {
        (true, _) => ("this host".to_owned(), key, "here".to_owned(), "there", facts.key),
        (_, true) => {
            let at = format!("on the node of {key}");
            (key.to_owned(), "this host", at, "here", here.key)
        }
        _ => return None,
    };
    let text = format!(
        "the clock of {whose} was set back, to a time before its last handshake: {other} ignores \
         the handshakes that {whose} begins"
    );
    let remedy = Remedy::run(SET_CLOCK)
        .remark(at)
        .remark(format!(
            "if that clock is right now: wg set {} peer '{of}' remove, {place}",
            facts.link
        ))
        .remark("flannel puts it back");
    let severity = if silent { Severity::Error } else { Severity::Warning };
    Some(Finding::new("clock", severity, text).with_remedy(remedy))
}

/// The fault of a tunnel through which the peer does not reply. `None`: the counters show none, or
/// the whole host is silent.
pub(crate) fn trouble(key: &str, facts: &Handshake, public_replies: bool) -> Option<Finding> {
    if !public_replies && !facts.is_alive() {
        return None;
    }
    let (here, port) = (&facts.after, facts.port);
    let no_handshake = !here.is_fresh();
    let node = format!("on the node of {key}");
    let restart = |at: &str| Remedy::RestartDaemon.remark(format!("{at}: it publishes its lease"));
    let accept = |to: Option<SocketAddr>, port: u16, at: &str| {
        let v6 = to.is_some_and(|to| to.is_ipv6());
        let program = if v6 { "ip6tables" } else { "iptables" };
        Remedy::run(format!("{program} -I INPUT -p udp --dport {port} -j ACCEPT"))
            .remark(at)
            .remark("else on the way")
    };
    let to_port = here.endpoint.map_or(0, |to| to.port());
    let far = facts.there.iter().flatten().next_back();
    let arrived = (facts.arrived_there(), facts.arrived_here());
    let (text, remedy) = match far {
        Some(FarEnd { key: theirs, .. }) if *theirs != here.key => (
            format!("its device has the public key {theirs}, and its lease has {}", here.key),
            restart(&node),
        ),
        Some(FarEnd { peer: None, .. }) => (
            "it has no peer for this node: it has not got this node's lease, or rejects it".into(),
            Remedy::ListPeers.remark(node),
        ),
        Some(FarEnd { peer: Some(peer), .. }) if peer.key != facts.key => (
            format!("it knows this node by the public key {}, not by {}", peer.key, facts.key),
            restart("here"),
        ),
        Some(FarEnd { peer: Some(peer), .. }) if peer.psk != facts.psk => (
            "it has another preshared key (PSK, PSKFile) than this node".into(),
            Remedy::RestartDaemon
                .remark("on both nodes, once the file of PSKFile is the same there"),
        ),
        _ if arrived == (Some(true), true) => return None,
        _ if arrived == (Some(true), false) => (
            format!("its packets do not arrive at UDP port {port} here, and it gets those of here"),
            accept(here.endpoint, port, "here"),
        ),
        Some(far) if far.port != to_port => (
            format!("it receives at UDP port {}, and packets to it go to port {to_port}", far.port),
            restart(&node),
        ),
        _ if facts.refused => (
            format!("its UDP port {to_port} is closed: there is no device, or a firewall rejects"),
            Remedy::ExamineNode.remark(node).mention(
                "else ",
                accept(here.endpoint, to_port, "there"),
                "",
            ),
        ),
        None if arrived.1 && no_handshake => (
            format!(
                "its packets arrive here: packets to its UDP port {to_port} are lost, or the \
                 preshared keys (PSK, PSKFile) differ"
            ),
            Remedy::ExamineNode.remark(node),
        ),
        _ if arrived.1 => (
            format!("packets to its UDP port {to_port} do not arrive, and those from it arrive"),
            accept(here.endpoint, to_port, &node),
        ),
        Some(_) => (
            format!("no packet arrives, at UDP port {to_port} there and {port} here"),
            accept(here.endpoint, to_port, "on both hosts"),
        ),
        None => (
            format!(
                "nothing comes from it: UDP port {to_port} may be blocked there or on the way, or \
                 it does not know this node's public key"
            ),
            Remedy::ExamineNode.remark(node),
        ),
    };
    let what = if no_handshake { "no handshake" } else { "the tunnel is broken" };
    Some(Finding::error("handshake", format!("{what} with {key}: {text}")).with_remedy(remedy))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flannel_core::address::Dual;
    use flannel_core::object::{PublicKey, Secret};
    use flannel_netlink::Session;

    use super::*;
    use crate::path_probe::{FarEnd, FarPeer};

    const KEY: &str = "10.1.7.0-24";
    const NOW: i64 = 1_700_000_000;

    fn at(seconds: i64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(seconds as u64)
    }

    /// A tunnel through which no packet passes, although both ends know each other.
    fn blocked() -> Handshake {
        let before = Session {
            key: PublicKey([7; 32]),
            allowed: Dual { v4: "10.1.7.0/24".parse().ok(), v6: None },
            psk: Some(Secret::new([7; 32])),
            put: None,
            endpoint: "192.0.2.7:51820".parse().ok(),
            handshake: None,
            received: 0,
            sent: 148,
        };
        let after = Session { sent: 296, ..before.clone() };
        let key = PublicKey([1; 32]);
        let peer = FarPeer { key, psk: Some(1), received: 0, sent: 148, handshake: None };
        let there =
            Some(FarEnd { version: 1, key: after.key, port: 51820, time: NOW, peer: Some(peer) });
        Handshake {
            link: "flannel-wg".parse().unwrap(),
            key,
            port: 51821,
            psk: Some(1),
            time: at(NOW),
            before,
            after,
            there: [there.clone(), there],
            refused: false,
        }
    }

    fn far(facts: &mut Handshake, n: usize) -> &mut FarEnd {
        facts.there[n].as_mut().unwrap()
    }

    fn far_peer(facts: &mut Handshake, n: usize) -> &mut FarPeer {
        far(facts, n).peer.as_mut().unwrap()
    }

    /// Packets arrive there.
    fn there(facts: &mut Handshake) {
        far_peer(facts, 1).received = 148;
    }

    /// Packets arrive here.
    fn here(facts: &mut Handshake) {
        facts.after.received = 148;
    }

    fn alone(facts: &mut Handshake) {
        facts.there = [None, None];
    }

    #[test]
    fn each_cause_is_told_with_its_repair() {
        type Change = fn(&mut Handshake);
        for (change, text, repair) in [
            (
                (|_| ()) as Change,
                "no handshake with 10.1.7.0-24: no packet arrives, at UDP port 51820 there and \
                 51821 here",
                "iptables -I INPUT -p udp --dport 51820 -j ACCEPT # on both hosts",
            ),
            (
                |f| far_peer(f, 1).psk = Some(2),
                "it has another preshared key",
                "systemctl restart flanneld # on both",
            ),
            (
                // Its first packet is accepted here too.
                |f| (here(f), there(f), f.psk = None).2,
                "it has another preshared key",
                "systemctl restart flanneld # on both",
            ),
            (
                there,
                "its packets do not arrive at UDP port 51821 here",
                "iptables -I INPUT -p udp --dport 51821 -j ACCEPT # here",
            ),
            (
                here,
                "packets to its UDP port 51820 do not arrive, and those from it arrive",
                "iptables -I INPUT -p udp --dport 51820 -j ACCEPT # on the node of 10.1.7.0-24",
            ),
            (
                |f| f.there.iter_mut().flatten().for_each(|far| far.key = PublicKey([9; 32])),
                "its device has the public key CQkJ",
                "systemctl restart flanneld # on the node of 10.1.7.0-24",
            ),
            (
                |f| f.there.iter_mut().flatten().for_each(|far| far.peer = None),
                "it has no peer for this node",
                "flannelctl peers # on the node of 10.1.7.0-24",
            ),
            (
                |f| far_peer(f, 1).key = PublicKey([9; 32]),
                "it knows this node by the public key CQkJ",
                "systemctl restart flanneld # here",
            ),
            (
                |f| far(f, 1).port = 40_000,
                "it receives at UDP port 40000, and packets to it go to port 51820",
                "systemctl restart flanneld # on the node of 10.1.7.0-24",
            ),
            (|f| f.refused = true, "UDP port 51820 is closed", "flannelctl doctor # on the node"),
            (
                // The daemon there does not answer.
                |f| (alone(f), here(f)).0,
                "packets to its UDP port 51820 are lost, or the preshared keys",
                "flannelctl doctor # on the node of 10.1.7.0-24",
            ),
            (alone, "nothing comes from it: UDP port 51820 may be blocked", "flannelctl doctor #"),
            (
                |f| (alone(f), f.refused = true).0,
                "UDP port 51820 is closed",
                "flannelctl doctor # on the node",
            ),
            (
                // It answered once only.
                |f| f.there[1] = None,
                "no packet arrives",
                "iptables -I INPUT -p udp --dport 51820 -j ACCEPT # on both hosts",
            ),
            (
                |f| f.after.endpoint = "[2001:db8::7]:51820".parse().ok(),
                "no packet arrives",
                "ip6tables -I INPUT",
            ),
        ] {
            let mut facts = blocked();
            change(&mut facts);
            let found = trouble(KEY, &facts, true).unwrap();
            assert!(found.is_error() && found.check == "handshake", "{found:?}");
            assert!(found.text.contains(text), "{text}: {found:?}");
            assert!(found.repair().unwrap().starts_with(repair), "{repair}: {found:?}");
            assert_eq!(clock(KEY, &facts, true), None, "{text}");
        }
    }

    #[test]
    fn a_tunnel_that_passes_packets_or_a_silent_host_is_no_trouble() {
        let mut facts = blocked();
        there(&mut facts);
        here(&mut facts);
        facts.after.handshake = Some(SystemTime::now());
        assert_eq!(trouble(KEY, &facts, true), None, "there is a session, and packets arrive");
        // A session does not help if a firewall drops its packets now.
        far_peer(&mut facts, 1).received = 0;
        let found = trouble(KEY, &facts, true).unwrap();
        assert!(found.text.starts_with("the tunnel is broken with 10.1.7.0-24: "), "{found:?}");

        let mut facts = blocked();
        alone(&mut facts);
        assert_eq!(trouble(KEY, &facts, false), None, "the host may be down");
        facts.refused = true;
        assert!(trouble(KEY, &facts, false).is_some(), "the host answers");
    }

    #[test]
    fn a_clock_that_was_set_back_is_found_on_either_host() {
        type Change = fn(&mut Handshake);
        for (change, expected) in [
            ((|f| f.before.handshake = Some(at(NOW))) as Change, None),
            (|f| f.before.handshake = Some(at(NOW + 1)), Some("this host")),
            // This host has restarted, and only the other one remembers.
            (
                |f| {
                    far(f, 0).time = NOW + 3600;
                    far_peer(f, 0).handshake = Some(NOW + SET_BACK);
                },
                None,
            ),
            (
                |f| {
                    far(f, 0).time = NOW + 3600;
                    far_peer(f, 0).handshake = Some(NOW + SET_BACK + 1);
                },
                Some("this host"),
            ),
            (
                // The clocks always differ, and handshakes succeed.
                |f| {
                    far(f, 0).time = NOW + 3600;
                    far_peer(f, 0).handshake = Some(NOW + 3590);
                    f.before.handshake = Some(at(NOW - 10));
                },
                None,
            ),
            (|f| far_peer(f, 0).handshake = Some(NOW + 1), Some(KEY)),
            (
                |f| {
                    far(f, 0).time = NOW - 3600;
                    f.before.handshake = Some(at(NOW - 10));
                },
                Some(KEY),
            ),
            (|f| f.there = [None, None], None),
        ] {
            let mut facts = blocked();
            change(&mut facts);
            let found = clock(KEY, &facts, true);
            let Some(whose) = expected else {
                assert_eq!(found, None);
                continue;
            };
            let found = found.unwrap();
            assert!(found.text.starts_with(&format!("the clock of {whose} was set")), "{found:?}");
            let (of, place) = match whose {
                KEY => (facts.before.key, "remove, here"),
                _ => (facts.key, "remove, there"),
            };
            let repair = found.repair().unwrap();
            assert!(repair.contains(&format!("'{of}' {place}")), "{repair}");
            assert!(found.is_error() && !clock(KEY, &facts, false).unwrap().is_error());
        }
    }
}
