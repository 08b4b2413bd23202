//! ICMP and TCP probes, and the TCP echo service.
//!
//! Large TCP writes do not show a wrong MTU, because virtual devices pass them on unsegmented. A
//! repeated ping does not either, because the kernel adapts to a smaller path MTU. So the TCP probe
//! sends a single full-size segment first, and checks that the segment size has not changed.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use nix::sys::socket::{
    AddressFamily, Shutdown, SockFlag, SockProtocol, SockType, getsockopt, shutdown, socket,
    sockopt,
};

use crate::error::{Error, Result};
use crate::system::namespace::Namespace;
use crate::system::privilege::has_ipv6;

/// The port of the echo service (RFC 862).
const PORT: u16 = 7;

/// The timeout of each TCP read and write.
const STALL: Duration = Duration::from_secs(2);

/// Bytes that a TCP probe sends after the full-size segment.
const BULK: usize = 64 * 1024;

/// The size of a small ping with its IP header, in bytes.
pub(crate) const SMALL: u32 = 84;

/// A TCP echo service in a namespace. Dropping it ends the service.
#[derive(Debug)]
pub(crate) struct EchoServer {
    listener: Arc<TcpListener>,
    thread: Option<JoinHandle<()>>,
}

impl EchoServer {
    /// Starts the service on every address of the namespace.
    pub(crate) fn start(namespace: &Namespace) -> Result<Self> {
        let everywhere: IpAddr =
            if has_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let object = format!("{}: TCP port {PORT}", namespace.name());
        let listener =
            namespace.run(|| TcpListener::bind((everywhere, PORT)))?.map_err(Error::io(object))?;
        let listener = Arc::new(listener);
        let accepting = listener.clone();
        let thread = std::thread::spawn(move || {
            std::thread::scope(|connections| {
                // Ends when the listener is shut down.
                while let Ok((stream, _)) = accepting.accept() {
                    // The client reports a broken connection.
                    connections.spawn(move || echo(&stream).ok());
                }
            });
        });
        Ok(Self { listener, thread: Some(thread) })
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        // Fails only if the listener is shut down already.
        let _ = shutdown(self.listener.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn echo(mut stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(STALL))?;
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            n => stream.write_all(&buffer[..n])?,
        }
    }
}

/// The reason that one pod does not reach another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreached {
    /// No ping was answered.
    #[error("no reply")]
    NoReply,
    /// Only small pings were answered.
    #[error("no reply to full-size packets of {size} bytes")]
    FullSizeLost {
        /// Bytes of the packet, IP header included.
        size: u32,
    },
    /// The TCP connection was refused.
    #[error("TCP connection refused")]
    TcpRefused,
    /// The TCP connection stalled.
    #[error("TCP stalled after {bytes} bytes")]
    TcpStalled {
        /// Bytes that came back before.
        bytes: usize,
    },
    /// The path between the pods takes only packets that are smaller than their MTU.
    #[error("MTU {mtu} is wrong: the path takes {path} bytes")]
    PathMtu {
        /// The smaller of the two pods' MTUs, in bytes.
        mtu: u32,
        /// The path MTU, in bytes; at most 12 too low if TCP timestamps are off.
        path: u32,
    },
    /// Another TCP error.
    #[error("TCP: {0}")]
    Tcp(String),
    /// Pings were answered, but there was no time left for TCP.
    #[error("no time left for TCP")]
    Unfinished,
}

/// Sends a full-size segment and then 64 KiB to the echo service at `to`, from the calling thread's
/// namespace. Returns the number of bytes that came back. `mtu` is the smaller of the pods' MTUs.
pub(crate) fn tcp_probe(to: IpAddr, mtu: u32) -> Result<usize, Unreached> {
    let mut bytes = 0;
    match tcp_exchange(to, mtu, &mut bytes) {
        Ok(path) if path < mtu => Err(Unreached::PathMtu { mtu, path }),
        Ok(_) => Ok(bytes),
        Err(e) => Err(match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Unreached::TcpStalled { bytes },
            ErrorKind::ConnectionRefused => Unreached::TcpRefused,
            _ => Unreached::Tcp(e.to_string()),
        }),
    }
}

/// Returns the path MTU that the kernel assumes at the end.
fn tcp_exchange(to: IpAddr, mtu: u32, bytes: &mut usize) -> io::Result<u32> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(to, PORT), STALL)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(STALL))?;
    let segment = getsockopt(&stream, sockopt::TcpMaxSeg)? as usize;
    // A block of one segment is one packet. Virtual devices segment bigger blocks late or never.
    for len in [segment].into_iter().chain([BULK / 4; 4]) {
        let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        stream.write_all(&sent)?;
        let mut received = vec![0; len];
        let mut filled = 0;
        while filled < len {
            match stream.read(&mut received[filled..])? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => {
                    filled += n;
                    *bytes += n;
                }
            }
        }
        if received != sent {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "the echo differs from what was sent",
            ));
        }
    }
    let headers = headers(Family::of(to)) + 20 + TIMESTAMPS;
    // Without timestamps the result would be too large, so it is limited to the MTU.
    Ok((getsockopt(&stream, sockopt::TcpMaxSeg)? + headers).min(mtu))
}

/// The TCP timestamp option that Linux sends by default, in bytes.
const TIMESTAMPS: u32 = 12;

/// The IP header, in bytes.
const fn headers(family: Family) -> u32 {
    match family {
        Family::V4 => 20,
        Family::V6 => 40,
    }
}

/// A socket that sends pings and receives their answers. The kernel sets identifiers and checksums.
#[derive(Debug)]
pub(crate) struct PingSocket {
    // A ping socket is a datagram socket, so the calls of UDP work. Ports have no meaning.
    socket: UdpSocket,
    family: Family,
}

/// An answered ping.
pub(crate) struct Reply {
    pub(crate) from: IpAddr,
    pub(crate) sequence: u16,
    /// Bytes of the packet, IP header included.
    pub(crate) size: u32,
}

impl PingSocket {
    /// Opens a socket in the calling thread's namespace. `net.ipv4.ping_group_range` must allow it.
    ///
    /// **Source**: linux `net/ipv4/ping.c`.
    pub(crate) fn open(family: Family) -> io::Result<Self> {
        let (domain, protocol) = match family {
            Family::V4 => (AddressFamily::Inet, SockProtocol::Icmp),
            Family::V6 => (AddressFamily::Inet6, SockProtocol::IcmpV6),
        };
        let fd = socket(domain, SockType::Datagram, SockFlag::SOCK_CLOEXEC, protocol)?;
        Ok(Self { socket: UdpSocket::from(fd), family })
    }

    /// Sends a ping of `size` bytes, IP header included. It may not be fragmented, unless it is
    /// longer than the path MTU that the kernel knows.
    pub(crate) fn send(&self, to: IpAddr, sequence: u16, size: u32) -> io::Result<()> {
        let request = match self.family {
            Family::V4 => 8,
            Family::V6 => 128,
        };
        let len = size.saturating_sub(headers(self.family)).max(8);
        let mut message = vec![0; len as usize];
        message[0] = request;
        message[6..8].copy_from_slice(&sequence.to_be_bytes());
        self.socket.send_to(&message, SocketAddr::new(to, 0)).map(drop)
    }

    /// Waits for an answer. Returns `None` if none comes within `patience`.
    pub(crate) fn receive(&self, patience: Duration) -> io::Result<Option<Reply>> {
        // A timeout of zero is invalid.
        self.socket.set_read_timeout(Some(patience.max(Duration::from_micros(1))))?;
        let mut buffer = vec![0; 65_536];
        let (len, from) = match self.socket.recv_from(&mut buffer) {
            Ok(received) => received,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok(None);
            }
            Err(e) => return Err(e),
        };
        let sequence = buffer.get(6..8).map_or(0, |bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
        Ok(Some(Reply { from: from.ip(), sequence, size: len as u32 + headers(self.family) }))
    }

    /// Sends a small ping and returns the round-trip time; `None` without an answer in a second.
    pub(crate) fn round_trip(&self, to: IpAddr, sequence: u16) -> io::Result<Option<Duration>> {
        let start = Instant::now();
        self.send(to, sequence, SMALL)?;
        loop {
            let left = Duration::from_secs(1).saturating_sub(start.elapsed());
            match self.receive(left)? {
                Some(reply) if reply.from == to && reply.sequence == sequence => {
                    return Ok(Some(start.elapsed()));
                }
                Some(_) if !left.is_zero() => {}
                _ => return Ok(None),
            }
        }
    }
}
