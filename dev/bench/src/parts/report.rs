//! The result of a bench.

use std::collections::BTreeMap;

use serde::Serialize;

/// One JSON object. Fields that do not apply are absent.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// The name of the bench. Set before the report is printed.
    pub(crate) bench: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) events: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) samples: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) family: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<String>,
    /// Determines the random choices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<u64>,
    /// The time until all daemons were ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ready_seconds: Option<f64>,
    /// Like other times, a median if there are several runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    /// The time until a snapshot shows all objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_sync_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_seconds: Option<f64>,
    /// The floor with a gateway in each route instead of nexthop objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) classic_floor_seconds: Option<f64>,
    /// The time relative to the floor: the median of the ratios of all rounds, or the ratio of the
    /// medians.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// The time relative to the time for 10,000 peers: the median of rounds that alternate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) growth: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_growth: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p50_ms: Option<f64>,
    /// The percentile of the worst kind, if there are kinds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p99_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p99_ms: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) kinds: BTreeMap<String, Latency>,
    /// The rate of one TCP stream between pods, in gigabits per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gbps: Option<f64>,
    /// The throughput of the kernel's vxlan in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vxlan_gbps: Option<f64>,
    /// The rate of vxlan without a guard in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) gbps_off: Option<f64>,
    /// The rate of 64-byte packets with a guard relative to the rate without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pps_ratio: Option<f64>,
    /// The time in which the kernel takes the pairs of a guard, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) load_s: Option<f64>,
    /// The throughput of a proxy of Go flannel in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) go_gbps: Option<f64>,
    /// Figures of the backend udp, of vxlan and of Go flannel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rows: Vec<Row>,
    /// Messages and bytes to the kernel, relative to what a bare writer sends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) messages_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes_per_peer: Option<f64>,
    /// Messages to the kernel for one more peer, and at a restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) messages_of_one_more: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) messages_of_restart: Option<f64>,
    /// `VmRSS`. Of hostile-lease: by how much it grew.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rss_kib: Option<u64>,
    /// `VmHWM`: the maximum so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hwm_kib: Option<u64>,
    /// Processor time, in per cent of a core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_percent: Option<f64>,
    /// Processor time for one change of a lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cpu_ms_per_change: Option<f64>,
    /// The routes to peers before and after an attack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routes_before: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routes_after: Option<usize>,
    /// The size of a program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
    /// Context switches of all threads, voluntary or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wakeups: Option<u64>,
    /// Unary requests, as the server counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rpcs_per_node: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) streams_per_node: Option<f64>,
    /// Packets that were sent between pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) packets: Option<usize>,
    /// Packets that were lost, also those that had to be lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lost: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) duplicates: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<usize>,
    /// Whether `wrong` is empty. Set before the report is printed.
    pub(crate) ok: bool,
    /// Problems: objects that an independent reader found or missed, and exceeded thresholds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) wrong: Vec<String>,
}

/// The latency of one kind of operation.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Latency {
    pub(crate) samples: usize,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

/// The maximum number of problems that a long check lists.
const LISTED: usize = 40;

/// Replaces the problems after the first [`LISTED`] by their number.
pub(crate) fn shorten(wrong: &mut Vec<String>) {
    if wrong.len() > LISTED {
        let more = wrong.len() - LISTED;
        wrong.truncate(LISTED);
        wrong.push(format!("and {more} more"));
    }
}

/// One figure of the backend udp and of others: the medians of all rounds, and the medians of the
/// ratios.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Row {
    pub(crate) what: String,
    /// `None` if only the ratio counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) udp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) vxlan: Option<f64>,
    /// `udp` relative to `vxlan`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// Of the proxy of Go flannel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) go: Option<f64>,
    /// `udp` relative to `go`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) go_ratio: Option<f64>,
}

impl Report {
    /// Adds a problem if a figure is above its limit.
    pub(crate) fn at_most(&mut self, what: &str, found: Option<f64>, limit: f64) {
        let Some(found) = found else { return };
        if found.is_nan() || found > limit {
            self.wrong.push(format!("{what} is {found:.2}, expected at most {limit}"));
        }
    }

    /// Adds a problem if a figure is below its limit.
    pub(crate) fn at_least(&mut self, what: &str, found: f64, limit: f64) {
        if found.is_nan() || found < limit {
            self.wrong.push(format!("{what} is {found:.2}, expected at least {limit}"));
        }
    }

    /// Prints the report to standard output, and returns whether nothing is wrong.
    pub(crate) fn print(mut self, json: bool) -> anyhow::Result<bool> {
        self.ok = self.wrong.is_empty();
        if json {
            println!("{}", serde_json::to_string(&self)?);
            return Ok(self.ok);
        }
        println!("{}", self.bench);
        let value = serde_json::to_value(&self)?;
        for (name, value) in value.as_object().into_iter().flatten() {
            match value {
                _ if ["bench", "kinds", "rows", "ok", "wrong"].contains(&name.as_str()) => {}
                serde_json::Value::Number(number) if number.is_f64() => {
                    println!("  {name:<22}{:>12.3}", number.as_f64().unwrap_or(f64::NAN));
                }
                serde_json::Value::String(text) => println!("  {name:<22}{text:>12}"),
                value => println!("  {name:<22}{:>12}", value.to_string()),
            }
        }
        if !self.kinds.is_empty() {
            println!("  {:<22}{:>12}{:>12}{:>12}", "", "samples", "p50_ms", "p99_ms");
        }
        for (kind, Latency { samples, p50_ms, p99_ms }) in &self.kinds {
            println!("  {kind:<22}{samples:>12}{p50_ms:>12.3}{p99_ms:>12.3}");
        }
        if !self.rows.is_empty() {
            let names = ["udp", "vxlan", "ratio", "go", "go_ratio"].map(|n| format!("{n:>12}"));
            println!("  {:<36}{}", "", names.concat());
        }
        for Row { what, udp, vxlan, ratio, go, go_ratio } in &self.rows {
            let texts = [*udp, *vxlan, *ratio, *go, *go_ratio].map(|figure| {
                let text = figure.map_or_else(String::new, |figure| format!("{figure:.2}"));
                format!("{text:>12}")
            });
            println!("  {what:<36}{}", texts.concat());
        }
        println!("  {}", if self.ok { "nothing is wrong" } else { "WRONG:" });
        self.wrong.iter().for_each(|line| println!("    {line}"));
        Ok(self.ok)
    }
}

impl Latency {
    /// The latency of samples in milliseconds.
    pub(crate) fn of(figures: &[f64]) -> Self {
        Self {
            samples: figures.len(),
            p50_ms: percentile(figures, 50),
            p99_ms: percentile(figures, 99),
        }
    }
}

/// A percentile of the figures.
pub(crate) fn percentile(figures: &[f64], percent: usize) -> f64 {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    let place = (figures.len() * percent).div_ceil(100).saturating_sub(1);
    figures.get(place).copied().unwrap_or(f64::NAN)
}

/// The median: the middle figure, or the mean of the two in the middle.
pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    let middle = |n: usize| figures.get(n).copied().unwrap_or(f64::NAN);
    f64::midpoint(middle(figures.len().saturating_sub(1) / 2), middle(figures.len() / 2))
}
