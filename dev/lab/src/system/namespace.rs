//! Network namespaces. A namespace is an open file of this process, without a name or a mount, so
//! the kernel removes it when the process ends.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{Error, Result};

/// A network namespace. It exists as long as a clone of this value, a process or a socket uses it.
#[derive(Debug, Clone)]
pub struct Namespace {
    name: Arc<str>,
    file: Arc<File>,
}

impl Namespace {
    /// Makes an empty network namespace. `name` is for messages only.
    ///
    /// # Errors
    /// The kernel refused, usually because `CAP_SYS_ADMIN` is missing: see [`enter`](crate::enter).
    pub fn new(name: &str) -> Result<Self> {
        let file = on_a_thread(|| -> io::Result<File> {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        })
        .map_err(Error::io(format!("new network namespace {name}")))?;
        Ok(Self { name: name.into(), file: Arc::new(file) })
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A path for `nsenter --net=PATH`. It is valid while this process holds the namespace open.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()))
    }

    /// Runs `work` inside, on a new thread. Sockets that it opens stay in the namespace.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        on_a_thread(|| self.enter().map(|()| work()))
    }

    /// Kills the processes inside, except for this one: those that a daemon has left, such as a
    /// data plane.
    pub(crate) fn end_processes(&self) {
        let Ok(inside) = self.file.metadata().map(|meta| (meta.dev(), meta.ino())) else { return };
        let Ok(processes) = std::fs::read_dir("/proc") else { return };
        for process in processes.flatten() {
            let id = process.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
            // A process that has ended meanwhile has no namespace.
            let namespace = std::fs::metadata(process.path().join("ns/net"));
            let is_inside = namespace.is_ok_and(|meta| (meta.dev(), meta.ino()) == inside);
            if let Some(id) = id.filter(|_| is_inside)
                && id.unsigned_abs() != std::process::id()
            {
                let _ = kill(Pid::from_raw(id), Signal::SIGKILL);
            }
        }
    }

    /// Moves the calling thread inside, permanently. Only for threads of the lab.
    pub(crate) fn enter(&self) -> Result<()> {
        setns(&*self.file, CloneFlags::CLONE_NEWNET)
            .map_err(Error::io(format!("{}: entering its network namespace", self.name)))
    }

    /// Runs a program inside and waits until it ends.
    ///
    /// # Errors
    /// It could not be started.
    pub fn output(&self, command: &mut Command) -> Result<Output> {
        let describe = self.describe(command);
        self.run(|| command.stdin(Stdio::null()).output())?.map_err(|e| not_started(describe, e))
    }

    /// Starts a program inside.
    ///
    /// # Errors
    /// It could not be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let describe = self.describe(command);
        self.run(|| command.spawn())?.map_err(|e| not_started(describe, e))
    }

    /// Runs `ip` inside with every line of `batch` (without the word `ip`).
    ///
    /// # Errors
    /// A line failed; lines after it were not run.
    pub fn ip(&self, batch: &str) -> Result<()> {
        let mut command = Command::new("ip");
        command
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut child = self.spawn(&mut command)?;
        let mut input = child.stdin.take().expect("stdin is a pipe");
        // A write fails only if ip ended early. Its own message is better.
        let _ = input.write_all(batch.as_bytes());
        drop(input);
        let output = child.wait_with_output().map_err(Error::io(format!("{}: ip", self.name)))?;
        if output.status.success() {
            return Ok(());
        }
        let stderr = String::from_utf8_lossy(&output.stderr);
        // ip ends its message with "Command failed -:LINE".
        let line = stderr.rsplit("-:").next().and_then(|n| n.trim().parse::<usize>().ok());
        let line = line.and_then(|n| batch.lines().nth(n.checked_sub(1)?)).unwrap_or("-batch -");
        Err(Error::Command {
            place: self.name.to_string(),
            command: format!("ip {}", line.trim()),
            output: stderr.lines().next().map_or_else(|| output.status.to_string(), str::to_owned),
        })
    }

    /// Writes a sysctl of this namespace; `key` as a path below `/proc/sys`.
    ///
    /// # Errors
    /// The sysctl does not exist, it does not take the value, or `/proc/sys` is read-only.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/{key}");
        self.run(|| std::fs::write(&path, value))?
            .map_err(Error::io(format!("{}: writing {value:?} to {path}", self.name)))
    }

    fn describe(&self, command: &Command) -> String {
        format!("{}: starting {}", self.name, command.get_program().display())
    }
}

/// Runs `work` on a thread of its own; a panic goes on in the caller.
fn on_a_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let outcome = std::thread::scope(|scope| scope.spawn(work).join());
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn not_started(object: String, source: io::Error) -> Error {
    if source.kind() == io::ErrorKind::NotFound && object.ends_with(" ip") {
        return Error::Missing {
            what: "The program `ip` was not found.".into(),
            remedy: "Install iproute2 (Debian: apt install iproute2; Fedora: dnf install iproute)."
                .into(),
        };
    }
    Error::Io { object, source }
}

/// Whether this process may make network namespaces: it is root, or has called
/// [`enter`](crate::enter).
pub fn may_make_namespaces() -> bool {
    on_a_thread(|| unshare(CloneFlags::CLONE_NEWNET)) != Err(Errno::EPERM)
}
