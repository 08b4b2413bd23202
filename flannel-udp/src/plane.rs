//! The data plane: its threads, and the table that they share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use std::{fmt, io};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use crate::control::Prefix;
use crate::counters::{Counts, Foreign};
use crate::ends::Lane;
use crate::learned::Learned;
use crate::ledger::Ledger;
use crate::options::Options;
use crate::receive::Receiver;
use crate::send::Sender;
use crate::table::{Peer, Table};

/// The most queues of a device.
const MOST_QUEUES: usize = 8;
/// The packets of one direction before a thread looks at the table and at the request to stop.
const ROUND: usize = 64;
/// The counts of packets are in the file after this time.
const SAVE: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Arc<Table>>,
    /// The number of tables so far.
    version: AtomicU64,
    learned: Learned,
    ledger: Arc<Ledger>,
}

impl Shared {
    /// The state before the first packet.
    fn new(peers: Vec<Peer>, learned: &BTreeMap<Prefix, IpAddr>, ledger: Arc<Ledger>) -> Self {
        let table = Table::new(peers);
        let learned = Learned::new(learned, &table);
        Self { table: Mutex::new(Arc::new(table)), learned, ledger, ..Self::default() }
    }

    fn table(&self) -> (u64, Arc<Table>) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        (self.version.load(Ordering::Acquire), Arc::clone(&table))
    }
}

/// A running data plane. Its threads end when it is dropped.
#[derive(Debug)]
pub struct Plane {
    options: Options,
    lanes: Vec<Arc<Lane>>,
    shared: Arc<Shared>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Plane {
    /// Opens the device and the sockets, and starts the threads.
    ///
    /// # Errors
    /// The device or a socket cannot be opened. The text names it, and a cure.
    pub fn start(options: Options, peers: Vec<Peer>) -> Result<Self, String> {
        Self::open(options, peers, Arc::default())
    }

    /// The same with counters that exist already.
    pub(crate) fn open(
        options: Options,
        peers: Vec<Peer>,
        ledger: Arc<Ledger>,
    ) -> Result<Self, String> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let count = options.queues.unwrap_or(processors).clamp(1, MOST_QUEUES);
        let lanes = Lane::open(&options, count)?;
        Self::run(options, lanes, Shared::new(peers, &BTreeMap::new(), ledger))
    }

    /// Continues a data plane of another process, which has sent its descriptors.
    ///
    /// # Errors
    /// A descriptor is missing, or a thread cannot be started.
    pub(crate) fn adopt(
        options: Options,
        fds: Vec<OwnedFd>,
        peers: Vec<Peer>,
        learned: &BTreeMap<Prefix, IpAddr>,
        ledger: Arc<Ledger>,
    ) -> Result<Self, String> {
        let (mut fds, mut lanes) = (fds.into_iter().peekable(), Vec::new());
        while fds.peek().is_some() {
            lanes.push(Lane::from_fds(&options, &mut fds).ok_or("a descriptor is missing")?);
        }
        Self::run(options, lanes, Shared::new(peers, learned, ledger))
    }

    fn run(options: Options, lanes: Vec<Lane>, shared: Shared) -> Result<Self, String> {
        let of_family = |is_v6: bool| {
            options.own.iter().map(|own| own.address).find(|own| own.is_ipv6() == is_v6)
        };
        let (own, checks) = ([of_family(false), of_family(true)], options.checks_source);
        let failed = |error: &dyn fmt::Display| format!("cannot start a thread: {error}");
        let stop = Arc::new(EventFd::new().map_err(|error| failed(&error))?);
        let lanes: Vec<Arc<Lane>> = lanes.into_iter().map(Arc::new).collect();
        let (shared, threads) = (Arc::new(shared), Vec::new());
        let mut plane = Self { options, lanes: lanes.clone(), shared, stop, threads };
        for lane in lanes {
            for family in 0..2 {
                if lane.receive[family].is_none() {
                    continue;
                }
                let (lane, shared, stop) = plane.parts(&lane);
                let run = move || {
                    let Some(wire) = &lane.receive[family] else { return Ok(()) };
                    let (counters, learned) = (&shared.ledger.counters, &shared.learned);
                    let learned = checks.then_some(learned);
                    let mut receiver = Receiver::new(&lane.queue, wire, own, counters, learned);
                    repeat(&shared, &stop, wire.as_fd(), |table| receiver.run(table, ROUND))
                };
                plane.spawn("receive", run).map_err(|error| failed(&error))?;
            }
            let (lane, shared, stop) = plane.parts(&lane);
            let run = move || {
                let wires = [lane.send[0].as_ref(), lane.send[1].as_ref()];
                let mut sender = Sender::new(&lane.queue, wires, &shared.ledger.counters);
                repeat(&shared, &stop, lane.queue.as_fd(), |table| sender.run(table, ROUND))
            };
            plane.spawn("send", run).map_err(|error| failed(&error))?;
        }
        Ok(plane)
    }

    fn parts(&self, lane: &Arc<Lane>) -> (Arc<Lane>, Arc<Shared>, Arc<EventFd>) {
        (Arc::clone(lane), Arc::clone(&self.shared), Arc::clone(&self.stop))
    }

    /// The options with which it was started.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Ends the threads. Returns the descriptors, in which packets wait meanwhile.
    pub(crate) fn into_fds(mut self) -> io::Result<Vec<OwnedFd>> {
        self.end();
        let fds = self.lanes.iter().flat_map(|lane| lane.fds());
        fds.map(|fd| fd.try_clone_to_owned()).collect()
    }

    fn end(&mut self) {
        let _ = self.stop.write(1);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            if let Err(error) = run() {
                crate::report(&error.to_string());
                std::process::exit(1);
            }
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Replaces all peers.
    pub fn set_peers(&self, peers: Vec<Peer>) {
        let table = Arc::new(Table::new(peers));
        self.shared.learned.retain(&table);
        let mut current = self.shared.table.lock().unwrap_or_else(PoisonError::into_inner);
        *current = table;
        self.shared.version.fetch_add(1, Ordering::Release);
    }

    /// The addresses of nodes behind NAT by their subnets.
    pub(crate) fn learned(&self) -> BTreeMap<Prefix, IpAddr> {
        self.shared.learned.list()
    }

    /// The counts of packets so far.
    pub fn counts(&self) -> Counts {
        self.shared.ledger.counters.read()
    }

    /// The last packet that was dropped because another host than the node of its source address
    /// has sent it.
    pub(crate) fn last_foreign(&self) -> Option<Foreign> {
        self.shared.ledger.counters.last_foreign()
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        self.end();
    }
}

/// Calls `run` with the latest table, waiting on `fd` when it returns `false`, until the stop.
fn repeat(
    shared: &Shared,
    stop: &EventFd,
    fd: std::os::fd::BorrowedFd<'_>,
    mut run: impl FnMut(&Table) -> Result<bool, Errno>,
) -> io::Result<()> {
    let (mut version, mut table) = shared.table();
    let save = PollTimeout::try_from(SAVE).unwrap_or(PollTimeout::MAX);
    // The time of the first packet whose count may not be in the file.
    let mut unsaved: Option<Instant> = None;
    loop {
        if shared.version.load(Ordering::Acquire) != version {
            (version, table) = shared.table();
        }
        let more = match run(&table) {
            Ok(more) => more,
            // The device is down. If it is gone (`EBADFD`), the next process makes another one.
            Err(Errno::EIO) => false,
            Err(errno) => return Err(errno.into()),
        };
        let mut ready =
            [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(fd, PollFlags::POLLIN)];
        if unsaved.get_or_insert_with(Instant::now).elapsed() >= SAVE {
            shared.ledger.save();
            unsaved = None;
        }
        let timeout = match unsaved {
            _ if more => PollTimeout::ZERO,
            Some(_) => save,
            // Nothing wakes it but packets.
            None => PollTimeout::NONE,
        };
        match poll(&mut ready, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if ready[0].any().unwrap_or(false) {
            return Ok(());
        }
    }
}
