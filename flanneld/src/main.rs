//! The flannel daemon.

use std::process::ExitCode;

use flannel_backends::Started;

fn main() -> ExitCode {
    match flannel_backends::run_if_started() {
        Started::DataPlane(ended) => ended,
        Started::Other(program) => {
            flanneld::main_with(std::env::args_os(), flannel_backends::all_in(program))
        }
    }
}
