//! The one task that keeps the rules in place.
//!
//! It does not apply events. Each time it wakes, it compares the rules with the desired ones and
//! writes where they differ.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::error::Error;
use crate::iptables::Iptables;
use crate::iptables::program::Programs;
use crate::nft::{self, Nft};
use crate::rules::{Rules, Wish};
use crate::status::{Deviation, Failure, Repair, Status};

/// What cannot be removed is looked at again after so many checks at the latest.
const RARELY: u64 = 720;
/// The shortest period; also how long a check after a change by others keeps away from the one before.
const SHORTEST: Duration = Duration::from_millis(10);

/// In which of the kernel's firewalls the rules are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// nf_tables, over netlink (`"EnableNFTables": true`): no program is run, changes are noticed at once.
    Nftables,
    /// iptables, through its programs: one `iptables-save` for each family and period.
    Iptables,
}

/// How a [`Firewall`] works.
#[derive(Debug, Clone)]
pub struct Options {
    /// How often the rules are checked (`--iptables-resync`); less than 10 ms count as 10 ms. Failures are tried again
    /// as often.
    pub resync: Duration,
    /// The programs of iptables. In nftables mode they serve only to remove what an earlier flannel left in iptables; what
    /// stays because a program is missing is reported.
    pub programs: Programs,
}

/// As flannel's options default: every 5 seconds.
impl Default for Options {
    fn default() -> Self {
        Self { resync: Duration::from_secs(5), programs: Programs::default() }
    }
}

/// Keeps the rules of one network in place on one host.
///
/// Dropping it leaves the rules where they are; the next one adopts them, ours or Go flannel's. [`cleanup`] removes
/// them.
///
/// ```no_run
/// use flannel_firewall::{Firewall, Mode, Options, Rules, Wish};
/// use tokio::sync::watch;
///
/// # async fn example(rules: Rules) -> Result<(), flannel_firewall::Error> {
/// let (_wanted, rules) = watch::channel(rules);
/// let firewall = Firewall::open(Mode::Nftables, Wish::default(), Options::default()).await?;
/// let mut status = firewall.status();
/// tokio::spawn(firewall.run(rules));
/// let _ = status.wait_for(|status| status.in_place).await;
/// # Ok(()) }
/// ```
pub struct Firewall {
    engine: Engine,
    options: Options,
    status: watch::Sender<Status>,
    /// When the last check ended.
    checked: Instant,
}

enum Engine {
    Nftables(Nft),
    Iptables(Iptables),
}

impl Firewall {
    /// Opens the firewall of the network namespace of this thread, for rules as `wish` takes them; nothing is changed yet.
    ///
    /// # Errors
    /// What will not pass by itself: a missing privilege, kernel part or program.
    ///
    /// # Cancel safety
    /// It may be dropped.
    pub async fn open(mode: Mode, wish: Wish, options: Options) -> Result<Self, Error> {
        let engine = match mode {
            Mode::Nftables => Engine::Nftables(Nft::open()?),
            Mode::Iptables => {
                Engine::Iptables(Iptables::open(options.programs.clone(), wish).await?)
            }
        };
        Ok(Self { engine, options, status: watch::Sender::default(), checked: Instant::now() })
    }

    /// How it is, now and later.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Makes the host follow `rules` for as long as it is polled; failures are in the status and tried again.
    ///
    /// When the rules are in place, what an earlier flannel left in the other mode is removed. If the sender of `rules`
    /// is gone the last ones count.
    ///
    /// # Cancel safety
    /// Dropping it stops it. What is in place stays; it is never a part of a transaction.
    pub async fn run(mut self, mut rules: watch::Receiver<Rules>) -> Infallible {
        let mut ticks = tokio::time::interval(self.options.resync.max(SHORTEST));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        // What was in place when last checked: what differs from it was changed by somebody else.
        let mut placed: Option<Rules> = None;
        let mut closed = false;
        loop {
            let wanted = rules.borrow_and_update().clone();
            let (deviations, failed) = self.reconcile(&wanted).await;
            let by_others = placed.as_ref() == Some(&wanted);
            let done = failed.is_empty();
            self.publish(deviations, by_others, failed);
            if done {
                placed = Some(wanted);
                if self.is_time_to_look_around() {
                    self.remove_others().await;
                }
            } else if !by_others {
                placed = None;
            }
            self.checked = Instant::now();
            self.wait(&mut rules, &mut ticks, &mut closed).await;
        }
    }

    async fn reconcile(&mut self, wanted: &Rules) -> (Vec<Deviation>, Vec<Error>) {
        match &mut self.engine {
            Engine::Nftables(nft) => match nft.reconcile(wanted).await {
                Ok(deviations) => (deviations, Vec::new()),
                Err(error) => (Vec::new(), vec![error]),
            },
            Engine::Iptables(iptables) => iptables.reconcile(wanted).await,
        }
    }

    /// Another mode was not looked at, or could not be; the latter is tried more rarely, for it may start processes.
    fn is_time_to_look_around(&self) -> bool {
        let status = self.status.borrow();
        let turn = status.checks.is_power_of_two() || status.checks.is_multiple_of(RARELY);
        !status.alone && (status.leftovers.is_empty() || turn)
    }

    /// Removes what is ours and not kept by this one.
    async fn remove_others(&mut self) {
        let programs = &self.options.programs;
        let (removed, failed) = match &mut self.engine {
            Engine::Nftables(_) => Iptables::clean(programs, None, true).await,
            Engine::Iptables(used) => clean(programs, Some(used), true).await,
        };
        for deviation in &removed {
            tracing::info!(object = deviation.object, "removed what another mode had left");
        }
        self.status.send_if_modified(|status| {
            let before: Vec<String> = status.leftovers.iter().map(ToString::to_string).collect();
            let is_new = |error: &&Error| !before.contains(&error.to_string());
            let news = failed.len() != before.len() || failed.iter().any(|error| is_new(&error));
            for error in failed.iter().filter(is_new) {
                match error.is_guess() {
                    true => tracing::info!("{error}"),
                    false => tracing::warn!(%error, "rules that another mode may have left are not removed"),
                }
            }
            status.alone = failed.is_empty();
            status.leftovers = failed.into_iter().map(Arc::new).collect();
            news
        });
    }

    fn publish(&self, deviations: Vec<Deviation>, by_others: bool, failed: Vec<Error>) {
        let at = SystemTime::now();
        self.status.send_if_modified(|status| {
            let first_failure = !failed.is_empty() && status.failure.is_none();
            let news =
                first_failure || status.in_place != failed.is_empty() || !deviations.is_empty();
            status.checks += 1;
            status.in_place = failed.is_empty();
            if !deviations.is_empty() && by_others {
                let found: Vec<_> = deviations.iter().map(ToString::to_string).collect();
                tracing::warn!(
                    found = found.join("; "),
                    "rules were changed from outside, and put back"
                );
                status.repairs += 1;
                status.last_repair = Some(Repair { at, found: deviations });
            } else if !deviations.is_empty() {
                tracing::info!(changes = deviations.len(), "rules are in place");
                status.changes += 1;
            }
            let before = status.failure.take().filter(|_| !failed.is_empty());
            if first_failure {
                failed.iter().for_each(|error| tracing::warn!(%error, "rules are not in place"));
            }
            status.failure = (!failed.is_empty()).then(|| Failure {
                since: before.as_ref().map_or(at, |before| before.since),
                times: before.map_or(1, |before| before.times + 1),
                errors: failed.into_iter().map(Arc::new).collect(),
            });
            news
        });
    }

    /// Returns when there may be something to do.
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
                    Engine::Iptables(_) => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = rules.changed(), if !*closed => match changed {
                    Ok(()) => return,
                    Err(_) => *closed = true,
                },
                _ = ticks.tick() => return,
                disturbed = disturbed => return self.after_disturbance(disturbed).await,
            }
        }
    }

    /// Answers a single change at once, and gathers those that follow, so that a fight with somebody else costs little.
    async fn after_disturbance(&mut self, disturbed: Result<(), Error>) {
        if let Err(error) = disturbed {
            tracing::warn!(%error, "opened anew");
            match Nft::open() {
                Ok(nft) => self.engine = Engine::Nftables(nft),
                Err(error) => {
                    tracing::warn!(%error, "changes by others are noticed late");
                    return tokio::time::sleep(self.options.resync.max(SHORTEST)).await;
                }
            }
        }
        tokio::time::sleep_until(self.checked + SHORTEST).await;
    }
}

impl std::fmt::Debug for Firewall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Firewall").field("options", &self.options).finish_non_exhaustive()
    }
}

/// What [`cleanup`] found and did.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Cleanup {
    /// What was there: tables, chains and jumps of ours, and of Go flannel's.
    pub found: Vec<Deviation>,
    /// What could not be looked at or removed.
    pub failed: Vec<Error>,
}

/// Removes exactly our rules from nftables and from every variant of iptables that is installed; goes on after a
/// failure. A second call finds nothing.
pub async fn cleanup(programs: &Programs) -> Cleanup {
    let (found, failed) = clean(programs, None, true).await;
    Cleanup { found, failed }
}

/// What [`cleanup`] would remove.
pub async fn leftovers(programs: &Programs) -> Cleanup {
    let (found, failed) = clean(programs, None, false).await;
    Cleanup { found, failed }
}

/// Removes the rules from nftables and iptables, but for those that `used` keeps; or only looks.
async fn clean(
    programs: &Programs,
    used: Option<&mut Iptables>,
    write: bool,
) -> (Vec<Deviation>, Vec<Error>) {
    let (mut found, mut failed) = Iptables::clean(programs, used, write).await;
    match nft::clean(write) {
        Ok(there) => found.extend(there),
        Err(error) => failed.push(error),
    }
    (found, failed)
}
