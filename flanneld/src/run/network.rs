//! Runs one network, from its start until one of the values that it was built from changes.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::lease::{Origin, View};
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::remedy::Trouble;
use flannel_core::status::Status;
use flannel_core::{Config, Kernel, SubnetManager, Subnets};
use flannel_doctor::checks::host::log_changes;
use flannel_doctor::path_probe::server;
use flannel_doctor::paths::probe;
use flannel_route::moving::Tunnels;
use flannel_subnet::SubnetEnv;
use tokio::sync::watch;

use super::changed_config::to_apply;
use super::leftovers::go_flannel::GoFlannel;
use super::leftovers::old_networks::OldNetworks;
use super::leftovers::old_records;
use super::moving::handshakes::follow;
use super::moving::{Devices, Runs};
use super::plain_routes::until_ruled;
use super::probation::{failure, until_in_place};
use super::refusals::Refused;
use super::start::{Before, Purpose, Ready, Starter, prepare, stored};
use super::status_log::log_status;
use crate::blocking::run_blocking_in_order;
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::Observer;
use crate::report::host;
use crate::store::wait::{STORE_AGAIN, hold};

/// The pause before the daemon checks again whether a network can be built.
const SECOND_THOUGHT: Duration = Duration::from_secs(10);
/// The longest wait of the subnet file for firewall rules and the tunnel. Another program may hold
/// the lock of iptables. The rule of `RequireEncryption` is awaited for any time.
const RULES: Duration = Duration::from_secs(5);
/// The pause between two checks of this host.
const LOOK: Duration = Duration::from_secs(300);

/// The end of a network.
enum End {
    /// The next network is built, and this one has run until now.
    Replaced(Box<Ready>),
    /// It has stopped, and must be rebuilt for this reason.
    Stopped(String),
}

/// Runs a network until the next one is built, because a value that it was built from has changed.
/// Returns the next one.
///
/// # Errors
/// The network stops, or the lease is lost.
pub(super) async fn run(
    settings: &DaemonConfig,
    subnets: &dyn SubnetManager,
    ready: Ready,
    (starter, go_flannel): (&Starter<'_>, &GoFlannel),
    observer: &Observer,
) -> Result<Ready, Error> {
    let held = (!ready.lapsed).then(|| ready.network.handle().lease);
    let next = async |reason: String| {
        tracing::info!(%reason, "rebuilding the network");
        Box::pin(starter.next(held.as_ref(), observer)).await
    };
    let end = run_until_next(settings, subnets, ready, (starter, go_flannel), observer, &next);
    // A large future, of which each caller would have a copy on its stack.
    match Box::pin(end).await? {
        End::Replaced(ready) => Ok(*ready),
        End::Stopped(reason) => next(reason).await,
    }
}

async fn run_until_next(
    settings: &DaemonConfig,
    subnets: &dyn SubnetManager,
    ready: Ready,
    (starter, go_flannel): (&Starter<'_>, &GoFlannel),
    observer: &Observer,
    next: impl AsyncFn(String) -> Result<Ready, Error>,
) -> Result<End, Error> {
    warn_if_stale(subnets, &ready.views.borrow());
    let (settled, rules) = watch::channel(false);
    let datapath = ready.team.datapath(settings);
    let (book, rulebook) = watch::channel(settings.firewall.rulebook(&ready.config));
    let running = ready.running(settings, rulebook);
    let probes = running.probes(&settings.control);
    let responder = server::serve(running.probe_server(settings.control.doctor_port));
    let _running = observer.running(running);
    let Ready { config, refused, before, team, moving, network, paths, views, .. } = ready;
    let Ready { handshakes, lapsed, cached, first, chosen, validator, .. } = ready;
    let (handle, withholds_offers) = (network.handle(), network.withholds_offers());
    let own = handle.lease.subnets;
    let tunnel_devices =
        if network.needs_handshakes() { team.handshakes_on(settings) } else { BTreeSet::new() };
    let no_look_yet = (!tunnel_devices.is_empty()).then(Tunnels::default);
    let (tunnels, seen_tunnels) = watch::channel(no_look_yet);
    let firewall = async {
        // The subnets of a lapsed lease may be another node's.
        if lapsed && !config.require_encryption {
            return Ok(std::future::pending().await);
        }
        let scene = (&config, &datapath);
        settings.firewall.keep(scene, &handle, first && !lapsed, (settled, book)).await
    };
    let probing = async {
        match &paths {
            Some(paths) => probe(&probes, handle.clone(), paths).await,
            None => std::future::pending().await,
        }
    };
    let looks = look(observer, rules.clone());
    let validate = async |to: &Config| {
        let tried = starter.try_out(&validator, to, Purpose::Use).await;
        let refused = match &tried {
            Err(error) if error.is_of_store() => return tried,
            Err(error) => Some(Refused { config: to.clone(), reason: error.to_string() }),
            Ok(()) => None,
        };
        starter.refusals.set(refused);
        tried
    };
    let ask = async |to: &Config| starter.try_out(&validator, to, Purpose::Question).await;
    // The next network may be built from another config.
    let validate_again = async || {
        let next = stored(subnets, Some(&config)).await?;
        validator.usable(next, Some(&config)).await.map(drop)
    };
    let write =
        async || publish(settings, &config, &handle, rules.clone(), (go_flannel, observer)).await;
    let restore = async || {
        if lapsed {
            return std::future::pending().await;
        }
        SubnetEnv::restore(&settings.subnet_file, &write).await
    };
    let hold = async {
        if lapsed {
            return until_live(subnets, own, views.clone(), &validate_again, observer).await;
        }
        write().await?;
        tracing::info!(
            lease = %own, backend = team.target.kind(), mtu = handle.mtu,
            subnet_file = %settings.subnet_file.display(), "running"
        );
        tokio::select! {
            reason = hold(subnets, &handle.lease) => reason,
            failed = restore() => match failed? {},
        }
    };
    let uplink = chosen.iface.name;
    let (kernel, footprint) = (chosen.kernel.clone(), team.footprint(Some(uplink))?);
    let routes = async {
        if config.require_encryption {
            let kernel = chosen.kernel.clone() as Arc<dyn Kernel>;
            until_ruled(&kernel, (&footprint, &datapath.encrypted), rules.clone()).await;
        }
        network.run(views.clone()).await
    };
    let old_networks = OldNetworks::record(&settings.state_dir, &config).await;
    let status = || handle.status.clone();
    let tunnel_kernel = chosen.kernel.clone();
    let read_tunnel = move |link| tunnel_kernel.tunnel(link);
    let host = starter.host(&chosen.iface);
    let retry = async |runs: &Runs| prepare(&host, runs).await;
    let devices = |status: &Status| team.devices(status);
    let works = async {
        if until_in_place(&devices, status()).await {
            starter.works(&config).await;
        }
        std::future::pending().await
    };
    let falls_back = async {
        match before {
            Before::Earlier => failure(&devices, status()).await,
            Before::Nothing => std::future::pending().await,
        }
    };
    let events = async {
        tokio::select! {
            never = old_networks.clear(kernel.clone(), footprint.clone(), status()) =>
                match never {},
            never = old_records::clear(kernel.clone(), (settings, &team, &moving), status()) =>
                match never {},
            never = moving.clear((settings, &team), kernel.clone(), status()) => match never {},
            never = go_flannel.clear(kernel.clone(), (footprint.clone(), &config), status()) =>
                match never {},
            reason = moving.next(
                (&team, own), (views.clone(), status(), seen_tunnels), &chosen.kernel, observer
            ) => Ok(reason),
            reason = moving.revive((&team, own), views.clone(), retry) => Ok(reason),
            never = works => never,
            reason = falls_back => {
                moving.drop_unoffered(team.target);
                let reason = starter.refusals.failed(&config, &reason, observer.reloads());
                Ok(format!("back to the config before: {reason}"))
            }
            reason = publish_offers(withholds_offers, before, &devices, status()) => Ok(reason),
            reason = hold => reason,
            reason = to_apply(subnets, (&config, cached), refused, &validate, observer) => reason,
            reason = chosen.changed(&config, &validate_again, observer) => Ok(reason),
        }
    };
    let replaced = async {
        let reason = events.await?;
        // It may take long, because of a store that does not answer.
        tokio::select! {
            ready = next(reason) => ready.map(|ready| End::Replaced(Box::new(ready))),
            failed = restore() => match failed? {},
        }
    };
    tokio::select! {
        never = follow(read_tunnel, tunnel_devices, (handshakes, tunnels)) => match never {},
        ended = routes => match ended? {
            Ended::Rebuild(reason) => Ok(End::Stopped(reason)),
            ended => Err(Error::Stopped(format!("{ended:?}"))),
        },
        end = replaced => end,
        never = observer.answer_trials(ask) => match never {},
        never = firewall => match never? {},
        never = log_status(status()) => match never {},
        never = observer.follow(views.clone()) => match never {},
        never = looks => match never {},
        never = responder => match never {},
        never = probing => match never {},
    }
}

/// Waits until this node's devices have its new keys, if its lease has the old ones. Returns the
/// reason for which the network must be rebuilt.
async fn publish_offers(
    withheld: bool,
    before: Before,
    devices: impl Fn(&Status) -> Devices,
    mut status: watch::Receiver<Arc<Status>>,
) -> String {
    if !withheld {
        return std::future::pending().await;
    }
    if before == Before::Earlier {
        // If the devices cannot be made, this node goes back, and no peer needs the keys.
        until_in_place(devices, status.clone()).await;
    }
    // If another object of this node cannot be put, peers must still learn the new keys.
    let in_place = status.wait_for(|status| status.own_in_place);
    drop(tokio::time::timeout(RULES, in_place).await);
    "the devices have the new keys of this node, which its lease gets now".to_owned()
}

/// Waits until the store answers and a network with a lease can be built. Returns the reason.
async fn until_live(
    subnets: &dyn SubnetManager,
    own: Subnets,
    mut views: watch::Receiver<View>,
    validate: impl AsyncFn() -> Result<(), Error>,
    observer: &Observer,
) -> Result<String, Error> {
    tracing::warn!(
        lease = %own, store = %subnets.store_status().store,
        "this node's lease has run out: until the store answers, routes to peers stay in place, \
         and its own subnet is not set up"
    );
    if views.wait_for(|view| matches!(view.origin, Origin::Live { .. })).await.is_err() {
        // The watch has ended, which the network reports.
        std::future::pending::<()>().await;
    }
    let mut logged = None;
    while let Err(error) = validate().await {
        // The store may fail again, which is reported elsewhere.
        let gone = error.is_of_store();
        let why = (!gone).then(|| error.to_string());
        if let Some(why) = why.as_ref().filter(|why| logged.as_ref() != Some(*why)) {
            tracing::warn!(
                error = %why,
                "the store answers, but no lease is requested, because no network could be built"
            );
        }
        let remedy = error.remedy(&subnets.store_status().kind);
        let trouble = why.clone().map(|why| Trouble::new(why, remedy));
        observer.note(|facts| facts.waits_for = trouble);
        logged = why.or(logged);
        tokio::time::sleep(if gone { STORE_AGAIN } else { SECOND_THOUGHT }).await;
    }
    Ok("the store answers, so a lease can be requested".to_owned())
}

/// Writes the subnet file, so that pods can start, after the rules and the tunnel are in place.
/// With the bridge of the pods before the tunnel, Linux would treat the tunnel's IPv6 address as
/// the anycast address of the bridge's subnet, which accepts no TCP connection.
async fn publish(
    settings: &DaemonConfig,
    config: &Config,
    handle: &NetworkHandle,
    rules: watch::Receiver<bool>,
    (go_flannel, observer): (&GoFlannel, &Observer),
) -> Result<(), Error> {
    rules_and_tunnel(config.require_encryption, rules, handle.status.clone()).await;
    let env = SubnetEnv {
        networks: config.pod_networks().collect(),
        subnets: handle.lease.subnets.iter().collect(),
        mtu: handle.mtu,
        ip_masq: settings.firewall.masquerade,
    };
    let (path, go_flannel) = (settings.subnet_file.clone(), go_flannel.clone());
    run_blocking_in_order(move || env.write_atomic(&path).map(|()| go_flannel.wrote_subnet_file()))
        .await?;
    observer.note(|facts| facts.subnet_file = true);
    Ok(())
}

/// Waits until the rules and the tunnel are in place, for a limited time. Rules that are `required`
/// are awaited for any time.
async fn rules_and_tunnel(
    required: bool,
    mut rules: watch::Receiver<bool>,
    mut status: watch::Receiver<Arc<Status>>,
) {
    if required && rules.wait_for(|settled| *settled).await.is_err() {
        // The firewall has ended, which ends the network.
        std::future::pending::<()>().await;
    }
    // The results are dropped at once, because they lock the channels for their senders.
    let there = async {
        drop(rules.wait_for(|settled| *settled).await);
        drop(status.wait_for(|status| status.own_in_place).await);
    };
    let _ = tokio::time::timeout(RULES, there).await;
}

/// Looks for findings about this host, for the first time when the firewall rules are in place or
/// cannot be. Logs changes.
async fn look(observer: &Observer, mut rules: watch::Receiver<bool>) -> Infallible {
    let _ = tokio::time::timeout(RULES, rules.wait_for(|settled| *settled)).await;
    loop {
        let snapshot = observer.snapshot().with_traffic().await;
        let findings = host::look(&snapshot, observer.legacy()).await.findings;
        log_changes(&snapshot.facts.findings, &findings, snapshot.deployment());
        observer.note(|facts| facts.findings = findings);
        tokio::time::sleep(LOOK).await;
    }
}

/// Logs that the leases are those of an earlier run.
fn warn_if_stale(subnets: &dyn SubnetManager, view: &View) {
    let status = subnets.store_status();
    if let (Origin::Cached { written: Some(written) }, None) = (view.origin, status.confirmed) {
        let age_seconds = written.elapsed().unwrap_or_default().as_secs();
        tracing::warn!(
            leases = view.leases.len(), age_seconds, store = %status.store,
            "stale: leases from the cache are put in place; nothing is deleted until the store \
             answers"
        );
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Missing firewall rules or a missing tunnel delay pods for a limited time.
    #[tokio::test(start_paused = true)]
    async fn the_wait_for_rules_and_tunnel_has_a_time_limit() {
        for (settled, tunnel) in [(true, true), (true, false), (false, true), (false, false)] {
            let (_rulebook, rules) = watch::channel(settled);
            let mut status = Status::default();
            status.own_in_place = tunnel;
            let (_network, status) = watch::channel(Arc::new(status));
            let start = Instant::now();
            let wait = rules_and_tunnel(false, rules, status);
            tokio::time::timeout(2 * RULES, wait).await.unwrap();
            let (took, due) =
                (start.elapsed(), if settled && tunnel { Duration::ZERO } else { RULES });
            assert!(due <= took && took < due + RULES, "{settled} {tunnel}: {took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_ends_when_rules_and_tunnel_are_in_place() {
        let (rulebook, rules) = watch::channel(false);
        let (network, status) = watch::channel(Arc::new(Status::default()));
        let start = Instant::now();
        let changes = async {
            tokio::time::sleep(RULES / 4).await;
            rulebook.send(true).unwrap();
            tokio::time::sleep(RULES / 4).await;
            network.send_modify(|status| Arc::make_mut(status).own_in_place = true);
        };
        tokio::join!(rules_and_tunnel(false, rules, status), changes);
        assert!(start.elapsed() < RULES * 3 / 4, "{:?}", start.elapsed());
    }

    /// Until then, packets of pods could leave unencrypted.
    #[tokio::test(start_paused = true)]
    async fn required_rules_are_awaited_for_any_time() {
        let (rulebook, rules) = watch::channel(false);
        let mut status = Status::default();
        status.own_in_place = true;
        let (_network, status) = watch::channel(Arc::new(status));
        let wait = rules_and_tunnel(true, rules, status);
        tokio::pin!(wait);
        tokio::time::timeout(1_000 * RULES, &mut wait).await.unwrap_err();
        rulebook.send(true).unwrap();
        tokio::time::timeout(RULES / 2, wait).await.unwrap();
    }
}
