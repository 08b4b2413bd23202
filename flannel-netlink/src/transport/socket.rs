//! A netlink socket for requests: batches of requests, consistent dumps, and the kernel's error
//! texts.
//!
//! rtnetlink handles a request inside the system call `send`, which may block on the kernel's RTNL
//! lock. When the call returns, the answer is in the receive buffer. So this module receives
//! without blocking, and a missing answer is an error ([`KernelError::Unreadable`]).

mod dump;

use std::io;
use std::ops::Range;

use flannel_core::kernel::KernelError;
use libc::{EAGAIN, EINTR, EMSGSIZE, ENOBUFS};
use neli::consts::nl::NlmF;
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;

use crate::transport::wire::{ERROR, Message, Messages, messages, outcome};

/// The largest datagram of a dump, in bytes. Other answers are far smaller.
const RECEIVE_BUFFER: usize = 32 << 10;
/// The number of attempts for a request that fails with a transient error.
const TRIES: usize = 4;

/// A socket for requests, in the network namespace of the thread that opened it.
pub(crate) struct Socket {
    socket: NlSocket,
    port: u32,
    /// The sequence number of the next request.
    sequence: u32,
    buffer: Box<[u8]>,
    /// The number of batches sent.
    #[cfg(test)]
    pub(crate) exchanges: usize,
}

impl Socket {
    /// Opens a socket of rtnetlink.
    pub(crate) fn open() -> io::Result<Self> {
        Self::open_to(NlFamily::Route)
    }

    /// Opens a socket of a netlink family that handles requests inside `send`.
    pub(crate) fn open_to(family: NlFamily) -> io::Result<Self> {
        let socket = NlSocket::connect(family, None, Groups::empty())?;
        // Kernels before 4.20 lack strict checking: they do not filter dumps, so all readers filter
        // too. Kernels before 4.12 lack extended acknowledgements: their errors have no text.
        for enabled in [socket.enable_ext_ack(true), socket.enable_strict_checking(true)] {
            if let Err(error) = enabled {
                tracing::debug!(%error, "netlink without extended acknowledgements or strict \
                    checks");
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

    /// The port id of the socket. Notifications of changes that it requested carry this id.
    pub(crate) fn port(&self) -> u32 {
        self.port
    }

    /// Sends all `requests` with one system call. Returns a result for each. Requests that fail
    /// with a transient error are repeated.
    pub(crate) fn send(&mut self, requests: &mut Messages) -> Vec<Result<(), KernelError>> {
        self.try_each(requests, |socket, requests, part| {
            let last = part.len() - 1;
            let mut results = vec![Ok(()); part.len()];
            // The kernel reports an error even without `NLM_F_ACK`. So only the last request has
            // that flag: its answer is the last one.
            socket.exchange(requests, part, NlmF::ACK, |n, message| {
                let is_result = message.kind == ERROR;
                if is_result {
                    results[n] = outcome(message);
                }
                is_result && n == last
            })?;
            Ok(results)
        })
    }

    /// Sends one request, as [`Socket::send`] does.
    pub(crate) fn send_one(&mut self, mut request: Messages) -> Result<(), KernelError> {
        self.send(&mut request).remove(0)
    }

    /// Sends one request, as [`Socket::ask_each`] does.
    pub(crate) fn ask<T>(
        &mut self,
        mut request: Messages,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<T, KernelError> {
        self.ask_each(&mut request, read).remove(0)
    }

    /// Sends all `requests` with one system call. The kernel must answer each with one message.
    /// Returns an answer for each. Requests that fail with a transient error are repeated. The
    /// error is [`KernelError::Unreadable`] if `read` returned `None`.
    pub(crate) fn ask_each<T>(
        &mut self,
        requests: &mut Messages,
        read: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Vec<Result<T, KernelError>> {
        self.try_each(requests, |socket, requests, part| {
            let mut left = part.len();
            let without_answer = KernelError::Unreadable { detail: None };
            let answer = |message: &Message<'_>| {
                if message.kind == ERROR {
                    outcome(message)?;
                    return Err(without_answer.clone());
                }
                let unreadable = "the kernel's answer cannot be understood";
                read(message).ok_or_else(|| KernelError::unreadable(unreadable))
            };
            let mut answers: Vec<_> = part.clone().map(|_| Err(without_answer.clone())).collect();
            socket.exchange(requests, part, NlmF::empty(), |n, message| {
                answers[n] = answer(message);
                left -= 1;
                left == 0
            })?;
            Ok(answers)
        })
    }

    /// Sends `batch` with one system call and adds no flags. Returns the result of each message;
    /// `None` if the kernel did not answer it.
    pub(crate) fn send_as_is(
        &mut self,
        batch: &mut Messages,
    ) -> Result<Vec<Option<Result<(), KernelError>>>, KernelError> {
        let all = 0..batch.len();
        let mut results = vec![None; batch.len()];
        let exchanged = self.exchange(batch, all, NlmF::empty(), |n, message| {
            if message.kind == ERROR {
                results[n] = Some(outcome(message));
            }
            false
        });
        match exchanged {
            // No more answers wait, so all were read.
            Err(error) if error.is_unreadable() => Ok(results),
            exchanged => exchanged.map(|()| results),
        }
    }

    /// Sends all requests with one call of `once`, then repeats each request that failed with a
    /// transient error. If `once` itself fails, it is unknown which requests succeeded, and its
    /// error is the result of each. A request that succeeded can be repeated without harm.
    fn try_each<T>(
        &mut self,
        requests: &mut Messages,
        once: impl Fn(
            &mut Self,
            &mut Messages,
            Range<usize>,
        ) -> Result<Vec<Result<T, KernelError>>, KernelError>,
    ) -> Vec<Result<T, KernelError>> {
        let count = requests.len();
        if count == 0 {
            return Vec::new();
        }
        let mut send = |part: Range<usize>| {
            once(self, requests, part.clone())
                .unwrap_or_else(|error| part.map(|_| Err(error.clone())).collect())
        };
        let mut results = send(0..count);
        for (n, result) in results.iter_mut().enumerate() {
            for _ in 1..TRIES {
                if !result.as_ref().is_err_and(is_transient) {
                    break;
                }
                *result = send(n..n + 1).remove(0);
            }
        }
        results
    }

    /// Sends a part of `requests`. The last one also gets the flags `last`. Passes each answer to
    /// `take`, with the number of its request in that part, until `take` returns true.
    fn exchange(
        &mut self,
        requests: &mut Messages,
        part: Range<usize>,
        last: NlmF,
        mut take: impl FnMut(usize, &Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        let first = self.sequence;
        let count = part.len();
        self.sequence = first.wrapping_add(u32::try_from(count).expect("a batch is short"));
        #[cfg(test)]
        {
            self.exchanges += 1;
        }
        self.socket.send(requests.ready(part, first, last), Msg::empty())?;
        self.receive_until(|message| {
            let n = message.sequence.wrapping_sub(first) as usize;
            n < count && take(n, message)
        })
    }

    /// Receives messages and passes them to `take` until it returns true.
    fn receive_until(
        &mut self,
        mut take: impl FnMut(&Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        while !self.receive(&mut take)? {}
        Ok(())
    }

    /// Receives one datagram and passes its messages to `take`. Returns whether `take` returned
    /// true.
    fn receive(
        &mut self,
        take: &mut impl FnMut(&Message<'_>) -> bool,
    ) -> Result<bool, KernelError> {
        let len = receive_from(&self.socket, &mut self.buffer)?;
        take_each(&self.buffer[..len], take)
    }
}

/// Receives one datagram to the start of `buffer` and returns its length. Never blocks. The error
/// is [`KernelError::Unreadable`] if no datagram waits, and `EMSGSIZE` if the datagram is longer
/// than `buffer`.
fn receive_from(socket: &NlSocket, buffer: &mut [u8]) -> Result<usize, KernelError> {
    loop {
        match socket.recv(&mut *buffer, Msg::DONTWAIT | Msg::TRUNC) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(KernelError::unreadable("the kernel did not answer"));
            }
            Err(error) => return Err(error.into()),
            Ok((len, _)) if len > buffer.len() => {
                let detail = format!("the kernel's answer has {len} bytes");
                return Err(KernelError::explained(EMSGSIZE, detail));
            }
            Ok((len, _)) => return Ok(len),
        }
    }
}

/// Passes the messages in `bytes` to `take` until it returns true. Returns whether it did.
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

/// Whether the same request may succeed when it is repeated.
fn is_transient(error: &KernelError) -> bool {
    matches!(error.errno(), Some(EINTR | EAGAIN | ENOBUFS))
}
