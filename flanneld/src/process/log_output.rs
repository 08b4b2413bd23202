//! The output of the log: its form, and its filter, which can be set while the daemon runs.

use std::io;
use std::path::Path;

use flannel_options::printable::Lines;
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
/// This host has no journal, which `format` asks for.
pub(crate) fn init(format: LogFormat, filter: Targets) -> Result<SetFilter, Error> {
    let (filter, handle) = reload::Layer::<Targets, Registry>::new(filter);
    let layer = layer(format, || Lines(io::stderr()))?;
    let _ = Registry::default().with(filter).with(layer).try_init();
    Ok(Box::new(move |filter| handle.reload(filter).map_err(|error| error.to_string())))
}

fn layer<S, W>(format: LogFormat, writer: W) -> Result<Box<dyn Layer<S> + Send + Sync>, Error>
where
    S: tracing::Subscriber + for<'a> registry::LookupSpan<'a>,
    W: for<'a> fmt::MakeWriter<'a> + Send + Sync + 'static,
{
    let lines = || fmt::layer().with_writer(writer).with_ansi(false);
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
            let journal = tracing_journald::layer().map_err(missing)?;
            journal
                .with_priority_mappings(priorities)
                .with_syslog_identifier("flanneld".to_owned())
                .with_field_prefix(Some("FLANNEL".to_owned()))
                .boxed()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// tracing-subscriber writes the value of a field with `%` as it is.
    #[test]
    fn an_event_is_one_printable_line() {
        let text = "a\x1b[2J\x07\u{9b}\u{202e}\nb";
        for format in [LogFormat::Text, LogFormat::Json] {
            let log = tempfile::NamedTempFile::new().unwrap();
            let file = log.reopen().unwrap();
            let subscriber = Registry::default()
                .with(layer(format, move || Lines(file.try_clone().unwrap())).unwrap());
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(reason = %text, "{text}");
            });
            let line = std::fs::read_to_string(log.path()).unwrap();
            let line = line.strip_suffix('\n').unwrap();
            assert!(
                !line.contains(|c: char| c.is_control() || c == '\u{202e}')
                    && line.contains("reason"),
                "{line:?}"
            );
            if format == LogFormat::Json {
                let event: serde_json::Value = serde_json::from_str(line).unwrap();
                assert_eq!((&event["reason"], &event["message"]), (&text.into(), &text.into()));
            }
        }
    }
}
