//! The command line of `lab`.

use std::fmt;

use clap::{Parser, ValueEnum};
use flannel_core::address::Family;
use flannel_lab::{MAX_HOSTS, default_backend};
use serde_json::{Value, json};

/// A cluster on one machine: hosts with a flanneld, pods and a switch, as network namespaces
///
/// Waits until every pod reaches every other (ping, full-size ping, TCP), shows the result and
/// cleans up. Works as root and as an ordinary user.
///
/// Exit status: 0 every pod reached every other, 1 one did not, 2 wrong usage, 130 or 143
/// interrupted.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
pub(crate) struct Options {
    /// The number of hosts, from 1 to 250.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = hosts)]
    pub(crate) hosts: usize,
    /// The backend: a type, or the Backend object of the network config in JSON. The type extension
    /// gets commands that make routes.
    #[arg(long, value_name = "TYPE|JSON")]
    #[arg(default_value = default_backend(), value_parser = backend)]
    pub(crate) backend: Value,
    /// The pods' address families.
    #[arg(long, value_enum, default_value_t = Families::Ipv4)]
    pub(crate) family: Families,
    /// Print one JSON object on stdout instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Stay up until interrupted, and print how to enter a host.
    #[arg(long)]
    pub(crate) hold: bool,
    /// The time for every pod to reach every other; by default 30, and 0.002 for each pair.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) timeout: Option<u64>,
    /// Keep logs, leases and subnet.env files, as after a failure.
    #[arg(long)]
    pub(crate) keep: bool,
}

fn hosts(text: &str) -> Result<usize, String> {
    let hosts = text.parse().ok().filter(|hosts| (1..=MAX_HOSTS).contains(hosts));
    hosts.ok_or_else(|| format!("expected a number from 1 to {MAX_HOSTS}"))
}

/// Parses the `Backend` object of the network config, or only its type.
fn backend(text: &str) -> Result<Value, String> {
    let backend = if text.starts_with('{') {
        serde_json::from_str(text).map_err(|error| {
            format!("{error}; expected an object such as {{\"Type\": \"vxlan\"}}")
        })?
    } else if text.eq_ignore_ascii_case("extension") {
        routes_by_commands()
    } else {
        json!({ "Type": text })
    };
    let kind = backend["Type"].as_str().unwrap_or_default().to_lowercase();
    flannel_backends::all().find(&kind).map_err(|error| error.to_string())?;
    Ok(backend)
}

/// The backend `extension` with commands that do what `host-gw` does. A variable of a family that
/// is not used is empty.
fn routes_by_commands() -> Value {
    let both = |verb: &str| {
        format!(
            "test -z '$SUBNET' || ip route {verb} $SUBNET via $PUBLIC_IP; \
             test -z '$IPV6SUBNET' || ip -6 route {verb} $IPV6SUBNET via $PUBLIC_IPV6"
        )
    };
    json!({
        "Type": "extension",
        "SubnetAddCommand": ["sh", "-ec", both("replace")],
        "SubnetRemoveCommand": ["sh", "-c", both("del")],
    })
}

/// The address families of the pods.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Families {
    Ipv4,
    Ipv6,
    Dual,
}

impl Families {
    pub(crate) fn families(self) -> &'static [Family] {
        match self {
            Self::Ipv4 => &[Family::V4],
            Self::Ipv6 => &[Family::V6],
            Self::Dual => &Family::BOTH,
        }
    }
}

impl fmt::Display for Families {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Dual => "dual",
        })
    }
}
