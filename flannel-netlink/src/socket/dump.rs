//! Dumps: reading a whole table.

use std::panic::resume_unwind;
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

use flannel_core::kernel::KernelError;
use neli::consts::nl::NlmF;
use neli::consts::socket::Msg;
use neli::socket::NlSocket;

use super::{
    DONE, EAGAIN, ERROR, RECEIVE_BUFFER, Socket, TRIES, is_passing, receive_from, take_each,
};
use crate::wire::{EBADMSG, Message, Messages, outcome};

const EBUSY: i32 = 16;

/// A table of at most so many datagrams is not worth a thread.
const SHORT_TABLE: usize = 4;
/// So much of a long table is received before another thread is woken, …
const PART: usize = 256 << 10;
/// … and so many parts before the first of them is read.
const PARTS: usize = 3;
/// How often a dump is read that changes while it is read.
const DUMP_TRIES: usize = 32;

impl Socket {
    /// Reads a table: everything for which `read` is not `None`, in the kernel's order.
    pub(crate) fn dump<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, |changed, _| !changed)
    }

    /// The same for a table that the kernel dumps in the order of unique keys. Even if it changes
    /// all the time, each entry that is there meanwhile is read once; entries that come or go are
    /// read or not. Kernels before 5.13 continue by count where they stopped, and may leave out
    /// entries behind one that went: so a few tries are made for a table that does not change.
    pub(crate) fn dump_ordered<T: Send>(
        &mut self,
        request: Messages,
        read: impl FnMut(&Message<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.dump_until(request, read, |changed, tried| !changed || tried >= TRIES)
    }

    /// `is_good` decides whether to accept a dump, given whether the table changed meanwhile and
    /// how often it was read by now.
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
                Err(error) if is_passing(&error) || error.errno == EBUSY => self.drain(),
                Err(error) => return Err(error),
            }
        }
        Err(KernelError::explained(
            EAGAIN,
            format!("a table changed {DUMP_TRIES} times while it was read"),
        ))
    }

    /// The entries, and whether the table changed meanwhile.
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

    /// The same as [`receive_until`](Self::receive_until), but another thread takes the parts of a
    /// long table, because the kernel makes each part when it is received.
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
                        // If this was the last part, nobody fills it again.
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
        // No thread can be had: more slowly, then.
        if took? { Ok(()) } else { self.receive_until(take) }
    }

    /// Throws away the rest of an exchange that failed.
    fn drain(&mut self) {
        for _ in 0..TRIES {
            if self.receive_until(|_| false).is_err_and(|error| error.errno == EBADMSG) {
                break;
            }
        }
    }
}

/// Fills `part` with whole datagrams as long as there is room for one more; returns the number of
/// bytes, and the error that came instead of another datagram.
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
