//! The process of a data plane, as a program that needs one sees it: found, started, or replaced by
//! one of another version.

use std::fmt;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::PROGRAM_VERSION;
use crate::control::{Client, Process, Request, Status, VERSION};
use crate::server::LOCK;
use crate::started::command;

/// The longest time until a process that was started answers.
const START: Duration = Duration::from_secs(5);
/// The longest time for an answer of one that hands over meanwhile.
const ANSWER: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// The process of a data plane. Clones are handles of the same.
///
/// All methods block: for each request at most ten seconds, and while a process is started some
/// thirty more. A dropped handle leaves the process as it is.
#[derive(Debug, Clone)]
pub struct DataPlane(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    inner: Mutex<Inner>,
}

/// Is called when the process ends.
#[derive(Default)]
struct Listener(Option<Box<dyn Fn() + Send>>);

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Listener").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug, Default)]
struct Inner {
    client: Option<Client>,
    /// The process that has answered last.
    running: Option<Process>,
    /// The id of the process whose end is reported.
    watched: Option<u32>,
    listener: Listener,
    child: Option<Child>,
    /// The version of the program that was started last; `None`: none was. It differs from
    /// [`PROGRAM_VERSION`] if another program is in `PATH`, which is not started again and again.
    started: Option<String>,
}

impl Inner {
    /// The process has another version than one that would be started.
    fn is_old(&self) -> bool {
        let current = self.started.as_deref().unwrap_or(PROGRAM_VERSION);
        self.running.as_ref().is_some_and(|running| running.program != current)
    }
}

/// The process that requests need.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// None: without one there is nothing to read or to delete.
    Nothing,
    /// One of any version.
    Any,
    /// One of the version that would be started. It takes over from one of another version.
    Current,
}

impl Need {
    fn of(request: &Request) -> Self {
        match request {
            Request::Start(_) => Self::Current,
            Request::Put(_) => Self::Any,
            _ => Self::Nothing,
        }
    }
}

impl DataPlane {
    /// The process whose socket is `socket` in this directory, which is made when it starts.
    pub fn new(dir: PathBuf) -> Self {
        Self(Arc::new(Shared { dir, inner: Mutex::default() }))
    }

    /// Calls a function whenever the process has ended, in place of an earlier one. It must not
    /// block, and must not use this handle.
    pub fn on_end(&self, listener: impl Fn() + Send + 'static) {
        self.inner().listener = Listener(Some(Box::new(listener)));
    }

    /// The version of the process that has answered last, if it is another one than that of a
    /// process that would be started. [`Request::Start`] replaces it.
    pub fn other_version(&self) -> Option<String> {
        let inner = self.inner();
        let running = inner.running.as_ref().filter(|_| inner.is_old());
        running.map(|running| running.program.clone())
    }

    /// The counts of the process; `None`: there is none. A connection of its own does not wait for
    /// other requests.
    pub fn counts(&self) -> Option<Status> {
        self.reach(|client| client.ask(&Request::Counts)).ok()?.0
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> PathBuf {
        self.0.dir.join("socket")
    }

    /// Asks the process on a new connection. If none answers, waits for one that is starting or
    /// taking over.
    ///
    /// # Errors
    /// Nobody listens, or the question failed.
    fn reach<T>(&self, question: impl Fn(&mut Client) -> io::Result<T>) -> io::Result<(T, Client)> {
        use ErrorKind::{BrokenPipe, ConnectionRefused, ConnectionReset, NotFound, UnexpectedEof};
        let ask = || -> io::Result<(T, Client)> {
            let mut client = Client::connect(&self.socket())?;
            Ok((question(&mut client)?, client))
        };
        let gone = [NotFound, ConnectionRefused, ConnectionReset, BrokenPipe, UnexpectedEof];
        match ask() {
            // A process that takes over has the name of the socket only after the other one ended.
            Err(error) if gone.contains(&error.kind()) => {
                self.wait_for_start();
                ask()
            }
            answer => answer,
        }
    }

    /// Waits while a process is starting, but not for one that hangs. It holds the lock.
    fn wait_for_start(&self) {
        let Ok(lock) = File::open(self.socket().with_extension(LOCK)) else { return };
        let begin = Instant::now();
        while matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock))
            && begin.elapsed() < ANSWER
        {
            std::thread::park_timeout(PAUSE);
        }
    }

    /// Asks the process. [`Request::Start`] and [`Request::Put`] start one if there is none, and
    /// [`Request::Start`] also replaces one of another version. Without a process the answers are
    /// empty.
    ///
    /// # Errors
    /// One for each request that failed. A request that is refused, which is an error of the kind
    /// [`Other`](ErrorKind::Other), does not stop the next one.
    pub fn ask(&self, requests: &[Request]) -> Vec<io::Result<Option<Status>>> {
        let mut inner = self.inner();
        let need = requests.iter().map(Need::of).max().unwrap_or(Need::Nothing);
        let again = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
        let mut broken = self.connect(&mut inner, need).err();
        let mut not_current = None;
        if need == Need::Current && broken.is_some() {
            // The old process still does the rest.
            not_current = broken;
            broken = self.connect(&mut inner, Need::Nothing).err();
        }
        let answer = |request: &Request| {
            let has_client = inner.client.is_some();
            let fails = match Need::of(request) {
                Need::Current => true,
                Need::Any => !has_client,
                Need::Nothing => false,
            };
            if let Some(error) = not_current.as_ref().filter(|_| fails).or(broken.as_ref()) {
                return Err(again(error));
            }
            let Some(client) = &mut inner.client else { return Ok(None) };
            let answer = client.ask(request);
            // It has ended, or does not answer.
            broken = answer.as_ref().err().filter(|e| e.kind() != ErrorKind::Other).map(again);
            if broken.is_some() || matches!(request, Request::Stop(_)) {
                inner.client = None;
            }
            answer
        };
        requests.iter().map(answer).collect()
    }

    /// Connects to the process that is needed. A new one takes over from the one that runs.
    fn connect(&self, inner: &mut Inner, need: Need) -> io::Result<()> {
        if inner.client.is_some() && (need != Need::Current || !inner.is_old()) {
            return Ok(());
        }
        inner.client = None;
        match self.reach(Client::process) {
            Ok((process, client)) if process.version == VERSION => {
                let pid = process.pid;
                inner.running = Some(process);
                if need != Need::Current || !inner.is_old() {
                    return self.use_client(inner, pid, client);
                }
            }
            Ok(_) if need == Need::Nothing => return Err(unknown()),
            Err(error) if need == Need::Nothing => {
                return match error.kind() {
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(()),
                    ErrorKind::InvalidData => Err(unknown()),
                    _ => Err(error),
                };
            }
            Ok(_) | Err(_) => {}
        }
        if let Some(mut ended) = inner.child.take() {
            // It has ended, or ends when the next one takes over.
            std::thread::spawn(move || drop(ended.wait()));
        }
        let begin = Instant::now();
        let child = inner.child.insert(start(&self.0.dir, &self.socket())?);
        loop {
            let connected = Client::connect(&self.socket())
                .and_then(|mut client| Ok((client.process()?, client)));
            match connected {
                // The old one answers until it has handed over.
                Ok((process, client)) if process.pid == child.id() => {
                    let pid = process.pid;
                    inner.started = Some(process.program.clone());
                    inner.running = Some(process);
                    return self.use_client(inner, pid, client);
                }
                // It must not take over when nobody waits for it. After an error it has perhaps
                // just done so.
                Ok(_) if begin.elapsed() >= START => {
                    let _ = child.kill();
                    return Err(ErrorKind::TimedOut.into());
                }
                Err(error) if begin.elapsed() >= 2 * START + ANSWER => {
                    let _ = child.kill();
                    return Err(error);
                }
                _ => std::thread::park_timeout(PAUSE),
            }
            if let Ok(Some(status)) = child.try_wait() {
                return Err(io::Error::other(format!("its process ended: {status}")));
            }
        }
    }

    /// Uses a connection to the process with this id, and reports its end.
    fn use_client(&self, inner: &mut Inner, pid: u32, client: Client) -> io::Result<()> {
        if inner.watched != Some(pid) {
            let (watch, plane) = (Client::connect(&self.socket())?, self.clone());
            let thread = std::thread::Builder::new().name("watch".into()).stack_size(256 << 10);
            thread.spawn(move || {
                let _ = watch.wait_for_end();
                plane.ended(pid);
            })?;
            inner.watched = Some(pid);
        }
        inner.client = Some(client);
        Ok(())
    }

    /// The process with this id has ended.
    fn ended(&self, pid: u32) {
        let mut inner = self.inner();
        // Otherwise another one has taken over from it.
        if inner.watched == Some(pid) {
            (inner.watched, inner.client) = (None, None);
        }
        if let Some(child) = &mut inner.child {
            let _ = child.try_wait();
        }
        if let Some(listener) = &inner.listener.0 {
            listener();
        }
    }
}

fn unknown() -> io::Error {
    io::Error::other("it has another version; a start of the daemon replaces it")
}

/// Starts the process. It stays when this one ends.
fn start(dir: &Path, socket: &Path) -> io::Result<Child> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut command = command(socket);
    command.stdin(Stdio::null()).process_group(0).spawn().map_err(|error| {
        let program = command.get_program().display();
        io::Error::new(error.kind(), format!("{program}: {error}; it has to be in PATH"))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::control::Peers;
    use crate::testing::{options, process};

    /// It does not answer any more, and there is one connection that reports its end.
    #[test]
    fn a_broken_connection_is_replaced_and_one_connection_watches() {
        let dir = tempfile::tempdir().unwrap();
        let puts = AtomicUsize::new(0);
        let answer = move |line: &str| {
            let is_first = || puts.fetch_add(1, Ordering::SeqCst) == 0;
            match line {
                _ if line.contains("put") && is_first() => None,
                _ if line.contains("put") => Some("\"done\""),
                _ => Some("STATUS"),
            }
        };
        let requests = process(&dir.path().join("socket"), PROGRAM_VERSION, &options(), answer);
        let plane = DataPlane::new(dir.path().to_owned());
        let put = [Request::Put(Peers::new())];
        assert!(plane.ask(&put)[0].is_err());
        for _ in 0..3 {
            assert!(plane.ask(&put)[0].is_ok());
        }
        let connections: Vec<usize> = requests.try_iter().map(|(n, _)| n).collect();
        // The second one watches.
        assert_eq!(connections, [0, 2, 2, 2, 2]);
    }

    /// Another start of one would take over from it at once. Here, it fails: no program is there.
    #[test]
    fn a_process_that_is_starting_is_awaited() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let lock = File::create(socket.with_extension(LOCK)).unwrap();
        lock.lock().unwrap();
        let plane = DataPlane::new(dir.path().to_owned());
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| plane.ask(&[Request::Start(options())]).remove(0));
            // It also passes if the thread begins later.
            std::thread::park_timeout(START / 50);
            let answer =
                |line: &str| Some(if line.contains("start") { "\"done\"" } else { "STATUS" });
            let _requests = process(&socket, PROGRAM_VERSION, &options(), answer);
            drop(lock);
            assert_eq!(asking.join().unwrap().unwrap(), None);
        });
    }
}
