//! What is done for one node: the content of a record.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use flannel_core::object::{Record, Secret};
use flannel_core::{Subnet, Subnets};
use serde::{Deserialize, Serialize};

use crate::NAME;
use crate::command::{Failure, Limits, Words};

/// The last bytes of the output of a command that an error has.
const SHOWN: usize = 512;

/// The commands for one node, with everything that they need. So the commands for a node that is
/// gone are known after a restart, and after a change of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Whose commands they are.
    #[serde(rename = "for")]
    pub(crate) of: Of,
    pub(crate) variables: BTreeMap<String, String>,
    /// The standard input.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) input: String,
    /// The command that puts it in place, and the one that removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) add: Option<Words>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) remove: Option<Words>,
    /// The time limit of each command, in seconds.
    pub(crate) timeout: u64,
    /// It begins after the commands for this node are in place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) waits: bool,
}

/// Whose commands they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Of {
    /// `PostStartupCommand` and `ShutdownCommand`.
    Node,
    /// `SubnetAddCommand` and `SubnetRemoveCommand`.
    Peer,
}

impl Task {
    /// Its record. The words of the commands and the data of the peer are not shown, because they
    /// may be secrets. The record of a task that is not in place differs from that of one that is.
    pub(crate) fn record(&self, key: Subnet, in_place: bool) -> Record {
        let value = |name: &str| self.variables.get(name).filter(|value| !value.is_empty());
        let at = ["PUBLIC_IP", "PUBLIC_IPV6"].into_iter().filter_map(value);
        let at = at.map(String::as_str).collect::<Vec<_>>().join(", ");
        let of = if self.of == Of::Node { "this node at" } else { "the node at" };
        let outdated = if in_place { "" } else { ", outdated" };
        let content =
            serde_json::to_vec(self).expect("all keys are strings, and there are no floats");
        Record::new(NAME, key, format!("commands for {of} {at}{outdated}"))
            .with_secret(Secret::new(content))
    }

    pub(crate) fn of_record(record: &Record) -> Result<Self, String> {
        let content = record.secret().ok_or("it has no commands")?;
        serde_json::from_slice(content.expose()).map_err(|error| error.to_string())
    }

    /// Whether it is put in place by the same command with the same values.
    pub(crate) fn adds_the_same(&self, other: &Self) -> bool {
        let Self { of, variables, input, add, remove: _, timeout: _, waits: _ } = self;
        (of, variables, input, add) == (&other.of, &other.variables, &other.input, &other.add)
    }

    /// Runs the command that puts it in place. `stopped`: the command is to end.
    pub(crate) fn add(&self, stopped: &AtomicBool) -> Result<(), String> {
        let name = if self.of == Of::Node { "PostStartupCommand" } else { "SubnetAddCommand" };
        self.run(name, self.add.as_ref(), stopped)
    }

    /// The same for the command that removes it.
    pub(crate) fn remove(&self, stopped: &AtomicBool) -> Result<(), String> {
        let name = if self.of == Of::Node { "ShutdownCommand" } else { "SubnetRemoveCommand" };
        self.run(name, self.remove.as_ref(), stopped)
    }

    fn run(&self, name: &str, words: Option<&Words>, stopped: &AtomicBool) -> Result<(), String> {
        let Some(words) = words else { return Ok(()) };
        let limits = Limits { time: Duration::from_secs(self.timeout), output: SHOWN, stopped };
        match words.run(&self.variables, &self.input, limits) {
            Ok(output) => {
                let output = String::from_utf8_lossy(&output.bytes);
                tracing::debug!(command = name, variables = ?self.variables, %output, "it ended");
                Ok(())
            }
            Err(Failure(why)) => Err(format!("{name}: {why}")),
        }
    }
}

/// `SUBNET`, `IPV6SUBNET`, `PUBLIC_IP` and `PUBLIC_IPV6`; empty without such a value.
pub(crate) fn variables(subnets: &Subnets, public: &Dual<IpAddr>) -> BTreeMap<String, String> {
    let text = |value: Option<String>| value.unwrap_or_default();
    let subnet = |family| text(subnets.family(family).map(|subnet| subnet.to_string()));
    let address = |family| text(public[family].map(|address: IpAddr| address.to_string()));
    let all = [
        ("SUBNET", subnet(Family::V4)),
        ("IPV6SUBNET", subnet(Family::V6)),
        ("PUBLIC_IP", address(Family::V4)),
        ("PUBLIC_IPV6", address(Family::V6)),
    ];
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
