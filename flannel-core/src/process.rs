//! Commands of processes. A process gets the environment variables that it needs, and no others:
//! the environment of a daemon has secrets, such as the password of its store, and addresses of
//! sockets that only the daemon may use, such as `NOTIFY_SOCKET`.

use std::ffi::OsStr;
use std::process::Command;

/// The variables that every process gets: the paths of programs and of libraries.
const OF_ALL: [&str; 2] = ["PATH", "LD_LIBRARY_PATH"];

/// A command whose process does not inherit the environment of this program. It gets only `PATH`,
/// `LD_LIBRARY_PATH` and the named `variables`, with their present values. [`Command::env`] adds
/// others.
///
/// ```
/// let output = flannel_core::process::command("printenv", &["HOME"]).output();
/// # let _ = output;
/// ```
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
        assert!(named.contains("CARGO_PKG_NAME=flannel-core\n"), "{named}");
        assert!(named.contains("PATH="), "{named}");
        assert!(!named.contains("CARGO_PKG_VERSION=") && !named.contains("NOT_THERE"), "{named}");
    }
}
