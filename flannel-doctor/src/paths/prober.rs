//! The task that sends probes and takes in the answers.

use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use crate::inputs::devices::Devices;
use crate::inputs::echo::EchoResult;
use crate::inputs::echo_socket::{Echo, IcmpMessage};
use crate::inputs::network::Target;
use crate::inputs::peers::Question;
use crate::{Network, PathExamination, examine_path};
use flannel_api::PeerState;
use flannel_core::address::Dual;
use flannel_core::lease::LeaseSet;
use flannel_core::network::NetworkHandle;
use flannel_core::status::Status;
use flannel_core::{Lease, Subnets};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::paths::agenda::Agenda;
use crate::paths::change_log::ChangeLog;
use crate::paths::flights::{Flights, ProbeResult, TIMEOUT};
use crate::paths::pinger::Pinger;
use crate::paths::record::{Details, PathId};
use crate::paths::results::Paths;

/// The most examinations at the same time, so that many failing paths cost no more than a few.
const EXAMINATIONS: usize = 8;
/// The pause between two groups of probes.
const TICK: Duration = Duration::from_millis(250);

/// What to probe.
#[derive(Debug, Clone)]
pub struct ProbeSettings {
    /// The time in which each path is probed at least once.
    pub interval: Duration,
    /// The port of path probes, for failing paths, or 0 if none are made.
    pub doctor_port: u16,
    /// The network, without its peers.
    pub network: Network,
}

/// Probes the paths to the accepted peers of a network, and keeps the results in `paths`. Without
/// `CAP_NET_RAW` the summary of `paths` has the reason, and nothing is probed.
///
/// # Cancel safety
/// Dropping the future stops the probes. The results stay.
pub async fn probe(settings: &ProbeSettings, handle: NetworkHandle, paths: &Paths) -> Infallible {
    let families = handle.lease.subnets.iter().map(|subnet| subnet.family());
    match Pinger::open(families) {
        Ok(pinger) => {
            let own = handle.lease.subnets;
            Prober::new(settings, own, paths, pinger).run(handle.status).await
        }
        Err(error) => {
            tracing::warn!(%error, "paths to peers are not probed, which needs CAP_NET_RAW");
            paths.fails_to_probe(format!("echoes cannot be sent: {error}"));
            std::future::pending().await
        }
    }
}

struct Prober<'a> {
    settings: &'a ProbeSettings,
    devices: Devices,
    own: Subnets,
    paths: &'a Paths,
    pinger: Pinger,
    agenda: Agenda<PathId>,
    leases: LeaseSet,
    flights: Flights,
    log: ChangeLog,
}

impl<'a> Prober<'a> {
    fn new(settings: &'a ProbeSettings, own: Subnets, paths: &'a Paths, pinger: Pinger) -> Self {
        let Network { datapath, backend, uplink, mtu, .. } = settings.network.clone();
        let devices = Devices { datapath, backend, uplink, mtu, ..Devices::default() };
        let agenda = Agenda::new(settings.interval, Instant::now());
        Self {
            settings,
            devices,
            own,
            paths,
            pinger,
            agenda,
            leases: LeaseSet::default(),
            flights: Flights::default(),
            log: ChangeLog::default(),
        }
    }

    async fn run(mut self, mut status: watch::Receiver<Arc<Status>>) -> Infallible {
        let mut examinations = JoinSet::new();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.follow_leases(&status.borrow_and_update().clone());
        loop {
            let idle = self.paths.len() == 0;
            tokio::select! {
                // Answers first: a late tick must not count one that is there as lost.
                biased;
                (echo, message) = self.pinger.receive() => self.answer(&echo, message),
                // Without peers there is nothing to do before the leases change.
                changed = status.changed(), if idle => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                    self.follow_leases(&status.borrow_and_update().clone());
                    self.paths.publish();
                }
                _ = ticks.tick(), if !idle => {
                    let status = status.borrow_and_update().clone();
                    self.follow_leases(&status);
                    self.tick(&status);
                    self.paths.publish();
                    self.examine(&mut examinations);
                }
                Some(Ok((id, found))) = examinations.join_next() => self.examined(id, found),
            }
        }
    }

    /// Adds and removes paths, because leases changed.
    fn follow_leases(&mut self, status: &Status) {
        let older = std::mem::replace(&mut self.leases, status.leases.clone());
        let mut added = Vec::new();
        let mut removed = false;
        let now = Instant::now();
        for (peer, lease) in self.leases.changes_since(&older) {
            let public = |lease: &Arc<Lease>| lease.attrs.preferred.public;
            let moved = older.get(&peer).map(public) != lease.map(public);
            for family in peer.iter().map(|subnet| subnet.family()) {
                let id = PathId { peer, family };
                match lease {
                    // This node has no packets of that family, and none to itself.
                    _ if peer == self.own || self.own.family(family).is_none() => {}
                    None => {
                        self.paths.remove(&id);
                        removed = true;
                    }
                    // It is new, or another node may have the lease now.
                    Some(_) if moved => {
                        self.paths.remove(&id);
                        removed = true;
                        added.push(id);
                    }
                    Some(_) => {}
                }
            }
        }
        if removed {
            let paths = self.paths;
            self.agenda.retain(|id| paths.contains(id));
            self.flights.retain(|id| paths.contains(id));
        }
        self.paths.add(&added);
        self.agenda.add(&added, now);
        // A random one, so that not all nodes probe the same peer at once.
        let order = RandomState::new();
        if let Some(first) = added.iter().max_by_key(|id| order.hash_one(id)) {
            self.agenda.begin_after(*first);
        }
    }

    /// Ends the flights whose time is over, and sends the probes that are due.
    fn tick(&mut self, status: &Status) {
        let now = Instant::now();
        while let Some(result) = self.flights.expired(now) {
            self.land(result, now);
        }
        let paths = self.paths;
        for id in self.agenda.due(
            now,
            paths.len(),
            |id| paths.after(id),
            |id| paths.probed(id).is_none_or(|at| now.duration_since(at) >= TIMEOUT),
        ) {
            let question = self.question(&id);
            let question = question.filter(|question| question.probes().next().is_some());
            // A rejected peer has no route.
            let question = question.filter(|_| !status.rejected.contains_key(&id.peer));
            let Some(question) = question else {
                paths.reset(&id, now);
                continue;
            };
            let sent = Instant::now();
            let mtu = paths.begin(&id, sent);
            let mut landed = None;
            for (echo, size) in self.flights.begin(id, &question, mtu, sent) {
                if let Some(answer) = self.pinger.send(&echo, size) {
                    landed = self.flights.answer(&echo, answer);
                }
            }
            // This host could send none of the echoes.
            if let Some(result) = landed {
                self.land(result, now);
            }
        }
        self.log.write(now);
    }

    fn question(&self, id: &PathId) -> Option<Question> {
        let target = target(self.leases.get(&id.peer)?);
        target.questions(&self.devices).into_iter().find(|question| question.family == id.family)
    }

    fn answer(&mut self, echo: &Echo, message: IcmpMessage) {
        let now = Instant::now();
        let answer = match message {
            IcmpMessage::Reply => match self.flights.sent(echo) {
                Some(sent) => EchoResult::Reply(now.duration_since(sent)),
                None => return,
            },
            IcmpMessage::TooBig(most) => EchoResult::TooBig(Some(most)),
        };
        if let Some(result) = self.flights.answer(echo, answer) {
            self.land(result, now);
        }
    }

    /// Takes in the answers to a probe.
    fn land(&mut self, result: ProbeResult, now: Instant) {
        let ProbeResult { path: id, answers } = result;
        let Some((outcome, change)) = self.paths.record(&id, &answers, now) else { return };
        self.agenda.note(id, outcome, now);
        if let Some(change) = change {
            self.log.note(id, change, self.paths.state(&id));
        }
    }

    /// Begins the examinations of failing paths that are due.
    fn examine(&self, examinations: &mut JoinSet<(PathId, Option<PathExamination>)>) {
        let now = Instant::now();
        while examinations.len() < EXAMINATIONS
            && let Some(id) = self.paths.to_examine(now)
        {
            let Some(lease) = self.leases.get(&id.peer) else { continue };
            let target = target(lease);
            let network = self.settings.network.clone();
            let port = self.settings.doctor_port;
            examinations.spawn(async move {
                let found = examine_path(&network, &target, id.family, port).await;
                (id, found)
            });
        }
    }

    fn examined(&mut self, id: PathId, found: Option<PathExamination>) {
        let Some(PathExamination { path, passes, finding }) = found else { return };
        // The daemon of the peer reports what arrived through the tunnel.
        let one_way = path.acknowledged > 0 && path.segments.is_none();
        if let Some(change) = self.paths.examined(&id, one_way, Details { passes, finding }) {
            self.log.note(id, change, self.paths.state(&id));
        }
    }
}

/// The node with this lease.
fn target(lease: &Lease) -> Target {
    let offer = &lease.attrs.preferred;
    Target {
        key: lease.subnets.to_string(),
        subnets: lease.subnets.iter().collect(),
        public: offer.public,
        backend: offer.kind.to_string(),
        state: PeerState::Unknown,
        mtus: Dual::default(),
    }
}
