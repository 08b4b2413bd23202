//! Programs that start themselves again as the process of a data plane.

use std::ffi::{CStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::PROGRAM_VERSION;
use crate::ending::Ended;
use crate::server::serve;

/// The first argument of such a process.
const ARGUMENT: &str = "udp-data-plane";
/// The program that is only a data plane.
const PROGRAM: &str = "flannel-udp";
/// The name of the process.
const NAME: &CStr = c"flannel-udp";

/// The number of glibc's pools of memory. Each thread would have one, and none needs much memory.
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// This program has called [`run_if_started`].
static IS_ABLE: AtomicBool = AtomicBool::new(false);

/// Runs a data plane if this process was started as one ([`command`]), until it is told to end.
/// Returns `None` if it was not. A program calls this first in `main`, and ends with the exit code.
/// If it does not, its data planes run in the program `flannel-udp`, which has to be beside it or
/// in `PATH`.
pub fn run_if_started() -> Option<ExitCode> {
    IS_ABLE.store(true, Ordering::Relaxed);
    let mut args = std::env::args_os().skip(1);
    let first = args.next()?;
    let socket = args.next()?;
    (first == ARGUMENT).then(|| run(&socket))
}

/// Runs a data plane that answers on this socket, until it is told to end. Prints the error if it
/// fails.
pub fn run(socket: &OsString) -> ExitCode {
    // Lists of processes show the name of the file otherwise, which is `exe`.
    let _ = nix::sys::prctl::set_name(NAME);
    let socket = Path::new(socket);
    match serve(socket, PROGRAM_VERSION) {
        Ok(Ended::Done) => ExitCode::SUCCESS,
        Ok(Ended::Failed) => ExitCode::FAILURE,
        Err(error) => {
            crate::report(&format!("{}: {error}", socket.display()));
            ExitCode::FAILURE
        }
    }
}

/// The command that starts a data plane on this socket. If another one answers there, the new one
/// takes over from it. Of this program's environment, it gets `PATH` and `LD_LIBRARY_PATH` only.
pub fn command(socket: &Path) -> Command {
    let mut command = if IS_ABLE.load(Ordering::Relaxed) {
        // The name may lead to another version, which has replaced the file.
        let mut command = flannel_child::command("/proc/self/exe", &[]);
        command.arg0(PROGRAM).arg(ARGUMENT);
        command
    } else {
        let beside = std::env::current_exe()
            .ok()
            .map(|path| path.with_file_name(PROGRAM))
            .filter(|path| path.is_file());
        let program = beside.as_deref().unwrap_or_else(|| Path::new(PROGRAM));
        flannel_child::command(program, &[])
    };
    command.arg(socket).env(ARENAS, "1");
    command
}
