//! What is done for one node: the content of a record.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::address::{Dual, Family};
use serde::{Deserialize, Serialize};

use crate::command::{Failure, Words};

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
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    pub(crate) fn text(&self) -> String {
        // A map with string keys and no floats has a JSON form.
        serde_json::to_string(self).expect("a task has a JSON form")
    }

    /// Whether it is put in place by the same command with the same values.
    pub(crate) fn adds_the_same(&self, other: &Self) -> bool {
        let Self { of, variables, input, add, remove: _, timeout: _, waits: _ } = self;
        (of, variables, input, add) == (&other.of, &other.variables, &other.input, &other.add)
    }

    pub(crate) fn add(&self) -> Result<(), String> {
        let name = if self.of == Of::Node { "PostStartupCommand" } else { "SubnetAddCommand" };
        self.run(name, self.add.as_ref())
    }

    pub(crate) fn remove(&self) -> Result<(), String> {
        let name = if self.of == Of::Node { "ShutdownCommand" } else { "SubnetRemoveCommand" };
        self.run(name, self.remove.as_ref())
    }

    fn run(&self, name: &str, words: Option<&Words>) -> Result<(), String> {
        let Some(words) = words else { return Ok(()) };
        let timeout = Duration::from_secs(self.timeout);
        match words.run(&self.variables, &self.input, timeout) {
            Ok(output) => {
                let subnet = &self.variables["SUBNET"];
                tracing::debug!(command = name, subnet, output, "a command ended");
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
