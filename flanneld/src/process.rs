//! The process of the daemon: arguments, log, capabilities, runtime and signals.

mod capabilities;
mod log_output;
mod notify;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Arg, CommandFactory};
use flannel_api::Deployment;
use flannel_backends::Backends;
use flannel_core::subnet::{StoreFailure, StoreKind};
use flannel_doctor::remedy::render;
use flannel_doctor::store::remedy_of;
use flannel_options::environment::misspelt;
use flannel_options::{EmptyOption, printable};
use tokio::signal::unix::{SignalKind, signal};

use crate::daemon::Daemon;
use crate::error::Error;
use crate::observe::Observer;
use crate::options::{Options, log_filter};
use notify::Notifier;

/// The time that a stop waits for unfinished work.
const STOP: Duration = Duration::from_millis(800);

/// The whole program. Parses `args` (`args[0]` is the program's name) and the environment, logs to
/// standard error, and runs until SIGINT or SIGTERM (exit code 0) or an error
/// ([`Error::exit_code`]). SIGHUP makes it read its config again. Informs systemd if
/// `NOTIFY_SOCKET` is set.
///
/// # Blocking
/// It owns the process, and sets up a runtime, signals and the log. An embedder runs a [`Daemon`].
pub fn main_with(args: impl IntoIterator<Item = OsString>, backends: Backends) -> ExitCode {
    match start(args, backends) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::Options(flannel_options::Error::Help(text))) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        // The error does not go through the log, which --log may disable.
        Err(error) => {
            // The text about wrong usage has several lines, and nothing from outside.
            let shown = if error.exit_code() == 2 { printable::lines } else { printable::line };
            let text = format!("flanneld: {}\n", last_words(&error));
            let _ = std::io::stderr().write_all(shown(&text).as_bytes());
            ExitCode::from(error.exit_code())
        }
    }
}

/// The text of the error that ends the process. If another host has the lease of this node, it has
/// the command that releases the lease, because each later start ends in the same way.
fn last_words(error: &Error) -> String {
    match error {
        Error::Network(cause)
            if matches!(cause.store_failure(), StoreFailure::RivalHost { .. }) =>
        {
            // The command is the same for every store that has leases with holders.
            let remedy = remedy_of(cause, &StoreKind::Other);
            format!("{error}: {}", render(&remedy, Deployment::Systemd))
        }
        _ => error.to_string(),
    }
}

/// Logs the environment variables whose names are similar to the variables of options.
fn warn_of_misspelt_variables() {
    let command = Options::command();
    let names = std::env::vars_os().map(|(name, _)| name);
    for warning in misspelt(names, command.get_arguments().filter_map(Arg::get_long)) {
        tracing::warn!(%warning, "an environment variable is ignored");
    }
}

fn start(args: impl IntoIterator<Item = OsString>, backends: Backends) -> Result<(), Error> {
    let options = Options::parse_from(args, |name| std::env::var_os(name))?;
    let usage = |error: String| Error::from(flannel_options::Error::Usage(error));
    let given = options.log.filter().to_owned();
    let set_filter = log_output::init(options.log.log_format, log_filter(&given).map_err(usage)?)?;
    if let Some(flags) = options.without_effect() {
        tracing::info!(options = %flags, "options have no effect here");
    }
    for EmptyOption { name, default } in options.empty() {
        tracing::warn!(option = name, default, "an option is empty: its default is used");
    }
    warn_of_misspelt_variables();
    capabilities::join_control_group(&options);
    capabilities::drop_needless(&options);
    let observer = Observer::new(Some(Box::new(move |filter| {
        set_filter(log_filter(filter.unwrap_or(&given))?)
    })));
    let config = options.config(backends)?;
    let daemon = Daemon::observed(config, observer.clone());
    let notifier = Notifier::from_env()
        .map_err(|error| usage(format!("NOTIFY_SOCKET in the environment: {error}")))?;
    let failed = |error: std::io::Error| Error::file(Path::new("the runtime"), &error);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let ended = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let mut hangup = signal(SignalKind::hangup()).map_err(failed)?;
        let reloads = async {
            while hangup.recv().await.is_some() {
                notify::reload(notifier.as_ref(), &observer).await;
            }
            std::future::pending::<Infallible>().await
        };
        let informed = async {
            match &notifier {
                Some(notifier) => notifier.inform(&observer).await,
                None => std::future::pending().await,
            }
        };
        let stopping = || {
            if let Some(notifier) = &notifier {
                notifier.stopping();
            }
        };
        // After a signal, no other message to systemd follows.
        let stop = async {
            let signal = tokio::select! {
                _ = interrupt.recv() => "SIGINT",
                _ = terminate.recv() => "SIGTERM",
                never = reloads => match never {},
                never = informed => match never {},
            };
            stopping();
            signal
        };
        daemon.run_until(stop).await.inspect_err(|_| stopping())
    });
    runtime.shutdown_timeout(STOP);
    ended.map(|signal| tracing::info!(%signal, "stopped; the data path stays in place"))
}
