//! The backends that this node runs: one, or several while the cluster moves to another.
//!
//! `flannel_route::moving` decides on the steps of a move. Each step rebuilds the network, which
//! keeps the objects in the kernel.

pub(super) mod handshakes;
mod silence;
mod team;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use flannel_api::MoveReport;
use flannel_core::backend::{ExternalInterface, Inlet, Prepared};
use flannel_core::error::holder;
use flannel_core::kernel::Footprint;
use flannel_core::lease::{Origin, View};
use flannel_core::object::LinkName;
use flannel_core::runtime::{blocking, lock};
use flannel_core::status::Status;
use flannel_core::{Backend, Config, Error as Cause, Kernel, Lease, SubnetManager, Subnets};
use flannel_netlink::NetlinkKernel;
use flannel_options::state_dir;
use flannel_route::cleanup;
use flannel_route::moving::{Blockers, Member, NodeBackends, Seen, Step, Tunnels, Wait};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::leftovers::{is_settled, log_removal};
use super::trial::Held;
use crate::blocking::run_blocking_in_order;
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::Observer;
use silence::Silence;
pub(crate) use team::{Devices, Lineup, Runs, Team};

/// The shortest time between two looks at the leases.
const PACE: Duration = Duration::from_millis(500);
/// The pause before a file is written again.
const WRITE_AGAIN: Duration = Duration::from_secs(10);
/// The pause before a backend that was left out is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// The effect of the end of a backend that was offered.
const REPLACED: &str = "it is replaced at once: nodes that still have it do not reach this node";

/// The backends of this node, over all its networks.
pub(super) struct Moving {
    file: PathBuf,
    state: Mutex<State>,
    /// Held from a look at the state until its next version is in the file and in memory.
    changes: tokio::sync::Mutex<()>,
    /// The backends whose commands stay in effect, which the log says once.
    pub(super) kept_commands: Mutex<BTreeSet<String>>,
}

#[derive(Clone)]
struct State {
    /// The content of the file.
    kept: NodeBackends,
    /// The lease types of members that are no longer run, but whose devices may still be there.
    dropped: Vec<String>,
    /// The lease types of members that could not be set up for the last network.
    aside: Vec<String>,
}

/// The leases, the status of the network, and the tunnels of the target if it needs handshakes.
type Watched =
    (watch::Receiver<View>, watch::Receiver<Arc<Status>>, watch::Receiver<Option<Tunnels>>);

impl State {
    fn is_dropped(&self, member: &Member) -> bool {
        self.dropped.contains(&member.lease_type)
    }

    fn is_not_run(&self, member: &Member) -> bool {
        self.is_dropped(member) || self.aside.contains(&member.lease_type)
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
                    let aside = state_dir::damaged_backends(dir);
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
        let state = Mutex::new(State { kept, dropped: Vec::new(), aside: Vec::new() });
        Self { file, state, changes: Default::default(), kept_commands: Default::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The backends for a network with this config. Each one is prepared before anything is
    /// recorded, and they are recorded before they are offered. A backend of the record that cannot
    /// be prepared is left out, unless a node needs it: `user` returns the lease of one that a
    /// network reaches only by this member.
    ///
    /// # Errors
    /// The backend of the config is not known or cannot be prepared, or one that is needed cannot.
    /// Then nothing was changed.
    pub(super) async fn lineup(
        &self,
        (settings, subnets): (&DaemonConfig, &dyn SubnetManager),
        (config, iface): (&Config, &ExternalInterface),
        prepare: impl AsyncFn(&Runs) -> Result<Prepared, Error>,
        user: impl Fn(&NodeBackends, &Member) -> Option<Arc<Lease>>,
    ) -> Result<Lineup, Error> {
        let target = settings.backends.find(&config.backend.kind)?;
        let with = |member: &Member| runs(settings, member, (config, iface));
        let lease_type = member_type(target);
        let is_left = |member: &Member| member.lease_type != lease_type;
        // Offers without a type cannot be told apart.
        let can_move = |backend: &dyn Backend| {
            backend.can_move() && !backend.lease_type().is_empty() && subnets.publishes_attrs()
        };
        let moves = can_move(target);
        let _changes = self.changes.lock().await;
        let mut state = self.state().clone();
        state.dropped.retain(|dropped| dropped != lease_type);
        let before = state.kept.clone();
        let mut ended = Vec::new();
        state.kept.retain(|member| {
            let reason = match with(member) {
                Ok(runs) if moves && can_move(runs.backend) => return true,
                Ok(_) => "it cannot run beside another one".to_owned(),
                Err(error) => error.to_string(),
            };
            if is_left(member) {
                ended.push((member.clone(), reason));
            }
            !is_left(member)
        });
        state.kept.aim_at(lease_type, &config.backend);
        let mut candidates = state.kept.clone();
        candidates.retain(|member| !state.is_dropped(member));
        let mut prepared = BTreeMap::new();
        let mut broken = BTreeMap::new();
        for member in candidates.iter() {
            match prepare(&with(member)?).await {
                Ok(done) => drop(prepared.insert(member.lease_type.clone(), done)),
                Err(error) if !is_left(member) || error.is_of_store() => return Err(error),
                Err(error) => drop(broken.insert(member.lease_type.clone(), error.to_string())),
            }
        }
        let is_broken = |member: &Member| broken.contains_key(&member.lease_type);
        let (members, aside) = candidates.without(lease_type, is_broken);
        for member in &aside {
            let reason = &broken[&member.lease_type];
            if let Some(lease) = user(&members, member) {
                return Err(needed(member, reason, &lease));
            }
            if !state.aside.contains(&member.lease_type) {
                let backend = &member.lease_type;
                tracing::warn!(
                    %backend, %reason,
                    "a backend is left out and tried again: nodes that offer only it are lost"
                );
            }
        }
        for (member, reason) in &ended {
            if !state.is_dropped(member) {
                self.log_end(settings, config, (member, target.kind(), reason));
                state.dropped.push(member.lease_type.clone());
            }
        }
        let rest = std::mem::replace(&mut state.kept, members.clone());
        state.kept.add(&aside);
        // Their devices are removed later.
        state.kept.add(rest.iter().chain(ended.iter().map(|(member, _)| member)));
        state.aside = aside.iter().map(|member| member.lease_type.clone()).collect();
        if state.kept != before
            && let Err(error) = self.write(&state.kept).await
        {
            tracing::warn!(
                path = %self.file.display(), %error,
                "a state file cannot be written (see --state-dir): if the network config names \
                 another backend before the next start, the network is replaced at once"
            );
        }
        *self.state() = state;
        let all: Vec<_> = members.by_use(lease_type).map(with).collect::<Result<_, Error>>()?;
        let aside = aside.iter().map(with).collect::<Result<_, Error>>()?;
        let mut take = |runs: &Runs| prepared.remove(&runs.member.lease_type);
        let prepared = all.iter().filter_map(&mut take).collect();
        Ok(Lineup { team: Team { all, members, aside, target }, prepared })
    }

    /// Logs that a backend ends because of the one of the config.
    fn log_end(
        &self,
        settings: &DaemonConfig,
        config: &Config,
        (member, to, reason): (&Member, &str, &str),
    ) {
        let from = &member.lease_type;
        let effect = if member.offered { REPLACED } else { "it is no longer run" };
        let known = devices(settings, config, member).is_some();
        let devices = if known { "" } else { "; its devices stay, because it is unknown" };
        tracing::warn!(%from, %to, %reason, "the old backend ends: {effect}{devices}");
    }

    /// The configs with the backends of the record, the preferred one first, and the other fields
    /// of `config`.
    pub(super) fn recorded(&self, config: &Config) -> Vec<Config> {
        let state = self.state();
        let members = state.kept.iter().filter(|member| !state.is_dropped(member));
        members.map(|it| Config { backend: it.backend.clone(), ..config.clone() }).collect()
    }

    /// What the recorded backends have, with the other fields of `config`.
    pub(super) fn held(&self, settings: &DaemonConfig, config: &Config) -> Held {
        let mut held = Held::default();
        for member in self.state().kept.iter() {
            let config = Config { backend: member.backend.clone(), ..config.clone() };
            held.links.extend(devices(settings, &config, member).unwrap_or_default());
            let inlets = settings.backends.datapath(&config).inlets;
            held.udp_ports.extend(inlets.iter().filter_map(|inlet| match inlet {
                Inlet::Udp(port) => Some(*port),
                _ => None,
            }));
        }
        held
    }

    /// Drops a backend that this node has never offered.
    pub(super) fn drop_unoffered(&self, target: &dyn Backend) {
        let mut state = self.state();
        let lease_type = member_type(target);
        let is_offered = state.kept.offered().any(|member| member.lease_type == lease_type);
        if !is_offered && !state.dropped.iter().any(|dropped| dropped == lease_type) {
            state.dropped.push(lease_type.to_owned());
        }
    }

    /// Waits until a backend that was left out can be set up, or is of no use to any node. Returns
    /// the reason for which the network must be rebuilt.
    pub(super) async fn revive(
        &self,
        (team, own): (&Team, Subnets),
        views: watch::Receiver<View>,
        prepare: impl AsyncFn(&Runs) -> Result<Prepared, Error>,
    ) -> String {
        if team.aside.is_empty() {
            return std::future::pending().await;
        }
        let mut unused_since = Instant::now();
        loop {
            sleep(AGAIN).await;
            for runs in &team.aside {
                if prepare(runs).await.is_ok() {
                    return format!("{} can be set up again", runs.member.lease_type);
                }
            }
            let view = views.borrow().clone();
            let user =
                |runs: &Runs| team.members.user_of(&runs.member.lease_type, (own, &view)).is_some();
            let is_live = matches!(view.origin, Origin::Live { .. });
            if !is_live || team.aside.iter().any(user) {
                unused_since = Instant::now();
            }
            if unused_since.elapsed() >= silence::UNUSED {
                let unused = kinds(team.aside.iter().map(|runs| &runs.member));
                let reason = format!("no node needs {}, which cannot be set up", unused.join(", "));
                self.state().dropped.extend(unused);
                return reason;
            }
        }
    }

    /// Waits until the next step of a move is due, and prepares it. Returns the reason for which
    /// the network must be rebuilt.
    pub(super) async fn next(
        &self,
        (team, own): (&Team, Subnets),
        (mut views, mut status, mut tunnels): Watched,
        kernel: &Arc<NetlinkKernel>,
        observer: &Observer,
    ) -> String {
        let target = member_type(team.target);
        let mut silence = Silence::new(kernel, team.withdrawn_devices());
        let mut logged = None;
        loop {
            let view = views.borrow_and_update().clone();
            let status_now = status.borrow_and_update().clone();
            let in_place = team.is_in_place(&status_now);
            let mut tunnels_now = tunnels.borrow_and_update().clone();
            // Of a peer that is not complete, one of two tunnels may be known.
            if !status_now.settled {
                tunnels_now = tunnels_now.map(|_| Tunnels::default());
            }
            let (tunnels_now, rejected) = (tunnels_now.as_ref(), &status_now.rejected);
            let seen = Seen { in_place, view: &view, own, tunnels: tunnels_now, rejected };
            let step = team.members.step(target, &seen);
            let Some(Step { next, leases, offering, .. }) = step else {
                return std::future::pending().await;
            };
            let (text, is_silent) = match &next {
                Ok(_) => (String::new(), false),
                Err(Wait::Silence) => silence.look().await,
                Err(wait) => (describe(wait, target), false),
            };
            let is_waiting = next == Err(Wait::Silence);
            if !is_waiting {
                silence.interrupt();
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
                        _ = tunnels.changed() => {}
                        () = sleep(PACE), if is_waiting => {}
                    }
                    sleep(PACE).await;
                }
            }
        }
    }

    /// Records the members of the next network. Those that were dropped stay in the file until
    /// their devices are gone.
    async fn take(&self, next: &NodeBackends) -> std::io::Result<()> {
        let _changes = self.changes.lock().await;
        let state = self.state().clone();
        let mut kept = next.clone();
        kept.add(state.kept.iter().filter(|member| state.is_not_run(member)));
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
            let mut gone = Vec::new();
            for member in state.kept.iter().filter(|member| state.is_dropped(member)) {
                let Some(mut links) = devices(settings, config, member) else { continue };
                links.retain(|link| !used.contains(link));
                let footprint = Footprint { links, ..Footprint::default() };
                let (kernel, origin) =
                    (Arc::clone(&kernel), format!("the earlier backend {}", member.lease_type));
                let removal = move || log_removal(&origin, cleanup(&*kernel, &footprint, false));
                if blocking(removal).await {
                    gone.push(member.lease_type.clone());
                }
            }
            let _changes = self.changes.lock().await;
            let mut next = self.state().clone();
            next.kept.retain(|member| !gone.contains(&member.lease_type));
            // The next start runs the others for a while, if it can, and removes them again.
            if !gone.is_empty() && self.write(&next.kept).await.is_ok() {
                next.dropped.retain(|dropped| !gone.contains(dropped));
                *self.state() = next;
            }
        }
        std::future::pending().await
    }

    async fn write(&self, kept: &NodeBackends) -> std::io::Result<()> {
        let (file, text) = (self.file.clone(), kept.to_json());
        run_blocking_in_order(move || state_dir::replace(&file, &text)).await
    }
}

/// A member with the other fields of `config`.
///
/// # Errors
/// It is not known, not allowed, or does not fit this node.
fn runs(
    settings: &DaemonConfig,
    member: &Member,
    (config, iface): (&Config, &ExternalInterface),
) -> Result<Runs, Error> {
    let config = Config { backend: member.backend.clone(), ..config.clone() };
    let backend = settings.backends.find(&config.backend.kind)?;
    if backend.runs_commands() && !settings.allow_commands {
        return Err(Error::CommandsNotAllowed { kind: backend.kind() });
    }
    backend.validate(&config, Some(iface))?;
    Ok(Runs { backend, config, member: member.clone() })
}

/// The error of a backend that cannot be set up, and that a node needs.
fn needed(member: &Member, reason: &str, lease: &Lease) -> Error {
    let (subnets, holder) = (lease.subnets, holder(&lease.attrs));
    let reason = format!(
        "{reason}; {subnets} of {holder} is reached only by it, so the network stays as it is"
    );
    Cause::Backend { backend: member.lease_type.clone(), reason }.into()
}

/// [`Member::lease_type`] of a backend.
fn member_type(backend: &dyn Backend) -> &'static str {
    match backend.lease_type() {
        "" => backend.kind(),
        lease_type => lease_type,
    }
}

/// The devices of a member; `None`: this version does not know the backend or its options.
fn devices(
    settings: &DaemonConfig,
    config: &Config,
    member: &Member,
) -> Option<BTreeSet<LinkName>> {
    let config = Config { backend: member.backend.clone(), ..config.clone() };
    settings.backends.known_footprint(&config, None).map(|footprint| footprint.links)
}

fn kinds<'a>(members: impl Iterator<Item = &'a Member>) -> Vec<String> {
    members.map(|member| member.lease_type.clone()).collect()
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
        Wait::Handshakes(blockers) => format!("handshakes of {target} with {}", names(blockers)),
        Wait::Withdrawal(blockers) => format!("the end of old offers of {}", names(blockers)),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use flannel_core::address::Dual;
    use flannel_core::object::{Link, Secret, Wireguard};
    use flannel_core::status::Failure;
    use flannel_core::testing::{FakeKernel, FakeSubnets};
    use flannel_subnet::DirLocation;
    use test_support::{Logged, eventually_async};

    use super::*;
    use crate::config::StoreConfig;

    fn config(kind: &str) -> Config {
        let text = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"KIND","PSK":"psk-4711"}}"#;
        Config::parse(&text.replace("KIND", kind)).unwrap()
    }

    fn settings() -> DaemonConfig {
        let location: DirLocation = "dir:/nowhere".parse().unwrap();
        DaemonConfig::new(StoreConfig::Directory(location))
    }

    fn iface() -> ExternalInterface {
        let address: Dual<_> = [[192, 0, 2, 1].into()].into_iter().collect();
        ExternalInterface {
            name: "eth0".parse().unwrap(),
            mtu: 1500,
            address,
            public: address,
            reason: "test".into(),
        }
    }

    async fn team(moving: &Moving, kind: &str) -> Team {
        lineup(moving, kind, "", None).await.unwrap()
    }

    /// The team of a node that cannot prepare the backend `broken`. `user` is the node that is
    /// reached only by a backend that is left out.
    async fn lineup(
        moving: &Moving,
        kind: &str,
        broken: &str,
        user: Option<Arc<Lease>>,
    ) -> Result<Team, Error> {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let prepare = async |runs: &Runs| {
            if runs.member.lease_type == broken {
                let (backend, reason) = (broken.to_owned(), "no such device".to_owned());
                return Err(Cause::Backend { backend, reason }.into());
            }
            Ok(Prepared::new(Default::default(), |_| unreachable!("nothing is built")))
        };
        let scene = (&settings(), &subnets as &dyn SubnetManager);
        let lineup =
            moving.lineup(scene, (&config(kind), &iface()), prepare, |_, _| user.clone()).await?;
        assert_eq!(lineup.prepared.len(), lineup.team.all.len());
        Ok(lineup.team)
    }

    fn names(team: &Team) -> String {
        let all = kinds(team.all.iter().map(|runs| &runs.member)).join(" ");
        let offers = kinds(team.members.offered()).join(" ");
        format!("{all} | {offers}")
    }

    #[tokio::test]
    async fn a_restart_runs_all_backends_that_were_offered() {
        let (dir, (logged, _guard)) = (tempfile::tempdir().unwrap(), Logged::collect());
        let moving = || Moving::open(dir.path());
        assert_eq!(names(&team(&moving(), "vxlan").await), "vxlan | vxlan");
        assert_eq!(names(&team(&moving(), "host-gw").await), "vxlan host-gw | vxlan");
        let first = moving();
        let members = team(&first, "host-gw").await.members;
        let next = NodeBackends::parse(&members.to_json().replace("false", "true")).unwrap();
        first.take(&next).await.unwrap();
        assert_eq!(names(&team(&moving(), "host-gw").await), "host-gw vxlan | vxlan host-gw");
        assert_eq!(names(&team(&moving(), "ipip").await), "vxlan host-gw ipip | vxlan host-gw");
        // A dropped one is kept in the file until its objects are gone.
        let last = moving();
        last.state().dropped.push("vxlan".to_owned());
        assert_eq!(names(&team(&last, "ipip").await), "host-gw ipip | host-gw");
        assert_eq!(names(&team(&moving(), "ipip").await), "host-gw ipip vxlan | host-gw");
        assert_eq!(logged.warnings(), [""; 0]);
        // A network that cannot run beside another one replaces it at once.
        assert_eq!(names(&team(&moving(), "alloc").await), "alloc | alloc");
        assert_eq!((logged.count("replaced at once"), logged.count("no longer run")), (1, 2));
        // Their devices are still there.
        assert_eq!(names(&team(&moving(), "vxlan").await), "vxlan host-gw ipip | vxlan");
        assert_eq!((logged.count("replaced at once"), logged.count("no longer run")), (2, 2));
    }

    #[tokio::test]
    async fn a_refused_backend_is_reported_once_and_leaves_no_device() {
        let (dir, (logged, _guard)) = (tempfile::tempdir().unwrap(), Logged::collect());
        let member = |kind| {
            let backend = serde_json::json!({ "Type": kind, "SubnetAddCommand": "true" });
            serde_json::json!({ "lease_type": kind, "offered": true, "backend": backend })
        };
        let backends = ["vxlan", "extension", "vlxan"].map(member);
        let text = serde_json::json!({ "backends": backends });
        fs::write(dir.path().join("backends"), text.to_string()).unwrap();
        let moving = Moving::open(dir.path());
        assert_eq!(names(&team(&moving, "host-gw").await), "vxlan host-gw | vxlan");
        assert_eq!(logged.count("replaced at once: nodes that"), 2);
        assert_eq!(logged.count("--allow-commands"), 1);
        assert_eq!((logged.count("\"vlxan\" is not"), logged.count("its devices stay")), (1, 1));
        let before = logged.warnings().len();
        let new = team(&moving, "host-gw").await;
        assert_eq!(logged.warnings().len(), before, "the network was only rebuilt");
        let alone = team(&moving, "alloc").await;
        let expected = ["vxlan host-gw | vxlan", "alloc | alloc"].map(str::to_owned);
        assert_eq!([names(&new), names(&alone)], expected);

        let (kernel, mut status) = (FakeKernel::with_uplink("eth0"), Status::default());
        for name in ["flannel.1", "flannel.2"] {
            let kind = Wireguard { key: Secret::new([7; 32]), port: 51820 }.into();
            let (name, mtu, up) = (name.parse().unwrap(), 1400, true);
            kernel.foreign_put(Link { name, mtu, up, kind }, 0);
        }
        (status.live, status.settled) = (true, true);
        let (_network, status) = watch::channel(Arc::new(status));
        let (there, settings) = (Arc::new(kernel.clone()), settings());
        let file = || fs::read_to_string(&moving.file).unwrap();
        let members = || kinds(NodeBackends::parse(&file()).unwrap().iter()).join(" ");
        // The record of an unknown backend stays for a version that knows it.
        // The file comes first.
        let done = async || members() == "alloc vlxan" && moving.state().dropped == ["vlxan"];
        tokio::select! {
            never = moving.clear((&settings, &alone), there, status) => match never {},
            () = eventually_async(Duration::from_secs(10), done, file) => {}
        }
        let devices = kernel.dump();
        assert!(devices.len() == 1 && devices[0].contains("flannel.2"), "{devices:?}");
    }

    #[tokio::test]
    async fn a_target_that_cannot_be_prepared_changes_nothing() {
        let (dir, (logged, _guard)) = (tempfile::tempdir().unwrap(), Logged::collect());
        let moving = Moving::open(dir.path());
        team(&moving, "vxlan").await;
        let read = || fs::read_to_string(dir.path().join("backends")).unwrap();
        let before = read();
        for kind in ["ipip", "udp", "alloc"] {
            let error = lineup(&moving, kind, kind, None).await.err().unwrap().to_string();
            assert!(error.contains("no such device"), "{error}");
            assert_eq!((read(), moving.state().dropped.len()), (before.clone(), 0), "{kind}");
        }
        assert_eq!(logged.warnings(), [""; 0]);
        assert_eq!(names(&team(&moving, "vxlan").await), "vxlan | vxlan");
    }

    /// A daemon of an earlier version records a backend before it sets it up.
    #[tokio::test]
    async fn a_recorded_backend_that_cannot_be_prepared_is_left_out_and_tried_again() {
        let (dir, (logged, _guard)) = (tempfile::tempdir().unwrap(), Logged::collect());
        let first = Moving::open(dir.path());
        team(&first, "vxlan").await;
        let members = team(&first, "ipip").await.members;
        let moving = || Moving::open(dir.path());
        let without = async |moving: &Moving, kind, broken| {
            let team = lineup(moving, kind, broken, None).await.unwrap();
            (names(&team), kinds(team.aside.iter().map(|runs| &runs.member)))
        };
        let expected = |names: &str, aside: &str| (names.to_owned(), vec![aside.to_owned()]);
        assert_eq!(without(&moving(), "vxlan", "ipip").await, expected("vxlan | vxlan", "ipip"));
        // The offered one.
        let next = NodeBackends::parse(&members.to_json().replace("false", "true")).unwrap();
        first.take(&next).await.unwrap();
        let last = moving();
        assert_eq!(without(&last, "ipip", "vxlan").await, expected("ipip | ipip", "vxlan"));
        assert_eq!(without(&last, "ipip", "vxlan").await, expected("ipip | ipip", "vxlan"));
        assert_eq!(logged.count("left out and tried again"), 2, "{:?}", logged.warnings());
        // It stays in the record, and runs again once it can.
        assert_eq!(names(&team(&moving(), "ipip").await), "ipip vxlan | ipip");
        assert_eq!(names(&team(&last, "ipip").await), "ipip vxlan | ipip");
    }

    #[tokio::test]
    async fn a_backend_that_a_node_needs_is_not_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let moving = Moving::open(dir.path());
        team(&moving, "vxlan").await;
        let read = || fs::read_to_string(dir.path().join("backends")).unwrap();
        let before = read();
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let lease = Arc::new(subnets.acquire_lease(&Default::default()).await.unwrap());
        let error = lineup(&moving, "host-gw", "vxlan", Some(lease)).await.err().unwrap();
        assert!(error.to_string().contains("is reached only by it"), "{error}");
        assert_eq!(read(), before);
    }

    #[tokio::test(start_paused = true)]
    async fn a_backend_that_was_left_out_is_revived_or_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let first = Moving::open(dir.path());
        team(&first, "vxlan").await;
        team(&first, "host-gw").await;
        let moving = Moving::open(dir.path());
        let team = lineup(&moving, "host-gw", "vxlan", None).await.unwrap();
        let (_views, views) = watch::channel(View {
            leases: Default::default(),
            origin: Origin::Live { revision: flannel_core::lease::Revision(1) },
        });
        let own = "10.1.7.0-24".parse().unwrap();
        let prepared = || Prepared::new(Default::default(), |_| unreachable!("nothing is built"));
        let works = async |_: &Runs| Ok(prepared());
        let reason = moving.revive((&team, own), views.clone(), works).await;
        assert_eq!(reason, "vxlan can be set up again");
        let fails = async |_: &Runs| Err(Error::Stopped("no".to_owned()));
        let begin = Instant::now();
        let reason = moving.revive((&team, own), views, fails).await;
        assert_eq!(reason, "no node needs vxlan, which cannot be set up");
        assert!(begin.elapsed() >= silence::UNUSED);
        assert_eq!(moving.state().dropped, ["vxlan"]);
    }

    /// Both have no type in leases.
    #[tokio::test]
    async fn a_change_from_udp_to_alloc_leaves_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let moving = Moving::open(dir.path());
        assert_eq!(names(&team(&moving, "udp").await), "udp | udp");
        assert_eq!(names(&team(&moving, "alloc").await), "alloc | alloc");
        let state = moving.state().clone();
        assert_eq!(
            (kinds(state.kept.iter()).join(" "), state.dropped),
            ("alloc udp".into(), vec!["udp".to_owned()])
        );
        assert_eq!(names(&team(&moving, "udp").await), "udp | udp");
        assert_eq!(moving.state().dropped, ["alloc"]);
    }

    #[tokio::test]
    async fn a_damaged_file_is_moved_aside_and_not_shown() {
        let (dir, (logged, _guard)) = (tempfile::tempdir().unwrap(), Logged::collect());
        drop(team(&Moving::open(dir.path()), "vxlan").await);
        let file = dir.path().join("backends");
        let damaged = fs::read_to_string(&file).unwrap().replace("offered", "ordered");
        assert!(damaged.contains("psk-4711"));
        fs::write(&file, &damaged).unwrap();
        assert_eq!(names(&team(&Moving::open(dir.path()), "host-gw").await), "host-gw | host-gw");
        let aside = dir.path().join("backends.damaged");
        assert_eq!(fs::read_to_string(aside).unwrap(), damaged);
        assert_eq!(logged.count("backends.damaged"), 1, "{:?}", logged.warnings());
        assert_eq!(logged.count("psk"), 0);
    }

    #[tokio::test]
    async fn only_devices_of_the_target_must_be_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let moving = Moving::open(dir.path());
        let old = team(&moving, "vxlan").await;
        let (new, mut status) = (team(&moving, "host-gw").await, Status::default());
        assert!(!new.is_in_place(&status), "not settled");
        status.settled = true;
        let device = flannel_core::object::Key::Link("flannel.1".parse().unwrap());
        let error = flannel_core::kernel::KernelError::new(95);
        let route = flannel_core::object::Route {
            dst: "10.1.1.0/24".parse().unwrap(),
            via: flannel_core::object::Via::LastResort,
            mtu: None,
        };
        let change = flannel_core::object::Change::Put(route.into());
        status.failing.insert(device, Failure::new(&change, None, error));
        assert!(new.is_in_place(&status) && !old.is_in_place(&status));
    }
}
