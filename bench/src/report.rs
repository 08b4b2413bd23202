//! What a bench found out.

use serde::Serialize;

/// One JSON object; what does not apply is left out.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) bench: &'static str,
    pub(crate) peers: u32,
    pub(crate) family: String,
    /// The median over the pairs, like the other times.
    pub(crate) seconds: f64,
    pub(crate) floor_seconds: f64,
    /// The median of the ratios, pair by pair.
    pub(crate) ratio: f64,
    /// An independent reader found exactly the objects that should be there, after every run.
    pub(crate) ok: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) wrong: Vec<String>,
}

impl Report {
    /// Prints to standard output.
    pub(crate) fn print(&self, json: bool) -> anyhow::Result<()> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        println!("{} of {} peers, {}", self.bench, self.peers, self.family);
        println!("  ours     {:>10.1} ms", self.seconds * 1e3);
        println!("  floor    {:>10.1} ms   (a raw writer of the same objects)", self.floor_seconds * 1e3);
        println!("  ratio    {:>10.2}", self.ratio);
        println!("  objects  {}", if self.ok { "all as they should be" } else { "WRONG:" });
        self.wrong.iter().for_each(|line| println!("    {line}"));
        Ok(())
    }
}

/// What a bench of the lease engine found out.
#[derive(Debug, Default, Serialize)]
pub(crate) struct LeaseReport {
    pub(crate) bench: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) network: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) events: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seconds: Option<f64>,
    /// Unary requests, as the server counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rpcs_per_node: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) streams_per_node: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) duplicates: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failed: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) p99_ms: Option<f64>,
    /// What the floor took in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) floor_p99_ms: Option<f64>,
    /// Of the medians.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    /// How much more memory is resident.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) rss_kib: Option<u64>,
    /// Everything is as it should be, and within its limits.
    pub(crate) ok: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) wrong: Vec<String>,
}

impl LeaseReport {
    /// Prints to standard output.
    pub(crate) fn print(&self, json: bool) -> anyhow::Result<()> {
        let value = serde_json::to_value(self)?;
        if json {
            println!("{value}");
            return Ok(());
        }
        for (name, value) in value.as_object().into_iter().flatten() {
            println!("  {name:<18}{value}");
        }
        Ok(())
    }
}

/// The figure below which so many of a hundred lie.
pub(crate) fn percentile(figures: &[f64], percent: usize) -> f64 {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    let place = (figures.len() * percent).div_ceil(100).saturating_sub(1);
    figures.get(place).copied().unwrap_or(f64::NAN)
}

/// The middle one of an odd number of figures.
pub(crate) fn median(figures: impl IntoIterator<Item = f64>) -> f64 {
    let mut figures: Vec<f64> = figures.into_iter().collect();
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}
