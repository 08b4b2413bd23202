//! A data plane in this process: its threads, and the table that they share.

use std::collections::BTreeMap;
use std::fmt;
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

use crate::control::Prefix;
use crate::counters::{Counts, Foreign, add};
use crate::device_lock::DeviceLock;
use crate::ends::{Lane, Port, Socket, has_device};
use crate::error::Error;
use crate::learned::Learned;
use crate::options::Options;
use crate::receive::{Receiver, SourceCheck};
use crate::saved_counters::SavedCounters;
use crate::send::Sender;
use crate::socket_group::{self, usable};
use crate::table::{Peer, Table};

/// The most queues of a device.
const MOST_QUEUES: usize = 8;
/// The packets of one direction before a thread looks at the table and at the request to stop.
const ROUND: usize = 64;
/// The pause after an error, so that one that lasts does not occupy a processor.
const PAUSE: Duration = Duration::from_millis(100);

/// What all threads use.
#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Arc<Table>>,
    /// The number of tables so far. A thread that has seen this version has the latest table.
    version: AtomicU64,
    learned: Learned,
    saved: Arc<SavedCounters>,
}

impl Shared {
    /// The state before the first packet.
    fn new(
        peers: Vec<Peer>,
        learned: &BTreeMap<Prefix, IpAddr>,
        saved: Arc<SavedCounters>,
    ) -> Self {
        let table = Table::new(peers);
        let learned = Learned::new(learned, &table);
        Self { table: Mutex::new(Arc::new(table)), learned, saved, ..Self::default() }
    }

    /// The latest table and its version.
    fn table(&self) -> (u64, Arc<Table>) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        (self.version.load(Ordering::Acquire), Arc::clone(&table))
    }
}

/// Is called with the reason when a data plane cannot go on.
#[derive(Clone)]
pub(crate) struct FailureCallback(Arc<dyn Fn(io::Error) + Send + Sync>);

impl FailureCallback {
    pub(crate) fn new(callback: impl Fn(io::Error) + Send + Sync + 'static) -> Self {
        Self(Arc::new(callback))
    }
}

impl fmt::Debug for FailureCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FailureCallback")
    }
}

/// The data plane of another process, as it hands it over.
#[derive(Debug)]
pub(crate) struct HandedOver {
    pub(crate) options: Options,
    /// The descriptors of the lock of the device, of the guards of its port, and of the lanes.
    pub(crate) fds: Vec<OwnedFd>,
    /// The number of descriptors that keep the port.
    pub(crate) guards: usize,
    pub(crate) peers: Vec<Peer>,
    /// The addresses of nodes behind NAT by their subnets.
    pub(crate) learned: BTreeMap<Prefix, IpAddr>,
}

/// A running data plane. It moves packets between the device and the sockets until it is dropped,
/// which ends its threads.
#[derive(Debug)]
pub struct Forwarder {
    options: Options,
    descriptors: Descriptors,
    shared: Arc<Shared>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
    on_failure: FailureCallback,
}

/// What a data plane hands over to another process.
#[derive(Debug)]
struct Descriptors {
    lock: DeviceLock,
    /// The sockets that keep the port for the sockets of the lanes.
    guards: Vec<Socket>,
    lanes: Vec<Arc<Lane>>,
}

impl Descriptors {
    /// Opens the device and the sockets.
    fn open(options: &Options, lock: DeviceLock, count: usize) -> Result<Self, Error> {
        let (lanes, guards) = Lane::open(options, count)?;
        Ok(Self { lock, guards, lanes: lanes.into_iter().map(Arc::new).collect() })
    }

    /// Takes the descriptors of another process, the first `guards` of which behind the lock keep
    /// its port.
    fn adopt(options: &Options, fds: Vec<OwnedFd>, guards: usize) -> Result<Self, Error> {
        let mut fds = fds.into_iter().peekable();
        let lock = fds.next().map(DeviceLock::adopt).ok_or(Error::Descriptors)?;
        let guards: Vec<Socket> = fds.by_ref().take(guards).map(Socket::from).collect();
        let mut lanes = Vec::new();
        while fds.peek().is_some() {
            // Without guards there is one receiving socket, for all queues.
            let receives = lanes.is_empty() || !guards.is_empty();
            let lane = Lane::from_fds(options, &mut fds, receives).ok_or(Error::Descriptors)?;
            lanes.push(Arc::new(lane));
        }
        if lanes.is_empty() {
            return Err(Error::Descriptors);
        }
        Ok(Self { lock, guards, lanes })
    }

    /// Copies of all descriptors, in the order in which [`Self::adopt`] takes them.
    fn duplicate(&self) -> io::Result<Vec<OwnedFd>> {
        let guards = self.guards.iter().map(AsFd::as_fd);
        let lanes = self.lanes.iter().flat_map(|lane| lane.fds());
        [self.lock.as_fd()]
            .into_iter()
            .chain(guards)
            .chain(lanes)
            .map(|fd| fd.try_clone_to_owned())
            .collect()
    }
}

impl Forwarder {
    /// Opens the device and the sockets, and starts the threads. If only the address of one family
    /// can be used, it runs without the other one, which its [`options`](Self::options) then lack.
    ///
    /// `on_failure` is called when a thread cannot go on, because the device was deleted or the
    /// thread panicked. Packets wait in the device then until this value is dropped, and a new one
    /// makes the device again. The function is called on that thread. It must not block, and must
    /// not drop this value.
    ///
    /// # Errors
    /// The device or a socket cannot be opened, or another process has the device.
    pub fn start(
        options: Options,
        peers: Vec<Peer>,
        on_failure: impl Fn(io::Error) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::open(options, peers, Arc::default(), FailureCallback::new(on_failure))
    }

    /// Does what [`Self::start`] does, and counts on counters that exist already.
    pub(crate) fn open(
        mut options: Options,
        peers: Vec<Peer>,
        saved: Arc<SavedCounters>,
        on_failure: FailureCallback,
    ) -> Result<Self, Error> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let count = options.queues.unwrap_or(processors).clamp(1, MOST_QUEUES);
        let lock = DeviceLock::new(&options.device)?;
        let port = options.port;
        let mut last_error = None;
        options.local.retain(|local| {
            let result = usable((*local, port).into(), socket_group::ENDING);
            let is_usable = result.is_ok();
            if let Err(error) = result {
                last_error = Some(error);
            }
            is_usable
        });
        if options.local.is_empty()
            && let Some(error) = last_error
        {
            return Err(error);
        }
        let descriptors = Descriptors::open(&options, lock, count)?;
        let shared = Shared::new(peers, &BTreeMap::new(), saved);
        Self::run(options, descriptors, shared, on_failure)
    }

    /// Continues the data plane of another process.
    ///
    /// # Errors
    /// A descriptor is missing, or a thread cannot be started.
    pub(crate) fn adopt(
        other: HandedOver,
        saved: Arc<SavedCounters>,
        on_failure: FailureCallback,
    ) -> Result<Self, Error> {
        let descriptors = Descriptors::adopt(&other.options, other.fds, other.guards)?;
        let shared = Shared::new(other.peers, &other.learned, saved);
        Self::run(other.options, descriptors, shared, on_failure)
    }

    fn run(
        options: Options,
        descriptors: Descriptors,
        shared: Shared,
        on_failure: FailureCallback,
    ) -> Result<Self, Error> {
        let stop = EventFd::new().map_err(|errno| Error::Thread(errno.into()))?;
        let mut forwarder = Self {
            options,
            descriptors,
            shared: Arc::new(shared),
            stop: Arc::new(stop),
            threads: Vec::new(),
            on_failure,
        };
        forwarder.resume()?;
        Ok(forwarder)
    }

    /// Starts the threads, if they do not run.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn resume(&mut self) -> Result<(), Error> {
        if !self.threads.is_empty() {
            return Ok(());
        }
        for lane in self.descriptors.lanes.clone() {
            for family in 0..2 {
                if lane.receive[family].is_some() {
                    self.spawn_receiver(&lane, family).map_err(Error::Thread)?;
                }
            }
            self.spawn_sender(&lane).map_err(Error::Thread)?;
        }
        Ok(())
    }

    /// Starts the thread that receives for a family: 0 is IPv4, 1 is IPv6.
    fn spawn_receiver(&mut self, lane: &Arc<Lane>, family: usize) -> io::Result<()> {
        let own = [self.own_address(false), self.own_address(true)];
        let checks_source = self.options.checks_source;
        let counts_only = self.options.counts_only;
        let lane = Arc::clone(lane);
        let shared = Arc::clone(&self.shared);
        let stop = Arc::clone(&self.stop);
        self.spawn("receive", move || {
            let Some(socket) = &lane.receive[family] else { return Ok(()) };
            let wire = Port::new(socket, stop.as_fd());
            let check = if !checks_source {
                SourceCheck::Off
            } else if counts_only {
                SourceCheck::Count(&shared.learned)
            } else {
                SourceCheck::Drop(&shared.learned)
            };
            let counters = &shared.saved.counters;
            let mut receiver = Receiver::new(&lane.queue, wire, own, counters, check);
            repeat(&shared, &stop, socket.as_fd(), |table| receiver.run(table, ROUND))
        })
    }

    /// Starts the thread that sends the packets of a queue.
    fn spawn_sender(&mut self, lane: &Arc<Lane>) -> io::Result<()> {
        let lane = Arc::clone(lane);
        let shared = Arc::clone(&self.shared);
        let stop = Arc::clone(&self.stop);
        self.spawn("send", move || {
            let wires = lane
                .send
                .each_ref()
                .map(|socket| socket.as_ref().map(|socket| Port::new(socket, stop.as_fd())));
            let mut sender = Sender::new(&lane.queue, wires, &shared.saved.counters);
            repeat(&shared, &stop, lane.queue.as_fd(), |table| sender.run(table, ROUND))
        })
    }

    /// The address of the device of a family.
    fn own_address(&self, is_v6: bool) -> Option<IpAddr> {
        let own = self.options.own.iter().map(|own| own.address);
        own.into_iter().find(|own| own.is_ipv6() == is_v6)
    }

    /// The options with which it was started, without the addresses that could not be used.
    pub const fn options(&self) -> &Options {
        &self.options
    }

    /// Whether it was started with these options.
    pub(crate) fn is_of(&self, options: &Options) -> bool {
        let mut options = options.clone();
        options.local.retain(|local| self.options.local.contains(local));
        self.options == options
    }

    /// Whether the device is there, and has its name.
    pub(crate) fn has_device(&self) -> bool {
        let mut lanes = self.descriptors.lanes.iter();
        lanes.all(|lane| has_device(&lane.queue, &self.options.device))
    }

    /// Checks the addresses of these options that could not be used.
    ///
    /// # Errors
    /// One of them still cannot be used.
    pub(crate) fn missing(&self, options: &Options) -> Result<(), Error> {
        let mut missing = options.local.iter().filter(|l| !self.options.local.contains(l));
        missing.try_for_each(|local| usable((*local, options.port).into(), Duration::ZERO))
    }

    /// The number of descriptors that keep the port.
    pub(crate) fn guards(&self) -> usize {
        self.descriptors.guards.len()
    }

    /// Ends the threads. Returns the descriptors, in which packets wait meanwhile.
    pub(crate) fn pause(&mut self) -> io::Result<Vec<OwnedFd>> {
        self.end_threads();
        self.descriptors.duplicate()
    }

    fn end_threads(&mut self) {
        let _ = self.stop.write(1);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        // This empties it, so that [`Self::resume`] can use it again.
        let _ = self.stop.read();
    }

    fn spawn(
        &mut self,
        name: &str,
        run: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let on_failure = self.on_failure.clone();
        let builder = std::thread::Builder::new().name(name.into()).stack_size(256 << 10);
        let thread = builder.spawn(move || {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run))
                .unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
            if let Err(error) = ended {
                // Packets of the queue would wait for ever.
                (on_failure.0)(error);
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
        self.shared.saved.counters.read()
    }

    /// The last packet that was dropped because another host than the node of its source address
    /// has sent it.
    pub(crate) fn last_foreign(&self) -> Option<Foreign> {
        self.shared.saved.counters.last_foreign()
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.end_threads();
    }
}

/// What a thread does after some packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// There may be more.
    More,
    /// It waits for the next one.
    Wait,
    /// It has only dropped packets of strangers for a while. It waits a millisecond, so that not
    /// each packet of a flood wakes it up.
    Rest,
}

/// Calls `run` with the latest table until the stop. Between two calls it waits for packets on
/// `fd`, as the result of `run` says.
fn repeat(
    shared: &Shared,
    stop: &EventFd,
    fd: std::os::fd::BorrowedFd<'_>,
    mut run: impl FnMut(&Table) -> Result<Next, Errno>,
) -> io::Result<()> {
    let mut latest = shared.table();
    let pause = PollTimeout::try_from(PAUSE).unwrap_or(PollTimeout::MAX);
    let rest = PollTimeout::from(1_u8);
    loop {
        if shared.version.load(Ordering::Acquire) != latest.0 {
            latest = shared.table();
        }
        let next = match run(&latest.1) {
            Ok(next) => Some(next),
            // The device is gone. The next process makes another one.
            Err(errno @ (Errno::EBADFD | Errno::ENODEV | Errno::EBADF)) => return Err(errno.into()),
            Err(_) => {
                add(&shared.saved.counters.read_failed, 1);
                None
            }
        };
        let mut ready =
            [PollFd::new(stop.as_fd(), PollFlags::POLLIN), PollFd::new(fd, PollFlags::POLLIN)];
        shared.saved.mark_changed();
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
        let shared = Shared::default();
        let stop = EventFd::new().unwrap();
        let ready = EventFd::new().unwrap();
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
        assert_eq!(shared.saved.counters.read().read_failed, 2);
        assert!(begin.elapsed() >= 2 * PAUSE, "it does not pause");
        for errno in [Errno::EBADFD, Errno::ENODEV] {
            let ended = repeat(&shared, &EventFd::new().unwrap(), ready.as_fd(), |_| Err(errno));
            assert_eq!(ended.unwrap_err().raw_os_error(), Some(errno as i32));
        }
    }
}
