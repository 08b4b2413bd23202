//! A process with a data plane, which answers on a socket.

use std::collections::BTreeMap;
use std::fs::DirBuilder;
use std::io::{self, BufReader};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control::{
    Answer, Client, Peers, Prefix, Request, Status, VERSION, read_line, send_fds, write_line,
};
use crate::ledger::Ledger;
use crate::plane::Plane;
use crate::table::Peer;

/// The file with the counts, beside the socket.
const COUNTS: &str = "counts";

/// The data plane of the process.
#[derive(Debug, Default)]
struct Inner {
    plane: Option<Plane>,
    peers: Peers,
    ledger: Arc<Ledger>,
}

/// The process.
#[derive(Debug, Clone)]
struct Server {
    inner: Arc<Mutex<Inner>>,
    socket: PathBuf,
}

/// Serves on a socket until it is told to stop. If another process does, takes over its data
/// plane, without the loss of a packet. Returns only after an error.
///
/// # Errors
/// The socket cannot be used.
pub fn serve(socket: &Path) -> io::Result<std::convert::Infallible> {
    if let Some(dir) = socket.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    let inner = match Client::connect(socket) {
        Ok(client) => take_over(client, socket)?,
        Err(_) => Inner { ledger: ledger(socket), ..Inner::default() },
    };
    // Two processes cannot begin at once: the caller holds a lock.
    let new = socket.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let listener = UnixListener::bind(&new)?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
    std::fs::rename(&new, socket)?;
    let server = Server { inner: Arc::new(Mutex::new(inner)), socket: socket.to_owned() };
    loop {
        let (stream, _) = listener.accept()?;
        let server = server.clone();
        let thread = std::thread::Builder::new().name("control".into()).stack_size(256 << 10);
        thread.spawn(move || {
            if let Err(error) = server.answer(stream) {
                crate::report(&format!("control: {error}"));
            }
        })?;
    }
}

fn take_over(client: Client, socket: &Path) -> io::Result<Inner> {
    let (Status { options, peers, learned, .. }, fds) = client.take_over()?;
    // The other process has saved its counts before it answered.
    let ledger = ledger(socket);
    let adopt = |options| Plane::adopt(options, fds, list(&peers), &learned, Arc::clone(&ledger));
    let plane = options.map(adopt).transpose().map_err(io::Error::other)?;
    Ok(Inner { plane, peers, ledger })
}

/// The counters, which continue from those in the directory of the socket.
fn ledger(socket: &Path) -> Arc<Ledger> {
    let path = socket.with_file_name(COUNTS);
    Arc::new(Ledger::open(&path).unwrap_or_else(|error| {
        crate::report(&format!("{}: {error}; the counts are not kept", path.display()));
        Ledger::default()
    }))
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
        Status { peers: self.peers.clone(), learned, ..self.counts() }
    }

    /// The state without the peers and their addresses, of which there may be many.
    fn counts(&self) -> Status {
        Status {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            options: self.plane.as_ref().map(|plane| plane.options().clone()),
            peers: Peers::new(),
            learned: BTreeMap::new(),
            // A count that somebody has seen never goes back.
            counts: self.ledger.save(),
            foreign: self.plane.as_ref().and_then(Plane::last_foreign),
        }
    }

    fn apply(&mut self, request: Request) -> Result<Option<Status>, String> {
        match request {
            Request::Start(options) => {
                if self.plane.as_ref().is_none_or(|plane| *plane.options() != options) {
                    // The new one may need the ports of the old one.
                    self.plane = None;
                    let ledger = Arc::clone(&self.ledger);
                    self.plane = Some(Plane::open(options, list(&self.peers), ledger)?);
                }
            }
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
            Request::Counts => return Ok(Some(self.counts())),
            _ => return Ok(Some(self.status())),
        }
        Ok(None)
    }

    /// The descriptors of the data plane, whose threads have ended.
    fn end(&mut self) -> io::Result<Vec<OwnedFd>> {
        self.plane.take().map(Plane::into_fds).transpose().map(Option::unwrap_or_default)
    }
}

impl Server {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
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
            match request {
                Request::Stop(options) => {
                    let mut inner = self.inner();
                    if inner.plane.as_ref().is_some_and(|plane| *plane.options() != options) {
                        write_line(&mut stream, &Answer::Done)?;
                        continue;
                    }
                    inner.end()?;
                    let _ = std::fs::remove_file(self.socket.with_file_name(COUNTS));
                    let _ = std::fs::remove_file(&self.socket);
                    write_line(&mut stream, &Answer::Done)?;
                    std::process::exit(0);
                }
                Request::HandOver => {
                    // Nobody changes it until the process ends.
                    let mut inner = self.inner();
                    let mut status = inner.status();
                    let fds = inner.end()?;
                    status.counts = inner.ledger.save();
                    write_line(&mut stream, &Answer::Status(Box::new(status)))?;
                    read_line::<()>(&mut reader)?;
                    send_fds(&stream, &fds)?;
                    std::process::exit(0);
                }
                request => {
                    let answer = match self.inner().apply(request) {
                        Ok(None) => Answer::Done,
                        Ok(Some(status)) => Answer::Status(Box::new(status)),
                        Err(why) => Answer::Failed(why),
                    };
                    write_line(&mut stream, &answer)?;
                }
            }
        }
    }
}
