//! The backend udp between two pods, against vxlan of the kernel and Go flannel.

mod flood;
mod go;
pub(crate) mod guard;
mod kernel;
mod process;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::address::Family;
use flannel_lab::{Builder, Interrupter, Lab, Namespace};
use serde_json::{Value, json};

use self::process::Process;
use crate::parts::process::prepare;
use crate::parts::report::{Report, Row, median};

/// The number of rounds for a figure. The backends alternate in them.
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
/// The peers of the data plane whose process is measured, besides one that exists.
const PEERS: u32 = 5000;
/// The duration of a flood.
const FLOOD: Duration = Duration::from_secs(10);
/// The ports of nodes.
const UDP_PORT: u16 = 8285;
const VXLAN_PORT: u16 = 8472;

/// Two hosts with a pod each.
struct Pair {
    lab: Lab,
    _processes: Option<go::Processes>,
}

impl Pair {
    /// With the `Backend` object of the network config, or only its `Type`.
    fn start(backend: impl Into<Value>, interrupter: &Interrupter) -> anyhow::Result<Self> {
        Self::start_with(Lab::builder(), backend, &[], interrupter, |_| Ok(()))
    }

    /// Makes a pair with further options, and with leases that `prepare` writes into the registry.
    fn start_with(
        lab: Builder,
        backend: impl Into<Value>,
        options: &[&str],
        interrupter: &Interrupter,
        prepare: impl FnOnce(&Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let backend = backend.into();
        let lab = lab.families([Family::V4]).backend(backend.clone()).hosts(2);
        let lab = lab.interrupter(interrupter.clone()).start()?;
        prepare(lab.registry())?;
        lab.hosts().iter().try_for_each(|host| host.start_daemon_with(options))?;
        let matrix = lab.wait_until_reachable(PATIENCE)?;
        ensure!(matrix.is_complete(), "with {backend} the pods do not reach each other");
        Ok(Self { lab, _processes: None })
    }

    /// The namespaces of both pods, and the address of the second.
    fn ends(&self) -> anyhow::Result<([Namespace; 2], SocketAddr)> {
        let pod = |n: usize| self.lab.hosts()[n].pod().context("a host without a pod");
        let pods = [pod(0)?, pod(1)?];
        let address = pods[1].addresses().v4.context("a pod without an address")?;
        Ok((pods.map(|pod| pod.namespace().clone()), SocketAddr::new(address, PORT)))
    }

    /// The rate of TCP over all streams, in gigabits per second.
    fn streams(&self, count: usize, time: Duration) -> anyhow::Result<f64> {
        let ([from, to], at) = self.ends()?;
        let listener = to.run(|| TcpListener::bind(at))??;
        let received = AtomicU64::new(0);
        let ends = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..count {
                let stream = from.run(|| TcpStream::connect_timeout(&at, PATIENCE))??;
                let (incoming, _) = listener.accept()?;
                scope.spawn(|| send(stream, &ends));
                scope.spawn(|| receive(incoming, &received));
            }
            pause(WARM_UP);
            let begin = Instant::now();
            let before = received.load(Ordering::Relaxed);
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
                    // A full queue refuses some datagrams.
                    let _ = outbox.send(&[7; SMALL]);
                }
            });
            pause(WARM_UP);
            let begin = Instant::now();
            let mut count = 0_u64;
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

/// The backends that are compared.
struct Pairs {
    udp: Pair,
    vxlan: Pair,
    go: Option<Pair>,
}

impl Pairs {
    /// A figure of all backends in each round.
    fn compare(
        &self,
        what: &str,
        rounds: usize,
        measure: impl Fn(&Pair) -> anyhow::Result<f64>,
    ) -> anyhow::Result<Row> {
        let mut udp = Vec::new();
        let mut vxlan = Vec::new();
        let mut go = Vec::new();
        for _ in 0..rounds {
            udp.push(measure(&self.udp)?);
            vxlan.push(measure(&self.vxlan)?);
            go.extend(self.go.as_ref().map(&measure).transpose()?);
        }
        let ratio = |others: &[f64]| median(udp.iter().zip(others).map(|(udp, other)| udp / other));
        Ok(Row {
            what: what.to_owned(),
            udp: Some(median(udp.iter().copied())),
            vxlan: Some(median(vxlan.iter().copied())),
            ratio: Some(ratio(&vxlan)),
            go: self.go.as_ref().map(|_| median(go.iter().copied())),
            go_ratio: self.go.as_ref().map(|_| ratio(&go)),
        })
    }

    /// A stream beside a flood, relative to the stream of the same backend alone: how much each
    /// keeps, and the rates of the floods. A flood alone is measured first.
    fn flood(&self, alone: &Row) -> anyhow::Result<[Row; 4]> {
        let process = Process::of(&self.udp);
        let before = process.rss()?;
        let most = [
            flood::alone(&self.udp, UDP_PORT, FLOOD)?,
            flood::alone(&self.vxlan, VXLAN_PORT, FLOOD)?,
        ];
        let udp = flood::beside(&self.udp, UDP_PORT, FLOOD)?;
        let after = process.rss()?;
        let vxlan = flood::beside(&self.vxlan, VXLAN_PORT, FLOOD)?;
        let kept = [
            udp.stream / alone.udp.unwrap_or(f64::NAN),
            vxlan.stream / alone.vxlan.unwrap_or(f64::NAN),
        ];
        let row = |what: &str, udp, vxlan| Row {
            what: what.to_owned(),
            udp: Some(udp),
            vxlan: Some(vxlan),
            ratio: Some(udp / vxlan),
            ..Row::default()
        };
        let memory = Row {
            what: "memory after the flood, MiB more".to_owned(),
            udp: Some(after - before),
            ..Row::default()
        };
        Ok([
            row("kept beside a flood", kept[0], kept[1]),
            row("flood beside it, thousands/s", udp.flood, vxlan.flood),
            row("flood alone, thousands/s", most[0], most[1]),
            memory,
        ])
    }
}

/// Measures throughput for `seconds` in each round. `go`: a flanneld of Go flannel.
pub(crate) fn run(seconds: u64, go: Option<PathBuf>) -> anyhow::Result<Report> {
    let of_kernel = kernel::measure();
    let interrupter = prepare()?;
    let time = Duration::from_secs(seconds);
    let alone = process::measure(PEERS, &interrupter)?;
    let pairs = Pairs {
        udp: Pair::start(json!({ "Type": "udp", "Path": "process" }), &interrupter)?,
        vxlan: Pair::start("vxlan", &interrupter)?,
        go: go.map(|program| Pair::of_go(&program, &interrupter)).transpose()?,
    };
    let one = pairs.compare("one stream, Gb/s", ROUNDS, |pair| pair.streams(1, time))?;
    let eight = pairs.compare("eight streams, Gb/s", ROUNDS, |pair| pair.streams(8, time))?;
    let small = pairs.compare("64-byte packets, thousands/s", ROUNDS, |pair| pair.packets(time))?;
    let trip = pairs.compare("round trip, µs", ROUNDS, Pair::round_trip)?;
    let [kept, flood, most, grown] = pairs.flood(&one)?;
    let mut report = Report {
        gbps: one.udp,
        vxlan_gbps: one.vxlan,
        go_gbps: one.go,
        ratio: one.ratio,
        ..Report::default()
    };
    for row in [&one, &eight, &small, &kept] {
        report.at_least(&row.what, row.ratio.unwrap_or(f64::NAN), 0.5);
    }
    report.at_most(&trip.what, trip.ratio, 2.5);
    for row in [&one, &eight] {
        if let Some(ratio) = row.go_ratio {
            report.at_least(&format!("{}, against Go", row.what), ratio, 8.0);
        }
    }
    report.at_most("round trip, against Go", trip.go_ratio, 1.0);
    report.at_least(&most.what, most.udp.unwrap_or(f64::NAN), 200.0);
    report.at_most(&grown.what, grown.udp, 4.0);
    report.rows = vec![one, eight, small, trip, kept, flood, most, grown];
    for (what, figure, limit) in [
        ("memory with 5,000 peers, MiB", alone.rss, 8.0),
        ("wake-ups in 10 s", alone.wakeups as f64, 0.0),
        ("a packet after kill -9, ms", alone.packet, 200.0),
        ("back after kill -9, ms", alone.peers, 200.0),
    ] {
        report.at_most(what, Some(figure), limit);
        report.rows.push(Row { what: what.to_owned(), udp: Some(figure), ..Row::default() });
    }
    kernel::add(&mut report, of_kernel);
    Ok(report)
}
