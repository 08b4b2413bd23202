#![doc = include_str!("../README.md")]

/// The configs of the plugin and of the delegate, and flanneld's `subnet.env`.
mod config {
    pub(crate) mod delegate_conf;
    pub(crate) mod net_conf;
    pub(crate) mod subnet_env;
}
mod delegate;
mod install;
mod plugin;
mod saved;
/// Types of the CNI specification: calls, versions and errors.
mod spec {
    pub(crate) mod call;
    pub(crate) mod error;
    pub(crate) mod version;
}

use std::io::{Read, Write};
use std::process::ExitCode;

pub use install::{InstallError, install};
pub use plugin::run;
pub use spec::call::{Call, Command};
pub use spec::error::{Code, Error, Result};
pub use spec::version::{SpecVersion, VersionError};

/// The largest text on stdin, in bytes.
const MOST_INPUT: u64 = 4 << 20;

/// The `main` of the plugin. Runs the call of this process and prints the result or error as JSON.
///
/// # Blocking
/// Waits until the delegate has ended.
pub fn main() -> ExitCode {
    let answer = call_from_process().and_then(|call| match call {
        Some((call, stdin)) => run(&call, &stdin),
        None => {
            // A person has started the plugin. A closed stderr is not an error.
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
            let _ =
                writeln!(std::io::stderr(), "flannel: cannot write the answer to stdout: {error}");
            ExitCode::FAILURE
        }
    }
}

/// This process's call and stdin, or `None` without `CNI_COMMAND`.
fn call_from_process() -> Result<Option<(Call, Vec<u8>)>> {
    let Some(call) = Call::from_env(|name| std::env::var_os(name))? else { return Ok(None) };
    let mut stdin = Vec::new();
    if call.command != Command::Version {
        std::io::stdin()
            .lock()
            .take(MOST_INPUT + 1)
            .read_to_end(&mut stdin)
            .map_err(|error| Error::new(Code::IO, format!("error reading from stdin: {error}")))?;
        if stdin.len() as u64 > MOST_INPUT {
            let msg = format!("the network config has more than {MOST_INPUT} bytes");
            return Err(Error::new(Code::DECODING, msg));
        }
    }
    Ok(Some((call, stdin)))
}

/// The plugin's text for a person who runs it.
///
/// **Source**: cni-plugin `flannel.go: main`, cni `pkg/skel: pluginMain`.
fn about() -> String {
    let os = std::env::consts::OS;
    let arch = spec::version::go_arch(std::env::consts::ARCH);
    let version = env!("CARGO_PKG_VERSION");
    let commit = option_env!("FLANNEL_COMMIT").unwrap_or("unknown");
    let versions: Vec<&str> = SpecVersion::ALL.iter().map(|version| version.as_str()).collect();
    format!(
        "CNI Plugin flannel version {version} ({os}/{arch}) commit {commit}\nCNI protocol versions \
         supported: {}\n",
        versions.join(", ")
    )
}
