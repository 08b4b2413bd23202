//! Programs that start themselves again as the process of a data plane.

use std::ffi::{CStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

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

/// This program. It runs a data plane if it is started as one, because its `main` has called
/// [`run_if_started`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThisProgram(());

/// What this process was started as.
#[derive(Debug)]
#[must_use = "the process of a data plane has to end"]
pub enum Started {
    /// As a data plane, which has ended. The program ends with this exit code.
    DataPlane(ExitCode),
    /// As something else. The program goes on.
    Other(ThisProgram),
}

/// Runs a data plane if this process was started as one ([`Program::This`]), until it is told to
/// end. A program calls this first in `main`.
pub fn run_if_started() -> Started {
    let mut args = std::env::args_os().skip(1);
    match (args.next(), args.next()) {
        (Some(first), Some(socket)) if first == ARGUMENT => Started::DataPlane(run(&socket)),
        _ => Started::Other(ThisProgram(())),
    }
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

/// The program that a process of a data plane runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Program {
    /// `flannel-udp`, beside this program or in `PATH`.
    #[default]
    Installed,
    /// The program `flannel-udp` at this path.
    At(PathBuf),
    /// This program.
    This(ThisProgram),
}

impl Program {
    /// The command that starts a data plane on this socket. If another data plane answers there,
    /// the new one takes over from it. Of this program's environment, it gets `PATH` and
    /// `LD_LIBRARY_PATH` only.
    pub fn command(&self, socket: &Path) -> Command {
        let mut command = match self {
            Self::Installed => flannel_core::process::command(installed(), &[]),
            Self::At(path) => flannel_core::process::command(path, &[]),
            Self::This(_) => {
                // The name may lead to another version, which has replaced the file.
                let mut command = flannel_core::process::command("/proc/self/exe", &[]);
                command.arg0(PROGRAM).arg(ARGUMENT);
                command
            }
        };
        command.arg(socket).env(ARENAS, "1");
        command
    }
}

fn installed() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name(PROGRAM));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| PROGRAM.into())
}
