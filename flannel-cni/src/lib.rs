#![doc = include_str!("../README.md")]

mod call;
mod delegate;
mod delegate_conf;
mod error;
mod install;
mod net_conf;
mod plugin;
mod state;
mod subnet_env;
mod version;

use std::io::{Read, Write};
use std::process::ExitCode;

pub use call::{Call, Command};
pub use error::{Code, Error, Result};
pub use install::{InstallError, install};
pub use plugin::run;
pub use version::{SpecVersion, VersionError};

/// What `main` of the plugin does: reads the environment and stdin, carries the call out, and prints the result
/// or the error, as JSON, on stdout.
///
/// # Blocking
/// Until the delegate has ended.
pub fn main() -> ExitCode {
    let answer = call_from_process().and_then(|call| match call {
        Some((call, stdin)) => run(&call, &stdin),
        None => {
            // Nobody but a person calls a plugin like this; if the message cannot be shown, there is nobody.
            let _ = std::io::stderr().write_all(about().as_bytes());
            Ok(Vec::new())
        }
    });
    let (text, status) = match answer {
        Ok(text) => (text, ExitCode::SUCCESS),
        Err(error) => (error.to_json().into_bytes(), ExitCode::FAILURE),
    };
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(&text).and_then(|()| stdout.flush()) {
        Ok(()) => status,
        Err(error) => {
            let _ = writeln!(
                std::io::stderr(),
                "flannel: the answer could not be written to stdout: {error}"
            );
            ExitCode::FAILURE
        }
    }
}

/// The call that this process was started for, with its stdin; `None` if there is no `CNI_COMMAND`.
fn call_from_process() -> Result<Option<(Call, Vec<u8>)>> {
    let Some(call) = Call::from_env(|name| std::env::var_os(name))? else { return Ok(None) };
    let mut stdin = Vec::new();
    if call.command != Command::Version {
        let read = std::io::stdin().lock().read_to_end(&mut stdin);
        read.map_err(|error| Error::new(Code::IO, format!("error reading from stdin: {error}")))?;
    }
    Ok(Some((call, stdin)))
}

/// What the plugin says when a person runs it.
///
/// **Source**: cni-plugin `flannel.go: main`, cni `pkg/skel: pluginMain`.
fn about() -> String {
    let (os, arch) = (std::env::consts::OS, version::go_arch(std::env::consts::ARCH));
    let (version, commit) =
        (env!("CARGO_PKG_VERSION"), option_env!("FLANNEL_COMMIT").unwrap_or("unknown"));
    let versions: Vec<&str> = SpecVersion::ALL.iter().map(|version| version.as_str()).collect();
    format!(
        "CNI Plugin flannel version {version} ({os}/{arch}) commit {commit}\nCNI protocol versions supported: {}\n",
        versions.join(", ")
    )
}
