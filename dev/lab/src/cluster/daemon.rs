//! Daemons as child processes that end with the lab. The kernel kills a daemon when the *thread*
//! that started it ends, so one thread with the lab's lifetime starts all of them.

use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};

use crate::error::{Error, Result};
use crate::system::namespace::Namespace;

/// The time between a signal to end and SIGKILL.
pub(crate) const GRACE: Duration = Duration::from_secs(2);

/// The environment variable with the process id of the lab.
pub(crate) const PARENT: &str = "FLANNEL_LAB_PID";

/// Makes the calling process end with the lab. A daemon that
/// [`Host::start_daemon`](crate::Host::start_daemon) started must call it first.
///
/// # Errors
/// [`Error::Unsuitable`]: the process was not started by a lab, or the lab has ended already.
pub fn end_with_lab() -> Result<()> {
    let lab = std::env::var(PARENT).ok().and_then(|pid| pid.parse().ok()).map(Pid::from_raw);
    prctl::set_pdeathsig(Signal::SIGKILL)
        .map_err(Error::io("asking for a signal when the lab ends"))?;
    // The lab may have ended before the call above.
    if lab == Some(getppid()) {
        return Ok(());
    }
    Err(Error::Unsuitable("this process is not a child of a lab; only a lab may start it".into()))
}

/// The thread that starts the daemons.
#[derive(Debug)]
pub(crate) struct Spawner {
    requests: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

struct Request {
    namespace: Namespace,
    command: Command,
    answer: Sender<Result<Child>>,
}

impl Spawner {
    pub(crate) fn new() -> Self {
        let (requests, inbox) = channel();
        Self { requests: Some(requests), thread: Some(std::thread::spawn(move || serve(&inbox))) }
    }

    /// Starts a program inside a namespace.
    pub(crate) fn spawn(&self, namespace: &Namespace, command: Command) -> Result<Child> {
        let gone = || Error::Unsuitable("the thread that starts the daemons has ended".into());
        let (answer, outcome) = channel();
        let request = Request { namespace: namespace.clone(), command, answer };
        self.requests.as_ref().ok_or_else(gone)?.send(request).map_err(|_| gone())?;
        outcome.recv().map_err(|_| gone())?
    }
}

impl Drop for Spawner {
    fn drop(&mut self) {
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(inbox: &Receiver<Request>) {
    for Request { namespace, mut command, answer } in inbox {
        let mut start = || {
            namespace.enter()?;
            let object =
                format!("{}: starting {}", namespace.name(), command.get_program().display());
            command.spawn().map_err(Error::io(object))
        };
        // Sending fails only if the caller panicked.
        let _ = answer.send(start());
    }
}

/// Sends `signal` to every child, and kills those that still run after [`GRACE`].
pub(crate) fn end(children: &mut [Child], signal: Signal) -> Result<Vec<ExitStatus>> {
    for child in &*children {
        send(child, signal)?;
    }
    let deadline = Instant::now() + GRACE;
    let mut ended = Vec::new();
    for child in children {
        ended.push(loop {
            let status = child.try_wait().map_err(Error::io("waiting for flanneld's end"))?;
            if let Some(status) = status {
                break status;
            }
            if Instant::now() >= deadline {
                // Fails only if the child has just ended.
                let _ = child.kill();
                break child.wait().map_err(Error::io("waiting for flanneld's end"))?;
            }
            std::thread::park_timeout(Duration::from_millis(2));
        });
    }
    Ok(ended)
}

/// Sends a signal to a child. A child that has ended is not an error.
pub(crate) fn send(child: &Child, signal: Signal) -> Result<()> {
    // Process ids of Linux fit.
    match kill(Pid::from_raw(child.id() as i32), signal) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(errno) => Err(Error::io(format!("sending {signal} to flanneld"))(errno)),
    }
}
