//! The data plane as a record keeper: its records are the entries of its table, and one for this
//! node.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use async_trait::async_trait;
use flannel_core::Subnet;
use flannel_core::kernel::{
    Changes, Invalidation, KernelError, LongDrops, Outcome, RecordKeeper, Refused, Traffic,
};
use flannel_core::object::{Change, Object, Record, Secret};
use flannel_core::runtime::lock;
use flannel_udp::{DataPlane, Options, Peers, Prefix, Program, Request, Status};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::NAME;
use crate::traffic::{counted, traffic, unread};

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

/// The table of a data plane. Clones are handles of the same table.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    plane: DataPlane,
    drops: Arc<Mutex<LongDrops>>,
}

impl Table {
    /// The table of the process in this directory, which runs this program.
    pub(crate) fn new(dir: PathBuf, program: Program) -> Self {
        Self { plane: DataPlane::new(dir, program), drops: Arc::default() }
    }

    fn ask(&self, requests: &[Request]) -> Vec<Result<Option<Status>, KernelError>> {
        let answers = self.plane.ask(requests).into_iter();
        answers.map(|answer| answer.map_err(|error| failed(&error))).collect()
    }
}

fn failed(error: &io::Error) -> KernelError {
    KernelError::Other(format!("the data plane: {error}"))
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

/// The requests for changes, each with the places of its changes. Changes of one kind that follow
/// each other make one request. A request that ends the process comes last, because nobody answers
/// after it.
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

impl RecordKeeper for Table {
    fn name(&self) -> &'static str {
        NAME
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        let Some(status) = self.ask(&[Request::Status]).remove(0)? else { return Ok(Vec::new()) };
        let mut records = records(&status);
        if let Some(node) = records.first_mut()
            && let Some(secret) = node.secret().cloned()
            && let Some(version) = self.plane.other_version()
        {
            // It differs, so that the engine puts it, which replaces the process.
            let data = format!("{} of version {version}", node.data());
            *node = Record::new(NAME, node.subnet, data).with_secret(secret);
        }
        Ok(records)
    }

    fn apply(&self, changes: &[Change]) -> Vec<Outcome> {
        let mut outcomes = vec![Outcome::Done; changes.len()];
        let mut requests = Vec::new();
        for (place, change) in changes.iter().enumerate() {
            match request(change) {
                Ok(request) => requests.push((place, request)),
                Err(why) => outcomes[place] = Outcome::Failed(KernelError::Other(why)),
            }
        }
        let (requests, places): (Vec<_>, Vec<_>) = merged(requests).into_iter().unzip();
        for (answer, places) in self.ask(&requests).into_iter().zip(places) {
            for place in places {
                outcomes[place] = answer.clone().map(drop).into();
            }
        }
        outcomes
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let (listener, events) = unbounded_channel();
        self.plane.on_end(move || {
            let _ = listener.send(Invalidation::Everything);
        });
        Ok(Box::new(Events(events)))
    }

    fn traffic(&self) -> Option<Traffic> {
        match self.plane.counts() {
            Ok(counts) => traffic(&counts?, &mut lock(&self.drops), Instant::now()),
            Err(error) => Some(unread(&error)),
        }
    }

    fn refused(&self) -> Option<Refused> {
        // `traffic` reports an error.
        counted(&self.plane.counts().unwrap_or_default()?)
    }
}

/// The ends of processes.
struct Events(UnboundedReceiver<Invalidation>);

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        // The sender is dropped when another stream is opened.
        let error = || KernelError::Other("another stream was opened".to_owned());
        self.0.recv().await.ok_or_else(error)
    }
}

#[cfg(test)]
mod tests {
    use flannel_udp::PROGRAM_VERSION;
    use flannel_udp::testing::{options, process};

    use super::*;

    fn subnet(n: u8) -> Subnet {
        format!("10.1.{n}.0/24").parse().unwrap()
    }

    #[test]
    fn a_process_that_cannot_be_asked_for_its_counts_is_a_problem() {
        use std::io::{BufRead, BufReader, Write};

        let dir = tempfile::tempdir().unwrap();
        let table = Table::new(dir.path().to_owned(), Program::Installed);
        assert_eq!(table.traffic(), None, "there is no process");
        let listener = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
        let process = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
            stream.write_all(b"no answer of a data plane\n").unwrap();
        });
        let problems = table.traffic().unwrap().problems;
        process.join().unwrap();
        assert!(problems[0].text.starts_with("the counts of the data plane cannot be read: "));
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
        let _requests = process(&dir.path().join("socket"), PROGRAM_VERSION, &options(), answer);
        let plane = Table::new(dir.path().to_owned(), Program::Installed);
        let peer = |n: u8| peer_record(subnet(n), ([192, 0, 2, n], 8285).into());
        let unknown = Record::new(NAME, subnet(3), "unknown".to_owned());
        let outcomes = plane.apply(&[
            Change::Put(peer(1).into()),
            Change::Delete(peer(2).into()),
            Change::Put(unknown.into()),
            Change::Delete(peer(4).into()),
        ]);
        let [Outcome::Failed(refused), Outcome::Done, Outcome::Failed(unknown), Outcome::Done] =
            &outcomes[..]
        else {
            panic!("{outcomes:?}")
        };
        assert!(refused.to_string().contains("no"), "{refused}");
        assert!(unknown.to_string().contains("has no address"), "{unknown}");
    }

    /// The engine puts the record of this node, which starts a process that takes over.
    #[test]
    fn a_process_of_another_version_has_another_record() {
        for (program, more) in [(PROGRAM_VERSION, ""), ("0.0.0-old", " of version 0.0.0-old")] {
            let dir = tempfile::tempdir().unwrap();
            let _requests =
                process(&dir.path().join("socket"), program, &options(), |_| Some("STATUS"));
            let found = Table::new(dir.path().to_owned(), Program::Installed).records().unwrap();
            let mut wanted = node_record(subnet(7), &options());
            wanted = Record::new(NAME, subnet(7), format!("{}{more}", wanted.data()))
                .with_secret(wanted.secret().unwrap().clone());
            assert_eq!(found, [wanted]);
        }
    }

    #[test]
    fn without_a_process_there_is_no_record_and_nothing_to_delete() {
        let dir = tempfile::tempdir().unwrap();
        let plane = Table::new(dir.path().join("udp"), Program::Installed);
        assert_eq!(plane.records().unwrap(), []);
        let gone = Change::Delete(peer_record(subnet(3), ([192, 0, 2, 3], 8285).into()).into());
        assert_eq!(plane.apply(&[gone]), [Outcome::Done]);
        assert!(!dir.path().join("udp").exists(), "a cleanup makes no directory");
    }
}
