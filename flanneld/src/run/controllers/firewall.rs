//! Masquerade and forward rules of a running network, and the rules about encryption.
//!
//! **Source**: flannel `main.go`, for the cases in which their failure is fatal.

use std::convert::Infallible;

use flannel_core::address::Dual;
use flannel_core::backend::Datapath;
use flannel_core::{Config, Subnet, Subnets};
use flannel_firewall::{
    Firewall, Masquerade, Mode, Options, Programs, RuleOptions, Rules, Status, cleanup_networks,
};
use tokio::sync::watch;

use super::Ended;
use crate::config::FirewallConfig;
use crate::error::Error;
use crate::observe::FirewallRules;

impl FirewallConfig {
    /// Whether rules are requested.
    fn wanted(&self, config: &Config) -> bool {
        self.masquerade.is_any() || self.forward || config.require_encryption
    }

    fn rule_options(&self, config: &Config, datapath: &Datapath) -> RuleOptions {
        let masquerade = Dual::from_fn(|family| {
            self.masquerade.has(family).then(|| Masquerade {
                fully_random: self.fully_random,
                exclude: self.excluded(&config.masquerade_exclude),
                source: self.masquerade_source[family],
                ports: self.masquerade_ports,
                devices: self.masquerade_devices.clone(),
            })
        });
        let encrypted = || datapath.encrypted.iter().copied().collect();
        let encrypted = config.require_encryption.then(encrypted);
        RuleOptions { masquerade, forward: self.forward, encrypted }
    }

    /// The networks to which packets are not masqueraded: those of the options, and those of the
    /// network config that the options lack.
    pub(crate) fn excluded(&self, of_config: &[Subnet]) -> Vec<Subnet> {
        let mut all = self.masquerade_exclude.clone();
        for subnet in of_config {
            if !all.contains(subnet) {
                all.push(*subnet);
            }
        }
        all
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
        if (self.wanted(config) && has_other_rules) || (self.masquerade.is_any() && first) {
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
    /// The exclusions from masquerading of the config, which may change while the network runs.
    pub(crate) excluded: watch::Receiver<Vec<Subnet>>,
    /// Pod networks of earlier runs. The rules for them are removed, and the rules for all others
    /// are of other daemons.
    pub(crate) former: Vec<Subnet>,
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
            let networks: Vec<_> =
                config.pod_networks().chain(self.former.iter().copied()).collect();
            cleanup_networks(&Programs::default(), &networks, false).await.log();
            self.settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let mut excluded = self.excluded.clone();
        let (desired, rules) = watch::channel(self.rules(&excluded.borrow_and_update())?);
        let firewall = match options.open(config, datapath).await {
            Ok(firewall) => firewall,
            Err(error) if self.first && !self.lapsed && options.masquerade.is_any() => {
                return Err(error);
            }
            Err(error) => self.open_later(error).await,
        };
        let status = firewall.status();
        self.state.send_replace(FirewallRules::Kept(status.clone()));
        tokio::select! {
            never = firewall.run(rules) => match never {},
            never = self.settle(status) => match never {},
            never = self.follow(excluded, &desired) => match never {},
        }
    }

    /// The rules with these exclusions of the config.
    fn rules(&self, excluded: &[Subnet]) -> Result<Rules, flannel_firewall::Error> {
        let Self { options, config, datapath, .. } = *self;
        let config = Config { masquerade_exclude: excluded.to_vec(), ..config.clone() };
        let networks = config.networks.map(|_, network| network.network);
        let own = self.own.iter().collect();
        let rules = Rules::new(&networks, &own, &options.rule_options(&config, datapath))?;
        Ok(rules.with_former(self.former.iter().copied()))
    }

    /// Follows the exclusions of the network config.
    async fn follow(
        &self,
        mut excluded: watch::Receiver<Vec<Subnet>>,
        desired: &watch::Sender<Rules>,
    ) -> Infallible {
        while excluded.changed().await.is_ok() {
            match self.rules(&excluded.borrow_and_update()) {
                Ok(rules) => _ = desired.send_replace(rules),
                Err(error) => tracing::warn!(%error, "the exclusions are not used"),
            }
        }
        std::future::pending().await
    }

    /// Tries to open the firewall until that succeeds, after the first attempt failed with `error`.
    /// Each reason is logged once.
    async fn open_later(&self, mut error: flannel_firewall::Error) -> Firewall {
        let Self { options, config, datapath, .. } = *self;
        let by_options = options.masquerade.is_any() || options.forward_required;
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
