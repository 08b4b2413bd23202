//! A process with a data plane, which answers on a socket.

use std::collections::BTreeMap;
use std::fs::{DirBuilder, File};
use std::io::{self, BufReader};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::control::{
    Answer, Client, Peers, Prefix, Process, Request, Status, VERSION, is_nobody, read_line,
    send_fds, write_line,
};
use crate::counters::Counts;
use crate::error::Error;
use crate::ledger::Ledger;
use crate::options::Options;
use crate::plane::Plane;
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

/// The data plane of the process.
#[derive(Debug, Default)]
struct Inner {
    /// Its version.
    program: String,
    plane: Option<Plane>,
    peers: Peers,
    ledger: Arc<Ledger>,
}

/// The process.
#[derive(Debug, Clone)]
struct Server {
    inner: Arc<Mutex<Inner>>,
    connections: Arc<AtomicUsize>,
    /// A request has changed the state, or would have.
    is_used: Arc<AtomicBool>,
    /// The start of the process.
    begin: Instant,
    socket: PathBuf,
}

/// Serves on a socket until it is told to stop. If another process does, takes over its data
/// plane, without the loss of a packet. If this fails, the other process goes on. One with another
/// version of the protocol is ended. Returns only after an error.
///
/// `program` is the version in [`Process::program`]. A process without a data plane ends with its
/// last connection. If it was only asked for its state, it is ten seconds old then at least.
///
/// # Errors
/// The socket cannot be used.
pub fn serve(socket: &Path, program: &str) -> io::Result<std::convert::Infallible> {
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
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    let inner = match Client::connect(socket) {
        Ok(client) => take_over(client, socket)?,
        Err(error) if is_nobody(&error) => Inner { ledger: ledger(socket), ..Inner::default() },
        // There may be one.
        Err(error) => return Err(error),
    };
    let inner = Inner { program: program.to_owned(), ..inner };
    std::fs::rename(&new, socket)?;
    drop(lock);
    let inner = Arc::new(Mutex::new(inner));
    let (connections, is_used, begin) = (Arc::default(), Arc::default(), Instant::now());
    let server = Server { inner, connections, is_used, begin, socket: socket.to_owned() };
    loop {
        // A process without free descriptors or threads still has its data plane.
        let accepted = listener.accept().and_then(|(stream, _)| server.accept(stream));
        if let Err(error) = accepted {
            crate::report(&format!("control: {error}"));
            std::thread::park_timeout(PAUSE);
        }
    }
}

fn take_over(mut client: Client, socket: &Path) -> io::Result<Inner> {
    let is_of_other_version = match client.process() {
        Ok(process) => process.version != VERSION,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => true,
        // It may only be slow. The caller tries again.
        Err(error) => return Err(error),
    };
    if is_of_other_version {
        Client::connect(socket)?.end()?;
        return Ok(Inner { ledger: ledger(socket), ..Inner::default() });
    }
    // Before packets wait, because the disk may be slow.
    let ledger = ledger(socket);
    let (Status { options, guards, peers, learned, counts, .. }, fds) = client.take_over()?;
    ledger.continue_from(&counts);
    let adopt =
        |options| Plane::adopt(options, fds, guards, list(&peers), &learned, Arc::clone(&ledger));
    let plane = options.map(adopt).transpose().map_err(io::Error::other)?;
    client.adopted()?;
    Ok(Inner { plane, peers, ledger, ..Inner::default() })
}

/// The counters, which continue from those in the directory of the socket.
fn ledger(socket: &Path) -> Arc<Ledger> {
    let path = socket.with_file_name(COUNTS);
    Ledger::open(&path).unwrap_or_else(|error| {
        crate::report(&format!("{}: {error}; the counts are not kept", path.display()));
        Arc::default()
    })
}

fn list(peers: &Peers) -> Vec<Peer> {
    let peer = |(subnet, address): (&Prefix, &SocketAddr)| Peer {
        subnet: subnet.address,
        len: subnet.len,
        address: *address,
    };
    peers.iter().map(peer).collect()
}

impl Inner {
    /// Gives the peers to the data plane.
    fn program(&self) {
        if let Some(plane) = &self.plane {
            plane.set_peers(list(&self.peers));
        }
    }

    fn status(&self) -> Status {
        let learned = self.plane.as_ref().map(Plane::learned).unwrap_or_default();
        Status { peers: self.peers.clone(), learned, ..self.short_status() }
    }

    /// The state without the peers and their addresses, of which there may be many. The counts are
    /// still those of nothing.
    fn short_status(&self) -> Status {
        let plane = self.plane.as_ref().filter(|plane| plane.has_device());
        let (program, pid) = (self.program.clone(), std::process::id());
        Status {
            process: Process { version: VERSION, program, pid },
            options: plane.map(|plane| plane.options().clone()),
            guards: plane.map(Plane::guards).unwrap_or_default(),
            peers: Peers::new(),
            learned: BTreeMap::new(),
            counts: Counts::default(),
            foreign: self.plane.as_ref().and_then(Plane::last_foreign),
        }
    }

    fn apply(&mut self, request: Request) -> Result<Option<Status>, Error> {
        match request {
            Request::Start(options) => self.start(&options)?,
            Request::Put(peers) => {
                self.peers.extend(peers);
                self.program();
            }
            Request::Delete(subnets) => {
                for subnet in subnets {
                    self.peers.remove(&subnet);
                }
                self.program();
            }
            Request::Counts => return Ok(Some(self.short_status())),
            _ => return Ok(Some(self.status())),
        }
        Ok(None)
    }

    fn start(&mut self, options: &Options) -> Result<(), Error> {
        let runs = self.plane.as_ref();
        if let Some(plane) = runs.filter(|plane| plane.is_of(options) && plane.has_device()) {
            if plane.options() == options {
                return Ok(());
            }
            // Not anew while an address is still missing: the other family works.
            plane.missing(options)?;
        }
        // The new one may need the ports of the old one.
        self.plane = None;
        let plane = Plane::open(options.clone(), list(&self.peers), Arc::clone(&self.ledger))?;
        self.plane.insert(plane).missing(options)
    }

    /// Hands the data plane over. Its threads have ended if this fails.
    fn hand_over(
        &mut self,
        reader: &mut BufReader<UnixStream>,
        stream: &mut UnixStream,
    ) -> io::Result<()> {
        // Of both handles.
        stream.set_read_timeout(Some(HAND_OVER))?;
        stream.set_write_timeout(Some(HAND_OVER))?;
        let ended = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut next = || read_line::<()>(reader)?.ok_or_else(ended);
        let mut status = self.status();
        let plane = self.plane.as_mut().filter(|_| status.options.is_some());
        let fds = plane.map(Plane::pause).transpose()?.unwrap_or_default();
        // Not in the file: packets do not wait for a disk.
        status.counts = self.ledger.counters.read();
        write_line(stream, &Answer::Status(Box::new(status)))?;
        next()?;
        send_fds(stream, &fds)?;
        // It has adopted them.
        next()?;
        write_line(stream, &Answer::Done)
    }
}

impl Server {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the requests of a connection in a thread.
    fn accept(&self, stream: UnixStream) -> io::Result<()> {
        if self.connections.fetch_add(1, Ordering::SeqCst) >= MOST_CONNECTIONS {
            self.connections.fetch_sub(1, Ordering::SeqCst);
            return Err(io::Error::other("too many connections"));
        }
        let server = self.clone();
        let thread = std::thread::Builder::new().name("control".into()).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            if let Err(error) = server.answer(stream) {
                crate::report(&format!("control: {error}"));
            }
            server.closed();
        });
        if thread.is_err() {
            self.connections.fetch_sub(1, Ordering::SeqCst);
        }
        thread.map(drop)
    }

    /// Ends the process after the last connection if there is no data plane to keep. A look at the
    /// state does not end a process whose first user still comes.
    fn closed(&self) {
        let is_last = self.connections.fetch_sub(1, Ordering::SeqCst) == 1;
        if is_last && !self.is_used.load(Ordering::SeqCst) {
            let left = || FIRST_USE.checked_sub(self.begin.elapsed());
            while let Some(left) = left() {
                std::thread::park_timeout(left);
            }
        }
        let inner = self.inner();
        if is_last && inner.plane.is_none() && self.connections.load(Ordering::SeqCst) == 0 {
            let _ = std::fs::remove_file(&self.socket);
            std::process::exit(0);
        }
    }

    fn answer(&self, stream: UnixStream) -> io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut stream = stream;
        loop {
            let request = match read_line(&mut reader) {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                Err(error) => {
                    // Nothing after it can be trusted.
                    return write_line(&mut stream, &Answer::Failed(error.to_string()));
                }
            };
            if !matches!(request, Request::Status | Request::Counts) {
                self.is_used.store(true, Ordering::SeqCst);
            }
            match request {
                Request::Stop(options) => {
                    let mut inner = self.inner();
                    if inner.plane.as_ref().is_some_and(|plane| !plane.is_of(&options)) {
                        write_line(&mut stream, &Answer::Done)?;
                        continue;
                    }
                    inner.plane = None;
                    let _ = std::fs::remove_file(self.socket.with_file_name(COUNTS));
                    let _ = std::fs::remove_file(&self.socket);
                    // Also if nobody waits for the answer.
                    let _ = write_line(&mut stream, &Answer::Done);
                    std::process::exit(0);
                }
                Request::HandOver => {
                    // Nobody changes it until the process ends.
                    let mut inner = self.inner();
                    let Err(error) = inner.hand_over(&mut reader, &mut stream) else {
                        std::process::exit(0);
                    };
                    // The other process has failed.
                    if let Some(Err(why)) = inner.plane.as_mut().map(Plane::resume) {
                        crate::report(&why.to_string());
                        std::process::exit(1);
                    }
                    return Err(error);
                }
                Request::End => {
                    let mut inner = self.inner();
                    inner.plane = None;
                    let _ = write_line(&mut stream, &Answer::Done);
                    std::process::exit(0);
                }
                request => {
                    let (result, ledger) = {
                        let mut inner = self.inner();
                        (inner.apply(request), Arc::clone(&inner.ledger))
                    };
                    let answer = match result {
                        Ok(None) => Answer::Done,
                        // A count that somebody has seen never goes back. No other request waits
                        // for the disk.
                        Ok(Some(mut status)) => {
                            status.counts = ledger.save();
                            Answer::Status(Box::new(status))
                        }
                        Err(why) => Answer::Failed(why.to_string()),
                    };
                    write_line(&mut stream, &answer)?;
                }
            }
        }
    }
}
