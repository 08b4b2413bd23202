//! The questions to a peer, and the reports of their answers.
//!
//! A packet of full size through the tunnel has the MTU of pods. A packet of full size to the
//! public address is as large as such a packet on the wire, with the tunnel's header.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::object::LinkName;
use serde::Serialize;

use crate::inputs::devices::Devices;
use crate::inputs::echo::{EchoResult, Probe};
use crate::inputs::network::Target;
use crate::path_probe::client::Segments;

/// A small packet, in bytes: headers and a few bytes.
const SMALL: u16 = 64;

/// A question to a peer in one family. Each address gets an echo of small and of full size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// The family.
    pub family: Family,
    /// The device for packets of pods: this host's tunnel, or its external interface if no tunnel
    /// is used.
    pub device: Option<LinkName>,
    /// The MTU of that device, in bytes; `None` if it could not be read.
    pub takes: Option<u32>,
    /// The peer's tunnel address, and the full size in bytes; `None` without a tunnel.
    pub tunnel: Option<(IpAddr, u16)>,
    /// The peer's public address, and the size of a full packet on the wire, in bytes.
    pub public: Option<(IpAddr, u16)>,
    /// The network config's `MTU` minus the MTU of pods, in bytes: the largest header of the
    /// tunnels of both families, also if packets to this peer need none.
    pub header: u32,
    /// The MTU that the daemon gave the route, in bytes, because larger packets are lost.
    pub route_mtu: Option<u32>,
}

impl Target {
    /// One question for each family. Empty if the MTU of pods is not known.
    pub fn questions(&self, devices: &Devices) -> Vec<Question> {
        let Some(mtu) = devices.mtu.and_then(|mtu| u16::try_from(mtu).ok()) else {
            return Vec::new();
        };
        self.subnets.iter().map(|subnet| self.question(devices, subnet, mtu)).collect()
    }

    /// The question about the pods in `subnet`. `mtu` is the MTU of pods.
    fn question(&self, devices: &Devices, subnet: &Subnet, mtu: u16) -> Question {
        let family = subnet.family();
        let tunnel = devices.datapath.devices[family].filter(|_| self.backend == devices.backend);
        let device = tunnel.or(devices.uplink);
        let mut header = 0;
        let mut overhead = 0;
        if tunnel.is_some() {
            header = devices.overhead(Family::V4).max(devices.overhead(Family::V6));
            // The overhead is less than two IP headers, so it fits.
            overhead = devices.overhead(family) as u16;
        }
        Question {
            family,
            device,
            takes: device.and_then(|device| devices.takes(device)),
            // The address of the tunnel device, as in Go flannel.
            tunnel: tunnel.map(|_| (subnet.base(), mtu)),
            public: self.public[family].map(|address| (address, mtu.saturating_add(overhead))),
            header,
            route_mtu: self.mtus[family],
        }
    }
}

impl Question {
    /// Whether packets of pods go through the tunnel.
    pub fn by_tunnel(&self, devices: &Devices) -> bool {
        self.device
            .is_some_and(|device| devices.datapath.devices.values().any(|tunnel| *tunnel == device))
    }

    /// The question to a peer on this host's link, which is reached without the tunnel
    /// (DirectRouting).
    pub fn direct(self, devices: &Devices) -> Self {
        let device = devices.uplink;
        let full = self.tunnel.map(|(_, full)| full);
        Self {
            device,
            takes: device.and_then(|device| devices.takes(device)),
            public: self.public.map(|(address, size)| (address, full.unwrap_or(size))),
            ..self
        }
    }

    /// Echoes of small and full size, to the tunnel address and then to the public address.
    pub fn probes(&self) -> impl Iterator<Item = Probe> {
        self.tunnel
            .into_iter()
            .chain(self.public)
            .flat_map(|(to, full)| [Probe { to, size: SMALL }, Probe { to, size: full }])
    }
}

/// The echoes to one address.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AddressReport {
    /// The address.
    pub address: String,
    /// The echo of small size.
    pub small: EchoReport,
    /// The echo of full size.
    pub full: EchoReport,
}

/// The answer to an echo.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EchoReport {
    /// The size of the whole IP packet, in bytes.
    pub size: u16,
    /// `reply`, `no reply`, `too big`, `not sent` or `not asked`.
    pub state: &'static str,
    /// The time until the reply.
    pub seconds: Option<f64>,
    /// The maximum size that passes, if known, or the reason that the echo was not sent.
    pub detail: Option<String>,
}

impl EchoReport {
    /// The report of one echo.
    pub fn new(probe: Probe, answer: &EchoResult) -> Self {
        let (state, seconds, detail) = match answer {
            EchoResult::Reply(took) => {
                ("reply", Some((took.as_secs_f64() * 1e6).round() / 1e6), None)
            }
            EchoResult::TooBig(most) => {
                ("too big", None, most.map(|most| format!("at most {most} bytes pass")))
            }
            EchoResult::Nothing => ("no reply", None, None),
            EchoResult::NotSent(error) => ("not sent", None, Some(error.clone())),
            EchoResult::NotAllowed => ("not asked", None, None),
        };
        Self { size: probe.size, state, seconds, detail }
    }
}

/// The report of both ends on segments of full size.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SegmentsReport {
    /// The directions in which they pass: `both ways`, `there only`, `back only`, `neither way`.
    pub passes: &'static str,
    /// The bytes that were sent and arrived.
    #[serde(flatten)]
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
    fn full_sizes_are_the_mtu_of_pods_with_and_without_the_tunnel_header() {
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
        assert_eq!(probes("vxlan", &Devices::default()), all(&[]), "the full size is not known");
    }
}
