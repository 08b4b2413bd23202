//! The commands for one node, which are the content of a record.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::object::{Record, Secret};
use serde::{Deserialize, Serialize};

use crate::commands::command::{Limits, Words};

/// The last bytes of the output of a command that an error has.
const SHOWN: usize = 512;

/// The commands for one node, with everything that they need. So the commands for a node that is
/// gone are known after a restart, and after a change of the config. `Debug` shows no words,
/// input or variables, because they may be secrets.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Whose commands they are.
    #[serde(rename = "for")]
    pub of: Of,
    /// The environment of the commands, and the values for their words.
    pub variables: BTreeMap<String, String>,
    /// The standard input.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub input: String,
    /// The command that puts the task in place. `None` if nothing is run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add: Option<Words>,
    /// The command that removes the task. `None` if nothing is run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remove: Option<Words>,
    /// The time limit of each command, in seconds: 1 or more. With 0 a command is killed at once.
    pub timeout: u64,
    /// Whether the task begins only after the task of this node is in place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, timeout, waits, .. } = self;
        let mut shown = f.debug_struct("Task");
        shown.field("of", of).field("timeout", timeout).field("waits", waits);
        shown.finish_non_exhaustive()
    }
}

/// Whose commands they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Of {
    /// This node. Its commands to remove run when the keeper stops.
    Node,
    /// Another node.
    Peer,
}

/// The names of a record keeper and of its commands, for records, errors and logs.
#[derive(Debug, Clone, Copy)]
pub struct Names {
    /// The name of the keeper.
    pub keeper: &'static str,
    /// The commands that put the task of this node in place, and that remove it.
    pub node: [&'static str; 2],
    /// The commands that put the task of a peer in place, and that remove it.
    pub peer: [&'static str; 2],
}

impl Names {
    fn of(&self, of: Of) -> [&'static str; 2] {
        match of {
            Of::Node => self.node,
            Of::Peer => self.peer,
        }
    }
}

impl Task {
    /// Its record in the keeper of this name ([`Names::keeper`]). A record keeper of another name
    /// refuses it. `key` is a subnet of the node. The words of the commands and the input are not
    /// shown, because they may be secrets. The variables `PUBLIC_IP` and `PUBLIC_IPV6` are.
    pub fn record(&self, keeper: &'static str, key: Subnet) -> Record {
        self.record_with(keeper, key, true)
    }

    /// The record of this task. It differs between a task that is in place and one that is not.
    pub(crate) fn record_with(&self, keeper: &'static str, key: Subnet, in_place: bool) -> Record {
        let at = ["PUBLIC_IP", "PUBLIC_IPV6"]
            .into_iter()
            .filter_map(|name| self.variables.get(name))
            .filter(|address| !address.is_empty())
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ");
        let of = if self.of == Of::Node { "this node at" } else { "the node at" };
        let outdated = if in_place { "" } else { ", outdated" };
        let content =
            serde_json::to_vec(self).expect("all keys are strings, and there are no floats");
        Record::new(keeper, key, format!("commands for {of} {at}{outdated}"))
            .with_secret(Secret::new(content))
    }

    pub(crate) fn of_record(record: &Record) -> Result<Self, String> {
        let content = record.secret().ok_or("it has no commands")?;
        serde_json::from_slice(content.expose()).map_err(|error| error.to_string())
    }

    /// Whether it is put in place by the same command with the same values.
    pub(crate) fn adds_the_same(&self, other: &Self) -> bool {
        let Self { of, variables, input, add, remove: _, timeout: _, waits: _ } = self;
        *of == other.of
            && *variables == other.variables
            && *input == other.input
            && *add == other.add
    }

    /// Runs the command that puts it in place. The command is killed when `stopped` becomes true.
    pub(crate) fn add(&self, names: &Names, stopped: &AtomicBool) -> Result<(), String> {
        self.run(names.of(self.of)[0], self.add.as_ref(), stopped)
    }

    /// Runs the command that removes it. The command is killed when `stopped` becomes true.
    pub(crate) fn remove(&self, names: &Names, stopped: &AtomicBool) -> Result<(), String> {
        self.run(names.of(self.of)[1], self.remove.as_ref(), stopped)
    }

    fn run(&self, name: &str, words: Option<&Words>, stopped: &AtomicBool) -> Result<(), String> {
        let Some(words) = words else { return Ok(()) };
        let limits = Limits { time: Duration::from_secs(self.timeout), output: SHOWN, stopped };
        match words.run(&self.variables, &self.input, limits) {
            Ok(output) => {
                let output = output.text();
                tracing::debug!(command = name, variables = ?self.variables, %output, "it ended");
                Ok(())
            }
            Err(error) => Err(format!("{name}: {error}")),
        }
    }
}
