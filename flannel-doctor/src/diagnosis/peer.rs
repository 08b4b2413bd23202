//! Derives faults from the answers of a peer.
//!
//! A missing reply alone shows no fault of the peer. The addresses and sizes that are answered show
//! the likely cause. A finding names a direction only if both ends report.

use std::net::IpAddr;

use flannel_core::Remedy;
use flannel_core::backend::Transport;

use crate::diagnosis::handshake;
use crate::diagnosis::mtu::{Fault, Narrow};
use crate::finding::{Check, Finding};
use crate::inputs::devices::Devices;
use crate::inputs::echo::EchoResult;
use crate::inputs::handshakes::Handshake;
use crate::inputs::peers::Question;
use crate::path_probe::client::{PathProbe, Segments};

/// What is known about one peer in one family: the evidence of a diagnosis.
#[derive(Debug, Clone, Default)]
pub struct PeerEvidence {
    /// The answers of the tunnel address to echoes of small and of full size, or `None` if no echo
    /// was sent.
    pub tunnel: Option<[EchoResult; 2]>,
    /// The answers of the public address.
    pub public: Option<[EchoResult; 2]>,
    /// The result of the path probe.
    pub path: PathProbe,
    /// The largest echo that passes, in bytes, if the path was searched.
    pub passes: Option<u16>,
    /// The state of the encrypted tunnel, or `None` without a tunnel, or if it cannot be read.
    pub handshake: Option<Handshake>,
}

/// A peer, the question to it, and its answers.
#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    key: &'a str,
    /// The tunnel address, or the public address without a tunnel.
    address: IpAddr,
    /// The size of a full packet to that address, in bytes.
    full: u16,
    question: &'a Question,
    answers: &'a PeerEvidence,
    devices: &'a Devices,
}

/// All faults of a peer in one family.
pub fn diagnose(
    key: &str,
    question: &Question,
    answers: &PeerEvidence,
    devices: &Devices,
) -> Vec<Fault> {
    let (address, full, [small, big]) =
        match (&question.tunnel, &answers.tunnel, &question.public, &answers.public) {
            (Some((address, full)), Some(answers), ..) => (*address, *full, answers),
            (_, _, Some((address, full)), Some(answers)) => (*address, *full, answers),
            _ => return Vec::new(),
        };
    let case = Case { key, address, full, question, answers, devices };
    if let EchoResult::NotSent(error) = small {
        let text = format!("{address} of {key} cannot be asked: {error}");
        return vec![
            Finding::error(Check::Route, text).with_remedy(Remedy::Explain(address)).into(),
        ];
    }
    let segments = answers.path.segments.as_ref();
    let lost = || segments.and_then(|segments| case.lost(segments));
    let mut found: Vec<Fault> = Vec::new();
    let silent = *small == EchoResult::Nothing;
    let clock = answers.handshake.as_ref().and_then(|facts| handshake::clock(key, facts, silent));
    found.extend(clock.map(Fault::from));
    match (replied(small), replied(big)) {
        // Without echoes only the path probe counts.
        _ if *small == EchoResult::NotAllowed => found.extend(lost()),
        // The clock explains it.
        (false, _) if !found.is_empty() => {}
        // A node that answers the path probe is reachable, but ignores echoes.
        (false, _) if segments.is_some() => found.extend(lost()),
        (false, _) => found.push(case.no_handshake().unwrap_or_else(|| case.silent()).into()),
        (true, false) if case.is_avoided(big) => {}
        (true, false) => found.push(case.too_big(big)),
        (true, true) => {
            found.extend(case.fragmented());
            found.extend(lost());
        }
    }
    found.extend(segments.and_then(|segments| case.different_mtus(segments)));
    found
}

fn replied(answer: &EchoResult) -> bool {
    matches!(answer, EchoResult::Reply(_))
}

impl Case<'_> {
    /// The fault if no echo passes through an encrypted tunnel, and the reason is known.
    fn no_handshake(&self) -> Option<Finding> {
        let PeerEvidence { public, handshake, .. } = self.answers;
        let public_replies = public.as_ref().is_some_and(|[small, _]| replied(small));
        handshake::trouble(self.key, handshake.as_ref()?, public_replies)
    }

    /// The fault if no echo is answered.
    fn silent(&self) -> Finding {
        let Self { key, address, answers, .. } = self;
        let public = self.question.public.map(|(public, _)| public.to_string()).unwrap_or_default();
        let public_replies = answers.public.as_ref().is_some_and(|[small, _]| replied(small));
        if answers.tunnel.is_some() && public_replies {
            let transport = self.devices.datapath.transports.first();
            let what = transport.map_or_else(|| "the tunnel".to_owned(), ToString::to_string);
            let likely = match answers.path.acknowledged {
                0 => format!(
                    "{what} may be blocked here, on the way or there, or flannel does not work \
                     there"
                ),
                _ => format!(
                    "packets to it arrive, as its daemon reports outside the tunnel, and packets \
                     from it are lost: {what} may be blocked on the way or here"
                ),
            };
            // A guard drops packets of a tunnel, whatever other rules accept. Without ports it is
            // on by default.
            let gate = match transport {
                Some(Transport::Protocol(_)) => {
                    ". By default a node accepts packets of this tunnel only from public addresses \
                     of nodes. If they have another source, set \"SourceCheck\": false in Backend"
                }
                _ => "",
            };
            let text = format!(
                "no reply from {address}, the tunnel address of {key}, while its public address \
                 {public} replies: {likely}{gate}"
            );
            let ipv6 = self.question.public.is_some_and(|(address, _)| address.is_ipv6());
            let program = if ipv6 { "ip6tables" } else { "iptables" };
            let packets = match transport {
                Some(Transport::Udp(port)) => format!("udp --dport {port}"),
                Some(Transport::Protocol(number)) => number.to_string(),
                _ => return Finding::error(Check::Tunnel, text),
            };
            let accept = Remedy::run(format!("{program} -I INPUT -p {packets} -j ACCEPT"));
            let remedy = match answers.path.acknowledged {
                0 => accept.mention("on both hosts; else ", Remedy::ExamineNode, ", there"),
                _ => accept.remark("here"),
            };
            return Finding::error(Check::Tunnel, text).with_remedy(remedy);
        }
        let neither = if answers.tunnel.is_some() && answers.public.is_some() {
            format!(
                ", neither from its tunnel address {address} nor from its public address {public}"
            )
        } else {
            format!(", at {address}")
        };
        Finding::error(Check::Peer, format!("no reply from {key}{neither}"))
            .with_remedy(Remedy::ReleaseLease(key.to_string()))
    }

    /// The fault if only small echoes are answered.
    fn too_big(&self, answer: &EchoResult) -> Fault {
        let Self { key, address, full, answers, .. } = self;
        let reported = answers.path.segments.as_ref().map_or(0, |report| report.largest_datagram);
        let arrived = reported.max(answers.path.acknowledged);
        let what = match answer {
            EchoResult::TooBig(Some(most)) => format!("are too big: at most {most} bytes pass"),
            EchoResult::TooBig(None) if self.own_device_is_less() => {
                "are more than this host's own device takes".to_owned()
            }
            // The kernel refuses it for another reason.
            EchoResult::TooBig(None) => match answers.passes {
                Some(most) => format!("are too big: at most {most} bytes pass"),
                None => "are too big for the path MTU that this host knows".to_owned(),
            },
            _ if arrived >= *full => {
                "arrive there, but replies of that size are lost on the way back, while small ones \
                 arrive"
                    .to_owned()
            }
            _ if arrived > 0 => "do not arrive there, while small ones do".to_owned(),
            _ => "get no reply, while small ones do".to_owned(),
        };
        let text =
            format!("packets of {full} bytes, which pods may send, to {address} of {key} {what}");
        let found = Finding::error(Check::PathMtu, text);
        if let (EchoResult::TooBig(None), Some(device), Some(takes), true) =
            (answer, self.question.device, self.question.takes, self.own_device_is_less())
        {
            // Only the tunnel belongs to flannel. The external interface may be set so on purpose.
            return if self.question.by_tunnel(self.devices) {
                found.with_command(format!("ip link set {device} mtu {full}")).into()
            } else {
                Fault::new(found, Narrow::Uplink { takes, needed: u32::from(*full) })
            };
        }
        let most =
            |answer: &EchoResult| if let EchoResult::TooBig(most) = answer { *most } else { None };
        let inner = most(answer).or_else(|| answers.passes.map(u32::from));
        let public = answers.public.as_ref().and_then(|[_, big]| most(big));
        self.narrow(found, inner, public)
    }

    /// Whether the route has an MTU that passes, so that pods send no larger packets.
    fn is_avoided(&self, answer: &EchoResult) -> bool {
        let passes = match answer {
            EchoResult::TooBig(Some(most)) => Some(*most),
            _ => self.answers.passes.map(u32::from),
        };
        let mtu = self.question.route_mtu.filter(|_| !self.own_device_is_less());
        mtu.is_some_and(|mtu| passes.is_none_or(|passes| passes >= mtu))
    }

    fn own_device_is_less(&self) -> bool {
        self.question.takes.is_some_and(|takes| takes < u32::from(self.full))
    }

    /// The fault if tunnel packets are fragmented on the path.
    fn fragmented(&self) -> Option<Fault> {
        let ((public, size), Some([_, EchoResult::TooBig(Some(most))])) =
            (self.question.public?, &self.answers.public)
        else {
            return None;
        };
        self.answers.tunnel.as_ref()?;
        let text = format!(
            "tunnel packets of {size} bytes to {public} of {} are fragmented on the path, where at \
             most {most} pass",
            self.key
        );
        Some(self.narrow(Finding::warning(Check::PathMtu, text), None, Some(*most)))
    }

    /// The fault if TCP segments are lost where echoes pass.
    fn lost(&self, segments: &Segments) -> Option<Fault> {
        let (which, at) = match (segments.there.is_whole(), segments.back.is_whole()) {
            (true, true) => return None,
            (false, true) => ("do not arrive there, while those from there arrive here", "here"),
            (true, false) => ("arrive there, while those from there do not arrive here", "there"),
            (false, false) => {
                ("do not arrive there, and those from there do not arrive here", "on both hosts")
            }
        };
        let device = self.question.device?;
        // Some features of a network card cannot change. `tx off` turns off the others.
        let remedy = if self.question.by_tunnel(self.devices) {
            Remedy::run(format!("ethtool -K {device} tx-checksum-ip-generic off")).remark(at)
        } else if segments.back.is_whole() {
            Remedy::run(format!("ethtool -K {device} tx off")).remark(at)
        } else {
            Remedy::run(format!("ethtool -K {device} tx off"))
                .remark(format!("{at}, where the interface may have another name"))
        };
        let text = format!(
            "TCP segments of {} bytes to {} of {} {which}: a firewall drops them, or a network \
             card computes wrong checksums",
            segments.segment, self.address, self.key
        );
        let remedy = remedy.remark("else nft list ruleset");
        Some(Finding::error(Check::Segments, text).with_remedy(remedy).into())
    }

    /// The fault if pods of the two nodes have different MTUs.
    fn different_mtus(&self, segments: &Segments) -> Option<Fault> {
        let here = u32::from(self.full);
        let there = segments.mtu;
        if here == there {
            return None;
        }
        let less = if here < there { "here" } else { "there" };
        let text = format!(
            "pods here may send {here} bytes, those of {} {there}: packets larger than the smaller \
             MTU are lost; the external interface has the smaller MTU {less}",
            self.key
        );
        let takes = Some(here.min(there) + self.question.header);
        Some(Fault::new(Finding::warning(Check::Mtu, text), Narrow::Way { to: self.way(), takes }))
    }

    /// The address that full packets have on the wire.
    fn way(&self) -> IpAddr {
        self.question.public.map_or(self.address, |(address, _)| address)
    }

    /// The fault of a path that passes packets of pods of at most `inner` bytes, or packets on the
    /// wire of at most `wire` bytes.
    fn narrow(&self, finding: Finding, inner: Option<u32>, wire: Option<u32>) -> Fault {
        let Question { tunnel, public, header, .. } = self.question;
        let costs = match (tunnel, public) {
            (Some((_, inner)), Some((_, wire))) => u32::from(wire.saturating_sub(*inner)),
            _ => 0,
        };
        // The MTU of the network config is the size of a tunnel packet on the wire.
        let header = if costs > 0 { costs } else { *header };
        let wire = wire.map(|most| most.saturating_sub(costs) + header);
        let takes = [inner.map(|most| most + header), wire].into_iter().flatten().min();
        Fault::new(finding, Narrow::Way { to: self.way(), takes })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use flannel_core::address::{Dual, Family};

    use super::*;
    use crate::diagnosis::mtu::settle;
    use crate::fixture::{devices, target};
    use crate::path_probe::client::Passage;

    /// The findings on one peer.
    fn findings(question: &Question, answers: &PeerEvidence, devices: &Devices) -> Vec<Finding> {
        settle(diagnose("10.1.7.0-24", question, answers, devices), devices, &[Family::V4])
    }

    #[test]
    fn missing_answers_show_the_likely_cause() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || EchoResult::Reply(Duration::from_millis(1));
        let none = EchoResult::Nothing;
        let most = |n| EchoResult::TooBig(Some(n));
        let found_with = |tunnel: [EchoResult; 2], public: [EchoResult; 2]| {
            let answers = PeerEvidence {
                tunnel: Some(tunnel),
                public: Some(public),
                ..PeerEvidence::default()
            };
            let found = findings(question, &answers, &devices());
            assert!(found.len() <= 1, "{found:?}");
            found.into_iter().next().map(|f| {
                format!(
                    "{} {} {} | {}",
                    f.severity,
                    f.check,
                    f.text,
                    f.repair().unwrap_or_default()
                )
            })
        };
        assert_eq!(found_with([ok(), ok()], [ok(), ok()]), None);
        assert_eq!(
            found_with([ok(), ok()], [none.clone(), none.clone()]),
            None,
            "a host that answers no echo is no fault"
        );
        for (found, parts) in [
            (
                found_with([none.clone(), none.clone()], [ok(), ok()]),
                ["error tunnel", "UDP port 8472", "--dport 8472"],
            ),
            (
                found_with([none.clone(), none.clone()], [none.clone(), none.clone()]),
                [
                    "error peer",
                    "no reply from 10.1.7.0-24, neither",
                    "release --force '10.1.7.0-24'",
                ],
            ),
            (
                found_with([ok(), none.clone()], [ok(), most(1400)]),
                ["error path-mtu", "get no reply", "\"MTU\": 1400"],
            ),
            (
                found_with([ok(), none.clone()], [ok(), none.clone()]),
                ["error path-mtu", "get no reply", "\"MTU\": 1330}}' # if the MTU of the path"],
            ),
            (
                found_with([ok(), EchoResult::TooBig(None)], [ok(), ok()]),
                [
                    "error path-mtu",
                    "are too big for the path MTU that this host knows",
                    "\"MTU\": 1330",
                ],
            ),
            (
                found_with([ok(), ok()], [ok(), most(1400)]),
                ["warning path-mtu", "are fragmented on the path", "\"MTU\": 1400"],
            ),
            (
                found_with([EchoResult::NotSent("x".into()), none.clone()], [ok(), ok()]),
                [
                    "error route",
                    "10.1.7.0 of 10.1.7.0-24 cannot be asked: x",
                    "flannelctl why 10.1.7.0",
                ],
            ),
        ] {
            let found = found.unwrap();
            assert!(parts.iter().all(|part| found.contains(part)), "{found}\n{parts:?}");
        }
        // The repair configures the size that the search found, plus the tunnel's header.
        let repair = |question: &Question, answers: &PeerEvidence, devices: &Devices| {
            findings(question, answers, devices).pop().unwrap().repair().unwrap()
        };
        let lost = || [ok(), none.clone()];
        let answers = |tunnel, public| PeerEvidence {
            tunnel,
            public,
            passes: Some(1350),
            ..PeerEvidence::default()
        };
        assert_eq!(
            repair(question, &answers(Some(lost()), Some([ok(), ok()])), &devices()),
            r#"flannelctl config patch '{"Backend": {"MTU": 1400}}'"#
        );
        let refused = || answers(Some([ok(), EchoResult::TooBig(None)]), Some([ok(), ok()]));
        assert!(
            repair(question, &refused(), &devices()).ends_with(r#"'{"Backend": {"MTU": 1400}}'"#),
            "the kernel refuses what the device takes"
        );
        // The daemon has lowered the MTU of the route.
        let lowered = |mtu| Question { route_mtu: Some(mtu), ..question.clone() };
        let narrow = answers(Some(lost()), Some([ok(), ok()]));
        assert_eq!(findings(&lowered(1350), &narrow, &devices()), []);
        let unknown = PeerEvidence { passes: None, ..narrow.clone() };
        assert_eq!(findings(&lowered(1350), &unknown, &devices()), []);
        let too_late = findings(&lowered(1400), &narrow, &devices());
        assert_eq!(too_late.len(), 1, "the path has become narrower: {too_late:?}");
        let small = Question { takes: Some(1300), ..lowered(1350) };
        assert_eq!(repair(&small, &refused(), &devices()), "ip link set flannel.1 mtu 1450");
    }

    fn uplink(tunnels: Dual<flannel_core::object::LinkName>) -> Devices {
        let mut devices = Devices { uplink: Some("eth0".parse().unwrap()), ..devices() };
        devices.datapath.devices = tunnels;
        devices
    }

    #[test]
    fn without_a_tunnel_the_repair_changes_the_external_interface() {
        let ok = || EchoResult::Reply(Duration::from_millis(1));
        let bare = uplink(Default::default());
        let question = &target("host-gw").questions(&bare)[0];
        let answers = |full, passes| PeerEvidence {
            public: Some([ok(), full]),
            passes,
            ..PeerEvidence::default()
        };
        assert_eq!(findings(question, &answers(ok(), None), &bare), []);
        let silent = PeerEvidence {
            public: Some([EchoResult::Nothing, EchoResult::Nothing]),
            ..PeerEvidence::default()
        };
        assert_eq!(findings(question, &silent, &bare)[0].check, Check::Peer);
        let repair = |question: &Question, answers: PeerEvidence, devices: &Devices| {
            findings(question, &answers, devices).pop().unwrap().repair().unwrap()
        };
        for answers in [
            answers(EchoResult::TooBig(Some(1350)), None),
            answers(EchoResult::Nothing, Some(1350)),
        ] {
            let repair = repair(question, answers, &bare);
            assert!(
                repair.starts_with("ip link set eth0 mtu 1350 # on every node, unless the link"),
                "{repair}"
            );
            assert!(
                repair.contains("tracepath -n 192.0.2.7") && repair.contains("MTUBytes=1350"),
                "{repair}"
            );
        }
        let guess = repair(question, answers(EchoResult::Nothing, None), &bare);
        assert!(
            guess.starts_with("tracepath -n 192.0.2.7 #"),
            "no interface is set by a guess: {guess}"
        );
        // A lowered MTU of the interface may be intended.
        let lowered = Question { takes: Some(1400), ..question.clone() };
        let repaired = repair(&lowered, answers(EchoResult::TooBig(None), None), &bare);
        assert!(
            repaired.starts_with("systemctl restart flanneld #")
                && repaired.contains("eth0 mtu 1450"),
            "{repaired}"
        );

        // With DirectRouting packets to this peer use the external interface, but the network
        // config sets the MTU.
        let direct_devices = uplink(devices().datapath.devices);
        let direct = target("vxlan").questions(&direct_devices).remove(0).direct(&direct_devices);
        assert_eq!((direct.device, direct.public.unwrap().1), (direct_devices.uplink, 1450));
        let lossy = |most| PeerEvidence { tunnel: Some([ok(), most]), ..answers(ok(), None) };
        let patched = repair(&direct, lossy(EchoResult::TooBig(Some(1400))), &direct_devices);
        assert!(patched.contains("\"MTU\": 1450"), "the MTU of pods is 50 bytes less: {patched}");
        let lowered = Question { takes: Some(1420), ..direct.clone() };
        let patched = repair(&lowered, lossy(EchoResult::TooBig(None)), &direct_devices);
        assert!(
            patched.contains("\"MTU\": 1420}}' # if the MTU of eth0 is a mistake"),
            "{patched}"
        );

        let passage = |arrived| Passage { sent: 5592, arrived };
        for (question, devices, [here, there]) in [
            (
                question,
                &bare,
                [
                    "ethtool -K eth0 tx off # here;",
                    "ethtool -K eth0 tx off # there, where the interface",
                ],
            ),
            (
                &direct,
                &direct_devices,
                [
                    "ethtool -K eth0 tx off # here;",
                    "ethtool -K eth0 tx off # there, where the interface",
                ],
            ),
            (
                &target("vxlan").questions(&direct_devices)[0],
                &direct_devices,
                [
                    "ethtool -K flannel.1 tx-checksum-ip-generic off # here",
                    "ethtool -K flannel.1 tx-checksum-ip-generic off # there",
                ],
            ),
        ] {
            for (forth, back, expected) in [(0, 5592, here), (5592, 0, there)] {
                let segments = Segments {
                    there: passage(forth),
                    back: passage(back),
                    segment: 1398,
                    mtu: 1450,
                    largest_datagram: 1450,
                    clock: None,
                };
                let path = PathProbe { acknowledged: 1450, segments: Some(segments) };
                let answers = PeerEvidence {
                    tunnel: question.tunnel.map(|_| [ok(), ok()]),
                    path,
                    ..answers(ok(), None)
                };
                let repair = repair(question, answers, devices);
                assert!(repair.starts_with(expected), "{repair}");
            }
        }
    }

    /// Pods have one MTU for both families: the smaller one, of IPv6.
    #[test]
    fn dual_stack_pods_have_the_mtu_of_ipv6() {
        let tunnels = Dual {
            v4: Some("flannel.1".parse().unwrap()),
            v6: Some("flannel-v6.1".parse().unwrap()),
        };
        let devices = Devices { mtu: Some(1430), ..uplink(tunnels) };
        let mut peer = target("vxlan");
        peer.subnets = vec!["10.1.7.0/24".parse().unwrap(), "fd00:1:0:7::/64".parse().unwrap()];
        peer.public.v6 = Some("2001:db8::7".parse().unwrap());
        let questions = peer.questions(&devices);
        let wire = |question: &Question| question.public.map(|(_, size)| size);
        assert_eq!(questions.iter().map(wire).collect::<Vec<_>>(), [Some(1480), Some(1500)]);
        let ok = || EchoResult::Reply(Duration::from_millis(1));
        let passage = Passage { sent: 5120, arrived: 5120 };
        // The underlay there takes 1350 bytes, the minimum, or 1400.
        for (there, mtu) in [(1280, 1350), (1330, 1400)] {
            for question in &questions {
                let segments = Segments {
                    there: passage,
                    back: passage,
                    segment: 1280,
                    mtu: there,
                    largest_datagram: 1430,
                    clock: None,
                };
                let path = PathProbe { acknowledged: 0, segments: Some(segments) };
                let both = || Some([ok(), ok()]);
                let answers = PeerEvidence {
                    tunnel: both(),
                    public: both(),
                    path,
                    ..PeerEvidence::default()
                };
                let faults = diagnose("10.1.7.0-24", question, &answers, &devices);
                let found = settle(faults, &devices, &Family::BOTH);
                let patch =
                    format!("flannelctl config patch '{{\"Backend\": {{\"MTU\": {mtu}}}}}'");
                assert_eq!(found.len(), 1);
                assert_eq!(found[0].repair().as_deref(), Some(&*patch), "{:?}", question.family);
                assert!(!found[0].text.contains("too few"), "{}", found[0].text);
            }
            // The size that passes in the tunnel or on the wire gives that finding too.
            for (question, overhead) in questions.iter().zip([50, 70]) {
                let lost = |most| Some([ok(), most]);
                let inner = mtu - overhead;
                for (tunnel, public, passes) in [
                    (EchoResult::Nothing, ok(), u16::try_from(inner).ok()),
                    (EchoResult::TooBig(Some(inner)), ok(), None),
                    (EchoResult::Nothing, EchoResult::TooBig(Some(mtu)), None),
                ] {
                    let answers = PeerEvidence {
                        tunnel: lost(tunnel),
                        public: lost(public),
                        passes,
                        ..PeerEvidence::default()
                    };
                    let found = settle(
                        diagnose("10.1.7.0-24", question, &answers, &devices),
                        &devices,
                        &Family::BOTH,
                    );
                    let repair = found[0].repair().unwrap();
                    assert!(repair.ends_with(&format!("\"MTU\": {mtu}}}}}'")), "{repair}");
                }
            }
        }
    }

    #[test]
    fn a_direction_is_named_if_both_ends_report() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || EchoResult::Reply(Duration::from_millis(1));
        let passage = |arrived| Passage { sent: 5592, arrived };
        let segments = |there, back, mtu, largest_datagram| {
            Some(Segments {
                there: passage(there),
                back: passage(back),
                segment: 1398,
                mtu,
                largest_datagram,
                clock: None,
            })
        };
        let found_with = |tunnel: [EchoResult; 2], segments, acknowledged| {
            let path = PathProbe { acknowledged, segments };
            let answers = PeerEvidence {
                tunnel: Some(tunnel),
                public: Some([ok(), ok()]),
                path,
                ..PeerEvidence::default()
            };
            let found = findings(question, &answers, &devices());
            found
                .into_iter()
                .map(|f| {
                    format!(
                        "{} {} {} | {}",
                        f.severity,
                        f.check,
                        f.text,
                        f.repair().unwrap_or_default()
                    )
                })
                .collect::<Vec<_>>()
        };
        let none = || EchoResult::Nothing;
        assert_eq!(found_with([ok(), ok()], segments(5592, 5592, 1450, 1450), 0), [""; 0]);
        assert_eq!(found_with([EchoResult::NotAllowed, EchoResult::NotAllowed], None, 0), [""; 0]);
        assert_eq!(
            found_with([none(), none()], segments(5592, 5592, 1450, 1450), 0),
            [""; 0],
            "only echoes are refused"
        );
        for (found, parts) in [
            (
                found_with([ok(), ok()], segments(0, 5592, 1450, 1450), 0),
                [
                    "error segments",
                    "do not arrive there, while those from there arrive here",
                    "off # here",
                ],
            ),
            (
                found_with([ok(), ok()], segments(5592, 4096, 1450, 1450), 0),
                ["error segments", "arrive there, while those from there do not", "off # there"],
            ),
            (
                found_with([none(), none()], segments(0, 0, 1450, 64), 0),
                ["error segments", "do not arrive there, and those", "off # on both"],
            ),
            (
                found_with([ok(), none()], segments(0, 5592, 1450, 64), 0),
                [
                    "error path-mtu",
                    "do not arrive there, while small ones do",
                    "\"MTU\": 1330}}' # if the MTU of the path",
                ],
            ),
            (
                found_with([ok(), none()], segments(5592, 0, 1450, 1450), 0),
                [
                    "error path-mtu",
                    "arrive there, but replies of that size are lost on the way back",
                    "\"MTU\": 1330}}' # if the MTU of the path",
                ],
            ),
            (
                found_with(
                    [ok(), EchoResult::TooBig(None)],
                    segments(5592, 5592, 1450, 1450),
                    1450,
                ),
                [
                    "error path-mtu",
                    "are too big for the path MTU that this host knows",
                    "\"MTU\": 1330",
                ],
            ),
            (
                found_with([ok(), none()], None, 1450),
                [
                    "error path-mtu",
                    "arrive there, but replies of that size are lost on the way back",
                    "\"MTU\": 1330}}' # if the MTU of the path",
                ],
            ),
            (
                found_with([ok(), none()], segments(5592, 5592, 1450, 0), 0),
                ["error path-mtu", "get no reply", "\"MTU\": 1330}}' # if the MTU of the path"],
            ),
            (
                found_with([ok(), ok()], segments(5592, 5592, 1350, 1450), 0),
                [
                    "warning mtu",
                    "pods here may send 1450 bytes, those of 10.1.7.0-24 1350",
                    "\"MTU\": 1400",
                ],
            ),
            (
                found_with([none(), none()], None, 80),
                [
                    "error tunnel",
                    "packets to it arrive, as its daemon reports outside the tunnel",
                    "--dport 8472",
                ],
            ),
            (
                found_with(
                    [EchoResult::NotAllowed, EchoResult::NotAllowed],
                    segments(0, 5592, 1450, 1450),
                    0,
                ),
                [
                    "error segments",
                    "do not arrive there, while those from there arrive here",
                    "off # here",
                ],
            ),
            (
                found_with([none(), none()], None, 0),
                ["error tunnel", "blocked here, on the way or there", "--dport 8472"],
            ),
        ] {
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}\n{parts:?}");
        }
    }
}
