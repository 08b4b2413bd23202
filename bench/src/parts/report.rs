//! What a bench found out.

use std::collections::BTreeMap;

use serde::Serialize;

/// One JSON object; what does not apply is left out.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    /// Its name. Set when it is printed.
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
    /// A median where there are several runs, like the other times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    /// Until all was looked over, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_sync_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_seconds: Option<f64>,
    /// The floor with a gateway in each route instead of nexthop objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) classic_floor_seconds: Option<f64>,
    /// How much longer than the floor: the median of the ratios round by round, or the ratio of the
    /// medians.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// How many times longer than for 10,000 peers: the median of rounds that were measured in
    /// turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) growth: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_growth: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p50_ms: Option<f64>,
    /// Of the worst kind, where there are kinds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p99_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p99_ms: Option<f64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) kinds: BTreeMap<String, Latency>,
    /// `VmRSS`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rss_kib: Option<u64>,
    /// `VmHWM`: the most it ever was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hwm_kib: Option<u64>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) duplicates: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<usize>,
    /// Nothing is wrong. Set when it is printed.
    pub(crate) ok: bool,
    /// What is not as it should be: objects that an independent reader found or missed, limits that
    /// were passed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) wrong: Vec<String>,
}

/// How long one kind of thing took.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Latency {
    pub(crate) samples: usize,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
}

impl Report {
    pub(crate) fn at_most(&mut self, what: &str, found: Option<f64>, limit: f64) {
        let Some(found) = found else { return };
        if found.is_nan() || found > limit {
            self.wrong.push(format!("{what} is {found:.2}, at most {limit} would be right"));
        }
    }

    pub(crate) fn at_least(&mut self, what: &str, found: f64, limit: f64) {
        if found.is_nan() || found < limit {
            self.wrong.push(format!("{what} is {found:.2}, at least {limit} would be right"));
        }
    }

    /// Prints to standard output and says whether all is well.
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
                _ if ["bench", "kinds", "ok", "wrong"].contains(&name.as_str()) => {}
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
        println!("  {}", if self.ok { "all as it should be" } else { "WRONG:" });
        self.wrong.iter().for_each(|line| println!("    {line}"));
        Ok(self.ok)
    }
}

impl Latency {
    /// Of so many milliseconds.
    pub(crate) fn of(figures: &[f64]) -> Self {
        Self {
            samples: figures.len(),
            p50_ms: percentile(figures, 50),
            p99_ms: percentile(figures, 99),
        }
    }
}

/// The figure below which so many of a hundred lie.
pub(crate) fn percentile(figures: &[f64], percent: usize) -> f64 {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    let place = (figures.len() * percent).div_ceil(100).saturating_sub(1);
    figures.get(place).copied().unwrap_or(f64::NAN)
}

/// The middle one, or the mean of the two in the middle.
pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    let middle = |n: usize| figures.get(n).copied().unwrap_or(f64::NAN);
    f64::midpoint(middle(figures.len().saturating_sub(1) / 2), middle(figures.len() / 2))
}
