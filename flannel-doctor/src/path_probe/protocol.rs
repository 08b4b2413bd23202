//! The messages of a path probe.

use std::io;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a datagram begins with; a port and a nonce follow.
pub(super) const QUESTION: &[u8; 8] = b"flannel?";
/// What its acknowledgement begins with; the nonce and the size of the whole packet follow.
pub(super) const NOTICE: &[u8; 8] = b"flannel!";
/// What tells a probe from others.
pub(super) type Nonce = [u8; 8];
/// A question has at least so many bytes: more than its acknowledgement.
pub(super) const LEAST: usize = QUESTION.len() + 2 + size_of::<Nonce>();
/// What a connection begins with: the version of what follows, which is how many bytes and the
/// nonce in hexadecimal.
pub(super) const HELLO: &str = "flannel 1 ";
/// A first line has at most so many bytes.
pub(super) const LINE: usize = 256;
/// So many segments of full size are sent each way.
pub(super) const SEGMENTS: usize = 4;
/// More is neither sent nor taken, in bytes.
pub(super) const MOST: usize = 64 * 1024;

/// What a daemon says has arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrivals {
    pub(super) version: u32,
    /// Of what was announced, in bytes.
    pub(super) received: usize,
    /// What pods there may send, in bytes.
    pub(super) mtu: u32,
    /// The largest packet of this sounding that came as a datagram, in bytes; 0: none.
    pub(super) heard: u16,
    /// So many follow.
    pub(super) bytes: usize,
}

/// So much is sent on a connection: a few segments as large as both ends agreed on.
pub(super) fn amount(stream: &TcpStream) -> io::Result<usize> {
    let segment = socket2::SockRef::from(stream).tcp_mss()?;
    Ok((SEGMENTS * segment as usize).min(MOST))
}

/// The first line, without its end.
///
/// # Errors
/// There is none: the other end went away, or says something else.
pub(super) async fn read_line(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<String> {
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
pub(super) async fn take(
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
pub(super) async fn fill(stream: &mut (impl AsyncWrite + Unpin), bytes: usize) -> io::Result<()> {
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
