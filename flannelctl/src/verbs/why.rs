//! `flannelctl why`: the answer of the daemon, or without a daemon of the store and the kernel.

use std::net::IpAddr;

use flannel_api::{ObjectState, WhyReport};
use flannel_doctor::diagnosis::why::{RouteInputs, diagnose, lookup};
use serde_json::json;

use crate::error::Result;
use crate::offline::Known;
use crate::options::Global;
use crate::terminal::{Style, Terminal, bytes, span};
use crate::{Context, Output, offline};

/// Explains the path of packets to an address.
pub(crate) async fn why(context: Context<'_>, address: IpAddr) -> Result<Output> {
    let report = match context.client.why(address) {
        Ok(report) => report,
        Err(flannel_api::Error::NoDaemon { .. }) => without_daemon(context.global, address).await?,
        Err(failure) => return Err(failure.into()),
    };
    Ok(Output { text: page(&report, context.terminal), ok: report.ok, value: json!(report) })
}

async fn without_daemon(global: &Global, address: IpAddr) -> Result<WhyReport> {
    let known = Known::of(global).await;
    let Known { config, leases, stale } =
        known.unwrap_or_else(|error| Known { stale: Some(error), ..Known::default() });
    let own = offline::own_subnets(global);
    let lease =
        leases.iter().find(|lease| lease.subnets.iter().any(|subnet| subnet.contains(address)));
    let ours = lease.filter(|lease| Some(lease.subnets) == own);
    let answer = lookup(offline::kernel()?, address).await;
    let why = diagnose(
        address,
        &RouteInputs {
            config: config.as_ref(),
            own: ours.map(|ours| &**ours),
            lease: lease.map(|lease| &**lease),
            answer,
            ..RouteInputs::default()
        },
    );
    Ok(WhyReport { stale, ..why })
}

fn page(why: &WhyReport, terminal: &Terminal) -> String {
    let (style, word) = if why.ok { (Style::Good, "ok") } else { (Style::Bad, "problem") };
    let mut out = terminal.field(word, style, &why.verdict);
    if let Some(hint) = &why.hint {
        out += &terminal.command("try", hint);
    }
    if let Some(stale) = &why.stale {
        out += &terminal.field("warning", Style::Warning, stale);
    }
    out.push('\n');
    let none = || "none".to_owned();
    out += &terminal.field("address", Style::Bold, &why.address);
    out += &terminal.field("network", Style::Bold, &why.network.clone().unwrap_or_else(none));
    let lease = match (&why.lease, &why.node) {
        (Some(lease), Some(node)) => format!("{lease} of {node}"),
        _ => none(),
    };
    out += &terminal.field("lease", Style::Bold, &lease);
    if let Some(why) = &why.rejection {
        out += &terminal.field("", Style::Bad, &format!("REJECTED: {}", why.text));
    }
    for (n, wanted) in why.objects.iter().enumerate() {
        let state = match &wanted.state {
            state @ ObjectState::InPlace => state.to_string(),
            state @ ObjectState::Failing { error } => {
                format!("{}: {error}", state.to_string().to_uppercase())
            }
            state => state.to_string().to_uppercase(),
        };
        let label = if n == 0 { "objects" } else { "" };
        out += &terminal.field(label, Style::Bold, &format!("{}, {state}", wanted.object));
    }
    if let Some(tunnel) = &why.tunnel {
        let text = format!(
            "{}, {}, {} received, {} sent{}",
            tunnel.device,
            tunnel.handshake.map_or_else(
                || "no handshake".to_owned(),
                |age| format!("last handshake {} ago", span(age))
            ),
            bytes(tunnel.received),
            bytes(tunnel.sent),
            tunnel.endpoint.as_ref().map(|to| format!(", roamed to {to}")).unwrap_or_default()
        );
        out += &terminal.field("tunnel", Style::Bold, &text);
    }
    out += &terminal.field("kernel", Style::Bold, &why.kernel);
    out
}

#[cfg(test)]
mod tests {
    use flannel_api::{More, ObjectReport, TunnelReport};

    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn a_shadowed_peer_is_shown_with_both_routes() {
        let object = |text: &str| ObjectReport { object: text.into(), state: ObjectState::InPlace };
        let why = WhyReport {
            version: 1,
            address: "10.1.7.9".into(),
            ok: false,
            verdict: "shadowed: packets go via 192.0.2.99 dev eth0 instead of via 10.1.7.0 dev \
                flannel.1, because of a more specific route or a rule of another program"
                .into(),
            hint: Some(
                "ip route del $(ip route get fibmatch 10.1.7.9 | grep -v ^default) # first see ip \
                rule: if a rule is the cause, delete it instead"
                    .into(),
            ),
            network: Some("10.1.0.0/16".into()),
            lease: Some("10.1.7.0-24".into()),
            node: Some("192.0.2.7 (vxlan)".into()),
            rejection: None,
            objects: vec![
                object("neigh 10.1.7.0 lladdr 0a:00:00:00:00:07 dev flannel.1"),
                ObjectReport {
                    state: ObjectState::Failing {
                        error: "No space left on device (os error 28)".into(),
                    },
                    ..object("fdb 0a:00:00:00:00:07 dst 192.0.2.7 dev flannel.1")
                },
            ],
            kernel: "via 192.0.2.99 dev eth0".into(),
            tunnel: None,
            stale: None,
            more: More::new(),
        };
        let expected = "\
problem    shadowed: packets go via 192.0.2.99 dev eth0 instead of via 10.1.7.0
           dev flannel.1, because of a more specific route or a rule of another
           program
           try: ip route del $(ip route get fibmatch 10.1.7.9 | grep -v ^default)
                # first see ip rule: if a rule is the cause, delete it instead

address    10.1.7.9
network    10.1.0.0/16
lease      10.1.7.0-24 of 192.0.2.7 (vxlan)
objects    neigh 10.1.7.0 lladdr 0a:00:00:00:00:07 dev flannel.1, in place
           fdb 0a:00:00:00:00:07 dst 192.0.2.7 dev flannel.1, FAILING: No space
           left on device (os error 28)
kernel     via 192.0.2.99 dev eth0
";
        let text = page(&why, &Terminal { width: 80, colours: false });
        assert_eq!(text, expected, "\n{text}");
        assert_page("why_shadowed", |terminal| page(&why, terminal));
    }

    #[test]
    fn a_pending_peer_is_shown_with_its_objects() {
        let object = |text: &str| ObjectReport { object: text.into(), state: ObjectState::Pending };
        let why = WhyReport {
            version: 1,
            address: "fd00:1:0:7::9".into(),
            ok: false,
            verdict:
                "it belongs to 192.0.2.7, 2001:db8::7 (vxlan), but none of that lease's objects \
                is in place yet: they are queued"
                    .into(),
            hint: Some("flannelctl watch".into()),
            network: Some("fd00:1::/48".into()),
            lease: Some("10.1.7.0-24&fd00:1:0:7::-64".into()),
            node: Some("192.0.2.7, 2001:db8::7 (vxlan)".into()),
            rejection: None,
            objects: [
                "neigh fd00:1:0:7:: lladdr 0a:00:00:00:00:07 dev flannel-v6.1",
                "fdb 0a:00:00:00:00:07 dst 2001:db8::7 dev flannel-v6.1",
                "route fd00:1:0:7::/64 via fd00:1:0:7:: dev flannel-v6.1 onlink",
            ]
            .map(object)
            .into(),
            kernel: "nowhere".into(),
            tunnel: None,
            stale: None,
            more: More::new(),
        };
        assert_page("why_waits", |terminal| page(&why, terminal));
    }

    #[test]
    fn an_encrypted_tunnel_is_shown() {
        let tunnel = TunnelReport {
            device: "flannel-wg".into(),
            handshake: Some(12.0),
            endpoint: Some("198.51.100.7:40000".into()),
            received: 1_288_490,
            sent: 512,
        };
        let page = |tunnel| {
            let why = WhyReport { tunnel: Some(tunnel), ..flannel_api::testing::why_report() };
            page(&why, &Terminal { width: 120, colours: false })
        };
        let line = "\ntunnel     flannel-wg, last handshake 12 s ago, 1.2 MiB received, 512 B \
                    sent, roamed to 198.51.100.7:40000\n";
        assert!(page(tunnel.clone()).contains(line), "{}", page(tunnel));
        let none = TunnelReport { handshake: None, endpoint: None, ..tunnel };
        let line = "\ntunnel     flannel-wg, no handshake, 1.2 MiB received, 512 B sent\n";
        assert!(page(none.clone()).contains(line), "{}", page(none));
    }
}
