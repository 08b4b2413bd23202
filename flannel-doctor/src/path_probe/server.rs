//! The end that answers: the daemon, where packets of peers arrive.
//!
//! On a tunnel it is bound to the address and device of the tunnel, and answers only the tunnel
//! addresses of other nodes whose leases are accepted. Where peers are reached without a tunnel, it is
//! bound to the external interface, with its address and the public one, and answers only the public
//! addresses of those nodes, by TCP alone.
//!
//! A source address can be forged, so what it sends is bounded. A datagram is answered by a smaller one,
//! only to the public address of that node's lease, ten times a second. On a connection it sends no more
//! than it has received, at most 64 KiB, and a first line. It serves few clients at a time, none of which
//! can take all places, and looks at a few hundred a second.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flannel_core::Lease;
use flannel_core::address::{Dual, Family};
use flannel_core::lease::View;
use flannel_core::object::LinkName;
use flannel_core::status::Status;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::heard::Heard;
use super::nodes::{NodeAddress, Nodes};
use super::protocol::{
    Arrivals, HELLO, LEAST, MOST, NOTICE, Nonce, QUESTION, amount, fill, read_line, take,
};

/// So many are probing at once; who comes then is refused.
const AT_ONCE: usize = 8;
/// … of them so many from one address.
const SHARE: usize = 2;
/// After each connection and datagram.
const PAUSE: Duration = Duration::from_millis(2);
/// What is kept to find who asks is forgotten when nobody has for so long.
const IDLE: Duration = Duration::from_secs(60);
/// What could not be opened is tried again so often.
const AGAIN: Duration = Duration::from_secs(30);
/// A client has so long to say what it wants.
const ASKING: Duration = Duration::from_secs(1);
/// What was announced has so long to come: some repetitions of what is lost.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// And so long to leave.
const LEAVING: Duration = Duration::from_secs(4);

/// Where it answers, and what it tells.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The port, TCP and UDP; 0: nothing is served.
    pub port: u16,
    /// The tunnels, with the address of each.
    pub tunnels: Dual<(LinkName, IpAddr)>,
    /// The external interface with its addresses, if packets of pods come there as they are.
    pub bare: Dual<(LinkName, IpAddr)>,
    /// The addresses that peers are told, if they are others than those.
    pub public: Dual<(LinkName, IpAddr)>,
    /// What pods may send, in bytes.
    pub mtu: u32,
    /// The leases.
    pub views: watch::Receiver<View>,
    /// Tells when something was done to a device.
    pub status: watch::Receiver<Arc<Status>>,
}

/// What is known while it answers somewhere.
#[derive(Debug)]
struct Server<'a> {
    config: &'a ServerConfig,
    by: NodeAddress,
    nodes: Mutex<Nodes>,
    heard: Heard,
}

impl<'a> Server<'a> {
    fn new(config: &'a ServerConfig, by: NodeAddress) -> Self {
        Self {
            config,
            by,
            nodes: Mutex::new(Nodes::new(by, config.views.clone())),
            heard: Heard::default(),
        }
    }

    /// The lease of another node, by an address of its. One that nobody believes may name anybody
    /// as its node.
    fn other(&self, from: IpAddr) -> Option<Arc<Lease>> {
        let ServerConfig { tunnels, bare, public, .. } = self.config;
        if [tunnels, bare, public].into_iter().flat_map(Dual::values).any(|(_, own)| *own == from) {
            return None;
        }
        let status = Arc::clone(&self.config.status.borrow());
        let mut nodes = self.nodes();
        let believed = |lease: &&Arc<Lease>| !status.rejected.contains_key(&lease.subnets);
        nodes.at(from).iter().find(believed).cloned()
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers everywhere, for ever. That it cannot is said once, and ends nothing.
///
/// # Cancel safety
/// Dropping the future closes everything.
pub async fn serve(config: ServerConfig) -> Infallible {
    if config.port == 0 {
        return std::future::pending().await;
    }
    let on = async |by: NodeAddress, door: Option<(LinkName, IpAddr)>| match door {
        Some((device, address)) => on_device(&Server::new(&config, by), device, address).await,
        None => std::future::pending().await,
    };
    let ServerConfig { tunnels, bare, public, .. } = &config;
    tokio::select! {
        never = on(NodeAddress::Tunnel, tunnels.v4) => never,
        never = on(NodeAddress::Tunnel, tunnels.v6) => never,
        never = on(NodeAddress::Public, bare.v4) => never,
        never = on(NodeAddress::Public, bare.v6) => never,
        never = on(NodeAddress::Public, public.v4) => never,
        never = on(NodeAddress::Public, public.v6) => never,
    }
}

async fn on_device(server: &Server<'_>, device: LinkName, address: IpAddr) -> Infallible {
    let config = server.config;
    let mut status = config.status.clone();
    let mut told = None;
    loop {
        match open(device, SocketAddr::new(address, config.port), server.by) {
            Ok((listener, datagrams)) => tokio::select! {
                never = accept(&listener, server) => match never {},
                never = listen(datagrams.as_ref(), server) => match never {},
                () = lost(&listener, &mut status) => continue,
            },
            Err(error) if told != Some(error.kind()) => {
                tracing::debug!("--doctor-port {}: {address} on {device}: {error}", config.port);
                if error.kind() == io::ErrorKind::AddrInUse {
                    tracing::warn!(
                        "other nodes' doctors cannot ask this one: --doctor-port {}: {address}: {error}",
                        config.port
                    );
                }
                told = Some(error.kind());
            }
            Err(_) => {}
        }
        // A device that comes, or comes back, is told there; that a port is free again is told
        // nowhere.
        tokio::select! {
            changed = status.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
            () = sleep(AGAIN) => {}
        }
    }
}

/// Sockets that only this device reaches; no datagrams where there is nothing beside that they
/// could be acknowledged by. The address may come later than they.
fn open(
    device: LinkName,
    address: SocketAddr,
    by: NodeAddress,
) -> io::Result<(TcpListener, Option<UdpSocket>)> {
    let bound = |kind, protocol| -> io::Result<Socket> {
        let socket = Socket::new(Domain::for_address(address), kind, Some(protocol))?;
        socket.set_nonblocking(true)?;
        socket.bind_device(Some(device.as_str().as_bytes()))?;
        if address.is_ipv4() {
            socket.set_freebind_v4(true)?;
        } else {
            socket.set_freebind_v6(true)?;
        }
        if kind == Type::STREAM {
            socket.set_reuse_address(true)?;
        }
        socket.bind(&address.into())?;
        Ok(socket)
    };
    let listener = bound(Type::STREAM, Protocol::TCP)?;
    listener.listen(AT_ONCE as i32)?;
    let listener = TcpListener::from_std(listener.into())?;
    if by == NodeAddress::Public {
        return Ok((listener, None));
    }
    let datagrams = bound(Type::DGRAM, Protocol::UDP)?;
    Ok((listener, Some(UdpSocket::from_std(datagrams.into())?)))
}

/// Waits until the device that a socket is bound to is gone. Another one of its name is not the
/// same.
async fn lost(listener: &TcpListener, status: &mut watch::Receiver<Arc<Status>>) {
    while SockRef::from(listener).device().is_ok() {
        if status.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Notes who is heard, and says so beside the tunnel, since the way back through it may be the one
/// that is lost.
async fn listen(datagrams: Option<&UdpSocket>, server: &Server<'_>) -> Infallible {
    let Some(datagrams) = datagrams else {
        loop {
            sleep(IDLE).await;
            server.nodes().forget();
        }
    };
    let mut buffer = vec![0; usize::from(u16::MAX)];
    loop {
        match timeout(IDLE, datagrams.recv_from(&mut buffer)).await {
            Ok(Ok((len, from))) => hear(&buffer[..len], from, server).await,
            Ok(Err(_)) => {}
            Err(_) => server.nodes().forget(),
        }
        sleep(PAUSE).await;
    }
}

/// What is no question of a node costs next to nothing.
async fn hear(datagram: &[u8], from: SocketAddr, server: &Server<'_>) {
    let Some((port, nonce)) = question(datagram) else { return };
    let Some(lease) = server.other(from.ip()) else { return };
    let headers = if from.is_ipv4() { 28 } else { 48 };
    let size = u16::try_from(datagram.len() + headers).unwrap_or(u16::MAX);
    if !server.heard.note(from.ip(), nonce, size) {
        return;
    }
    if let Some(public) = lease.attrs.preferred.public[Family::of(from.ip())] {
        // That it does not arrive is nothing new to who gets none.
        let _ = notice(SocketAddr::new(public, port), nonce, size).await;
    }
}

/// The port that waits for an acknowledgement, and what it is to say.
fn question(datagram: &[u8]) -> Option<(u16, Nonce)> {
    let rest = datagram.strip_prefix(QUESTION).filter(|_| datagram.len() >= LEAST)?;
    let (port, rest) = rest.split_first_chunk()?;
    Some((u16::from_be_bytes(*port), *rest.first_chunk()?))
}

async fn notice(to: SocketAddr, nonce: Nonce, size: u16) -> io::Result<()> {
    let socket = UdpSocket::bind((Family::of(to.ip()).unspecified(), 0)).await?;
    socket.send_to(&[&NOTICE[..], &nonce, &size.to_be_bytes()].concat(), to).await.map(drop)
}

async fn accept(listener: &TcpListener, server: &Server<'_>) -> Infallible {
    let mut clients = JoinSet::new();
    // Whose they are, until they end.
    let mut at_work: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let accepted = listener.accept().await;
        while clients.try_join_next().is_some() {}
        at_work.retain(|(_, client)| !client.is_finished());
        if let Ok((stream, from)) = accepted {
            let from = from.ip();
            let of_it = at_work.iter().filter(|(whose, _)| *whose == from).count();
            if at_work.len() < AT_ONCE && of_it < SHARE && server.other(from).is_some() {
                let (mtu, heard) = (server.config.mtu, server.heard.clone());
                let client = clients.spawn(async move {
                    // Whatever goes wrong, the client tells.
                    let _ = timeout(ASKING + PATIENCE + LEAVING, answer(stream, from, mtu, &heard))
                        .await;
                });
                at_work.push((from, client));
            } else {
                // Who is refused is not told why; reset, so that nothing of it stays here. If that
                // fails, it ends all the same.
                let _ = stream.set_zero_linger();
            }
        }
        sleep(PAUSE).await;
    }
}

/// How much a client is going to send, and what its datagrams bear.
fn announcement(hello: &str) -> Option<(usize, Nonce)> {
    let (bytes, nonce) = hello.strip_prefix(HELLO)?.split_once(' ')?;
    let bytes = bytes.parse().ok().filter(|bytes| *bytes <= MOST)?;
    Some((bytes, u64::from_str_radix(nonce, 16).ok()?.to_be_bytes()))
}

/// Takes what is sent, tells how much has come, and sends as much, at most a few segments.
async fn answer(mut stream: TcpStream, from: IpAddr, mtu: u32, heard: &Heard) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let hello = timeout(ASKING, read_line(&mut stream)).await??;
    let Some((announced, nonce)) = announcement(&hello) else { return Ok(()) };
    let mut received = 0;
    // Impatience is no failure: what has come by then is what is told.
    if let Ok(taken) = timeout(PATIENCE, take(&mut stream, announced, &mut received)).await {
        taken?;
    }
    let bytes = amount(&stream)?.min(received);
    let report = Arrivals { version: 1, received, mtu, heard: heard.heard(from, nonce), bytes };
    let line = serde_json::to_string(&report).map_err(io::Error::other)? + "\n";
    let (mut reader, mut writer) = stream.split();
    // Small, so that it arrives where large segments do not.
    tokio::io::AsyncWriteExt::write_all(&mut writer, line.as_bytes()).await?;
    fill(&mut writer, bytes).await?;
    // Closed with something unread, it would be reset, and what is under way be lost.
    take(&mut reader, MOST, &mut 0).await
}

#[cfg(test)]
mod tests {
    use flannel_core::SubnetManager;
    use flannel_core::network::Rejection;
    use flannel_core::testing::FakeSubnets;

    use super::*;

    #[tokio::test]
    async fn a_lease_that_nobody_believes_is_not_answered() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        subnets.put("10.1.7.0-24", "127.0.0.1");
        subnets.put("10.1.8.0-24", "192.0.2.8");
        let (told, status) = watch::channel(Arc::new(Status::default()));
        let views = subnets.watch_leases().await.unwrap();
        let [tunnels, bare, public] = Default::default();
        let config = ServerConfig { port: 0, tunnels, bare, public, mtu: 1450, views, status };
        let server = Server::new(&config, NodeAddress::Tunnel);
        let other = |n| server.other(IpAddr::from([10, 1, n, 0])).is_some();
        assert_eq!([7, 8, 9].map(other), [true, true, false]);
        let why = Rejection::Rejected("its public address 127.0.0.1 is no host's address".into());
        told.send_modify(|status| {
            Arc::make_mut(status).rejected =
                [("10.1.7.0-24".parse().unwrap(), why)].into_iter().collect();
        });
        assert_eq!([7, 8, 9].map(other), [false, true, false]);
    }

    #[tokio::test]
    async fn no_more_is_sent_than_has_come() {
        for came in [0, 700, 100_000] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let daemon = async {
                let (stream, from) = listener.accept().await.unwrap();
                let _ = answer(stream, from.ip(), 1450, &Heard::default()).await;
            };
            let client = async {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let announced = MOST;
                let hello = format!("{HELLO}{announced} 00000000000000ff\n");
                tokio::io::AsyncWriteExt::write_all(&mut stream, hello.as_bytes()).await.unwrap();
                let (mut reader, mut writer) = stream.split();
                let send = fill(&mut writer, came);
                let hear = async {
                    let report: Arrivals =
                        serde_json::from_str(&read_line(&mut reader).await.unwrap()).unwrap();
                    assert_eq!(report.received, came.min(MOST));
                    assert!(
                        report.bytes <= report.received && (came == 0) == (report.bytes == 0),
                        "{report:?}"
                    );
                    take(&mut reader, report.bytes, &mut 0).await.unwrap();
                };
                let (_, ()) = tokio::join!(send, hear);
            };
            tokio::join!(daemon, client);
        }
    }

    /// Nodes are known by their public addresses, and a socket can be bound to any of 127.0.0.0/8.
    async fn desk_of(nodes: &[&str]) -> (FakeSubnets, ServerConfig) {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        for (n, node) in nodes.iter().enumerate() {
            subnets.put(&format!("10.1.{}.0-24", n + 7), node);
        }
        let (_, status) = watch::channel(Arc::new(Status::default()));
        let views = subnets.watch_leases().await.unwrap();
        let [tunnels, bare, public] = Default::default();
        let config = ServerConfig { port: 0, tunnels, bare, public, mtu: 1450, views, status };
        (subnets, config)
    }

    async fn connected(from: &str, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from.parse().unwrap(), 0)).unwrap();
        socket.connect(to).await
    }

    /// How it ends: that may come before the client knows that it is connected.
    async fn end(connected: io::Result<TcpStream>) -> io::ErrorKind {
        let read = async { tokio::io::AsyncReadExt::read_u8(&mut connected?).await };
        read.await.unwrap_err().kind()
    }

    #[tokio::test]
    async fn no_node_takes_all_the_time_there_is_for_nodes() {
        let (_subnets, config) = desk_of(&["127.0.0.7", "127.0.0.8"]).await;
        let server = Server::new(&config, NodeAddress::Public);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let clients = async {
            let mut silent = Vec::new();
            for _ in 0..2 * AT_ONCE {
                silent.push(connected("127.0.0.7", to).await);
            }
            let mut other = connected("127.0.0.8", to).await.unwrap();
            let hello = format!("{HELLO}10 00000000000000ff\n0123456789");
            tokio::io::AsyncWriteExt::write_all(&mut other, hello.as_bytes()).await.unwrap();
            let report: Arrivals =
                serde_json::from_str(&read_line(&mut other).await.unwrap()).unwrap();
            assert_eq!(report.received, 10);
            drop(silent);
        };
        tokio::select! {
            never = accept(&listener, &server) => match never {},
            () = clients => {}
        }
    }

    /// A connection that is closed here first stays for a minute, as TIME_WAIT.
    #[tokio::test]
    async fn of_strangers_nothing_stays() {
        let (_subnets, config) = desk_of(&["127.0.0.7"]).await;
        let server = Server::new(&config, NodeAddress::Public);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let stranger = async {
            assert_eq!(end(connected("127.0.0.9", to).await).await, io::ErrorKind::ConnectionReset);
        };
        tokio::select! {
            never = accept(&listener, &server) => match never {},
            () = stranger => {}
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_port_that_was_taken_is_had_when_it_is_free_though_nothing_changes() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let (_told, status) = watch::channel(Arc::new(Status::default()));
        let views = watch::channel(View::unknown()).1;
        let tunnels = Dual { v4: Some(("lo".parse().unwrap(), address.ip())), v6: None };
        let [bare, public] = Default::default();
        let config =
            ServerConfig { port: address.port(), tunnels, bare, public, mtu: 1450, views, status };
        let client = async {
            sleep(AGAIN / 2).await;
            drop(taken);
            let mut tries = 0;
            while TcpStream::connect(address).await.is_err() {
                tries += 1;
                assert!(tries < 100, "nobody listens");
                sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            never = serve(config) => match never {},
            () = client => (),
        }
    }
}
