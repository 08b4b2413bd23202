//! The questions to a peer, and their answers for people and programs.
//!
//! A packet of full size through the tunnel is as large as pods may send. To the public address it is
//! as large as that takes on the wire.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use serde::Serialize;

use crate::device::Devices;
use crate::echo::{Answer, Probe};
use crate::path_probe::client::Segments;

/// Enough for headers and a few bytes.
const SMALL: u16 = 64;

/// A peer.
#[derive(Debug, Clone)]
pub struct Target {
    /// Of its lease.
    pub key: String,
    /// The subnets of its lease.
    pub subnets: Vec<Subnet>,
    /// The addresses that other nodes reach it by.
    pub public: Dual<IpAddr>,
    /// Of its lease.
    pub backend: String,
    /// As the daemon sees it.
    pub state: String,
}

/// What is asked of a peer in one family. Each is asked for small and full size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The family.
    pub family: Family,
    /// By which pods' packets go: this host's tunnel, or its external interface where there is
    /// none, or none is used.
    pub device: Option<LinkName>,
    /// What that takes, in bytes, where it could be read.
    pub takes: Option<u32>,
    /// Its tunnel's address, and how many bytes are full size; `None` without a tunnel.
    pub tunnel: Option<(IpAddr, u16)>,
    /// Its public address, and what a full packet takes on the wire.
    pub public: Option<(IpAddr, u16)>,
    /// How many bytes less than the network config's `MTU` pods are told, of either family: the
    /// largest header of the tunnels, also where their packets to this peer need none.
    pub header: u32,
}

impl Target {
    /// What is to be asked; nothing before the size of packets is known.
    pub fn questions(&self, devices: &Devices) -> Vec<Question> {
        let Some(mtu) = devices.mtu.and_then(|mtu| u16::try_from(mtu).ok()) else {
            return Vec::new();
        };
        let question = |subnet: &Subnet| {
            let family = subnet.family();
            let tunnel =
                devices.datapath.devices[family].filter(|_| self.backend == devices.backend);
            let largest = || Family::BOTH.into_iter().map(|family| devices.overhead(family)).max();
            let header = tunnel.and_then(|_| largest()).unwrap_or(0);
            // Less than two IP headers, so it fits.
            let overhead = tunnel.map_or(0, |_| devices.overhead(family)) as u16;
            Question {
                family,
                device: tunnel.or(devices.uplink),
                takes: tunnel.or(devices.uplink).and_then(|device| devices.takes(device)),
                // The address that its device has, here as in Go flannel.
                tunnel: tunnel.map(|_| (subnet.base(), mtu)),
                public: self.public[family].map(|address| (address, mtu.saturating_add(overhead))),
                header,
            }
        };
        self.subnets.iter().map(question).collect()
    }
}

impl Question {
    /// Whether pods' packets go by the tunnel.
    pub fn by_tunnel(&self, devices: &Devices) -> bool {
        self.device
            .is_some_and(|device| devices.datapath.devices.values().any(|tunnel| *tunnel == device))
    }

    /// The same of a peer on this host's link, to which packets go as they are (DirectRouting).
    pub fn direct(self, devices: &Devices) -> Self {
        let (device, full) = (devices.uplink, self.tunnel.map(|(_, full)| full));
        Self {
            device,
            takes: device.and_then(|device| devices.takes(device)),
            public: self.public.map(|(address, size)| (address, full.unwrap_or(size))),
            ..self
        }
    }

    /// Tunnel small and full, then public small and full, as far as there are such addresses.
    pub fn probes(&self) -> impl Iterator<Item = Probe> {
        let both = |(to, full)| [Probe { to, size: SMALL }, Probe { to, size: full }];
        self.tunnel.into_iter().chain(self.public).flat_map(both)
    }
}

/// What became of an address, for people and programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AddressReport {
    /// The address.
    pub address: String,
    /// An echo of a few bytes.
    pub small: EchoReport,
    /// An echo of full size.
    pub full: EchoReport,
}

/// What became of one size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EchoReport {
    /// Of the whole IP packet, in bytes.
    pub size: u16,
    /// `reply`, `no reply`, `too big`, `not sent` or `not asked`.
    pub state: &'static str,
    /// How long the reply took.
    pub seconds: Option<f64>,
    /// How many bytes are taken, if that was said, or why it was not sent.
    pub detail: Option<String>,
}

impl EchoReport {
    /// The report of one echo.
    pub fn new(probe: Probe, answer: &Answer) -> Self {
        let (state, seconds, detail) = match answer {
            Answer::Reply(took) => ("reply", Some((took.as_secs_f64() * 1e6).round() / 1e6), None),
            Answer::TooBig(most) => {
                ("too big", None, most.map(|most| format!("at most {most} bytes pass")))
            }
            Answer::Nothing => ("no reply", None, None),
            Answer::NotSent(error) => ("not sent", None, Some(error.clone())),
            Answer::NotAsked => ("not asked", None, None),
        };
        Self { size: probe.size, state, seconds, detail }
    }
}

/// What both ends report, for people and programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentsReport {
    /// `both ways`, `there only`, `back only`, `neither way`: which way segments of full size pass.
    pub passes: &'static str,
    #[serde(flatten)]
    /// What both ends report.
    pub segments: Segments,
}

impl SegmentsReport {
    /// The report of one connection.
    pub fn new(segments: &Segments) -> Self {
        let passes = match (segments.there.is_whole(), segments.back.is_whole()) {
            (true, true) => "both ways",
            (true, false) => "there only",
            (false, true) => "back only",
            (false, false) => "neither way",
        };
        Self { passes, segments: segments.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{devices, target};

    #[test]
    fn sizes_are_what_pods_send_and_what_that_takes_on_the_wire() {
        let probes = |backend: &str, devices: &Devices| -> Vec<(String, u16)> {
            let questions = target(backend).questions(devices);
            questions
                .iter()
                .flat_map(Question::probes)
                .map(|p| (p.to.to_string(), p.size))
                .collect()
        };
        let all = |list: &[(&str, u16)]| {
            list.iter().map(|(a, n)| ((*a).to_owned(), *n)).collect::<Vec<_>>()
        };
        assert_eq!(
            probes("vxlan", &devices()),
            all(&[("10.1.7.0", 64), ("10.1.7.0", 1450), ("192.0.2.7", 64), ("192.0.2.7", 1500)])
        );
        let gateway = Devices { mtu: Some(1500), ..Devices::default() };
        assert_eq!(probes("host-gw", &gateway), all(&[("192.0.2.7", 64), ("192.0.2.7", 1500)]));
        assert_eq!(
            probes("vxlan", &Devices::default()),
            all(&[]),
            "what full size is is not known"
        );
    }
}
