//! Echoes to peers: what is asked, and what the answers say.
//!
//! The one thing to know: no reply is no reply, and not yet a fault of the peer; which one of several addresses and sizes
//! is answered tells what is likely.

use std::net::IpAddr;

use flannel_core::{Dual, Family, Subnet};
use serde::Serialize;

use super::device::Devices;
use super::echo::{Answer, Probe};
use crate::preflight::Finding;

/// Enough for headers and a few bytes.
const SMALL: u16 = 64;

/// A peer.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    /// Of its lease.
    pub(crate) key: String,
    pub(crate) subnets: Vec<Subnet>,
    pub(crate) public: Dual<IpAddr>,
    /// Of its lease.
    pub(crate) backend: String,
    /// As the daemon sees it.
    pub(crate) state: String,
}

/// What is asked of a peer in one family. Each is asked for small and full size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) family: Family,
    /// Its tunnel's address, and how many bytes are full size; `None` without a tunnel.
    pub(crate) tunnel: Option<(IpAddr, u16)>,
    /// Its public address, and what a full packet takes on the wire.
    pub(crate) public: Option<(IpAddr, u16)>,
}

impl Target {
    /// What is to be asked; nothing before the size of packets is known.
    pub(crate) fn questions(&self, devices: &Devices) -> Vec<Question> {
        let Some(mtu) = devices.mtu.and_then(|mtu| u16::try_from(mtu).ok()) else { return Vec::new() };
        let question = |subnet: &Subnet| {
            let family = subnet.family();
            let tunnel = devices.tunnels[family].filter(|_| self.backend == "vxlan");
            // Less than an IP header, so it fits.
            let overhead = if tunnel.is_some() { devices.overhead(family) as u16 } else { 0 };
            Question {
                family,
                // The address that its device has, here as in Go flannel.
                tunnel: tunnel.map(|_| (subnet.base(), mtu)),
                public: self.public[family].map(|address| (address, mtu.saturating_add(overhead))),
            }
        };
        self.subnets.iter().map(question).collect()
    }
}

impl Question {
    /// Tunnel small and full, then public small and full, as far as there are such addresses.
    pub(crate) fn probes(&self) -> impl Iterator<Item = Probe> {
        let both = |(to, full)| [Probe { to, size: SMALL }, Probe { to, size: full }];
        self.tunnel.into_iter().chain(self.public).flat_map(both)
    }
}

/// What became of an address, for people and programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct AddressReport {
    pub(crate) address: String,
    pub(crate) small: EchoReport,
    pub(crate) full: EchoReport,
}

/// What became of one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct EchoReport {
    /// Of the whole IP packet, in bytes.
    pub(crate) size: u16,
    /// `reply`, `no reply`, `too big` or `not sent`.
    pub(crate) state: &'static str,
    /// How long the reply took.
    pub(crate) seconds: Option<f64>,
    /// How many bytes are taken, if that was said, or why it was not sent.
    pub(crate) detail: Option<String>,
}

impl EchoReport {
    pub(crate) fn new(probe: Probe, answer: &Answer) -> Self {
        let (state, seconds, detail) = match answer {
            Answer::Reply(took) => ("reply", Some((took.as_secs_f64() * 1e6).round() / 1e6), None),
            Answer::TooBig(most) => ("too big", None, most.map(|most| format!("at most {most} bytes pass"))),
            Answer::Nothing => ("no reply", None, None),
            Answer::NotSent(error) => ("not sent", None, Some(error.clone())),
        };
        Self { size: probe.size, state, seconds, detail }
    }
}

/// The answers to a question: small and full size of each address.
#[derive(Debug, Clone)]
pub(crate) struct Answers {
    pub(crate) tunnel: Option<[Answer; 2]>,
    pub(crate) public: Option<[Answer; 2]>,
}

/// What the answers say, if they say that something is wrong.
pub(crate) fn judge(key: &str, asked: &Question, answers: &Answers, port: Option<u16>) -> Option<Finding> {
    let replied = |answer: &Answer| matches!(answer, Answer::Reply(_));
    let public_replies = answers.public.as_ref().is_some_and(|[small, _]| replied(small));
    let public = asked.public.map(|(address, _)| address.to_string()).unwrap_or_default();
    let (address, full, [small, big]) = match (&asked.tunnel, &answers.tunnel, &asked.public, &answers.public)
    {
        (Some((address, full)), Some(answers), ..) => (address, full, answers),
        (_, _, Some((address, full)), Some(answers)) => (address, full, answers),
        _ => return None,
    };
    if let Answer::NotSent(error) = small {
        let text = format!("{address} of {key} cannot be asked: {error}");
        return Some(Finding::error("route", text).mend(format!("flannelctl why {address}")));
    }
    if !replied(small) && answers.tunnel.is_some() && public_replies {
        let port = port.unwrap_or(8472);
        let text = format!(
            "no reply from {address}, the tunnel address of {key}, while its public address {public} replies: UDP port \
             {port} may be blocked here, on the way or there, or flannel is not well there"
        );
        let program =
            if asked.public.is_some_and(|(address, _)| address.is_ipv6()) { "ip6tables" } else { "iptables" };
        return Some(
            Finding::error("tunnel", text)
                .mend(format!("{program} -I INPUT -p udp --dport {port} -j ACCEPT (on both)")),
        );
    }
    if !replied(small) {
        let neither = if answers.tunnel.is_some() && answers.public.is_some() {
            format!(", neither from its tunnel address {address} nor from its public address {public}")
        } else {
            format!(", at {address}")
        };
        let mend = format!("flannelctl lease release --force {key} (if that node is gone)");
        return Some(Finding::error("peer", format!("no reply from {key}{neither}")).mend(mend));
    }
    if !replied(big) {
        return Some(too_big(key, (*address, *full), big, answers));
    }
    cut_up(key, asked, answers)
}

/// What pods may send is lost.
fn too_big(key: &str, (address, full): (IpAddr, u16), answer: &Answer, answers: &Answers) -> Finding {
    let what = match answer {
        Answer::TooBig(Some(most)) => format!("are too big: at most {most} pass"),
        Answer::TooBig(None) => "are more than this host's own device takes".to_owned(),
        _ => "get no reply, while small ones do".to_owned(),
    };
    let text = format!("packets of {full} bytes, which pods may send, to {address} of {key} {what}");
    let passes = [Some(answer), answers.public.as_ref().map(|[_, big]| big)].into_iter().flatten();
    let most = passes.filter_map(|big| if let Answer::TooBig(most) = big { *most } else { None }).min();
    Finding::error("path-mtu", text).mend(match most {
        Some(most) => {
            format!("flannelctl config set FILE, with \"MTU\": {most} in the Backend of the config")
        }
        None => "flannelctl config set FILE, with the MTU of the path as \"MTU\" in the Backend".to_owned(),
    })
}

/// All arrives, but in pieces.
fn cut_up(key: &str, asked: &Question, answers: &Answers) -> Option<Finding> {
    let ((public, size), Some([_, Answer::TooBig(Some(most))])) = (asked.public?, &answers.public) else {
        return None;
    };
    let text = format!(
        "tunnel packets of {size} bytes to {public} of {key} are cut into pieces on the way, where at most {most} pass"
    );
    let mend = format!("flannelctl config set FILE, with \"MTU\": {most} in the Backend of the config");
    asked.tunnel.map(|_| Finding::warning("path-mtu", text).mend(mend))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn devices() -> Devices {
        Devices {
            tunnels: Dual { v4: Some("flannel.1".parse().unwrap()), v6: None },
            mtu: Some(1450),
            ..Devices::default()
        }
    }

    fn target(backend: &str) -> Target {
        Target {
            key: "10.1.7.0-24".into(),
            subnets: vec!["10.1.7.0/24".parse().unwrap()],
            public: Dual { v4: Some("192.0.2.7".parse().unwrap()), v6: None },
            backend: backend.into(),
            state: "in place".into(),
        }
    }

    #[test]
    fn sizes_are_what_pods_send_and_what_that_takes_on_the_wire() {
        let probes = |backend: &str, devices: &Devices| -> Vec<(String, u16)> {
            let questions = target(backend).questions(devices);
            questions.iter().flat_map(Question::probes).map(|p| (p.to.to_string(), p.size)).collect()
        };
        let all = |list: &[(&str, u16)]| list.iter().map(|(a, n)| ((*a).to_owned(), *n)).collect::<Vec<_>>();
        assert_eq!(
            probes("vxlan", &devices()),
            all(&[("10.1.7.0", 64), ("10.1.7.0", 1450), ("192.0.2.7", 64), ("192.0.2.7", 1500)])
        );
        let gateway = Devices { mtu: Some(1500), ..Devices::default() };
        assert_eq!(probes("host-gw", &gateway), all(&[("192.0.2.7", 64), ("192.0.2.7", 1500)]));
        assert_eq!(probes("vxlan", &Devices::default()), all(&[]), "what full size is is not known");
    }

    #[test]
    fn which_answers_are_missing_tells_what_is_likely() {
        let question = &target("vxlan").questions(&devices())[0];
        let ok = || Answer::Reply(Duration::from_millis(1));
        let (none, most) = (Answer::Nothing, |n| Answer::TooBig(Some(n)));
        let judge = |tunnel: [Answer; 2], public: [Answer; 2]| {
            let answers = Answers { tunnel: Some(tunnel), public: Some(public) };
            let found = judge("10.1.7.0-24", question, &answers, Some(8472));
            found.map(|f| format!("{} {} {} | {}", f.severity, f.check, f.text, f.mend.unwrap_or_default()))
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
                ["error peer", "no reply from 10.1.7.0-24, neither", "release --force 10.1.7.0-24"],
            ),
            (
                judge([ok(), none.clone()], [ok(), most(1400)]),
                ["error path-mtu", "get no reply", "\"MTU\": 1400"],
            ),
            (
                judge([ok(), none.clone()], [ok(), none.clone()]),
                ["error path-mtu", "1450 bytes", "MTU of the path"],
            ),
            (judge([ok(), Answer::TooBig(None)], [ok(), ok()]), ["error path-mtu", "own device", "MTU"]),
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
        let gateway = &target("host-gw").questions(&Devices { mtu: Some(1500), ..Devices::default() })[0];
        let answers = |small, big| Answers { tunnel: None, public: Some([small, big]) };
        let of = |answers| super::judge("10.1.7.0-24", gateway, &answers, None).map(|found| found.check);
        assert_eq!(of(answers(ok(), ok())), None);
        assert_eq!(of(answers(none.clone(), none.clone())).as_deref(), Some("peer"));
        assert_eq!(of(answers(ok(), most(1400))).as_deref(), Some("path-mtu"));
    }
}
