#![doc = include_str!("../README.md")]

use std::ffi::OsStr;
use std::process::Command;

/// The variables that every process gets: the paths of programs and of libraries.
const OF_ALL: [&str; 2] = ["PATH", "LD_LIBRARY_PATH"];

/// A command whose process does not inherit the environment of this program. It gets only `PATH`,
/// `LD_LIBRARY_PATH` and the named `variables`, with their present values. [`Command::env`] adds
/// others.
pub fn command(program: impl AsRef<OsStr>, variables: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    for name in OF_ALL.iter().chain(variables) {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gets_the_named_variables_only() {
        let print = |variables: &[&str]| {
            let output = command("env", variables).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        // Cargo sets both.
        let named = print(&["CARGO_PKG_NAME", "NOT_THERE_AT_ALL"]);
        assert!(named.contains("CARGO_PKG_NAME=flannel-child\n"), "{named}");
        assert!(named.contains("PATH="), "{named}");
        assert!(!named.contains("CARGO_PKG_VERSION=") && !named.contains("NOT_THERE"), "{named}");
    }
}
