//! The messages of a path probe.

use std::io;
use std::time::SystemTime;

use flannel_core::object::PublicKey;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// The first bytes of a datagram. A port and a nonce follow.
pub(super) const DATAGRAM: &[u8; 8] = b"flannel?";
/// The first bytes of its acknowledgement. The nonce and the size of the whole packet follow.
pub(super) const ACK: &[u8; 8] = b"flannel!";
/// Identifies a probe.
pub(super) type Nonce = [u8; 8];
/// The minimum size of a datagram, in bytes. It is more than the size of an acknowledgement.
pub(super) const MIN_DATAGRAM: usize = DATAGRAM.len() + 2 + size_of::<Nonce>();
/// The first bytes of a connection, with the version. The number of bytes that the client sends
/// and the nonce in hexadecimal follow.
pub(super) const HELLO: &str = "flannel 1 ";
/// The first bytes of a question about a tunnel, with the version. The name of a family follows. An
/// older daemon closes the connection.
pub(super) const TUNNEL: &str = "flannel tunnel 1 ";
/// The maximum length of the first line, in bytes.
pub(super) const LINE: usize = 512;
/// The number of segments of full size that each end sends.
pub(super) const SEGMENTS: usize = 4;
/// The maximum number of bytes that an end sends or reads on a connection.
pub(super) const MAX_BYTES: usize = 64 * 1024;

/// A daemon's report of the data that arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrivals {
    pub(super) version: u32,
    /// Bytes that arrived of those that the client announced.
    pub(super) received: usize,
    /// The MTU of pods on that node, in bytes.
    pub(super) mtu: u32,
    /// The largest packet of this probe that arrived as a datagram, in bytes, or 0 if none arrived.
    #[serde(rename = "heard")]
    pub(super) largest_datagram: u16,
    /// Bytes that the daemon sends after this line.
    pub(super) bytes: usize,
    /// The daemon's clock, in seconds since 1970. An older daemon does not send it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) time: Option<i64>,
}

/// A daemon's report of its end of the encrypted tunnel to the node that asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarEnd {
    pub(crate) version: u32,
    /// The public key of its device.
    #[serde(with = "text")]
    pub key: PublicKey,
    /// The UDP port at which its device receives.
    pub port: u16,
    /// Its clock, in seconds since 1970.
    pub time: i64,
    /// Its peer with the pods of the node that asks, or `None` if it has no such peer.
    pub peer: Option<FarPeer>,
}

/// The peer that has the pods of the node that asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FarPeer {
    /// The public key by which it knows that node.
    #[serde(with = "text")]
    pub key: PublicKey,
    /// The digest of the preshared key, or `None` without a key.
    pub psk: Option<u32>,
    /// Bytes that it received from that node.
    pub received: u64,
    /// Bytes that it sent to that node.
    pub sent: u64,
    /// The time of the last handshake by its clock, in seconds since 1970, or `None` before the
    /// first.
    pub handshake: Option<i64>,
}

/// Public keys as text.
mod text {
    use flannel_core::object::PublicKey;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(key: &PublicKey, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(key)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PublicKey, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// Seconds since 1970; `None` before.
pub(super) fn seconds(time: SystemTime) -> Option<i64> {
    i64::try_from(time.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs()).ok()
}

/// This host's clock, in seconds since 1970.
pub(super) fn clock() -> Option<i64> {
    seconds(SystemTime::now())
}

/// The bytes to send on a connection: a few segments of the size that both ends agreed on.
pub(super) fn amount(stream: &TcpStream) -> io::Result<usize> {
    let segment = socket2::SockRef::from(stream).tcp_mss()?;
    Ok((SEGMENTS * segment as usize).min(MAX_BYTES))
}

/// Reads the first line, without its end.
///
/// # Errors
/// The other end closed the connection, or the line is too long or no UTF-8.
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

/// Reads `bytes` bytes and counts them in `taken`, which is valid also if the caller drops the
/// future after a timeout.
///
/// # Errors
/// The other end closed the connection early. This does not prove a loss. Only a timeout does.
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

/// Sends `bytes` bytes of padding.
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
