//! The options of the log, and the options of klog that Go flannel has.

use flannel_options::go_flags::go_int;
use tracing_subscriber::filter::Targets;

/// The log.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct LogFlags {
    /// The log filter: error, warn, info, debug, trace, or a filter such as
    /// info,flannel_core=debug; info if neither this nor -v is given
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,

    /// The form of the log: lines of text or JSON on standard error, or the journal
    #[arg(
        long,
        value_name = "text|json|journald",
        default_value = "text",
        hide_possible_values = true
    )]
    pub log_format: LogFormat,

    /// The log level of Go flannel: -v=4 is --log debug, -v=6 --log trace; --log wins
    #[arg(id = "v", long = "v", value_name = "LEVEL", default_value = "0",
        allow_hyphen_values = true,
        value_parser = go_int(i64::from(i32::MIN)..=i64::from(i32::MAX)))]
    pub verbosity: i64,

    /// Accepted for Go flannel's command lines, without effect; use --log flannel_core=debug
    #[arg(long, value_name = "PATTERN=LEVEL", default_value = "", hide = true)]
    pub vmodule: String,

    /// Accepted for Go flannel's command lines, without effect
    #[arg(
        id = "log_backtrace_at",
        long = "log_backtrace_at",
        value_name = "FILE:LINE",
        hide = true
    )]
    pub log_backtrace_at: Option<String>,
}

/// `--log-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// A line for each event, on standard error.
    Text,
    /// A line with a JSON object for each event, on standard error.
    Json,
    /// systemd's journal, with a field for each field of an event.
    Journald,
}

impl LogFlags {
    /// The flags that are read and change nothing.
    pub(super) const WITHOUT_EFFECT: [&str; 2] = ["vmodule", "log_backtrace_at"];

    /// The log filter: `--log`, else the filter of `-v`. Kubernetes' conventions: levels up to 3
    /// are for operators, 4 is for debugging, 6 and more logs every message.
    pub fn filter(&self) -> &str {
        match (&self.log, self.verbosity) {
            (Some(filter), _) => filter,
            (None, ..=3) => "info",
            (None, 4..=5) => "debug",
            (None, 6..) => "trace",
        }
    }
}

/// Parses a log filter. A word alone must be a level, or a typing error would silence everything.
///
/// # Errors
/// The text names the wrong part and the right form.
pub(crate) fn log_filter(text: &str) -> Result<Targets, String> {
    let expected = "error, warn, info, debug, trace, off, or parts such as flannel_core=debug, \
                    separated by commas";
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
