//! Both programs with one more backend: `lane-node daemon …` is `flanneld`, `lane-node ctl …` is
//! `flannelctl`.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use examples::Lane;
use flannel_backends::Started;
use flannel_firewall::{Guarded, Usual};

fn main() -> ExitCode {
    let this = match flannel_backends::run_if_started() {
        Started::DataPlane(ended) => return ended,
        Started::Other(this) => this,
    };
    // With a guard, as the tunnels of flannel have it.
    let lane = Guarded::new(Lane, "guard-lane", Usual::Off);
    let backends = flannel_backends::all_in(this).with(Arc::new(lane));
    let mut args: Vec<OsString> = std::env::args_os().collect();
    let verb = if args.len() > 1 { args.remove(1) } else { OsString::new() };
    if verb == "daemon" {
        match flannel_lab::end_with_lab() {
            Ok(()) => return flanneld::main_with(args, backends),
            Err(error) => eprintln!("lane-node: {error}"),
        }
    } else if verb == "ctl" {
        return flannelctl::run(args, &backends);
    } else {
        eprintln!("lane-node: expected daemon or ctl");
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}
