//! The records of a record keeper are treated as kernel objects: status, retries, adoption and
//! cleanup.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelError, KernelEvent, Outcome, RecordKeeper,
};
use flannel_core::lease::Offer;
use flannel_core::network::NetworkHandle;
use flannel_core::object::{Change, Key, LinkName, Object, Record, Secret};
use flannel_core::testing::{Call, FakeKernel, FakeSubnets, Operation};
use flannel_core::{Backend, Config, Kernel, Result, SubnetManager};
use flannel_route::record_keepers::WithRecordKeepers;
use flannel_route::{Host, JoinOptions, cleanup};
use libc::EIO;
use test_support::{Logged, eventually};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// A record keeper whose changes end when the test ends them.
#[derive(Debug, Clone, Default)]
struct Notes(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    records: BTreeMap<Key, Record>,
    started: VecDeque<Change>,
    starts: usize,
    waits: Vec<Duration>,
    /// Whether changes end at once.
    is_quick: bool,
    listener: Option<mpsc::UnboundedSender<Invalidation>>,
    is_broken: bool,
    /// The next changes fail in these ways, one each.
    faults: VecDeque<Fault>,
}

/// A way in which a change of a record may fail.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// It does not start.
    Refused,
    /// It fails at its end.
    Fails,
    /// It is made, and its end is lost.
    Lost,
    /// It fails, and its end is lost.
    FailsUnseen,
}

impl Entries {
    fn start(&mut self, change: &Change) -> Outcome {
        self.starts += 1;
        if let Some(fault) = self.faults.pop_front() {
            return self.fail(change.clone(), fault);
        }
        if self.is_quick {
            self.end(change.clone(), Ok(()));
        } else if !self.started.contains(change) {
            self.started.push_back(change.clone());
        }
        Outcome::Started
    }

    /// Makes a change that has this fault. Returns its outcome.
    fn fail(&mut self, change: Change, fault: Fault) -> Outcome {
        let failed = Err(KernelError::new(EIO));
        let (result, is_seen) = match fault {
            Fault::Refused => return failed.into(),
            Fault::Fails => (failed, true),
            Fault::Lost => (Ok(()), false),
            Fault::FailsUnseen => (failed, false),
        };
        let listener = self.listener.take_if(|_| !is_seen);
        self.end(change, result);
        if let Some(listener) = listener {
            listener.send(Invalidation::Everything).unwrap();
            self.listener = Some(listener);
        }
        Outcome::Started
    }

    fn end(&mut self, change: Change, result: std::result::Result<(), KernelError>) {
        let key = change.object().key();
        let event = match (result, change) {
            (Err(error), _) => KernelEvent::Failed(key, error),
            (Ok(()), Change::Put(Object::Record(record))) => {
                self.records.insert(key, record.clone());
                KernelEvent::Present(record.into())
            }
            (Ok(()), _) => {
                self.records.remove(&key);
                KernelEvent::Deleted(key)
            }
        };
        if let Some(listener) = &self.listener {
            let _ = listener.send(Invalidation::Objects(vec![event], None));
        }
    }
}

impl Notes {
    fn started(&self) -> Vec<String> {
        self.0.lock().unwrap().started.iter().map(ToString::to_string).collect()
    }

    /// Ends the change that was started first.
    fn end(&self, result: std::result::Result<(), KernelError>) {
        let mut entries = self.0.lock().unwrap();
        let change = entries.started.pop_front().expect("a change was started");
        entries.end(change, result);
    }

    fn records(&self) -> Vec<String> {
        self.0.lock().unwrap().records.values().map(ToString::to_string).collect()
    }
}

impl RecordKeeper for Notes {
    fn name(&self) -> &'static str {
        "notes"
    }

    fn records(&self) -> std::result::Result<Vec<Record>, KernelError> {
        if self.0.lock().unwrap().is_broken {
            return Err(KernelError::new(EIO));
        }
        let entries = self.0.lock().unwrap();
        let mut ended = entries.records.clone();
        for change in &entries.started {
            ended.remove(&change.object().key());
        }
        Ok(ended.into_values().collect())
    }

    fn apply(&self, changes: &[Change]) -> Vec<Outcome> {
        let mut entries = self.0.lock().unwrap();
        changes.iter().map(|change| entries.start(change)).collect()
    }

    fn changes(&self) -> std::result::Result<Box<dyn Changes>, KernelError> {
        if self.0.lock().unwrap().is_broken {
            return Err(KernelError::new(EIO));
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        self.0.lock().unwrap().listener = Some(sender);
        Ok(Box::new(Events(receiver)))
    }

    /// Waits until the clock has moved, and then behaves as if `timeout` had passed.
    fn wait(&self, key: &Key, timeout: Duration) -> Outcome {
        let begun = Instant::now();
        while begun.elapsed().is_zero() {}
        let mut entries = self.0.lock().unwrap();
        entries.waits.push(timeout);
        let is_under_way = entries.started.iter().any(|c| c.object().key() == *key);
        if is_under_way { Outcome::Started } else { Outcome::Done }
    }
}

struct Events(mpsc::UnboundedReceiver<Invalidation>);

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> std::result::Result<Invalidation, KernelError> {
        self.0.recv().await.ok_or(KernelError::new(EIO))
    }
}

/// A backend with a record for each peer, and nothing in the kernel.
#[derive(Debug, Default)]
struct Bookkeeper {
    notes: Notes,
}

#[async_trait]
impl Backend for Bookkeeper {
    fn kind(&self) -> &'static str {
        "bookkeeper"
    }

    /// The leases of the fake store name no backend.
    fn lease_type(&self) -> &'static str {
        ""
    }

    fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, _: &Config, _: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint { record_keepers: ["notes"].into(), ..Footprint::default() })
    }

    fn record_keepers(&self, _: Option<&Path>) -> Vec<Arc<dyn RecordKeeper>> {
        vec![Arc::new(self.notes.clone())]
    }

    async fn prepare(&self, _: &Node<'_>, config: &Config) -> Result<Prepared> {
        let footprint = self.footprint(config, None)?;
        Ok(Prepared::new(Offer::default(), |_| {
            let mut blueprint = Blueprint::new(1500, |subnets, offer, _, objects| {
                objects.extend(offer.endpoints(subnets).map(|peer| {
                    let data = peer.public.map(|public| public.to_string()).unwrap_or_default();
                    let secret = Secret::new(*b"hunter2");
                    Object::from(Record::new("notes", peer.subnet, data).with_secret(secret))
                }));
                Ok(())
            });
            blueprint.footprint = footprint;
            Ok(blueprint)
        }))
    }
}

/// A network that runs.
struct World {
    notes: Notes,
    kernel: FakeKernel,
    subnets: FakeSubnets,
    network: NetworkHandle,
    task: JoinHandle<()>,
}

impl World {
    async fn start(notes: Notes, subnets: FakeSubnets) -> Self {
        let address = [IpAddr::from([192, 0, 2, 1])].into_iter().collect();
        let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("the test says so");
        let kernel = FakeKernel::with_uplink("eth0");
        let host = Host::new(uplink, Arc::new(kernel.clone()), Arc::new(subnets.clone()));
        let backend = Bookkeeper { notes: notes.clone() };
        let config = subnets.network_config().await.unwrap();
        let joined = host.join(&backend, &config, JoinOptions::default()).await.unwrap().network;
        let network = joined.handle();
        let views = subnets.watch_leases().await.unwrap();
        let task = tokio::spawn(async move { drop(joined.run(views).await) });
        Self { notes, kernel, subnets, network, task }
    }

    #[track_caller]
    fn until(&self, holds: impl FnMut() -> bool) {
        let status = self.network.status.clone();
        eventually(Duration::from_secs(10), holds, || format!("{:#?}", status.borrow()));
    }

    async fn in_sync(&self) {
        let mut status = self.network.status.clone();
        let settled = status.wait_for(|status| status.in_sync);
        tokio::time::timeout(Duration::from_secs(10), settled).await.unwrap().unwrap();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.task.abort();
    }
}

const RECORD: &str = "record notes 10.1.7.0/24 192.0.2.7 (secret)";

/// The log has each error once, until the keeper works again.
#[tokio::test]
async fn an_record_keeper_that_cannot_be_read_or_watched_is_logged() {
    let (logged, _guard) = Logged::collect();
    let notes = Notes::default();
    let keeper: Arc<dyn RecordKeeper> = Arc::new(notes.clone());
    let kernel = WithRecordKeepers::new(Arc::new(FakeKernel::with_uplink("eth0")), [keeper]);
    let footprint = Footprint { record_keepers: ["notes"].into(), ..Footprint::default() };
    let set_broken = |is_broken| notes.0.lock().unwrap().is_broken = is_broken;
    for _ in 0..2 {
        set_broken(true);
        for _ in 0..3 {
            kernel.snapshot(&footprint).unwrap();
        }
        set_broken(false);
        kernel.snapshot(&footprint).unwrap();
    }
    assert_eq!(logged.count("the records of a keeper cannot be read"), 2);
    set_broken(true);
    drop(kernel.changes().unwrap());
    assert_eq!(logged.count("a keeper reports no changes"), 1);
    set_broken(false);
    let mut changes = kernel.changes().unwrap();
    notes.0.lock().unwrap().listener = None;
    assert_eq!(changes.next().await.unwrap(), Invalidation::Everything);
    assert_eq!(logged.count("a keeper reports no changes"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_started_change_is_pending_until_its_end_and_is_tried_again_after_a_failure() {
    let world = World::start(Notes::default(), FakeSubnets::new("10.1.0.0/16")).await;
    world.in_sync().await;
    world.subnets.put("10.1.7.0-24", "192.0.2.7");
    world.until(|| world.notes.started() == [format!("put {RECORD}")]);
    world.until(|| !world.network.status.borrow().settled);
    let explained = world.network.explain([10, 1, 7, 1].into()).await.unwrap();
    assert!(format!("{explained:?}").contains("Pending"), "{explained:?}");
    assert!(!format!("{:?}", world.network.status.borrow()).contains("hunter2"));

    world.notes.end(Err(KernelError::explained(EIO, "exit status 1")));
    world.until(|| world.network.status.borrow().failing.len() == 1);
    let failing = format!("{:?}", world.network.status.borrow().failing);
    assert!(failing.contains("exit status 1"), "{failing}");
    // The retry, which the engine starts by itself.
    world.until(|| world.notes.started().len() == 1);
    assert_eq!(world.network.status.borrow().failing.len(), 1, "it fails until the retry ends");
    world.notes.end(Ok(()));
    world.in_sync().await;
    assert_eq!(world.notes.records(), [RECORD]);
    assert!(world.network.status.borrow().failing.is_empty());

    world.subnets.delete("10.1.7.0-24");
    world.until(|| world.notes.started() == [format!("delete {RECORD}")]);
    // The status is published after the round that started the change.
    world.until(|| !world.network.status.borrow().in_sync);
    world.notes.end(Ok(()));
    world.in_sync().await;
    assert!(world.notes.records().is_empty());
    let starts = world.notes.0.lock().unwrap().starts;
    assert_eq!(starts, 3, "put, put again, delete");
}

#[tokio::test(flavor = "multi_thread")]
async fn records_of_an_earlier_run_are_adopted_or_deleted() {
    let notes = Notes::default();
    let mut key = None;
    for n in [7, 8] {
        let subnet = format!("10.1.{n}.0/24").parse().unwrap();
        let record = Record::new("notes", subnet, format!("192.0.2.{n}"))
            .with_secret(Secret::new(*b"hunter2"));
        key = Some(Object::from(record.clone()).key());
        notes.0.lock().unwrap().records.insert(key.unwrap(), record);
    }
    let subnets = FakeSubnets::new("10.1.0.0/16");
    subnets.put("10.1.7.0-24", "192.0.2.7");
    let world = World::start(notes.clone(), subnets).await;
    world.until(|| !notes.started().is_empty());
    let left = key.unwrap();
    assert_eq!(notes.started(), ["delete record notes 10.1.8.0/24 192.0.2.8 (secret)"], "{left}");
    notes.end(Ok(()));
    world.in_sync().await;
    assert_eq!(notes.records(), [RECORD]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_under_way_is_not_forgotten_by_a_snapshot() {
    let world = World::start(Notes::default(), FakeSubnets::new("10.1.0.0/16")).await;
    world.subnets.put("10.1.7.0-24", "192.0.2.7");
    world.until(|| !world.notes.started().is_empty());
    world.notes.end(Ok(()));
    world.in_sync().await;
    world.subnets.delete("10.1.7.0-24");
    world.until(|| !world.notes.started().is_empty());

    world.kernel.take_calls();
    world.kernel.lose_messages();
    let is_read = |calls: Vec<Call>| calls.iter().any(|c| c.operation == Operation::Snapshot);
    world.until(|| is_read(world.kernel.take_calls()));
    // The answer comes after the round with the snapshot.
    world.network.waiting().await;
    assert!(!world.network.status.borrow().settled, "it is still under way");
    world.notes.end(Err(KernelError::new(EIO)));
    world.until(|| world.network.status.borrow().failing.len() == 1);
    world.until(|| !world.notes.started().is_empty());
    world.notes.end(Ok(()));
    world.in_sync().await;
    assert!(world.notes.records().is_empty());
}

/// Each change of a record, failing in every way up to three times. The network converges.
#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_a_record_may_fail_in_every_way() {
    use Fault::{Fails, FailsUnseen, Lost, Refused};
    let record = |public: u8| [format!("record notes 10.1.7.0/24 192.0.2.{public} (secret)")];
    let mut faults: Vec<Vec<Fault>> = [Refused, Fails, Lost, FailsUnseen].map(|f| vec![f]).into();
    faults.push(vec![Fails; 3]);
    faults.push(vec![Refused, FailsUnseen, Lost]);
    for faults in faults {
        let notes = Notes::default();
        notes.0.lock().unwrap().is_quick = true;
        let world = World::start(notes, FakeSubnets::new("10.1.0.0/16")).await;
        world.in_sync().await;
        // A put, a replacement and a deletion.
        for public in [Some(7), Some(77), None] {
            world.notes.0.lock().unwrap().faults = faults.clone().into();
            match public {
                Some(public) => world.subnets.put("10.1.7.0-24", &format!("192.0.2.{public}")),
                None => world.subnets.delete("10.1.7.0-24"),
            }
            let expected = public.map_or_else(Vec::new, |public| record(public).into());
            world.until(|| world.notes.0.lock().unwrap().faults.is_empty());
            world.until(|| world.notes.records() == expected);
            world.until(|| {
                let status = world.network.status.borrow();
                status.in_sync && status.failing.is_empty()
            });
        }
    }
}

/// The stream of the keeper lost the event, and reports only that it lost some.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_end_of_a_change_does_not_keep_the_network_from_being_in_sync() {
    let world = World::start(Notes::default(), FakeSubnets::new("10.1.0.0/16")).await;
    let end_unseen = || {
        let mut entries = world.notes.0.lock().unwrap();
        let listener = entries.listener.take().unwrap();
        let change = entries.started.pop_front().unwrap();
        entries.end(change, Ok(()));
        listener.send(Invalidation::Everything).unwrap();
        entries.listener = Some(listener);
        // The next change ends at once.
        entries.is_quick = true;
    };
    world.subnets.put("10.1.7.0-24", "192.0.2.7");
    world.until(|| !world.notes.started().is_empty());
    end_unseen();
    world.in_sync().await;
    assert_eq!(world.notes.records(), [RECORD]);
    world.notes.0.lock().unwrap().is_quick = false;
    world.subnets.delete("10.1.7.0-24");
    world.until(|| !world.notes.started().is_empty());
    world.until(|| !world.network.status.borrow().in_sync);
    end_unseen();
    world.in_sync().await;
    assert!(world.notes.records().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_record_keeper_stops_no_snapshot_and_no_event_of_the_kernel() {
    let notes = Notes::default();
    notes.0.lock().unwrap().is_broken = true;
    let kernel = FakeKernel::with_uplink("eth0");
    let keeper = Arc::new(notes.clone()) as Arc<dyn RecordKeeper>;
    let with = WithRecordKeepers::new(Arc::new(kernel.clone()), [keeper]);
    let footprint = Footprint { record_keepers: ["notes"].into(), ..Footprint::default() };
    assert!(with.snapshot(&footprint).unwrap().is_empty());
    let mut changes = with.changes().unwrap();
    kernel.add_foreign_link("eth1", &[]);
    let event = changes.next().await.unwrap();
    assert_eq!(event, Invalidation::Link("eth1".parse().unwrap()));

    // The stream of the keeper breaks.
    notes.0.lock().unwrap().is_broken = false;
    let mut changes = with.changes().unwrap();
    notes.0.lock().unwrap().listener = None;
    assert_eq!(changes.next().await.unwrap(), Invalidation::Everything);
    kernel.delete_link("eth1");
    assert_eq!(changes.next().await.unwrap(), event);
}

#[test]
fn a_cleanup_waits_for_the_end_of_its_changes() {
    let notes = Notes::default();
    notes.0.lock().unwrap().is_quick = true;
    let record = Record::new("notes", "10.1.7.0/24".parse().unwrap(), "192.0.2.7");
    notes.0.lock().unwrap().records.insert(Object::from(record.clone()).key(), record.clone());
    let kernel: Arc<dyn Kernel> = Arc::new(FakeKernel::with_uplink("eth0"));
    let footprint = Footprint { record_keepers: ["notes"].into(), ..Footprint::default() };
    let record_keepers = || [Arc::new(notes.clone()) as Arc<dyn RecordKeeper>];
    let with = WithRecordKeepers::new(Arc::clone(&kernel), record_keepers()).waiting();
    let report = cleanup(&with, &footprint, false).unwrap();
    assert_eq!(report.done, [Change::Delete(record.clone().into())]);
    assert!(report.failed.is_empty() && notes.records().is_empty());
    // The kernel refuses the records of a record keeper that does not exist.
    let put = [Change::Put(record.into())];
    let outcomes = WithRecordKeepers::new(kernel, None).apply(&footprint, &put);
    assert!(matches!(&outcomes[..], [Outcome::Failed(_)]), "{outcomes:?}");
}

#[test]
fn a_cleanup_gives_up_on_changes_that_do_not_end() {
    let notes = Notes::default();
    let subnets = ["10.1.7.0/24", "10.1.8.0/24"].map(|subnet| subnet.parse().unwrap());
    for record in subnets.map(|subnet| Record::new("notes", subnet, "")) {
        notes.0.lock().unwrap().records.insert(Object::from(record.clone()).key(), record);
    }
    let kernel: Arc<dyn Kernel> = Arc::new(FakeKernel::with_uplink("eth0"));
    let footprint = Footprint { record_keepers: ["notes"].into(), ..Footprint::default() };
    let keeper = Arc::new(notes.clone()) as Arc<dyn RecordKeeper>;
    let with = WithRecordKeepers::new(kernel, [keeper]).waiting();
    let report = cleanup(&with, &footprint, false).unwrap();
    let errors: Vec<_> = report.failed.iter().map(|(_, error)| error.clone()).collect();
    assert_eq!(errors, [KernelError::NotEnded, KernelError::NotEnded]);
    assert!(report.done.is_empty() && notes.records().len() == 2);
    // Both waits together take no longer than the time limit.
    let waits = std::mem::take(&mut notes.0.lock().unwrap().waits);
    assert!(waits[1] < waits[0] && waits[0] <= WithRecordKeepers::PATIENCE, "{waits:?}");
}
