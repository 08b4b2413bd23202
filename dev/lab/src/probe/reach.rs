//! Probes all pairs of pods at the same time, and repeats each until it succeeds: ping, full-size
//! ping, TCP. Round trips are measured afterwards, so that the probes do not disturb them.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use flannel_core::runtime::lock;

use crate::cluster::pod::Pod;
use crate::error::{Error, Result};
use crate::probe::echo::{PingSocket, SMALL, Unreached, tcp_probe};
use crate::system::interrupt::Interrupter;
use crate::system::parallel::for_each;

/// The result of one ordered pair of pods.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Pair {
    /// The pod that sends.
    pub from: String,
    /// The pod that answers.
    pub to: String,
    /// The address family.
    pub family: Family,
    /// The median round-trip time of three small pings; `None` if the pod is not reached.
    pub rtt: Option<Duration>,
    /// Bytes that TCP echoed; 0 if the pod is not reached.
    pub tcp_bytes: usize,
    /// The reason that the pod is not reached; `None` if it is.
    pub error: Option<Unreached>,
}

impl Pair {
    /// Small and full-size pings and TCP succeed.
    pub fn is_ok(&self) -> bool {
        self.error.is_none()
    }
}

/// All ordered pairs of pods, by family.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Matrix {
    /// Sorted by family, then by `from`, then by `to`.
    pub pairs: Vec<Pair>,
    /// The start of the last daemon, if the lab waited for it, or else of the probes.
    pub since: Instant,
    /// The time when the last pair succeeded; `None` if one did not.
    pub complete: Option<Instant>,
}

impl Matrix {
    /// Every pod reaches every other.
    pub fn is_complete(&self) -> bool {
        self.pairs.iter().all(Pair::is_ok)
    }

    /// The pairs that do not succeed.
    pub fn failures(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.is_ok())
    }

    /// The time until every pod reached every other; `None` if one does not.
    pub fn time_to_complete(&self) -> Option<Duration> {
        Some(self.complete?.duration_since(self.since))
    }
}

/// One pair that is probed.
struct Leg {
    from: usize,
    to: usize,
    family: Family,
    address: IpAddr,
    /// The smaller of the two pods' MTUs.
    mtu: u32,
}

/// An event of a leg.
enum Event {
    /// A small ping was answered; the next has this size.
    Pinged { next: u32 },
    /// A full-size ping was answered.
    PingedFullSize,
    /// The result of TCP.
    Tcp(Result<usize, Unreached>),
    /// A thread of the lab failed.
    Broken(Error),
}

/// Probes every pair until it succeeds, at most for `patience`.
pub(crate) fn reach(
    pods: &[Arc<Pod>],
    patience: Duration,
    interrupter: &Interrupter,
) -> Result<Matrix> {
    let since = Instant::now();
    let legs = legs(pods);
    let mut states: Vec<Result<usize, Unreached>> = vec![Err(Unreached::NoReply); legs.len()];
    let complete = try_all(pods, &legs, &mut states, since + patience, interrupter)?;
    let rtts = measure(pods, &legs, &states, interrupter)?;
    let pair = |((leg, state), rtt): ((&Leg, Result<usize, Unreached>), Option<Duration>)| {
        // A pair that succeeded and then loses every ping fails.
        let state = if rtt.is_some() { state } else { state.and(Err(Unreached::NoReply)) };
        Pair {
            from: pods[leg.from].name().to_owned(),
            to: pods[leg.to].name().to_owned(),
            family: leg.family,
            rtt,
            tcp_bytes: *state.as_ref().unwrap_or(&0),
            error: state.err(),
        }
    };
    let pairs: Vec<Pair> = legs.iter().zip(states).zip(rtts).map(pair).collect();
    let complete = complete.filter(|_| pairs.iter().all(Pair::is_ok));
    Ok(Matrix { pairs, since, complete })
}

fn legs(pods: &[Arc<Pod>]) -> Vec<Leg> {
    let mut legs = Vec::new();
    for family in Family::BOTH {
        for (from, source) in
            pods.iter().enumerate().filter(|(_, pod)| pod.addresses()[family].is_some())
        {
            for (to, target) in pods.iter().enumerate().filter(|(to, _)| *to != from) {
                let Some(address) = target.addresses()[family] else { continue };
                legs.push(Leg { from, to, family, address, mtu: source.mtu().min(target.mtu()) });
            }
        }
    }
    legs
}

/// Returns the time when the last leg succeeded; `None` if one did not.
fn try_all(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    states: &mut [Result<usize, Unreached>],
    deadline: Instant,
    interrupter: &Interrupter,
) -> Result<Option<Instant>> {
    let over = AtomicBool::new(false);
    let (events, inbox) = channel();
    let (jobs, todo) = channel();
    let todo = Mutex::new(todo);
    let workers = std::thread::available_parallelism().map_or(4, |n| (2 * n.get()).clamp(4, 16));
    std::thread::scope(|scope| {
        for (number, pod) in pods.iter().enumerate() {
            for family in Family::BOTH {
                let mine = |(_, leg): &(usize, &Leg)| leg.from == number && leg.family == family;
                let mine: Vec<_> = legs.iter().enumerate().filter(mine).collect();
                let events = events.clone();
                let over = &over;
                if !mine.is_empty() {
                    scope.spawn(move || {
                        let outcome = ping(pod, family, &mine, over, &events);
                        forward_error(&events, outcome);
                    });
                }
            }
        }
        for _ in 0..workers.min(legs.len()) {
            let events = events.clone();
            let todo = &todo;
            let over = &over;
            scope.spawn(move || forward_error(&events, connect(pods, legs, todo, over, &events)));
        }
        drop(events);
        let outcome = coordinate(states, &inbox, &jobs, deadline, interrupter);
        over.store(true, Ordering::Relaxed);
        drop(jobs);
        outcome
    })
}

/// Reports an error of a thread, so that the lab does not wait for that thread.
fn forward_error(events: &Sender<(usize, Event)>, outcome: Result<()>) {
    if let Err(error) = outcome {
        // Sending fails only after the end of the probes.
        let _ = events.send((0, Event::Broken(error)));
    }
}

/// Handles events and starts TCP jobs until no leg is open.
fn coordinate(
    states: &mut [Result<usize, Unreached>],
    inbox: &Receiver<(usize, Event)>,
    jobs: &Sender<usize>,
    deadline: Instant,
    interrupter: &Interrupter,
) -> Result<Option<Instant>> {
    // A path MTU does not change soon: the kernel keeps it for ten minutes.
    let open =
        |state: &Result<usize, Unreached>| !matches!(state, Ok(_) | Err(Unreached::PathMtu { .. }));
    let mut left = states.iter().filter(|state| open(state)).count();
    let mut again: Vec<(Instant, usize)> = Vec::new();
    let mut last = Instant::now();
    while left > 0 && Instant::now() < deadline {
        interrupter.check()?;
        let now = Instant::now();
        for (_, leg) in again.extract_if(.., |(due, _)| *due <= now) {
            let _ = jobs.send(leg);
        }
        let (leg, event) = match inbox.recv_timeout(Duration::from_millis(10)) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        match event {
            Event::Pinged { next } => states[leg] = Err(Unreached::FullSizeLost { size: next }),
            Event::PingedFullSize => {
                states[leg] = Err(Unreached::Unfinished);
                let _ = jobs.send(leg);
            }
            Event::Tcp(outcome) => {
                states[leg] = outcome;
                if open(&states[leg]) {
                    again.push((Instant::now() + Duration::from_millis(20), leg));
                } else {
                    left -= 1;
                    last = Instant::now();
                }
            }
            Event::Broken(error) => return Err(error),
        }
    }
    Ok(states.iter().all(Result::is_ok).then_some(last))
}

/// Pings all peers of a pod until each has answered a small and a full-size ping.
fn ping(
    pod: &Pod,
    family: Family,
    legs: &[(usize, &Leg)],
    over: &AtomicBool,
    events: &Sender<(usize, Event)>,
) -> Result<()> {
    #[derive(Clone, Copy)]
    struct Target {
        size: u32,
        due: Instant,
        pause: Duration,
        reached: bool,
    }
    const FIRST_PAUSE: Duration = Duration::from_millis(20);
    const LONGEST_PAUSE: Duration = Duration::from_millis(320);
    let fail = |e| Error::io(format!("{}: pinging", pod.name()))(e);
    pod.namespace().enter()?;
    let socket = PingSocket::open(family).map_err(fail)?;
    let start = Instant::now();
    let fresh = Target { size: SMALL, due: start, pause: FIRST_PAUSE, reached: false };
    let mut targets = vec![fresh; legs.len()];
    while !over.load(Ordering::Relaxed) && targets.iter().any(|target| !target.reached) {
        let now = Instant::now();
        let mut next = now + FIRST_PAUSE;
        for (target, (_, leg)) in targets.iter_mut().zip(legs).filter(|(target, _)| !target.reached)
        {
            if target.due <= now {
                // An error, such as a missing route, counts as a lost packet.
                let _ = socket.send(leg.address, 0, target.size);
                target.due = now + target.pause;
                target.pause = (target.pause * 2).min(LONGEST_PAUSE);
            }
            next = next.min(target.due);
        }
        let Some(reply) = socket.receive(next.saturating_duration_since(now)).map_err(fail)? else {
            continue;
        };
        let Some(place) = legs.iter().position(|(_, leg)| leg.address == reply.from) else {
            continue;
        };
        let (number, leg) = legs[place];
        let target = &mut targets[place];
        // A repeated ping may be answered twice.
        if target.reached || target.size != reply.size {
            continue;
        }
        let event = if target.size == leg.mtu {
            target.reached = true;
            Event::PingedFullSize
        } else {
            *target = Target { size: leg.mtu, ..fresh };
            Event::Pinged { next: leg.mtu }
        };
        let _ = events.send((number, event));
    }
    Ok(())
}

/// Runs TCP jobs until the channel is closed.
fn connect(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    todo: &Mutex<Receiver<usize>>,
    over: &AtomicBool,
    events: &Sender<(usize, Event)>,
) -> Result<()> {
    loop {
        let job = lock(todo).recv();
        let Some(number) = job.ok().filter(|_| !over.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let leg = &legs[number];
        pods[leg.from].namespace().enter()?;
        let _ = events.send((number, Event::Tcp(tcp_probe(leg.address, leg.mtu))));
    }
}

/// Measures the round-trip times of the legs that succeeded, a few at a time.
fn measure(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    states: &[Result<usize, Unreached>],
    interrupter: &Interrupter,
) -> Result<Vec<Option<Duration>>> {
    let rtts = Mutex::new(vec![None; legs.len()]);
    let reached: Vec<usize> = (0..legs.len()).filter(|leg| states[*leg].is_ok()).collect();
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
    for_each(&reached, workers, interrupter, |number| {
        let leg = &legs[*number];
        let pod = &pods[leg.from];
        pod.namespace().enter()?;
        let object = format!("{}: pinging {}", pod.name(), leg.address);
        let rtt = median(leg).map_err(Error::io(object))?;
        lock(&rtts)[*number] = rtt;
        Ok(())
    })?;
    Ok(rtts.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The median of three pings, of at most six that are sent; `None` if the first two are lost.
fn median(leg: &Leg) -> std::io::Result<Option<Duration>> {
    let socket = PingSocket::open(leg.family)?;
    let mut rtts = Vec::new();
    for sequence in 1..=6 {
        rtts.extend(socket.round_trip(leg.address, sequence).unwrap_or(None));
        match (rtts.len(), sequence) {
            (3, _) => break,
            (0, 2) => return Ok(None),
            _ => {}
        }
    }
    rtts.sort_unstable();
    Ok(rtts.get(rtts.len() / 2).copied())
}
