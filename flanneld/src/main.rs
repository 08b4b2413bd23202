//! The flannel daemon.

fn main() -> std::process::ExitCode {
    flannel_backends::run_if_started().unwrap_or_else(|| flanneld::main(std::env::args_os()))
}
