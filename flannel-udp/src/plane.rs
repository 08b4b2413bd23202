//! The data plane: its threads, and the table that they share.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

use crate::claim::Claim;
use crate::control::Prefix;
use crate::counters::{Counts, Foreign, add};
use crate::ends::{Lane, Port, Socket, has_device};
use crate::error::Error;
use crate::group::{self, usable};
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
/// The pause after an error, so that one that lasts does not occupy a processor.
const PAUSE: Duration = Duration::from_millis(100);

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
///
/// If the device is deleted, or a thread panics, the whole program ends with code 1: packets would
/// wait for ever, and a new process makes the device again.
#[derive(Debug)]
pub struct Plane {
    options: Options,
    claim: Claim,
    /// The sockets that keep the port for those of the lanes.
    guards: Vec<Socket>,
    lanes: Vec<Arc<Lane>>,
    shared: Arc<Shared>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Plane {
    /// Opens the device and the sockets, and starts the threads. If only the address of one family
    /// can be used, it runs without the other one, which its [`options`](Self::options) then lack.
    ///
    /// # Errors
    /// The device or a socket cannot be opened, or another process has the device.
    pub fn start(options: Options, peers: Vec<Peer>) -> Result<Self, Error> {
        Self::open(options, peers, Arc::default())
    }

    /// The same with counters that exist already.
    pub(crate) fn open(
        mut options: Options,
        peers: Vec<Peer>,
        ledger: Arc<Ledger>,
    ) -> Result<Self, Error> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let count = options.queues.unwrap_or(processors).clamp(1, MOST_QUEUES);
        let claim = Claim::new(&options.device)?;
        let (port, mut why) = (options.port, Ok(()));
        options.local.retain(|local| match usable((*local, port).into(), group::ENDING) {
            Ok(()) => true,
            Err(error) => {
                why = Err(error);
                false
            }
        });
        if options.local.is_empty() {
            why?;
        }
        let (lanes, guards) = Lane::open(&options, count)?;
        let shared = Shared::new(peers, &BTreeMap::new(), ledger);
        Self::run(options, claim, guards, lanes, shared)
    }

    /// Continues a data plane of another process, which has sent its descriptors. `guards`: the
    /// number of those that keep its port.
    ///
    /// # Errors
    /// A descriptor is missing, or a thread cannot be started.
    pub(crate) fn adopt(
        options: Options,
        fds: Vec<OwnedFd>,
        guards: usize,
        peers: Vec<Peer>,
        learned: &BTreeMap<Prefix, IpAddr>,
        ledger: Arc<Ledger>,
    ) -> Result<Self, Error> {
        let (mut fds, mut lanes) = (fds.into_iter().peekable(), Vec::new());
        let claim = fds.next().map(Claim::adopt).ok_or(Error::Descriptors)?;
        let guards: Vec<Socket> = fds.by_ref().take(guards).map(Socket::from).collect();
        while fds.peek().is_some() {
            // Without guards there is one receiving socket, for all queues.
            let receives = lanes.is_empty() || !guards.is_empty();
            lanes.push(Lane::from_fds(&options, &mut fds, receives).ok_or(Error::Descriptors)?);
        }
        if lanes.is_empty() {
            return Err(Error::Descriptors);
        }
        Self::run(options, claim, guards, lanes, Shared::new(peers, learned, ledger))
    }

    fn run(
        options: Options,
        claim: Claim,
        guards: Vec<Socket>,
        lanes: Vec<Lane>,
        shared: Shared,
    ) -> Result<Self, Error> {
        let stop = EventFd::new().map_err(|errno| Error::Thread(errno.into()))?;
        let (stop, lanes) = (Arc::new(stop), lanes.into_iter().map(Arc::new).collect());
        let (shared, threads) = (Arc::new(shared), Vec::new());
        let mut plane = Self { options, claim, guards, lanes, shared, stop, threads };
        plane.resume()?;
        Ok(plane)
    }

    /// Starts the threads, if they do not run.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn resume(&mut self) -> Result<(), Error> {
        let plane = self;
        if !plane.threads.is_empty() {
            return Ok(());
        }
        let of_family = |is_v6: bool| {
            plane.options.own.iter().map(|own| own.address).find(|own| own.is_ipv6() == is_v6)
        };
        let (own, checks) = ([of_family(false), of_family(true)], plane.options.checks_source);
        let counts_only = plane.options.counts_only;
        for lane in plane.lanes.clone() {
            for family in 0..2 {
                if lane.receive[family].is_none() {
                    continue;
                }
                let (lane, shared, stop) = plane.parts(&lane);
                let run = move || {
                    let Some(socket) = &lane.receive[family] else { return Ok(()) };
                    let wire = Port::new(socket, stop.as_fd());
                    let (counters, learned) = (&shared.ledger.counters, &shared.learned);
                    let learned = checks.then_some(learned);
                    let mut receiver = Receiver::new(&lane.queue, wire, own, counters, learned)
                        .counting_only(counts_only);
                    repeat(&shared, &stop, socket.as_fd(), |table| receiver.run(table, ROUND))
                };
                plane.spawn("receive", run).map_err(Error::Thread)?;
            }
            let (lane, shared, stop) = plane.parts(&lane);
            let run = move || {
                let wires = lane
                    .send
                    .each_ref()
                    .map(|socket| socket.as_ref().map(|socket| Port::new(socket, stop.as_fd())));
                let mut sender = Sender::new(&lane.queue, wires, &shared.ledger.counters);
                repeat(&shared, &stop, lane.queue.as_fd(), |table| sender.run(table, ROUND))
            };
            plane.spawn("send", run).map_err(Error::Thread)?;
        }
        Ok(())
    }

    fn parts(&self, lane: &Arc<Lane>) -> (Arc<Lane>, Arc<Shared>, Arc<EventFd>) {
        (Arc::clone(lane), Arc::clone(&self.shared), Arc::clone(&self.stop))
    }

    /// The options with which it was started, less addresses that could not be used.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// It was started with these options.
    pub(crate) fn is_of(&self, options: &Options) -> bool {
        let mut options = options.clone();
        options.local.retain(|local| self.options.local.contains(local));
        self.options == options
    }

    /// The device is there, and has its name.
    pub(crate) fn has_device(&self) -> bool {
        self.lanes.iter().all(|lane| has_device(&lane.queue, &self.options.device))
    }

    /// Whether addresses of these options, which could not be used, still cannot.
    pub(crate) fn missing(&self, options: &Options) -> Result<(), Error> {
        let mut missing = options.local.iter().filter(|l| !self.options.local.contains(l));
        missing.try_for_each(|local| usable((*local, options.port).into(), Duration::ZERO))
    }

    /// The number of descriptors that keep the port.
    pub(crate) fn guards(&self) -> usize {
        self.guards.len()
    }

    /// Ends the threads. Returns the descriptors, in which packets wait meanwhile.
    pub(crate) fn pause(&mut self) -> io::Result<Vec<OwnedFd>> {
        self.end();
        let guards = self.guards.iter().map(AsFd::as_fd);
        let lanes = self.lanes.iter().flat_map(|lane| lane.fds());
        [self.claim.as_fd()]
            .into_iter()
            .chain(guards)
            .chain(lanes)
            .map(|fd| fd.try_clone_to_owned())
            .collect()
    }

    fn end(&mut self) {
        let _ = self.stop.write(1);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // So that [`Self::resume`] can use it again.
        let _ = self.stop.read();
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
        let thread = thread.spawn(move || {
            // Packets of the queue would wait for ever. The next process begins anew.
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
            let ended = ended.unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            if let Err(error) = ended {
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

/// What a thread does after some packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There may be more.
    More,
    /// It waits for the next one.
    Wait,
    /// It has only dropped packets of strangers for a while. It waits a millisecond, so that a
    /// flood does not wake it up for each.
    Rest,
}

/// Calls `run` with the latest table, waiting on `fd` as it says, until the stop.
fn repeat(
    shared: &Shared,
    stop: &EventFd,
    fd: std::os::fd::BorrowedFd<'_>,
    mut run: impl FnMut(&Table) -> Result<Next, Errno>,
) -> io::Result<()> {
    let (mut version, mut table) = shared.table();
    let pause = PollTimeout::try_from(PAUSE).unwrap_or(PollTimeout::MAX);
    let rest = PollTimeout::from(1_u8);
    loop {
        if shared.version.load(Ordering::Acquire) != version {
            (version, table) = shared.table();
        }
        let next = match run(&table) {
            Ok(next) => Some(next),
            // The device is gone. The next process makes another one.
            Err(errno @ (Errno::EBADFD | Errno::ENODEV | Errno::EBADF)) => return Err(errno.into()),
            Err(_) => {
                add(&shared.ledger.counters.read_failed, 1);
                None
            }
        };
        let mut ready =
            [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(fd, PollFlags::POLLIN)];
        shared.ledger.touch();
        let (ready, timeout) = match next {
            Some(Next::More) => (&mut ready[..], PollTimeout::ZERO),
            // Nothing wakes it but packets.
            Some(Next::Wait) => (&mut ready[..], PollTimeout::NONE),
            Some(Next::Rest) => (&mut ready[..1], rest),
            None => (&mut ready[..1], pause),
        };
        match poll(ready, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if ready[0].any().unwrap_or(false) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn errors_of_reads_are_counted_and_only_the_end_of_the_device_ends_a_thread() {
        let (shared, stop, ready) = (Shared::default(), EventFd::new().unwrap(), EventFd::new());
        let ready = ready.unwrap();
        // The descriptor is always ready, as after an error that lasts.
        ready.write(1).unwrap();
        let begin = Instant::now();
        let mut errors = [Errno::EIO, Errno::ENOBUFS].into_iter();
        let ended = repeat(&shared, &stop, ready.as_fd(), |_| {
            let error = errors.next();
            if error.is_none() {
                stop.write(1).unwrap();
            }
            error.map_or(Ok(Next::Wait), Err)
        });
        ended.unwrap();
        assert_eq!(shared.ledger.counters.read().read_failed, 2);
        assert!(begin.elapsed() >= 2 * PAUSE, "it does not pause");
        for errno in [Errno::EBADFD, Errno::ENODEV] {
            let ended = repeat(&shared, &EventFd::new().unwrap(), ready.as_fd(), |_| Err(errno));
            assert_eq!(ended.unwrap_err().raw_os_error(), Some(errno as i32));
        }
    }
}
