//! Which pod reaches which. Every pair is tried at the same time, again and again, until it
//! succeeds: ping, full-size ping, TCP; round trips are measured afterwards, in peace.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flannel_core::address::Family;

use crate::echo::{PingSocket, SMALL, Unreached, tcp_probe};
use crate::error::{Error, Result};
use crate::interrupt::Interrupter;
use crate::pod::Pod;

/// Whether, and how fast, one pod reaches another.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Pair {
    /// The pod that asks.
    pub from: String,
    /// The pod that answers.
    pub to: String,
    /// By which family.
    pub family: Family,
    /// The median of three small pings' round-trip times; `None` if it is not reached.
    pub rtt: Option<Duration>,
    /// How many bytes went there and back over TCP; 0 if it is not reached.
    pub tcp_bytes: usize,
    /// Why it is not reached; `None` if it is.
    pub error: Option<Unreached>,
}

impl Pair {
    /// Small and full-size pings and TCP come through.
    pub fn is_ok(&self) -> bool {
        self.error.is_none()
    }
}

/// All ordered pairs of pods, by family.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Matrix {
    /// By family, then by the one who asks, then by the one who answers.
    pub pairs: Vec<Pair>,
    /// When the last daemon was started, if the lab waited for that, or when the asking began.
    pub since: Instant,
    /// When the last pair was reached; `None` if one is not.
    pub complete: Option<Instant>,
}

impl Matrix {
    /// Everything reaches everything.
    pub fn is_complete(&self) -> bool {
        self.pairs.iter().all(Pair::is_ok)
    }

    /// The pairs that do not reach each other.
    pub fn failures(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.is_ok())
    }

    /// How long it took until everything reached everything; `None` if something does not.
    pub fn time_to_complete(&self) -> Option<Duration> {
        Some(self.complete?.duration_since(self.since))
    }
}

/// One pair while it is tried.
struct Leg {
    from: usize,
    to: usize,
    family: Family,
    address: IpAddr,
    /// The smaller of the two pods' MTUs.
    mtu: u32,
}

/// What happened to a leg.
enum News {
    /// A small ping came back; the next has this size.
    Pinged { next: u32 },
    /// A full-size ping came back, too.
    PingedFullSize,
    /// TCP worked, or not.
    Tcp(Result<usize, Unreached>),
    /// The lab itself failed.
    Broken(Error),
}

/// Tries every pair until it succeeds, at most for `patience`.
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
        // A pair that worked and now loses every ping does not work.
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

/// Returns when the last leg succeeded, `None` if one did not.
fn try_all(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    states: &mut [Result<usize, Unreached>],
    deadline: Instant,
    interrupter: &Interrupter,
) -> Result<Option<Instant>> {
    let over = AtomicBool::new(false);
    let (news, inbox) = channel();
    let (jobs, todo) = channel();
    let todo = Mutex::new(todo);
    let workers = std::thread::available_parallelism().map_or(4, |n| (2 * n.get()).clamp(4, 16));
    std::thread::scope(|scope| {
        for (number, pod) in pods.iter().enumerate() {
            for family in Family::BOTH {
                let mine = |(_, leg): &(usize, &Leg)| leg.from == number && leg.family == family;
                let mine: Vec<_> = legs.iter().enumerate().filter(mine).collect();
                let (news, over) = (news.clone(), &over);
                if !mine.is_empty() {
                    scope.spawn(move || broken(&news, ping(pod, family, &mine, over, &news)));
                }
            }
        }
        for _ in 0..workers.min(legs.len()) {
            let (news, todo, over) = (news.clone(), &todo, &over);
            scope.spawn(move || broken(&news, connect(pods, legs, todo, over, &news)));
        }
        drop(news);
        let outcome = coordinate(states, &inbox, &jobs, deadline, interrupter);
        over.store(true, Ordering::Relaxed);
        drop(jobs);
        outcome
    })
}

/// Passes on that a thread failed, so that the lab ends instead of waiting for it.
fn broken(news: &Sender<(usize, News)>, outcome: Result<()>) {
    if let Err(error) = outcome {
        // Nobody listens only if everything is over.
        let _ = news.send((0, News::Broken(error)));
    }
}

/// Follows the news and hands out TCP jobs until nothing is left to try.
fn coordinate(
    states: &mut [Result<usize, Unreached>],
    inbox: &Receiver<(usize, News)>,
    jobs: &Sender<usize>,
    deadline: Instant,
    interrupter: &Interrupter,
) -> Result<Option<Instant>> {
    // A path that was found too small stays so: the kernel remembers it for ten minutes.
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
            Ok(news) => news,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        match event {
            News::Pinged { next } => states[leg] = Err(Unreached::FullSizeLost { size: next }),
            News::PingedFullSize => {
                states[leg] = Err(Unreached::Unfinished);
                let _ = jobs.send(leg);
            }
            News::Tcp(outcome) => {
                states[leg] = outcome;
                if open(&states[leg]) {
                    again.push((Instant::now() + Duration::from_millis(20), leg));
                } else {
                    left -= 1;
                    last = Instant::now();
                }
            }
            News::Broken(error) => return Err(error),
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
    news: &Sender<(usize, News)>,
) -> Result<()> {
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
    let fresh = |_| Target { size: SMALL, due: start, pause: FIRST_PAUSE, reached: false };
    let mut targets: Vec<Target> = legs.iter().map(fresh).collect();
    while !over.load(Ordering::Relaxed) && targets.iter().any(|target| !target.reached) {
        let now = Instant::now();
        let mut next = now + FIRST_PAUSE;
        for (target, (_, leg)) in targets.iter_mut().zip(legs).filter(|(target, _)| !target.reached)
        {
            if target.due <= now {
                // No route yet, or a full queue: as good as a lost packet.
                let _ = socket.send(leg.address, 0, target.size);
                target.due = now + target.pause;
                target.pause = (target.pause * 2).min(LONGEST_PAUSE);
            }
            next = next.min(target.due);
        }
        let Some(reply) = socket.receive(next.saturating_duration_since(now)).map_err(fail)? else {
            continue;
        };
        let place = legs.iter().position(|(_, leg)| leg.address == reply.from);
        // A repeated ping may be answered twice.
        let awaited =
            |place: &usize| !targets[*place].reached && targets[*place].size == reply.size;
        let Some(place) = place.filter(awaited) else { continue };
        let ((number, leg), target) = (legs[place], &mut targets[place]);
        let event = if target.size == leg.mtu {
            target.reached = true;
            News::PingedFullSize
        } else {
            *target = Target { size: leg.mtu, ..fresh(&legs[place]) };
            News::Pinged { next: leg.mtu }
        };
        let _ = news.send((number, event));
    }
    Ok(())
}

/// Takes TCP jobs until there will be no more.
fn connect(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    todo: &Mutex<Receiver<usize>>,
    over: &AtomicBool,
    news: &Sender<(usize, News)>,
) -> Result<()> {
    loop {
        let job = todo.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Some(number) = job.ok().filter(|_| !over.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let leg = &legs[number];
        pods[leg.from].namespace().enter()?;
        let _ = news.send((number, News::Tcp(tcp_probe(leg.address, leg.mtu))));
    }
}

/// The round-trip times of the legs that succeeded, few at a time so that they do not disturb each other.
fn measure(
    pods: &[Arc<Pod>],
    legs: &[Leg],
    states: &[Result<usize, Unreached>],
    interrupter: &Interrupter,
) -> Result<Vec<Option<Duration>>> {
    let rtts = Mutex::new(vec![None; legs.len()]);
    let next = Mutex::new(0..legs.len());
    let take =
        || next.lock().unwrap_or_else(PoisonError::into_inner).find(|leg| states[*leg].is_ok());
    let worker = || {
        while let Some(number) = take() {
            interrupter.check()?;
            let leg = &legs[number];
            pods[leg.from].namespace().enter()?;
            let fail =
                |e| Error::io(format!("{}: pinging {}", pods[leg.from].name(), leg.address))(e);
            let rtt = median(leg).map_err(fail)?;
            rtts.lock().unwrap_or_else(PoisonError::into_inner)[number] = rtt;
        }
        Ok(())
    };
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get().div_ceil(2));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).fold(Ok(()), Result::and)
    })?;
    Ok(rtts.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The median of three pings; a lost one is repeated once.
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
