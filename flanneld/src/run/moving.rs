//! The backends that this node runs: one, or several while the cluster moves to another.
//!
//! `flannel-moving` decides on the steps of a move. Each step rebuilds the network, which keeps the
//! objects in the kernel.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flannel_api::MoveReport;
use flannel_core::backend::{Datapath, ExternalInterface};
use flannel_core::error::holder;
use flannel_core::kernel::Footprint;
use flannel_core::lease::View;
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Backend, Config, Kernel, Lease, SubnetManager, Subnets};
use flannel_moving::{Blockers, Member, NodeBackends, Seen, Step, Wait};
use flannel_netlink::NetlinkKernel;
use flannel_options::state_dir;
use flannel_route::cleanup;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::leftovers::{is_settled, log_removal};
use crate::blocking::run_blocking_in_order;
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::Observer;

/// The shortest time between two looks at the leases.
const PACE: Duration = Duration::from_millis(500);
/// The time for which no lease offered a withdrawn backend before its devices are removed.
const UNUSED: Duration = Duration::from_secs(60);
/// The time for which no packet came by these devices.
const SILENT: Duration = Duration::from_secs(10);
/// The pause before a file is written again.
const WRITE_AGAIN: Duration = Duration::from_secs(10);

/// The backends of this node, over all its networks.
pub(super) struct Moving {
    file: PathBuf,
    state: Mutex<State>,
}

#[derive(Clone)]
struct State {
    /// The content of the file.
    kept: NodeBackends,
    /// The lease types of members that are no longer run, but whose devices may still be there.
    dropped: Vec<String>,
}

impl State {
    fn is_dropped(&self, member: &Member) -> bool {
        self.dropped.contains(&member.lease_type)
    }
}

/// A backend that runs.
#[derive(Clone)]
pub(super) struct Runs {
    backend: &'static dyn Backend,
    /// The network config with this backend.
    config: Config,
    member: Member,
}

/// The backends of one network.
#[derive(Clone)]
pub(crate) struct Team {
    /// In the order in which they are used for a peer that offers several.
    pub(super) all: Vec<Runs>,
    members: NodeBackends,
    /// That of the network config.
    pub(super) target: &'static dyn Backend,
}

impl Runs {
    /// The backend and its config.
    pub(super) fn member(&self) -> (&dyn Backend, &Config) {
        (self.backend, &self.config)
    }
}

impl Moving {
    /// Reads the backends that the last run has offered. A file that cannot be used is logged. A
    /// damaged one is moved aside.
    pub(super) fn open(dir: &Path) -> Self {
        let file = state_dir::backends(dir);
        let kept = match state_dir::read(&file) {
            Ok(text) => NodeBackends::parse(text.as_deref().unwrap_or(r#"{"backends":[]}"#))
                .map_err(|error| {
                    let aside = file.with_extension("damaged");
                    let moved = std::fs::rename(&file, &aside);
                    let kept = moved.map_or(String::new(), |()| format!(", kept as {aside:?}"));
                    format!("{error}{kept}")
                }),
            Err(error) => Err(error.to_string()),
        };
        let kept = kept.unwrap_or_else(|error| {
            tracing::warn!(
                path = %file.display(), %error,
                "a state file cannot be read: if the network config has changed since, peers that \
                 only know the backend before do not reach this node"
            );
            NodeBackends::default()
        });
        Self { file, state: Mutex::new(State { kept, dropped: Vec::new() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The backends for a network with this config. They are recorded before they are offered.
    ///
    /// # Errors
    /// The backend of the config is not known.
    pub(super) async fn team(
        &self,
        (settings, subnets): (&DaemonConfig, &dyn SubnetManager),
        config: &Config,
        iface: &ExternalInterface,
    ) -> Result<Team, Error> {
        let target = settings.backends.find(&config.backend.kind)?;
        let with = |member: &Member| {
            let config = Config { backend: member.backend.clone(), ..config.clone() };
            let backend = settings.backends.find(&config.backend.kind)?;
            if backend.runs_commands() && !settings.allow_commands {
                return Err(Error::CommandsNotAllowed { kind: backend.kind() });
            }
            backend.validate(&config, Some(iface))?;
            Ok(Runs { backend, config, member: member.clone() })
        };
        let lease_type = target.lease_type();
        let is_left = |member: &Member| member.lease_type != lease_type;
        let moves = target.can_move() && subnets.publishes_attrs();
        let mut state = self.state().clone();
        state.dropped.retain(|dropped| dropped != lease_type);
        let before = state.kept.clone();
        state.kept.retain(|member| {
            let refused = match with(member) {
                Ok(runs) if moves && runs.backend.can_move() => return true,
                Ok(_) => "it cannot run beside another one".to_owned(),
                Err(error) => error.to_string(),
            };
            if is_left(member) {
                let (from, to) = (&member.lease_type, target.kind());
                tracing::warn!(
                    %from, %to, reason = %refused,
                    "the backend is replaced at once: nodes that still have the old one do not \
                     reach this node"
                );
            }
            !is_left(member)
        });
        state.kept.aim_at(lease_type, &config.backend);
        if state.kept != before
            && let Err(error) = self.write(&state.kept).await
        {
            tracing::warn!(
                path = %self.file.display(), %error,
                "a state file cannot be written (see --state-dir): if the network config names \
                 another backend before the next start, the network is replaced at once"
            );
        }
        let mut members = state.kept.clone();
        members.retain(|member| !state.is_dropped(member));
        *self.state() = state;
        let all = members.by_use(lease_type).map(with).collect::<Result<_, Error>>()?;
        Ok(Team { all, members, target })
    }

    /// Waits until the next step of a move is due, and prepares it. Returns the reason for which
    /// the network must be rebuilt.
    pub(super) async fn next(
        &self,
        (team, own): (&Team, Subnets),
        (mut views, mut status): (watch::Receiver<View>, watch::Receiver<Arc<Status>>),
        kernel: &Arc<NetlinkKernel>,
        observer: &Observer,
    ) -> String {
        let target = team.target.lease_type();
        let (mut silence, mut logged) = (Silence::new(kernel, team), None);
        loop {
            let view = views.borrow_and_update().clone();
            let in_place = status.borrow_and_update().own_in_place;
            let step = team.members.step(target, &Seen { in_place, view: &view, own });
            let Some(Step { next, leases, offering, .. }) = step else {
                return std::future::pending().await;
            };
            let (text, is_silent) = match &next {
                Ok(_) => (String::new(), false),
                Err(Wait::Silence) => silence.look().await,
                Err(wait) => (describe(wait, target), false),
            };
            if next != Err(Wait::Silence) {
                silence = Silence::new(kernel, team);
            }
            let wait = next.as_ref().err().map(std::mem::discriminant);
            if wait.is_some() && std::mem::replace(&mut logged, wait) != wait {
                let offers = kinds(team.members.offered()).join(", ");
                tracing::info!(to = %target, %offers, waits_for = %text, "moving to a backend");
            }
            observer.note(|facts| {
                facts.moving = Some(MoveReport {
                    to: target.to_owned(),
                    from: kinds(team.members.iter().filter(|it| it.lease_type != target)),
                    offers: kinds(team.members.offered()),
                    leases: leases as u64,
                    offering: offering as u64,
                    waits_for: (!text.is_empty()).then_some(text),
                });
            });
            match next {
                Ok(next) => match self.take(&next).await {
                    Ok(()) => {
                        let offers = kinds(next.offered()).join(", ");
                        return format!("moving to {target}: this node offers {offers} now");
                    }
                    Err(error) => {
                        let path = self.file.display();
                        tracing::warn!(
                            %path, %error,
                            "a state file cannot be written (see --state-dir): the move waits"
                        );
                        sleep(WRITE_AGAIN).await;
                    }
                },
                Err(Wait::Silence) if is_silent => {
                    let unused = kinds(team.members.iter().filter(|member| !member.offered));
                    let reason = format!("moved to {target}: nothing uses {}", unused.join(", "));
                    self.state().dropped.extend(unused);
                    return reason;
                }
                Err(_) => {
                    tokio::select! {
                        // If their senders are gone, the network reports it.
                        _ = views.changed() => {}
                        _ = status.changed() => {}
                        () = sleep(PACE), if silence.received.is_some() => {}
                    }
                    sleep(PACE).await;
                }
            }
        }
    }

    /// Records the members of the next network. Those that were dropped stay in the file until
    /// their devices are gone.
    async fn take(&self, next: &NodeBackends) -> std::io::Result<()> {
        let state = self.state().clone();
        let mut kept = next.clone();
        kept.add(state.kept.iter().filter(|member| state.is_dropped(member)));
        self.write(&kept).await?;
        *self.state() = State { kept, ..state };
        Ok(())
    }

    /// Waits until the network is settled, removes the devices of dropped backends, then never
    /// returns. Objects on other devices are those of the network that runs.
    pub(super) async fn clear(
        &self,
        (settings, team): (&DaemonConfig, &Team),
        kernel: Arc<dyn Kernel>,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        let state = self.state().clone();
        if !state.dropped.is_empty() && status.wait_for(is_settled).await.is_ok() {
            let used = team.footprint(None).unwrap_or_default().links;
            let config = &team.all[0].config;
            let mut gone = true;
            for member in state.kept.iter().filter(|member| state.is_dropped(member)) {
                let config = Config { backend: member.backend.clone(), ..config.clone() };
                let mut links = settings.backends.footprint(&config).links;
                links.retain(|link| !used.contains(link));
                let footprint = Footprint { links, ..Footprint::default() };
                let (kernel, origin) =
                    (Arc::clone(&kernel), format!("the earlier backend {}", member.lease_type));
                let removal = move || log_removal(&origin, cleanup(&*kernel, &footprint, false));
                gone &= blocking(removal).await;
            }
            let mut kept = state.kept.clone();
            kept.retain(|member| !state.is_dropped(member));
            // Otherwise the next start runs them for a while, and removes them again.
            if gone && self.write(&kept).await.is_ok() {
                *self.state() = State { kept, dropped: Vec::new() };
            }
        }
        std::future::pending().await
    }

    async fn write(&self, kept: &NodeBackends) -> std::io::Result<()> {
        let (file, text) = (self.file.clone(), kept.to_json());
        run_blocking_in_order(move || state_dir::replace(&file, &text)).await
    }
}

impl Team {
    /// Whether this backend is one of them.
    pub(crate) fn runs(&self, backend: &dyn Backend) -> bool {
        self.all.iter().any(|runs| runs.backend.kind() == backend.kind())
    }

    /// The places in `all` of the backends whose offers are published, the preferred one first.
    pub(super) fn offers(&self) -> Vec<usize> {
        let place = |member: &Member| self.all.iter().position(|runs| runs.member == *member);
        self.members.offered().filter_map(place).collect()
    }

    /// The footprint of all backends.
    ///
    /// # Errors
    /// The options of a backend are wrong.
    pub(super) fn footprint(&self, uplink: Option<LinkName>) -> Result<Footprint, Error> {
        let mut footprint = Footprint::default();
        for Runs { backend, config, .. } in &self.all {
            footprint.merge(backend.footprint(config, uplink)?);
        }
        Ok(footprint)
    }

    /// The datapath of all backends.
    pub(super) fn datapath(&self, settings: &DaemonConfig) -> Datapath {
        let mut datapaths = self.all.iter().map(|runs| settings.backends.datapath(&runs.config));
        let mut first = datapaths.next().unwrap_or_default();
        datapaths.for_each(|datapath| first.merge(datapath));
        first
    }
}

fn kinds<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<String> {
    members.map(|member| member.lease_type.clone()).collect()
}

/// Whether peers have stopped to use the devices of withdrawn backends.
struct Silence {
    kernel: Arc<NetlinkKernel>,
    devices: Vec<LinkName>,
    since: Instant,
    /// The packets that the devices had received, and the time since which there is no more.
    received: Option<(u64, Instant)>,
}

impl Silence {
    fn new(kernel: &Arc<NetlinkKernel>, team: &Team) -> Self {
        let withdrawn = team.all.iter().filter(|runs| !runs.member.offered);
        let links = |runs: &Runs| runs.backend.footprint(&runs.config, None).ok();
        let devices = withdrawn.filter_map(links).flat_map(|footprint| footprint.links).collect();
        Self { kernel: Arc::clone(kernel), devices, since: Instant::now(), received: None }
    }

    /// Looks at the counters. Returns the event that is waited for, and whether it has happened.
    async fn look(&mut self) -> (String, bool) {
        let (kernel, devices) = (Arc::clone(&self.kernel), self.devices.clone());
        let now = Instant::now();
        match blocking(move || kernel.received(&devices)).await {
            Ok(count) if self.received.is_none_or(|(before, _)| before != count) => {
                self.received = Some((count, now));
            }
            Ok(_) => {}
            Err(error) => return (format!("the counters of devices: {error}"), false),
        }
        let quiet = self.received.map_or(Duration::ZERO, |(_, since)| now - since);
        let done = now - self.since >= UNUSED && quiet >= SILENT;
        let devices: Vec<_> = self.devices.iter().map(ToString::to_string).collect();
        let by =
            if devices.is_empty() { String::new() } else { format!(" by {}", devices.join(", ")) };
        let (unused, silent) = (UNUSED.as_secs(), SILENT.as_secs());
        (format!("{unused} s without use, and {silent} s without a packet{by}"), done)
    }
}

/// The event that a node waits for, as a noun.
fn describe(wait: &Wait, target: &str) -> String {
    let names = |blockers: &Blockers| {
        let name = |lease: &Arc<Lease>| format!("{} of {}", lease.subnets, holder(&lease.attrs));
        let first: Vec<String> = blockers.first.iter().map(name).collect();
        let more = blockers.total - first.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", first.join(", "))
    };
    match wait {
        Wait::Devices => format!("the devices of {target} in this node's kernel"),
        Wait::Store => "the store to show this node's lease as it was published".to_owned(),
        Wait::Offers(blockers) => format!("offers of {target} by {}", names(blockers)),
        Wait::Preference(blockers) => format!("{target} as the first offer of {}", names(blockers)),
        Wait::Withdrawal(blockers) => format!("the end of old offers of {}", names(blockers)),
        _ => String::new(),
    }
}
