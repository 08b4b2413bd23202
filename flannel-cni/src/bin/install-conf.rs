//! `install-conf SOURCE DESTINATION` copies a file onto a host atomically. The init containers of
//! flannel's manifests install the CNI plugin and its config with it.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let [_, source, destination] = &args[..] else {
        eprintln!("usage: install-conf SOURCE DESTINATION");
        return ExitCode::FAILURE;
    };
    match flannel_cni::install(Path::new(source), Path::new(destination)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("install-conf: {error}");
            ExitCode::FAILURE
        }
    }
}
