//! Masquerade and forward rules of a running network.
//!
//! **Source**: flannel `main.go`, for the cases in which their failure is fatal.

use std::convert::Infallible;

use flannel_core::{Config, Subnets};
use flannel_firewall::{Firewall, Mode, Options, Programs, RuleOptions, Rules, Status, cleanup};
use tokio::sync::watch;

use crate::config::FirewallConfig;
use crate::error::Error;
use crate::observe::Rulebook;

impl FirewallConfig {
    /// Whether rules are requested.
    fn wanted(&self) -> bool {
        self.masquerade || self.forward
    }

    fn rule_options(&self) -> RuleOptions {
        let Self { masquerade, fully_random, forward, .. } = *self;
        RuleOptions { masquerade, fully_random, forward }
    }

    /// Opens the kernel's firewall that the network config names.
    async fn open(&self, config: &Config) -> Result<Firewall, flannel_firewall::Error> {
        let mode = if config.nftables { Mode::Nftables } else { Mode::Iptables };
        let options = Options { resync: self.resync, ..Options::default() };
        Firewall::open(mode, self.rule_options(), options).await
    }

    /// Checks that rules can be made in the mode of `config` (nftables or iptables): if it differs
    /// from the mode of `used`, and before the first lease if their absence is fatal.
    ///
    /// # Errors
    /// Rules cannot be made in that mode.
    pub(crate) async fn validate(
        &self,
        config: &Config,
        used: Option<&Config>,
        first: bool,
    ) -> Result<(), Error> {
        let other_mode = used.is_some_and(|used| config.nftables != used.nftables);
        if (self.wanted() && other_mode) || (self.masquerade && first) {
            self.open(config).await?;
        }
        Ok(())
    }

    /// The state of the rules before [`FirewallConfig::keep`].
    pub(crate) fn rulebook(&self) -> Rulebook {
        if self.wanted() { Rulebook::Pending } else { Rulebook::Unwanted }
    }

    /// Keeps the rules in place, in the mode of the network config. Rules of the other mode are
    /// removed. `settled` becomes true when the rules are in place for the first time or cannot be
    /// made for now. `rulebook` gets their state.
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
        config: &Config,
        own: &Subnets,
        first: bool,
        (settled, rulebook): (watch::Sender<bool>, watch::Sender<Rulebook>),
    ) -> Result<Infallible, Error> {
        if !self.wanted() {
            // No rules are requested now, but an earlier run may have left some.
            cleanup(&Programs::default()).await.log();
            settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let networks = config.networks.map(|_, network| network.network);
        let (_wanted, rules) =
            watch::channel(Rules::new(&networks, &own.iter().collect(), self.rule_options())?);
        let firewall = match self.open(config).await {
            Ok(firewall) => firewall,
            Err(error) if first && self.masquerade => return Err(error.into()),
            Err(error) => self.open_later(config, error, &settled, &rulebook).await,
        };
        let status = firewall.status();
        rulebook.send_replace(Rulebook::Kept(status.clone()));
        tokio::select! {
            never = firewall.run(rules) => match never {},
            never = settle(status, settled) => match never {},
        }
    }

    /// Tries to open the firewall until that succeeds, after the first attempt failed with `error`.
    /// Each reason is logged once.
    async fn open_later(
        &self,
        config: &Config,
        mut error: flannel_firewall::Error,
        settled: &watch::Sender<bool>,
        rulebook: &watch::Sender<Rulebook>,
    ) -> Firewall {
        let mut logged = None;
        loop {
            let why = error.to_string();
            if logged.as_ref() != Some(&why) {
                tracing::warn!(error = %why, "the firewall rules cannot be made, retrying");
                let requested = self.masquerade || self.forward_required;
                let cure = error.cure();
                rulebook.send_replace(Rulebook::Missing { why: why.clone(), cure, requested });
                settled.send_replace(true);
                logged = Some(why);
            }
            tokio::time::sleep(self.resync).await;
            match self.open(config).await {
                Ok(firewall) => return firewall,
                Err(again) => error = again,
            }
        }
    }
}

/// Sets `settled` when the rules are in place for the first time or cannot be made. The firewall
/// itself logs later changes.
async fn settle(mut status: watch::Receiver<Status>, settled: watch::Sender<bool>) -> Infallible {
    if status.wait_for(|now| now.in_place || now.failure.is_some()).await.is_ok() {
        settled.send_replace(true);
    }
    std::future::pending().await
}
