//! The options of the backend.

use std::time::Duration;

use crate::commands::Words;
use flannel_core::json::{FieldError, Fields};
use flannel_core::{Config, Result};

use crate::refuse;

/// The default time limit of a command, and the largest one, in seconds.
const TIMEOUT: u64 = 30;
const LONGEST: u64 = 60;
const COMMAND: &str = "a string, or an array with one string for each word";

/// The commands of the config. Nothing is run for a command that is `None`.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) pre_startup: Option<Words>,
    pub(crate) post_startup: Option<Words>,
    pub(crate) subnet_add: Option<Words>,
    pub(crate) subnet_remove: Option<Words>,
    pub(crate) shutdown: Option<Words>,
    timeout: u64,
}

impl Options {
    pub(crate) const NAMES: [&str; 6] = [
        "PreStartupCommand",
        "PostStartupCommand",
        "SubnetAddCommand",
        "SubnetRemoveCommand",
        "ShutdownCommand",
        "CommandTimeout",
    ];

    pub(crate) fn parse(config: &Config) -> Result<Self> {
        Self::read(config).map_err(|error| refuse(error.to_string()))
    }

    fn read(config: &Config) -> std::result::Result<Self, FieldError> {
        let fields = config.backend.fields()?;
        let [pre, post, add, remove, shutdown, timeout] = Self::NAMES;
        Ok(Self {
            pre_startup: command(&fields, pre)?,
            post_startup: command(&fields, post)?,
            subnet_add: command(&fields, add)?,
            subnet_remove: command(&fields, remove)?,
            shutdown: command(&fields, shutdown)?,
            timeout: limit(&fields, timeout)?,
        })
    }

    /// The time limit of each command.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Checks that the programs exist on this host.
    pub(crate) fn check_programs(&self) -> Result<()> {
        let commands = [
            &self.pre_startup,
            &self.post_startup,
            &self.subnet_add,
            &self.subnet_remove,
            &self.shutdown,
        ];
        for (name, words) in Self::NAMES.into_iter().zip(commands) {
            if let Some(program) = words.as_ref().and_then(Words::missing_program) {
                return Err(refuse(format!(
                    "field {name}: there is no program {program:?} on this host, expected a file \
                     in PATH that may be executed; no shell runs the command"
                )));
            }
        }
        Ok(())
    }
}

/// Reads a command. A command without words counts as missing.
fn command(fields: &Fields, name: &str) -> std::result::Result<Option<Words>, FieldError> {
    let words: Option<Words> = fields.take(name, COMMAND)?;
    Ok(words.filter(|words| !words.is_empty()))
}

fn limit(fields: &Fields, name: &str) -> std::result::Result<u64, FieldError> {
    let expected = format!("seconds from 1 to {LONGEST}");
    let seconds = fields.take::<u64>(name, &expected)?.unwrap_or(TIMEOUT);
    if (1..=LONGEST).contains(&seconds) {
        return Ok(seconds);
    }
    Err(fields.error(name, &seconds, &expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &str) -> std::result::Result<Options, String> {
        let text =
            format!(r#"{{"Network":"10.1.0.0/16","Backend":{{"Type":"extension"{options}}}}}"#);
        Options::parse(&Config::parse(&text).unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn options_are_checked() {
        let options = parse("").unwrap();
        assert_eq!(options.timeout().as_secs(), 30);
        assert_eq!(options.subnet_add, None);
        let options = parse(r#","subnetaddcommand":" ","CommandTimeout":7"#).unwrap();
        assert_eq!(options.timeout().as_secs(), 7);
        assert_eq!(options.subnet_add, None);
        for (wrong, parts) in [
            (r#","SubnetAddCommand":7"#, ["SubnetAddCommand", "7", "a string, or an array"]),
            (r#","ShutdownCommand":["a",1]"#, ["ShutdownCommand", "[\"a\",1]", "for each word"]),
            (r#","CommandTimeout":0"#, ["CommandTimeout", "0", "1 to 60"]),
            (r#","CommandTimeout":"9s""#, ["CommandTimeout", "9s", "1 to 60"]),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let check = |options| parse(options).unwrap().check_programs().map_err(|e| e.to_string());
        for good in [r#","SubnetAddCommand":"sh -c x""#, r#","PreStartupCommand":["/bin/sh"]"#] {
            assert_eq!(check(good), Ok(()));
        }
        assert_eq!(check(r#","SubnetAddCommand":"$MINE x""#), Ok(()), "a variable names it");
        let error = check(r#","PostStartupCommand":"no-such a && b""#).unwrap_err();
        assert!(
            error.contains("field PostStartupCommand") && error.contains("\"no-such\""),
            "{error}"
        );
        assert!(check(r#","ShutdownCommand":"/etc/passwd""#).is_err(), "it cannot be executed");
    }
}
