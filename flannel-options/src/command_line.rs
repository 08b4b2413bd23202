//! Parses a Go command line and the environment into clap's matches.
//!
//! A flag on the command line takes precedence over its variable, even with an empty value, which
//! counts as not given. An empty variable counts as unset.
//!
//! **Source**: Go `flag`, coreos `flagutil.SetFlagsFromEnv`.

pub mod environment;
pub mod go_flags;

use std::ffi::{OsStr, OsString};

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, Command};

use crate::Error;
use crate::command_line::environment::{FromEnvironment, variable};
use crate::command_line::go_flags::{go_bool, go_int, go_style, is_given};

/// A parsed command line.
#[derive(Debug)]
pub struct CommandLine {
    /// The values. A value from the environment counts as given on the command line.
    pub matches: ArgMatches,
    /// The flags whose values come from the environment.
    pub environment: FromEnvironment,
    /// The options that have their default because their value is empty.
    pub empty: Vec<EmptyOption>,
}

/// An option that was given with an empty value, which counts as not given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyOption {
    /// The flag or the variable, such as `--etcd-prefix` or `FLANNELD_ETCD_PREFIX`.
    pub name: String,
    /// The default, which is used instead. It is not empty.
    pub default: String,
}

impl CommandLine {
    /// Parses `args` (`args[0]` is the program's name) and the environment.
    ///
    /// # Errors
    /// [`Error::Usage`] with the text to print; `--help` and `--version` are [`Error::Help`].
    pub fn parse(
        command: Command,
        args: impl IntoIterator<Item = OsString>,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, Error> {
        let long = |arg: &Arg| arg.get_long().map(str::to_owned);
        let flags: Vec<String> = command.get_arguments().filter_map(long).collect();
        let with_value = command
            .get_arguments()
            .filter(|arg| arg.get_action().takes_values() && !arg.is_require_equals_set());
        let given = go_style(args, &flags, &with_value.filter_map(long).collect::<Vec<_>>());
        let mut args: Vec<OsString> =
            given.iter().filter(|arg| !is_empty_text(&command, arg)).cloned().collect();
        let mut environment = FromEnvironment::default();
        // Help does not depend on the environment.
        let help_flags = ["--help", "-h", "--version", "-V"];
        let wants_help = given.iter().any(|arg| help_flags.iter().any(|flag| arg == flag));
        for flag in flags.iter().filter(|_| !wants_help) {
            if let Some(arg) = environment.argument(flag, &given, &env) {
                // Before positional words, which end the flags.
                args.insert(1.min(args.len()), arg);
            }
        }
        let empty = empty_options(&command, &given, &args, &env);
        match with_plain_usage(command).try_get_matches_from(args) {
            Ok(matches) => Ok(Self { matches, environment, empty }),
            Err(error) if error.use_stderr() => Err(environment.usage(with_advice(&error))),
            Err(error) => Err(Error::Help(error.render().to_string())),
        }
    }
}

/// The options with a default that are not among `args`, and are empty in the environment or on the
/// command line `given`.
fn empty_options(
    command: &Command,
    given: &[OsString],
    args: &[OsString],
    env: impl Fn(&str) -> Option<OsString>,
) -> Vec<EmptyOption> {
    let option = |arg: &Arg| {
        let flag = arg.get_long().filter(|flag| !is_given(args, flag))?;
        let default = arg.get_default_values().join(OsStr::new(",")).into_string().ok()?;
        let name = if is_given(given, flag) {
            format!("--{flag}")
        } else {
            Some(variable(flag)).filter(|name| env(name).is_some_and(|value| value.is_empty()))?
        };
        (!default.is_empty()).then_some(EmptyOption { name, default })
    };
    command.get_arguments().filter_map(option).collect()
}

/// The command with the usage line of its help in its errors. clap's own line lists the options
/// that were given as if they were required.
pub fn with_plain_usage(mut command: Command) -> Command {
    command.build();
    plain(command)
}

fn plain(mut command: Command) -> Command {
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim().to_owned();
    command.mut_subcommands(plain).override_usage(usage)
}

/// Whether the argument is a text flag with an empty value, which counts as not given, as in Go. An
/// empty value of a number or a switch is an error. Numbers and switches are recognized by their
/// default.
fn is_empty_text(command: &Command, arg: &OsStr) -> bool {
    let text = arg.to_str().and_then(|arg| arg.strip_prefix("--"));
    let Some(flag) =
        text.and_then(|text| text.strip_suffix('=')).filter(|flag| !flag.contains('='))
    else {
        return false;
    };
    let arg = command.get_arguments().find(|arg| arg.get_long() == Some(flag));
    let default = arg.and_then(|arg| arg.get_default_values().first()?.to_str());
    !default.is_some_and(|text| go_bool(text).is_ok() || go_int(i64::MIN..=i64::MAX)(text).is_ok())
}

/// clap's text, with advice about Go's switches, which clap does not know.
fn with_advice(error: &clap::Error) -> String {
    let text = error.render().to_string();
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if go_bool(word).is_ok() => {
            format!("{text}\n  tip: write the value of a switch after =, as in --ip-masq={word}\n")
        }
        _ => text,
    }
}
