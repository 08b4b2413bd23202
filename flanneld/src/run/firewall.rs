//! Masquerade and forward rules of a running network, the rules about encryption, and the gate of
//! its tunnel.
//!
//! **Source**: flannel `main.go`, for the cases in which their failure is fatal.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::Config;
use flannel_core::address::Dual;
use flannel_core::backend::{Datapath, Inlet};
use flannel_core::network::NetworkHandle;
use flannel_firewall::{
    Firewall, Gate, Mode, Options, Programs, RuleOptions, Rules, Status, cleanup,
};
use tokio::sync::watch;

use super::tunnel_peers::TunnelPeers;

use crate::config::FirewallConfig;
use crate::error::Error;
use crate::observe::Rulebook;

impl FirewallConfig {
    /// Whether rules are requested.
    fn wanted(&self, config: &Config) -> bool {
        self.masquerade || self.forward || config.require_encryption
    }

    /// The IP protocols of the tunnel that a gate guards. They have no ports, and Linux takes their
    /// packets from every host.
    fn guarded(&self, config: &Config, datapath: &Datapath) -> Vec<u8> {
        if config.nftables { self.to_guard(datapath) } else { Vec::new() }
    }

    /// The same for protocols that no gate guards, because the rules are in iptables.
    pub(crate) fn unguarded(&self, config: &Config, datapath: &Datapath) -> Vec<u8> {
        if config.nftables { Vec::new() } else { self.to_guard(datapath) }
    }

    fn to_guard(&self, datapath: &Datapath) -> Vec<u8> {
        let protocol = |inlet: &Inlet| if let Inlet::Protocol(n) = inlet { Some(*n) } else { None };
        datapath.inlets.iter().filter_map(protocol).filter(|_| self.tunnel_peers_only).collect()
    }

    fn rule_options(&self, config: &Config, datapath: &Datapath) -> RuleOptions {
        let Self { masquerade, fully_random, forward, .. } = *self;
        let encrypted = || datapath.encrypted.iter().copied().collect();
        let encrypted = config.require_encryption.then(encrypted);
        RuleOptions { masquerade, fully_random, forward, encrypted }
    }

    /// Opens the kernel's firewall that the network config names.
    async fn open(
        &self,
        (config, datapath): (&Config, &Datapath),
    ) -> Result<Firewall, flannel_firewall::Error> {
        let mode = if config.nftables { Mode::Nftables } else { Mode::Iptables };
        let options = Options { resync: self.resync, ..Options::default() };
        Firewall::open(mode, &self.rule_options(config, datapath), options).await
    }

    /// Checks that rules can be made in the mode of `config` (nftables or iptables): if it differs
    /// from the mode of `used`, and before the first lease if their absence is fatal.
    ///
    /// # Errors
    /// Rules cannot be made in that mode.
    pub(crate) async fn validate(
        &self,
        (config, datapath): (&Config, &Datapath),
        used: Option<&Config>,
        first: bool,
    ) -> Result<(), Error> {
        let other_mode = used.is_some_and(|used| config.nftables != used.nftables);
        let wanted = self.wanted(config) || !self.guarded(config, datapath).is_empty();
        if (wanted && other_mode) || (self.masquerade && first) {
            self.open((config, datapath)).await?;
        }
        Ok(())
    }

    /// The state of the rules before [`FirewallConfig::keep`].
    pub(crate) fn rulebook(&self, config: &Config, datapath: &Datapath) -> Rulebook {
        let guarded = !self.guarded(config, datapath).is_empty();
        if self.wanted(config) || guarded { Rulebook::Pending } else { Rulebook::Unwanted }
    }

    /// Keeps the rules in place, in the mode of the network config. Rules of the other mode are
    /// removed. `settled` becomes true when the rules are in place for the first time. Unless the
    /// config has `RequireEncryption`, it also becomes true when they cannot be made for now.
    /// `rulebook` gets their state. `local` are the addresses at which a tunnel ends.
    ///
    /// # Errors
    /// Masquerading is requested, cannot be done, and this is the daemon's first network. Later, or
    /// if only forward rules are requested, this is no error and is retried every
    /// `--iptables-resync` seconds.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the rules in place.
    pub(crate) async fn keep(
        &self,
        (config, datapath, local): (&Config, &Datapath, Dual<IpAddr>),
        handle: &NetworkHandle,
        first: bool,
        (settled, rulebook): (watch::Sender<bool>, watch::Sender<Rulebook>),
    ) -> Result<Infallible, Error> {
        let protocols = self.guarded(config, datapath);
        if !self.wanted(config) && protocols.is_empty() {
            // No rules are requested now, but an earlier run may have left some.
            cleanup(&Programs::default()).await.log();
            settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let networks = config.networks.map(|_, network| network.network);
        let own = handle.lease.subnets;
        let plain =
            Rules::new(&networks, &own.iter().collect(), &self.rule_options(config, datapath))?;
        let gate = Gate { protocols, local, ..Gate::default() };
        let guards = !gate.protocols.is_empty();
        let first_rules =
            if guards { plain.clone().with_gate(gate.clone()) } else { plain.clone() };
        let (desired, rules) = watch::channel(first_rules);
        let scene = (config, datapath);
        let firewall = match self.open(scene).await {
            Ok(firewall) => firewall,
            Err(error) if first && self.masquerade => return Err(error.into()),
            Err(error) => {
                let by_options = self.masquerade || self.forward_required;
                let requested = by_options || config.require_encryption || guards;
                let must_be_there = config.require_encryption;
                let gives_up = Some(&settled).filter(|_| !must_be_there);
                self.open_later(scene, (error, requested), gives_up, &rulebook).await
            }
        };
        let status = firewall.status();
        rulebook.send_replace(Rulebook::Kept(status.clone()));
        tokio::select! {
            never = firewall.run(rules) => match never {},
            never = settle(status, config.require_encryption, settled) => match never {},
            never = guard(handle, &gate, &plain, &desired), if guards => match never {},
        }
    }

    /// Tries to open the firewall until that succeeds, after the first attempt failed with `error`.
    /// Each reason is logged once. `requested`: the rules are not only the default. `settled` gets
    /// true after a failure.
    async fn open_later(
        &self,
        scene: (&Config, &Datapath),
        (mut error, requested): (flannel_firewall::Error, bool),
        settled: Option<&watch::Sender<bool>>,
        rulebook: &watch::Sender<Rulebook>,
    ) -> Firewall {
        let mut logged = None;
        loop {
            let why = error.to_string();
            if logged.as_ref() != Some(&why) {
                tracing::warn!(error = %why, "the firewall rules cannot be made, retrying");
                let cure = error.cure();
                rulebook.send_replace(Rulebook::Missing { why: why.clone(), cure, requested });
                settled.map(|settled| settled.send_replace(true));
                logged = Some(why);
            }
            tokio::time::sleep(self.resync).await;
            match self.open(scene).await {
                Ok(firewall) => return firewall,
                Err(again) => error = again,
            }
        }
    }
}

/// Gives the gate the accepted peers.
async fn guard(
    handle: &NetworkHandle,
    gate: &Gate,
    plain: &Rules,
    desired: &watch::Sender<Rules>,
) -> Infallible {
    let (mut status, mut peers) = (handle.status.clone(), TunnelPeers::default());
    loop {
        let now = Arc::clone(&status.borrow_and_update());
        let peers = peers.update(&now, handle.lease.subnets).clone();
        let rules = Gate { peers, complete: now.live, ..gate.clone() };
        let rules = plain.clone().with_gate(rules);
        desired.send_if_modified(|old| {
            let differs = *old != rules;
            *old = rules;
            differs
        });
        if status.changed().await.is_err() {
            break;
        }
    }
    std::future::pending().await
}

/// Sets `settled` when the rules are in place for the first time, or cannot be made if they are not
/// `required`. The firewall itself logs later changes.
async fn settle(
    mut status: watch::Receiver<Status>,
    required: bool,
    settled: watch::Sender<bool>,
) -> Infallible {
    let is_settled = |now: &Status| now.in_place || (now.failure.is_some() && !required);
    if status.wait_for(is_settled).await.is_ok() {
        settled.send_replace(true);
    }
    std::future::pending().await
}
