#![doc = include_str!("../README.md")]

mod capabilities;
mod changed_config;
mod cli;
mod config;
mod config_validator;
mod control;
mod daemon;
mod disk;
#[cfg(test)]
mod documents;
mod error;
mod firewall;
mod http;
mod klog;
mod kube;
mod leftovers;
mod log;
mod log_format;
mod metrics;
mod notify;
mod observe;
mod preflight;
mod problems;
mod readiness;
mod registry;
mod report;
mod run;
mod state;
mod uplink;
mod wait;
mod why;

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use flannel_core::backend::Backends;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;

use notify::Notifier;
use observe::Observer;

pub use capabilities::Capabilities;
pub use cli::Options;
pub use config::{
    ControlConfig, ControlSocket, DaemonConfig, FirewallConfig, NexthopObjects, StoreConfig,
};
pub use control::ControlFlags;
pub use daemon::Daemon;
pub use error::Error;
pub use firewall::FirewallFlags;
#[cfg(feature = "etcd")]
pub use flannel_options::EtcdFlags;
pub use flannel_options::RegistryUrl;
pub use klog::KlogFlags;
pub use kube::KubeFlags;
pub use log_format::LogFormat;

/// How long a stop waits for work in hand.
const STOP: Duration = Duration::from_millis(800);

/// The whole program with the backends of this build: see [`main_with`].
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    main_with(args, flannel_backends::all())
}

/// The whole program: parses `args` (`args[0]` is the program's name) and the environment, logs to standard error,
/// and runs until SIGINT or SIGTERM (exit code 0) or an error ([`Error::exit_code`]). SIGHUP makes it read again what may
/// have changed. Tells systemd how it is, if `NOTIFY_SOCKET` is set.
///
/// # Blocking
/// It owns the process: a runtime, the signals and the log are set up here. An embedder runs a [`Daemon`].
pub fn main_with(args: impl IntoIterator<Item = OsString>, backends: Backends) -> ExitCode {
    match start(args, backends) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Error::Help(text)) => {
            // Whoever reads it may stop to do so.
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        // Not through the log, which --log may have silenced.
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "flanneld: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn start(args: impl IntoIterator<Item = OsString>, backends: Backends) -> Result<(), Error> {
    let options = Options::parse_from(args, |name| std::env::var_os(name))?;
    let filter = log_filter(options.log_filter()).map_err(Error::Usage)?;
    let (set_filter, given) =
        (log_format::init(options.log_format, filter)?, options.log_filter().to_owned());
    if let Some(flags) = options.without_effect() {
        tracing::info!("{flags}");
    }
    capabilities::join_control_group(&options);
    capabilities::drop_needless(&options);
    let observer = Observer::new(Some(Box::new(move |filter| {
        let filter = log_filter(filter.unwrap_or(&given))?;
        set_filter(filter)
    })));
    let daemon = Daemon::observed(options.config(backends)?, observer.clone());
    let no_socket =
        |error: std::io::Error| Error::Usage(format!("NOTIFY_SOCKET in the environment: {error}"));
    let notifier = Notifier::from_env().map_err(no_socket)?;
    let failed = |error: std::io::Error| Error::File {
        path: "the runtime".into(),
        reason: error.to_string(),
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let ended = runtime.block_on(async {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
                .map(|kind| signal(kind).map_err(failed));
        let (mut interrupt, mut terminate, mut hangup) = (interrupt?, terminate?, hangup?);
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
        tokio::select! {
            ended = daemon.run() => ended.map(|never| match never {}),
            _ = interrupt.recv() => Ok("SIGINT"),
            _ = terminate.recv() => Ok("SIGTERM"),
            never = reloads => match never {},
            never = informed => match never {},
        }
    });
    if let Some(notifier) = &notifier {
        notifier.stopping();
    }
    runtime.shutdown_timeout(STOP);
    ended.map(|signal| tracing::info!("{signal}: stopped; the data path stays in place"))
}

/// Reads `--log`; a word alone must be a level, or a typing error would silence everything.
fn log_filter(text: &str) -> Result<Targets, String> {
    let expected = "error, warn, info, debug, trace, off, or parts such as flannel_core=debug, separated by commas";
    let wrong = |part: &str| format!("--log {text}: {part:?} is not valid, expected {expected}");
    let levels = ["error", "warn", "info", "debug", "trace", "off"];
    let parts: Vec<&str> = text.split(',').map(str::trim).collect();
    let is_wrong = |part: &&&str| {
        let word = !part.contains('=') && !levels.contains(&part.to_ascii_lowercase().as_str());
        word || part.contains(['[', ']', '{', '}', ' '])
    };
    if let Some(part) = parts.iter().find(is_wrong) {
        return Err(wrong(part));
    }
    parts.join(",").parse().map_err(|_| wrong(text))
}
