//! The probes that wait for answers, and the sequence numbers of their echoes.

use std::collections::VecDeque;
use std::time::Duration;

use flannel_doctor::inputs::echo::{Answer, Probe};
use flannel_doctor::inputs::peers::Question;
use tokio::time::Instant;

use crate::record::PathId;
use crate::verdict::Answers;

/// The time to wait for answers. A path is not probed again before.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);
/// Sequence numbers: that of a flight, and the echo in it.
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

/// One probe. It has an echo for each field of [`Answers`].
#[derive(Debug)]
struct Flight {
    id: PathId,
    sent: Instant,
    answers: Answers,
    /// The echoes that have no answer, as a set of bits; 0: it has landed.
    open: u8,
}

impl Flights {
    /// Numbers wrap around long after a probe has landed.
    const NUMBERS: u16 = u16::MAX / ECHOES + 1;

    /// Begins a flight. `mtu` is that of the route, if it is lowered. Returns its echoes, with
    /// their sequence numbers.
    pub(crate) fn begin(
        &mut self,
        id: PathId,
        question: &Question,
        mtu: Option<u16>,
        now: Instant,
    ) -> Vec<(u16, Probe)> {
        let number = (self.first + self.flights.len() as u16) % Self::NUMBERS;
        // Of the echoes to the tunnel and the public address, the last one is not needed.
        let probes: Vec<Probe> = question.probes().take(3).collect();
        let of_route = probes.first().zip(mtu).map(|(small, size)| Probe { size, ..*small });
        let [public, lowered] = [probes.get(2), of_route.as_ref()].map(|probe| probe.is_some());
        let answers = Answers {
            small: Answer::Nothing,
            full: Answer::Nothing,
            public: public.then_some(Answer::Nothing),
            lowered: lowered.then_some(Answer::Nothing),
        };
        let of_route = of_route.map(|probe| (OF_ROUTE, probe));
        let echoes: Vec<(u16, Probe)> = (0..).zip(probes).chain(of_route).collect();
        let open = echoes.iter().fold(0, |open, (echo, _)| open | 1 << echo);
        self.flights.push_back(Flight { id, sent: now, answers, open });
        echoes.into_iter().map(|(echo, probe)| (number * ECHOES + echo, probe)).collect()
    }

    /// Drops the probes of paths for which `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl Fn(&PathId) -> bool) {
        for flight in self.flights.iter_mut().filter(|flight| !keep(&flight.id)) {
            flight.open = 0;
        }
    }

    fn index(&self, sequence: u16) -> usize {
        let number = sequence / ECHOES;
        usize::from((number + Self::NUMBERS - self.first) % Self::NUMBERS)
    }

    /// When the echo with this number was sent; `None`: it no longer waits.
    pub(crate) fn sent(&self, sequence: u16) -> Option<Instant> {
        self.flights.get(self.index(sequence)).map(|flight| flight.sent)
    }

    /// Takes in an answer. Returns the flight once all answers are there.
    pub(crate) fn answer(&mut self, sequence: u16, answer: Answer) -> Option<(PathId, Answers)> {
        let index = self.index(sequence);
        let flight = self.flights.get_mut(index)?;
        let bit = 1 << (sequence % ECHOES);
        if flight.open & bit == 0 {
            return None;
        }
        flight.open &= !bit;
        match sequence % ECHOES {
            0 => flight.answers.small = answer,
            1 => flight.answers.full = answer,
            OF_ROUTE => flight.answers.lowered = Some(answer),
            _ => flight.answers.public = Some(answer),
        }
        (flight.open == 0).then(|| (flight.id, flight.answers.clone()))
    }

    /// The next flight whose time is over.
    pub(crate) fn expired(&mut self, now: Instant) -> Option<(PathId, Answers)> {
        loop {
            let flight = self.flights.front()?;
            if flight.open != 0 && now.duration_since(flight.sent) < TIMEOUT {
                return None;
            }
            let flight = self.flights.pop_front()?;
            self.first = (self.first + 1) % Self::NUMBERS;
            if flight.open != 0 {
                return Some((flight.id, flight.answers));
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

    fn reply() -> Answer {
        Answer::Reply(Duration::from_millis(1))
    }

    /// The numbers of a probe in a row of more than there are numbers.
    #[test]
    fn each_answer_belongs_to_its_probe_and_numbers_wrap_around() {
        let (mut flights, mut now) = (Flights::default(), Instant::now());
        for _ in 0..20_000 {
            let first: Vec<u16> =
                flights.begin(id(), &question(), None, now).iter().map(|echo| echo.0).collect();
            let second = flights.begin(id(), &question(), Some(1350), now);
            assert_eq!((first.len(), second.len(), second[3].1.size), (3, 4, 1350));
            assert_eq!(flights.answer(first[1], reply()), None);
            assert_eq!(flights.answer(first[1], Answer::Nothing), None, "a second answer");
            assert_eq!(flights.answer(first[2], reply()), None);
            let (_, answers) = flights.answer(first[0], reply()).unwrap();
            assert_eq!(answers.fault(), None);
            now += TIMEOUT;
            let (_, answers) = flights.expired(now).unwrap();
            assert!(!answers.has_reply(), "those of the second probe: {answers:?}");
            assert_eq!(answers.lowered, Some(Answer::Nothing));
            assert_eq!(flights.expired(now), None);
            assert_eq!(flights.answer(first[0], reply()), None, "it is late");
        }
    }

    #[test]
    fn the_probe_of_a_path_that_is_gone_has_no_end() {
        let (mut flights, now) = (Flights::default(), Instant::now());
        let echoes = flights.begin(id(), &question(), None, now);
        flights.retain(|_| false);
        assert_eq!(flights.answer(echoes[0].0, reply()), None);
        assert_eq!(flights.expired(now + TIMEOUT), None);
    }
}
