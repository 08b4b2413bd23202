//! Streams of packets between pods, and the packets that were lost.
//!
//! A packet is lost if it has not arrived at the end of its stream. So a delay is not a loss.

use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use nix::sys::socket::{setsockopt, sockopt};

use crate::{Lab, Namespace, Pod};

/// 250 packets a second.
const GAP: Duration = Duration::from_millis(4);
/// The most packets that a delayed sender sends at once.
const BURST: u32 = 16;
/// The wait for packets after the last one was sent.
const LAST: Duration = Duration::from_secs(2);
/// The timeout for streams to continue.
const PATIENCE: Duration = Duration::from_secs(120);

/// Packets from every pod to every other, in each family. Its methods panic if a stream stalls.
#[derive(Debug)]
pub struct Traffic(Vec<Stream>);

/// One stream from pod to pod.
#[derive(Debug)]
struct Stream {
    /// The numbers of the two hosts.
    hosts: [usize; 2],
    family: Family,
    name: String,
    stop: Sender<()>,
    sender: JoinHandle<Vec<Instant>>,
    receiver: JoinHandle<Vec<bool>>,
    progress: Arc<Progress>,
}

/// The progress of a stream.
#[derive(Debug)]
struct Progress {
    sent: AtomicUsize,
    received: AtomicUsize,
    /// The number of packets that were sent; `usize::MAX` while more are sent.
    total: AtomicUsize,
}

/// A packet that did not arrive.
pub struct Lost {
    /// The numbers of the source and the destination host.
    pub hosts: [usize; 2],
    /// The address family.
    pub family: Family,
    stream: String,
    number: usize,
    /// The time when it was sent.
    pub at: Instant,
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} number {}, sent {:?} ago", self.stream, self.number, self.at.elapsed())
    }
}

impl Traffic {
    /// Starts the streams between all pods of the lab, and waits until all flow.
    pub fn start(lab: &Lab) -> Self {
        Self::start_every(GAP, lab)
    }

    /// Starts streams with this time between two packets of a stream.
    pub fn start_every(gap: Duration, lab: &Lab) -> Self {
        let pods: Vec<(usize, Arc<Pod>)> =
            lab.hosts().iter().filter_map(|host| Some((host.number(), host.pod()?))).collect();
        let mut streams = Vec::new();
        for (from, source) in &pods {
            for (to, sink) in pods.iter().filter(|(to, _)| to != from) {
                for (family, address) in sink.addresses().iter() {
                    let at = source.addresses()[family].expect("all pods have the same families");
                    let hosts = [*from, *to];
                    let ends = [(&**source, at), (&**sink, *address)];
                    streams.push(Stream::start(hosts, family, ends, gap));
                }
            }
        }
        let traffic = Self(streams);
        traffic.wait_for_arrivals();
        traffic
    }

    /// Waits until the packets of a tenth of a second have arrived on every stream.
    pub fn wait_for_arrivals(&self) {
        let count = |stream: &Stream| stream.progress.received.load(Ordering::Relaxed);
        wait_for(self.0.iter(), count, 25, "no packet arrives any more");
    }

    /// Waits until a dozen packets more have been sent on every stream from or to this host.
    pub fn wait_for_sent(&self, host: usize) {
        let count = |stream: &Stream| stream.progress.sent.load(Ordering::Relaxed);
        let streams = self.0.iter().filter(|stream| stream.hosts.contains(&host));
        wait_for(streams, count, 12, "no packet is sent any more");
    }

    /// Ends all streams. Returns the number of packets that were sent, and those that were lost.
    pub fn end(self) -> (usize, Vec<Lost>) {
        for stream in &self.0 {
            stream.stop.send(()).expect("the thread ends for no other reason");
        }
        let mut sent = 0;
        let mut lost = Vec::new();
        for Stream { hosts, family, name, sender, receiver, .. } in self.0 {
            let times = joined(sender);
            let arrived = joined(receiver);
            sent += times.len();
            let missing = times.iter().enumerate().filter(|(n, _)| arrived.get(*n) != Some(&true));
            lost.extend(missing.map(|(number, at)| Lost {
                hosts,
                family,
                stream: name.clone(),
                number,
                at: *at,
            }));
        }
        (sent, lost)
    }
}

/// Waits until the count of each stream has grown by `more`.
fn wait_for<'a>(
    streams: impl Iterator<Item = &'a Stream>,
    count: impl Fn(&Stream) -> usize,
    more: usize,
    otherwise: &str,
) {
    let goals: Vec<(&Stream, usize)> = streams.map(|s| (s, count(s) + more)).collect();
    for (stream, goal) in goals {
        let deadline = Instant::now() + PATIENCE;
        while count(stream) < goal {
            assert!(Instant::now() < deadline, "{}: {otherwise}", stream.name);
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

impl Stream {
    fn start(
        hosts: [usize; 2],
        family: Family,
        [(source, at), (sink, to)]: [(&Pod, IpAddr); 2],
        gap: Duration,
    ) -> Self {
        let from = open(source.namespace(), at);
        let into = open(sink.namespace(), to);
        let target = into.local_addr().expect("a bound socket has an address");
        let (stop, stopped) = channel();
        let progress = Arc::new(Progress {
            sent: AtomicUsize::new(0),
            received: AtomicUsize::new(0),
            total: AtomicUsize::new(usize::MAX),
        });
        let sending = progress.clone();
        let receiving = progress.clone();
        let sender = std::thread::spawn(move || {
            let mut due = Instant::now();
            let mut sent = Vec::new();
            loop {
                send(&from, target, sent.len());
                sent.push(Instant::now());
                sending.sent.store(sent.len(), Ordering::Relaxed);
                // A delayed sender catches up, but not with more packets than buffers take.
                let now = Instant::now();
                due = (due + gap).max(now.checked_sub(BURST * gap).unwrap_or(now));
                let pause = due.saturating_duration_since(now);
                if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    sending.total.store(sent.len(), Ordering::Relaxed);
                    return sent;
                }
            }
        });
        let receiver = std::thread::spawn(move || receive(&into, &receiving));
        let name = format!("{} to {} at {to}", source.name(), sink.name());
        Self { hosts, family, name, stop, sender, receiver, progress }
    }
}

fn open(namespace: &Namespace, at: IpAddr) -> UdpSocket {
    let bound = namespace.run(|| UdpSocket::bind((at, 0))).map_err(|error| error.to_string());
    let socket = bound.and_then(|bound| bound.map_err(|error| error.to_string()));
    let socket = socket.unwrap_or_else(|error| panic!("{}: {at}: {error}", namespace.name()));
    socket.set_read_timeout(Some(LAST)).expect("the timeout is not zero");
    // So that a delayed receiver loses no packet.
    setsockopt(&socket, sockopt::RcvBuf, &(1 << 20)).expect("the kernel limits the size itself");
    socket
}

fn send(socket: &UdpSocket, target: SocketAddr, number: usize) {
    // A packet that cannot be sent is counted as lost by the receiver.
    let _ = socket.send_to(&(number as u64).to_be_bytes(), target);
}

/// The numbers that arrived.
fn receive(socket: &UdpSocket, progress: &Progress) -> Vec<bool> {
    let mut arrived = Vec::new();
    let mut buffer = [0; 8];
    // No packet for this long: the stream has stalled or ended.
    loop {
        let ended = progress.total.load(Ordering::Relaxed);
        if progress.received.load(Ordering::Relaxed) >= ended {
            return arrived;
        }
        match socket.recv(&mut buffer) {
            Ok(_) => {
                let number = u64::from_be_bytes(buffer) as usize;
                arrived.resize(arrived.len().max(number + 1), false);
                if !std::mem::replace(&mut arrived[number], true) {
                    progress.received.fetch_add(1, Ordering::Relaxed);
                }
            }
            Err(_) if ended != usize::MAX => return arrived,
            Err(_) => {}
        }
    }
}
