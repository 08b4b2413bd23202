//! The kernel's path of udp against vxlan. Both are measured in a guest (`test_support::guest`),
//! because many kernels lack FOU. Its clock counts instructions, so only the ratios count.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Context, anyhow};
use serde_json::{Value, json};
use test_support::guest::run_by_instructions;

use super::{Pair, Pairs};
use crate::parts::process::prepare;
use crate::parts::report::{Report, Row};

/// What is measured, and the number of streams.
const FIGURES: [(&str, usize); 2] =
    [("kernel's path, one stream", 1), ("kernel's path, eight streams", 8)];
const MODULES: [&str; 11] = [
    "bridge",
    "fou",
    "ipip",
    "iptable_filter",
    "iptable_nat",
    "nf_tables",
    "veth",
    "vxlan",
    "xt_MASQUERADE",
    "xt_comment",
    "xt_mark",
];
const ROUNDS: usize = 25;
/// The duration of a measurement by the clock of the guest, which counts instructions.
const TIME: Duration = Duration::from_millis(500);
const LIMIT: f64 = 0.9;

/// The ratios of all figures.
///
/// The guest runs this program with the argument `udp`, and ends in this call. So the call must
/// come first: before it, the guest has no `/proc`.
pub(super) fn measure() -> anyhow::Result<Vec<f64>> {
    let run = || {
        run_by_instructions(&["udp".to_owned()], &MODULES, || {
            println!("{}", in_guest().unwrap_or_else(|error| panic!("{error:#}")));
        })
    };
    // A guest that is not there or fails is a panic, whose text has the reason.
    let printed = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        anyhow!(panic.downcast::<String>().map_or_else(|_| "it panicked".into(), |text| *text))
    })?;
    let line = printed.lines().find(|line| line.starts_with('{'));
    let found: Value = serde_json::from_str(line.context("the guest printed no figures")?)?;
    let ratios: Option<Vec<f64>> =
        FIGURES.into_iter().map(|(what, _)| found[what].as_f64()).collect();
    ratios.with_context(|| format!("a figure is missing: {found}"))
}

/// The ratios, as one JSON object.
fn in_guest() -> anyhow::Result<Value> {
    let interrupter = prepare()?;
    let kernel = json!({ "Type": "udp", "Path": "kernel" });
    let pairs = Pairs {
        udp: Pair::start(kernel, &interrupter)?,
        vxlan: Pair::start("vxlan", &interrupter)?,
        go: None,
    };
    FIGURES
        .into_iter()
        .map(|(what, streams)| {
            let row = pairs.compare(what, ROUNDS, |pair| pair.streams(streams, TIME))?;
            anyhow::Ok((what.to_owned(), json!(row.ratio)))
        })
        .collect()
}

/// Adds the rows. A guest that failed is a problem of the report, like a figure below its limit.
pub(super) fn add(report: &mut Report, measured: anyhow::Result<Vec<f64>>) {
    let ratios = measured.unwrap_or_else(|error| {
        report.wrong.push(format!("kernel's path: {error:#}"));
        Vec::new()
    });
    for ((what, _), ratio) in FIGURES.into_iter().zip(ratios) {
        report.at_least(what, ratio, LIMIT);
        report.rows.push(Row { what: what.to_owned(), ratio: Some(ratio), ..Row::default() });
    }
}
