//! The results of one path.

use std::num::NonZeroU32;
use std::time::SystemTime;

use flannel_core::Subnets;
use flannel_core::address::Family;
use tokio::time::Instant;

use crate::finding::Finding;
use crate::paths::agenda::Outcome;
use crate::paths::verdict::{EchoReplies, Fault};

/// The number of probes with a loss, one after the other, after which a path fails. As many without
/// a loss end the need for a lower MTU.
const CONFIRM: u8 = 3;
/// No IPv4 route gets a lower MTU. Every host accepts such packets (RFC 791).
const LEAST: u32 = 576;

/// The path to a peer in one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PathId {
    /// The peer.
    pub(crate) peer: Subnets,
    /// The family of the packets of pods.
    pub(crate) family: Family,
}

/// The results of one path.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    /// When it was probed last.
    pub(crate) probed: Option<Instant>,
    /// The round trip of the last small echo that was answered, in microseconds.
    pub(crate) round_trip: Option<NonZeroU32>,
    /// Whether any address of the peer has ever replied.
    pub(crate) has_replied: bool,
    /// The number of probes with a loss since the last one without.
    pub(crate) losses: u8,
    /// The fault, once it is confirmed.
    pub(crate) fault: Option<Box<Failing>>,
    /// The MTU of the route to the peer, in bytes: packets of full size were lost, and packets of
    /// this size passed.
    pub(crate) mtu: Option<u16>,
    /// With an MTU, the number of probes without a loss since the last one with.
    pub(crate) passed: u8,
    /// With an MTU, the number of probes that lost packets of this size, one after the other.
    pub(crate) narrower: u8,
}

/// A path that fails.
#[derive(Debug, Clone)]
pub(crate) struct Failing {
    pub(crate) fault: Fault,
    pub(crate) since: SystemTime,
    /// When it was examined last.
    pub(crate) examined: Option<Instant>,
    /// The result of that examination.
    pub(crate) details: Option<Details>,
}

/// The result of an examination of a failing path.
#[derive(Debug, Clone)]
pub(crate) struct Details {
    /// The largest packet that passes, in bytes, if it was searched.
    pub(crate) passes: Option<u16>,
    /// The finding of the diagnosis.
    pub(crate) finding: Option<Finding>,
}

/// A change of the state of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// It fails now, or in another way.
    Fails,
    /// The route to the peer gets this MTU.
    Lowered,
    /// It works again.
    Works,
}

impl Record {
    /// Takes in the answers to a probe.
    pub(crate) fn record(&mut self, answers: &EchoReplies) -> (Outcome, Option<Change>) {
        self.has_replied |= answers.has_reply();
        if let Some(took) = answers.round_trip() {
            let micros = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
            self.round_trip = Some(NonZeroU32::new(micros).unwrap_or(NonZeroU32::MIN));
        }
        let Some(fault) = answers.fault() else {
            self.losses = 0;
            self.passed += 1;
            if self.mtu.is_some() && self.passed < CONFIRM {
                return (Outcome::Lost, None);
            }
            self.mtu = None;
            self.passed = 0;
            let worked = self.fault.take().map(|_| Change::Works);
            return (Outcome::Settled, worked);
        };
        self.passed = 0;
        if !self.has_replied {
            return (Outcome::Settled, None);
        }
        if self.is_lowered() && fault == Fault::FullSizeLost {
            // Another fault must be confirmed.
            self.losses = 0;
            let narrower = self.narrower.saturating_add(1);
            self.narrower = if answers.lowered_is_lost() { narrower } else { 0 };
            return (Outcome::Failing, None);
        }
        self.losses = self.losses.saturating_add(1);
        if self.losses < CONFIRM {
            return (Outcome::Lost, None);
        }
        match &self.fault {
            // An examination found the direction, which echoes do not show.
            Some(known) if known.fault == fault || known.fault.refines(fault) => {
                (Outcome::Failing, None)
            }
            _ => {
                self.fail(fault);
                let change = if self.is_lowered() { Change::Lowered } else { Change::Fails };
                (Outcome::Failing, Some(change))
            }
        }
    }

    /// Takes in the result of an examination. `one_way`: packets through the tunnel arrive there.
    /// `lowers`: routes get MTUs of the size that passes.
    pub(crate) fn examined(
        &mut self,
        family: Family,
        one_way: bool,
        details: Details,
        lowers: bool,
    ) -> Option<Change> {
        // It may work again.
        let failing = self.fault.as_mut()?;
        match failing.fault {
            Fault::TunnelBlocked if one_way => failing.fault = Fault::OneWay,
            Fault::OneWay if !one_way => failing.fault = Fault::TunnelBlocked,
            _ => {}
        }
        self.narrower = 0;
        let before = self.mtu;
        let passes = details.passes;
        failing.details = Some(details);
        if lowers && failing.fault == Fault::FullSizeLost && passes.is_some() {
            let least = family.least_mtu().max(LEAST);
            self.mtu = passes.filter(|passes| u32::from(*passes) >= least);
        }
        match (before, self.mtu) {
            // The size that passes now is too small for a route.
            (Some(_), None) => Some(Change::Fails),
            (before, mtu) => (mtu.is_some() && mtu != before).then_some(Change::Lowered),
        }
    }

    /// Whether only packets are lost that are larger than the MTU of the route.
    pub(crate) fn is_lowered(&self) -> bool {
        self.mtu.is_some()
            && self.fault.as_deref().is_some_and(|failing| failing.fault == Fault::FullSizeLost)
    }

    /// Whether packets of the size of the route's MTU are lost too.
    pub(crate) fn is_narrower(&self) -> bool {
        self.narrower >= CONFIRM
    }

    fn fail(&mut self, fault: Fault) {
        self.narrower = 0;
        let since = self.fault.as_ref().map_or_else(SystemTime::now, |known| known.since);
        self.fault = Some(Box::new(Failing { fault, since, examined: None, details: None }));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::inputs::echo::EchoResult;

    use super::*;

    fn reply() -> EchoResult {
        EchoResult::Reply(Duration::from_millis(1))
    }

    fn answers(small: EchoResult, full: EchoResult, public: EchoResult) -> EchoReplies {
        EchoReplies { small, full, public: Some(public), lowered: None }
    }

    fn works() -> EchoReplies {
        answers(reply(), reply(), reply())
    }

    fn blocked() -> EchoReplies {
        answers(EchoResult::Nothing, EchoResult::Nothing, reply())
    }

    fn silent() -> EchoReplies {
        answers(EchoResult::Nothing, EchoResult::Nothing, EchoResult::Nothing)
    }

    #[test]
    fn a_path_fails_after_three_losses_and_works_after_one_success() {
        let mut record = Record::default();
        assert_eq!(record.record(&works()), (Outcome::Settled, None));
        assert_eq!(record.round_trip.map(NonZeroU32::get), Some(1_000));
        assert_eq!(record.record(&blocked()), (Outcome::Lost, None));
        assert_eq!(record.record(&works()), (Outcome::Settled, None), "one lost packet");
        assert_eq!(record.record(&blocked()), (Outcome::Lost, None));
        assert_eq!(record.record(&blocked()), (Outcome::Lost, None));
        assert_eq!(record.record(&blocked()), (Outcome::Failing, Some(Change::Fails)));
        assert_eq!(record.record(&blocked()), (Outcome::Failing, None));
        let since = record.fault.as_ref().unwrap().since;
        assert_eq!(record.record(&silent()), (Outcome::Failing, Some(Change::Fails)));
        let fault = record.fault.as_ref().unwrap();
        assert_eq!((fault.fault, fault.since), (Fault::Silent, since), "it has failed since then");
        assert_eq!(record.record(&works()), (Outcome::Settled, Some(Change::Works)));
        assert!(record.fault.is_none());
    }

    #[test]
    fn a_peer_that_has_never_replied_does_not_fail() {
        let mut record = Record::default();
        for _ in 0..9 {
            assert_eq!(record.record(&silent()), (Outcome::Settled, None));
        }
        assert!(!record.has_replied);
    }

    #[test]
    fn an_mtu_stays_until_three_probes_pass_whatever_is_lost_meanwhile() {
        let mut record = Record::default();
        let lossy = || answers(reply(), EchoResult::Nothing, reply());
        for _ in 0..3 {
            record.record(&lossy());
        }
        let found = Details { passes: Some(1350), finding: None };
        let lowered = record.examined(Family::V4, false, found, true);
        assert_eq!((lowered, record.mtu), (Some(Change::Lowered), Some(1350)));
        let probes = [works(), works(), lossy(), works(), works(), blocked(), blocked(), blocked()];
        for probe in probes.into_iter().chain([works(), works(), blocked()]) {
            record.record(&probe);
            assert_eq!(record.mtu, Some(1350), "{probe:?}");
        }
        assert_eq!(record.fault.as_ref().unwrap().fault, Fault::TunnelBlocked);
        assert!(!record.is_lowered());
        assert_eq!(record.record(&lossy()), (Outcome::Lost, None));
        assert_eq!(record.record(&lossy()), (Outcome::Failing, Some(Change::Lowered)));
        assert!(record.is_lowered(), "no examination is needed");
        // Other losses count from the first one.
        for probe in [lossy(), blocked(), blocked(), lossy(), blocked()] {
            assert_eq!(record.record(&probe).1, None, "{probe:?}");
            assert!(record.is_lowered(), "{probe:?}");
        }
        assert_eq!(record.record(&works()), (Outcome::Lost, None));
        assert_eq!(record.record(&works()), (Outcome::Lost, None));
        assert_eq!(record.record(&works()), (Outcome::Settled, Some(Change::Works)));
        assert_eq!(record.mtu, None);
    }

    #[test]
    fn a_path_becomes_narrower_after_three_losses() {
        let mut record = Record::default();
        let lossy = |lowered| EchoReplies {
            lowered: Some(lowered),
            ..answers(reply(), EchoResult::Nothing, reply())
        };
        (0..3).for_each(|_| _ = record.record(&lossy(reply())));
        record.examined(Family::V4, false, Details { passes: Some(1350), finding: None }, true);
        for lowered in
            [reply(), EchoResult::Nothing, EchoResult::Nothing, reply(), EchoResult::Nothing]
        {
            record.record(&lossy(lowered));
            assert!(!record.is_narrower());
        }
        (0..300).for_each(|_| _ = record.record(&lossy(EchoResult::Nothing)));
        assert!(record.is_narrower() && record.is_lowered());
        assert_eq!(record.losses, 0, "other losses count from the first one");
        record.examined(Family::V4, false, Details { passes: Some(1300), finding: None }, true);
        assert_eq!((record.is_narrower(), record.mtu), (false, Some(1300)));
    }

    #[test]
    fn an_examination_is_not_undone_by_the_next_probe() {
        let mut record = Record::default();
        for _ in 0..3 {
            record.record(&blocked());
        }
        record.fault.as_mut().unwrap().fault = Fault::OneWay;
        assert_eq!(record.record(&blocked()), (Outcome::Failing, None));
        assert_eq!(record.fault.unwrap().fault, Fault::OneWay);
    }
}
