//! Tells apart the causes of a tunnel without handshakes, by the counters of both ends.
//!
//! **Source**: linux `drivers/net/wireguard/receive.c: wg_receive_handshake_packet`. A node counts
//! and answers the first packet of a handshake only if it knows the sender's key, and if the time
//! in it is later than the time in the last one. It ignores an answer that another preshared key
//! made. A node that has sent an answer begins no handshake of its own for 5 s.

use std::net::SocketAddr;
use std::time::SystemTime;

use flannel_api::Severity;
use flannel_core::Remedy;
use flannel_core::object::PublicKey;
use flannel_core::remedy::Trouble;

use crate::finding::{Check, Finding};

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
    let here = &facts.before;
    let now = seconds(facts.time)?;
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
    let set_back = match (is_back, is_back_there) {
        (true, _) => SetBack {
            whose: "this host",
            other: key,
            at: "here".to_owned(),
            place: "there",
            stale_key: facts.key,
        },
        (_, true) => SetBack {
            whose: key,
            other: "this host",
            at: format!("on the node of {key}"),
            place: "here",
            stale_key: here.key,
        },
        _ => return None,
    };
    let SetBack { whose, other, at, place, stale_key } = set_back;
    let text = format!(
        "the clock of {whose} was set back, to a time before its last handshake: {other} ignores \
         the handshakes that {whose} begins"
    );
    let remedy = Remedy::run(SET_CLOCK)
        .remark(at)
        .remark(format!(
            "if that clock is right now: wg set {} peer '{stale_key}' remove, {place}",
            facts.link
        ))
        .remark("flannel puts it back");
    let severity = if silent { Severity::Error } else { Severity::Warning };
    Some(Finding::new(Check::Clock, severity, text).with_remedy(remedy))
}

/// A node whose clock was set back.
struct SetBack<'a> {
    whose: &'a str,
    /// The node that ignores its handshakes.
    other: &'a str,
    /// Where the clock is set right.
    at: String,
    /// Where the last handshake is forgotten.
    place: &'static str,
    /// The key of the node whose clock was set back.
    stale_key: PublicKey,
}

/// The fault of a tunnel through which the peer does not reply. `None` if the counters show no
/// fault, or if the whole host is silent.
pub(crate) fn trouble(key: &str, facts: &Handshake, public_replies: bool) -> Option<Finding> {
    if !public_replies && !facts.is_alive() {
        return None;
    }
    let node = format!("on the node of {key}");
    let far = facts.there.iter().flatten().next_back();
    let disagreement = far.and_then(|far| disagreement(far, facts, &node));
    let Trouble { text, remedy } = disagreement.or_else(|| lost_packets(far, facts, &node))?;
    let what = if facts.after.is_fresh() { "the tunnel is broken" } else { "no handshake" };
    let text = format!("{what} with {key}: {text}");
    Some(Finding::error(Check::Handshake, text).with_remedy(remedy))
}

/// Keys that the two ends do not agree on. `node` names the node of the far end.
fn disagreement(far: &FarEnd, facts: &Handshake, node: &str) -> Option<Trouble> {
    let known = facts.after.key;
    if far.key != known {
        let theirs = far.key;
        let text = format!("its device has the public key {theirs}, and its lease has {known}");
        return Some(Trouble::new(text, restart(node)));
    }
    let Some(peer) = &far.peer else {
        let text = "it has no peer for this node: it has not got this node's lease, or rejects it";
        return Some(Trouble::new(text, Remedy::ListPeers.remark(node)));
    };
    if peer.key != facts.key {
        let text =
            format!("it knows this node by the public key {}, not by {}", peer.key, facts.key);
        return Some(Trouble::new(text, restart("here")));
    }
    if peer.psk != facts.psk {
        let text = "it has another preshared key (PSK, PSKFile) than this node";
        let remedy = Remedy::RestartDaemon
            .remark("on both nodes, once the file of PSKFile is the same there");
        return Some(Trouble::new(text, remedy));
    }
    None
}

/// Packets that are lost between two ends that agree on their keys. `None` if packets arrive at
/// both ends.
fn lost_packets(far: Option<&FarEnd>, facts: &Handshake, node: &str) -> Option<Trouble> {
    let here = &facts.after;
    let port = facts.port;
    let to_port = here.endpoint.map_or(0, |to| to.port());
    let arrived_here = facts.arrived_here();
    if facts.arrived_there() == Some(true) {
        let text = format!(
            "packets from this node arrive there, but packets from there do not arrive at UDP port \
             {port} of this node"
        );
        return (!arrived_here).then(|| Trouble::new(text, accept(here.endpoint, port, "here")));
    }
    if let Some(far) = far.filter(|far| far.port != to_port) {
        let text =
            format!("it receives at UDP port {}, and packets to it go to port {to_port}", far.port);
        return Some(Trouble::new(text, restart(node)));
    }
    if facts.refused {
        let text =
            format!("its UDP port {to_port} is closed: there is no device, or a firewall rejects");
        let accept = accept(here.endpoint, to_port, "there");
        let remedy = Remedy::ExamineNode.remark(node).mention("else ", accept, "");
        return Some(Trouble::new(text, remedy));
    }
    Some(match far {
        None if arrived_here && !here.is_fresh() => Trouble::new(
            format!(
                "its packets arrive here: packets to its UDP port {to_port} are lost, or the \
                 preshared keys (PSK, PSKFile) differ"
            ),
            Remedy::ExamineNode.remark(node),
        ),
        _ if arrived_here => Trouble::new(
            format!("packets to its UDP port {to_port} do not arrive, and those from it arrive"),
            accept(here.endpoint, to_port, node),
        ),
        Some(_) => Trouble::new(
            format!("no packet arrives, at UDP port {to_port} there and {port} here"),
            accept(here.endpoint, to_port, "on both hosts"),
        ),
        None => Trouble::new(
            format!(
                "nothing comes from it: UDP port {to_port} may be blocked there or on the way, or \
                 it does not know this node's public key"
            ),
            Remedy::ExamineNode.remark(node),
        ),
    })
}

/// Restarts a daemon, so that it publishes its lease again.
fn restart(at: &str) -> Remedy {
    Remedy::RestartDaemon.remark(format!("{at}; the restarted daemon publishes its lease again"))
}

/// Accepts packets to an address and a port.
fn accept(to: Option<SocketAddr>, port: u16, at: &str) -> Remedy {
    let program = if to.is_some_and(|to| to.is_ipv6()) { "ip6tables" } else { "iptables" };
    Remedy::run(format!("{program} -I INPUT -p udp --dport {port} -j ACCEPT"))
        .remark(at)
        .remark("else on the way")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flannel_core::address::Dual;
    use flannel_core::object::Secret;
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
                "packets from there do not arrive at UDP port 51821 of this node",
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
            assert!(found.is_error() && found.check == Check::Handshake, "{found:?}");
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
