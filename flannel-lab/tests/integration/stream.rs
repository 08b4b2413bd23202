//! Streams of packets between pods, and the packets that were lost.
//!
//! A packet is lost if it has not arrived at the end of its stream. So a delay is no loss.

use std::fmt;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use test_support::eventually;

use flannel_lab::{Lab, Namespace, Pod};
use nix::sys::socket::{setsockopt, sockopt};

/// 250 packets a second.
const GAP: Duration = Duration::from_millis(4);
/// The wait for packets after the last one was sent.
const LAST: Duration = Duration::from_secs(2);
/// The timeout for streams to continue.
const PATIENCE: Duration = Duration::from_secs(30);

/// Packets from every pod to every other, in each family.
pub(crate) struct Traffic(Vec<Stream>);

/// One stream from pod to pod.
struct Stream {
    /// The numbers of the two hosts.
    hosts: [usize; 2],
    name: String,
    stop: Sender<()>,
    sender: JoinHandle<Vec<Instant>>,
    receiver: JoinHandle<Vec<bool>>,
    progress: Arc<Progress>,
}

/// The progress of a stream.
struct Progress {
    sent: AtomicUsize,
    received: AtomicUsize,
    /// The number of packets that were sent; `usize::MAX` while more are sent.
    total: AtomicUsize,
}

/// A packet that did not arrive.
pub(crate) struct Lost {
    /// The numbers of the source and the destination host.
    pub(crate) hosts: [usize; 2],
    stream: String,
    number: usize,
    /// The time when it was sent.
    pub(crate) at: Instant,
}

impl fmt::Debug for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} number {}, sent {:?} ago", self.stream, self.number, self.at.elapsed())
    }
}

impl Traffic {
    /// Starts the streams between all pods of the lab, and waits until all flow.
    pub(crate) fn start(lab: &Lab) -> Self {
        let pods: Vec<(usize, Arc<Pod>)> =
            lab.hosts().iter().map(|host| (host.number(), host.pod().unwrap())).collect();
        let mut streams = Vec::new();
        for (from, source) in &pods {
            for (to, sink) in pods.iter().filter(|(to, _)| to != from) {
                for (family, address) in sink.addresses().iter() {
                    let at = source.addresses()[family].unwrap();
                    streams.push(Stream::start([*from, *to], (source, at), (sink, *address)));
                }
            }
        }
        let traffic = Self(streams);
        traffic.wait_for_arrivals();
        traffic
    }

    /// Waits until the packets of a tenth of a second have arrived on every stream.
    pub(crate) fn wait_for_arrivals(&self) {
        let count = |stream: &Stream| stream.progress.received.load(Ordering::Relaxed);
        let goals: Vec<usize> = self.0.iter().map(|stream| count(stream) + 25).collect();
        for (stream, goal) in self.0.iter().zip(goals) {
            let arrived = || count(stream) >= goal;
            eventually(PATIENCE, arrived, || {
                format!("{}: no packet arrives any more", stream.name)
            });
        }
    }

    /// Waits until a dozen packets more have been sent on every stream from or to this host.
    pub(crate) fn wait_for_sent(&self, host: usize) {
        let count = |stream: &Stream| stream.progress.sent.load(Ordering::Relaxed);
        let streams = || self.0.iter().filter(|stream| stream.hosts.contains(&host));
        let goals: Vec<usize> = streams().map(|stream| count(stream) + 12).collect();
        for (stream, goal) in streams().zip(goals) {
            let sent = || count(stream) >= goal;
            eventually(PATIENCE, sent, || format!("{}: no packet is sent any more", stream.name));
        }
    }

    /// Ends all streams. Returns the number of packets that were sent, and those that were lost.
    pub(crate) fn end(self) -> (usize, Vec<Lost>) {
        for stream in &self.0 {
            // The thread ends for no other reason.
            stream.stop.send(()).unwrap();
        }
        let (mut sent, mut lost) = (0, Vec::new());
        for Stream { hosts, name, sender, receiver, .. } in self.0 {
            let (times, arrived) = (sender.join().unwrap(), receiver.join().unwrap());
            sent += times.len();
            let missing = times.iter().enumerate().filter(|(n, _)| arrived.get(*n) != Some(&true));
            lost.extend(missing.map(|(number, at)| Lost {
                hosts,
                stream: name.clone(),
                number,
                at: *at,
            }));
        }
        (sent, lost)
    }
}

impl Stream {
    fn start(hosts: [usize; 2], (source, at): (&Pod, IpAddr), (sink, to): (&Pod, IpAddr)) -> Self {
        let (from, into) = (open(source.namespace(), at), open(sink.namespace(), to));
        let target = into.local_addr().unwrap();
        let (stop, stopped) = channel();
        let progress = Arc::new(Progress {
            sent: AtomicUsize::new(0),
            received: AtomicUsize::new(0),
            total: AtomicUsize::new(usize::MAX),
        });
        let (sending, receiving) = (progress.clone(), progress.clone());
        let sender = std::thread::spawn(move || {
            let (start, mut sent) = (Instant::now(), Vec::new());
            loop {
                send(&from, target, sent.len());
                sent.push(Instant::now());
                sending.sent.store(sent.len(), Ordering::Relaxed);
                // A delayed sender catches up.
                let due = start + GAP * u32::try_from(sent.len()).unwrap();
                let pause = due.saturating_duration_since(Instant::now());
                if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                    sending.total.store(sent.len(), Ordering::Relaxed);
                    return sent;
                }
            }
        });
        let receiver = std::thread::spawn(move || receive(&into, &receiving));
        let name = format!("{} to {} at {to}", source.name(), sink.name());
        Self { hosts, name, stop, sender, receiver, progress }
    }
}

fn open(namespace: &Namespace, at: IpAddr) -> UdpSocket {
    let socket = namespace.run(|| UdpSocket::bind((at, 0))).unwrap().unwrap();
    socket.set_read_timeout(Some(LAST)).unwrap();
    // So that a delayed receiver loses no packet.
    setsockopt(&socket, sockopt::RcvBuf, &(1 << 20)).unwrap();
    socket
}

fn send(socket: &UdpSocket, target: SocketAddr, number: usize) {
    // A packet that cannot be sent is counted as lost by the receiver.
    let _ = socket.send_to(&(number as u64).to_be_bytes(), target);
}

/// The numbers that arrived.
fn receive(socket: &UdpSocket, progress: &Progress) -> Vec<bool> {
    let (mut arrived, mut buffer) = (Vec::new(), [0; 8]);
    // No packet for this long: the stream has stalled or ended.
    loop {
        let ended = progress.total.load(Ordering::Relaxed);
        if progress.received.load(Ordering::Relaxed) >= ended {
            return arrived;
        }
        match socket.recv(&mut buffer) {
            Ok(_) => {
                let number = usize::try_from(u64::from_be_bytes(buffer)).unwrap();
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
