//! The program that asks the flannel daemon, and looks after its store.

fn main() -> std::process::ExitCode {
    flanneld::ctl(std::env::args_os())
}
