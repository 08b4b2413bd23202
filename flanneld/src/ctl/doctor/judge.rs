//! What the answers of a peer say, if they say that something is wrong.
//!
//! The one thing to know: no reply is no reply, and not yet a fault of the peer; which one of several addresses and sizes
//! is answered tells what is likely. Which way something is lost is said only where both ends report.

use std::net::IpAddr;

use super::echo::Answer;
use super::peers::Question;
use crate::preflight::Finding;
use crate::problems::release;
use crate::sounding::{Sounded, Sounding};

/// Every path takes packets of so many bytes, of IPv6 by rule.
///
/// **Source**: RFC 8200, section 5.
const LEAST: u32 = 1280;

/// What there is to judge, of one peer in one family.
#[derive(Debug, Clone, Default)]
pub(crate) struct Answers {
    /// To echoes of small and full size.
    pub(crate) tunnel: Option<[Answer; 2]>,
    pub(crate) public: Option<[Answer; 2]>,
    /// What the peer's daemon reports.
    pub(crate) sounding: Sounding,
    /// The largest echo that passes to the peers to whom full ones are lost, in bytes, if it was looked for.
    pub(crate) passes: Option<u16>,
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
}

/// Everything that is to be said of a peer in one family; `port` is the tunnels'.
pub(crate) fn judge(key: &str, asked: &Question, answers: &Answers, port: Option<u16>) -> Vec<Finding> {
    let (address, full, [small, big]) = match (&asked.tunnel, &answers.tunnel, &asked.public, &answers.public)
    {
        (Some((address, full)), Some(answers), ..) => (*address, *full, answers),
        (_, _, Some((address, full)), Some(answers)) => (*address, *full, answers),
        _ => return Vec::new(),
    };
    let case = Case { key, address, full, asked, answers };
    if let Answer::NotSent(error) = small {
        let text = format!("{address} of {key} cannot be asked: {error}");
        return vec![Finding::error("route", text).mend(format!("flannelctl why {address}"))];
    }
    let mut found = Vec::new();
    let sounded = &answers.sounding.segments;
    match (replied(small), replied(big), sounded) {
        // Without echoes only what both ends report counts.
        _ if *small == Answer::NotAsked => {
            found.extend(sounded.iter().filter_map(|sounded| case.lost(sounded)));
        }
        (false, _, None) => found.push(case.silent(port)),
        // Who answers no echo, but its doctor's port, only answers no echoes.
        (false, _, Some(sounded)) => found.extend(case.lost(sounded)),
        (true, false, _) => found.push(case.too_big(big)),
        (true, true, sounded) => {
            found.extend(case.cut_up());
            found.extend(sounded.iter().filter_map(|sounded| case.lost(sounded)));
        }
    }
    found.extend(sounded.iter().filter_map(|sounded| case.unequal(sounded)));
    found
}

fn replied(answer: &Answer) -> bool {
    matches!(answer, Answer::Reply(_))
}

impl Case<'_> {
    /// Nothing comes back.
    fn silent(&self, port: Option<u16>) -> Finding {
        let Self { key, address, answers, .. } = self;
        let public = self.asked.public.map(|(public, _)| public.to_string()).unwrap_or_default();
        let public_replies = answers.public.as_ref().is_some_and(|[small, _]| replied(small));
        if answers.tunnel.is_some() && public_replies {
            let port = port.unwrap_or(8472);
            let at = if answers.sounding.noticed > 0 { "here" } else { "on both hosts" };
            let likely = match answers.sounding.noticed {
                0 => format!(
                    "UDP port {port} may be blocked here, on the way or there, or flannel is not well there"
                ),
                _ => format!(
                    "what goes there arrives, its daemon says beside the tunnel, so that only what it sends is lost: UDP port \
                     {port} may be blocked on the way or here"
                ),
            };
            let text = format!(
                "no reply from {address}, the tunnel address of {key}, while its public address {public} replies: {likely}"
            );
            let ipv6 = self.asked.public.is_some_and(|(address, _)| address.is_ipv6());
            let program = if ipv6 { "ip6tables" } else { "iptables" };
            return Finding::error("tunnel", text)
                .mend(format!("{program} -I INPUT -p udp --dport {port} -j ACCEPT # {at}"));
        }
        let neither = if answers.tunnel.is_some() && answers.public.is_some() {
            format!(", neither from its tunnel address {address} nor from its public address {public}")
        } else {
            format!(", at {address}")
        };
        Finding::error("peer", format!("no reply from {key}{neither}")).mend(release(key))
    }

    /// What pods may send is lost.
    fn too_big(&self, answer: &Answer) -> Finding {
        let Self { key, address, full, answers, .. } = self;
        let told = answers.sounding.segments.as_ref().map_or(0, |sounded| sounded.heard);
        let heard = told.max(answers.sounding.noticed);
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
        let text = format!("packets of {full} bytes, which pods may send, to {address} of {key} {what}");
        let found = Finding::error("path-mtu", text);
        if let (Answer::TooBig(None), Some(device), true) =
            (answer, self.asked.device, self.own_device_is_less())
        {
            return found.mend(format!("ip link set {device} mtu {full}"));
        }
        let most = |answer: &Answer| if let Answer::TooBig(most) = answer { *most } else { None };
        let public = answers.public.as_ref().and_then(|[_, big]| most(big));
        let inner = most(answer).or_else(|| answers.passes.map(u32::from));
        let most = [inner.map(|inner| inner + self.overhead()), public].into_iter().flatten().min();
        found.mend(self.less(most))
    }

    fn own_device_is_less(&self) -> bool {
        self.asked.takes.is_some_and(|takes| takes < u32::from(self.full))
    }

    /// All arrives, but in pieces.
    fn cut_up(&self) -> Option<Finding> {
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
        Some(Finding::warning("path-mtu", text).mend(self.less(Some(*most))))
    }

    /// TCP suffers where echoes do not.
    fn lost(&self, sounded: &Sounded) -> Option<Finding> {
        let (which, at) = match (sounded.there.is_whole(), sounded.back.is_whole()) {
            (true, true) => return None,
            (false, true) => ("do not arrive there, while those from there arrive here", "here"),
            (true, false) => ("arrive there, while those from there do not arrive here", "there"),
            (false, false) => {
                ("do not arrive there, and those from there do not arrive here", "on both hosts")
            }
        };
        let device = self.asked.device?;
        let text = format!(
            "TCP segments of {} bytes to {} of {} {which}: a firewall drops them, or checksums are left to a network card \
             that does them wrongly",
            sounded.segment, self.address, self.key
        );
        Some(
            Finding::error("segments", text).mend(format!(
                "ethtool -K {device} tx-checksum-ip-generic off # {at}; else nft list ruleset"
            )),
        )
    }

    /// Pods of the two nodes are told different sizes.
    fn unequal(&self, sounded: &Sounded) -> Option<Finding> {
        let (here, there) = (u32::from(self.full), sounded.mtu);
        if here == there {
            return None;
        }
        let less = if here < there { "here" } else { "there" };
        let text = format!(
            "pods here may send {here} bytes, those of {} {there}: larger packets than both take are lost, the external \
             interface takes less {less}",
            self.key
        );
        let both = here.min(there) + self.overhead();
        Some(Finding::warning("mtu", text).mend(self.less(Some(both))))
    }

    /// What the tunnel costs on the wire, in bytes.
    fn overhead(&self) -> u32 {
        let (tunnel, public) =
            (self.asked.tunnel.map_or(0, |(_, size)| size), self.asked.public.map_or(0, |(_, size)| size));
        if self.asked.tunnel.is_some() { u32::from(public.saturating_sub(tunnel)) } else { 0 }
    }

    /// Makes pods send no more than so much, in bytes on the wire; of what is not known, what every path takes.
    fn less(&self, most: Option<u32>) -> String {
        let (most, remark) = match most {
            Some(most) => (most, ""),
            None => (LEAST + self.overhead(), "the MTU of the path, if it is known, is better"),
        };
        match (self.asked.tunnel, self.asked.device) {
            (None, Some(device)) => {
                let joint = if remark.is_empty() { "" } else { "; " };
                format!("ip link set {device} mtu {most} # on every node{joint}{remark}")
            }
            _ => {
                let remark = if remark.is_empty() { String::new() } else { format!(" # {remark}") };
                format!("flannelctl config patch '{{\"Backend\": {{\"MTU\": {most}}}}}'{remark}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::device::Devices;
    use super::super::peers::tests::{devices, target};
    use super::*;
    use crate::sounding::Passage;

    #[test]
    fn which_answers_are_missing_tells_what_is_likely() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || Answer::Reply(Duration::from_millis(1));
        let (none, most) = (Answer::Nothing, |n| Answer::TooBig(Some(n)));
        let judge = |tunnel: [Answer; 2], public: [Answer; 2]| {
            let answers = Answers { tunnel: Some(tunnel), public: Some(public), ..Answers::default() };
            let found = judge("10.1.7.0-24", question, &answers, Some(8472));
            assert!(found.len() <= 1, "{found:?}");
            found
                .into_iter()
                .next()
                .map(|f| format!("{} {} {} | {}", f.severity, f.check, f.text, f.mend.unwrap_or_default()))
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
                ["error peer", "no reply from 10.1.7.0-24, neither", "release --force '10.1.7.0-24'"],
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
                ["error route", "10.1.7.0 of 10.1.7.0-24 cannot be asked: x", "flannelctl why 10.1.7.0"],
            ),
        ] {
            let found = found.unwrap();
            assert!(parts.iter().all(|part| found.contains(part)), "{found}\n{parts:?}");
        }
        let uplink = Some("eth0".parse().unwrap());
        let devices = Devices { mtu: Some(1500), uplink, ..Devices::default() };
        let gateway = &target("host-gw").questions(&devices)[0];
        let answers = |small, big| Answers { public: Some([small, big]), ..Answers::default() };
        let of =
            |answers| super::judge("10.1.7.0-24", gateway, &answers, None).pop().map(|found| found.check);
        assert_eq!(of(answers(ok(), ok())), None);
        assert_eq!(of(answers(none.clone(), none.clone())).as_deref(), Some("peer"));
        assert_eq!(of(answers(ok(), most(1400))).as_deref(), Some("path-mtu"));
        // What was looked for is what is to be configured, with what the tunnel costs.
        let mend = |question: &Question, answers: &Answers| {
            super::judge("10.1.7.0-24", question, answers, None).pop().unwrap().mend.unwrap()
        };
        let lost = || [ok(), none.clone()];
        let answers = |tunnel, public| Answers { tunnel, public, passes: Some(1350), ..Answers::default() };
        assert_eq!(
            mend(question, &answers(Some(lost()), Some([ok(), ok()]))),
            r#"flannelctl config patch '{"Backend": {"MTU": 1400}}'"#
        );
        assert_eq!(mend(gateway, &answers(None, Some(lost()))), "ip link set eth0 mtu 1350 # on every node");
        let refused = || answers(Some([ok(), Answer::TooBig(None)]), Some([ok(), ok()]));
        assert!(mend(question, &refused()).ends_with(r#"'{"Backend": {"MTU": 1400}}'"#), "it remembers");
        let small = Question { takes: Some(1300), ..question.clone() };
        assert_eq!(mend(&small, &refused()), "ip link set flannel.1 mtu 1450");
    }

    #[test]
    fn a_direction_is_said_where_both_ends_report() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || Answer::Reply(Duration::from_millis(1));
        let passage = |arrived| Passage { sent: 5592, arrived };
        let sounded = |there, back, mtu, heard| {
            Some(Sounded { there: passage(there), back: passage(back), segment: 1398, mtu, heard })
        };
        let judge = |tunnel: [Answer; 2], segments, noticed| {
            let sounding = Sounding { noticed, segments };
            let answers =
                Answers { tunnel: Some(tunnel), public: Some([ok(), ok()]), sounding, passes: None };
            let found = judge("10.1.7.0-24", question, &answers, Some(8472));
            let line = |f: Finding| {
                format!("{} {} {} | {}", f.severity, f.check, f.text, f.mend.unwrap_or_default())
            };
            found.into_iter().map(line).collect::<Vec<_>>()
        };
        let none = || Answer::Nothing;
        assert_eq!(judge([ok(), ok()], sounded(5592, 5592, 1450, 1450), 0), [""; 0]);
        assert_eq!(judge([Answer::NotAsked, Answer::NotAsked], None, 0), [""; 0]);
        assert_eq!(
            judge([none(), none()], sounded(5592, 5592, 1450, 1450), 0),
            [""; 0],
            "only echoes are refused"
        );
        for (found, parts) in [
            (
                judge([ok(), ok()], sounded(0, 5592, 1450, 1450), 0),
                ["error segments", "do not arrive there, while those from there arrive here", "off # here"],
            ),
            (
                judge([ok(), ok()], sounded(5592, 4096, 1450, 1450), 0),
                ["error segments", "arrive there, while those from there do not", "off # there"],
            ),
            (
                judge([none(), none()], sounded(0, 0, 1450, 64), 0),
                ["error segments", "do not arrive there, and those", "off # on both"],
            ),
            (
                judge([ok(), none()], sounded(0, 5592, 1450, 64), 0),
                [
                    "error path-mtu",
                    "do not arrive there, while small ones do",
                    "\"MTU\": 1330}}' # the MTU of the path",
                ],
            ),
            (
                judge([ok(), none()], sounded(5592, 0, 1450, 1450), 0),
                [
                    "error path-mtu",
                    "arrive there, and are lost on the way back",
                    "\"MTU\": 1330}}' # the MTU of the path",
                ],
            ),
            (
                judge([ok(), Answer::TooBig(None)], sounded(5592, 5592, 1450, 1450), 1450),
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
                judge([ok(), none()], sounded(5592, 5592, 1450, 0), 0),
                ["error path-mtu", "get no reply", "\"MTU\": 1330}}' # the MTU of the path"],
            ),
            (
                judge([ok(), ok()], sounded(5592, 5592, 1350, 1450), 0),
                ["warning mtu", "pods here may send 1450 bytes, those of 10.1.7.0-24 1350", "\"MTU\": 1400"],
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
                judge([Answer::NotAsked, Answer::NotAsked], sounded(0, 5592, 1450, 1450), 0),
                ["error segments", "do not arrive there, while those from there arrive here", "off # here"],
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
