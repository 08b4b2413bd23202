//! The connection on which the kernel is asked: batched requests, strict dumps, and the kernel's
//! own explanations.
//!
//! rtnetlink does its work inside `send`, so the answer is there when `send` returns. Nothing here
//! waits for the kernel, and a missing answer is an error instead of a hang.

mod dump;

use std::io;
use std::ops::Range;

use flannel_core::kernel::KernelError;
use neli::consts::nl::NlmF;
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;

use crate::wire::{EBADMSG, Message, Messages, messages, outcome};

const EINTR: i32 = 4;
const EAGAIN: i32 = 11;
const EMSGSIZE: i32 = 90;
const ENOBUFS: i32 = 105;

/// The kernel fills at most 32 KiB at a time in a dump; answers and errors are far smaller.
const RECEIVE_BUFFER: usize = 32 << 10;
/// How often a request is tried that fails for a passing reason.
const TRIES: usize = 4;

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
        // Old kernels lack these: then errors are bare and dumps are not filtered, which the
        // readers do anyway.
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

    /// Sends all of `requests` at once and returns one result for each. A request that fails for a
    /// passing reason is tried again.
    pub(crate) fn send(&mut self, requests: &mut Messages) -> Vec<Result<(), KernelError>> {
        self.try_each(requests, Self::send_once)
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

    /// Sends all of `requests` at once, each of which asks for one thing, and returns one answer
    /// for each. A request that fails for a passing reason is tried again.
    pub(crate) fn ask_each<T>(
        &mut self,
        requests: &mut Messages,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Result<T, KernelError>> {
        self.try_each(requests, |socket, requests, part| socket.ask_once(requests, part, &read))
    }

    /// Sends all of `batch` as it is, and returns the kernel's answer to each message: `None` for
    /// those that it did not answer.
    pub(crate) fn send_as_is(
        &mut self,
        batch: &mut Messages,
    ) -> Result<Vec<Option<Result<(), KernelError>>>, KernelError> {
        let all = 0..batch.len();
        let mut results = vec![None; batch.len()];
        let exchanged = self.exchange(batch, all, NlmF::empty(), |n, message| {
            if message.kind == ERROR {
                results[n] = Some(outcome(message, true));
            }
            false
        });
        match exchanged {
            // All answers were read.
            Err(error) if error.errno == EBADMSG => Ok(results),
            exchanged => exchanged.map(|()| results),
        }
    }

    /// Does all requests at once, then those again that failed for a passing reason.
    fn try_each<T>(
        &mut self,
        requests: &mut Messages,
        once: impl Fn(&mut Self, &mut Messages, Range<usize>) -> Vec<Result<T, KernelError>>,
    ) -> Vec<Result<T, KernelError>> {
        if requests.len() == 0 {
            return Vec::new();
        }
        let mut results = once(self, requests, 0..requests.len());
        for (n, result) in results.iter_mut().enumerate() {
            for _ in 1..TRIES {
                if !result.as_ref().is_err_and(is_passing) {
                    break;
                }
                *result = once(self, requests, n..n + 1).remove(0);
            }
        }
        results
    }

    /// Sends a part of `requests` with only the last one acknowledged: errors come without being
    /// asked for.
    fn send_once(
        &mut self,
        requests: &mut Messages,
        part: Range<usize>,
    ) -> Vec<Result<(), KernelError>> {
        let count = part.len();
        let mut results = vec![Ok(()); count];
        let exchanged = self.exchange(requests, part, NlmF::ACK, |n, message| {
            if message.kind == ERROR {
                results[n] = outcome(message, true);
            }
            message.kind == ERROR && n + 1 == count
        });
        match exchanged {
            Ok(()) => results,
            // Which of them failed is not known; all of them can be repeated.
            Err(error) => vec![Err(error); count],
        }
    }

    /// Sends a part of `requests`, each of which is answered by one message.
    fn ask_once<T>(
        &mut self,
        requests: &mut Messages,
        part: Range<usize>,
        read: &impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Result<T, KernelError>> {
        let mut left = part.len();
        let all = |error: KernelError| part.clone().map(|_| Err(error.clone())).collect();
        let unreadable =
            || KernelError::explained(EBADMSG, "the kernel's answer cannot be understood");
        let mut answers: Vec<Result<T, KernelError>> = all(unreadable());
        let exchanged = self.exchange(requests, part.clone(), NlmF::empty(), |n, message| {
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
        });
        match exchanged {
            Ok(()) => answers,
            // Which of them got lost is not known; all of them can be repeated.
            Err(error) => all(error),
        }
    }

    /// Sends a part of `requests` with these flags on the last, and gives each answer with the
    /// number of its request to `take` until that returns true.
    fn exchange(
        &mut self,
        requests: &mut Messages,
        part: Range<usize>,
        last: NlmF,
        mut take: impl FnMut(usize, &Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        let (first, count) = (self.sequence, part.len());
        self.sequence = first.wrapping_add(u32::try_from(count).expect("a batch is short"));
        #[cfg(test)]
        {
            self.exchanges += 1;
        }
        self.socket.send(requests.ready(part.start, part.end, first, last), Msg::empty())?;
        self.receive_until(|message| {
            let n = message.sequence.wrapping_sub(first) as usize;
            n < count && take(n, message)
        })
    }

    /// Gives messages to `take` until it returns true.
    fn receive_until(
        &mut self,
        mut take: impl FnMut(&Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        while !self.receive(&mut take)? {}
        Ok(())
    }

    /// Gives the messages of one datagram to `take`; true if that returned true.
    fn receive(
        &mut self,
        take: &mut impl FnMut(&Message<'_>) -> bool,
    ) -> Result<bool, KernelError> {
        let len = receive_from(&self.socket, &mut self.buffer)?;
        take_each(&self.buffer[..len], take)
    }
}

/// Puts one datagram at the start of `buffer`, which must be larger than any, and returns its
/// length.
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

/// Gives messages to `take` until it returns true; returns whether it did.
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

/// The same request may succeed later.
fn is_passing(error: &KernelError) -> bool {
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
