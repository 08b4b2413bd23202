//! Dumps: reading a whole kernel table.

use std::panic::resume_unwind;
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

use flannel_core::kernel::KernelError;
use libc::EBUSY;
use neli::consts::nl::NlmF;
use neli::consts::socket::Msg;
use neli::socket::NlSocket;

use super::{EAGAIN, RECEIVE_BUFFER, Socket, TRIES, is_transient, receive_from, take_each};
use crate::transport::wire::{DONE, ERROR, Message, Messages, outcome};

/// A table of at most this many datagrams is read without a second thread.
const SHORT_TABLE: usize = 4;
/// The size of a part of a long table, in bytes. The reading thread gets the table in parts.
const PART: usize = 256 << 10;
/// The number of parts that may wait for the reading thread, besides the part that it reads.
const WAITING_PARTS: usize = 1;
/// The number of attempts for a table that changes while it is dumped.
const DUMP_TRIES: usize = 32;

impl Socket {
    /// Reads a table. Returns the entries for which `read` is not `None`, in the kernel's order.
    ///
    /// If the kernel marks the dump as inconsistent (`NLM_F_DUMP_INTR`), the dump is repeated.
    /// After 32 attempts the error is `EAGAIN`. `read` sees the messages of every attempt.
    pub(crate) fn dump<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, usize::MAX)
    }

    /// Like [`Socket::dump`], for a table that the kernel dumps in the order of unique keys, such
    /// as nexthop objects. An inconsistent dump is accepted from attempt 4 on. Since Linux 5.13 it
    /// has every entry that existed all the time exactly once. Entries that were added or deleted
    /// during the dump may be missing.
    ///
    /// The first attempts want a consistent dump, because earlier kernels continue a dump by
    /// position. There a deletion can make the kernel skip an entry.
    pub(crate) fn dump_ordered<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, TRIES)
    }

    /// Reads a table. Accepts an inconsistent dump from attempt `accept_interrupted` on, which is
    /// counted from 1.
    fn dump_until<T: Send>(
        &mut self,
        mut request: Messages,
        mut read: impl FnMut(&Message<'_>) -> Option<T> + Send,
        accept_interrupted: usize,
    ) -> Result<Vec<T>, KernelError> {
        for tried in 1..=DUMP_TRIES {
            match self.dump_once(&mut request, &mut read) {
                Ok((all, changed)) if !changed || tried >= accept_interrupted => return Ok(all),
                Ok(_) => {}
                Err(error) if is_transient(&error) || error.is(EBUSY) => self.drain(),
                Err(error) => return Err(error),
            }
        }
        let detail = format!("a table changed {DUMP_TRIES} times while it was read");
        Err(KernelError::explained(EAGAIN, detail))
    }

    /// One attempt: the entries, and whether the table changed during the dump.
    fn dump_once<T: Send>(
        &mut self,
        request: &mut Messages,
        read: &mut (impl FnMut(&Message<'_>) -> Option<T> + Send),
    ) -> Result<(Vec<T>, bool), KernelError> {
        let sequence = self.sequence;
        self.sequence = sequence.wrapping_add(1);
        self.socket.send(request.ready(0..1, sequence, NlmF::DUMP), Msg::empty())?;
        let mut all = Vec::new();
        let mut changed = false;
        let mut end = Ok(());
        self.receive_table(|message| {
            if message.sequence != sequence {
                return false;
            }
            changed |= message.flags.contains(NlmF::DUMP_INTR);
            let is_last = matches!(message.kind, ERROR | DONE);
            if is_last {
                end = outcome(message);
            } else {
                all.extend(read(message));
            }
            is_last
        })?;
        end.map(|()| (all, changed))
    }

    /// Like [`receive_until`](Self::receive_until), but another thread passes the messages of a
    /// long table to `take`. The kernel creates each datagram of a dump inside the call that
    /// receives the one before. So the kernel and the other thread work at the same time.
    fn receive_table(
        &mut self,
        mut take: impl FnMut(&Message<'_>) -> bool + Send,
    ) -> Result<(), KernelError> {
        for _ in 0..SHORT_TABLE {
            if self.receive(&mut take)? {
                return Ok(());
            }
        }
        let socket = &self.socket;
        let reader = &mut take;
        let taken: Result<bool, KernelError> = std::thread::scope(|scope| {
            let (received, parts) = sync_channel::<Vec<u8>>(WAITING_PARTS);
            let reader =
                Builder::new().spawn_scoped(scope, move || -> Result<bool, KernelError> {
                    for part in parts {
                        if take_each(&part, reader)? {
                            return Ok(true);
                        }
                    }
                    Ok(false)
                });
            let Ok(reader) = reader else { return Ok(false) };
            let mut end = Ok(());
            while end.is_ok() {
                let part;
                (part, end) = receive_part(socket);
                if received.send(part).is_err() {
                    break;
                }
            }
            drop(received);
            let taken = reader.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            if taken { Ok(true) } else { end.map(|()| false) }
        });
        // If the second thread could not be started, this thread does the work.
        if taken? { Ok(()) } else { self.receive_until(take) }
    }

    /// Discards the remaining messages of a failed dump.
    fn drain(&mut self) {
        for _ in 0..TRIES {
            if self.receive_until(|_| false).is_err_and(|error| error.is_unreadable()) {
                break;
            }
        }
    }
}

/// Receives whole datagrams until [`PART`] bytes have no room for another one. Returns them, and
/// the error if receiving ended early.
fn receive_part(socket: &NlSocket) -> (Vec<u8>, Result<(), KernelError>) {
    let mut part = vec![0; PART];
    let mut len = 0;
    let mut end = Ok(());
    while PART - len >= RECEIVE_BUFFER && end.is_ok() {
        match receive_from(socket, &mut part[len..]) {
            // Messages begin at multiples of four.
            Ok(more) => len += more.next_multiple_of(4),
            Err(error) => end = Err(error),
        }
    }
    part.truncate(len);
    (part, end)
}
