//! `Commands` is a record keeper that puts a `Task` in place for each node of a network: it runs
//! one command when the node comes, and another one when the node goes. This backend uses it. Use
//! it for a backend of your own whose peers need a program rather than a kernel object.
//!
//! - A task is the content of a `Record`. So the route engine compares, repairs and retries it.
//! - The task of this node is put in place before the tasks of peers that wait for it.
//! - No shell reads a command. It is split into words before variables are replaced.
//! - At most eight commands run at a time, each with a time limit. A command that takes too long is
//!   killed with the processes of its group.
//! - The tasks in place are kept in a directory, with their commands. So the command for a node
//!   that has left is known after a restart, and after a change of the config. Without a directory
//!   nothing is kept: a restart puts all tasks in place again, and does not remove any.
//! - After a restart the tasks of peers are in place, and nothing is run for them. The task of this
//!   node is run again at every start of the process. After a boot all tasks are run again.
//! - The status of a task that failed has the exit status and the end of the output.
//! - A removal that fails is tried again. The keeper gives up a removal that has failed at least
//!   five times, if the last attempt began at least ten seconds after the first failure. It then
//!   writes a line to the log. After a boot it is given up after the first failure, because there
//!   is usually nothing to remove.
//! - `RecordKeeper::stop` kills the commands that run. Then it removes the task of this node, and
//!   waits up to ten seconds for that. After it, no command begins.
//!
//! Each command has a thread while it runs. `Commands` does not block its caller, except for
//! `RecordKeeper::wait`, `RecordKeeper::stop` and the files.
//!
//! ```rust
//! use std::path::Path;
//! use std::sync::Arc;
//! use std::time::Duration;
//! use flannel_backend_extension::commands::{Keepers, Names, Of, Task};
//! use flannel_core::kernel::{RecordKeeper, Outcome};
//! use flannel_core::object::{Change, Object};
//!
//! const NAMES: Names = Names { keeper: "mine", node: ["Start", "Stop"], peer: ["Add", "Remove"] };
//!
//! struct Mine {
//!     keepers: Keepers,
//! }
//!
//! impl Mine {
//!     // As in `Backend::record_keepers`: the same directory has the same keeper.
//!     fn record_keepers(&self, state_dir: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
//!         vec![Arc::new(self.keepers.keeper(NAMES, state_dir.map(|dir| dir.join("mine"))))]
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mine = Mine { keepers: Keepers::new() };
//! let commands = mine.record_keepers(None).remove(0);
//! let task = Task {
//!     of: Of::Peer,
//!     variables: [("SUBNET".to_owned(), "10.1.7.0/24".to_owned())].into(),
//!     input: String::new(),
//!     add: Some(["test", "$SUBNET", "=", "10.1.7.0/24"].into_iter().collect()),
//!     remove: None,
//!     timeout: 30,
//!     waits: false,
//! };
//! let record = Object::from(task.record("mine", "10.1.7.0/24".parse()?));
//! // The route engine does this with the records of the plan.
//! assert_eq!(commands.apply(&[Change::Put(record.clone())]), [Outcome::Started]);
//! commands.wait(&record.key(), Duration::from_secs(30)).into_result()?;
//! assert_eq!(mine.record_keepers(None).remove(0).records()?.len(), 1);
//! # Ok(()) }
//! ```

mod command;
mod files;
mod keeper;
mod keepers;
mod task;

pub use self::command::{Error, Limits, Output, Words};
pub use self::keeper::Commands;
pub use self::keepers::Keepers;
pub use self::task::{Names, Of, Task};
