//! The program that asks the flannel daemon, and looks after its store.

fn main() -> std::process::ExitCode {
    flannelctl::run(std::env::args_os(), &flannel_backends::all())
}
