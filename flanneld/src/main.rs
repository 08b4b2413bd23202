//! The flannel daemon.

fn main() -> std::process::ExitCode {
    flanneld::main(std::env::args_os())
}
