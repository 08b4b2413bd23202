//! The output of the log: its form, and its filter, which can be set while the daemon runs.

use std::io;
use std::path::Path;

use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt, registry, reload};

use crate::error::Error;
use crate::options::LogFormat;

/// Sets another filter, or returns the reason why it cannot.
pub(crate) type SetFilter = Box<dyn Fn(Targets) -> Result<(), String> + Send + Sync>;

/// Sets up the log, and returns a function that sets another filter. A subscriber that the process
/// already has, as in a test, stays.
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
            let missing = |error: io::Error| {
                let path = Path::new("/run/systemd/journal/socket");
                Error::file(path, &format!("{error} (see --log-format)"))
            };
            // The levels that systemd and its readers use.
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
