//! A snapshot and its comparison by the engine, as after lost messages, against a bare dump of the
//! same tables.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::address::Family;
use flannel_core::network::NetworkHandle;
use flannel_core::status::ObjectState;
use tokio::runtime::{Builder, Runtime};

use flannel_netlink::testing::ip;

use crate::parts::cluster::{Families, Peer, device, leases};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::floor::index_of;
use crate::parts::prompted::{Prompted, Prompter};
use crate::parts::raw::{
    AF_BRIDGE, DUMP, GETADDR, GETNEIGH, GETNEXTHOP, GETROUTE, Raw, message, ndmsg, nhmsg, rtmsg,
};
use crate::parts::report::{Report, median};
use crate::parts::witness::compare;

const PAIRS: usize = 15;
const RATIO: f64 = 1.5;
/// The engine takes at most one snapshot in this time, and spends at most a fifth of its time on
/// snapshots. The pause that follows from it is not measured.
const READ_GAP: Duration = Duration::from_millis(100);

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let fixture = Fixture::new()?;
    let mut prompter = None;
    let mut engine = Engine::start_on(&fixture, families, |kernel| {
        let (kernel, end) = Prompted::new(kernel);
        prompter = Some(end);
        Arc::new(kernel)
    })?;
    engine.send(leases(peers, families));
    engine.wait(peers as usize)?;
    let mut resync = Resync {
        handle: engine.handle(),
        prompter: prompter.context("the engine has no kernel")?,
        pod: families
            .iter()
            .next()
            .map(|family| Peer(2).subnet(family).base())
            .context("no family")?,
        runtime: Builder::new_current_thread().enable_all().build()?,
    };
    // After a cold start the engine reads by itself, so the first snapshot may have to wait.
    resync.answer()?;
    resync.prompter.others();
    rest_after(resync.run()?);
    let mut pairs = Vec::new();
    for _ in 0..PAIRS {
        let floor = fixture.netns.run(|| bare_dump(families))?;
        let took = resync.run()?;
        rest_after(took);
        pairs.push((took.as_secs_f64(), floor.as_secs_f64()));
    }
    let mut wrong = compare(&fixture.netns, peers, families)?;
    let repaired = engine.repaired();
    if repaired != 0 {
        wrong.push(format!("{repaired} objects were repaired, none was damaged"));
    }
    if let Err(error) = resync.finds_damage(&fixture, families, &engine) {
        wrong.push(format!("{error:#}"));
    }
    drop((resync, engine));
    fixture.clear(peers, families, &mut wrong);
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(median(pairs.iter().map(|pair| pair.0))),
        floor_seconds: Some(median(pairs.iter().map(|pair| pair.1))),
        ratio: Some(median(pairs.iter().map(|pair| pair.0 / pair.1))),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    Ok(report)
}

/// An engine that reads all tables on request.
struct Resync {
    handle: NetworkHandle,
    prompter: Prompter,
    /// An address of a peer's pod.
    pod: IpAddr,
    runtime: Runtime,
}

impl Resync {
    /// The time from the report of lost messages until the snapshot was compared. The engine
    /// answers questions after the current round.
    fn run(&mut self) -> anyhow::Result<Duration> {
        ensure!(self.prompter.others() == 0, "the engine read the kernel without a request");
        let start = Instant::now();
        self.prompter.report_loss();
        self.runtime.block_on(self.prompter.begun()).context("the engine is gone")?;
        self.answer()?;
        let took = start.elapsed();
        ensure!(self.prompter.others() == 0, "the engine read the kernel twice");
        Ok(took)
    }

    /// Checks that a change without an event is found and repaired.
    fn finds_damage(
        &mut self,
        fixture: &Fixture,
        families: Families,
        engine: &Engine,
    ) -> anyhow::Result<()> {
        for (n, family) in families.iter().enumerate() {
            let base = Peer(2).subnet(family).base();
            let dev = device(family);
            fixture.netns.run(|| ip(&format!("neigh del {base} dev {dev}")));
            self.prompter.report_loss();
            self.runtime.block_on(self.prompter.begun()).context("the engine is gone")?;
            self.answer()?;
            let repaired = engine.repaired();
            let planted = n as u64 + 1;
            ensure!(
                repaired == planted,
                "{repaired} objects were repaired, {planted} were damaged"
            );
        }
        Ok(())
    }

    /// Waits for the current round. After it all objects of a peer must be in place.
    fn answer(&self) -> anyhow::Result<()> {
        let explanation = self
            .runtime
            .block_on(self.handle.explain(self.pod))
            .context("the peer is not known")?;
        let in_place = explanation.objects.iter().all(|(_, state)| *state == ObjectState::InPlace);
        ensure!(
            in_place && !explanation.objects.is_empty(),
            "not in place: {:?}",
            explanation.objects
        );
        Ok(())
    }
}

#[expect(clippy::disallowed_methods, reason = "the engine does not report the end of its pause")]
fn rest_after(took: Duration) {
    std::thread::sleep(READ_GAP.max(4 * took));
}

/// Sends the requests of a snapshot, and reads the answers without decoding them.
fn bare_dump(families: Families) -> anyhow::Result<Duration> {
    let mut requests = vec![message(GETNEXTHOP, DUMP, &nhmsg(0, 0, 0), &[])];
    for family in families.iter() {
        let index = index_of(device(family))?;
        requests.push(message(GETADDR, DUMP, &ifaddrmsg(index), &[]));
        requests.push(message(GETNEIGH, DUMP, &ndmsg(0, 0, 0, 0), &[(8, &index.to_ne_bytes())]));
        requests.push(message(GETNEIGH, DUMP, &ndmsg(AF_BRIDGE, index, 0, 0), &[]));
    }
    for family in Family::BOTH {
        let mut header = rtmsg(family, 0, 0, 0);
        // Any kind of route.
        header[7] = 0;
        requests.push(message(GETROUTE, DUMP, &header, &[(15, &254u32.to_ne_bytes())]));
    }
    let mut raw = Raw::open()?;
    let start = Instant::now();
    for request in &requests {
        raw.dump(request, |_| ())?;
    }
    Ok(start.elapsed())
}

/// `struct ifaddrmsg`.
fn ifaddrmsg(index: u32) -> [u8; 8] {
    let [a, b, c, d] = index.to_ne_bytes();
    [0, 0, 0, 0, a, b, c, d]
}
