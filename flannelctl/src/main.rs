//! The program that shows the state of the flannel daemon and maintains its store.

fn main() -> std::process::ExitCode {
    flannelctl::run(std::env::args_os(), &flannel_backends::all())
}
