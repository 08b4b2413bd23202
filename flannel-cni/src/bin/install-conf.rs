//! `install-conf SOURCE DESTINATION` copies a file onto a host atomically. The init containers of
//! flannel's manifests install the CNI plugin and its config with it.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let option = args.iter().find(|arg| arg.as_encoded_bytes().starts_with(b"-"));
    let wrong = match (option, &args[..]) {
        (Some(option), _) => format!("unknown option {option:?}"),
        (None, [source, destination]) => return install(source.as_ref(), destination.as_ref()),
        (None, []) => "SOURCE and DESTINATION are missing".to_owned(),
        (None, [_]) => "DESTINATION is missing".to_owned(),
        (None, [_, _, more, ..]) => format!("unexpected argument {more:?}"),
    };
    eprintln!("install-conf: {wrong}\nusage: install-conf SOURCE DESTINATION");
    ExitCode::from(2)
}

fn install(source: &Path, destination: &Path) -> ExitCode {
    match flannel_cni::install(source, destination) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("install-conf: {error}");
            ExitCode::FAILURE
        }
    }
}
