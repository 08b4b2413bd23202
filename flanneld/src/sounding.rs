//! What passes between two nodes, and in which direction: told by both ends, the way that pods' packets go.
//!
//! The one thing to know: an echo that does not come back does not say which way it was lost. So the doctor of one node
//! sounds the daemon of another: it sends a few datagrams, each of which the daemon acknowledges beside the tunnel, from public
//! address to public address; and a TCP connection, on which both send segments of full size and the daemon says what has
//! arrived. What both ends report is a direction; what only one does is none.
//!
//! ```text
//! doctor ══"flannel?" port nonce, small and of full size, UDP══▶ daemon
//!        ◀─────────────"flannel!" nonce size, UDP, to that port─
//! doctor ══"flannel 1 8388 NONCE\n", 8388 bytes, TCP═══════════▶ daemon        ══ in the tunnel
//!        ◀═{"version":1,"received":8388,"mtu":1450,"heard":1450,"bytes":5592}\n, 5592 bytes
//! ```
//!
//! What the doctor sends begins with small segments and goes on with such of full size; the daemon sends back no more than has come.
//! A node that is reached without a tunnel is asked the same at its public address, without datagrams.
//!
//! A Go node, or one whose port is closed, refuses the connection or does not answer: then nothing is said of directions.
//! Nothing of this is in the store.

mod ear;
mod nodes;
mod responder;
mod sounder;

use std::io;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

pub(crate) use responder::{Place, respond};
#[cfg(test)]
pub(crate) use sounder::Passage;
pub(crate) use sounder::{Sounded, Sounding, sound};

/// What a datagram begins with; a port and a nonce follow.
const QUESTION: &[u8; 8] = b"flannel?";
/// What its acknowledgement begins with; the nonce and the size of the whole packet follow.
const NOTICE: &[u8; 8] = b"flannel!";
/// What tells a sounding from others.
type Nonce = [u8; 8];
/// A question has at least so many bytes: more than its acknowledgement.
const LEAST: usize = QUESTION.len() + 2 + size_of::<Nonce>();
/// What a connection begins with: the version of what follows, which is how many bytes and the nonce in hexadecimal.
const HELLO: &str = "flannel 1 ";
/// A first line has at most so many bytes.
const LINE: usize = 256;
/// So many segments of full size are sent each way.
const SEGMENTS: usize = 4;
/// More is neither sent nor taken, in bytes.
const MOST: usize = 64 * 1024;

/// What a daemon says has arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Report {
    version: u32,
    /// Of what was announced, in bytes.
    received: usize,
    /// What pods there may send, in bytes.
    mtu: u32,
    /// The largest packet of this sounding that came as a datagram, in bytes; 0: none.
    heard: u16,
    /// So many follow.
    bytes: usize,
}

/// So much is sent on a connection: a few segments as large as both ends agreed on.
fn amount(stream: &TcpStream) -> io::Result<usize> {
    let segment = socket2::SockRef::from(stream).tcp_mss()?;
    Ok((SEGMENTS * segment as usize).min(MOST))
}

/// The first line, without its end.
///
/// # Errors
/// There is none: the other end went away, or says something else.
async fn read_line(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
    let mut line = Vec::new();
    while line.len() < LINE {
        match stream.read_u8().await? {
            b'\n' => return String::from_utf8(line).map_err(io::Error::other),
            byte => line.push(byte),
        }
    }
    Err(io::Error::other("the first line is too long"))
}

/// Takes `bytes` bytes, and counts them: what came before the caller lost patience counts.
///
/// # Errors
/// The other end ended the connection before. That is no evidence of loss: only waiting in vain is.
async fn take(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: usize,
    taken: &mut usize,
) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while *taken < bytes {
        let wanted = buffer.len().min(bytes - *taken);
        match stream.read(&mut buffer[..wanted]).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            len => *taken += len,
        }
    }
    Ok(())
}

/// Sends so many bytes that mean nothing.
async fn fill(stream: &mut (impl AsyncWrite + Unpin), bytes: usize) -> io::Result<()> {
    stream.write_all(&vec![b'f'; bytes]).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_that_ends_early_is_no_evidence_of_loss() {
        let mut taken = 0;
        take(&mut &b"0123456789"[..], 10, &mut taken).await.unwrap();
        assert_eq!(taken, 10);
        let ended = take(&mut &b"0123456789"[..], 11, &mut 0).await;
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
