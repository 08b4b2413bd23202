//! Masquerade and forward rules of a running network, and the rules about encryption.
//!
//! **Source**: flannel `main.go`, for the cases in which their failure is fatal.

use std::convert::Infallible;

use flannel_core::Config;
use flannel_core::backend::Datapath;
use flannel_core::network::NetworkHandle;
use flannel_firewall::{Firewall, Mode, Options, Programs, RuleOptions, Rules, Status, cleanup};
use tokio::sync::watch;

use crate::config::FirewallConfig;
use crate::error::Error;
use crate::observe::Rulebook;

impl FirewallConfig {
    /// Whether rules are requested.
    fn wanted(&self, config: &Config) -> bool {
        self.masquerade || self.forward || config.require_encryption
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
    /// from the mode of `used`, if `config` requires encryption and `used` does not, and before the
    /// first lease if their absence is fatal.
    ///
    /// # Errors
    /// Rules cannot be made in that mode.
    pub(crate) async fn validate(
        &self,
        (config, datapath): (&Config, &Datapath),
        used: Option<&Config>,
        first: bool,
    ) -> Result<(), Error> {
        let has_other_rules = |used: &Config| {
            let is_encryption_new = config.require_encryption && !used.require_encryption;
            config.nftables != used.nftables || is_encryption_new
        };
        let has_other_rules = used.is_some_and(has_other_rules);
        if (self.wanted(config) && has_other_rules) || (self.masquerade && first) {
            self.open((config, datapath)).await?;
        }
        Ok(())
    }

    /// The state of the rules before [`FirewallConfig::keep`].
    pub(crate) fn rulebook(&self, config: &Config) -> Rulebook {
        if self.wanted(config) { Rulebook::Pending } else { Rulebook::Unwanted }
    }

    /// Keeps the rules in place, in the mode of the network config. Rules of the other mode are
    /// removed. `settled` becomes true when the rules are in place for the first time. Unless the
    /// config has `RequireEncryption`, it also becomes true when they cannot be made for now.
    /// `rulebook` gets their state.
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
        (config, datapath): (&Config, &Datapath),
        handle: &NetworkHandle,
        first: bool,
        (settled, rulebook): (watch::Sender<bool>, watch::Sender<Rulebook>),
    ) -> Result<Infallible, Error> {
        if !self.wanted(config) {
            // No rules are requested now, but an earlier run may have left some.
            cleanup(&Programs::default()).await.log();
            settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let networks = config.networks.map(|_, network| network.network);
        let own = handle.lease.subnets;
        let rules =
            Rules::new(&networks, &own.iter().collect(), &self.rule_options(config, datapath))?;
        // They do not change while a network runs.
        let (_desired, rules) = watch::channel(rules);
        let scene = (config, datapath);
        let firewall = match self.open(scene).await {
            Ok(firewall) => firewall,
            Err(error) if first && self.masquerade => return Err(error.into()),
            Err(error) => {
                let by_options = self.masquerade || self.forward_required;
                let requested = by_options || config.require_encryption;
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
                let remedy = error.remedy();
                rulebook.send_replace(Rulebook::Missing { why: why.clone(), remedy, requested });
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
