//! Where the log goes, and in which form.
//!
//! The one thing to know: what is logged is decided by one filter, which can be set while the daemon runs; the form is
//! chosen once.

use std::io;

use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, registry, reload};

use crate::error::Error;

/// `--log-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// A line for each event, on standard error.
    Text,
    /// A JSON object on a line for each event, on standard error.
    Json,
    /// To systemd's journal, with each field of an event as one of the journal's.
    Journald,
}

/// Sets another filter, or says why not.
pub(crate) type SetFilter = Box<dyn Fn(Targets) -> Result<(), String> + Send + Sync>;

/// Begins to log; returns what sets another filter. Another subscriber in this process (a test's) stays.
///
/// # Errors
/// There is no journal.
pub(crate) fn init(format: LogFormat, filter: Targets) -> Result<SetFilter, Error> {
    let (filter, handle) = reload::Layer::<Targets, Registry>::new(filter);
    let _ = Registry::default().with(filter).with(layer(format)?).try_init();
    Ok(Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string())))
}

fn layer<S>(format: LogFormat) -> Result<Box<dyn Layer<S> + Send + Sync>, Error>
where
    S: tracing::Subscriber + for<'a> registry::LookupSpan<'a>,
{
    let lines = || fmt::layer().with_writer(io::stderr).with_ansi(false);
    Ok(match format {
        LogFormat::Text => lines().boxed(),
        LogFormat::Json => lines().json().flatten_event(true).boxed(),
        LogFormat::Journald => {
            let path = "/run/systemd/journal/socket".into();
            let missing = |error: io::Error| Error::File {
                path,
                reason: format!("{error} (see --log-format)"),
            };
            // As systemd and its readers have them.
            let priorities = PriorityMappings {
                error: Priority::Error,
                warn: Priority::Warning,
                info: Priority::Informational,
                debug: Priority::Debug,
                trace: Priority::Debug,
            };
            let journal =
                tracing_journald::layer().map_err(missing)?.with_priority_mappings(priorities);
            journal
                .with_syslog_identifier("flanneld".to_owned())
                .with_field_prefix(Some("FLANNEL".to_owned()))
                .boxed()
        }
    })
}
