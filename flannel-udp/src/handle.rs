//! A handle of the process of a data plane. It finds the process, starts it, or replaces a process
//! of another version.

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
use crate::control::{Client, Process, Request, Status, VERSION, has_ended, is_nobody};
use crate::server::LOCK;
use crate::started::Program;

/// The longest time until a process that was started answers.
const START: Duration = Duration::from_secs(5);
/// The longest time for the answer of a process that hands over meanwhile.
const ANSWER: Duration = Duration::from_secs(10);
/// The longest wait for a process that starts or takes over. A question for counts waits less.
const TAKE_OVER: Duration = Duration::from_secs(10);
const TAKE_OVER_FOR_COUNTS: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

/// A handle of the process of a data plane. Clones are handles of the same process.
///
/// All methods block: for each request at most ten seconds, and while a process starts or takes
/// over up to a minute more. A dropped handle leaves the process as it is.
#[derive(Debug, Clone)]
pub struct DataPlane(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    program: Program,
    inner: Mutex<Inner>,
}

/// Is called when the process ends.
#[derive(Default)]
struct EndCallback(Option<Box<dyn Fn() + Send>>);

impl fmt::Debug for EndCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EndCallback").field(&self.0.is_some()).finish()
    }
}

#[derive(Debug, Default)]
struct Inner {
    client: Option<Client>,
    /// The process that has answered last.
    running: Option<Process>,
    /// The id of the process whose end is reported.
    watched: Option<u32>,
    on_end: EndCallback,
    child: Option<Child>,
    /// The version of the program that was started last, or `None` if none was started. It differs
    /// from [`PROGRAM_VERSION`] if another program is in `PATH`, which is not started again and
    /// again.
    started: Option<String>,
}

impl Inner {
    /// Whether the process has another version than a process that would be started.
    fn is_old(&self) -> bool {
        let current = self.started.as_deref().unwrap_or(PROGRAM_VERSION);
        self.running.as_ref().is_some_and(|running| running.program != current)
    }
}

/// Which process a request needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// No process: without one there is nothing to read or to delete.
    #[default]
    Nothing,
    /// A process of any version.
    Any,
    /// A process of the version that would be started. It takes over from another version.
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
    /// The process whose socket is `socket` in this directory, and which runs this program.
    /// Starting the process makes the directory.
    pub fn new(dir: PathBuf, program: Program) -> Self {
        Self(Arc::new(Shared { dir, program, inner: Mutex::default() }))
    }

    /// Calls a function whenever the process has ended. It replaces an earlier function. It must
    /// not block, and must not use this handle.
    pub fn on_end(&self, callback: impl Fn() + Send + 'static) {
        self.inner().on_end = EndCallback(Some(Box::new(callback)));
    }

    /// The version of the process that has answered last, if a process of another version would be
    /// started. [`Request::Start`] replaces such a process.
    pub fn other_version(&self) -> Option<String> {
        let inner = self.inner();
        let running = inner.running.as_ref().filter(|_| inner.is_old());
        running.map(|running| running.program.clone())
    }

    /// The counts of the process, or `None` without a process, or while it starts or ends.
    /// This uses a connection of its own, so it does not wait for other requests.
    ///
    /// # Errors
    /// The process cannot be asked, or gives no counts.
    pub fn counts(&self) -> io::Result<Option<Status>> {
        match self.reach(TAKE_OVER_FOR_COUNTS, |client| client.ask(&Request::Counts)) {
            Ok((counts, _)) => Ok(counts),
            Err(error) if is_gone(&error) || error.kind() == ErrorKind::TimedOut => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> PathBuf {
        self.0.dir.join("socket")
    }

    /// Asks the process on a new connection. Waits for one that starts or takes over.
    ///
    /// # Errors
    /// The question failed. Or no process answers ([`is_nobody`]). Or a process starts or takes
    /// over for longer than `patience` (`TimedOut`).
    fn reach<T>(
        &self,
        patience: Duration,
        question: impl Fn(&mut Client) -> io::Result<T>,
    ) -> io::Result<(T, Client)> {
        let ask = || -> io::Result<(T, Client)> {
            let mut client = Client::connect(&self.socket())?;
            Ok((question(&mut client)?, client))
        };
        let lock = self.socket().with_extension(LOCK);
        let begin = Instant::now();
        let mut was_free = false;
        loop {
            let error = match ask() {
                Err(error) if is_gone(&error) => error,
                answer => return answer,
            };
            // A process that takes over has the name of the socket only after the other one ended.
            let is_free = !is_locked(&lock);
            if is_free && is_nobody(&error) {
                if was_free {
                    return Err(error);
                }
                was_free = true;
                continue;
            }
            was_free = false;
            if begin.elapsed() < patience {
                std::thread::park_timeout(PAUSE);
            } else if is_free {
                return Err(error);
            } else {
                let text = format!("another process still starts: it holds {}", lock.display());
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
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
        let mut batch = Batch { need, ..Batch::default() };
        batch.broken = self.connect(&mut inner, need, TAKE_OVER).err();
        if need == Need::Current && batch.broken.is_some() {
            // The old process still does the rest. One that hangs was awaited already.
            batch.not_current = batch.broken.take();
            batch.broken = self.connect(&mut inner, Need::Nothing, Duration::ZERO).err();
        }
        requests.iter().map(|request| self.ask_one(&mut inner, &mut batch, request)).collect()
    }

    /// Asks one request of a batch.
    fn ask_one(
        &self,
        inner: &mut Inner,
        batch: &mut Batch,
        request: &Request,
    ) -> io::Result<Option<Status>> {
        if let Some(error) = batch.error_of(request, inner.client.is_some()) {
            return Err(copy_of(error));
        }
        let Some(client) = &mut inner.client else { return Ok(None) };
        let mut answer = client.ask(request);
        if answer.as_ref().is_err_and(is_gone) {
            // Another process has taken over from it. All requests can be repeated.
            inner.client = None;
            let need = if batch.not_current.is_some() { Need::of(request) } else { batch.need };
            if let Err(error) = self.connect(inner, need, TAKE_OVER) {
                batch.broken = Some(copy_of(&error));
                return Err(error);
            }
            let Some(client) = &mut inner.client else { return Ok(None) };
            answer = client.ask(request);
        }
        // It has ended, or does not answer.
        let failed = answer.as_ref().err().filter(|error| error.kind() != ErrorKind::Other);
        batch.broken = failed.map(copy_of);
        if batch.broken.is_some() || matches!(request, Request::Stop(_)) {
            inner.client = None;
        }
        answer
    }

    /// Connects to the process that is needed. A new one takes over from the one that runs.
    fn connect(&self, inner: &mut Inner, need: Need, patience: Duration) -> io::Result<()> {
        if inner.client.is_some() && (need != Need::Current || !inner.is_old()) {
            return Ok(());
        }
        inner.client = None;
        match self.reach(patience, |client| self.greet(client)) {
            Ok((greeted, client)) if greeted.process.version == VERSION => {
                inner.running = Some(greeted.process);
                if need != Need::Current || !inner.is_old() {
                    return self.use_client(inner, client, greeted.watch);
                }
            }
            // A new process would have to wait for this one too.
            Err(error) if error.kind() == ErrorKind::TimedOut => return Err(error),
            Ok(_) if need == Need::Nothing => return Err(other_protocol()),
            Err(error) if need == Need::Nothing => {
                return match error.kind() {
                    _ if is_nobody(&error) => Ok(()),
                    // No socket can have a path that is too long.
                    ErrorKind::InvalidInput => Ok(()),
                    ErrorKind::InvalidData => Err(other_protocol()),
                    _ => Err(error),
                };
            }
            Ok(_) | Err(_) => {}
        }
        self.replace(inner, need, patience)
    }

    /// Asks who answers.
    fn greet(&self, client: &mut Client) -> io::Result<Greeted> {
        Ok(Greeted { process: client.process()?, watch: Client::connect(&self.socket())? })
    }

    /// Starts a process, which takes over from the one that runs, and connects to it.
    fn replace(&self, inner: &mut Inner, need: Need, patience: Duration) -> io::Result<()> {
        if let Some(mut ended) = inner.child.take() {
            // It has ended, or ends when the next one takes over.
            std::thread::spawn(move || drop(ended.wait()));
        }
        let begin = Instant::now();
        let child = inner.child.insert(self.start()?);
        loop {
            let connected = Client::connect(&self.socket())
                .and_then(|mut client| Ok((self.greet(&mut client)?, client)));
            match connected {
                // The old one answers until it has handed over.
                Ok((greeted, client)) if greeted.process.pid == child.id() => {
                    inner.started = Some(greeted.process.program.clone());
                    inner.running = Some(greeted.process);
                    return self.use_client(inner, client, greeted.watch);
                }
                // It must not take over when nobody waits for it. After an error it has perhaps
                // just done so.
                Ok(_) if begin.elapsed() >= START => {
                    let _ = child.kill();
                    let text = "the process that runs has not handed over within 5 s";
                    return Err(io::Error::new(ErrorKind::TimedOut, text));
                }
                Err(error) if begin.elapsed() >= 2 * START + ANSWER => {
                    let _ = child.kill();
                    return Err(error);
                }
                _ => std::thread::park_timeout(PAUSE),
            }
            if let Ok(Some(status)) = child.try_wait() {
                let ended = || io::Error::other(format!("its process ended: {status}"));
                // Another one may have taken over from it.
                let reached = self.reach(patience, |client| self.greet(client));
                let (greeted, client) = reached.map_err(|_| ended())?;
                let is_known = greeted.process.version == VERSION;
                inner.running = is_known.then_some(greeted.process);
                if !is_known || (need == Need::Current && inner.is_old()) {
                    return Err(ended());
                }
                return self.use_client(inner, client, greeted.watch);
            }
        }
    }

    /// Uses a connection to the running process, and reports the end of another one.
    fn use_client(&self, inner: &mut Inner, client: Client, watch: Client) -> io::Result<()> {
        let pid = inner.running.as_ref().map(|process| process.pid).unwrap_or_default();
        if inner.watched != Some(pid) {
            let plane = self.clone();
            let builder = std::thread::Builder::new().name("watch".into()).stack_size(256 << 10);
            builder.spawn(move || {
                let _ = watch.wait_for_end();
                plane.ended(pid);
            })?;
            inner.watched = Some(pid);
        }
        inner.client = Some(client);
        Ok(())
    }

    /// Starts the process. It stays when this one ends.
    fn start(&self) -> io::Result<Child> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0.dir)?;
        let mut command = self.0.program.command(&self.socket());
        command.stdin(Stdio::null()).process_group(0).spawn().map_err(|error| {
            let program = command.get_program().display();
            let hint = match self.0.program {
                Program::Installed => "; it has to be in PATH",
                Program::At(_) | Program::This(_) => "",
            };
            io::Error::new(error.kind(), format!("{program}: {error}{hint}"))
        })
    }

    /// The process with this id has ended.
    fn ended(&self, pid: u32) {
        let mut inner = self.inner();
        // Otherwise another one has taken over from it.
        if inner.watched == Some(pid) {
            inner.watched = None;
            inner.client = None;
        }
        if let Some(child) = &mut inner.child {
            let _ = child.try_wait();
        }
        if let Some(on_end) = &inner.on_end.0 {
            on_end();
        }
    }
}

/// A process that answers, and a connection that ends with it.
struct Greeted {
    process: Process,
    watch: Client,
}

/// The state between the requests of one call of [`DataPlane::ask`].
#[derive(Debug, Default)]
struct Batch {
    /// What the most demanding request needs.
    need: Need,
    /// Why no process of the current version answers, while an older one answers.
    not_current: Option<io::Error>,
    /// Why no process answers any more.
    broken: Option<io::Error>,
}

impl Batch {
    /// The error with which a request fails before it is asked.
    fn error_of(&self, request: &Request, has_client: bool) -> Option<&io::Error> {
        let needs_another = match Need::of(request) {
            Need::Current => true,
            Need::Any => !has_client,
            Need::Nothing => false,
        };
        let not_current = self.not_current.as_ref().filter(|_| needs_another);
        not_current.or(self.broken.as_ref())
    }
}

/// An error with the same kind and text.
fn copy_of(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

/// Whether no process can answer, perhaps because another one takes over.
fn is_gone(error: &io::Error) -> bool {
    is_nobody(error) || has_ended(error)
}

/// Whether a process holds this lock, because it starts or takes over.
fn is_locked(lock: &Path) -> bool {
    let tried = File::open(lock).map(|lock| lock.try_lock_shared());
    matches!(tried, Ok(Err(TryLockError::WouldBlock)))
}

fn other_protocol() -> io::Error {
    io::Error::other("it has another version; a start of the daemon replaces it")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;
    use crate::control::Peers;
    use crate::testing::{options, process};

    /// The handle of a process that cannot be started.
    fn without_program(dir: &Path) -> DataPlane {
        DataPlane::new(dir.to_owned(), Program::At("false".into()))
    }

    /// It does not answer any more, and there is one connection that reports its end.
    #[test]
    fn a_broken_connection_is_replaced_and_one_connection_watches() {
        let dir = tempfile::tempdir().unwrap();
        let puts = AtomicUsize::new(0);
        let requests =
            process(&dir.path().join("socket"), PROGRAM_VERSION, &options(), move |line| {
                let is_first = || puts.fetch_add(1, Ordering::SeqCst) == 0;
                match line {
                    _ if line.contains("put") && is_first() => None,
                    _ if line.contains("put") => Some("\"done\""),
                    _ => Some("STATUS"),
                }
            });
        let plane = DataPlane::new(dir.path().to_owned(), Program::Installed);
        let put = [Request::Put(Peers::new())];
        for _ in 0..3 {
            assert!(plane.ask(&put)[0].is_ok());
        }
        let connections: Vec<usize> = requests.try_iter().map(|(n, _)| n).collect();
        // The second one watches.
        assert_eq!(connections, [0, 2, 2, 2, 2]);
    }

    /// Another start of one would take over from it at once. Here, it fails.
    #[test]
    fn a_process_that_is_starting_is_awaited() {
        for request in [Request::Start(options()), Request::Status] {
            let dir = tempfile::tempdir().unwrap();
            let socket = dir.path().join("socket");
            let lock = File::create(socket.with_extension(LOCK)).unwrap();
            lock.lock().unwrap();
            let plane = without_program(dir.path());
            std::thread::scope(|scope| {
                let asking = scope.spawn(|| plane.ask(std::slice::from_ref(&request)).remove(0));
                // It also passes if the thread begins later.
                std::thread::park_timeout(START / 50);
                let start =
                    |line: &str| Some(if line.contains("start") { "\"done\"" } else { "STATUS" });
                let _requests = process(&socket, PROGRAM_VERSION, &options(), start);
                drop(lock);
                let answer = asking.join().unwrap().unwrap();
                assert_eq!(answer.is_some(), request == Request::Status);
            });
        }
    }

    #[test]
    fn a_process_that_starts_for_ever_is_neither_missing_nor_started_again() {
        let dir = tempfile::tempdir().unwrap();
        let plane = without_program(dir.path());
        let reach = || plane.reach(PAUSE, Client::process).unwrap_err();
        assert_eq!(reach().kind(), ErrorKind::NotFound);
        let lock = File::create(plane.socket().with_extension(LOCK)).unwrap();
        assert_eq!(reach().kind(), ErrorKind::NotFound, "a lock that nobody holds");
        lock.lock().unwrap();
        let error = reach();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.to_string().contains("socket.lock"), "{error}");
        for need in [Need::Nothing, Need::Any, Need::Current] {
            let error = plane.connect(&mut plane.inner(), need, PAUSE).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{need:?}");
        }
    }

    /// The one that was started fails, and the old one goes on.
    #[test]
    fn a_process_that_cannot_be_replaced_is_no_success() {
        let dir = tempfile::tempdir().unwrap();
        let _requests = process(&dir.path().join("socket"), "0.0.0-old", &options(), |line| {
            Some(if line.contains("put") { "\"done\"" } else { "STATUS" })
        });
        let plane = without_program(dir.path());
        let requests = [Request::Start(options()), Request::Put(Peers::new())];
        let [Err(error), Ok(None)] = &plane.ask(&requests)[..] else { panic!("it was replaced") };
        assert!(error.to_string().contains("its process ended"), "{error}");
    }

    #[test]
    fn a_process_that_ends_in_the_midst_of_a_question_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _requests = process(&socket, PROGRAM_VERSION, &options(), |_| Some("STATUS"));
        let plane = without_program(dir.path());
        let tries = AtomicUsize::new(0);
        assert!(
            plane
                .reach(TAKE_OVER, |client| match tries.fetch_add(1, Ordering::SeqCst) {
                    0 | 1 => Err(ErrorKind::UnexpectedEof.into()),
                    _ => client.process(),
                })
                .is_ok()
        );
    }

    #[test]
    fn requests_after_one_that_met_no_process_are_not_done() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _requests = process(&socket, PROGRAM_VERSION, &options(), |line| {
            Some("STATUS").filter(|_| !line.contains("delete"))
        });
        let plane = without_program(dir.path());
        assert!(plane.ask(&[Request::Status])[0].is_ok());
        std::fs::remove_file(&socket).unwrap();
        let requests = [Request::Delete(Vec::new()), Request::Put(Peers::new())];
        let answers = plane.ask(&requests);
        assert!(answers.iter().all(Result::is_err), "{answers:?}");
    }

    /// The first process ends in the midst of a request, as one that has handed over.
    #[test]
    fn a_request_goes_to_the_process_that_has_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let old = process(&socket, PROGRAM_VERSION, &options(), |line| {
            Some(line).filter(|line| !line.contains("put")).map(|_| "STATUS")
        });
        let plane = without_program(dir.path());
        assert!(plane.ask(&[Request::Status])[0].is_ok());
        std::fs::remove_file(&socket).unwrap();
        let new = process(&socket, PROGRAM_VERSION, &options(), |line| {
            Some(if line.contains("put") { "\"done\"" } else { "STATUS" })
        });
        assert!(plane.ask(&[Request::Put(Peers::new())])[0].is_ok());
        let lines = |requests: mpsc::Receiver<(usize, String)>| requests.try_iter().count();
        assert!(lines(old) > 0 && lines(new) > 0);
    }

    #[test]
    fn no_process_has_a_socket_whose_path_is_too_long() {
        let plane =
            DataPlane::new(PathBuf::from("/nowhere").join("x".repeat(200)), Program::Installed);
        assert_eq!(plane.ask(&[Request::Status])[0].as_ref().unwrap(), &None);
    }
}
