//! The log flags of Go flannel, which come from klog.
//!
//! The one thing to know: `--log` says all of it better, and wins; `-v` is for command lines that exist already.

use flannel_options::go_flags::go_int;

/// Go flannel's log flags.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct KlogFlags {
    /// How much to log, Go flannel's way: -v=4 is --log debug, -v=6 --log trace; --log wins
    #[arg(id = "v", long = "v", value_name = "LEVEL", default_value = "0", allow_hyphen_values = true,
        value_parser = go_int(i64::from(i32::MIN)..=i64::from(i32::MAX)))]
    pub verbosity: i64,

    /// Accepted for the sake of Go flannel's command lines, without effect; use --log flannel_core=debug
    #[arg(long, value_name = "PATTERN=LEVEL", default_value = "", hide = true)]
    pub vmodule: String,

    /// Accepted for the sake of Go flannel's command lines, without effect
    #[arg(
        id = "log_backtrace_at",
        long = "log_backtrace_at",
        value_name = "FILE:LINE",
        hide = true
    )]
    pub log_backtrace_at: Option<String>,
}

impl KlogFlags {
    /// The flags that are read and change nothing.
    pub(crate) const WITHOUT_EFFECT: [&str; 2] = ["vmodule", "log_backtrace_at"];

    /// The log filter that `-v` asks for. Kubernetes' conventions: up to 3 is what operators need, 4 is for debugging,
    /// 6 and more tells every message.
    pub(crate) fn filter(&self) -> &'static str {
        match self.verbosity {
            ..=3 => "info",
            4..=5 => "debug",
            6.. => "trace",
        }
    }
}
