//! The status of the firewall. Repairs are counted, because another program that keeps changing the
//! rules is a problem of the host.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::error::Error;

/// The age from which on dropped packets are no longer recent.
const RECENT: Duration = Duration::from_secs(300);

/// The status of a [`Firewall`](crate::Firewall).
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Status {
    /// Whether the desired rules were in place after the last check.
    pub in_place: bool,
    /// The number of checks. Receivers are not notified if only this number changes.
    pub checks: u64,
    /// The number of writes because other rules were desired.
    pub changes: u64,
    /// The number of writes because another program had changed the rules.
    pub repairs: u64,
    /// The last repair, or `None` before the first one.
    pub last_repair: Option<Repair>,
    /// Why the rules are not in place, or `None` if they are, or before the first check.
    pub failure: Option<Failure>,
    /// True after the firewall has removed all rules of an earlier flannel that it does not keep
    /// itself, for example the rules of the other mode. It tries this only when its own rules are
    /// in place. It is false before, and while such rules may be left ([`Self::leftovers`]).
    pub old_rules_gone: bool,
    /// Why such rules were not removed. Empty if they were. The next attempts become rarer.
    pub leftovers: Vec<Arc<Error>>,
    /// Another program that changes the rules back again and again, or `None`.
    pub contest: Option<Contested>,
    /// The packets that the rules have dropped since the firewall was opened, as of the last check.
    /// Always 0 in iptables mode. Receivers are not notified if only these numbers change.
    pub dropped: Packets<Dropped>,
}

/// A value for each kind of packets that rules of flannel drop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Packets<T> {
    /// Packets to pods of other nodes that would have left unencrypted
    /// ([`RuleOptions::encrypted`](crate::RuleOptions::encrypted)), and packets without a route,
    /// which the kernel drops itself ([`Chain::Unrouted`](crate::Chain::Unrouted)).
    pub unencrypted: T,
}

/// The packets of one kind that were dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// The number of packets.
    pub packets: u64,
    /// The time of the check that found the last packet, or `None` if there were no packets.
    pub last: Option<SystemTime>,
    /// The counter of the rules at the last check, or `None` before the first one.
    counter: Option<u64>,
}

impl Dropped {
    /// Whether a packet was dropped in the five minutes before `now`.
    pub fn is_recent(&self, now: SystemTime) -> bool {
        self.last.is_some_and(|last| now.duration_since(last).unwrap_or_default() < RECENT)
    }

    /// Takes in the counter of the rules. It begins anew when the rules are replaced.
    pub(crate) fn note(&mut self, counter: u64, at: SystemTime) {
        let before = self.counter.replace(counter).unwrap_or(counter);
        let new = counter.checked_sub(before).unwrap_or(counter);
        self.packets = self.packets.saturating_add(new);
        if new > 0 {
            self.last = Some(at);
        }
    }
}

/// What another program changes back again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contested {
    /// It has put its rules before the jump to the rules about encryption ([`Fault::Misplaced`]),
    /// or a rule that no packet passes before another jump ([`Fault::Unreached`]), three times
    /// within a minute. The place of the jump is then repaired every five seconds. In between,
    /// packets may leave unencrypted, or the rules see no packet. Only in iptables mode.
    Place(Fault),
    /// It has changed or removed the rules six times within a minute. They are still repaired at
    /// once.
    Rules,
}

/// Detects another program that, like this one, insists on its rules.
#[derive(Debug)]
pub(crate) struct Contest {
    /// The times of the last repairs.
    repairs: VecDeque<Instant>,
    /// It is on if there were this many repairs within [`Self::TIME`].
    most: usize,
}

impl Contest {
    /// The time within which the repairs count.
    const TIME: Duration = Duration::from_secs(60);

    /// For the place of a jump.
    pub(crate) fn of_place() -> Self {
        Self { repairs: VecDeque::new(), most: 3 }
    }

    /// For all rules. Reloads of firewalls are no contest.
    pub(crate) fn of_rules() -> Self {
        Self { repairs: VecDeque::new(), most: 6 }
    }

    /// Notes a repair.
    pub(crate) fn note(&mut self, now: Instant) {
        self.repairs.push_back(now);
        if self.repairs.len() > self.most {
            self.repairs.pop_front();
        }
    }

    /// Whether there is a contest.
    pub(crate) fn is_on(&self, now: Instant) -> bool {
        self.repairs.len() == self.most && now.duration_since(self.repairs[0]) < Self::TIME
    }
}

/// The result of a check.
#[derive(Debug, Default)]
pub(crate) struct Check {
    /// The differences that it removed.
    pub(crate) deviations: Vec<Deviation>,
    /// Why other differences may be left.
    pub(crate) failed: Vec<Error>,
}

impl Check {
    /// Adds the differences that were removed, or the reason why they may be left.
    pub(crate) fn note(&mut self, reconciled: Result<Vec<Deviation>, Error>) {
        match reconciled {
            Ok(deviations) => self.deviations.extend(deviations),
            Err(error) => self.failed.push(error),
        }
    }
}

/// A repair of rules that another program had changed.
#[derive(Debug, Clone)]
pub struct Repair {
    /// The time.
    pub at: SystemTime,
    /// The differences that it removed.
    pub found: Vec<Deviation>,
}

/// Rules could not be put in place.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The time of the first failure in a row.
    pub since: SystemTime,
    /// The number of failures in a row.
    pub times: u64,
    /// The errors of the last attempt, at least one.
    pub errors: Vec<Arc<Error>>,
}

/// A difference between actual and desired rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deviation {
    /// The table, chain or jump, in the notation of the tools.
    pub object: String,
    /// The kind of difference.
    pub fault: Fault,
}

/// A kind of difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It does not exist.
    Missing,
    /// It exists and is not desired.
    Unwanted,
    /// Its content or order differs.
    Different,
    /// It exists more than once.
    Repeated,
    /// It is a jump that must be the first rule, and another rule comes before it.
    Misplaced,
    /// It is a jump that no packet reaches, because a rule before it ends the chain.
    Unreached,
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = match self.fault {
            Fault::Missing => "missing",
            Fault::Unwanted => "not wanted",
            Fault::Different => "different",
            Fault::Repeated => "repeated",
            Fault::Misplaced => "not the first rule",
            Fault::Unreached => "behind a rule that no packet passes",
        };
        write!(f, "{}: {fault}", self.object)
    }
}

/// The result of [`cleanup`](crate::cleanup()) or [`leftovers`](crate::leftovers).
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Cleanup {
    /// The tables, chains and jumps that existed, of this flannel and of Go flannel.
    pub found: Vec<Deviation>,
    /// Why other rules could not be read or removed.
    pub failed: Vec<Error>,
}

impl Cleanup {
    /// Logs the rules that were removed, and the rules that may be left.
    pub fn log(&self) {
        for deviation in &self.found {
            tracing::info!(object = deviation.object, "removed a rule of an earlier run");
        }
        for error in &self.failed {
            log_left(error);
        }
    }

    /// Adds the rules that existed in one table or family, or why they are unknown or stay.
    pub(crate) fn note(&mut self, cleaned: Result<Vec<Deviation>, Error>) {
        match cleaned {
            Ok(found) => self.found.extend(found),
            Err(error) => self.failed.push(error),
        }
    }
}

/// Logs that rules may be left.
pub(crate) fn log_left(error: &Error) {
    if error.is_guess() {
        tracing::info!(%error, "rules of an earlier run may be left");
    } else {
        tracing::warn!(%error, "rules that an earlier run may have left are not removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_counted_from_the_first_check_on_and_over_replaced_rules() {
        let mut dropped = Dropped::default();
        let at = SystemTime::UNIX_EPOCH;
        for (counter, packets) in [(7, 0), (7, 0), (9, 2), (0, 2), (3, 5), (2, 7)] {
            dropped.note(counter, at);
            assert_eq!(dropped.packets, packets);
            assert_eq!(dropped.last, (packets > 0).then_some(at));
        }
        assert!(dropped.is_recent(at + RECENT / 2) && !dropped.is_recent(at + RECENT));
        assert!(!Dropped::default().is_recent(at));
    }

    #[test]
    fn a_place_is_contested_after_three_repairs_within_a_minute() {
        let mut contest = Contest::of_place();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        for (second, is_on) in [(0, false), (50, false), (61, false), (70, true), (300, false)] {
            contest.note(at(second));
            assert_eq!(contest.is_on(at(second)), is_on, "after {second} s");
        }
        contest.note(at(301));
        contest.note(at(302));
        assert!(contest.is_on(at(359)) && !contest.is_on(at(360)), "it has ended");
        let mut contest = Contest::of_rules();
        for second in 0..6 {
            assert!(!contest.is_on(at(second)), "after {second} repairs");
            contest.note(at(second));
        }
        assert!(contest.is_on(at(59)) && !contest.is_on(at(60)));
    }
}
