//! The probes that wait for answers, and the sequence numbers of their echoes.

use std::collections::VecDeque;
use std::time::Duration;

use crate::inputs::echo::{EchoResult, Probe};
use crate::inputs::echo_socket::Echo;
use crate::inputs::peers::Question;
use crate::token::token;
use tokio::time::Instant;

use crate::paths::record::PathId;
use crate::paths::verdict::EchoReplies;

/// The time to wait for answers. A path is not probed again before.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
/// The sequence number of a flight, and the echo in it.
const ECHOES: u16 = 4;
/// The echo of the size that the route takes.
const OF_ROUTE: u16 = 3;

/// The probes that wait, in the order of their start.
#[derive(Debug, Default)]
pub(crate) struct Flights {
    /// The number of the first one.
    first: u16,
    flights: VecDeque<Flight>,
}

/// The answers to a probe that has ended.
#[derive(Debug, PartialEq)]
pub(crate) struct ProbeResult {
    pub(crate) path: PathId,
    pub(crate) answers: EchoReplies,
}

/// One probe. It has an echo for each field of [`EchoReplies`].
#[derive(Debug)]
struct Flight {
    id: PathId,
    sent: Instant,
    answers: EchoReplies,
    /// The echoes that have no answer. Without one the flight has landed.
    open: [Option<Echo>; ECHOES as usize],
}

impl Flight {
    fn has_landed(&self) -> bool {
        self.open.iter().all(Option::is_none)
    }
}

impl Flights {
    /// Numbers wrap around long after a probe has landed.
    const NUMBERS: u16 = u16::MAX / ECHOES + 1;

    /// Begins a flight. `mtu` is the MTU of the route, if it is lowered. Returns its echoes, with
    /// their sizes.
    pub(crate) fn begin(
        &mut self,
        id: PathId,
        question: &Question,
        mtu: Option<u16>,
        now: Instant,
    ) -> Vec<(Echo, u16)> {
        let number = (self.first + self.flights.len() as u16) % Self::NUMBERS;
        // Of the echoes to the tunnel and the public address, the last one is not needed.
        let probes: Vec<Probe> = question.probes().take(3).collect();
        let of_route = probes.first().zip(mtu).map(|(small, size)| Probe { size, ..*small });
        let [public, lowered] = [probes.get(2), of_route.as_ref()].map(|probe| probe.is_some());
        let answers = EchoReplies {
            small: EchoResult::Nothing,
            full: EchoResult::Nothing,
            public: public.then_some(EchoResult::Nothing),
            lowered: lowered.then_some(EchoResult::Nothing),
        };
        let of_route = of_route.map(|probe| (OF_ROUTE, probe));
        let token = token();
        let mut open = [None; ECHOES as usize];
        let mut echoes = Vec::new();
        for (place, probe) in (0..).zip(probes).chain(of_route) {
            let echo = Echo { to: probe.to, sequence: number * ECHOES + place, token };
            open[usize::from(place)] = Some(echo);
            echoes.push((echo, probe.size));
        }
        self.flights.push_back(Flight { id, sent: now, answers, open });
        echoes
    }

    /// Drops the probes of paths for which `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl Fn(&PathId) -> bool) {
        for flight in self.flights.iter_mut().filter(|flight| !keep(&flight.id)) {
            flight.open = Default::default();
        }
    }

    fn index(&self, sequence: u16) -> usize {
        let number = sequence / ECHOES;
        usize::from((number + Self::NUMBERS - self.first) % Self::NUMBERS)
    }

    /// The flight of an echo that has no answer. `None` if the echo is not known, or does not wait.
    fn of(&mut self, echo: &Echo) -> Option<&mut Flight> {
        let index = self.index(echo.sequence);
        let flight = self.flights.get_mut(index)?;
        (flight.open[usize::from(echo.sequence % ECHOES)] == Some(*echo)).then_some(flight)
    }

    /// When an echo was sent, or `None` if it does not wait for an answer.
    pub(crate) fn sent(&mut self, echo: &Echo) -> Option<Instant> {
        self.of(echo).map(|flight| flight.sent)
    }

    /// Takes in an answer to an echo that waits for one. Returns the flight once all answers are
    /// there.
    pub(crate) fn answer(&mut self, echo: &Echo, answer: EchoResult) -> Option<ProbeResult> {
        let flight = self.of(echo)?;
        let place = echo.sequence % ECHOES;
        flight.open[usize::from(place)] = None;
        match place {
            0 => flight.answers.small = answer,
            1 => flight.answers.full = answer,
            OF_ROUTE => flight.answers.lowered = Some(answer),
            _ => flight.answers.public = Some(answer),
        }
        flight
            .has_landed()
            .then(|| ProbeResult { path: flight.id, answers: flight.answers.clone() })
    }

    /// The next flight whose time is over.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<ProbeResult> {
        loop {
            let flight = self.flights.front()?;
            if !flight.has_landed() && now.duration_since(flight.sent) < TIMEOUT {
                return None;
            }
            let flight = self.flights.pop_front()?;
            self.first = (self.first + 1) % Self::NUMBERS;
            if !flight.has_landed() {
                return Some(ProbeResult { path: flight.id, answers: flight.answers });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::address::Family;

    use super::*;

    const FULL: u16 = 1450;

    fn id() -> PathId {
        PathId { peer: "10.1.7.0-24".parse().unwrap(), family: Family::V4 }
    }

    fn question() -> Question {
        let address = |text: &str, size| Some((text.parse().unwrap(), size));
        Question {
            family: Family::V4,
            device: None,
            takes: None,
            tunnel: address("10.1.7.0", FULL),
            public: address("192.0.2.7", 1500),
            header: 50,
            route_mtu: None,
        }
    }

    fn reply() -> EchoResult {
        EchoResult::Reply(Duration::from_millis(1))
    }

    /// The numbers of a probe in a row of more than there are numbers.
    #[test]
    fn each_answer_belongs_to_its_probe_and_numbers_wrap_around() {
        let mut flights = Flights::default();
        let mut now = Instant::now();
        for _ in 0..20_000 {
            let first: Vec<Echo> =
                flights.begin(id(), &question(), None, now).iter().map(|echo| echo.0).collect();
            let second = flights.begin(id(), &question(), Some(1350), now);
            assert_eq!((first.len(), second.len(), second[3].1), (3, 4, 1350));
            assert_eq!(flights.answer(&first[1], reply()), None);
            assert_eq!(flights.answer(&first[1], EchoResult::Nothing), None, "a second answer");
            assert_eq!(flights.answer(&first[2], reply()), None);
            let ProbeResult { answers, .. } = flights.answer(&first[0], reply()).unwrap();
            assert_eq!(answers.fault(), None);
            now += TIMEOUT;
            let ProbeResult { answers, .. } = flights.expired(now).unwrap();
            assert!(!answers.has_reply(), "those of the second probe: {answers:?}");
            assert_eq!(answers.lowered, Some(EchoResult::Nothing));
            assert_eq!(flights.expired(now), None);
            assert_eq!(flights.answer(&first[0], reply()), None, "it is late");
        }
    }

    #[test]
    fn the_probe_of_a_path_that_is_gone_has_no_end() {
        let mut flights = Flights::default();
        let now = Instant::now();
        let echoes = flights.begin(id(), &question(), None, now);
        flights.retain(|_| false);
        assert_eq!(flights.answer(&echoes[0].0, reply()), None);
        assert_eq!(flights.expired(now + TIMEOUT), None);
    }

    /// A party that knows the address and all sequence numbers, and has seen an earlier probe.
    #[test]
    fn an_answer_counts_only_with_the_token_of_its_probe_and_from_the_address_asked() {
        let mut flights = Flights::default();
        let now = Instant::now();
        let earlier: Vec<Echo> =
            flights.begin(id(), &question(), None, now).iter().map(|echo| echo.0).collect();
        let begun = flights.begin(id(), &question(), Some(1350), now);
        let echoes: Vec<Echo> = begun.iter().map(|(echo, _)| *echo).collect();
        let stranger: std::net::IpAddr = [10, 1, 9, 7].into();
        for answer in [reply(), EchoResult::TooBig(Some(576))] {
            for sequence in 0..=u16::MAX {
                let [small, ..] = echoes[..] else { panic!("{echoes:?}") };
                let old = Echo { sequence, token: earlier[0].token, ..small };
                // The echoes of a probe share its token.
                if !earlier.contains(&old) {
                    assert_eq!(flights.answer(&old, answer.clone()), None);
                }
            }
            for echo in &echoes {
                for forged in [
                    Echo { to: stranger, ..*echo },
                    Echo { token: echo.token ^ 1, ..*echo },
                    Echo { sequence: echo.sequence ^ ECHOES, ..*echo },
                ] {
                    assert_eq!(flights.sent(&forged), None);
                    assert_eq!(flights.answer(&forged, answer.clone()), None);
                }
            }
        }
        let ProbeResult { answers: lost, .. } = flights.expired(now + TIMEOUT).unwrap();
        assert!(!lost.has_reply(), "{lost:?}");
        let ProbeResult { answers: lost, .. } = flights.expired(now + TIMEOUT).unwrap();
        assert_eq!((&lost.full, &lost.lowered), (&EchoResult::Nothing, &Some(EchoResult::Nothing)));
        assert!(!lost.has_reply(), "{lost:?}");
    }
}
