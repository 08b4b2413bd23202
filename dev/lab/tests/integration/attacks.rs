//! Attacks on a running cluster. Healthy nodes keep their packets, their health endpoint answers,
//! and their daemons do not grow.

mod guard;
mod leases;
mod paths;
mod udp;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use flannel_lab::{Builder, Host, Lab};
use test_support::eventually;

use crate::traffic::logs;

const PATIENCE: Duration = Duration::from_secs(120);
/// The time in which `/healthz` answers during an attack.
const HEALTHY: Duration = Duration::from_millis(100);
/// The most KiB by which a daemon may grow during an attack.
const GROWTH: u64 = 8 << 10;
const HEALTH_PORT: u16 = 8081;

/// A lab whose pods reach each other and whose daemons serve their health.
fn up(builder: Builder) -> Lab {
    let lab = builder.program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
    let port = format!("--healthz-port={HEALTH_PORT}");
    for host in lab.hosts() {
        host.start_daemon_with(&[&port, "--healthz-ip=127.0.0.1"]).unwrap();
    }
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{}", logs(&lab));
    lab
}

/// Watches that the daemons of a lab stay healthy.
struct Watch<'a> {
    lab: &'a Lab,
    rss: Vec<u64>,
}

impl<'a> Watch<'a> {
    fn begin(lab: &'a Lab) -> Self {
        let rss = lab.hosts().iter().map(|host| host.daemon_rss().unwrap());
        Self { lab, rss: rss.collect() }
    }

    /// Each daemon answers `/healthz` in time. The machine may be busy, so one answer of five
    /// counts.
    fn check_health(&self) {
        for host in self.lab.hosts() {
            host.check_daemon().unwrap();
            let times: Vec<Duration> = (0..5).map(|_| health(host)).collect();
            let best = times.iter().min().unwrap();
            assert!(*best < HEALTHY, "{}: {times:?}", host.name());
        }
    }

    fn check_memory(&self) {
        for (host, before) in self.lab.hosts().iter().zip(&self.rss) {
            let now = host.daemon_rss().unwrap();
            assert!(now <= before + GROWTH, "{}: from {before} to {now} KiB", host.name());
        }
    }
}

/// The time until `/healthz` has answered 200.
fn health(host: &Host) -> Duration {
    host.namespace()
        .run(|| {
            let begin = Instant::now();
            let mut stream = TcpStream::connect(("127.0.0.1", HEALTH_PORT)).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream
                .write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                .unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            begin.elapsed()
        })
        .unwrap()
}

/// Waits until the log of each host has a text.
fn all_log(lab: &Lab, text: &str) {
    let lacking = || lab.hosts().iter().find(|host| !host.log().unwrap().contains(text));
    eventually(
        PATIENCE,
        || lacking().is_none(),
        || {
            let host = lacking().unwrap();
            format!("{}: {text:?} is not in the log:\n{}", host.name(), host.log().unwrap())
        },
    );
}
