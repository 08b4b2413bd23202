//! The throughput of the backend udp between two pods, against that of vxlan of the kernel.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::address::Family;
use flannel_lab::{Interrupter, Lab, Namespace};

use crate::parts::process::prepare;
use crate::parts::report::{Report, Row, median};

/// The rounds of each figure. The backends alternate.
const ROUNDS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 5000;
/// The time before the measurement of a stream begins.
const WARM_UP: Duration = Duration::from_millis(300);
/// The size of the writes of a stream, in bytes.
const CHUNK: usize = 128 << 10;
/// The payload of small packets, in bytes.
const SMALL: usize = 64;
const ROUND_TRIPS: usize = 2000;

/// Two hosts with a pod each.
struct Pair(Lab);

impl Pair {
    fn start(backend: &str, interrupter: &Interrupter) -> anyhow::Result<Self> {
        let lab = Lab::builder().families([Family::V4]).backend(backend).hosts(2);
        let lab = lab.interrupter(interrupter.clone()).start()?;
        lab.start_daemons()?;
        let matrix = lab.wait_until_reachable(PATIENCE)?;
        ensure!(matrix.is_complete(), "with {backend} the pods do not reach each other");
        Ok(Self(lab))
    }

    /// The namespaces of both pods, and the address of the second.
    fn ends(&self) -> anyhow::Result<([Namespace; 2], SocketAddr)> {
        let pod = |n: usize| self.0.hosts()[n].pod().context("a host without a pod");
        let pods = [pod(0)?, pod(1)?];
        let address = pods[1].addresses().v4.context("a pod without an address")?;
        Ok((pods.map(|pod| pod.namespace().clone()), SocketAddr::new(address, PORT)))
    }

    /// The rate of TCP over all streams, in gigabits per second.
    fn streams(&self, count: usize, time: Duration) -> anyhow::Result<f64> {
        let ([from, to], at) = self.ends()?;
        let listener = to.run(|| TcpListener::bind(at))??;
        let (received, ends) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..count {
                let stream = from.run(|| TcpStream::connect_timeout(&at, PATIENCE))??;
                let (incoming, _) = listener.accept()?;
                scope.spawn(|| send(stream, &ends));
                scope.spawn(|| receive(incoming, &received));
            }
            pause(WARM_UP);
            let (begin, before) = (Instant::now(), received.load(Ordering::Relaxed));
            pause(time);
            let bytes = received.load(Ordering::Relaxed) - before;
            let rate = bytes as f64 * 8.0 / begin.elapsed().as_secs_f64() / 1e9;
            ends.store(true, Ordering::Relaxed);
            anyhow::Ok(rate)
        })
    }

    /// The rate of small datagrams that arrive, in thousands per second.
    fn packets(&self, time: Duration) -> anyhow::Result<f64> {
        let ([from, to], at) = self.ends()?;
        let inbox = to.run(|| UdpSocket::bind(at))??;
        inbox.set_read_timeout(Some(Duration::from_millis(200)))?;
        let outbox = from.run(|| UdpSocket::bind("0.0.0.0:0"))??;
        outbox.connect(at)?;
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    // A full queue refuses some.
                    let _ = outbox.send(&[7; SMALL]);
                }
            });
            pause(WARM_UP);
            let (begin, mut count) = (Instant::now(), 0_u64);
            while begin.elapsed() < time {
                count += u64::from(inbox.recv(&mut [0; SMALL]).is_ok());
            }
            ends.store(true, Ordering::Relaxed);
            anyhow::Ok(count as f64 / begin.elapsed().as_secs_f64() / 1e3)
        })
    }

    /// The median round trip of a datagram, in microseconds.
    fn round_trip(&self) -> anyhow::Result<f64> {
        let ([from, to], at) = self.ends()?;
        let echo = to.run(|| UdpSocket::bind(at))??;
        let asks = from.run(|| UdpSocket::bind("0.0.0.0:0"))??;
        asks.connect(at)?;
        for socket in [&echo, &asks] {
            socket.set_read_timeout(Some(Duration::from_secs(2)))?;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut packet = [0; SMALL];
                while let Ok((len, from)) = echo.recv_from(&mut packet) {
                    let _ = echo.send_to(&packet[..len], from);
                }
            });
            let mut times = Vec::new();
            for _ in 0..ROUND_TRIPS {
                let begin = Instant::now();
                asks.send(&[7; SMALL])?;
                asks.recv(&mut [0; SMALL])?;
                times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            anyhow::Ok(median(times))
        })
    }
}

#[expect(clippy::disallowed_methods, reason = "the duration of a measurement")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

fn send(mut stream: TcpStream, ends: &AtomicBool) {
    let chunk = vec![7; CHUNK];
    while !ends.load(Ordering::Relaxed) && stream.write_all(&chunk).is_ok() {}
}

fn receive(mut stream: TcpStream, received: &AtomicU64) {
    let mut chunk = vec![0; CHUNK];
    while let Ok(len @ 1..) = stream.read(&mut chunk) {
        received.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// A figure of both backends in each round.
fn compare(
    pairs: &[Pair; 2],
    what: &str,
    measure: impl Fn(&Pair) -> anyhow::Result<f64>,
) -> anyhow::Result<Row> {
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push([measure(&pairs[0])?, measure(&pairs[1])?]);
    }
    let of = |n: usize| median(rounds.iter().map(|round| round[n]));
    let ratio = median(rounds.iter().map(|[udp, vxlan]| udp / vxlan));
    Ok(Row { what: what.to_owned(), udp: of(0), vxlan: of(1), ratio })
}

/// Measures for `time` in each round.
pub(crate) fn run(seconds: u64) -> anyhow::Result<Report> {
    let (interrupter, time) = (prepare()?, Duration::from_secs(seconds));
    let pairs = [Pair::start("udp", &interrupter)?, Pair::start("vxlan", &interrupter)?];
    let one = compare(&pairs, "one stream, Gb/s", |pair| pair.streams(1, time))?;
    let eight = compare(&pairs, "eight streams, Gb/s", |pair| pair.streams(8, time))?;
    let small = compare(&pairs, "64-byte packets, thousands/s", |pair| pair.packets(time))?;
    let trip = compare(&pairs, "round trip, µs", Pair::round_trip)?;
    let mut report = Report {
        gbps: Some(one.udp),
        vxlan_gbps: Some(one.vxlan),
        ratio: Some(one.ratio),
        ..Report::default()
    };
    for row in [&one, &eight, &small] {
        report.at_least(&row.what, row.ratio, 0.5);
    }
    report.at_most(&trip.what, Some(trip.ratio), 2.5);
    report.rows = vec![one, eight, small, trip];
    Ok(report)
}
