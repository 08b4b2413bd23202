#![doc = include_str!("../README.md")]

mod error;
mod offline;
mod options;
pub mod terminal;
/// The commands, one module each.
mod verbs {
    pub(crate) mod cleanup;
    pub(crate) mod config;
    pub(crate) mod docker_opts;
    pub(crate) mod doctor;
    pub(crate) mod lease;
    pub(crate) mod paths;
    pub(crate) mod status;
    pub(crate) mod watch;
    pub(crate) mod why;
}

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use flannel_api::{Client, VERSION};
use flannel_backends::Backends;
use flannel_options::printable::line;
use serde_json::{Value, json};

use error::Result;
use options::{Ctl, Global, Verb, misspelt_variables};
use terminal::{Terminal, print_error};
use verbs::{cleanup, config, docker_opts, doctor, lease, paths, status, watch, why};

pub use options::command;

/// The input of a verb besides its own flags.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    client: &'a Client,
    global: &'a Global,
    backends: &'a Backends,
    terminal: &'a Terminal,
}

/// The result of a verb.
#[derive(Debug)]
pub(crate) struct Output {
    /// The text for people, with a final line feed.
    text: String,
    /// The JSON value for programs.
    value: Value,
    /// No problem was found.
    ok: bool,
}

/// The whole program: parses `args` (`args[0]` is the program's name) and the environment, and runs
/// the verb. Returns the exit code: 0 for success, 1 for a problem or an error, 2 for wrong usage.
/// `backends` are those that a network config may name.
///
/// # Blocking
/// It runs the whole process and sets up a runtime.
pub fn run(args: impl IntoIterator<Item = OsString>, backends: &Backends) -> ExitCode {
    let terminal = Terminal::of_stdout();
    // A closed stdout is not an error.
    let print = |text: &str| _ = terminal.print(text);
    let args: Vec<OsString> = args.into_iter().collect();
    // This is known even if the command line is wrong.
    let json = args.iter().any(|arg| arg == "--json");
    let failed = |error: &str, shown: &str, code: u8| {
        if json {
            let value = json!({ "version": VERSION, "error": error });
            print(&line(&value.to_string()));
        } else {
            print_error(shown);
        }
        ExitCode::from(code)
    };
    let parsed = Ctl::parse_from(args, |name| std::env::var_os(name));
    if let Err(flannel_options::Error::Help(text)) = &parsed {
        print(text);
        return ExitCode::SUCCESS;
    }
    for warning in misspelt_variables(std::env::vars_os().map(|(name, _)| name)) {
        print_error(&format!("flannelctl: {warning}\n"));
    }
    let options = match parsed {
        Ok(options) => options,
        Err(error) => {
            let text = error.to_string();
            let error_text = text.trim().trim_start_matches("error: ");
            return failed(error_text, &text, error.exit_code());
        }
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let text = format!("the runtime: {error}");
            return failed(&text, &line(&format!("flannelctl: {text}")), 1);
        }
    };
    match runtime.block_on(run_verb(&options, backends, &terminal)) {
        Ok(output) => {
            print(&if json { line(&output.value.to_string()) } else { output.text });
            if output.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(failure) => {
            let text = match &failure {
                error::Error::Lines(all) => all.iter().map(|text| line(text)).collect(),
                failure => line(&failure.to_string()),
            };
            failed(&failure.to_string(), &format!("flannelctl: {text}"), failure.exit_code())
        }
    }
}

async fn run_verb(options: &Ctl, backends: &Backends, terminal: &Terminal) -> Result<Output> {
    let global = &options.global;
    let client = Client::at(global.socket());
    let context = Context { client: &client, global, backends, terminal };
    match &options.verb {
        Verb::Status => status::status(context).await,
        Verb::Peers => status::peers(context).await,
        Verb::Paths => paths::paths(context),
        Verb::Why { address } => why::why(context, *address).await,
        Verb::Doctor(flags) => doctor::doctor(context, flags).await,
        Verb::Watch { interval } => {
            let live = std::io::stdout().is_terminal() && !global.json;
            watch::watch(context, *interval, live).await
        }
        Verb::Reload => {
            let report = client.reload()?;
            let text = line(&format!("reloaded: {}", report.found));
            Ok(Output { text, value: json!(report), ok: true })
        }
        Verb::Log { filter } => {
            let report = client.set_log(filter)?;
            Ok(Output {
                text: format!("the log filter is {filter} now, until SIGHUP or reload\n"),
                value: json!(report),
                ok: true,
            })
        }
        Verb::Cleanup(flags) => cleanup::cleanup(context, flags).await,
        Verb::DockerOpts(flags) => docker_opts::docker_opts(flags, &global.subnet_file),
        Verb::Config(verb) => config::config(context, verb).await,
        Verb::Lease(verb) => lease::lease(context, verb).await,
    }
}
