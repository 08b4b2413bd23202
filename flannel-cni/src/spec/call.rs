//! A call of the runtime: the command and its `CNI_` variables. A container's id becomes the name
//! of a file, so its characters are checked.
//!
//! **Source**: cni `pkg/skel: getCmdArgsFromEnv`, `pkg/utils` for valid names.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::spec::error::{Code, Error, Result};

/// An operation of the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Connect a container.
    Add,
    /// Disconnect a container.
    Del,
    /// Check the connection of a container.
    Check,
    /// Check whether ADD would succeed.
    Status,
    /// Clean up after all containers except those that the config names.
    Gc,
    /// List the supported versions of the specification.
    Version,
}

impl Command {
    const ALL: [Self; 6] =
        [Self::Add, Self::Del, Self::Check, Self::Status, Self::Gc, Self::Version];

    /// The value of `CNI_COMMAND`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }

    fn requires(self, variable: &str) -> bool {
        match variable {
            "CNI_CONTAINERID" | "CNI_IFNAME" => matches!(self, Self::Add | Self::Del | Self::Check),
            "CNI_NETNS" => matches!(self, Self::Add | Self::Check),
            _ => self != Self::Version,
        }
    }
}

/// A call of the plugin. A value that the command does not need may be empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The command.
    pub command: Command,
    /// `CNI_CONTAINERID`: letters, digits, `_`, `.` and `-`, the first a letter or a digit.
    pub container: String,
    /// `CNI_IFNAME`: the name of the link in the container.
    pub ifname: String,
    /// `CNI_NETNS`: the container's network namespace.
    pub netns: String,
    /// `CNI_PATH`: the directories of plugins, separated by `:`.
    pub path: String,
    /// `CNI_NETNS_OVERRIDE`: the container may be in the plugin's own network namespace.
    pub netns_override: bool,
}

impl Call {
    /// Reads the variables. Returns `None` without `CNI_COMMAND`, because then the caller
    /// is not a runtime.
    ///
    /// # Errors
    /// [`Code::ENVIRONMENT`] if a variable that the command needs is missing or wrong.
    pub fn from_env(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>> {
        let bad = |text: String| Error::new(Code::ENVIRONMENT, text);
        let text = |name: &str| {
            let value = variable(name).unwrap_or_default().into_string();
            value.map_err(|value| bad(format!("{name} is {value:?}, expected UTF-8")))
        };
        let command = text("CNI_COMMAND")?;
        if command.is_empty() {
            return Ok(None);
        }
        let Some(command) = Command::ALL.into_iter().find(|known| known.name() == command) else {
            return Err(bad(format!("unknown CNI_COMMAND: {command}")));
        };
        let mut missing = Vec::new();
        let mut take = |name: &'static str| {
            let value = text(name)?;
            if value.is_empty() && command.requires(name) {
                missing.push(name);
            }
            Ok(value)
        };
        let container = take("CNI_CONTAINERID")?;
        let netns = take("CNI_NETNS")?;
        let ifname = take("CNI_IFNAME")?;
        let path = take("CNI_PATH")?;
        if !missing.is_empty() {
            return Err(bad(format!("required env variables [{}] missing", missing.join(","))));
        }
        if command.requires("CNI_CONTAINERID") && !is_name(&container) {
            return Err(
                bad("invalid characters in CNI_CONTAINERID".into()).with_details(&container)
            );
        }
        if command.requires("CNI_IFNAME") && !is_ifname(&ifname) {
            let expected = "expected 1 to 15 bytes without /, : and white space, but not . or ..";
            return Err(bad(format!("CNI_IFNAME is {ifname:?}")).with_details(expected));
        }
        let overrides = text("CNI_NETNS_OVERRIDE")?;
        let netns_override = overrides == "1" || overrides.eq_ignore_ascii_case("true");
        Ok(Some(Self { command, container, ifname, netns, path, netns_override }))
    }

    /// The directories of `CNI_PATH`.
    pub(crate) fn directories(&self) -> impl Iterator<Item = PathBuf> {
        std::env::split_paths(&self.path).filter(|dir| !dir.as_os_str().is_empty())
    }

    /// Checks that the container is not in the plugin's own network namespace, in which a delegate
    /// would change the host's links. A namespace that is gone passes.
    ///
    /// # Errors
    /// [`Code::NETNS`].
    pub(crate) fn check_netns(&self) -> Result<()> {
        let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
        let container = identity(Path::new(&self.netns));
        if self.netns_override || container.is_none() {
            return Ok(());
        }
        if container == identity(Path::new("/proc/thread-self/ns/net")) {
            let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
            return Err(Error::new(Code::NETNS, msg).with_details(&self.netns));
        }
        Ok(())
    }
}

/// Whether a text is a valid name of a container or a network.
pub(crate) fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn is_ifname(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text != "."
        && text != ".."
        && !text.contains(|c: char| c == '/' || c == ':' || c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(variables: &[(&str, &str)]) -> Result<Option<Call>> {
        Call::from_env(|name| {
            let (_, value) = variables.iter().rev().find(|(known, _)| *known == name)?;
            Some(OsString::from(value))
        })
    }

    const WHOLE: [(&str, &str); 5] = [
        ("CNI_COMMAND", "ADD"),
        ("CNI_CONTAINERID", "c-1"),
        ("CNI_NETNS", "/run/netns/none"),
        ("CNI_IFNAME", "eth0"),
        ("CNI_PATH", "/opt/cni/bin::/usr/lib/cni"),
    ];

    fn with(name: &'static str, value: &'static str) -> Result<Option<Call>> {
        call(&[&WHOLE[..], &[(name, value)]].concat())
    }

    #[test]
    fn every_command_requires_only_its_own_variables() {
        for (command, missing) in [
            ("ADD", "[CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH]"),
            ("CHECK", "[CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH]"),
            ("DEL", "[CNI_CONTAINERID,CNI_IFNAME,CNI_PATH]"),
            ("STATUS", "[CNI_PATH]"),
            ("GC", "[CNI_PATH]"),
        ] {
            let error = call(&[("CNI_COMMAND", command)]).unwrap_err();
            let text = format!("required env variables {missing} missing");
            assert_eq!((error.code, error.msg), (Code::ENVIRONMENT, text), "{command}");
        }
        assert_eq!(call(&[("CNI_COMMAND", "VERSION")]).unwrap().unwrap().command, Command::Version);
        assert_eq!(call(&[]).unwrap(), None);
        assert_eq!(with("CNI_COMMAND", "add").unwrap_err().msg, "unknown CNI_COMMAND: add");
        let whole = call(&WHOLE).unwrap().unwrap();
        assert!(whole.directories().eq(["/opt/cni/bin", "/usr/lib/cni"].map(PathBuf::from)));
    }

    #[test]
    fn names_that_are_unsafe_as_file_names_are_refused() {
        for bad in ["..", ".x", "a/b", "-a", "a:b", "a b", "é"] {
            let error = with("CNI_CONTAINERID", bad).unwrap_err();
            assert_eq!((error.code, error.details.as_str()), (Code::ENVIRONMENT, bad));
        }
        for bad in [".", "..", "a/b", "a:b", "a b", "a23456789012345x"] {
            assert!(with("CNI_IFNAME", bad).unwrap_err().msg.contains(bad), "{bad}");
        }
    }

    #[test]
    fn the_plugins_own_namespace_is_refused_unless_overridden() {
        let own = with("CNI_NETNS", "/proc/self/ns/net").unwrap().unwrap();
        assert_eq!(own.check_netns().unwrap_err().code, Code::NETNS);
        Call { netns_override: true, ..own }.check_netns().unwrap();
        call(&WHOLE).unwrap().unwrap().check_netns().unwrap();
        with("CNI_NETNS", "/proc/self/ns/uts").unwrap().unwrap().check_netns().unwrap();
    }
}
