//! The control protocol. Each request is a JSON object in a line, and so is each response.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::counters::{Counts, Foreign};
use crate::options::Options;

/// The version of the protocol. A process with another version is only asked to end.
pub const VERSION: u32 = 2;
/// The longest time for a response.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most descriptors in a message (linux `SCM_MAX_FD`).
const MOST_FDS: u8 = 253;

/// A subnet: the first address and the length of the prefix in bits. Its text is `10.1.7.0/24`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Prefix {
    /// The first address.
    pub address: IpAddr,
    /// The length of the prefix, in bits.
    pub len: u8,
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

impl From<Prefix> for String {
    fn from(prefix: Prefix) -> Self {
        prefix.to_string()
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text).ok_or_else(|| format!("{text:?} is no subnet such as \"10.1.7.0/24\""))
    }
}

impl Prefix {
    fn parse(text: &str) -> Option<Self> {
        let (address, len) = text.split_once('/')?;
        let address: IpAddr = address.parse().ok()?;
        let len = len.parse().ok()?;
        let most = if address.is_ipv6() { 128 } else { 32 };
        (len <= most).then_some(Self { address, len })
    }
}

impl TryFrom<String> for Prefix {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// The addresses of nodes, by the subnets of their pods.
pub type Peers = BTreeMap<Prefix, SocketAddr>;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Request {
    /// Starts the data plane. If one runs with other options, replaces it.
    Start(Options),
    /// Adds peers, or changes their addresses.
    Put(Peers),
    /// Removes peers.
    Delete(Vec<Prefix>),
    /// Asks for the state. All versions know it, and answer with a [`Process`] at least.
    Status,
    /// Asks for the state without the peers and without the addresses of peers behind NAT.
    Counts,
    /// Asks for the descriptors. The process ends when the asking one has adopted them, and goes
    /// on otherwise.
    HandOver,
    /// Ends the process, if its data plane has these options. The device stays.
    Stop(Options),
    /// Ends the process in any case. All versions know it. The device stays.
    End,
}

/// A response to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Response {
    /// The request was done.
    Done,
    /// The request failed, with this error.
    Failed(String),
    /// The state that was asked for.
    Status(Box<Status>),
}

/// A process of any version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Process {
    /// The version of the protocol.
    pub version: u32,
    /// The version of the program ([`serve`](crate::serve)).
    pub program: String,
    /// The id of the process.
    pub pid: u32,
}

/// The state of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The process.
    #[serde(flatten)]
    pub process: Process,
    /// The options of the data plane. `None` if no data plane runs, or if its device is gone or has
    /// another name. [`Options::local`] has only the addresses that could be used.
    pub options: Option<Options>,
    /// The number of sockets that keep other processes from binding the port. [`Request::HandOver`]
    /// passes a list of descriptors: first the lock of the device, then these sockets, then the
    /// others. 0 if no socket does this, and one socket receives for all queues.
    #[serde(default)]
    pub guards: usize,
    /// The peers.
    pub peers: Peers,
    /// The addresses of nodes behind NAT, from which their datagrams come.
    #[serde(default)]
    pub learned: BTreeMap<Prefix, IpAddr>,
    /// The counts of packets.
    pub counts: Counts,
    /// The last packet that [`Counts::foreign_node`] counts. The next process does not have it.
    #[serde(default)]
    pub foreign: Option<Foreign>,
}

/// A connection to a process.
#[derive(Debug)]
pub struct Client(BufReader<UnixStream>);

impl Client {
    /// Connects to the socket of a process. This blocks without a limit if the process hangs and
    /// thousands of other connections wait for it.
    ///
    /// # Errors
    /// Nobody listens on the socket.
    pub fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a request, and waits at most ten seconds for the answer.
    ///
    /// # Errors
    /// The process ended, or the request failed. The connection cannot be used any more after an
    /// error that is not of the kind [`Other`](io::ErrorKind::Other).
    pub fn ask(&mut self, request: &Request) -> io::Result<Option<Status>> {
        write_line(self.0.get_mut(), request)?;
        match read_line(&mut self.0)? {
            Some(Response::Done) => Ok(None),
            Some(Response::Status(status)) => Ok(Some(*status)),
            Some(Response::Failed(why)) => Err(io::Error::other(why)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Asks a process of any version of the protocol for its version and its id.
    ///
    /// # Errors
    /// The process ended, or its response has no [`Process`].
    pub fn process(&mut self) -> io::Result<Process> {
        #[derive(Deserialize)]
        struct Part {
            status: Process,
        }
        write_line(self.0.get_mut(), &Request::Status)?;
        let part: Option<Part> = read_line(&mut self.0)?;
        Ok(part.ok_or(io::ErrorKind::UnexpectedEof)?.status)
    }

    /// Ends a process of any version of the protocol, and waits at most ten seconds for its end.
    ///
    /// # Errors
    /// It refused, or did not end.
    pub fn end(mut self) -> io::Result<()> {
        let response = self.ask(&Request::End);
        match response.and_then(|_| self.0.read_until(b'\n', &mut Vec::new())) {
            Ok(_) => Ok(()),
            // It ended of its own accord.
            Err(error) if has_ended(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Asks for the data plane of a process. Returns its state and its descriptors. The process
    /// goes on unless [`Self::adopted`] follows.
    pub(crate) fn take_over(&mut self) -> io::Result<(Status, Vec<OwnedFd>)> {
        let status = self.ask(&Request::HandOver)?.unwrap_or_default();
        // A buffered read would lose descriptors that are sent earlier.
        write_line(self.0.get_mut(), &())?;
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let parts = &mut [io::IoSliceMut::new(&mut byte)];
        let message = recvmsg(self.0.get_ref(), parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if message.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let fds: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        // The kernel leaves out those for which this process has no place.
        if fds.len() != usize::from(byte[0]) {
            let text = format!("{} of {} descriptors arrived", fds.len(), byte[0]);
            return Err(io::Error::other(text));
        }
        Ok((status, fds))
    }

    /// Tells the process that its data plane runs here, so that it ends.
    ///
    /// # Errors
    /// The other process goes on.
    pub(crate) fn adopted(mut self) -> io::Result<()> {
        write_line(self.0.get_mut(), &())?;
        match read_line(&mut self.0)? {
            Some(Response::Done) => Ok(()),
            _ => Err(io::Error::other("the other process has not waited")),
        }
    }

    /// Waits until the process ends, without a limit.
    ///
    /// # Errors
    /// The connection broke for another reason.
    pub fn wait_for_end(mut self) -> io::Result<()> {
        self.0.get_ref().set_read_timeout(None)?;
        self.0.read_until(b'\n', &mut Vec::new()).map(drop)
    }
}

/// Whether nobody listens on a socket.
pub(crate) fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Whether the process has ended in the midst of a question.
pub(crate) fn has_ended(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Sends descriptors after the response to [`Request::HandOver`], with their number.
pub(crate) fn send_fds(stream: &UnixStream, fds: &[OwnedFd]) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let count = u8::try_from(fds.len())
        .ok()
        .filter(|count| *count <= MOST_FDS)
        .ok_or_else(|| io::Error::other("too many descriptors"))?;
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(stream, &[io::IoSlice::new(&[count])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

pub(crate) fn write_line(stream: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Reads the next line. Returns `None` if the other side has closed the connection.
pub(crate) fn read_line<T: for<'de> Deserialize<'de>>(
    stream: &mut impl BufRead,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if stream.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}
