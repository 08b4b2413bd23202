//! The result of a run, as data: the JSON object, and the input of the tables.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_lab::{Error, Lab, Matrix, Result, Unreached};
use serde::Serialize;

use crate::cli::options::Options;

/// The result of a run. Displayed as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// Every pod reached every other.
    pub(crate) ok: bool,
    /// The reason why there is no result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error: Option<String>,
    pub(crate) backend: String,
    pub(crate) family: String,
    /// The time from the start of the last daemon until every pod reached every other.
    pub(crate) seconds_to_ready: Option<f64>,
    pub(crate) hosts: Vec<HostRow>,
    pub(crate) pairs: Vec<PairRow>,
}

/// A host and its lease.
#[derive(Debug, Serialize)]
pub(crate) struct HostRow {
    pub(crate) name: String,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) subnets: Vec<String>,
    pub(crate) mtu: u32,
    pub(crate) pod: String,
    pub(crate) pod_addresses: Vec<IpAddr>,
    pub(crate) daemon_pid: Option<u32>,
    /// The daemon's resident memory in KiB.
    pub(crate) vm_rss_kib: Option<u64>,
}

/// An ordered pair of pods.
#[derive(Debug, Serialize)]
pub(crate) struct PairRow {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) family: &'static str,
    pub(crate) ok: bool,
    pub(crate) rtt_ms: Option<f64>,
    pub(crate) tcp_bytes: usize,
    pub(crate) error: Option<String>,
    #[serde(skip)]
    pub(crate) cell: String,
}

impl Outcome {
    pub(crate) fn new(options: &Options, lab: &Lab, matrix: &Matrix) -> Result<Self> {
        let mut hosts = Vec::new();
        for host in lab.hosts() {
            let Some(env) = host.subnet_env()? else { continue };
            let Some(pod) = host.pod() else { continue };
            hosts.push(HostRow {
                name: host.name().to_owned(),
                addresses: host.addresses().values().copied().collect(),
                subnets: env.subnets.values().map(ToString::to_string).collect(),
                mtu: env.mtu,
                pod: pod.name().to_owned(),
                pod_addresses: pod.addresses().values().copied().collect(),
                daemon_pid: host.daemon_pid(),
                vm_rss_kib: host.daemon_rss(),
            });
        }
        let pair = |pair: &flannel_lab::Pair| PairRow {
            from: pair.from.clone(),
            to: pair.to.clone(),
            family: if pair.family == Family::V4 { "ipv4" } else { "ipv6" },
            ok: pair.is_ok(),
            rtt_ms: pair.rtt.map(milliseconds),
            tcp_bytes: pair.tcp_bytes,
            error: pair.error.as_ref().map(ToString::to_string),
            cell: cell(pair.rtt, pair.error.as_ref()),
        };
        Ok(Self {
            ok: matrix.is_complete() && hosts.len() == lab.hosts().len(),
            error: None,
            backend: options.backend_type(),
            family: options.family.to_string(),
            seconds_to_ready: matrix.time_to_complete().map(|time| rounded(time.as_secs_f64())),
            hosts,
            pairs: matrix.pairs.iter().map(pair).collect(),
        })
    }

    /// The outcome of a run that failed.
    pub(crate) fn failed(options: &Options, error: &Error) -> Self {
        Self {
            ok: false,
            error: Some(error.to_string()),
            backend: options.backend_type(),
            family: options.family.to_string(),
            seconds_to_ready: None,
            hosts: Vec::new(),
            pairs: Vec::new(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

/// The result of a pair in at most eight characters.
fn cell(rtt: Option<Duration>, error: Option<&Unreached>) -> String {
    match error {
        None => rtt.map_or_else(|| "ok".to_owned(), |rtt| format!("{:.3}", milliseconds(rtt))),
        Some(Unreached::NoReply) => "no reply".into(),
        Some(Unreached::FullSizeLost { .. } | Unreached::PathMtu { .. }) => "bad MTU".into(),
        Some(Unreached::TcpRefused) => "refused".into(),
        Some(Unreached::TcpStalled { .. }) => "stalled".into(),
        Some(Unreached::Unfinished) => "too late".into(),
        Some(_) => "no TCP".into(),
    }
}

fn milliseconds(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1000.0)
}

/// Rounds to three decimals.
fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}
