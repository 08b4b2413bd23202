//! The data plane as an annex: its records are the entries of its table, and one for this node.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flannel_core::Subnet;
use flannel_core::kernel::{Annex, Changes, Invalidation, KernelError, Traffic};
use flannel_core::object::{Change, Key, Object, Record, Secret};
use flannel_udp::{Client, Options, Peers, Prefix, Request, Status};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::NAME;
use crate::traffic::{Drops, traffic};

/// The longest time until a process that was started answers.
const START: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(5);
/// The text of a record before the address.
const TO: &str = "to ";

/// The record of this node: the options of the data plane. Its key is the first of the subnets.
pub(crate) fn node_record(subnet: Subnet, options: &Options) -> Record {
    let Options { device, local, port, .. } = options;
    let local: Vec<String> = local.iter().map(ToString::to_string).collect();
    let data = format!("data plane of {device} at {} port {port}", local.join(", "));
    let content = serde_json::to_vec(options).expect("all keys are strings");
    Record::new(NAME, subnet, data).with_secret(Secret::new(content))
}

/// The record of a peer: the address to which packets are sent.
pub(crate) fn peer_record(subnet: Subnet, address: SocketAddr) -> Record {
    Record::new(NAME, subnet, format!("{TO}{address}"))
}

/// The process of a data plane. Clones are handles of the same.
#[derive(Debug, Clone)]
pub(crate) struct DataPlane(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    dir: PathBuf,
    inner: Mutex<Inner>,
    drops: Mutex<Drops>,
}

#[derive(Debug, Default)]
struct Inner {
    client: Option<Client>,
    /// Gets an event when the process ends.
    listener: Option<UnboundedSender<Invalidation>>,
    child: Option<Child>,
}

impl DataPlane {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(Arc::new(Shared { dir, inner: Mutex::default(), drops: Mutex::default() }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> PathBuf {
        self.0.dir.join("socket")
    }

    /// Asks the process, if there is one. Starts it if `starts`.
    fn ask(&self, requests: &[Request], starts: bool) -> io::Result<Option<Status>> {
        let mut inner = self.inner();
        if inner.client.is_none() {
            inner.client = self.connect(&mut inner.child, starts)?;
        }
        let Some(client) = &mut inner.client else { return Ok(None) };
        let mut status = None;
        for request in requests {
            match client.ask(request) {
                Ok(answer) => status = answer,
                Err(error) => {
                    // The process has ended, or does not answer.
                    if error.kind() != ErrorKind::Other {
                        inner.client = None;
                    }
                    return Err(error);
                }
            }
        }
        if let Some(Request::Stop(_)) = requests.last() {
            inner.client = None;
        }
        Ok(status)
    }

    /// Connects to the process. If there is none, or one of another version, starts one if
    /// `starts`. It takes over from the one that runs.
    fn connect(&self, child: &mut Option<Child>, starts: bool) -> io::Result<Option<Client>> {
        let running = match Client::connect(&self.socket()) {
            Ok(mut client) => {
                let status = client.ask(&Request::Status)?.unwrap_or_default();
                if status.program == env!("CARGO_PKG_VERSION") || !starts {
                    self.watch()?;
                    return Ok(Some(client));
                }
                true
            }
            Err(_) if !starts => return Ok(None),
            Err(_) => false,
        };
        if let Some(mut ended) = child.take() {
            // It has ended, or ends when the next one takes over.
            std::thread::spawn(move || drop(ended.wait()));
        }
        let begin = Instant::now();
        *child = Some(start(&self.0.dir, &self.socket())?);
        loop {
            let connected = Client::connect(&self.socket()).and_then(|mut client| {
                Ok((client.ask(&Request::Status)?.unwrap_or_default(), client))
            });
            match connected {
                // The old one answers until it has handed over.
                Ok((status, client)) if !running || status.program == env!("CARGO_PKG_VERSION") => {
                    self.watch()?;
                    return Ok(Some(client));
                }
                Err(error) if begin.elapsed() >= START => return Err(error),
                _ if begin.elapsed() >= START => return Err(ErrorKind::TimedOut.into()),
                _ => std::thread::park_timeout(PAUSE),
            }
            if let Some(Ok(Some(status))) = child.as_mut().map(Child::try_wait) {
                return Err(io::Error::other(format!("its process ended: {status}")));
            }
        }
    }

    /// Reports the end of the process to the engine.
    fn watch(&self) -> io::Result<()> {
        let (client, plane) = (Client::connect(&self.socket())?, self.clone());
        let thread = std::thread::Builder::new().name(NAME.into()).stack_size(256 << 10);
        thread.spawn(move || {
            let _ = client.wait_for_end();
            let mut inner = plane.inner();
            inner.client = None;
            if let Some(child) = &mut inner.child {
                let _ = child.try_wait();
            }
            if let Some(listener) = &inner.listener {
                let _ = listener.send(Invalidation::Everything);
            }
        })?;
        Ok(())
    }
}

/// Starts the process. It stays when this one ends.
fn start(dir: &Path, socket: &Path) -> io::Result<Child> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    let mut command = flannel_udp::command(socket);
    command.stdin(Stdio::null()).process_group(0).spawn().map_err(|error| {
        let program = command.get_program().display();
        io::Error::new(error.kind(), format!("{program}: {error}; it has to be in PATH"))
    })
}

fn failed(error: &io::Error) -> KernelError {
    KernelError::explained(0, format!("the data plane: {error}"))
}

/// The request for a change.
fn request(change: &Change) -> Result<Request, String> {
    let Object::Record(record) = change.object() else { return Err("it is no record".into()) };
    let subnet = Prefix { address: record.subnet.base(), len: record.subnet.len() };
    if let Some(options) = record.secret() {
        let options = serde_json::from_slice(options.expose());
        let options = options.map_err(|error| format!("{record}: {error}"))?;
        return Ok(match change {
            Change::Put(_) => Request::Start(options),
            Change::Delete(_) => Request::Stop(options),
        });
    }
    match change {
        Change::Put(_) => {
            let address = record.data().strip_prefix(TO).and_then(|text| text.parse().ok());
            let address = address.ok_or_else(|| format!("{record} has no address"))?;
            Ok(Request::Put([(subnet, address)].into()))
        }
        Change::Delete(_) => Ok(Request::Delete(vec![subnet])),
    }
}

/// Requests with those of the same kind that follow each other in one. The end of the process is
/// the last one, because nobody answers after it.
fn merged(requests: impl IntoIterator<Item = Request>) -> Vec<Request> {
    let mut all: Vec<Request> = Vec::new();
    for request in requests {
        match (all.last_mut(), request) {
            (Some(Request::Put(peers)), Request::Put(more)) => peers.extend(more),
            (Some(Request::Delete(peers)), Request::Delete(more)) => peers.extend(more),
            (_, request) => all.push(request),
        }
    }
    all.sort_by_key(|request| matches!(request, Request::Stop(_)));
    all
}

fn records(status: &Status) -> Vec<Record> {
    let subnet = |prefix: &Prefix| Subnet::new(prefix.address, prefix.len);
    let peers: &Peers = &status.peers;
    let peers = peers.iter().filter_map(|(prefix, at)| Some(peer_record(subnet(prefix)?, *at)));
    let node = status
        .options
        .as_ref()
        .and_then(|options| Some(node_record(subnet(options.own.first()?)?, options)));
    node.into_iter().chain(peers).collect()
}

impl Annex for DataPlane {
    fn name(&self) -> &'static str {
        NAME
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        let status = self.ask(&[Request::Status], false).map_err(|error| failed(&error))?;
        Ok(status.as_ref().map(records).unwrap_or_default())
    }

    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let requests: Result<Vec<Request>, String> = changes.iter().map(request).collect();
        let result = match requests {
            Ok(requests) => {
                let starts = changes.iter().any(|change| matches!(change, Change::Put(_)));
                self.ask(&merged(requests), starts).map(drop).map_err(|error| failed(&error))
            }
            Err(why) => Err(KernelError::explained(0, why)),
        };
        vec![result; changes.len()]
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let (listener, events) = unbounded_channel();
        self.inner().listener = Some(listener);
        Ok(Box::new(Events(events)))
    }

    /// A connection of its own does not wait for changes.
    fn traffic(&self) -> Option<Traffic> {
        let counts = Client::connect(&self.socket()).ok()?.ask(&Request::Counts).ok()??;
        let mut drops = self.0.drops.lock().unwrap_or_else(PoisonError::into_inner);
        traffic(&counts, &mut drops, Instant::now())
    }

    /// Changes end before [`Annex::apply`] returns.
    fn wait(&self, _: &Key, _: Duration) -> Result<(), KernelError> {
        Ok(())
    }
}

/// The ends of processes.
struct Events(UnboundedReceiver<Invalidation>);

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        // The sender is dropped when another stream is opened.
        let error = || KernelError::explained(0, "another stream was opened");
        self.0.recv().await.ok_or_else(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            device: "flannel0".into(),
            local: vec![[192, 0, 2, 7].into()],
            port: 8285,
            own: vec!["10.1.7.0/24".parse().unwrap()],
            one_port: false,
            checks_source: true,
            queues: None,
        }
    }

    fn subnet(n: u8) -> Subnet {
        format!("10.1.{n}.0/24").parse().unwrap()
    }

    #[test]
    fn the_records_of_a_process_are_those_that_were_put() {
        let put = [
            node_record(subnet(7), &options()),
            peer_record(subnet(8), ([192, 0, 2, 8], 1).into()),
        ];
        let mut status = Status::default();
        for request in put.clone().map(|record| request(&Change::Put(record.into())).unwrap()) {
            match request {
                Request::Start(options) => status.options = Some(options),
                Request::Put(peers) => status.peers.extend(peers),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(records(&status), put);
    }

    #[test]
    fn changes_of_one_kind_are_one_request() {
        let peer = |n: u8| peer_record(subnet(n), ([192, 0, 2, n], 8285).into());
        let changes = [
            Change::Put(peer(1).into()),
            Change::Put(peer(2).into()),
            Change::Delete(node_record(subnet(7), &options()).into()),
            Change::Delete(peer(3).into()),
            Change::Put(node_record(subnet(7), &options()).into()),
        ];
        let requests = merged(changes.iter().map(|change| request(change).unwrap()));
        let [Request::Put(put), Request::Delete(gone), Request::Start(_), Request::Stop(stopped)] =
            &requests[..]
        else {
            panic!("{requests:?}")
        };
        assert_eq!((put.len(), gone.len(), stopped), (2, 1, &options()));
    }

    #[test]
    fn without_a_process_there_is_no_record_and_nothing_to_delete() {
        let dir = tempfile::tempdir().unwrap();
        let plane = DataPlane::new(dir.path().join("udp"));
        assert_eq!(plane.records().unwrap(), []);
        let gone = Change::Delete(peer_record(subnet(3), ([192, 0, 2, 3], 8285).into()).into());
        assert_eq!(plane.apply(&[gone]), [Ok(())]);
        assert!(!dir.path().join("udp").exists(), "a cleanup makes no directory");
    }
}
