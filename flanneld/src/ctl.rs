//! `flannelctl`: asks the daemon how it is, and looks after store and kernel without it.
//!
//! The one thing to know: each verb makes a [`Said`], a text for people and a value for programs; what is shown is
//! decided once, here. That whoever reads it stops to do so is its own affair, and no reason to panic. Exit status 0: all is well; 1: it is not, or it could not be done; 2: wrong usage.

mod cleanup;
mod config;
mod docker_opts;
mod doctor;
mod lease;
mod offline;
mod options;
mod paper;
mod status;
mod watch;
mod why;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use flannel_api::{Client, VERSION, request};
use flannel_backends::Backends;
use serde_json::Value;

use crate::error::Error;
use options::{Ctl, Verb};
use paper::Paper;

pub use options::command;

/// What a verb found out.
#[derive(Debug)]
pub(crate) struct Said {
    /// For people; ends with a line feed.
    text: String,
    /// For programs.
    value: Value,
    /// All is well.
    ok: bool,
}

/// Why a verb could not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The daemon cannot be asked.
    #[error(transparent)]
    Api(#[from] flannel_api::Error),
    /// Something is not as it must be, and this says what would be right.
    #[error("{0}")]
    Refused(String),
    /// As the daemon would fail.
    #[error(transparent)]
    Daemon(#[from] Error),
}

impl From<flannel_options::Error> for Failure {
    fn from(error: flannel_options::Error) -> Self {
        Self::Daemon(error.into())
    }
}

impl From<flannel_core::Error> for Failure {
    fn from(error: flannel_core::Error) -> Self {
        Self::Daemon(error.into())
    }
}

impl From<flannel_core::KernelError> for Failure {
    fn from(error: flannel_core::KernelError) -> Self {
        Self::Daemon(error.into())
    }
}

type Result<T, E = Failure> = std::result::Result<T, E>;

/// The whole of `flannelctl`: parses `args` (`args[0]` is the program's name) and the environment, does what they say,
/// and returns the exit code.
///
/// # Blocking
/// It owns the process: a runtime is set up here.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let options = match Ctl::parse_from(args, |name| std::env::var_os(name)) {
        Ok(options) => options,
        Err(Error::Help(text)) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let _ = write!(std::io::stderr(), "{error}");
            return ExitCode::from(error.exit_code());
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "flannelctl: the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let paper = Paper::of_terminal();
    match runtime.block_on(carry_out(&options, &Backends::default(), &paper)) {
        Ok(said) => {
            show(&said, options.global.json);
            if said.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(failure) => {
            if options.global.json {
                let value = serde_json::json!({ "version": VERSION, "error": failure.to_string() });
                let _ = writeln!(std::io::stdout(), "{value}");
            } else {
                let _ = writeln!(std::io::stderr(), "flannelctl: {failure}");
            }
            ExitCode::FAILURE
        }
    }
}

fn show(said: &Said, json: bool) {
    let text = if json { format!("{}\n", said.value) } else { said.text.clone() };
    let _ = std::io::stdout().write_all(text.as_bytes());
}

async fn carry_out(options: &Ctl, backends: &Backends, paper: &Paper) -> Result<Said> {
    let global = &options.global;
    let client = Client::at(global.socket());
    match &options.verb {
        Verb::Status => status::status(&client, global, backends, paper).await,
        Verb::Peers => status::peers(&client, global, paper).await,
        Verb::Why { address } => why::why(&client, global, paper, *address).await,
        Verb::Doctor(flags) => doctor::doctor(&client, global, backends, paper, flags).await,
        Verb::Watch { interval } => {
            let live = std::io::stdout().is_terminal() && !global.json;
            watch::watch(&client, global, backends, paper, *interval, live).await
        }
        Verb::Reload => {
            let value = client.ask("POST", request::RELOAD)?;
            let text = format!("read again: {}\n", value["found"].as_str().unwrap_or_default());
            Ok(Said { text, value, ok: true })
        }
        Verb::Log { filter } => {
            let value = client.ask("POST", &request::log(filter))?;
            Ok(Said {
                text: format!("the log filter is {filter} now, until SIGHUP or reload\n"),
                value,
                ok: true,
            })
        }
        Verb::Cleanup(flags) => cleanup::cleanup(&client, global, backends, flags).await,
        Verb::DockerOpts(flags) => docker_opts::docker_opts(flags, &global.subnet_file),
        Verb::Config(verb) => config::config(global, backends, paper, verb).await,
        Verb::Lease(verb) => lease::lease(global, paper, verb).await,
    }
}
