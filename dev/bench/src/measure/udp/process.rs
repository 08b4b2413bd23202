//! The process of a data plane with many peers: its memory, its wake-ups, and its return after a
//! kill.

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_lab::{Interrupter, Lab};
use flannel_udp::{Client, Request, Status};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{getsockopt, sockopt};
use nix::unistd::Pid;
use serde_json::json;

use super::{PATIENCE, Pair, pause};
use crate::parts::cluster::{Families, leases};
use crate::parts::daemon::{figure, switches};

/// The time without packets before wake-ups are counted: Linux sends some for a new device.
const SETTLE: Duration = Duration::from_secs(20);
const IDLE: Duration = Duration::from_secs(10);
const KILLS: usize = 5;

/// The process of the first host's data plane.
pub(super) struct Process<'a>(&'a Pair);

/// What was measured.
pub(super) struct Figures {
    /// The resident memory, in MiB.
    pub(super) rss: f64,
    /// Voluntary context switches while no packet flows.
    pub(super) wakeups: u64,
    /// The worst time after a kill until a packet passes, in milliseconds.
    pub(super) packet: f64,
    /// The worst time after a kill until the process answers with all its peers, in milliseconds.
    pub(super) peers: f64,
}

/// Measures a pair with this number of further peers.
pub(super) fn measure(count: u32, interrupter: &Interrupter) -> anyhow::Result<Figures> {
    // Probes of paths wake it up.
    let lab = Lab::builder().config_field("Network", "10.0.0.0/8").config_field("SubnetLen", 24);
    let udp = json!({ "Type": "udp", "Path": "process" });
    let pair = Pair::start_with(lab, udp, &["--path-interval=0"], interrupter, |registry| {
        for lease in leases(count, Families::Ipv4).iter() {
            let attrs = LeaseAttrs::from(Offer::new(lease.attrs.preferred.public));
            std::fs::create_dir_all(registry.join("subnets"))?;
            std::fs::write(
                registry.join("subnets").join(lease.subnets.to_string()),
                attrs.to_json(),
            )?;
        }
        Ok(())
    })?;
    let process = Process(&pair);
    let begin = Instant::now();
    while process.status().is_ok_and(|status| status.peers.len() <= count as usize) {
        ensure!(begin.elapsed() < PATIENCE, "not all peers are there");
        pause(Duration::from_millis(50));
    }
    // A connection would wake it up.
    let pid = process.id()?;
    pause(SETTLE);
    let before: u64 = switches(pid)?.iter().map(|(_, count)| count).sum();
    pause(IDLE);
    let after: u64 = switches(pid)?.iter().map(|(_, count)| count).sum();
    let rss = process.rss()?;
    let mut packet = 0.0_f64;
    let mut peers = 0.0_f64;
    for _ in 0..KILLS {
        let [first, second] = process.kill()?;
        packet = packet.max(first);
        peers = peers.max(second);
        // The engine is idle again, as it usually is at a kill.
        pause(Duration::from_secs(2));
    }
    Ok(Figures { rss, wakeups: after - before, packet, peers })
}

impl<'a> Process<'a> {
    pub(super) const fn of(pair: &'a Pair) -> Self {
        Self(pair)
    }

    fn socket(&self) -> PathBuf {
        self.0.lab.hosts()[1].dir().join("state/udp/socket")
    }

    fn id(&self) -> anyhow::Result<u32> {
        let stream = UnixStream::connect(self.socket())?;
        Ok(getsockopt(&stream, sockopt::PeerCredentials)?.pid().try_into()?)
    }

    fn status(&self) -> anyhow::Result<Status> {
        let status = Client::connect(&self.socket())?.ask(&Request::Status)?;
        status.context("no status")
    }

    /// The resident memory, in MiB.
    pub(super) fn rss(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id()?))?;
        Ok(figure(&status, "VmRSS")? as f64 / 1024.0)
    }

    /// Kills it. Returns the times until a packet passes, and until all peers are there.
    fn kill(&self) -> anyhow::Result<[f64; 2]> {
        let before = self.status()?;
        let ([from, to], at) = self.0.ends()?;
        let inbox = to.run(|| std::net::UdpSocket::bind(at))??;
        let outbox = from.run(|| std::net::UdpSocket::bind("0.0.0.0:0"))??;
        inbox.set_read_timeout(Some(Duration::from_millis(1)))?;
        kill(Pid::from_raw(i32::try_from(self.id()?)?), Signal::SIGKILL)?;
        let begin = Instant::now();
        let elapsed = || begin.elapsed().as_secs_f64() * 1e3;
        let mut packet = None;
        let mut peers = None;
        while packet.is_none() || peers.is_none() {
            ensure!(begin.elapsed() < PATIENCE, "it is not back");
            if packet.is_none() {
                outbox.send_to(&[7], at)?;
                // Packets from before the kill wait in the device.
                packet = inbox.recv(&mut [0; 9]).is_ok().then(elapsed);
            }
            // The socket of the old process refuses.
            if peers.is_none()
                && let Ok(status) = self.status()
                && status.options.is_some()
                && status.peers == before.peers
            {
                peers = Some(elapsed());
                let [old, new] = [before.counts, status.counts];
                ensure!(
                    new.received_packets >= old.received_packets
                        && new.sent_packets >= old.sent_packets,
                    "the counts went back: {old:?}, then {new:?}"
                );
            }
        }
        Ok([packet, peers].map(Option::unwrap_or_default))
    }
}
