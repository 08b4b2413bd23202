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
use flannel_udp::{
    Client, Options, PROGRAM_VERSION, Peers, Prefix, Process, Request, Status, VERSION,
};
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
    /// The process that has answered last.
    running: Process,
    /// The id of the process whose end is reported.
    watched: Option<u32>,
    /// Gets an event when the process ends.
    listener: Option<UnboundedSender<Invalidation>>,
    child: Option<Child>,
    /// The version of the program that was started last; `None`: none was. It differs from
    /// [`PROGRAM_VERSION`] if another program is in `PATH`, which is not started again and again.
    started: Option<String>,
}

impl Inner {
    /// The process has another version than one that would be started.
    fn is_old(&self) -> bool {
        self.running.program != self.started.as_deref().unwrap_or(PROGRAM_VERSION)
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
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self(Arc::new(Shared { dir, inner: Mutex::default(), drops: Mutex::default() }))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self) -> PathBuf {
        self.0.dir.join("socket")
    }

    /// Asks the process, and starts it if the requests need it. Without one the answers are empty.
    /// A request that is refused does not stop the next one.
    fn ask(&self, requests: &[Request]) -> Vec<Result<Option<Status>, KernelError>> {
        let mut inner = self.inner();
        let need = requests.iter().map(Need::of).max().unwrap_or(Need::Nothing);
        let mut broken = self.connect(&mut inner, need).err().map(|error| failed(&error));
        let answer = |request: &Request| {
            if let Some(error) = &broken {
                return Err(error.clone());
            }
            let Some(client) = &mut inner.client else { return Ok(None) };
            let answer = client.ask(request).map_err(|error| {
                let why = failed(&error);
                // It has ended, or does not answer.
                if error.kind() != ErrorKind::Other {
                    broken = Some(why.clone());
                }
                why
            });
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
        match Client::connect(&self.socket()) {
            Ok(mut client) => match client.process() {
                Ok(process) if process.version == VERSION => {
                    inner.running = process;
                    if need != Need::Current || !inner.is_old() {
                        return self.use_client(inner, client);
                    }
                }
                _ if need == Need::Nothing => {
                    let text = "it has another version; a start of the daemon replaces it";
                    return Err(io::Error::other(text));
                }
                _ => {}
            },
            Err(_) if need == Need::Nothing => return Ok(()),
            Err(_) => {}
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
                    inner.started = Some(process.program.clone());
                    inner.running = process;
                    return self.use_client(inner, client);
                }
                Err(error) if begin.elapsed() >= START => return Err(error),
                _ if begin.elapsed() >= START => return Err(ErrorKind::TimedOut.into()),
                _ => std::thread::park_timeout(PAUSE),
            }
            if let Ok(Some(status)) = child.try_wait() {
                return Err(io::Error::other(format!("its process ended: {status}")));
            }
        }
    }

    /// Uses a connection to the process that runs, and reports its end to the engine.
    fn use_client(&self, inner: &mut Inner, client: Client) -> io::Result<()> {
        let pid = inner.running.pid;
        if inner.watched != Some(pid) {
            let (watch, plane) = (Client::connect(&self.socket())?, self.clone());
            let thread = std::thread::Builder::new().name(NAME.into()).stack_size(256 << 10);
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
        if let Some(listener) = &inner.listener {
            let _ = listener.send(Invalidation::Everything);
        }
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

/// The requests for changes, each with the places of its changes: one for those of the same kind
/// that follow each other. The end of the process is the last one, because nobody answers after it.
fn merged(requests: impl IntoIterator<Item = (usize, Request)>) -> Vec<(Request, Vec<usize>)> {
    let mut all: Vec<(Request, Vec<usize>)> = Vec::new();
    for (place, request) in requests {
        match (all.last_mut(), request) {
            (Some((Request::Put(peers), places)), Request::Put(more)) => {
                peers.extend(more);
                places.push(place);
            }
            (Some((Request::Delete(peers), places)), Request::Delete(more)) => {
                peers.extend(more);
                places.push(place);
            }
            (_, request) => all.push((request, vec![place])),
        }
    }
    all.sort_by_key(|(request, _)| matches!(request, Request::Stop(_)));
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
        let Some(status) = self.ask(&[Request::Status]).remove(0)? else { return Ok(Vec::new()) };
        let mut records = records(&status);
        let inner = self.inner();
        if let Some(node) = records.first_mut().filter(|_| inner.is_old())
            && let Some(secret) = node.secret().cloned()
        {
            // It differs, so that the engine puts it, which starts the new version.
            let data = format!("{} of version {}", node.data(), inner.running.program);
            *node = Record::new(NAME, node.subnet, data).with_secret(secret);
        }
        Ok(records)
    }

    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let mut results = vec![Ok(()); changes.len()];
        let mut requests = Vec::new();
        for (place, (change, result)) in changes.iter().zip(&mut results).enumerate() {
            match request(change) {
                Ok(request) => requests.push((place, request)),
                Err(why) => *result = Err(KernelError::explained(0, why)),
            }
        }
        let (requests, places): (Vec<_>, Vec<_>) = merged(requests).into_iter().unzip();
        for (answer, places) in self.ask(&requests).into_iter().zip(places) {
            for place in places {
                results[place] = answer.clone().map(drop);
            }
        }
        results
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
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        let requests = changes.iter().map(|change| request(change).unwrap()).enumerate();
        let (requests, places): (Vec<_>, Vec<_>) = merged(requests).into_iter().unzip();
        let [Request::Put(put), Request::Delete(gone), Request::Start(_), Request::Stop(stopped)] =
            &requests[..]
        else {
            panic!("{requests:?}")
        };
        assert_eq!((put.len(), gone.len(), stopped), (2, 1, &options()));
        assert_eq!(places, [vec![0, 1], vec![3], vec![4], vec![2]]);
    }

    /// A process whose answers are given, and the requests of its connections.
    fn process(
        socket: &Path,
        program: &str,
        answer: impl Fn(&str) -> Option<&'static str> + Send + Sync + 'static,
    ) -> std::sync::mpsc::Receiver<(usize, String)> {
        let (listener, answer) = (UnixListener::bind(socket).unwrap(), Arc::new(answer));
        let mut status = serde_json::to_value(Status::default()).unwrap();
        status["version"] = VERSION.into();
        status["program"] = program.into();
        status["options"] = serde_json::to_value(options()).unwrap();
        let status = serde_json::json!({ "status": status }).to_string();
        let (requests, received) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for (n, stream) in listener.incoming().enumerate() {
                let (mut stream, requests) = (stream.unwrap(), requests.clone());
                let (answer, status) = (Arc::clone(&answer), status.clone());
                std::thread::spawn(move || {
                    for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                        let line = line.unwrap();
                        let Some(text) = answer(&line) else { return };
                        writeln!(stream, "{}", text.replace("STATUS", &status)).unwrap();
                        let _ = requests.send((n, line));
                    }
                });
            }
        });
        received
    }

    #[test]
    fn each_change_has_its_own_result() {
        let dir = tempfile::tempdir().unwrap();
        let answer = |line: &str| {
            Some(match line {
                _ if line.contains("put") => r#"{"failed":"no"}"#,
                _ if line.contains("delete") => "\"done\"",
                _ => "STATUS",
            })
        };
        let _requests = process(&dir.path().join("socket"), PROGRAM_VERSION, answer);
        let plane = DataPlane::new(dir.path().to_owned());
        let peer = |n: u8| peer_record(subnet(n), ([192, 0, 2, n], 8285).into());
        let unknown = Record::new(NAME, subnet(3), "unknown".to_owned());
        let results = plane.apply(&[
            Change::Put(peer(1).into()),
            Change::Delete(peer(2).into()),
            Change::Put(unknown.into()),
            Change::Delete(peer(4).into()),
        ]);
        let text = |result: Result<(), KernelError>| result.err().map(|error| error.to_string());
        let failed: Vec<Option<String>> = results.into_iter().map(text).collect();
        let [Some(refused), None, Some(unknown), None] = &failed[..] else { panic!("{failed:?}") };
        assert!(refused.contains("no") && unknown.contains("has no address"), "{failed:?}");
    }

    /// It does not answer any more, and there is one connection that reports its end.
    #[test]
    fn a_broken_connection_is_replaced_and_the_end_is_reported_once() {
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
        let requests = process(&dir.path().join("socket"), PROGRAM_VERSION, answer);
        let plane = DataPlane::new(dir.path().to_owned());
        let put = [Change::Put(peer_record(subnet(1), ([192, 0, 2, 1], 1).into()).into())];
        assert!(plane.apply(&put)[0].is_err());
        for _ in 0..3 {
            assert_eq!(plane.apply(&put), [Ok(())]);
        }
        let connections: Vec<usize> = requests.try_iter().map(|(n, _)| n).collect();
        // The second one watches.
        assert_eq!(connections, [0, 2, 2, 2, 2]);
    }

    /// The engine puts the record of this node, which starts a process that takes over.
    #[test]
    fn a_process_of_another_version_has_another_record() {
        for (program, more) in [(PROGRAM_VERSION, ""), ("0.0.0-old", " of version 0.0.0-old")] {
            let dir = tempfile::tempdir().unwrap();
            let _requests = process(&dir.path().join("socket"), program, |_| Some("STATUS"));
            let found = DataPlane::new(dir.path().to_owned()).records().unwrap();
            let mut wanted = node_record(subnet(7), &options());
            wanted = Record::new(NAME, subnet(7), format!("{}{more}", wanted.data()))
                .with_secret(wanted.secret().unwrap().clone());
            assert_eq!(found, [wanted]);
        }
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
