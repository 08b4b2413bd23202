//! The task that keeps the rules in place.
//!
//! It does not interpret events. Each time it wakes, it reads the actual rules, compares them with
//! the desired ones, and writes the differences.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_core::Subnet;
use flannel_core::logging::LogRateLimiter;
use flannel_core::object::LinkName;
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::error::Error;
use crate::iptables::Iptables;
use crate::iptables::program::Programs;
use crate::iptables::script::Scope;
use crate::nft::{self, Nft};
use crate::rules::{RuleOptions, Rules};
use crate::status::{
    Check, Cleanup, Contest, Contested, Deviation, Failure, Fault, Repair, Status, log_left,
};

/// The largest number of checks between two attempts to remove leftover rules of the other mode.
const RARELY: u64 = 720;
/// The shortest period of checks, and the shortest pause after a check in nftables mode.
const SHORTEST: Duration = Duration::from_millis(10);
/// The shortest pause after a check in iptables mode, in which a check starts processes.
const SHORTEST_OF_PROGRAMS: Duration = Duration::from_millis(250);
/// The pause after a check while another program insists on the place of a jump.
const CONTESTED: Duration = Duration::from_secs(5);

/// Where the rules are, and how they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// nf_tables, over netlink (`"EnableNFTables": true`). No program is run. Changes by other
    /// programs are noticed at once.
    Nftables,
    /// iptables, through its programs. Changes by other programs are noticed at once, changes by
    /// `iptables-legacy` by the use of its lock. No program is run while nothing changes, except
    /// one `iptables-legacy-save` per family every 5 minutes.
    Iptables,
}

/// The options of a [`Firewall`].
#[derive(Debug, Clone)]
pub struct Options {
    /// The period of checks (`--iptables-resync`) and of retries. Less than 10 ms counts as 10 ms.
    /// In iptables mode a check only reads rules that may have changed.
    pub resync: Duration,
    /// The programs of iptables. In nftables mode they only remove rules that an earlier flannel
    /// left in iptables. If a program for that is missing, [`Status::leftovers`] says so.
    pub programs: Programs,
}

/// The default of flanneld's options: every 5 seconds.
impl Default for Options {
    fn default() -> Self {
        Self { resync: Duration::from_secs(5), programs: Programs::default() }
    }
}

/// Keeps the rules of one network in place on one host.
///
/// Dropping it leaves the rules in place. The next `Firewall` adopts them, and the rules of Go
/// flannel too. [`cleanup`] removes both.
///
/// ```no_run
/// use flannel_firewall::{Firewall, Mode, Options, Rules, RuleOptions};
/// use tokio::sync::watch;
///
/// # async fn example(rules: Rules) -> Result<(), flannel_firewall::Error> {
/// let (_sender, rules) = watch::channel(rules);
/// let rule_options = RuleOptions::default();
/// let firewall = Firewall::open(Mode::Nftables, &rule_options, Options::default()).await?;
/// let mut status = firewall.status();
/// tokio::spawn(firewall.run(rules));
/// let _ = status.wait_for(|status| status.in_place).await;
/// # Ok(()) }
/// ```
pub struct Firewall {
    engine: Engine,
    options: Options,
    status: watch::Sender<Status>,
    last_check: LastCheck,
    opened: Instant,
    /// Contests for the place of a jump, with the fault of the last one, and for rules.
    place: Contest,
    fault: Fault,
    rules: Contest,
    /// Limits the lines of the log about repairs.
    logged: LogRateLimiter,
}

struct LastCheck {
    ended: Instant,
    took: Duration,
}

enum Engine {
    Nftables(Box<Nft>),
    Iptables(Box<Iptables>),
}

impl Firewall {
    /// Opens the firewall of the calling thread's network namespace. Changes nothing. In iptables
    /// mode it checks that the programs may write the rules that `rule_options` asks for, and the
    /// threads that poll this future and [`Firewall::run`] must be in the same network namespace.
    ///
    /// # Errors
    /// A privilege, a part of the kernel or a program is missing.
    pub async fn open(
        mode: Mode,
        rule_options: &RuleOptions,
        options: Options,
    ) -> Result<Self, Error> {
        let engine = match mode {
            Mode::Nftables => Engine::Nftables(Box::new(Nft::open()?)),
            Mode::Iptables => {
                let iptables = Iptables::open(options.programs.clone(), rule_options).await?;
                Engine::Iptables(Box::new(iptables))
            }
        };
        Ok(Self {
            engine,
            options,
            status: watch::Sender::default(),
            last_check: LastCheck { ended: Instant::now(), took: Duration::ZERO },
            opened: Instant::now(),
            place: Contest::of_place(),
            fault: Fault::Misplaced,
            rules: Contest::of_rules(),
            logged: LogRateLimiter::default(),
        })
    }

    /// The status, and later changes of it.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Keeps the rules equal to `rules` while the future is polled. Reports failures in the status,
    /// and tries again. Needs a tokio runtime with I/O and time.
    ///
    /// When the rules are in place, removes rules that an earlier flannel left in the other mode.
    /// After the sender of `rules` is dropped, the last value stays desired.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the rules in place. No transaction is half done.
    pub async fn run(mut self, mut rules: watch::Receiver<Rules>) -> Infallible {
        let mut ticks = tokio::time::interval(self.options.resync.max(SHORTEST));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        // The rules that were in place after the last check. If they are still desired, another
        // program has made the differences.
        let mut placed: Option<Rules> = None;
        // The networks that had rules.
        let mut former: Vec<Subnet> = Vec::new();
        let mut closed = false;
        loop {
            let desired = rules.borrow_and_update().clone().with_former(former);
            former = desired.networks().to_vec();
            let began = Instant::now();
            let check = self.check(&desired).await;
            let by_others = placed.as_ref() == Some(&desired);
            let done = check.failed.is_empty();
            self.publish(check, by_others);
            if done {
                if self.should_remove_others() {
                    self.remove_others(&desired.cleared()).await;
                }
                placed = Some(desired);
            } else if !by_others {
                placed = None;
            }
            self.last_check = LastCheck { ended: Instant::now(), took: began.elapsed() };
            self.wait(&mut rules, &mut ticks, &mut closed).await;
        }
    }

    /// Compares the rules with the desired ones, and writes the differences.
    async fn check(&mut self, desired: &Rules) -> Check {
        match &mut self.engine {
            Engine::Nftables(nft) => {
                let mut check = Check::default();
                check.note(nft.reconcile(desired).await);
                check
            }
            Engine::Iptables(iptables) => iptables.reconcile(desired).await,
        }
    }

    /// Whether to remove rules of the other mode now. After a failure this is tried less often,
    /// because it may start processes.
    fn should_remove_others(&self) -> bool {
        let status = self.status.borrow();
        let may_retry = status.checks.is_power_of_two() || status.checks.is_multiple_of(RARELY);
        !status.old_rules_gone && (status.leftovers.is_empty() || may_retry)
    }

    /// Removes rules that `none` owns and this firewall does not keep.
    async fn remove_others(&mut self, none: &Rules) {
        let programs = &self.options.programs;
        let Cleanup { found, failed } = match &mut self.engine {
            Engine::Nftables(_) => Iptables::clean(programs, None, none, Scope::All, true).await,
            Engine::Iptables(used) => clean(programs, Some(used.as_mut()), none, true).await,
        };
        for deviation in &found {
            tracing::info!(object = deviation.object, "rules of another mode were removed");
        }
        self.status.send_if_modified(|status| {
            let before: Vec<String> = status.leftovers.iter().map(ToString::to_string).collect();
            let mut changed = failed.len() != before.len();
            for error in &failed {
                if !before.contains(&error.to_string()) {
                    log_left(error);
                    changed = true;
                }
            }
            status.old_rules_gone = failed.is_empty();
            status.leftovers = failed.into_iter().map(Arc::new).collect();
            changed
        });
    }

    fn publish(&mut self, check: Check, by_others: bool) {
        let Check { deviations, failed } = check;
        let at = SystemTime::now();
        let now = self.opened.elapsed();
        if by_others {
            self.note_repair(&deviations);
        }
        let contest = self.contest();
        self.status.send_if_modified(|status| {
            let first_failure = !failed.is_empty() && status.failure.is_none();
            let changed = first_failure
                || status.in_place != failed.is_empty()
                || !deviations.is_empty()
                || status.contest != contest;
            status.checks += 1;
            status.contest = contest;
            status.in_place = failed.is_empty();
            if let Engine::Nftables(nft) = &self.engine {
                status.dropped.unencrypted.note(nft.counted.unencrypted, at);
            }
            if !deviations.is_empty() && by_others {
                let found =
                    deviations.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
                if let Some(more) = self.logged.line(now, &found) {
                    tracing::warn!(
                        found,
                        more,
                        "another program changed the rules, which are restored"
                    );
                }
                status.repairs += 1;
                status.last_repair = Some(Repair { at, found: deviations });
            } else if !deviations.is_empty() {
                tracing::info!(changes = deviations.len(), "rules are in place");
                status.changes += 1;
            }
            let before = status.failure.take().filter(|_| !failed.is_empty());
            if first_failure {
                for error in &failed {
                    tracing::warn!(%error, "rules are not in place");
                }
            }
            status.failure = (!failed.is_empty()).then(|| Failure {
                since: before.as_ref().map_or(at, |before| before.since),
                times: before.map_or(1, |before| before.times + 1),
                errors: failed.into_iter().map(Arc::new).collect(),
            });
            changed
        });
    }

    /// Notes what another program had changed.
    fn note_repair(&mut self, deviations: &[Deviation]) {
        let is_place = |it: &&Deviation| matches!(it.fault, Fault::Misplaced | Fault::Unreached);
        let now = Instant::now();
        if let Some(place) = deviations.iter().find(is_place) {
            self.place.note(now);
            self.fault = place.fault;
        }
        if !deviations.is_empty() {
            self.rules.note(now);
        }
    }

    /// What is contested now.
    fn contest(&self) -> Option<Contested> {
        let now = Instant::now();
        if self.place.is_on(now) {
            return Some(Contested::Place(self.fault));
        }
        self.rules.is_on(now).then_some(Contested::Rules)
    }

    /// Waits until a check is due.
    async fn wait(
        &mut self,
        rules: &mut watch::Receiver<Rules>,
        ticks: &mut Interval,
        closed: &mut bool,
    ) {
        loop {
            let disturbed = async {
                match &mut self.engine {
                    Engine::Nftables(nft) => nft.disturbed().await,
                    Engine::Iptables(iptables) => {
                        iptables.disturbed().await;
                        Ok(())
                    }
                }
            };
            let disturbed = tokio::select! {
                biased;
                disturbed = disturbed => Some(disturbed),
                _ = ticks.tick() => None,
                changed = rules.changed(), if !*closed => match changed {
                    Ok(()) => return,
                    Err(_) => {
                        *closed = true;
                        continue;
                    }
                },
            };
            if let Some(disturbed) = disturbed {
                self.after_disturbance(disturbed).await;
            }
            return;
        }
    }

    /// Waits for some time since the last check, so that a program that always changes the rules
    /// causes few checks. If waiting for changes failed, it opens nftables again.
    async fn after_disturbance(&mut self, disturbed: Result<(), Error>) {
        if let Err(error) = disturbed {
            tracing::warn!(%error, "nftables is opened again");
            match Nft::open() {
                Ok(nft) => self.engine = Engine::Nftables(Box::new(nft)),
                Err(error) => {
                    tracing::warn!(%error, "changes by other programs are noticed late");
                    return tokio::time::sleep(self.options.resync.max(SHORTEST)).await;
                }
            }
        }
        let LastCheck { ended, took } = self.last_check;
        let pause = match self.engine {
            Engine::Nftables(_) => SHORTEST,
            Engine::Iptables(_) if self.place.is_on(Instant::now()) => CONTESTED,
            // Reading the rules takes a second on hosts with tens of thousands of rules.
            Engine::Iptables(_) => SHORTEST_OF_PROGRAMS.max(4 * took),
        };
        tokio::time::sleep_until(ended + pause).await;
    }
}

impl std::fmt::Debug for Firewall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Firewall").field("options", &self.options).finish_non_exhaustive()
    }
}

/// Removes flannel's rules from nftables and each installed variant of iptables, in the network
/// namespace of the calling thread. Continues after a failure. A second call finds nothing.
pub async fn cleanup(programs: &Programs) -> Cleanup {
    clean(programs, None, &Rules::default(), true).await
}

/// The rules that [`cleanup`] would remove.
pub async fn leftovers(programs: &Programs) -> Cleanup {
    clean(programs, None, &Rules::default(), false).await
}

/// Removes flannel's rules for these pod networks, as [`cleanup`] does. The rules for other
/// networks stay: they are of another daemon. With `dry_run` it removes nothing, and returns the
/// rules that it would remove.
pub async fn cleanup_networks(programs: &Programs, networks: &[Subnet], dry_run: bool) -> Cleanup {
    clean(programs, None, &Rules::none_for(networks.iter().copied()), !dry_run).await
}

/// Removes only the rules that Go flannel does not know: the rules about encryption
/// ([`RuleOptions::encrypted`]) for these pod networks, and the [guards](crate::Guard) of tunnels
/// with one of these devices. The rules for other networks stay, and so do the guards that only
/// have other devices: they are of another daemon. With `dry_run` it removes nothing, and returns
/// the rules that it would remove.
pub async fn cleanup_for_go(
    programs: &Programs,
    networks: &[Subnet],
    devices: &BTreeSet<LinkName>,
    dry_run: bool,
) -> Cleanup {
    let none = Rules::none_for(networks.iter().copied());
    let mut cleanup = Iptables::clean(programs, None, &none, Scope::UnknownToGo, !dry_run).await;
    let devices = devices.clone();
    let clean = move || nft::clean_for_go(&none, &devices, !dry_run);
    cleanup.note(flannel_core::runtime::blocking(clean).await);
    cleanup
}

/// Finds the rules in nftables and iptables that `none` owns, except the rules of `used`. Removes
/// them if `write` is true.
async fn clean(
    programs: &Programs,
    used: Option<&mut Iptables>,
    none: &Rules,
    write: bool,
) -> Cleanup {
    let mut cleanup = Iptables::clean(programs, used, none, Scope::All, write).await;
    cleanup.note(nft::clean(none, write));
    cleanup
}
