//! `flannelctl paths`: the results of the probes of paths to peers.

use flannel_api::{PathReport, PathState, PathsReport, PathsSummary};
use serde_json::json;

use crate::error::Result;
use crate::terminal::{Style, Terminal, span};
use crate::{Context, Output};

/// The most rows of a page. JSON has all.
const ROWS: usize = 64;

/// `flannelctl paths`.
pub(crate) fn paths(Context { client, terminal, .. }: Context<'_>) -> Result<Output> {
    let report = client.paths()?;
    let now = flannel_api::seconds(std::time::SystemTime::now());
    let ok = report
        .summary
        .as_ref()
        .is_some_and(|summary| summary.failing == 0 && summary.error.is_none());
    Ok(Output { text: page(&report, now, terminal), value: json!(report), ok })
}

/// The numbers of paths in one line: `4998 ok, 2 tunnel blocked; the oldest result is 4 min old`.
pub(crate) fn numbers(summary: &PathsSummary) -> String {
    if let Some(error) = &summary.error {
        return format!("NOT PROBED: {error}");
    }
    let present = summary.states.iter().filter(|(_, count)| **count > 0);
    let states: Vec<String> = present
        .map(|(state, count)| {
            let name = state.name();
            let name = if state.fails() { name.to_uppercase() } else { name.to_owned() };
            format!("{count} {name}")
        })
        .collect();
    match summary.oldest {
        _ if states.is_empty() => "none".to_owned(),
        Some(age) => format!("{}; the oldest result is {} old", states.join(", "), span(age)),
        None => format!("{}; some are not probed yet", states.join(", ")),
    }
}

/// The table of paths, and the faults of those that fail.
fn page(report: &PathsReport, now: f64, terminal: &Terminal) -> String {
    let Some(summary) = &report.summary else {
        return "paths are not probed: no network with a lease runs, or \
                --path-interval is 0\n"
            .to_owned();
    };
    let mut out = terminal.field("paths", Style::Bold, &numbers(summary));
    let shown = || report.paths.iter().take(ROWS);
    let faults: String = shown().map(|path| fault(path, terminal)).collect();
    if !faults.is_empty() {
        out = out + "\n" + &faults;
    }
    if report.paths.is_empty() {
        return out;
    }
    let rows: Vec<_> = shown().map(|path| row(path, now)).collect();
    out.push('\n');
    out += &terminal.table(&["PEER", "FAMILY", "STATE", "ROUND TRIP", "PROBED"], &rows);
    if report.paths.len() > ROWS {
        let more = report.paths.len() - ROWS;
        out += &format!("and {more} more: flannelctl paths --json\n");
    }
    out
}

fn style(state: PathState) -> Style {
    match state {
        PathState::Ok => Style::Plain,
        state if state.fails() => Style::Bad,
        _ => Style::Warning,
    }
}

fn row(path: &PathReport, now: f64) -> (Style, Vec<Vec<String>>) {
    let round_trip = path.round_trip.map_or_else(|| "-".to_owned(), millis);
    let probed = path.probed.map_or_else(|| "-".to_owned(), |at| format!("{} ago", span(now - at)));
    let cells = [path.key.clone(), path.family.clone(), path.state.to_string(), round_trip, probed];
    (style(path.state), cells.map(|cell| vec![cell]).into())
}

fn millis(seconds: f64) -> String {
    format!("{:.2} ms", seconds * 1000.0)
}

/// The fault of a path that was examined, with its repair, or the reason of its MTU.
fn fault(path: &PathReport, terminal: &Terminal) -> String {
    let Some(text) = &path.text else { return String::new() };
    let style = style(path.state);
    let label = if style == Style::Bad { "error" } else { "warning" };
    let mut out = terminal.field(label, style, text);
    if let Some(repair) = &path.repair {
        out += &terminal.command("repair", repair);
    }
    out
}

#[cfg(test)]
mod tests {
    use flannel_api::More;

    use super::*;
    use crate::terminal::tests::assert_page;

    const NOW: f64 = 1_700_000_000.0;

    fn path(key: &str, state: PathState, round_trip: Option<f64>) -> PathReport {
        PathReport {
            key: key.to_owned(),
            family: "IPv4".to_owned(),
            state,
            since: None,
            probed: Some(NOW - 12.0),
            round_trip,
            passes: None,
            mtu: None,
            text: None,
            repair: None,
            more: More::new(),
        }
    }

    fn sample() -> PathsReport {
        let mut blocked = path("10.1.8.0-24", PathState::TunnelBlocked, Some(0.000_41));
        blocked.since = Some(NOW - 90.0);
        blocked.text = Some(
            "no reply from 10.1.8.0, the tunnel address of 10.1.8.0-24, while its public address \
             192.0.2.8 replies: UDP port 8472 may be blocked here, on the way or there, or flannel \
             does not work there"
                .to_owned(),
        );
        blocked.repair =
            Some("iptables -I INPUT -p udp --dport 8472 -j ACCEPT # on both hosts".to_owned());
        let mut narrow = path("10.1.9.0-24", PathState::MtuLowered, Some(0.000_512));
        narrow.since = Some(NOW - 7200.0);
        narrow.mtu = Some(1350);
        narrow.text = Some(
            "packets of more than 1350 bytes are lost on the path to 10.1.9.0/24: its route has \
             mtu 1350"
                .to_owned(),
        );
        let states = [
            (PathState::Ok, 1),
            (PathState::Unknown, 1),
            (PathState::MtuLowered, 1),
            (PathState::TunnelBlocked, 1),
            (PathState::NodeDown, 0),
        ];
        PathsReport {
            version: flannel_api::VERSION,
            summary: Some(PathsSummary {
                interval: 300.0,
                states: states.into(),
                failing: 1,
                lowered: narrow.text.iter().cloned().collect(),
                oldest: Some(71.0),
                error: None,
                more: More::new(),
            }),
            paths: vec![
                blocked,
                narrow,
                path("10.1.7.0-24", PathState::Ok, Some(0.012_3)),
                path("10.1.10.0-24", PathState::Unknown, None),
            ],
            more: More::new(),
        }
    }

    #[test]
    fn failing_paths_are_shown_with_their_repairs() {
        assert_page("paths", |terminal| page(&sample(), NOW, terminal));
    }

    #[test]
    fn paths_that_are_not_probed_are_told_with_the_reason() {
        let terminal = Terminal { width: 80, colours: false };
        let mut report = sample();
        report.summary.as_mut().unwrap().error = Some("no permission".to_owned());
        assert!(page(&report, NOW, &terminal).contains("NOT PROBED: no permission"));
        report.summary = None;
        assert!(page(&report, NOW, &terminal).contains("--path-interval is 0"));
    }

    #[test]
    fn a_path_without_a_result_is_told() {
        let mut summary = sample().summary.unwrap();
        summary.oldest = None;
        assert!(numbers(&summary).ends_with("some are not probed yet"));
        summary.states.values_mut().for_each(|count| *count = 0);
        assert_eq!(numbers(&summary), "none");
    }
}
