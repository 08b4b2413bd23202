//! The client of path probes. It runs in the doctor.
//!
//! It needs no privilege. The kernel sends from the tunnel's address, because the route to the peer
//! goes through the tunnel. Otherwise the peer refuses, and the client probes its public address.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use flannel_core::address::Family;
use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::protocol::{
    ACK, Arrivals, DATAGRAM, HELLO, MAX_BYTES, MIN_DATAGRAM, Nonce, amount, clock, fill, read_line,
    take,
};
use crate::token::token;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// The time for the whole exchange. The server waits for a part of it before it reports.
const EXCHANGE_TIMEOUT: Duration = Duration::from_millis(3_500);
/// The time to wait for an acknowledgement after the exchange.
const ACK_TIMEOUT: Duration = Duration::from_millis(200);
/// A small packet, in bytes: headers and a few bytes.
const SMALL: u16 = 80;
/// The number of datagrams of each size. One may be lost by chance.
const TIMES: usize = 2;
/// The MTUs that a device of IP can have, in bytes.
///
/// **Source**: RFC 791, section 3.2.
const MTUS: RangeInclusive<u32> = 68..=65_535;
/// The size of the small segments that a connection begins with, in bytes.
const SMALL_SEGMENT: usize = 512;
/// The pause between small segments, so that the kernel sends each before it can join them.
const PAUSE: Duration = Duration::from_millis(5);

/// The bytes that were sent in one direction, and those that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Passage {
    /// Bytes that were sent.
    pub sent: usize,
    /// Bytes that arrived.
    pub arrived: usize,
}

impl Passage {
    /// Whether all bytes arrived.
    pub fn is_whole(self) -> bool {
        self.arrived >= self.sent
    }
}

impl Arrivals {
    /// Whether the report is possible, if this end sent `sent` bytes and datagrams of at most
    /// `largest` bytes.
    fn is_possible(&self, sent: usize, largest: u16) -> bool {
        self.received <= sent
            && self.bytes <= self.received
            && self.largest_datagram <= largest
            && MTUS.contains(&self.mtu)
    }
}

/// The report of both ends on a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Segments {
    /// From this node to the peer.
    pub there: Passage,
    /// From the peer to this node.
    pub back: Passage,
    /// The size of the segments from this node, in bytes.
    pub segment: usize,
    /// The MTU of pods on the peer, in bytes.
    pub mtu: u32,
    /// The largest packet that arrived at the peer as a datagram, in bytes, or 0 if none arrived.
    #[serde(rename = "heard")]
    pub largest_datagram: u16,
    /// The seconds by which the peer's clock is ahead of this host's, or `None` if they are not
    /// known.
    pub clock: Option<i64>,
}

/// The result of a path probe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PathProbe {
    /// The largest packet that the daemon acknowledged outside the tunnel, in bytes, or 0 if it
    /// acknowledged none.
    #[serde(rename = "noticed")]
    pub acknowledged: u16,
    /// `None` if no daemon that knows this protocol answered through the tunnel.
    pub segments: Option<Segments>,
}

/// Probes the path to a node's daemon. `tunnel` is its tunnel address and the MTU of pods on this
/// node, in bytes. With `bare`, nodes can be reached without a tunnel. Then the public address is
/// probed without a tunnel, or if the tunnel address refuses.
pub async fn probe(
    tunnel: Option<(IpAddr, u16)>,
    public: Option<IpAddr>,
    bare: bool,
    port: u16,
) -> PathProbe {
    if let Some((to, full)) = tunnel
        && let Some(probe) = through_tunnel(SocketAddr::new(to, port), public, full).await
    {
        return probe;
    }
    let Some(public) = public.filter(|_| bare) else { return PathProbe::default() };
    match timeout(CONNECT_TIMEOUT, TcpStream::connect((public, port))).await {
        Ok(Ok(mut stream)) => {
            let segments = exchange(&mut stream, nonce(), 0).await.ok().flatten();
            PathProbe { acknowledged: 0, segments }
        }
        _ => PathProbe::default(),
    }
}

/// `None` if the connection was refused.
async fn through_tunnel(to: SocketAddr, public: Option<IpAddr>, full: u16) -> Option<PathProbe> {
    let any: SocketAddr = (Family::of(to.ip()).unspecified(), 0).into();
    let Ok(inbox) = UdpSocket::bind(any).await else { return Some(PathProbe::default()) };
    let nonce = nonce();
    // First, because the report on the connection covers these datagrams.
    let _ = send_datagrams(to, full, &inbox, nonce).await;
    let segments = match timeout(CONNECT_TIMEOUT, TcpStream::connect(to)).await {
        Ok(Ok(mut stream)) => exchange(&mut stream, nonce, full.max(SMALL)).await.ok().flatten(),
        // The host with this address runs no daemon of ours, or is reached without a tunnel.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => return None,
        _ => None,
    };
    let acknowledged = match public {
        Some(public) => largest_ack(&inbox, public, full, nonce).await,
        None => 0,
    };
    Some(PathProbe { acknowledged, segments })
}

fn nonce() -> Nonce {
    token().to_be_bytes()
}

/// Sends datagrams of small and full size.
async fn send_datagrams(
    to: SocketAddr,
    full: u16,
    inbox: &UdpSocket,
    nonce: Nonce,
) -> io::Result<()> {
    let any: SocketAddr = (Family::of(to.ip()).unspecified(), 0).into();
    let socket = UdpSocket::bind(any).await?;
    socket.connect(to).await?;
    let port = inbox.local_addr()?.port();
    let headers = if to.is_ipv4() { 28 } else { 48 };
    for _ in 0..TIMES {
        for size in [SMALL, full] {
            let mut datagram = [&DATAGRAM[..], &port.to_be_bytes(), &nonce].concat();
            datagram.resize(usize::from(size.saturating_sub(headers)).max(MIN_DATAGRAM), b'f');
            // The kernel fragments a datagram that is too large for this host's own device. So the
            // diagnosis looks at echoes that are too big for this host first.
            let _ = socket.send(&datagram).await;
        }
    }
    Ok(())
}

/// The largest packet that was acknowledged, in bytes. Returns after at most `ACK_TIMEOUT`.
async fn largest_ack(inbox: &UdpSocket, public: IpAddr, full: u16, nonce: Nonce) -> u16 {
    let mut largest = 0;
    let mut buffer = [0; 64];
    let end = Instant::now() + ACK_TIMEOUT;
    while largest < full
        && let Ok(Ok((len, from))) = timeout_at(end, inbox.recv_from(&mut buffer)).await
    {
        let ack = buffer[..len].strip_prefix(ACK).and_then(|rest| rest.strip_prefix(&nonce));
        if let Some(Ok(size)) = ack.map(|ack| <[u8; 2]>::try_from(ack).map(u16::from_be_bytes))
            && from.ip() == public
            && size <= full.max(SMALL)
        {
            largest = largest.max(size);
        }
    }
    largest
}

/// Sends and receives segments. `largest` is the size of the largest datagram packet, in bytes.
async fn exchange(
    stream: &mut TcpStream,
    nonce: Nonce,
    largest: u16,
) -> io::Result<Option<Segments>> {
    let deadline = Instant::now() + EXCHANGE_TIMEOUT;
    stream.set_nodelay(true)?;
    let segment = socket2::SockRef::from(&*stream).tcp_mss()? as usize;
    // The peer sends no more bytes than have arrived. With enough small segments first, it can send
    // a segment of full size even if all of full size from here are lost.
    let small = 2 * segment;
    let large = amount(stream)?.min(MAX_BYTES - small);
    let sent = small + large;
    let (mut reader, mut writer) = stream.split();
    let send = async {
        let nonce = u64::from_be_bytes(nonce);
        writer.write_all(format!("{HELLO}{sent} {nonce:016x}\n").as_bytes()).await?;
        for from in (0..small).step_by(SMALL_SEGMENT) {
            sleep(PAUSE).await;
            fill(&mut writer, SMALL_SEGMENT.min(small - from)).await?;
        }
        sleep(PAUSE).await;
        fill(&mut writer, large).await?;
        // The server ends the exchange.
        std::future::pending::<io::Result<Option<Segments>>>().await
    };
    let receive = async {
        let Ok(line) = timeout_at(deadline, read_line(&mut reader)).await else { return Ok(None) };
        let Ok(report) = serde_json::from_str::<Arrivals>(&line?) else { return Ok(None) };
        // The peer does not speak this protocol.
        if !report.is_possible(sent, largest) {
            return Ok(None);
        }
        let clock = report.time.zip(clock()).map(|(there, here)| there.saturating_sub(here));
        let follows = report.bytes;
        let mut back = Passage { sent: follows, arrived: 0 };
        // A timeout shows a loss. A closed connection does not: the daemon may have stopped.
        if let Ok(taken) = timeout_at(deadline, take(&mut reader, follows, &mut back.arrived)).await
        {
            taken?;
        }
        let there = Passage { sent, arrived: report.received };
        // Less than a segment of full size does not test the way back.
        let inconclusive = !there.is_whole() && follows < segment;
        Ok((!inconclusive).then_some(Segments {
            there,
            back,
            segment,
            mtu: report.mtu,
            largest_datagram: report.largest_datagram,
            clock,
        }))
    };
    tokio::select! {
        ended = send => ended,
        segments = receive => segments,
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// The way back, with a daemon that reports `lost` bytes as lost, sends `bytes` bytes, and
    /// closes the connection or not.
    async fn exchanged(lost: usize, bytes: usize, closes: bool) -> Option<Passage> {
        exchanged_with(lost, bytes, closes, |_| ()).await.map(|segments| segments.back)
    }

    /// The exchange with a daemon that changes its report.
    async fn exchanged_with(
        lost: usize,
        bytes: usize,
        closes: bool,
        change: impl FnOnce(&mut Arrivals),
    ) -> Option<Segments> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        // As on an Ethernet link. The loopback's segments are large, and so many bytes in small
        // segments would take long.
        socket2::SockRef::from(&listener).set_tcp_mss(1398).unwrap();
        let daemon = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let hello = read_line(&mut stream).await.unwrap();
            let sent = hello.split(' ').nth(2).unwrap().parse().unwrap();
            take(&mut stream, sent, &mut 0).await.unwrap();
            let received = sent - lost;
            let mut report = Arrivals {
                version: 1,
                received,
                mtu: 1450,
                largest_datagram: 0,
                bytes: 100,
                time: None,
            };
            change(&mut report);
            stream
                .write_all((serde_json::to_string(&report).unwrap() + "\n").as_bytes())
                .await
                .unwrap();
            fill(&mut stream, bytes).await.unwrap();
            if !closes {
                let _ = take(&mut stream, 1, &mut 0).await;
            }
        };
        let doctor = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            exchange(&mut stream, 7_u64.to_be_bytes(), 1450).await.ok().flatten()
        };
        tokio::join!(daemon, doctor).1
    }

    #[tokio::test]
    async fn bytes_count_as_lost_only_after_a_timeout() {
        assert_eq!(exchanged(0, 100, false).await, Some(Passage { sent: 100, arrived: 100 }));
        assert_eq!(exchanged(0, 50, true).await, None, "the daemon closed the connection");
        assert_eq!(exchanged(0, 50, false).await, Some(Passage { sent: 100, arrived: 50 }));
        assert_eq!(exchanged(1, 100, false).await, None, "a hundred bytes are less than a segment");
    }

    #[tokio::test]
    async fn the_clocks_of_both_ends_are_compared() {
        let ahead = |change: fn(&mut Arrivals)| async move {
            exchanged_with(0, 100, false, change).await.unwrap().clock
        };
        assert_eq!(ahead(|_| ()).await, None, "an older daemon sends no time");
        let hour = ahead(|report| report.time = clock().map(|now| now + 3_600)).await.unwrap();
        assert!((3_500..=3_600).contains(&hour), "{hour}");
        let past = ahead(|report| report.time = Some(i64::MIN)).await.unwrap();
        assert!(past < 0, "{past}");
    }

    #[tokio::test]
    async fn an_impossible_report_is_rejected() {
        let segments = |change: fn(&mut Arrivals)| exchanged_with(0, 100, false, change);
        assert_eq!(
            segments(|report| report.largest_datagram = 1450)
                .await
                .map(|segments| segments.largest_datagram),
            Some(1450)
        );
        for change in [
            (|report| report.received += 1) as fn(&mut Arrivals),
            |report| report.largest_datagram = 1451,
            |report| report.mtu = 0,
            |report| report.mtu = 65_536,
            |report| (report.received, report.bytes) = (99, 100),
        ] {
            assert_eq!(segments(change).await, None);
        }
    }

    #[tokio::test]
    async fn an_acknowledgement_of_more_than_was_sent_is_ignored() {
        let inbox = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for size in [80_u16, 1451, 9000] {
            let ack = [&ACK[..], &[7; 8], &size.to_be_bytes()].concat();
            peer.send_to(&ack, inbox.local_addr().unwrap()).await.unwrap();
        }
        assert_eq!(largest_ack(&inbox, peer.local_addr().unwrap().ip(), 1450, [7; 8]).await, 80);
    }

    #[tokio::test]
    async fn a_public_address_is_probed_only_if_nodes_are_reached_without_a_tunnel() {
        let public = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        public.set_nonblocking(true).unwrap();
        let address = public.local_addr().unwrap();
        // The tunnel's address refuses the connection at once.
        for tunnel in [None, Some((IpAddr::from([127, 0, 0, 2]), 1450))] {
            for bare in [false, true] {
                let probe = probe(tunnel, Some(address.ip()), bare, address.port());
                let probed = async {
                    let segments = tokio::select! {
                        _ = probe => None,
                        () = sleep(EXCHANGE_TIMEOUT) => None,
                        stream = async {
                            loop {
                                if let Ok((stream, _)) = public.accept() {
                                    break stream;
                                }
                                sleep(PAUSE).await;
                            }
                        } => Some(stream),
                    };
                    segments.is_some()
                };
                assert_eq!(probed.await, bare, "{tunnel:?}");
            }
        }
    }

    #[tokio::test]
    async fn other_packets_do_not_prolong_the_wait_for_an_acknowledgement() {
        let inbox = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = inbox.local_addr().unwrap();
        let others = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let junk = async {
            loop {
                others.send_to(b"junk", to).await.unwrap();
                sleep(ACK_TIMEOUT / 20).await;
            }
        };
        let largest = largest_ack(&inbox, to.ip(), 1450, [0; 8]);
        tokio::select! {
            () = junk => (),
            largest = timeout(100 * ACK_TIMEOUT, largest) => assert_eq!(largest, Ok(0)),
        }
    }
}
