//! `flannelctl doctor`: everything between the store and the wire, looked at once.
//!
//! The one thing to know: each layer is told as it is found, and only what is certainly wrong is a finding; what cannot be
//! read is said to be not known. Without a daemon it goes as far as store, cache and kernel lead.

mod asked;
mod device;
mod echo;
mod ground;
mod judge;
mod mtu;
mod peers;

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_api::Client;
use flannel_api::Finding;
use flannel_api::VERSION;
use flannel_api::request;
use flannel_core::{Family, RouteAnswer};
use serde::Serialize;
use serde_json::json;

use super::options::{DoctorFlags, Global};
use super::paper::{Ink, Paper};
use super::status::findings;
use super::{Result, Said};
use crate::hints;
use crate::preflight::Look;
use crate::why::lookup;
use asked::{Asked, ask};
use device::Devices;
use ground::Ground;
use judge::{Answers, judge};
use mtu::{Fault, narrowest, settle};
use peers::{AddressReport, EchoReport, Question, SoundingReport, Target};

/// So many findings of one check are told one by one.
const MOST: usize = 5;

/// One layer, as it is found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Layer {
    layer: &'static str,
    /// `ok`, `finding` or `not known`.
    state: &'static str,
    text: String,
}

/// A peer, and what became of the echoes.
#[derive(Debug, Serialize)]
struct PeerReport {
    key: String,
    subnets: Vec<String>,
    state: String,
    echoes: Vec<FamilyReport>,
}

/// The echoes of one family.
#[derive(Debug, Serialize)]
struct FamilyReport {
    family: String,
    tunnel: Option<AddressReport>,
    public: Option<AddressReport>,
    /// What both ends report; `null`: no daemon of ours answers there.
    segments: Option<SoundingReport>,
    /// The largest packet through the tunnel that it acknowledges beside it, in bytes; 0: none.
    noticed: u16,
}

/// Everything that was found.
#[derive(Debug, Default)]
struct Diagnosis {
    layers: Vec<Layer>,
    faults: Vec<Fault>,
    peers: Vec<PeerReport>,
}

impl Diagnosis {
    /// A layer, with what is wrong there.
    fn layer(&mut self, layer: &'static str, text: impl Into<String>, faults: Vec<Fault>) {
        let state = if faults.is_empty() { "ok" } else { "finding" };
        self.layers.push(Layer { layer, state, text: text.into() });
        self.faults.extend(faults);
    }

    /// What of this host stands in the way, as far as it could be looked at.
    fn host(&mut self, look: Look) {
        let Look { findings, unread } = look;
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
    fn unknown(&mut self, layer: &'static str, text: impl Into<String>) {
        self.layers.push(Layer { layer, state: "not known", text: text.into() });
    }
}

/// `flannelctl doctor`.
pub(crate) async fn doctor(
    client: &Client,
    global: &Global,
    paper: &Paper,
    flags: &DoctorFlags,
) -> Result<Said> {
    let mut diagnosis = Diagnosis::default();
    let ground = match client.ask("GET", request::FRESH_STATUS) {
        Ok(value) => ground::with_daemon(client, &value, &mut diagnosis).await?,
        Err(failure @ flannel_api::Error::NoDaemon { .. }) => {
            ground::without_daemon(global, &flags.iface, &failure, &mut diagnosis).await
        }
        Err(failure) => return Err(failure.into()),
    };
    let devices = look_at_devices(&ground, &mut diagnosis).await;
    look_at_peers(client, &ground, &devices, flags, &mut diagnosis).await;
    let faults = std::mem::take(&mut diagnosis.faults);
    let mut found = settle(faults, &devices, &ground.families());
    hints::say(&mut found, ground.store.as_deref());
    found.sort_by_key(|finding| !finding.is_error());
    let Diagnosis { layers, peers, .. } = &diagnosis;
    let value = json!({
        "version": VERSION, "ok": found.is_empty(), "findings": found, "layers": layers, "peers": peers,
    });
    Ok(Said { text: page(&diagnosis, &found, paper), value, ok: found.is_empty() })
}

async fn look_at_devices(ground: &Ground, diagnosis: &mut Diagnosis) -> Devices {
    let (tunnels, uplink, mtu, daemon) = (ground.tunnels, ground.uplink, ground.mtu, ground.daemon);
    let read =
        tokio::task::spawn_blocking(move || device::read(tunnels, uplink, mtu, daemon)).await;
    let devices = read.unwrap_or_default();
    if !ground.known {
        diagnosis.unknown("device", "without a network config nobody knows which there should be");
        return devices;
    }
    let there = devices
        .tunnels
        .values()
        .filter_map(|name| devices.links.iter().find(|link| link.name == *name));
    let mut texts: Vec<String> =
        there.map(|link| format!("{} ({} bytes)", link.name, link.mtu)).collect();
    texts.extend(devices.port().map(|port| format!("UDP port {port}")));
    if devices.checksums_matter() && devices.offloaded.is_none() {
        texts.push(
            "not known whether checksums are offloaded, which this kernel does wrongly: install ethtool"
                .into(),
        );
    }
    if texts.is_empty() {
        texts.push(
            if devices.tunnels.is_empty() { "none is needed" } else { "none is there" }.to_owned(),
        );
    }
    diagnosis.layer("device", texts.join(", "), device::check(&devices));
    devices
}

async fn look_at_peers(
    client: &Client,
    ground: &Ground,
    devices: &Devices,
    flags: &DoctorFlags,
    diagnosis: &mut Diagnosis,
) {
    let mut targets: Vec<&Target> =
        ground.targets.iter().filter(|target| target.state != "not believed").collect();
    // Stable: those in trouble first, each by subnet.
    targets.sort_by_key(|target| target.state == "in place");
    let all = targets.len();
    targets.truncate(flags.peers);
    if targets.is_empty() && !ground.known {
        return diagnosis.unknown("peers", "nobody could say which there are");
    }
    if targets.is_empty() {
        return diagnosis.layer(
            "peers",
            if all == 0 { "there are none" } else { "none was asked" },
            Vec::new(),
        );
    }
    let mut shadowed = BTreeMap::new();
    for target in &targets {
        if let Some(finding) = route_fault(client, ground, devices, target).await {
            shadowed.insert(target.key.clone(), finding);
        }
    }
    let mut questions: Vec<(&Target, Vec<Question>)> = Vec::new();
    for target in targets {
        questions.push((target, questions_to(target, devices).await));
    }
    let (asked, mute) = match ask(&questions, devices, ground.bare, flags.doctor_port).await {
        Ok(asked) => asked,
        Err(why) => {
            diagnosis.faults.extend(bounded(shadowed.into_values().map(Fault::from).collect()));
            return diagnosis.unknown("peers", why);
        }
    };
    let mut found = Vec::new();
    let mut asked = asked.into_iter();
    for (target, questions) in &questions {
        let (report, faults) = hear(target, questions, &mut asked, devices);
        diagnosis.peers.push(report);
        // A route that leads elsewhere explains what is not answered.
        found.extend(shadowed.remove(&target.key).map_or(faults, |finding| vec![finding.into()]));
    }
    let text = match all == questions.len() {
        true => format!("{all} asked"),
        false => format!("{} of {all} asked: --peers {all} asks all", questions.len()),
    };
    diagnosis.layer("peers", text, bounded(found));
    if let Some(why) = mute {
        diagnosis.unknown("peers", why);
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
    lookup(super::offline::kernel().ok()?, address).await.ok()
}

/// Whether it sends them straight to the peer, as DirectRouting does.
fn is_direct(devices: &Devices, target: &Target, address: IpAddr, answer: &RouteAnswer) -> bool {
    answer.link.is_some()
        && answer.link == devices.uplink
        && answer.gateway.is_some()
        && answer.gateway == target.public[Family::of(address)]
}

/// Takes one peer's answers.
fn hear(
    target: &Target,
    questions: &[Question],
    asked: &mut impl Iterator<Item = Asked>,
    devices: &Devices,
) -> (PeerReport, Vec<Fault>) {
    let (mut echoes, mut faults) = (Vec::new(), Vec::new());
    for (question, Asked { echoes: answered, sounding, passes }) in questions.iter().zip(asked) {
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
        let segments = sounding.segments.as_ref().map(SoundingReport::new);
        let noticed = sounding.noticed;
        let answers = Answers { tunnel: tunnel.1, public: public.1, sounding, passes };
        faults.extend(judge(&target.key, question, &answers, devices));
        let family = question.family.to_string();
        echoes.push(FamilyReport { family, tunnel: tunnel.0, public: public.0, segments, noticed });
    }
    let subnets = target.subnets.iter().map(ToString::to_string).collect();
    (PeerReport { key: target.key.clone(), subnets, state: target.state.clone(), echoes }, faults)
}

/// What keeps packets from going to a peer by the way that flannel wants: looked at near both ends of each subnet.
async fn route_fault(
    client: &Client,
    ground: &Ground,
    devices: &Devices,
    target: &Target,
) -> Option<Finding> {
    for subnet in &target.subnets {
        let size = 1_u128 << (subnet.family().bits() - subnet.len()).min(64);
        for address in [subnet.nth(1), subnet.nth(size.saturating_sub(2))].into_iter().flatten() {
            if ground.daemon {
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
    let wanted = match devices.tunnels[Family::of(address)] {
        Some(tunnel) if target.backend == "vxlan" => tunnel,
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

/// Many faults of one check are one with the number of the others: of those that are too narrow the narrowest counts, and
/// what mends the others mends all of them.
fn bounded(faults: Vec<Fault>) -> Vec<Fault> {
    let mut kinds: BTreeMap<(String, bool), Vec<Fault>> = BTreeMap::new();
    let (mut few, mut told) = (Vec::new(), BTreeMap::<String, usize>::new());
    for fault in faults {
        let check = &fault.finding.check;
        let count = told.entry(check.clone()).or_default();
        *count += 1;
        match *count <= MOST {
            true => few.push(fault),
            false => {
                kinds.entry((check.clone(), fault.narrow.is_some())).or_default().push(fault);
            }
        }
    }
    for ((check, _), more) in kinds {
        let text = format!("the same of {} more peers: --json lists them", more.len());
        let made = if more.iter().any(|fault| fault.finding.is_error()) {
            Finding::error
        } else {
            Finding::warning
        };
        let mend = all_of(more.iter().filter_map(|fault| fault.finding.mend.as_deref()));
        let narrow = narrowest(more.iter().filter_map(|fault| fault.narrow));
        few.push(Fault { finding: Finding { mend, ..made(&check, text) }, narrow });
    }
    few
}

/// One line of commands that does what each of these does, every command and every remark once; `None` of none.
fn all_of<'a>(mends: impl Iterator<Item = &'a str>) -> Option<String> {
    let (mut commands, mut remarks) = (Vec::new(), Vec::new());
    for mend in mends {
        let (command, remark) =
            mend.split_once(" # ").map_or((mend, None), |(c, remark)| (c, Some(remark)));
        if !commands.contains(&command) {
            commands.push(command);
        }
        remarks.extend(remark.filter(|remark| !remarks.contains(remark)));
    }
    let remark =
        if remarks.is_empty() { String::new() } else { format!(" # {}", remarks.join("; ")) };
    (!commands.is_empty()).then(|| commands.join("; ") + &remark)
}

fn page(diagnosis: &Diagnosis, found: &[Finding], paper: &Paper) -> String {
    let Diagnosis { layers, peers, .. } = diagnosis;
    let verdict = match (found.len(), found.iter().filter(|finding| finding.is_error()).count()) {
        (0, _) => paper.ink(Ink::Good, "NOTHING IS WRONG"),
        (all, errors) => {
            let count = |number: usize, word| {
                format!("{number} {word}{}", if number == 1 { "" } else { "S" })
            };
            paper.ink(
                Ink::Bad,
                &format!("{}, {}", count(errors, "ERROR"), count(all - errors, "WARNING")),
            )
        }
    };
    let mut out = format!("doctor     {verdict}\n\n{}", findings(found, paper));
    if !found.is_empty() {
        out.push('\n');
    }
    for Layer { layer, state, text } in layers {
        let ink = match *state {
            "ok" => Ink::Good,
            "finding" => Ink::Bad,
            _ => Ink::Warning,
        };
        let text = if *state == "not known" { format!("not known: {text}") } else { text.clone() };
        out += &paper.field(layer, ink, &text);
    }
    if peers.is_empty() {
        return out;
    }
    out.push('\n');
    let cell = |address: Option<&AddressReport>, full: bool| match address {
        None => "-".to_owned(),
        Some(address) => match if full { &address.full } else { &address.small } {
            EchoReport { seconds: Some(seconds), .. } => format!("{:.2} ms", seconds * 1000.0),
            echo => echo.state.to_owned(),
        },
    };
    let row = |peer: &PeerReport| {
        let each = |make: &dyn Fn(&FamilyReport) -> String| {
            peer.echoes.iter().map(make).collect::<Vec<_>>()
        };
        let cells = vec![
            peer.subnets.clone(),
            each(&|echo| cell(echo.tunnel.as_ref(), false)),
            each(&|echo| cell(echo.tunnel.as_ref(), true)),
            each(&|echo| echo.segments.as_ref().map_or("-", |segments| segments.passes).to_owned()),
            each(&|echo| cell(echo.public.as_ref(), false)),
            each(&|echo| cell(echo.public.as_ref(), true)),
        ];
        (Ink::Plain, cells)
    };
    let rows: Vec<_> = peers.iter().map(row).collect();
    out + &paper.table(&["SUBNET", "TUNNEL", "FULL SIZE", "SEGMENTS", "PUBLIC", "FULL SIZE"], &rows)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::echo::Answer;
    use super::mtu::Narrow;
    use super::*;
    use crate::ctl::paper::tests::looks;
    use crate::sounding::{Passage, Sounded, Sounding};

    #[test]
    fn what_is_wrong_comes_first_then_each_layer_then_the_peers() {
        let mut diagnosis = Diagnosis::default();
        diagnosis.layer("store", "etcd answers, 3 leases", Vec::new());
        let text = "rp_filter of flannel.1 is strict: packets that come another way than their answers would go are dropped";
        let strict = Finding::warning("rp-filter", text)
            .with_command("sysctl -w net.ipv4.conf.flannel/1.rp_filter=2");
        diagnosis.layer("host", "something stands in the way", vec![strict.into()]);
        diagnosis.unknown("device", "without a network config nobody knows which there should be");
        let target = Target {
            key: "10.1.7.0-24".into(),
            subnets: vec!["10.1.7.0/24".parse().unwrap()],
            public: [IpAddr::from([192, 0, 2, 7])].into_iter().collect(),
            backend: "vxlan".into(),
            state: "in place".into(),
        };
        let devices = Devices {
            tunnels: flannel_core::Dual { v4: Some("flannel.1".parse().unwrap()), v6: None },
            mtu: Some(1450),
            ..Devices::default()
        };
        let asked = target.questions(&devices);
        let answers = [
            Answer::Reply(Duration::from_micros(420)),
            Answer::Nothing,
            Answer::Reply(Duration::from_micros(1_210)),
            Answer::TooBig(Some(1400)),
        ];
        let echoes = asked.iter().flat_map(Question::probes).zip(answers).collect();
        let passage = |arrived| Passage { sent: 5592, arrived };
        let sounded = Sounded {
            there: passage(5592),
            back: passage(0),
            segment: 1398,
            mtu: 1450,
            heard: 1450,
        };
        let sounding = Sounding { noticed: 1450, segments: Some(sounded) };
        let answered = Asked { echoes, sounding, passes: Some(1350) };
        let (report, faults) = hear(&target, &asked, &mut [answered].into_iter(), &devices);
        diagnosis.peers.push(report);
        diagnosis.layer("peers", "1 asked", faults);
        let found = settle(diagnosis.faults.clone(), &devices, &[Family::V4]);
        looks("doctor", |paper| page(&diagnosis, &found, paper));
    }

    #[test]
    fn a_healthy_host_of_both_families() {
        let mut diagnosis = Diagnosis::default();
        diagnosis.layer(
            "store",
            "etcd:https://etcd-1:2379,https://etcd-2:2379,https://etcd-3:2379 answers",
            Vec::new(),
        );
        diagnosis.layer("daemon", "flanneld 0.1.0, ready", Vec::new());
        diagnosis.layer("host", "nothing stands in the way", Vec::new());
        diagnosis.layer(
            "device",
            "flannel.1 (1450 bytes), flannel-v6.1 (1430 bytes), UDP port 8472",
            Vec::new(),
        );
        let target = Target {
            key: "10.1.7.0-24&fd00:1:0:7::-64".into(),
            subnets: vec!["10.1.7.0/24".parse().unwrap(), "fd00:1:0:7::/64".parse().unwrap()],
            public: ["192.0.2.7", "2001:db8::7"]
                .map(|address| address.parse::<IpAddr>().unwrap())
                .into_iter()
                .collect(),
            backend: "vxlan".into(),
            state: "in place".into(),
        };
        let device = |name: &str| Some(name.parse().unwrap());
        let tunnels = flannel_core::Dual { v4: device("flannel.1"), v6: device("flannel-v6.1") };
        let devices = Devices { tunnels, mtu: Some(1430), ..Devices::default() };
        let questions = target.questions(&devices);
        let answered = |question: &Question| {
            let echoes = question
                .probes()
                .map(|probe| (probe, Answer::Reply(Duration::from_micros(420))))
                .collect();
            let whole = Passage { sent: 5512, arrived: 5512 };
            let sounded =
                Sounded { there: whole, back: whole, segment: 1378, mtu: 1430, heard: 1430 };
            Asked {
                echoes,
                sounding: Sounding { noticed: 1430, segments: Some(sounded) },
                passes: None,
            }
        };
        let answered: Vec<Asked> = questions.iter().map(answered).collect();
        let (report, faults) = hear(&target, &questions, &mut answered.into_iter(), &devices);
        diagnosis.peers.push(report);
        diagnosis.layer("peers", "1 asked", faults);
        assert_eq!(diagnosis.faults, []);
        looks("doctor_healthy", |paper| page(&diagnosis, &[], paper));
    }

    #[test]
    fn many_findings_of_a_kind_are_counted() {
        let to = IpAddr::from([192, 0, 2, 7]);
        let narrow = |n: u32| Narrow::Way { to, takes: Some(1409 - n) };
        let all =
            (0..9).map(|n| Fault::new(Finding::error("peer", format!("{n}")), narrow(n))).collect();
        let found = bounded(all);
        assert_eq!(found.len(), MOST + 1);
        assert!(found[MOST].finding.text.starts_with("the same of 4 more peers"), "{found:?}");
        assert_eq!(
            found[MOST].narrow,
            Some(narrow(8)),
            "the narrowest of those that are not told counts too"
        );
        // What mends those that are told alone mends the others, too.
        let fault = |n: u32, mend: String| {
            Fault::from(Finding::error("peer", format!("{n}")).with_command(mend))
        };
        let mend_of = |all: Vec<Fault>| bounded(all).pop().unwrap().finding.mend;
        let each = (0..8).map(|n| fault(n, format!("release '{n}' # if it is gone"))).collect();
        assert_eq!(
            mend_of(each).as_deref(),
            Some("release '5'; release '6'; release '7' # if it is gone"),
            "each lease is another's"
        );
        let same = (0..8).map(|n| fault(n, "iptables -I INPUT -j ACCEPT".into())).collect();
        assert_eq!(mend_of(same).as_deref(), Some("iptables -I INPUT -j ACCEPT"));
        // What is about sizes has its mend later; what is not keeps its own beside it.
        let mixed = (0..9).map(|n| match n % 2 {
            0 => fault(n, format!("x {n}")),
            _ => Fault::new(Finding::warning("peer", format!("{n}")), narrow(n)),
        });
        let found = bounded(mixed.collect());
        let [others, sizes] = &found[MOST..] else { panic!("{found:?}") };
        assert_eq!((others.finding.mend.as_deref(), others.narrow), (Some("x 6; x 8"), None));
        assert_eq!((sizes.narrow, sizes.finding.is_error()), (Some(narrow(7)), false));
    }
}
