//! Examines a network: devices first, then peers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::{Client, Finding};
use flannel_core::address::Family;
use flannel_core::backend::Datapath;
use flannel_core::kernel::RouteAnswer;
use flannel_core::object::LinkName;
use flannel_netlink::NetlinkKernel;
use serde::Serialize;

use crate::commands::localize_findings;
use crate::device::{self, Devices};
use crate::diagnosis::{Answers, diagnose};
use crate::host::HostReport;
use crate::inputs::{PeerAnswers, ask};
use crate::mtu::{Fault, settle};
use crate::peers::{AddressReport, EchoReport, Question, SegmentsReport, Target};
use crate::summary::bounded;
use crate::why::lookup;

/// One layer, as it is found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Its name.
    pub layer: &'static str,
    /// `ok`, `finding` or `not known`.
    pub state: &'static str,
    /// What was read there.
    pub text: String,
}

/// A peer, and what became of the echoes.
#[derive(Debug, Serialize)]
pub struct PeerReport {
    /// The key of its lease.
    pub key: String,
    /// The subnets of its lease.
    pub subnets: Vec<String>,
    /// Its state, as the daemon reports it.
    pub state: String,
    /// One for each family that was asked.
    pub echoes: Vec<FamilyReport>,
}

/// The echoes of one family.
#[derive(Debug, Serialize)]
pub struct FamilyReport {
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Echoes to its tunnel address.
    pub tunnel: Option<AddressReport>,
    /// Echoes to its public address.
    pub public: Option<AddressReport>,
    /// What both ends report; `null`: no daemon of ours answers there.
    pub segments: Option<SegmentsReport>,
    /// The largest packet through the tunnel that it acknowledges beside it, in bytes; 0: none.
    pub noticed: u16,
}

/// Everything that was found.
#[derive(Debug, Default)]
pub struct Examination {
    /// In the order in which they were examined.
    pub layers: Vec<Layer>,
    /// What is wrong.
    pub faults: Vec<Fault>,
    /// Those that were asked.
    pub peers: Vec<PeerReport>,
}

impl Examination {
    /// A layer, with what is wrong there.
    pub fn layer(&mut self, layer: &'static str, text: impl Into<String>, faults: Vec<Fault>) {
        let state = if faults.is_empty() { "ok" } else { "finding" };
        self.layers.push(Layer { layer, state, text: text.into() });
        self.faults.extend(faults);
    }

    /// What of this host stands in the way, as far as it could be looked at.
    pub fn host(&mut self, look: HostReport) {
        let HostReport { findings, unread } = look;
        let faults: Vec<Fault> = findings.into_iter().map(Fault::from).collect();
        if !faults.is_empty() {
            self.layer("host", "something stands in the way", faults);
        } else if unread.is_empty() {
            self.layer("host", "nothing stands in the way", faults);
        }
        if !unread.is_empty() {
            self.unknown("host", unread.join(", "));
        }
    }

    /// A layer that cannot be read.
    pub fn unknown(&mut self, layer: &'static str, text: impl Into<String>) {
        self.layers.push(Layer { layer, state: "not known", text: text.into() });
    }
}

/// The network to examine, as the daemon describes it, or without a daemon the store and the
/// kernel.
#[derive(Debug, Clone, Default)]
pub struct Network {
    /// The daemon runs.
    pub daemon: bool,
    /// Where the daemon's leases are kept.
    pub store: Option<String>,
    /// It is known which devices there should be.
    pub known: bool,
    /// The backend type in the leases of this node's backend.
    pub backend: String,
    /// How packets of pods travel.
    pub datapath: Datapath,
    /// The external interface.
    pub uplink: Option<LinkName>,
    /// What pods may send, in bytes.
    pub mtu: Option<u32>,
    /// The other nodes.
    pub targets: Vec<Target>,
}

impl Network {
    /// The families that pods have addresses of, as tunnels show, or peers where there are none.
    pub fn families(&self) -> Vec<Family> {
        let of_peers =
            |family| self.targets.iter().flat_map(|t| &t.subnets).any(|s| s.family() == family);
        let has = |family: &Family| match self.datapath.devices.is_empty() {
            true => of_peers(*family),
            false => self.datapath.devices[*family].is_some(),
        };
        Family::BOTH.into_iter().filter(has).collect()
    }
}

/// Which peers are asked, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeOptions {
    /// At most so many peers are asked, those in trouble first.
    pub peers: usize,
    /// The port on which daemons of peers answer; 0: they are not asked.
    pub doctor_port: u16,
}

/// Examines devices and peers, and returns all findings, errors first: those of the examination so
/// far too. Without a client for a daemon the kernel tells which way packets take.
pub async fn examine(
    network: &Network,
    client: Option<&Client>,
    options: &ProbeOptions,
    examination: &mut Examination,
) -> Vec<Finding> {
    let devices = look_at_devices(network, examination).await;
    look_at_peers(client, network, &devices, options, examination).await;
    let faults = std::mem::take(&mut examination.faults);
    let mut found = settle(faults, &devices, &network.families());
    localize_findings(&mut found, network.store.as_deref());
    found.sort_by_key(|finding| !finding.is_error());
    found
}

async fn look_at_devices(network: &Network, examination: &mut Examination) -> Devices {
    let asked = network.clone();
    let read = tokio::task::spawn_blocking(move || device::read(&asked)).await;
    let devices = read.unwrap_or_default();
    if !network.known {
        examination
            .unknown("device", "without a network config nobody knows which there should be");
        return devices;
    }
    let there = devices
        .datapath
        .devices
        .values()
        .filter_map(|name| devices.links.iter().find(|link| link.name == *name));
    let mut texts: Vec<String> =
        there.map(|link| format!("{} ({} bytes)", link.name, link.mtu)).collect();
    if !devices.links.is_empty() {
        texts.extend(devices.datapath.inlets.iter().map(ToString::to_string));
    }
    if devices.checksums_matter() && devices.offloaded.is_none() {
        texts.push(
            "not known whether checksums are offloaded, which this kernel does wrongly: install ethtool"
                .into(),
        );
    }
    if texts.is_empty() {
        texts.push(
            if devices.datapath.devices.is_empty() { "none is needed" } else { "none is there" }
                .to_owned(),
        );
    }
    examination.layer("device", texts.join(", "), device::check(&devices));
    devices
}

async fn look_at_peers(
    client: Option<&Client>,
    network: &Network,
    devices: &Devices,
    options: &ProbeOptions,
    examination: &mut Examination,
) {
    let mut targets: Vec<&Target> =
        network.targets.iter().filter(|target| target.state != "rejected").collect();
    // Stable: those in trouble first, each by subnet.
    targets.sort_by_key(|target| target.state == "in place");
    let all = targets.len();
    targets.truncate(options.peers);
    if targets.is_empty() && !network.known {
        return examination.unknown("peers", "nobody could say which there are");
    }
    if targets.is_empty() {
        return examination.layer(
            "peers",
            if all == 0 { "there are none" } else { "none was asked" },
            Vec::new(),
        );
    }
    let mut shadowed = BTreeMap::new();
    for target in &targets {
        if let Some(finding) = route_fault(client, devices, target).await {
            shadowed.insert(target.key.clone(), finding);
        }
    }
    let mut questions: Vec<(&Target, Vec<Question>)> = Vec::new();
    for target in targets {
        questions.push((target, questions_to(target, devices).await));
    }
    let (asked, mute) = match ask(&questions, devices, network.datapath.bare, options.doctor_port)
        .await
    {
        Ok(asked) => asked,
        Err(why) => {
            examination.faults.extend(bounded(shadowed.into_values().map(Fault::from).collect()));
            return examination.unknown("peers", why);
        }
    };
    let mut found = Vec::new();
    let mut asked = asked.into_iter();
    for (target, questions) in &questions {
        let (report, faults) = peer_report(target, questions, &mut asked, devices);
        examination.peers.push(report);
        // A route that leads elsewhere explains what is not answered.
        found.extend(shadowed.remove(&target.key).map_or(faults, |finding| vec![finding.into()]));
    }
    let text = match all == questions.len() {
        true => format!("{all} asked"),
        false => format!("{} of {all} asked: --peers {all} asks all", questions.len()),
    };
    examination.layer("peers", text, bounded(found));
    if let Some(why) = mute {
        examination.unknown("peers", why);
    }
}

/// What is to be asked of a peer, by the way that packets to it take.
async fn questions_to(target: &Target, devices: &Devices) -> Vec<Question> {
    let mut questions = target.questions(devices);
    for question in &mut questions {
        if let Some((address, _)) = question.tunnel
            && let Some(answer) = way(address).await
            && is_direct(devices, target, address, &answer)
        {
            *question = question.clone().direct(devices);
        }
    }
    questions
}

/// Where the kernel sends packets for an address, if it can be asked.
async fn way(address: IpAddr) -> Option<RouteAnswer> {
    lookup(Arc::new(NetlinkKernel::open().ok()?), address).await.ok()
}

/// Whether it sends them straight to the peer, as DirectRouting does.
fn is_direct(devices: &Devices, target: &Target, address: IpAddr, answer: &RouteAnswer) -> bool {
    answer.link.is_some()
        && answer.link == devices.uplink
        && answer.gateway.is_some()
        && answer.gateway == target.public[Family::of(address)]
}

/// The report of one peer, and what is wrong with it.
pub fn peer_report(
    target: &Target,
    questions: &[Question],
    asked: &mut impl Iterator<Item = PeerAnswers>,
    devices: &Devices,
) -> (PeerReport, Vec<Fault>) {
    let (mut echoes, mut faults) = (Vec::new(), Vec::new());
    for (question, PeerAnswers { echoes: answered, path, passes }) in questions.iter().zip(asked) {
        let mut answered = answered.into_iter();
        let mut take = |address: Option<(IpAddr, u16)>| {
            address?;
            let (small, full) = (answered.next()?, answered.next()?);
            let report = AddressReport {
                address: small.0.to.to_string(),
                small: EchoReport::new(small.0, &small.1),
                full: EchoReport::new(full.0, &full.1),
            };
            Some((report, [small.1, full.1]))
        };
        let (tunnel, public) = (take(question.tunnel).unzip(), take(question.public).unzip());
        let segments = path.segments.as_ref().map(SegmentsReport::new);
        let noticed = path.noticed;
        let answers = Answers { tunnel: tunnel.1, public: public.1, path, passes };
        faults.extend(diagnose(&target.key, question, &answers, devices));
        let family = question.family.to_string();
        echoes.push(FamilyReport { family, tunnel: tunnel.0, public: public.0, segments, noticed });
    }
    let subnets = target.subnets.iter().map(ToString::to_string).collect();
    (PeerReport { key: target.key.clone(), subnets, state: target.state.clone(), echoes }, faults)
}

/// What keeps packets from going to a peer by the way that flannel wants: looked at near both ends
/// of each subnet.
async fn route_fault(
    client: Option<&Client>,
    devices: &Devices,
    target: &Target,
) -> Option<Finding> {
    for subnet in &target.subnets {
        let size = 1_u128 << (subnet.family().bits() - subnet.len()).min(64);
        for address in [subnet.nth(1), subnet.nth(size.saturating_sub(2))].into_iter().flatten() {
            if let Some(client) = client {
                let look = format!("flannelctl why {address}");
                let asked = client.why(address);
                let why = asked.ok();
                // An answer that is not understood tells nothing.
                if let Some(why) = why.filter(|why| !why.ok) {
                    let text = format!("{address} of {}: {}", target.key, why.verdict);
                    return Some(
                        Finding::error("route", text).with_command(why.hint.unwrap_or(look)),
                    );
                }
            } else if let Some(text) = wrong_way(devices, target, address).await {
                let mend = format!("systemctl start flanneld; flannelctl why {address}");
                return Some(Finding::error("route", text).with_command(mend));
            }
        }
    }
    None
}

/// The same without a daemon that knows its objects: as far as the device tells.
async fn wrong_way(devices: &Devices, target: &Target, address: IpAddr) -> Option<String> {
    let answer = way(address).await?;
    let wanted = match devices.datapath.devices[Family::of(address)] {
        Some(tunnel) if target.backend == devices.backend => tunnel,
        _ => devices.uplink?,
    };
    match answer.link {
        None => Some(format!("there is no way to {address} of {}", target.key)),
        Some(link) if link == wanted || is_direct(devices, target, address, &answer) => None,
        Some(link) => Some(format!(
            "packets for {address} of {} go by {link} instead of {wanted}",
            target.key
        )),
    }
}
