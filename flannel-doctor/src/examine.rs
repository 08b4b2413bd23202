//! Examines a network: devices first, then peers.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::{Client, PeerState};
use flannel_core::Remedy;
use flannel_core::address::Family;
use flannel_core::kernel::RouteAnswer;
use flannel_netlink::NetlinkKernel;
use serde::Serialize;

use crate::checks::device;
use crate::checks::host::HostReport;
use crate::diagnosis::clocks::clocks;
use crate::diagnosis::mtu::{Fault, settle};
use crate::diagnosis::peer::{PeerEvidence, diagnose};
use crate::diagnosis::summary::bounded;
use crate::diagnosis::underlay::underlay;
use crate::diagnosis::why::lookup;
use crate::finding::{Check, Finding};
use crate::inputs::devices::{self, Devices};
use crate::inputs::echo::{EchoResult, Probe};
use crate::inputs::network::{Network, Target};
use crate::inputs::peers::{AddressReport, EchoReport, Question, SegmentsReport};
use crate::inputs::query::{PeerResults, QueryResults, query_peers};
use crate::path_probe::client::PathProbe;

/// The result of one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Its name.
    pub layer: &'static str,
    /// What was found.
    pub state: LayerState,
    /// The values that were read.
    pub text: String,
}

/// What was found in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerState {
    /// No fault.
    Ok,
    /// Faults.
    Finding,
    /// Its values could not be read.
    #[serde(rename = "not known")]
    Unknown,
}

/// The answers of a peer.
#[derive(Debug, Serialize)]
pub struct PeerReport {
    /// The key of its lease.
    pub key: String,
    /// The subnets of its lease.
    pub subnets: Vec<String>,
    /// Its state, as the daemon reports it.
    pub state: PeerState,
    /// One for each family.
    pub echoes: Vec<FamilyReport>,
}

/// The answers of a peer in one family.
#[derive(Debug, Serialize)]
pub struct FamilyReport {
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Echoes to its tunnel address.
    pub tunnel: Option<AddressReport>,
    /// Echoes to its public address.
    pub public: Option<AddressReport>,
    /// The report of both ends on TCP segments, or `null` if no daemon of ours answers there.
    pub segments: Option<SegmentsReport>,
    /// The largest datagram through the tunnel that the daemon acknowledged, in bytes, or 0 if
    /// it acknowledged none.
    #[serde(rename = "noticed")]
    pub acknowledged: u16,
}

/// The results of an examination.
#[derive(Debug, Default)]
pub struct Examination {
    /// The layers, in the order of the examination.
    pub layers: Vec<Layer>,
    /// The faults of all layers.
    pub faults: Vec<Fault>,
    /// The peers that were asked.
    pub peers: Vec<PeerReport>,
}

impl Examination {
    /// Adds a layer, with its faults.
    pub fn layer(&mut self, layer: &'static str, text: impl Into<String>, faults: Vec<Fault>) {
        let state = if faults.is_empty() { LayerState::Ok } else { LayerState::Finding };
        self.layers.push(Layer { layer, state, text: text.into() });
        self.faults.extend(faults);
    }

    /// Adds the layer of this host's settings.
    pub fn host(&mut self, report: HostReport) {
        let HostReport { findings, unread } = report;
        let faults: Vec<Fault> = findings.into_iter().map(Fault::from).collect();
        if !faults.is_empty() {
            self.layer("host", "something blocks packets of pods", faults);
        } else if unread.is_empty() {
            self.layer("host", "nothing blocks packets of pods", faults);
        }
        if !unread.is_empty() {
            self.unknown("host", unread.join(", "));
        }
    }

    /// Adds a layer that cannot be read.
    pub fn unknown(&mut self, layer: &'static str, text: impl Into<String>) {
        self.layers.push(Layer { layer, state: LayerState::Unknown, text: text.into() });
    }
}

/// Options of the questions to peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProbeOptions {
    /// The maximum number of peers to ask. Those whose state is not `in place` come first.
    pub peers: usize,
    /// The port of path probes, or 0 if none are made.
    pub doctor_port: u16,
}

/// Examines devices and peers. Returns all findings, with those that the examination had before,
/// errors first. Without a client for a daemon, routes are looked up in the kernel.
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
    found.sort_by_key(|finding| finding.severity);
    found
}

async fn look_at_devices(network: &Network, examination: &mut Examination) -> Devices {
    let network_copy = network.clone();
    let read = tokio::task::spawn_blocking(move || devices::read(&network_copy)).await;
    let devices = read.unwrap_or_default();
    if !network.known {
        examination.unknown("device", "without a network config the needed devices are not known");
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
        texts.extend(devices.datapath.transports.iter().map(ToString::to_string));
    }
    if devices.checksums_matter() && devices.offloaded.is_none() {
        texts.push(
            "not known whether checksums are offloaded, which this kernel does wrongly: \
             install ethtool"
                .into(),
        );
    }
    if texts.is_empty() {
        texts.push(
            if devices.datapath.devices.is_empty() { "none is needed" } else { "none is there" }
                .to_owned(),
        );
    }
    let faults = device::check(&devices);
    match &devices.unread {
        Some(why) => {
            examination.unknown("device", why.as_str());
            examination.faults.extend(faults);
        }
        None => examination.layer("device", texts.join(", "), faults),
    }
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
        network.targets.iter().filter(|target| target.state != PeerState::Rejected).collect();
    // The sort is stable: within each group the order by subnet stays.
    targets.sort_by_key(|target| target.state == PeerState::InPlace);
    let all = targets.len();
    targets.truncate(options.peers);
    if targets.is_empty() && !network.known {
        return examination.unknown("peers", "neither the daemon nor the store lists them");
    }
    if targets.is_empty() {
        let text = if all == 0 { "there are none" } else { "none was asked" };
        return examination.layer("peers", text, Vec::new());
    }
    let mut shadowed = BTreeMap::new();
    let mut questions: Vec<(&Target, Vec<Question>)> = Vec::new();
    for target in targets {
        if let Some(finding) = route_fault(client, devices, target).await {
            shadowed.insert(target.key.clone(), finding);
        }
        questions.push((target, questions_to(target, devices).await));
    }
    let bare = network.datapath.bare;
    let results = match query_peers(&questions, devices, bare, options.doctor_port).await {
        Ok(results) => results,
        Err(why) => {
            examination.faults.extend(bounded(shadowed.into_values().map(Fault::from).collect()));
            return examination.unknown("peers", why);
        }
    };
    let asked = questions.len();
    let found = peers_faults(&questions, results.peers, shadowed, devices, examination);
    let text = if all == asked {
        format!("{all} asked")
    } else {
        format!("{asked} of {all} asked; --peers {all} asks all")
    };
    examination.layer("peers", text, bounded(found));
    for why in results.unread {
        examination.unknown("peers", why);
    }
}

/// The faults of all peers that were asked. Adds their reports to the examination. `shadowed` has
/// the peers whose packets take a wrong route.
fn peers_faults(
    questions: &[(&Target, Vec<Question>)],
    results: Vec<PeerResults>,
    mut shadowed: BTreeMap<String, Finding>,
    devices: &Devices,
    examination: &mut Examination,
) -> Vec<Fault> {
    let own_network = underlay(&results, questions.len(), devices);
    let mut found = Vec::new();
    let mut results = results.into_iter();
    for (target, questions) in questions {
        let (report, faults) = peer_report(target, questions, &mut results, devices);
        examination.peers.push(report);
        // A wrong route explains missing answers.
        found.extend(shadowed.remove(&target.key).map_or(faults, |finding| vec![finding.into()]));
    }
    if let Some(finding) = own_network {
        // Silence of all peers says nothing about one of them.
        found.retain(|fault| fault.finding.check != Check::Peer);
        found.insert(0, finding.into());
    }
    let ahead: Vec<(&str, i64)> = examination
        .peers
        .iter()
        .filter_map(|peer| Some((peer.key.as_str(), peer.clock_ahead()?)))
        .collect();
    found.extend(clocks(&ahead).map(Fault::from));
    found
}

impl PeerReport {
    /// The seconds by which the clock of the peer is ahead of this host's, if it is known.
    fn clock_ahead(&self) -> Option<i64> {
        self.echoes.iter().find_map(|echo| echo.segments.as_ref()?.segments.clock)
    }
}

/// The questions to a peer, for the path that packets to it take.
async fn questions_to(target: &Target, devices: &Devices) -> Vec<Question> {
    let mut questions = target.questions(devices);
    for question in &mut questions {
        if let Some((address, _)) = question.tunnel
            && let Some(answer) = route_to(address).await
            && is_direct(devices, target, address, &answer)
        {
            *question = question.clone().direct(devices);
        }
    }
    questions
}

/// The result of the examination of one path.
#[derive(Debug)]
pub struct PathExamination {
    /// The result of the path probe.
    pub path: PathProbe,
    /// The largest packet that passes, in bytes; `None` if the path was not searched.
    pub passes: Option<u16>,
    /// The first fault with its remedy, or `None` if no fault was found.
    pub finding: Option<Finding>,
}

/// Examines the path to one peer in one family. `None` if it cannot be examined.
pub async fn examine_path(
    network: &Network,
    target: &Target,
    family: Family,
    doctor_port: u16,
) -> Option<PathExamination> {
    let of_network = network.clone();
    let devices =
        tokio::task::spawn_blocking(move || devices::read(&of_network)).await.unwrap_or_default();
    let mut questions = questions_to(target, &devices).await;
    questions.retain(|question| question.family == family);
    let asked = [(target, questions)];
    let QueryResults { peers: answers, .. } =
        query_peers(&asked, &devices, network.datapath.bare, doctor_port).await.ok()?;
    let PeerResults { passes, path, echoes, .. } = answers.first()?;
    // The first two echoes take the path of packets of pods. A router may report what it takes.
    let reported = match echoes.get(1) {
        Some((_, EchoResult::TooBig(Some(most)))) => u16::try_from(*most).ok(),
        _ => None,
    };
    let passes = passes.or(reported);
    let path = path.clone();
    let own_network = underlay(&answers, 1, &devices);
    let (_, faults) = peer_report(target, &asked[0].1, &mut answers.into_iter(), &devices);
    let faults = own_network.map_or(faults, |finding| vec![finding.into()]);
    let found = settle(faults, &devices, &network.families());
    Some(PathExamination { path, passes, finding: found.into_iter().next() })
}

/// The kernel's route to an address; `None` if the look-up fails.
async fn route_to(address: IpAddr) -> Option<RouteAnswer> {
    lookup(Arc::new(NetlinkKernel::open().ok()?), address).await.ok()
}

/// Whether the route leads to the peer without the tunnel, as with DirectRouting.
fn is_direct(devices: &Devices, target: &Target, address: IpAddr, answer: &RouteAnswer) -> bool {
    answer.link.is_some()
        && answer.link == devices.uplink
        && answer.gateway.is_some()
        && answer.gateway == target.public[Family::of(address)]
}

/// The report of one peer, and its faults. Takes one item of `answers` for each question.
pub fn peer_report(
    target: &Target,
    questions: &[Question],
    answers: &mut impl Iterator<Item = PeerResults>,
    devices: &Devices,
) -> (PeerReport, Vec<Fault>) {
    let mut echoes = Vec::new();
    let mut faults = Vec::new();
    for (question, results) in questions.iter().zip(answers) {
        let PeerResults { echoes: answered, path, passes, handshake } = results;
        let mut answered = answered.into_iter();
        let tunnel = question.tunnel.and_then(|_| AddressEchoes::take(&mut answered));
        let public = question.public.and_then(|_| AddressEchoes::take(&mut answered));
        echoes.push(FamilyReport {
            family: question.family.to_string(),
            tunnel: tunnel.as_ref().map(AddressEchoes::report),
            public: public.as_ref().map(AddressEchoes::report),
            segments: path.segments.as_ref().map(SegmentsReport::new),
            acknowledged: path.acknowledged,
        });
        let evidence = PeerEvidence {
            tunnel: tunnel.map(AddressEchoes::results),
            public: public.map(AddressEchoes::results),
            path,
            passes,
            handshake,
        };
        faults.extend(diagnose(&target.key, question, &evidence, devices));
    }
    let subnets = target.subnets.iter().map(ToString::to_string).collect();
    (PeerReport { key: target.key.clone(), subnets, state: target.state, echoes }, faults)
}

/// The echoes of small and of full size to one address.
struct AddressEchoes {
    small: (Probe, EchoResult),
    full: (Probe, EchoResult),
}

impl AddressEchoes {
    fn take(answered: &mut impl Iterator<Item = (Probe, EchoResult)>) -> Option<Self> {
        Some(Self { small: answered.next()?, full: answered.next()? })
    }

    fn report(&self) -> AddressReport {
        let report = |(probe, result): &(Probe, EchoResult)| EchoReport::new(*probe, result);
        AddressReport {
            address: self.small.0.to.to_string(),
            small: report(&self.small),
            full: report(&self.full),
        }
    }

    /// The results, without the probes.
    fn results(self) -> [EchoResult; 2] {
        [self.small.1, self.full.1]
    }
}

/// A finding if packets to two addresses of a subnet of the peer do not take flannel's route.
async fn route_fault(
    client: Option<&Client>,
    devices: &Devices,
    target: &Target,
) -> Option<Finding> {
    for subnet in &target.subnets {
        let size = 1_u128 << (subnet.family().bits() - subnet.len()).min(64);
        for address in [subnet.nth(1), subnet.nth(size.saturating_sub(2))].into_iter().flatten() {
            if let Some(client) = client {
                // An invalid answer is not a finding.
                if let Some(why) = client.why(address).ok().filter(|why| !why.ok) {
                    let text = format!("{address} of {}: {}", target.key, why.verdict);
                    let remedy = why.hint.map_or(Remedy::Explain(address), Remedy::Run);
                    return Some(Finding::error(Check::Route, text).with_remedy(remedy));
                }
            } else if let Some(text) = wrong_way(devices, target, address).await {
                let remedy = Remedy::All(vec![Remedy::StartDaemon, Remedy::Explain(address)]);
                return Some(Finding::error(Check::Route, text).with_remedy(remedy));
            }
        }
    }
    None
}

/// What is wrong with the route to an address of the peer. Without a daemon only the device of the
/// route is compared.
async fn wrong_way(devices: &Devices, target: &Target, address: IpAddr) -> Option<String> {
    let answer = route_to(address).await?;
    let wanted = match devices.datapath.devices[Family::of(address)] {
        Some(tunnel) if target.backend == devices.backend => tunnel,
        _ => devices.uplink?,
    };
    match answer.link {
        None => Some(format!("there is no route to {address} of {}", target.key)),
        Some(link) if link == wanted || is_direct(devices, target, address, &answer) => None,
        Some(link) => Some(format!(
            "packets for {address} of {} go through {link} instead of {wanted}",
            target.key
        )),
    }
}
