//! The end that asks: the doctor.
//!
//! It needs no privilege. The kernel sends from the tunnel's address, because the route to the peer goes
//! through the tunnel. Where it does not, the peer refuses, and is asked at its public address.

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
    Arrivals, HELLO, LEAST, MOST, NOTICE, Nonce, QUESTION, amount, fill, read_line, take,
};

/// Who does not take a connection for so long does not answer.
const CONNECTING: Duration = Duration::from_secs(1);
/// The peer waits for less before it says what has come, and what it sends then has the rest.
const PATIENCE: Duration = Duration::from_millis(3_500);
/// An acknowledgement that is still under way after the connection is not waited for longer.
const MOMENT: Duration = Duration::from_millis(200);
/// Enough for headers and a few bytes.
const SMALL: u16 = 80;
/// A datagram may be lost by chance.
const TIMES: usize = 2;
/// What a device of IP can take, in bytes.
///
/// **Source**: RFC 791, section 3.2.
const MTUS: RangeInclusive<u32> = 68..=65_535;
/// What is sent first on a connection goes in segments of so many bytes, …
const MORSEL: usize = 512;
/// … which the kernel makes of it if it has sent each before the next is there.
const BETWEEN: Duration = Duration::from_millis(5);

/// What was sent one way, and what of it the other end has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Passage {
    /// In bytes.
    pub sent: usize,
    /// Arrived, in bytes.
    pub arrived: usize,
}

impl Passage {
    /// Whether all of it arrived.
    pub fn is_whole(self) -> bool {
        self.arrived >= self.sent
    }
}

impl Arrivals {
    /// Nobody has received more than was `sent`, nor heard a larger packet than was `announced`,
    /// nor sends back more than that.
    fn can_be(&self, sent: usize, announced: u16) -> bool {
        self.received <= sent
            && self.bytes <= self.received
            && self.heard <= announced
            && MTUS.contains(&self.mtu)
    }
}

/// What both ends report of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Segments {
    /// From here.
    pub there: Passage,
    /// To here.
    pub back: Passage,
    /// How large the segments were that were sent there, in bytes.
    pub segment: usize,
    /// What pods there may send, in bytes.
    pub mtu: u32,
    /// The largest packet that arrived there as a datagram, in bytes; 0: none.
    pub heard: u16,
}

/// What a peer's daemon reports, if it does.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PathProbe {
    /// The largest packet that it acknowledges beside the tunnel, in bytes; 0: none.
    pub noticed: u16,
    /// `None`: it does not answer through the tunnel, or is none that understands.
    pub segments: Option<Segments>,
}

/// Probes the path to a node's daemon: behind its tunnel's address, and where that is refused or
/// there is none, at its public one, if nodes are reached without a tunnel (`bare`), which answer
/// there. `full` is what pods here may send, in bytes.
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
    match timeout(CONNECTING, TcpStream::connect((public, port))).await {
        Ok(Ok(mut stream)) => {
            let segments = exchange(&mut stream, nonce(), 0).await.ok().flatten();
            PathProbe { noticed: 0, segments }
        }
        _ => PathProbe::default(),
    }
}

/// `None`: the connection is refused.
async fn through_tunnel(to: SocketAddr, public: Option<IpAddr>, full: u16) -> Option<PathProbe> {
    let any: SocketAddr = (Family::of(to.ip()).unspecified(), 0).into();
    let Ok(inbox) = UdpSocket::bind(any).await else { return Some(PathProbe::default()) };
    let nonce = nonce();
    // Before the report that tells what was heard.
    let _ = announce(to, full, &inbox, nonce).await;
    let segments = match timeout(CONNECTING, TcpStream::connect(to)).await {
        Ok(Ok(mut stream)) => exchange(&mut stream, nonce, full.max(SMALL)).await.ok().flatten(),
        // Said at once, by who has the address: it is no daemon of ours, or one to which no tunnel
        // leads.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => return None,
        _ => None,
    };
    let noticed = match public {
        Some(public) => notices(&inbox, public, full, nonce).await,
        None => 0,
    };
    Some(PathProbe { noticed, segments })
}

/// Something that nobody else knows.
fn nonce() -> Nonce {
    use std::hash::{BuildHasher, RandomState};
    // Its keys are the system's random numbers.
    RandomState::new().hash_one(std::process::id()).to_be_bytes()
}

/// Sends small datagrams and such of full size.
async fn announce(to: SocketAddr, full: u16, inbox: &UdpSocket, nonce: Nonce) -> io::Result<()> {
    let any: SocketAddr = (Family::of(to.ip()).unspecified(), 0).into();
    let socket = UdpSocket::bind(any).await?;
    socket.connect(to).await?;
    let (port, headers) = (inbox.local_addr()?.port(), if to.is_ipv4() { 28 } else { 48 });
    for _ in 0..TIMES {
        for size in [SMALL, full] {
            let mut datagram = [&QUESTION[..], &port.to_be_bytes(), &nonce].concat();
            datagram.resize(usize::from(size.saturating_sub(headers)).max(LEAST), b'f');
            // One that is too large for this host's own device goes in pieces, and is put together
            // there: so an echo that is too big here counts before what is heard there.
            let _ = socket.send(&datagram).await;
        }
    }
    Ok(())
}

/// The largest packet that was acknowledged, in bytes. Whatever else comes, this takes a moment at
/// most.
async fn notices(inbox: &UdpSocket, public: IpAddr, full: u16, nonce: Nonce) -> u16 {
    let (mut largest, mut buffer, end) = (0, [0; 64], Instant::now() + MOMENT);
    while largest < full
        && let Ok(Ok((len, from))) = timeout_at(end, inbox.recv_from(&mut buffer)).await
    {
        let said = buffer[..len].strip_prefix(NOTICE).and_then(|rest| rest.strip_prefix(&nonce));
        if let Some(Ok(size)) = said.map(|said| <[u8; 2]>::try_from(said).map(u16::from_be_bytes))
            && from.ip() == public
            && size <= full.max(SMALL)
        {
            largest = largest.max(size);
        }
    }
    largest
}

/// `announced` is the largest packet that was sent as a datagram, in bytes.
async fn exchange(
    stream: &mut TcpStream,
    nonce: Nonce,
    announced: u16,
) -> io::Result<Option<Segments>> {
    let deadline = Instant::now() + PATIENCE;
    stream.set_nodelay(true)?;
    let segment = socket2::SockRef::from(&*stream).tcp_mss()? as usize;
    // The peer sends back what has come, and no more: so that it can send a segment of full size at
    // least, though those from here are lost, as much comes first in small ones.
    let (small, large) = (2 * segment, amount(stream)?.min(MOST - 2 * segment));
    let sent = small + large;
    let (mut reader, mut writer) = stream.split();
    let send = async {
        let nonce = u64::from_be_bytes(nonce);
        writer.write_all(format!("{HELLO}{sent} {nonce:016x}\n").as_bytes()).await?;
        for from in (0..small).step_by(MORSEL) {
            sleep(BETWEEN).await;
            fill(&mut writer, MORSEL.min(small - from)).await?;
        }
        sleep(BETWEEN).await;
        fill(&mut writer, large).await?;
        // The server ends this.
        std::future::pending::<io::Result<Option<Segments>>>().await
    };
    let hear = async {
        let Ok(line) = timeout_at(deadline, read_line(&mut reader)).await else { return Ok(None) };
        let Ok(report) = serde_json::from_str::<Arrivals>(&line?) else { return Ok(None) };
        // Who says what cannot be is none that understands.
        if !report.can_be(sent, announced) {
            return Ok(None);
        }
        let follows = report.bytes;
        let mut back = Passage { sent: follows, arrived: 0 };
        // Impatience is no failure here either; but a daemon that stops meanwhile lost no segments.
        if let Ok(taken) = timeout_at(deadline, take(&mut reader, follows, &mut back.arrived)).await
        {
            taken?;
        }
        let there = Passage { sent, arrived: report.received };
        // Less than a segment of full size tells nothing of the way back.
        let told = !there.is_whole() && follows < segment;
        Ok((!told).then_some(Segments {
            there,
            back,
            segment,
            mtu: report.mtu,
            heard: report.heard,
        }))
    };
    tokio::select! {
        ended = send => ended,
        segments = hear => segments,
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// What the doctor makes of a daemon that says that so much was lost, sends so many bytes and
    /// goes away, or does not.
    async fn exchanged(lost: usize, bytes: usize, goes_away: bool) -> Option<Passage> {
        exchanged_with(lost, bytes, goes_away, |_| ()).await.map(|segments| segments.back)
    }

    /// The same of one that says something else.
    async fn exchanged_with(
        lost: usize,
        bytes: usize,
        goes_away: bool,
        says: impl FnOnce(&mut Arrivals),
    ) -> Option<Segments> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        // As on a link: the loopback's segments are so large that the small ones before them take
        // long.
        socket2::SockRef::from(&listener).set_tcp_mss(1398).unwrap();
        let daemon = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let hello = read_line(&mut stream).await.unwrap();
            let sent = hello.split(' ').nth(2).unwrap().parse().unwrap();
            take(&mut stream, sent, &mut 0).await.unwrap();
            let received = sent - lost;
            let mut report = Arrivals { version: 1, received, mtu: 1450, heard: 0, bytes: 100 };
            says(&mut report);
            stream
                .write_all((serde_json::to_string(&report).unwrap() + "\n").as_bytes())
                .await
                .unwrap();
            fill(&mut stream, bytes).await.unwrap();
            if !goes_away {
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
    async fn only_what_is_waited_for_in_vain_is_lost() {
        assert_eq!(exchanged(0, 100, false).await, Some(Passage { sent: 100, arrived: 100 }));
        assert_eq!(exchanged(0, 50, true).await, None, "it went away");
        assert_eq!(exchanged(0, 50, false).await, Some(Passage { sent: 100, arrived: 50 }));
        assert_eq!(exchanged(1, 100, false).await, None, "a hundred bytes are no segment");
    }

    /// Whatever it says else, too.
    #[tokio::test]
    async fn a_daemon_that_says_what_cannot_be_is_not_believed() {
        let segments = |says: fn(&mut Arrivals)| exchanged_with(0, 100, false, says);
        assert_eq!(
            segments(|report| report.heard = 1450).await.map(|segments| segments.heard),
            Some(1450)
        );
        for says in [
            (|report| report.received += 1) as fn(&mut Arrivals),
            |report| report.heard = 1451,
            |report| report.mtu = 0,
            |report| report.mtu = 65_536,
            |report| (report.received, report.bytes) = (99, 100),
        ] {
            assert_eq!(segments(says).await, None);
        }
    }

    #[tokio::test]
    async fn more_than_was_sent_is_acknowledged_by_nobody() {
        let inbox = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let peer = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for size in [80_u16, 1451, 9000] {
            let notice = [&NOTICE[..], &[7; 8], &size.to_be_bytes()].concat();
            peer.send_to(&notice, inbox.local_addr().unwrap()).await.unwrap();
        }
        assert_eq!(notices(&inbox, peer.local_addr().unwrap().ip(), 1450, [7; 8]).await, 80);
    }

    #[tokio::test]
    async fn only_where_there_are_ways_without_a_tunnel_a_node_is_asked_at_its_public_address() {
        let public = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        public.set_nonblocking(true).unwrap();
        let address = public.local_addr().unwrap();
        // Nobody is behind the tunnel's address, which is said at once.
        for tunnel in [None, Some((IpAddr::from([127, 0, 0, 2]), 1450))] {
            for bare in [false, true] {
                let probe = probe(tunnel, Some(address.ip()), bare, address.port());
                let asked = async {
                    let segments = tokio::select! {
                        _ = probe => None,
                        () = sleep(PATIENCE) => None,
                        stream = async {
                            loop {
                                if let Ok((stream, _)) = public.accept() {
                                    break stream;
                                }
                                sleep(BETWEEN).await;
                            }
                        } => Some(stream),
                    };
                    segments.is_some()
                };
                assert_eq!(asked.await, bare, "{tunnel:?}");
            }
        }
    }

    #[tokio::test]
    async fn junk_keeps_nobody_waiting() {
        let inbox = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let to = inbox.local_addr().unwrap();
        let others = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let junk = async {
            loop {
                others.send_to(b"junk", to).await.unwrap();
                sleep(MOMENT / 20).await;
            }
        };
        let noticed = notices(&inbox, to.ip(), 1450, [0; 8]);
        tokio::select! {
            () = junk => (),
            noticed = timeout(100 * MOMENT, noticed) => assert_eq!(noticed, Ok(0)),
        }
    }
}
