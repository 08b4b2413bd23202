//! Masquerade and forward rules, beside the network that needs them.
//!
//! **Source**: flannel `main.go`, for the options and for when their failure is fatal.

use std::convert::Infallible;
use std::time::Duration;

use flannel_core::{Config, Subnets};
use flannel_firewall::{Firewall, Mode, Options, Programs, Rules, Status, Wish, cleanup};
use flannel_options::go_flags::{go_bool, go_int};
use tokio::sync::watch;

use crate::config::FirewallConfig;
use crate::error::Error;

/// How the rules are, for who looks on.
#[derive(Debug, Clone, Default)]
pub(crate) enum Rulebook {
    /// None are asked for.
    #[default]
    Unwanted,
    /// They are asked for, and nobody keeps them yet.
    Pending,
    /// There is nothing to make them with now, which is tried again; life goes on without.
    Missing {
        /// Why.
        why: String,
        /// They were asked for, and are not only flannel's default.
        asked: bool,
    },
    /// They are kept, and this is how they are.
    Kept(watch::Receiver<Status>),
}

/// What becomes of packets between pods and the rest of the world.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct FirewallFlags {
    /// Hide pod addresses from everything outside the pod network
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub ip_masq: bool,

    /// Where masquerading has to change source ports, do not choose them at random
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub ip_masq_fully_random_disable: bool,

    /// Accept forwarded packets from and to pods
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = true, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub iptables_forward_rules: bool,

    /// The last was given by name, on the command line or in the environment, whatever its value.
    #[arg(skip)]
    pub(crate) forward_rules_given: bool,

    /// Check the rules every so many seconds; in nftables mode changes are noticed at once all the same
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = go_int(1..=86_400))]
    pub iptables_resync: i64,
}

impl FirewallFlags {
    /// The same as typed values.
    pub(crate) fn config(&self) -> FirewallConfig {
        FirewallConfig {
            masquerade: self.ip_masq,
            fully_random: !self.ip_masq_fully_random_disable,
            forward: self.iptables_forward_rules,
            forward_required: self.forward_rules_given,
            resync: Duration::from_secs(self.iptables_resync.unsigned_abs()),
        }
    }
}

impl FirewallConfig {
    fn wish(&self) -> Wish {
        let Self { masquerade, fully_random, forward, .. } = *self;
        Wish { masquerade, fully_random, forward }
    }

    /// Whether there are to be rules.
    fn wanted(&self) -> bool {
        self.masquerade || self.forward
    }

    fn options(&self) -> Options {
        Options { resync: self.resync, ..Options::default() }
    }

    /// Makes sure that rules can be kept here as `config` wants them, if the network built from `used` has them elsewhere.
    ///
    /// # Errors
    /// They cannot.
    pub(crate) async fn judge(&self, config: &Config, used: &Config) -> Result<(), Error> {
        if self.wanted() && config.nftables != used.nftables {
            Firewall::open(mode(config), self.wish(), self.options()).await?;
        }
        Ok(())
    }

    /// How the rules are before [`FirewallConfig::keep`].
    pub(crate) fn rulebook(&self) -> Rulebook {
        if self.wanted() { Rulebook::Pending } else { Rulebook::Unwanted }
    }

    /// Keeps the rules in place, and says so in `settled` when they are for the first time, or cannot be for now;
    /// whoever looks on finds in `rulebook` how they are.
    /// In the mode that the network config asks for; rules of the other mode go.
    ///
    /// # Errors
    /// Masquerading is asked for and there is nothing to do it with, in the daemon's first network. Later, or
    /// where only forward rules are wanted, life goes on, and it is tried again every `--iptables-resync` seconds.
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
            remove_leftovers().await;
            settled.send_replace(true);
            return Ok(std::future::pending().await);
        }
        let networks = config.networks.map(|_, network| network.network);
        let (_wanted, rules) =
            watch::channel(Rules::new(&networks, &own.iter().collect(), self.wish())?);
        let firewall = match Firewall::open(mode(config), self.wish(), self.options()).await {
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

    /// Tries again and again to open what could not be opened because of `error`; each reason is told once.
    async fn open_later(
        &self,
        config: &Config,
        mut error: flannel_firewall::Error,
        settled: &watch::Sender<bool>,
        rulebook: &watch::Sender<Rulebook>,
    ) -> Firewall {
        let options = self.options();
        let mut said = None;
        loop {
            let why = error.to_string();
            if said.as_ref() != Some(&why) {
                tracing::warn!("there are no firewall rules, which is tried again: {why}");
                let asked = self.masquerade || self.forward_required;
                rulebook.send_replace(Rulebook::Missing { why: why.clone(), asked });
                settled.send_replace(true);
                said = Some(why);
            }
            tokio::time::sleep(options.resync).await;
            match Firewall::open(mode(config), self.wish(), options.clone()).await {
                Ok(firewall) => return firewall,
                Err(again) => error = again,
            }
        }
    }
}

/// In which of the kernel's firewalls a network has its rules.
fn mode(config: &Config) -> Mode {
    if config.nftables { Mode::Nftables } else { Mode::Iptables }
}

/// Removes what an earlier run has left. Where there is nothing to look with, there is nothing to remove.
async fn remove_leftovers() {
    let cleaned = cleanup(&Programs::default()).await;
    for deviation in &cleaned.found {
        tracing::info!(
            object = deviation.object,
            "removed a rule of an earlier run: none are asked for now"
        );
    }
    for error in &cleaned.failed {
        match error.is_guess() {
            true => tracing::info!("{error}"),
            false => {
                tracing::warn!("rules that an earlier run may have left are not removed: {error}");
            }
        }
    }
}

/// Says when the rules are in place for the first time, or cannot be. What happens to them the firewall says itself.
async fn settle(mut status: watch::Receiver<Status>, settled: watch::Sender<bool>) -> Infallible {
    if status.wait_for(|now| now.in_place || now.failure.is_some()).await.is_ok() {
        settled.send_replace(true);
    }
    std::future::pending().await
}
