//! Follows a packet through a base chain.
//!
//! A condition matches, does not match, or is not known. A rule counts as found only if the packet
//! surely reaches it and surely matches: an unknown condition of a rule that accepts, or that leads
//! elsewhere, protects all rules behind it. So a condition that this crate does not know never
//! makes a finding.

use std::rc::Rc;

use super::Effect;
use super::packet::{Byte, Packet};
use crate::error::Error;

/// The deepest nesting of jumps, as in the kernel.
const DEEPEST: usize = 16;

/// Whether a packet matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Match {
    Yes,
    No,
    Unknown,
}

impl Match {
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::No, _) | (_, Self::No) => Self::No,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Yes, Self::Yes) => Self::Yes,
        }
    }

    pub(super) fn negated(self, negated: bool) -> Self {
        match self {
            Self::Yes if negated => Self::No,
            Self::No if negated => Self::Yes,
            other => other,
        }
    }
}

impl From<Option<bool>> for Match {
    fn from(known: Option<bool>) -> Self {
        match known {
            Some(true) => Self::Yes,
            Some(false) => Self::No,
            None => Self::Unknown,
        }
    }
}

impl From<bool> for Match {
    fn from(matches: bool) -> Self {
        Some(matches).into()
    }
}

/// Where a rule leads the packets that match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    /// To the next rule.
    On,
    /// Out of the base chain.
    Accept,
    /// It has this effect, and ends the way through the base chain.
    End(Effect),
    Return,
    Jump(String),
    Goto(String),
    /// This is not known.
    Unknown,
}

/// What a rule does with a packet.
#[derive(Debug)]
pub(super) struct Judgement {
    pub(super) matches: Match,
    pub(super) way: Way,
    /// The new mark, if the rule sets it.
    pub(super) mark: Option<[Byte; 4]>,
    /// The rule excludes the packet from connection tracking.
    pub(super) untracks: bool,
}

impl Judgement {
    pub(super) fn new(matches: Match, way: Way) -> Self {
        Self { matches, way, mark: None, untracks: false }
    }
}

/// The rules of a table.
pub(super) trait Source {
    type Rule;

    /// The rules of a chain. A chain that does not exist has none.
    fn rules(&mut self, chain: &str) -> Result<Rc<[Self::Rule]>, Error>;

    fn judge(&mut self, rule: &Self::Rule, packet: &mut Packet) -> Result<Judgement, Error>;
}

/// A rule that surely has an effect on a packet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hit {
    pub(super) effect: Effect,
    pub(super) chain: String,
    /// The number of the rule in its chain, from 0. `None` for the policy.
    pub(super) rule: Option<usize>,
}

/// A walk through one base chain.
pub(super) struct Walk<'a, S> {
    pub(super) source: &'a mut S,
    pub(super) packet: &'a mut Packet,
    pub(super) hits: Vec<Hit>,
    /// The chains that the packet may enter.
    pub(super) entered: Vec<String>,
    /// The number of rules that are judged at most. Then nothing more is found.
    pub(super) budget: &'a mut usize,
}

/// What becomes of a packet in a chain.
#[derive(Debug, Clone, Copy)]
struct Fate {
    /// It surely does not come back.
    ends: bool,
    /// It may not come back.
    may_end: bool,
}

const UNKNOWN: Fate = Fate { ends: false, may_end: true };

impl<S: Source> Walk<'_, S> {
    /// Follows the packet through the base chain `name`. `policy` is the effect of its end, if it
    /// drops.
    pub(super) fn base(&mut self, name: &str, policy: Option<Effect>) -> Result<(), Error> {
        let fate = self.chain(name, true, 0)?;
        if let Some(effect) = policy
            && !fate.ends
            && !fate.may_end
        {
            self.hits.push(Hit { effect, chain: name.to_owned(), rule: None });
        }
        Ok(())
    }

    fn chain(&mut self, name: &str, reached: bool, depth: usize) -> Result<Fate, Error> {
        if depth > DEEPEST {
            return Ok(UNKNOWN);
        }
        if !self.entered.iter().any(|entered| entered == name) {
            self.entered.push(name.to_owned());
        }
        // Whether the packet surely is at the rule, and whether it may have left this chain.
        let (mut here, mut may_end, mut may_return) = (reached, false, false);
        for (n, rule) in self.source.rules(name)?.iter().enumerate() {
            let Some(budget) = self.budget.checked_sub(1) else { return Ok(UNKNOWN) };
            *self.budget = budget;
            let judgement = self.source.judge(rule, self.packet)?;
            if judgement.matches == Match::No {
                continue;
            }
            let matches = judgement.matches == Match::Yes;
            let sure = here && matches;
            self.change(&judgement, sure);
            let mut goes = false;
            let fate = match judgement.way {
                Way::On => continue,
                Way::Unknown => UNKNOWN,
                Way::Accept => Fate { ends: true, may_end: true },
                Way::End(effect) => {
                    if sure {
                        self.hits.push(Hit { effect, chain: name.to_owned(), rule: Some(n) });
                    }
                    Fate { ends: true, may_end: true }
                }
                Way::Return => {
                    goes = true;
                    Fate { ends: false, may_end: false }
                }
                Way::Jump(chain) => self.chain(&chain, sure, depth + 1)?,
                Way::Goto(chain) => {
                    goes = true;
                    self.chain(&chain, sure, depth + 1)?
                }
            };
            may_end |= fate.may_end;
            if matches && (goes || fate.ends) {
                return Ok(Fate { ends: fate.ends && !may_return, may_end });
            }
            may_return |= goes && !fate.ends;
            here &= !(fate.may_end || goes);
        }
        Ok(Fate { ends: false, may_end })
    }

    /// Takes in the changes that a rule makes to the packet.
    fn change(&mut self, judgement: &Judgement, sure: bool) {
        let packet = &mut *self.packet;
        if let Some(mark) = judgement.mark {
            for (byte, new) in packet.mark.iter_mut().zip(mark) {
                if sure {
                    *byte = new;
                } else if *byte != new {
                    *byte = None;
                }
            }
        }
        if judgement.untracks {
            packet.tracked = sure.then_some(false);
        }
        if sure && matches!(judgement.way, Way::End(Effect::Translate(_))) {
            packet.translated = true;
        }
    }
}
