//! Masquerade and forward rules of a running network, and the rules about encryption.
//!
//! **Source**: flannel `main.go`, for the cases in which their failure is fatal.

use std::convert::Infallible;

use flannel_core::backend::Datapath;
use flannel_core::{Config, Subnets};
use flannel_firewall::{Firewall, Mode, Options, Programs, RuleOptions, Rules, Status, cleanup};
use tokio::sync::watch;

use super::Ended;
use crate::config::FirewallConfig;
use crate::error::Error;
use crate::observe::FirewallRules;

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
        config: &Config,
        datapath: &Datapath,
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
        config: &Config,
        datapath: &Datapath,
        used: Option<&Config>,
        first: bool,
    ) -> Result<(), Error> {
        let has_other_rules = |used: &Config| {
            let is_encryption_new = config.require_encryption && !used.require_encryption;
            config.nftables != used.nftables || is_encryption_new
        };
        let has_other_rules = used.is_some_and(has_other_rules);
        if (self.wanted(config) && has_other_rules) || (self.masquerade && first) {
            self.open(config, datapath).await?;
        }
        Ok(())
    }

    /// The state of the rules before [`FirewallController::run`].
    pub(crate) fn firewall_rules(&self, config: &Config) -> FirewallRules {
        if self.wanted(config) { FirewallRules::Pending } else { FirewallRules::Unwanted }
    }
}

/// Keeps the firewall rules of a network in place, in the mode of its config. Rules of the other
/// mode are removed.
pub(crate) struct FirewallController<'a> {
    pub(crate) options: &'a FirewallConfig,
    pub(crate) config: &'a Config,
    pub(crate) datapath: &'a Datapath,
    pub(crate) own: Subnets,
    /// The subnets of a lapsed lease may be another node's, so rules are only made for them if they
    /// are required.
    pub(crate) lapsed: bool,
    /// It is the first network of the daemon.
    pub(crate) first: bool,
    /// Becomes true when the rules are in place for the first time. Unless the config has
    /// `RequireEncryption`, it also becomes true when they cannot be made for now.
    pub(crate) settled: watch::Sender<bool>,
    /// Gets the state of the rules.
    pub(crate) state: watch::Sender<FirewallRules>,
}

impl FirewallController<'_> {
    /// Runs until masquerading is requested, cannot be done, and this is the daemon's first
    /// network. Later, or if only forward rules are requested, this is not an error and is retried
    /// every `--iptables-resync` seconds.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the rules in place.
    pub(crate) async fn run(self) -> Ended {
        if self.lapsed && !self.config.require_encryption {
            return std::future::pending().await;
        }
        match self.keep().await {
            Ok(never) => match never {},
            Err(error) => Ended::Failed(error.into()),
        }
    }

    async fn keep(&self) -> Result<Infallible, flannel_firewall::Error> {
        let Self { options, config, datapath, .. } = *self;
        if !options.wanted(config) {
            // No rules are requested now, but an earlier run may have left some.
            cleanup(&Programs::default()).await.log();
            self.settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let networks = config.networks.map(|_, network| network.network);
        let own = self.own.iter().collect();
        let rules = Rules::new(&networks, &own, &options.rule_options(config, datapath))?;
        // They do not change while a network runs.
        let (_desired, rules) = watch::channel(rules);
        let firewall = match options.open(config, datapath).await {
            Ok(firewall) => firewall,
            Err(error) if self.first && !self.lapsed && options.masquerade => return Err(error),
            Err(error) => self.open_later(error).await,
        };
        let status = firewall.status();
        self.state.send_replace(FirewallRules::Kept(status.clone()));
        tokio::select! {
            never = firewall.run(rules) => match never {},
            never = self.settle(status) => match never {},
        }
    }

    /// Tries to open the firewall until that succeeds, after the first attempt failed with `error`.
    /// Each reason is logged once.
    async fn open_later(&self, mut error: flannel_firewall::Error) -> Firewall {
        let Self { options, config, datapath, .. } = *self;
        let by_options = options.masquerade || options.forward_required;
        // Otherwise they are only the default.
        let requested = by_options || config.require_encryption;
        let mut logged = None;
        loop {
            let why = error.to_string();
            if logged.as_ref() != Some(&why) {
                tracing::warn!(error = %why, "the firewall rules cannot be made, retrying");
                let remedy = error.remedy();
                let missing = FirewallRules::Missing { why: why.clone(), remedy, requested };
                self.state.send_replace(missing);
                if !config.require_encryption {
                    self.settled.send_replace(true);
                }
                logged = Some(why);
            }
            tokio::time::sleep(options.resync).await;
            match options.open(config, datapath).await {
                Ok(firewall) => return firewall,
                Err(again) => error = again,
            }
        }
    }

    /// Notes that the rules are in place for the first time, or cannot be made if they are not
    /// required. The firewall itself logs later changes.
    async fn settle(&self, mut status: watch::Receiver<Status>) -> Infallible {
        let required = self.config.require_encryption;
        let is_settled = |now: &Status| now.in_place || (now.failure.is_some() && !required);
        if status.wait_for(is_settled).await.is_ok() {
            self.settled.send_replace(true);
        }
        std::future::pending().await
    }
}
