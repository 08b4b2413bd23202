//! A process with a data plane, which answers on a socket.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, BufReader};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Scope;
use std::time::{Duration, Instant};

use crate::control::{
    Client, Peers, Process, Request, Response, Status, VERSION, is_nobody, read_line, send_fds,
    write_line,
};
use crate::counters::Counts;
use crate::ending::{Ended, Ending};
use crate::error::Error;
use crate::forwarder::{FailureCallback, Forwarder, HandedOver};
use crate::options::Options;
use crate::saved_counters::SavedCounters;
use crate::table::Peer;

/// The extension of the file that a process locks while it starts or takes over.
pub(crate) const LOCK: &str = "lock";
/// The file with the counts, beside the socket.
const COUNTS: &str = "counts";
/// The longest wait for each line of a process that takes over. Packets wait meanwhile.
const HAND_OVER: Duration = Duration::from_secs(2);
/// The most connections at once.
const MOST_CONNECTIONS: usize = 64;
/// The time in which the first user of a process comes.
const FIRST_USE: Duration = Duration::from_secs(10);
/// The pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves on a socket until it is told to stop. If another process already serves this socket,
/// takes over its data plane without losing a packet. If the takeover fails, the other process
/// keeps running. If the other process has another version of the protocol, it is ended, and its
/// data plane is not taken over.
///
/// `program` is the version in [`Process::program`]. A process without a data plane ends when its
/// last connection is closed. If clients have only read its state so far, it waits until it is ten
/// seconds old before it ends.
///
/// Blocks. When it returns, its threads have ended and its connections are closed.
///
/// # Errors
/// The socket cannot be used.
pub fn serve(socket: &Path, program: &str) -> io::Result<Ended> {
    if let Some(dir) = socket.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    // Two processes cannot take over at once. The lock ends with the descriptor.
    let lock = File::create(socket.with_extension(LOCK))?;
    lock.lock()?;
    // Nearly all that can fail comes before the other process ends.
    let new = socket.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let listener = UnixListener::bind(&new)?;
    listener.set_nonblocking(true)?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    let ending = Arc::new(Ending::new()?);
    let on_failure = FailureCallback::new({
        let ending = Arc::clone(&ending);
        move |error| {
            crate::report(&error.to_string());
            ending.end(Ended::Failed);
        }
    });
    let taken_over = match Client::connect(socket) {
        Ok(client) => take_over(client, socket, &on_failure)?,
        Err(error) if is_nobody(&error) => TakenOver::nothing(socket),
        // There may be one.
        Err(error) => return Err(error),
    };
    std::fs::rename(&new, socket)?;
    drop(lock);
    let state = State {
        program: program.to_owned(),
        forwarder: taken_over.forwarder,
        peers: taken_over.peers,
        saved: taken_over.saved,
        on_failure,
    };
    let server = Server {
        state: Mutex::new(state),
        ending,
        ended: Condvar::new(),
        open: Mutex::default(),
        connections: AtomicUsize::new(0),
        is_used: AtomicBool::new(false),
        begin: Instant::now(),
        socket: socket.to_owned(),
    };
    server.run(&listener)
}

/// What a new process has of the one before.
struct TakenOver {
    forwarder: Option<Forwarder>,
    peers: Peers,
    saved: Arc<SavedCounters>,
}

impl TakenOver {
    /// Without another process, only the counts in the directory of the socket continue.
    fn nothing(socket: &Path) -> Self {
        Self { forwarder: None, peers: Peers::new(), saved: saved_counters(socket) }
    }
}

fn take_over(
    mut client: Client,
    socket: &Path,
    on_failure: &FailureCallback,
) -> io::Result<TakenOver> {
    let is_of_other_version = match client.process() {
        Ok(process) => process.version != VERSION,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => true,
        // It may only be slow. The caller tries again.
        Err(error) => return Err(error),
    };
    if is_of_other_version {
        Client::connect(socket)?.end()?;
        return Ok(TakenOver::nothing(socket));
    }
    // Before packets wait, because the disk may be slow.
    let saved = saved_counters(socket);
    let (status, fds) = client.take_over()?;
    saved.continue_from(&status.counts);
    let forwarder = match status.options {
        Some(options) => {
            let handed_over = HandedOver {
                options,
                fds,
                guards: status.guards,
                peers: list(&status.peers),
                learned: status.learned,
            };
            let forwarder = Forwarder::adopt(handed_over, Arc::clone(&saved), on_failure.clone());
            Some(forwarder.map_err(io::Error::other)?)
        }
        None => None,
    };
    client.adopted()?;
    Ok(TakenOver { forwarder, peers: status.peers, saved })
}

/// The counters, which continue from the counts in the directory of the socket.
fn saved_counters(socket: &Path) -> Arc<SavedCounters> {
    let path = socket.with_file_name(COUNTS);
    SavedCounters::open(&path).unwrap_or_else(|error| {
        crate::report(&format!("{}: {error}; the counts are not kept", path.display()));
        Arc::default()
    })
}

fn list(peers: &Peers) -> Vec<Peer> {
    peers
        .iter()
        .map(|(subnet, address)| Peer {
            subnet: subnet.address,
            len: subnet.len,
            address: *address,
        })
        .collect()
}

/// What requests read and change.
#[derive(Debug)]
struct State {
    /// The version of the program.
    program: String,
    forwarder: Option<Forwarder>,
    peers: Peers,
    saved: Arc<SavedCounters>,
    on_failure: FailureCallback,
}

impl State {
    /// Gives the peers to the data plane.
    fn update_peers(&self) {
        if let Some(forwarder) = &self.forwarder {
            forwarder.set_peers(list(&self.peers));
        }
    }

    fn status(&self) -> Status {
        let learned = self.forwarder.as_ref().map(Forwarder::learned).unwrap_or_default();
        Status { peers: self.peers.clone(), learned, ..self.short_status() }
    }

    /// The state without the peers and their addresses, of which there may be many. The counts are
    /// still 0.
    fn short_status(&self) -> Status {
        let forwarder = self.forwarder.as_ref().filter(|forwarder| forwarder.has_device());
        Status {
            process: Process {
                version: VERSION,
                program: self.program.clone(),
                pid: std::process::id(),
            },
            options: forwarder.map(|forwarder| forwarder.options().clone()),
            guards: forwarder.map(Forwarder::guards).unwrap_or_default(),
            peers: Peers::new(),
            learned: BTreeMap::new(),
            counts: Counts::default(),
            foreign: self.forwarder.as_ref().and_then(Forwarder::last_foreign),
        }
    }

    fn apply(&mut self, request: Request) -> Result<Option<Status>, Error> {
        match request {
            Request::Start(options) => self.start(&options)?,
            Request::Put(peers) => {
                self.peers.extend(peers);
                self.update_peers();
            }
            Request::Delete(subnets) => {
                for subnet in subnets {
                    self.peers.remove(&subnet);
                }
                self.update_peers();
            }
            Request::Counts => return Ok(Some(self.short_status())),
            _ => return Ok(Some(self.status())),
        }
        Ok(None)
    }

    fn start(&mut self, options: &Options) -> Result<(), Error> {
        if let Some(forwarder) = &self.forwarder
            && forwarder.is_of(options)
            && forwarder.has_device()
        {
            if forwarder.options() == options {
                return Ok(());
            }
            // The process does not start anew while an address is missing, because the other family
            // works.
            forwarder.missing(options)?;
        }
        // The new one may need the ports of the old one.
        self.forwarder = None;
        let forwarder = Forwarder::open(
            options.clone(),
            list(&self.peers),
            Arc::clone(&self.saved),
            self.on_failure.clone(),
        )?;
        self.forwarder.insert(forwarder).missing(options)
    }

    /// Hands the data plane over. Its threads have ended if this fails.
    fn hand_over(
        &mut self,
        reader: &mut BufReader<&UnixStream>,
        mut stream: &UnixStream,
    ) -> io::Result<()> {
        stream.set_read_timeout(Some(HAND_OVER))?;
        stream.set_write_timeout(Some(HAND_OVER))?;
        let mut next = || {
            read_line::<()>(reader)?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
        };
        let mut status = self.status();
        let forwarder = self.forwarder.as_mut().filter(|_| status.options.is_some());
        let fds = forwarder.map(Forwarder::pause).transpose()?.unwrap_or_default();
        // The counts do not come from the file, because packets do not wait for a disk.
        status.counts = self.saved.counters.read();
        write_line(&mut stream, &Response::Status(Box::new(status)))?;
        next()?;
        send_fds(stream, &fds)?;
        // It has adopted them.
        next()?;
        write_line(&mut stream, &Response::Done)
    }
}

/// The process.
#[derive(Debug)]
struct Server {
    state: Mutex<State>,
    ending: Arc<Ending>,
    /// Wakes up the threads of [`Self::closed`] when the process ends.
    ended: Condvar,
    /// The connections that are shut down at the end.
    open: Mutex<Vec<Weak<UnixStream>>>,
    connections: AtomicUsize,
    /// A request has changed the state, or would have.
    is_used: AtomicBool,
    /// The start of the process.
    begin: Instant,
    socket: PathBuf,
}

impl Server {
    /// Answers on each connection in a thread, until the end of the process.
    fn run(&self, listener: &UnixListener) -> io::Result<Ended> {
        std::thread::scope(|scope| {
            let ended = loop {
                match self.ending.or_readable(listener.as_fd()) {
                    Ok(Some(ended)) => break Ok(ended),
                    Ok(None) => {}
                    Err(error) => break Err(error),
                }
                // A process without free descriptors or threads still has its data plane.
                match listener.accept().and_then(|(stream, _)| self.accept(scope, stream)) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        crate::report(&format!("control: {error}"));
                        std::thread::park_timeout(PAUSE);
                    }
                }
            };
            self.close_all();
            ended
        })
    }

    /// Ends the threads of connections.
    fn close_all(&self) {
        // The device and its port are free when the connections end. The lock also makes sure that
        // no thread misses the notification between its look and its wait.
        self.state().forwarder = None;
        self.ended.notify_all();
        for stream in self.open().iter().filter_map(Weak::upgrade) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self) -> MutexGuard<'_, Vec<Weak<UnixStream>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_ending(&self) -> bool {
        self.ending.get().is_some()
    }

    /// Answers the requests of a connection in a thread.
    fn accept<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stream: UnixStream,
    ) -> io::Result<()> {
        if self.connections.fetch_add(1, Ordering::SeqCst) >= MOST_CONNECTIONS {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            return Err(io::Error::other("too many connections"));
        }
        let stream = Arc::new(stream);
        {
            let mut open = self.open();
            open.retain(|stream| stream.strong_count() > 0);
            open.push(Arc::downgrade(&stream));
        }
        let thread = std::thread::Builder::new().name("control".into()).stack_size(256 << 10);
        let spawned = thread.spawn_scoped(scope, move || {
            let answered = self.answer(&stream);
            drop(stream);
            match answered {
                Err(error) if !self.is_ending() => crate::report(&format!("control: {error}")),
                _ => {}
            }
            self.closed();
        });
        if spawned.is_err() {
            self.connections.fetch_sub(1, Ordering::SeqCst);
        }
        spawned.map(drop)
    }

    /// Ends the process after the last connection if there is no data plane to keep. A look at the
    /// state does not end a process whose first user still comes.
    fn closed(&self) {
        let is_last = self.connections.fetch_sub(1, Ordering::SeqCst) == 1;
        let mut state = self.state();
        if is_last && !self.is_used.load(Ordering::SeqCst) {
            while let Some(left) = FIRST_USE.checked_sub(self.begin.elapsed())
                && !self.is_ending()
            {
                let waited = self.ended.wait_timeout(state, left);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        let is_unused = is_last && state.forwarder.is_none() && !self.is_ending();
        if is_unused && self.connections.load(Ordering::SeqCst) == 0 {
            let _ = std::fs::remove_file(&self.socket);
            self.ending.end(Ended::Done);
        }
    }

    /// Answers the requests of a connection until it is closed or the process ends.
    fn answer(&self, mut stream: &UnixStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream);
        while !self.is_ending() {
            let request = match read_line(&mut reader) {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                Err(error) => {
                    // Nothing after it can be trusted.
                    return write_line(&mut stream, &Response::Failed(error.to_string()));
                }
            };
            if !matches!(request, Request::Status | Request::Counts) {
                self.is_used.store(true, Ordering::SeqCst);
            }
            match request {
                Request::Stop(options) => self.stop(stream, &options)?,
                Request::HandOver => self.hand_over(&mut reader, stream)?,
                Request::End => self.end(stream),
                request => {
                    if let Some(response) = self.apply(request) {
                        write_line(&mut stream, &response)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends the process, if its data plane has these options.
    fn stop(&self, mut stream: &UnixStream, options: &Options) -> io::Result<()> {
        let mut state = self.state();
        if self.is_ending() {
            return Ok(());
        }
        if state.forwarder.as_ref().is_some_and(|forwarder| !forwarder.is_of(options)) {
            return write_line(&mut stream, &Response::Done);
        }
        state.forwarder = None;
        let _ = std::fs::remove_file(self.socket.with_file_name(COUNTS));
        let _ = std::fs::remove_file(&self.socket);
        // The process ends also if nobody waits for the answer.
        let _ = write_line(&mut stream, &Response::Done);
        self.ending.end(Ended::Done);
        Ok(())
    }

    /// Ends the process when another one has taken over.
    fn hand_over(
        &self,
        reader: &mut BufReader<&UnixStream>,
        stream: &UnixStream,
    ) -> io::Result<()> {
        // Nobody changes it until the process ends.
        let mut state = self.state();
        if self.is_ending() {
            return Ok(());
        }
        let handed_over = state.hand_over(reader, stream);
        if handed_over.is_ok() {
            self.ending.end(Ended::Done);
        } else if let Some(Err(error)) = state.forwarder.as_mut().map(Forwarder::resume) {
            // The other process has failed, and this one cannot go on.
            crate::report(&error.to_string());
            self.ending.end(Ended::Failed);
        }
        handed_over
    }

    /// Ends the process in any case.
    fn end(&self, mut stream: &UnixStream) {
        let mut state = self.state();
        if self.is_ending() {
            return;
        }
        state.forwarder = None;
        let _ = write_line(&mut stream, &Response::Done);
        self.ending.end(Ended::Done);
    }

    /// Does a request that does not end the process. Returns `None` if the process ends.
    fn apply(&self, request: Request) -> Option<Response> {
        let mut state = self.state();
        if self.is_ending() {
            return None;
        }
        let result = state.apply(request);
        let saved = Arc::clone(&state.saved);
        drop(state);
        Some(match result {
            Ok(None) => Response::Done,
            // A count that somebody has seen never goes back. No other request waits for the disk.
            Ok(Some(mut status)) => {
                status.counts = saved.save();
                Response::Status(Box::new(status))
            }
            Err(error) => Response::Failed(error.to_string()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The thread of a process, as a program that embeds it would start it.
    fn serving(socket: &Path) -> std::thread::JoinHandle<io::Result<Ended>> {
        let socket = socket.to_owned();
        std::thread::spawn(move || serve(&socket, "1.0.0"))
    }

    fn connect(socket: &Path) -> Client {
        test_support::eventually(
            Duration::from_secs(20),
            || Client::connect(socket).ok(),
            || "nobody listens",
        )
    }

    /// Otherwise the thread of the other connection would keep the process for ever.
    #[test]
    fn the_end_closes_all_connections_and_returns() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let served = serving(&socket);
        let other = connect(&socket);
        connect(&socket).end().unwrap();
        other.wait_for_end().unwrap();
        assert_eq!(served.join().unwrap().unwrap(), Ended::Done);
    }

    /// A look at the state waits ten seconds for the first user, but not when the process ends.
    #[test]
    fn a_thread_that_waits_for_the_first_user_does_not_delay_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let begin = Instant::now();
        let served = serving(&socket);
        let mut look = connect(&socket);
        look.ask(&Request::Counts).unwrap();
        drop(look);
        connect(&socket).end().unwrap();
        assert_eq!(served.join().unwrap().unwrap(), Ended::Done);
        assert!(begin.elapsed() < FIRST_USE, "it waits for the first user");
    }

    #[test]
    fn another_one_that_takes_over_ends_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let first = serving(&socket);
        let mut user = connect(&socket);
        user.ask(&Request::Put(Peers::new())).unwrap();
        let second = serving(&socket);
        user.wait_for_end().unwrap();
        assert_eq!(first.join().unwrap().unwrap(), Ended::Done);
        connect(&socket).end().unwrap();
        assert_eq!(second.join().unwrap().unwrap(), Ended::Done);
    }
}
