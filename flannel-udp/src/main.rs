//! The process of a data plane, for programs that do not call `run_if_started`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    match (args.next(), args.next()) {
        (Some(socket), None) => flannel_udp::run(&socket),
        _ => {
            eprintln!("usage: flannel-udp SOCKET");
            ExitCode::from(2)
        }
    }
}
