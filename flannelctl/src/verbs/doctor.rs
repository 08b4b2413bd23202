//! `flannelctl doctor`: examines everything between the store and the wire.
//!
//! Only a fault that is certain is a finding. A value that cannot be read is reported as not known.
//! Without a daemon it examines the store, the cache and the kernel.

mod network;
mod store;

use flannel_api::{Finding, VERSION};
use flannel_doctor::checks::files;
use flannel_doctor::finding::reports;
use flannel_doctor::inputs::peers::{AddressReport, EchoReport};
use flannel_doctor::{
    Examination, FamilyReport, Layer, LayerState, PeerReport, ProbeOptions, examine,
};
use flannel_options::{RegistryUrl, state_dir};
use flannel_subnet::Assign;
use serde_json::json;

use crate::error::Result;
use crate::options::{DoctorFlags, Global};
use crate::terminal::{Style, Terminal};
use crate::verbs::status::findings;
use crate::{Context, Output};

/// `flannelctl doctor`.
pub(crate) async fn doctor(context: Context<'_>, flags: &DoctorFlags) -> Result<Output> {
    let client = context.client;
    let mut examination = Examination::default();
    let network = match client.fresh_status() {
        Ok(report) => network::with_daemon(context, report, &mut examination).await?,
        Err(failure @ flannel_api::Error::NoDaemon { .. }) => {
            let selectors = flags.interface.selectors();
            network::without_daemon(context, &selectors, &failure, &mut examination).await
        }
        Err(failure) => return Err(failure.into()),
    };
    look_at_files(context.global, &mut examination);
    let options = ProbeOptions { peers: flags.peers, doctor_port: flags.doctor_port };
    let daemon = Some(client).filter(|_| network.daemon);
    let found = examine(&network, daemon, &options, &mut examination).await;
    let found = reports(&found, network.deployment);
    let Examination { layers, peers, .. } = &examination;
    let value = json!({
        "version": VERSION,
        "ok": found.is_empty(),
        "findings": found,
        "layers": layers,
        "peers": peers,
    });
    Ok(Output { text: page(&examination, &found, context.terminal), value, ok: found.is_empty() })
}

/// Looks at the file systems of the files that the daemon writes.
fn look_at_files(global: &Global, examination: &mut Examination) {
    let mut written = vec![global.subnet_file.clone(), state_dir::leases(&global.state_dir)];
    if let Some(RegistryUrl::Dir(location)) = &global.registry
        && location.options.assign == Assign::Free
    {
        written.push(location.path.join("config"));
    }
    let found = files::check(&files::read(&written));
    let can = if found.is_empty() { "can" } else { "may not be able to" };
    examination.layer("files", format!("the daemon {can} write its files"), found);
}

fn page(examination: &Examination, found: &[Finding], terminal: &Terminal) -> String {
    let Examination { layers, peers, .. } = examination;
    let verdict = match (found.len(), found.iter().filter(|finding| finding.is_error()).count()) {
        (0, _) => terminal.style(Style::Good, "NOTHING IS WRONG"),
        (all, errors) => {
            let count = |number: usize, word| {
                format!("{number} {word}{}", if number == 1 { "" } else { "S" })
            };
            terminal.style(
                Style::Bad,
                &format!("{}, {}", count(errors, "ERROR"), count(all - errors, "WARNING")),
            )
        }
    };
    let mut out = format!("doctor     {verdict}\n\n{}", findings(found, terminal));
    if !found.is_empty() {
        out.push('\n');
    }
    for Layer { layer, state, text } in layers {
        out += &match state {
            LayerState::Ok => terminal.field(layer, Style::Good, text),
            LayerState::Finding => terminal.field(layer, Style::Bad, text),
            LayerState::Unknown => {
                terminal.field(layer, Style::Warning, &format!("not known: {text}"))
            }
        };
    }
    if peers.is_empty() {
        return out;
    }
    out.push('\n');
    let rows: Vec<_> = peers.iter().map(peer_row).collect();
    out + &terminal
        .table(&["SUBNET", "TUNNEL", "FULL SIZE", "SEGMENTS", "PUBLIC", "FULL SIZE"], &rows)
}

/// The echoes of a peer. A cell has a line for each family.
fn peer_row(peer: &PeerReport) -> (Style, Vec<Vec<String>>) {
    let each = |cell: fn(&FamilyReport) -> String| peer.echoes.iter().map(cell).collect();
    let cells = vec![
        peer.subnets.clone(),
        each(|echo| small_echo(echo.tunnel.as_ref())),
        each(|echo| full_echo(echo.tunnel.as_ref())),
        each(|echo| echo.segments.as_ref().map_or("-", |segments| segments.passes).to_owned()),
        each(|echo| small_echo(echo.public.as_ref())),
        each(|echo| full_echo(echo.public.as_ref())),
    ];
    (Style::Plain, cells)
}

fn small_echo(address: Option<&AddressReport>) -> String {
    address.map_or_else(|| "-".to_owned(), |address| round_trip(&address.small))
}

fn full_echo(address: Option<&AddressReport>) -> String {
    address.map_or_else(|| "-".to_owned(), |address| round_trip(&address.full))
}

/// The round-trip time, or why it is not known.
fn round_trip(echo: &EchoReport) -> String {
    match echo.seconds {
        Some(seconds) => format!("{:.2} ms", seconds * 1000.0),
        None => echo.state.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::time::Duration;

    use flannel_api::{Deployment, PeerState};
    use flannel_core::Config;
    use flannel_core::address::{Dual, Family};
    use flannel_doctor::diagnosis::mtu::settle;
    use flannel_doctor::finding::Check;
    use flannel_doctor::inputs::devices::Devices;
    use flannel_doctor::inputs::echo::EchoResult;
    use flannel_doctor::inputs::network::Target;
    use flannel_doctor::inputs::peers::Question;
    use flannel_doctor::inputs::query::{LONGEST, PeerResults};
    use flannel_doctor::path_probe::client::{Passage, PathProbe, Segments};
    use flannel_doctor::peer_report;

    use super::*;
    use crate::terminal::tests::assert_page;

    /// A host with vxlan.
    fn vxlan() -> Devices {
        let config = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
            "Backend":{"Type":"vxlan"}}"#;
        let datapath = flannel_backends::all().datapath(&Config::parse(config).unwrap());
        Devices { backend: "vxlan".to_owned(), datapath, ..Devices::default() }
    }

    #[test]
    fn an_examination_takes_at_most_ten_seconds() {
        let of_store = (network::SETTLE_TIME + store::PATIENCE).max(network::PATIENCE);
        assert!(of_store + LONGEST <= Duration::from_secs(10), "{of_store:?} {LONGEST:?}");
    }

    #[test]
    fn findings_come_first_then_layers_then_peers() {
        let mut examination = Examination::default();
        examination.layer("store", "etcd answers, 3 leases", Vec::new());
        let text = "rp_filter of flannel.1 is strict: the kernel silently drops packets if \
            replies to them leave via another device";
        let strict = flannel_doctor::Finding::warning(Check::RpFilter, text)
            .with_command("sysctl -w net.ipv4.conf.flannel/1.rp_filter=2");
        examination.layer("host", "something blocks packets of pods", vec![strict.into()]);
        examination.unknown("device", "without a network config the needed devices are not known");
        let target = Target {
            key: "10.1.7.0-24".into(),
            subnets: vec!["10.1.7.0/24".parse().unwrap()],
            public: [IpAddr::from([192, 0, 2, 7])].into_iter().collect(),
            backend: "vxlan".into(),
            state: PeerState::InPlace,
            mtus: Dual::default(),
        };
        let mut devices = Devices { mtu: Some(1450), ..vxlan() };
        devices.datapath.devices.v6 = None;
        let asked = target.questions(&devices);
        let answers = [
            EchoResult::Reply(Duration::from_micros(420)),
            EchoResult::Nothing,
            EchoResult::Reply(Duration::from_micros(1_210)),
            EchoResult::TooBig(Some(1400)),
        ];
        let echoes = asked.iter().flat_map(Question::probes).zip(answers).collect();
        let passage = |arrived| Passage { sent: 5592, arrived };
        let segments = Segments {
            there: passage(5592),
            back: passage(0),
            segment: 1398,
            mtu: 1450,
            largest_datagram: 1450,
            clock: None,
        };
        let path = PathProbe { acknowledged: 1450, segments: Some(segments) };
        let passes = Some(1350);
        let answered = PeerResults { echoes, path, passes, handshake: None };
        let (report, faults) = peer_report(&target, &asked, &mut [answered].into_iter(), &devices);
        examination.peers.push(report);
        examination.layer("peers", "1 asked", faults);
        let found = settle(examination.faults.clone(), &devices, &[Family::V4]);
        let found = reports(&found, Deployment::Systemd);
        assert_page("doctor", |terminal| page(&examination, &found, terminal));
    }

    #[test]
    fn a_healthy_dual_stack_host_has_no_findings() {
        let mut examination = Examination::default();
        examination.layer(
            "store",
            "etcd:https://etcd-1:2379,https://etcd-2:2379,https://etcd-3:2379 answers",
            Vec::new(),
        );
        examination.layer("daemon", "flanneld 0.1.0, ready", Vec::new());
        examination.layer("host", "nothing blocks packets of pods", Vec::new());
        examination.layer(
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
            state: PeerState::InPlace,
            mtus: Dual::default(),
        };
        let devices = Devices { mtu: Some(1430), ..vxlan() };
        let questions = target.questions(&devices);
        let answered = |question: &Question| {
            let echoes = question
                .probes()
                .map(|probe| (probe, EchoResult::Reply(Duration::from_micros(420))))
                .collect();
            let whole = Passage { sent: 5512, arrived: 5512 };
            let segments = Segments {
                there: whole,
                back: whole,
                segment: 1378,
                mtu: 1430,
                largest_datagram: 1430,
                clock: None,
            };
            PeerResults {
                echoes,
                path: PathProbe { acknowledged: 1430, segments: Some(segments) },
                passes: None,
                handshake: None,
            }
        };
        let answered: Vec<PeerResults> = questions.iter().map(answered).collect();
        let (report, faults) =
            peer_report(&target, &questions, &mut answered.into_iter(), &devices);
        examination.peers.push(report);
        examination.layer("peers", "1 asked", faults);
        assert_eq!(examination.faults, []);
        assert_page("doctor_healthy", |terminal| page(&examination, &[], terminal));
    }
}
