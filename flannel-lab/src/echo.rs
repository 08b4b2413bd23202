//! The probes' other ends, and the probes themselves: ICMP and TCP echo. Neither TCP's big blocks
//! nor a repeated ping show a wrong MTU, since devices hand big blocks on unsegmented and the
//! kernel adapts to a smaller path; so a single full-size packet goes first, and afterwards TCP's
//! segment size must still be the one that the pods' MTU allows.

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
use crate::namespace::Namespace;
use crate::privilege::has_ipv6;

/// The port that RFC 862 gives the echo service.
const PORT: u16 = 7;

/// How long a TCP connection may stand still.
const STALL: Duration = Duration::from_secs(2);

/// How many bytes a TCP probe sends after the full-size segment, and gets back.
const BULK: usize = 64 * 1024;

/// The size of an ordinary ping, in bytes on the wire.
pub(crate) const SMALL: u32 = 84;

/// A TCP echo service inside a namespace; ends when dropped.
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
        let serve = move || {
            std::thread::scope(|connections| {
                // Ends when the listener is shut down.
                while let Ok((stream, _)) = accepting.accept() {
                    // A connection that breaks is seen by the one who probes.
                    connections.spawn(move || echo(&stream).ok());
                }
            });
        };
        Ok(Self { listener, thread: Some(std::thread::spawn(serve)) })
    }
}

impl Drop for EchoServer {
    fn drop(&mut self) {
        // It can only fail if the listener is shut down already.
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

/// Why one pod does not reach another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreached {
    /// No ping was answered.
    #[error("no reply")]
    NoReply,
    /// Small pings are answered, full-size ones are not.
    #[error("no reply to full-size packets of {size} bytes")]
    FullSizeLost {
        /// Bytes of the packet, IP header included.
        size: u32,
    },
    /// Somebody answered the TCP connection with a refusal.
    #[error("TCP connection refused")]
    TcpRefused,
    /// The TCP connection stood still.
    #[error("TCP stalled after {bytes} bytes")]
    TcpStalled {
        /// Bytes that came back before.
        bytes: usize,
    },
    /// Packets of the size that the pods' MTU allows are too big for the path between them.
    #[error("MTU {mtu} is wrong: the path takes {path} bytes")]
    PathMtu {
        /// The smaller of the two pods' MTUs, in bytes.
        mtu: u32,
        /// What the path takes, in bytes, at most 12 too few if TCP timestamps are off.
        path: u32,
    },
    /// Another TCP error.
    #[error("TCP: {0}")]
    Tcp(String),
    /// Pings are answered; there was no time left for TCP.
    #[error("no time left for TCP")]
    Unfinished,
}

/// Connects to the echo service at `to` from the calling thread's namespace, and sends a full-size segment
/// and then 64 KiB; returns how many bytes came back.
///
/// `mtu` is the smaller of the two pods' MTUs.
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

/// Returns the MTU that the kernel believes in at the end.
fn tcp_exchange(to: IpAddr, mtu: u32, bytes: &mut usize) -> io::Result<u32> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::new(to, PORT), STALL)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STALL))?;
    stream.set_write_timeout(Some(STALL))?;
    let segment = getsockopt(&stream, sockopt::TcpMaxSeg)? as usize;
    // A block of one segment is sent as it is; bigger ones are segmented late or never on virtual devices.
    for len in [segment].into_iter().chain([BULK / 4; 4]) {
        let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        stream.write_all(&sent)?;
        let mut came = vec![0; len];
        let mut filled = 0;
        while filled < len {
            match stream.read(&mut came[filled..])? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                n => {
                    filled += n;
                    *bytes += n;
                }
            }
        }
        if came != sent {
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                "the echo differs from what was sent",
            ));
        }
    }
    let headers = headers(Family::of(to)) + 20 + TIMESTAMPS;
    // Without timestamps, segments are longer than this reckons: never more than the MTU.
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

/// A socket that sends pings and receives their answers only; the kernel minds identifiers and checksums.
#[derive(Debug)]
pub(crate) struct PingSocket {
    // A ping socket is a datagram socket like UDP's: the same calls, ports without meaning.
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
    /// Opens one in the calling thread's namespace, whose `net.ipv4.ping_group_range` must allow it.
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

    /// Sends a ping of `size` bytes, IP header included. It travels with "don't fragment" unless it is longer
    /// than what the kernel has learnt that the path takes.
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

    /// Waits for an answer; `None` if there is none within `patience`.
    pub(crate) fn receive(&self, patience: Duration) -> io::Result<Option<Reply>> {
        // Zero would mean for ever.
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

    /// Sends one small ping and returns the round-trip time; `None` if there is no answer within a second.
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
