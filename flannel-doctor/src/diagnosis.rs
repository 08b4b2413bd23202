//! Derives faults from the answers of a peer.
//!
//! No reply is not yet a fault of the peer. The addresses and sizes that are answered show the likely
//! cause. A direction is reported only where both ends report.

use std::net::IpAddr;

use flannel_api::Finding;
use flannel_core::backend::Inlet;

use crate::commands::release;
use crate::device::Devices;
use crate::echo::Answer;
use crate::mtu::{Fault, Narrow};
use crate::path_probe::client::{PathProbe, Segments};
use crate::peers::Question;

/// What there is to judge, of one peer in one family.
#[derive(Debug, Clone, Default)]
pub struct Answers {
    /// To echoes of small and full size.
    pub tunnel: Option<[Answer; 2]>,
    /// Of the tunnel address; `None`: it was not asked.
    pub public: Option<[Answer; 2]>,
    /// What the peer's daemon reports.
    pub path: PathProbe,
    /// The largest echo that passes where full ones are lost, in bytes, if it was looked for.
    pub passes: Option<u16>,
}

/// A peer and what was asked of it.
#[derive(Debug, Clone, Copy)]
struct Case<'a> {
    key: &'a str,
    /// The address that pods' packets go to: the tunnel's where there is one.
    address: IpAddr,
    /// The size of a full packet to it, in bytes.
    full: u16,
    asked: &'a Question,
    answers: &'a Answers,
    devices: &'a Devices,
}

/// Everything that is to be said of a peer in one family.
pub fn diagnose(key: &str, asked: &Question, answers: &Answers, devices: &Devices) -> Vec<Fault> {
    let (address, full, [small, big]) =
        match (&asked.tunnel, &answers.tunnel, &asked.public, &answers.public) {
            (Some((address, full)), Some(answers), ..) => (*address, *full, answers),
            (_, _, Some((address, full)), Some(answers)) => (*address, *full, answers),
            _ => return Vec::new(),
        };
    let case = Case { key, address, full, asked, answers, devices };
    if let Answer::NotSent(error) = small {
        let text = format!("{address} of {key} cannot be asked: {error}");
        return vec![
            Finding::error("route", text).with_command(format!("flannelctl why {address}")).into(),
        ];
    }
    let mut found: Vec<Fault> = Vec::new();
    let segments = &answers.path.segments;
    match (replied(small), replied(big), segments) {
        // Without echoes only what both ends report counts.
        _ if *small == Answer::NotAsked => {
            found.extend(
                segments.iter().filter_map(|segments| case.lost(segments)).map(Fault::from),
            );
        }
        (false, _, None) => found.push(case.silent().into()),
        // Who answers no echo, but its doctor's port, only answers no echoes.
        (false, _, Some(segments)) => found.extend(case.lost(segments).map(Fault::from)),
        (true, false, _) => found.push(case.too_big(big)),
        (true, true, segments) => {
            found.extend(case.cut_up());
            found.extend(
                segments.iter().filter_map(|segments| case.lost(segments)).map(Fault::from),
            );
        }
    }
    found.extend(segments.iter().filter_map(|segments| case.unequal(segments)));
    found
}

fn replied(answer: &Answer) -> bool {
    matches!(answer, Answer::Reply(_))
}

impl Case<'_> {
    /// Nothing comes back.
    fn silent(&self) -> Finding {
        let Self { key, address, answers, .. } = self;
        let public = self.asked.public.map(|(public, _)| public.to_string()).unwrap_or_default();
        let public_replies = answers.public.as_ref().is_some_and(|[small, _]| replied(small));
        if answers.tunnel.is_some() && public_replies {
            let inlet = self.devices.datapath.inlets.first();
            let what = inlet.map_or_else(|| "the tunnel".to_owned(), ToString::to_string);
            let at = if answers.path.noticed > 0 { "here" } else { "on both hosts" };
            let likely = match answers.path.noticed {
                0 => format!(
                    "{what} may be blocked here, on the way or there, or flannel is not well there"
                ),
                _ => format!(
                    "what goes there arrives, its daemon says beside the tunnel, so that only what it sends is lost: \
                     {what} may be blocked on the way or here"
                ),
            };
            let text = format!(
                "no reply from {address}, the tunnel address of {key}, while its public address {public} replies: {likely}"
            );
            let ipv6 = self.asked.public.is_some_and(|(address, _)| address.is_ipv6());
            let program = if ipv6 { "ip6tables" } else { "iptables" };
            let packets = match inlet {
                Some(Inlet::Udp(port)) => format!("udp --dport {port}"),
                Some(Inlet::Protocol(number)) => number.to_string(),
                _ => return Finding::error("tunnel", text),
            };
            return Finding::error("tunnel", text)
                .with_command(format!("{program} -I INPUT -p {packets} -j ACCEPT # {at}"));
        }
        let neither = if answers.tunnel.is_some() && answers.public.is_some() {
            format!(
                ", neither from its tunnel address {address} nor from its public address {public}"
            )
        } else {
            format!(", at {address}")
        };
        Finding::error("peer", format!("no reply from {key}{neither}")).with_command(release(key))
    }

    /// What pods may send is lost.
    fn too_big(&self, answer: &Answer) -> Fault {
        let Self { key, address, full, answers, .. } = self;
        let told = answers.path.segments.as_ref().map_or(0, |segments| segments.heard);
        let heard = told.max(answers.path.noticed);
        let what = match answer {
            Answer::TooBig(Some(most)) => format!("are too big: at most {most} pass"),
            Answer::TooBig(None) if self.own_device_is_less() => {
                "are more than this host's own device takes".to_owned()
            }
            // Somebody has told it before.
            Answer::TooBig(None) => match answers.passes {
                Some(most) => format!("are too big: at most {most} pass"),
                None => "are too big for the way, as this host knows".to_owned(),
            },
            _ if heard >= *full => {
                "arrive there, and are lost on the way back, where small ones pass".to_owned()
            }
            _ if heard > 0 => "do not arrive there, while small ones do".to_owned(),
            _ => "get no reply, while small ones do".to_owned(),
        };
        let text =
            format!("packets of {full} bytes, which pods may send, to {address} of {key} {what}");
        let found = Finding::error("path-mtu", text);
        if let (Answer::TooBig(None), Some(device), Some(takes), true) =
            (answer, self.asked.device, self.asked.takes, self.own_device_is_less())
        {
            // Ours to set; the external interface may have been given what it takes on purpose.
            return match self.asked.by_tunnel(self.devices) {
                true => found.with_command(format!("ip link set {device} mtu {full}")).into(),
                false => Fault::new(found, Narrow::Uplink { takes, needed: u32::from(*full) }),
            };
        }
        let most = |answer: &Answer| if let Answer::TooBig(most) = answer { *most } else { None };
        let inner = most(answer).or_else(|| answers.passes.map(u32::from));
        let public = answers.public.as_ref().and_then(|[_, big]| most(big));
        self.narrow(found, inner, public)
    }

    fn own_device_is_less(&self) -> bool {
        self.asked.takes.is_some_and(|takes| takes < u32::from(self.full))
    }

    /// All arrives, but in pieces.
    fn cut_up(&self) -> Option<Fault> {
        let ((public, size), Some([_, Answer::TooBig(Some(most))])) =
            (self.asked.public?, &self.answers.public)
        else {
            return None;
        };
        self.answers.tunnel.as_ref()?;
        let text = format!(
            "tunnel packets of {size} bytes to {public} of {} are cut into pieces on the way, where at most {most} pass",
            self.key
        );
        Some(self.narrow(Finding::warning("path-mtu", text), None, Some(*most)))
    }

    /// TCP suffers where echoes do not.
    fn lost(&self, segments: &Segments) -> Option<Finding> {
        let (which, at) = match (segments.there.is_whole(), segments.back.is_whole()) {
            (true, true) => return None,
            (false, true) => ("do not arrive there, while those from there arrive here", "here"),
            (true, false) => ("arrive there, while those from there do not arrive here", "there"),
            (false, false) => {
                ("do not arrive there, and those from there do not arrive here", "on both hosts")
            }
        };
        let device = self.asked.device?;
        let mend = match self.asked.by_tunnel(self.devices) {
            true => format!("ethtool -K {device} tx-checksum-ip-generic off # {at}"),
            // Of cards some features are fixed; this turns off those that are not.
            false if at == "here" => format!("ethtool -K {device} tx off # {at}"),
            false => format!(
                "ethtool -K {device} tx off # {at}, where the interface may have another name"
            ),
        };
        let text = format!(
            "TCP segments of {} bytes to {} of {} {which}: a firewall drops them, or checksums are left to a network card \
             that does them wrongly",
            segments.segment, self.address, self.key
        );
        Some(
            Finding::error("segments", text).with_command(format!("{mend}; else nft list ruleset")),
        )
    }

    /// Pods of the two nodes are told different sizes.
    fn unequal(&self, segments: &Segments) -> Option<Fault> {
        let (here, there) = (u32::from(self.full), segments.mtu);
        if here == there {
            return None;
        }
        let less = if here < there { "here" } else { "there" };
        let text = format!(
            "pods here may send {here} bytes, those of {} {there}: larger packets than both take are lost, the external \
             interface takes less {less}",
            self.key
        );
        let takes = Some(here.min(there) + self.asked.header);
        Some(Fault::new(Finding::warning("mtu", text), Narrow::Way { to: self.way(), takes }))
    }

    /// Where full packets go on the wire.
    fn way(&self) -> IpAddr {
        self.asked.public.map_or(self.address, |(address, _)| address)
    }

    /// A fault of a way by which pods' packets of at most `inner` bytes pass, or packets on the
    /// wire of at most `wire`.
    fn narrow(&self, finding: Finding, inner: Option<u32>, wire: Option<u32>) -> Fault {
        let Question { tunnel, public, header, .. } = self.asked;
        let costs = match (tunnel, public) {
            (Some((_, inner)), Some((_, wire))) => u32::from(wire.saturating_sub(*inner)),
            _ => 0,
        };
        // What a tunnel's packet takes on the wire is what the config's MTU is.
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
    use crate::fixture::{devices, target};
    use crate::mtu::settle;
    use crate::path_probe::client::Passage;

    /// What is said of one peer alone.
    fn told(question: &Question, answers: &Answers, devices: &Devices) -> Vec<Finding> {
        settle(diagnose("10.1.7.0-24", question, answers, devices), devices, &[Family::V4])
    }

    #[test]
    fn which_answers_are_missing_tells_what_is_likely() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || Answer::Reply(Duration::from_millis(1));
        let (none, most) = (Answer::Nothing, |n| Answer::TooBig(Some(n)));
        let judge = |tunnel: [Answer; 2], public: [Answer; 2]| {
            let answers =
                Answers { tunnel: Some(tunnel), public: Some(public), ..Answers::default() };
            let found = told(question, &answers, &devices());
            assert!(found.len() <= 1, "{found:?}");
            found.into_iter().next().map(|f| {
                format!("{} {} {} | {}", f.severity, f.check, f.text, f.repair.unwrap_or_default())
            })
        };
        assert_eq!(judge([ok(), ok()], [ok(), ok()]), None);
        assert_eq!(
            judge([ok(), ok()], [none.clone(), none.clone()]),
            None,
            "who answers no echo is no fault"
        );
        for (found, parts) in [
            (
                judge([none.clone(), none.clone()], [ok(), ok()]),
                ["error tunnel", "UDP port 8472", "--dport 8472"],
            ),
            (
                judge([none.clone(), none.clone()], [none.clone(), none.clone()]),
                [
                    "error peer",
                    "no reply from 10.1.7.0-24, neither",
                    "release --force '10.1.7.0-24'",
                ],
            ),
            (
                judge([ok(), none.clone()], [ok(), most(1400)]),
                ["error path-mtu", "get no reply", "\"MTU\": 1400"],
            ),
            (
                judge([ok(), none.clone()], [ok(), none.clone()]),
                ["error path-mtu", "get no reply", "\"MTU\": 1330}}' # the MTU of the path"],
            ),
            (
                judge([ok(), Answer::TooBig(None)], [ok(), ok()]),
                ["error path-mtu", "are too big for the way, as this host knows", "\"MTU\": 1330"],
            ),
            (
                judge([ok(), ok()], [ok(), most(1400)]),
                ["warning path-mtu", "cut into pieces", "\"MTU\": 1400"],
            ),
            (
                judge([Answer::NotSent("x".into()), none.clone()], [ok(), ok()]),
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
        // What was looked for is what is to be configured, with what the tunnel costs.
        let mend = |question: &Question, answers: &Answers, devices: &Devices| {
            told(question, answers, devices).pop().unwrap().repair.unwrap()
        };
        let lost = || [ok(), none.clone()];
        let answers =
            |tunnel, public| Answers { tunnel, public, passes: Some(1350), ..Answers::default() };
        assert_eq!(
            mend(question, &answers(Some(lost()), Some([ok(), ok()])), &devices()),
            r#"flannelctl config patch '{"Backend": {"MTU": 1400}}'"#
        );
        let refused = || answers(Some([ok(), Answer::TooBig(None)]), Some([ok(), ok()]));
        assert!(
            mend(question, &refused(), &devices()).ends_with(r#"'{"Backend": {"MTU": 1400}}'"#),
            "it remembers"
        );
        let small = Question { takes: Some(1300), ..question.clone() };
        assert_eq!(mend(&small, &refused(), &devices()), "ip link set flannel.1 mtu 1450");
    }

    fn uplink(tunnels: Dual<flannel_core::object::LinkName>) -> Devices {
        let mut devices = Devices { uplink: Some("eth0".parse().unwrap()), ..devices() };
        devices.datapath.devices = tunnels;
        devices
    }

    #[test]
    fn without_a_tunnel_the_external_interface_is_what_matters() {
        let ok = || Answer::Reply(Duration::from_millis(1));
        let bare = uplink(Default::default());
        let question = &target("host-gw").questions(&bare)[0];
        let answers =
            |full, passes| Answers { public: Some([ok(), full]), passes, ..Answers::default() };
        assert_eq!(told(question, &answers(ok(), None), &bare), []);
        let silent =
            Answers { public: Some([Answer::Nothing, Answer::Nothing]), ..Answers::default() };
        assert_eq!(told(question, &silent, &bare)[0].check, "peer");
        let mend = |question: &Question, answers: Answers, devices: &Devices| {
            told(question, &answers, devices).pop().unwrap().repair.unwrap()
        };
        for answers in
            [answers(Answer::TooBig(Some(1350)), None), answers(Answer::Nothing, Some(1350))]
        {
            let mend = mend(question, answers, &bare);
            assert!(
                mend.starts_with("ip link set eth0 mtu 1350 # on every node, unless the link"),
                "{mend}"
            );
            assert!(
                mend.contains("tracepath -n 192.0.2.7") && mend.contains("MTUBytes=1350"),
                "{mend}"
            );
        }
        let guess = mend(question, answers(Answer::Nothing, None), &bare);
        assert!(
            guess.starts_with("tracepath -n 192.0.2.7 #"),
            "no interface is set by a guess: {guess}"
        );
        // Whoever lowered it may have meant it.
        let lowered = Question { takes: Some(1400), ..question.clone() };
        let mended = mend(&lowered, answers(Answer::TooBig(None), None), &bare);
        assert!(
            mended.starts_with("systemctl restart flanneld #") && mended.contains("eth0 mtu 1450"),
            "{mended}"
        );

        // DirectRouting: by the external interface to this peer, and still it is the network
        // config's to lower.
        let direct_devices = uplink(devices().datapath.devices);
        let direct = target("vxlan").questions(&direct_devices).remove(0).direct(&direct_devices);
        assert_eq!((direct.device, direct.public.unwrap().1), (direct_devices.uplink, 1450));
        let lossy = |most| Answers { tunnel: Some([ok(), most]), ..answers(ok(), None) };
        let patched = mend(&direct, lossy(Answer::TooBig(Some(1400))), &direct_devices);
        assert!(patched.contains("\"MTU\": 1450"), "pods send 50 bytes less: {patched}");
        let lowered = Question { takes: Some(1420), ..direct.clone() };
        let patched = mend(&lowered, lossy(Answer::TooBig(None)), &direct_devices);
        assert!(
            patched.contains("\"MTU\": 1420}}' # if eth0 takes so little by mistake"),
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
                    heard: 1450,
                };
                let path = PathProbe { noticed: 1450, segments: Some(segments) };
                let answers = Answers {
                    tunnel: question.tunnel.map(|_| [ok(), ok()]),
                    path,
                    ..answers(ok(), None)
                };
                let mend = mend(question, answers, devices);
                assert!(mend.starts_with(expected), "{mend}");
            }
        }
    }

    /// Pods are told one size for both families, the one that IPv6 leaves.
    #[test]
    fn in_dual_stack_a_size_that_pods_are_told_is_that_of_ipv6() {
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
        let ok = || Answer::Reply(Duration::from_millis(1));
        let passage = Passage { sent: 5120, arrived: 5120 };
        // There the underlay takes 1350 bytes, the least that does, or 1400.
        for (there, mtu) in [(1280, 1350), (1330, 1400)] {
            for question in &questions {
                let segments = Segments {
                    there: passage,
                    back: passage,
                    segment: 1280,
                    mtu: there,
                    heard: 1430,
                };
                let path = PathProbe { noticed: 0, segments: Some(segments) };
                let both = || Some([ok(), ok()]);
                let answers = Answers { tunnel: both(), public: both(), path, passes: None };
                let faults = diagnose("10.1.7.0-24", question, &answers, &devices);
                let found = settle(faults, &devices, &Family::BOTH);
                let patch =
                    format!("flannelctl config patch '{{\"Backend\": {{\"MTU\": {mtu}}}}}'");
                assert_eq!(found.len(), 1);
                assert_eq!(found[0].repair.as_deref(), Some(&*patch), "{:?}", question.family);
                assert!(!found[0].text.contains("too few"), "{}", found[0].text);
            }
            // The same told by the way: what passes in the tunnel, or on the wire.
            for (question, overhead) in questions.iter().zip([50, 70]) {
                let lost = |most| Some([ok(), most]);
                let inner = mtu - overhead;
                for (tunnel, public, passes) in [
                    (Answer::Nothing, ok(), u16::try_from(inner).ok()),
                    (Answer::TooBig(Some(inner)), ok(), None),
                    (Answer::Nothing, Answer::TooBig(Some(mtu)), None),
                ] {
                    let answers = Answers {
                        tunnel: lost(tunnel),
                        public: lost(public),
                        passes,
                        ..Answers::default()
                    };
                    let found = settle(
                        diagnose("10.1.7.0-24", question, &answers, &devices),
                        &devices,
                        &Family::BOTH,
                    );
                    let mend = found[0].repair.as_deref().unwrap();
                    assert!(mend.ends_with(&format!("\"MTU\": {mtu}}}}}'")), "{mend}");
                }
            }
        }
    }

    #[test]
    fn a_direction_is_said_where_both_ends_report() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || Answer::Reply(Duration::from_millis(1));
        let passage = |arrived| Passage { sent: 5592, arrived };
        let segments = |there, back, mtu, heard| {
            Some(Segments { there: passage(there), back: passage(back), segment: 1398, mtu, heard })
        };
        let judge = |tunnel: [Answer; 2], segments, noticed| {
            let path = PathProbe { noticed, segments };
            let answers =
                Answers { tunnel: Some(tunnel), public: Some([ok(), ok()]), path, passes: None };
            let found = told(question, &answers, &devices());
            let line = |f: Finding| {
                format!("{} {} {} | {}", f.severity, f.check, f.text, f.repair.unwrap_or_default())
            };
            found.into_iter().map(line).collect::<Vec<_>>()
        };
        let none = || Answer::Nothing;
        assert_eq!(judge([ok(), ok()], segments(5592, 5592, 1450, 1450), 0), [""; 0]);
        assert_eq!(judge([Answer::NotAsked, Answer::NotAsked], None, 0), [""; 0]);
        assert_eq!(
            judge([none(), none()], segments(5592, 5592, 1450, 1450), 0),
            [""; 0],
            "only echoes are refused"
        );
        for (found, parts) in [
            (
                judge([ok(), ok()], segments(0, 5592, 1450, 1450), 0),
                [
                    "error segments",
                    "do not arrive there, while those from there arrive here",
                    "off # here",
                ],
            ),
            (
                judge([ok(), ok()], segments(5592, 4096, 1450, 1450), 0),
                ["error segments", "arrive there, while those from there do not", "off # there"],
            ),
            (
                judge([none(), none()], segments(0, 0, 1450, 64), 0),
                ["error segments", "do not arrive there, and those", "off # on both"],
            ),
            (
                judge([ok(), none()], segments(0, 5592, 1450, 64), 0),
                [
                    "error path-mtu",
                    "do not arrive there, while small ones do",
                    "\"MTU\": 1330}}' # the MTU of the path",
                ],
            ),
            (
                judge([ok(), none()], segments(5592, 0, 1450, 1450), 0),
                [
                    "error path-mtu",
                    "arrive there, and are lost on the way back",
                    "\"MTU\": 1330}}' # the MTU of the path",
                ],
            ),
            (
                judge([ok(), Answer::TooBig(None)], segments(5592, 5592, 1450, 1450), 1450),
                ["error path-mtu", "are too big for the way, as this host knows", "\"MTU\": 1330"],
            ),
            (
                judge([ok(), none()], None, 1450),
                [
                    "error path-mtu",
                    "arrive there, and are lost on the way back",
                    "\"MTU\": 1330}}' # the MTU of the path",
                ],
            ),
            (
                judge([ok(), none()], segments(5592, 5592, 1450, 0), 0),
                ["error path-mtu", "get no reply", "\"MTU\": 1330}}' # the MTU of the path"],
            ),
            (
                judge([ok(), ok()], segments(5592, 5592, 1350, 1450), 0),
                [
                    "warning mtu",
                    "pods here may send 1450 bytes, those of 10.1.7.0-24 1350",
                    "\"MTU\": 1400",
                ],
            ),
            (
                judge([none(), none()], None, 80),
                [
                    "error tunnel",
                    "what goes there arrives, its daemon says beside the tunnel",
                    "--dport 8472",
                ],
            ),
            (
                judge([Answer::NotAsked, Answer::NotAsked], segments(0, 5592, 1450, 1450), 0),
                [
                    "error segments",
                    "do not arrive there, while those from there arrive here",
                    "off # here",
                ],
            ),
            (
                judge([none(), none()], None, 0),
                ["error tunnel", "blocked here, on the way or there", "--dport 8472"],
            ),
        ] {
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(parts.iter().all(|part| found[0].contains(part)), "{found:?}\n{parts:?}");
        }
    }
}
