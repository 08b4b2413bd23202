//! The connection on which the kernel is asked and told: batched requests, strict dumps, and the kernel's own
//! explanations.
//!
//! The one thing to know: rtnetlink does its work inside `send`, so the answer is there when `send` returns. Nothing
//! here ever waits for the kernel, and an answer that is not there is an error instead of a hang.

use std::io;
use std::panic::resume_unwind;
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

use flannel_core::kernel::KernelError;
use neli::consts::nl::NlmF;
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;

use crate::wire::{EBADMSG, Message, Messages, messages, outcome};

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;
const EMSGSIZE: i32 = 90;
const ENOBUFS: i32 = 105;

/// The kernel fills at most 32 KiB at a time in a dump; answers and errors are far smaller.
const RECEIVE_BUFFER: usize = 32 << 10;
/// A table of so many datagrams at most is not worth a thread.
const SHORT_TABLE: usize = 4;
/// So much of a long table is received before another thread is woken, …
const PART: usize = 256 << 10;
/// … and so many parts before the first of them is read.
const PARTS: usize = 3;
/// How often a request is tried that fails for a passing reason.
const TRIES: usize = 4;
/// How often a dump is read that changes while it is read.
const DUMP_TRIES: usize = 32;

const ERROR: u16 = 2;
const DONE: u16 = 3;

/// A request connection, in the network namespace of the thread that opened it.
pub(crate) struct Socket {
    socket: NlSocket,
    port: u32,
    sequence: u32,
    buffer: Box<[u8]>,
    /// How often something was sent.
    #[cfg(test)]
    pub(crate) exchanges: usize,
}

impl Socket {
    /// Opens one to rtnetlink.
    pub(crate) fn open() -> io::Result<Self> {
        Self::open_to(NlFamily::Route)
    }

    /// Opens one to any part of the kernel that does its work inside `send`.
    pub(crate) fn open_to(family: NlFamily) -> io::Result<Self> {
        let socket = NlSocket::connect(family, None, Groups::empty())?;
        // Old kernels lack these: then errors are bare and dumps are not filtered, which the readers do anyway.
        for enabled in [socket.enable_ext_ack(true), socket.enable_strict_checking(true)] {
            if let Err(error) = enabled {
                tracing::debug!(%error, "netlink without extended acknowledgements or strict checks");
            }
        }
        let port = socket.pid()?;
        Ok(Self {
            socket,
            port,
            sequence: 0,
            buffer: vec![0; RECEIVE_BUFFER].into(),
            #[cfg(test)]
            exchanges: 0,
        })
    }

    /// The port that notifications of our own changes carry.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Sends all of `requests` at once and returns one result for each. What fails for a passing reason is tried again.
    pub(crate) fn send(&mut self, requests: &mut Messages) -> Vec<Result<(), KernelError>> {
        let mut results = self.exchange(requests, 0, requests.len());
        for (n, result) in results.iter_mut().enumerate() {
            for _ in 1..TRIES {
                if !is_passing(result) {
                    break;
                }
                *result = self.exchange(requests, n, n + 1).remove(0);
            }
        }
        results
    }

    /// Sends one request that has no answer but success or failure.
    pub(crate) fn send_one(&mut self, mut request: Messages) -> Result<(), KernelError> {
        self.send(&mut request).remove(0)
    }

    /// Asks for one thing.
    pub(crate) fn ask<T>(
        &mut self,
        mut request: Messages,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<T, KernelError> {
        self.ask_each(&mut request, read).remove(0)
    }

    /// Sends all of `requests` at once, each of which asks for one thing, and returns one answer for each. What fails for
    /// a passing reason is asked again.
    pub(crate) fn ask_each<T>(
        &mut self,
        requests: &mut Messages,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Result<T, KernelError>> {
        let mut answers = self.ask_once(requests, 0, requests.len(), &read);
        for (n, answer) in answers.iter_mut().enumerate() {
            for _ in 1..TRIES {
                if !is_passing(answer) {
                    break;
                }
                *answer = self.ask_once(requests, n, n + 1, &read).remove(0);
            }
        }
        answers
    }

    /// Reads a table: everything for which `read` is not `None`, in the kernel's order.
    pub(crate) fn dump<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, |changed, _| !changed)
    }

    /// The same for a table that the kernel tells in the order of keys that are unique: even if it changes all the time, whatever is
    /// there meanwhile is told once. What comes or goes is told or not. Kernels before 5.13 go on by count where they stopped, and may
    /// leave out entries behind one that went: so a table that does not change is waited for, a little.
    pub(crate) fn dump_ordered<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, |changed, tried| !changed || tried >= TRIES)
    }

    /// `is_good` says whether to take it, given whether the table changed meanwhile, and how often it was read by now.
    fn dump_until<T: Send>(
        &mut self,
        mut request: Messages,
        mut read: impl FnMut(&Message<'_>) -> Option<T> + Send,
        is_good: impl Fn(bool, usize) -> bool,
    ) -> Result<Vec<T>, KernelError> {
        for tried in 1..=DUMP_TRIES {
            match self.dump_once(&mut request, &mut read) {
                Ok((all, changed)) if is_good(changed, tried) => return Ok(all),
                Ok(_) => {}
                Err(error) if is_passing_error(&error) || error.errno == EBUSY => self.drain(),
                Err(error) => return Err(error),
            }
        }
        Err(KernelError::explained(
            EAGAIN,
            format!("a table changed {DUMP_TRIES} times while it was read"),
        ))
    }

    /// Messages `from` to before `to`, with only the last one acknowledged: errors come without being asked for.
    fn exchange(
        &mut self,
        requests: &mut Messages,
        from: usize,
        to: usize,
    ) -> Vec<Result<(), KernelError>> {
        let count = to - from;
        let mut results = vec![Ok(()); count];
        if count == 0 {
            return results;
        }
        let first = self.sequence;
        self.sequence = first.wrapping_add(u32::try_from(count).expect("a batch is short"));
        let sent = self.socket.send(requests.ready(from, to, first, NlmF::ACK), Msg::empty());
        self.count_exchange();
        let received = sent.map_err(KernelError::from).and_then(|_| {
            self.receive_until(|message| {
                let n = message.sequence.wrapping_sub(first) as usize;
                if message.kind == ERROR && n < count {
                    results[n] = outcome(message, true);
                }
                message.kind == ERROR && n + 1 == count
            })
        });
        match received {
            Ok(()) => results,
            // Which of them failed is not known; all of them can be repeated.
            Err(error) => vec![Err(error); count],
        }
    }

    /// Sends all of `batch` as it is, and returns what the kernel said of each message: `None` of those that it did not
    /// mention.
    pub(crate) fn send_as_is(
        &mut self,
        batch: &mut Messages,
    ) -> Result<Vec<Option<Result<(), KernelError>>>, KernelError> {
        let count = batch.len();
        let first = self.sequence;
        self.sequence = first.wrapping_add(u32::try_from(count).expect("a batch is short"));
        self.socket.send(batch.ready(0, count, first, NlmF::empty()), Msg::empty())?;
        let mut results = vec![None; count];
        let received = self.receive_until(|message| {
            let n = message.sequence.wrapping_sub(first) as usize;
            if message.kind == ERROR && n < count {
                results[n] = Some(outcome(message, true));
            }
            false
        });
        match received {
            // All that there is was read; that is the end.
            Err(error) if error.errno == EBADMSG => Ok(results),
            received => received.map(|()| results),
        }
    }

    /// Messages `from` to before `to`, each of which is answered by one message.
    fn ask_once<T>(
        &mut self,
        requests: &mut Messages,
        from: usize,
        to: usize,
        read: &impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Result<T, KernelError>> {
        let count = to - from;
        let all = |error: KernelError| (0..count).map(|_| Err(error.clone())).collect();
        let mut answers: Vec<Result<T, KernelError>> =
            all(KernelError::explained(EBADMSG, "the kernel's answer cannot be understood"));
        let first = self.sequence;
        self.sequence = first.wrapping_add(u32::try_from(count).expect("a batch is short"));
        let sent = self.socket.send(requests.ready(from, to, first, NlmF::empty()), Msg::empty());
        self.count_exchange();
        let mut left = count;
        let received = sent.map_err(KernelError::from).and_then(|_| {
            self.receive_until(|message| {
                let n = message.sequence.wrapping_sub(first) as usize;
                if n >= count {
                    return false;
                }
                match (message.kind, read(message)) {
                    (ERROR, _) => {
                        answers[n] =
                            Err(outcome(message, true).err().unwrap_or(KernelError::new(EBADMSG)));
                    }
                    (_, Some(value)) => answers[n] = Ok(value),
                    _ => {}
                }
                left -= 1;
                left == 0
            })
        });
        match received {
            Ok(()) => answers,
            // Which of them got lost is not known; all of them can be repeated.
            Err(error) => all(error),
        }
    }

    /// What was read, and whether the table changed meanwhile.
    fn dump_once<T: Send>(
        &mut self,
        request: &mut Messages,
        read: &mut (impl FnMut(&Message<'_>) -> Option<T> + Send),
    ) -> Result<(Vec<T>, bool), KernelError> {
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        self.socket.send(request.ready(0, 1, sequence, NlmF::DUMP), Msg::empty())?;
        let (mut all, mut changed, mut end) = (Vec::new(), false, Ok(()));
        self.receive_table(|message| {
            if message.sequence != sequence {
                return false;
            }
            changed |= message.flags.contains(NlmF::DUMP_INTR);
            match message.kind {
                ERROR => end = outcome(message, true),
                DONE => end = outcome(message, false),
                _ => {
                    all.extend(read(message));
                    return false;
                }
            }
            true
        })?;
        end.map(|()| (all, changed))
    }

    #[cfg_attr(not(test), allow(clippy::unused_self, reason = "only tests count"))]
    fn count_exchange(&mut self) {
        #[cfg(test)]
        {
            self.exchanges += 1;
        }
    }

    /// Gives messages to `take` until it says that it was the last one.
    fn receive_until(
        &mut self,
        mut take: impl FnMut(&Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        while !self.receive(&mut take)? {}
        Ok(())
    }

    /// Gives the messages of one datagram to `take`; true if it said of one that it was the last.
    fn receive(
        &mut self,
        take: &mut impl FnMut(&Message<'_>) -> bool,
    ) -> Result<bool, KernelError> {
        let len = receive_from(&self.socket, &mut self.buffer)?;
        take_each(&self.buffer[..len], take)
    }

    /// The same as [`receive_until`](Self::receive_until), but another thread takes the parts of a long table: the kernel makes
    /// out each part when it is asked for.
    fn receive_table(
        &mut self,
        mut take: impl FnMut(&Message<'_>) -> bool + Send,
    ) -> Result<(), KernelError> {
        for _ in 0..SHORT_TABLE {
            if self.receive(&mut take)? {
                return Ok(());
            }
        }
        let (socket, take) = (&self.socket, &mut take);
        let took: Result<bool, KernelError> = std::thread::scope(|scope| {
            let (filled, to_take) = sync_channel::<(Box<[u8]>, usize)>(PARTS);
            let (emptied, to_fill) = sync_channel::<Box<[u8]>>(PARTS);
            let taker = Builder::new().spawn_scoped(scope, {
                let (emptied, take) = (emptied.clone(), &mut *take);
                move || -> Result<bool, KernelError> {
                    for (part, len) in to_take {
                        if take_each(&part[..len], take)? {
                            return Ok(true);
                        }
                        // Nobody fills it any more if this was the last that there is.
                        let _ = emptied.send(part);
                    }
                    Ok(false)
                }
            });
            let Ok(taker) = taker else { return Ok(false) };
            for _ in 0..PARTS {
                // There is room for all.
                let _ = emptied.send(vec![0; PART].into());
            }
            drop(emptied);
            let mut received = Ok(());
            for mut part in to_fill {
                let (len, end) = receive_part(socket, &mut part);
                received = end;
                if filled.send((part, len)).is_err() || received.is_err() {
                    break;
                }
            }
            drop(filled);
            let took = taker.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            if took { Ok(true) } else { received.map(|()| false) }
        });
        // There are no threads any more: slowly, then.
        if took? { Ok(()) } else { self.receive_until(take) }
    }

    /// Throws away what is left of an exchange that failed.
    fn drain(&mut self) {
        for _ in 0..TRIES {
            if self.receive_until(|_| false).is_err_and(|error| error.errno == EBADMSG) {
                break;
            }
        }
    }
}

/// Fills `part` with whole datagrams as long as there is room for one more, and returns how many bytes there are; and what
/// came instead of the next one, if there was none.
fn receive_part(socket: &NlSocket, part: &mut [u8]) -> (usize, Result<(), KernelError>) {
    let mut len = 0;
    while let Some(room) = part.get_mut(len..).filter(|room| room.len() >= RECEIVE_BUFFER) {
        match receive_from(socket, room) {
            // Messages begin at multiples of four.
            Ok(more) => len += more.next_multiple_of(4),
            Err(error) => return (len, Err(error)),
        }
    }
    (len, Ok(()))
}

/// Puts one datagram at the start of `buffer`, which is to be larger than any, and returns its length.
fn receive_from(socket: &NlSocket, buffer: &mut [u8]) -> Result<usize, KernelError> {
    loop {
        match socket.recv(&mut *buffer, Msg::DONTWAIT | Msg::TRUNC) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(KernelError::explained(EBADMSG, "the kernel did not answer"));
            }
            Err(error) => return Err(error.into()),
            Ok((len, _)) if len > buffer.len() => {
                return Err(KernelError::explained(
                    EMSGSIZE,
                    format!("the kernel's answer has {len} bytes"),
                ));
            }
            Ok((len, _)) => return Ok(len),
        }
    }
}

/// Gives messages to `take` until it says that it was the last one.
fn take_each(
    bytes: &[u8],
    take: &mut impl FnMut(&Message<'_>) -> bool,
) -> Result<bool, KernelError> {
    for message in messages(bytes) {
        if take(&message?) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_passing<T>(result: &Result<T, KernelError>) -> bool {
    result.as_ref().is_err_and(is_passing_error)
}

fn is_passing_error(error: &KernelError) -> bool {
    matches!(error.errno, EINTR | EAGAIN | ENOBUFS)
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::Nlmsg;

    use super::*;

    #[test]
    fn constants_are_nelis() {
        assert_eq!((ERROR, DONE), (Nlmsg::Error.into(), Nlmsg::Done.into()));
    }
}
