//! The server of path probes. It runs in the daemon.
//!
//! On a tunnel it is bound to the address and device of the tunnel, and answers only tunnel
//! addresses of other nodes whose leases are accepted. Where peers are reached without a tunnel, or
//! by an encrypted one, it is bound to the external interface too, with its address and the public
//! one. There it answers only public addresses of those nodes, and only by TCP.
//!
//! A source address can be forged, so answers are bounded. An acknowledgement is smaller than the
//! datagram and goes only to the public address of that node's lease, ten times a second. On a
//! connection the server sends a first line and at most as many bytes as it has received, up to 64
//! KiB. It serves few clients at a time, limits the connections of each, and accepts a few hundred
//! a second.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::View;
use flannel_core::object::LinkName;
use flannel_core::runtime::lock;
use flannel_core::status::Status;
use flannel_core::{Lease, Subnets};
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::datagram_log::DatagramLog;
use super::nodes::{NodeAddress, Nodes};
use super::protocol::{
    ACK, Arrivals, DATAGRAM, HELLO, MAX_BYTES, MIN_DATAGRAM, Nonce, amount, clock, fill, read_line,
    take,
};
use super::tunnel;

/// The maximum number of clients at a time. More are refused.
const MAX_CLIENTS: usize = 8;
/// The maximum number of clients at a time from one address.
const MAX_PER_ADDRESS: usize = 2;
/// The pause after each connection and datagram.
const PAUSE: Duration = Duration::from_millis(2);
/// The index of nodes is dropped after this time without a datagram.
const IDLE: Duration = Duration::from_secs(60);
/// The time between attempts to open the sockets.
const RETRY: Duration = Duration::from_secs(30);
/// The time for a client to send the first line.
const HELLO_TIMEOUT: Duration = Duration::from_secs(1);
/// The time for the announced bytes to arrive. TCP repeats lost segments a few times in it.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(1_500);
/// The time for the answer to leave.
const SEND_TIMEOUT: Duration = Duration::from_secs(4);

/// The addresses of the server, and the values that it reports.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The port, TCP and UDP. With 0 the server is off.
    pub port: u16,
    /// The tunnels, with the address of each.
    pub tunnels: Dual<(LinkName, IpAddr)>,
    /// The external interface with its addresses, if packets of pods arrive there without a tunnel,
    /// or in an encrypted one, through which nothing passes without a handshake.
    pub bare: Dual<(LinkName, IpAddr)>,
    /// The public addresses of the lease, if they differ from those in `bare`.
    pub public: Dual<(LinkName, IpAddr)>,
    /// The MTU of pods, in bytes.
    pub mtu: u32,
    /// The leases.
    pub views: watch::Receiver<View>,
    /// Wakes the server after a change of a device, and lists the rejected leases.
    pub status: watch::Receiver<Arc<Status>>,
}

/// The server at one address.
#[derive(Debug)]
struct Server<'a> {
    config: &'a ServerConfig,
    by: NodeAddress,
    nodes: Mutex<Nodes>,
    log: DatagramLog,
}

impl<'a> Server<'a> {
    fn new(config: &'a ServerConfig, by: NodeAddress) -> Self {
        Self {
            config,
            by,
            nodes: Mutex::new(Nodes::new(by, config.views.clone())),
            log: DatagramLog::default(),
        }
    }

    /// The accepted lease of another node, by an address of that node. A rejected lease is ignored,
    /// because it may name any address.
    fn other(&self, from: IpAddr) -> Option<Arc<Lease>> {
        let ServerConfig { tunnels, bare, public, .. } = self.config;
        if [tunnels, bare, public].into_iter().flat_map(Dual::values).any(|(_, own)| *own == from) {
            return None;
        }
        let status = Arc::clone(&self.config.status.borrow());
        let mut nodes = self.nodes();
        nodes.at(from).iter().find(|lease| !status.rejected.contains_key(&lease.subnets)).cloned()
    }

    /// A client of this node.
    fn client(&self, from: IpAddr, lease: &Lease) -> Client {
        let ServerConfig { tunnels, mtu, port, .. } = *self.config;
        let devices = tunnels.map(|_, (device, _)| *device);
        Client { from, subnets: lease.subnets, devices, port, mtu, log: self.log.clone() }
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        lock(&self.nodes)
    }
}

/// A client, and the values that it can ask for.
struct Client {
    from: IpAddr,
    /// The subnets of its lease.
    subnets: Subnets,
    devices: Dual<LinkName>,
    port: u16,
    mtu: u32,
    log: DatagramLog,
}

/// Serves all addresses for ever. A failure to open one is logged once, and retried.
///
/// # Cancel safety
/// Dropping the future closes everything.
pub async fn serve(config: ServerConfig) -> Infallible {
    if config.port == 0 {
        return std::future::pending().await;
    }
    let on = async |by: NodeAddress, place: Option<(LinkName, IpAddr)>| match place {
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
    let mut logged = None;
    loop {
        match open(device, SocketAddr::new(address, config.port), server.by) {
            Ok((listener, datagrams)) => tokio::select! {
                never = accept(&listener, server) => match never {},
                never = listen(datagrams.as_ref(), server) => match never {},
                () = lost(&listener, &mut status) => continue,
            },
            Err(error) if logged != Some(error.kind()) => {
                tracing::debug!(
                    port = config.port, %address, %device, %error,
                    "the server of path probes cannot listen"
                );
                if error.kind() == io::ErrorKind::AddrInUse {
                    tracing::warn!(
                        port = config.port, %address, %error,
                        "doctors of other nodes cannot probe this one: the port of \
                         --doctor-port is in use"
                    );
                }
                logged = Some(error.kind());
            }
            Err(_) => {}
        }
        // The status changes when a device appears. No event reports that a port is free again.
        tokio::select! {
            changed = status.changed() => if changed.is_err() {
                return std::future::pending().await;
            },
            () = sleep(RETRY) => {}
        }
    }
}

/// Opens sockets that are bound to the device. It opens no socket for datagrams at a public
/// address, because an acknowledgement has no other path. The address may appear later.
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
    listener.listen(MAX_CLIENTS as i32)?;
    let listener = TcpListener::from_std(listener.into())?;
    if by == NodeAddress::Public {
        return Ok((listener, None));
    }
    let datagrams = bound(Type::DGRAM, Protocol::UDP)?;
    Ok((listener, Some(UdpSocket::from_std(datagrams.into())?)))
}

/// Waits until the device of a socket is deleted. A new device of the same name is another one.
async fn lost(listener: &TcpListener, status: &mut watch::Receiver<Arc<Status>>) {
    while SockRef::from(listener).device().is_ok() {
        if status.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Records datagrams, and acknowledges them outside the tunnel, which may lose packets.
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
            Ok(Ok((len, from))) => acknowledge(&buffer[..len], from, server).await,
            Ok(Err(_)) => {}
            Err(_) => server.nodes().forget(),
        }
        sleep(PAUSE).await;
    }
}

/// Records a datagram and acknowledges it, if it is a probe of a node.
async fn acknowledge(datagram: &[u8], from: SocketAddr, server: &Server<'_>) {
    let Some((port, nonce)) = parse_datagram(datagram) else { return };
    let Some(lease) = server.other(from.ip()) else { return };
    let headers = if from.is_ipv4() { 28 } else { 48 };
    let size = u16::try_from(datagram.len() + headers).unwrap_or(u16::MAX);
    if !server.log.record(from.ip(), nonce, size) {
        return;
    }
    if let Some(public) = lease.attrs.preferred.public[Family::of(from.ip())] {
        // An error needs no report: the client sees that no acknowledgement arrives.
        let _ = send_ack(SocketAddr::new(public, port), nonce, size).await;
    }
}

/// The port for the acknowledgement, and the nonce.
fn parse_datagram(datagram: &[u8]) -> Option<(u16, Nonce)> {
    let rest = datagram.strip_prefix(DATAGRAM).filter(|_| datagram.len() >= MIN_DATAGRAM)?;
    let (port, rest) = rest.split_first_chunk()?;
    Some((u16::from_be_bytes(*port), *rest.first_chunk()?))
}

async fn send_ack(to: SocketAddr, nonce: Nonce, size: u16) -> io::Result<()> {
    let socket = UdpSocket::bind((Family::of(to.ip()).unspecified(), 0)).await?;
    socket.send_to(&[&ACK[..], &nonce, &size.to_be_bytes()].concat(), to).await.map(drop)
}

async fn accept(listener: &TcpListener, server: &Server<'_>) -> Infallible {
    let mut clients = JoinSet::new();
    let mut running: Vec<(IpAddr, AbortHandle)> = Vec::new();
    loop {
        let accepted = listener.accept().await;
        while clients.try_join_next().is_some() {}
        running.retain(|(_, client)| !client.is_finished());
        if let Ok((stream, from)) = accepted {
            let from = from.ip();
            let of_address = running.iter().filter(|(address, _)| *address == from).count();
            let has_room = running.len() < MAX_CLIENTS && of_address < MAX_PER_ADDRESS;
            if let Some(asker) = server.other(from).filter(|_| has_room) {
                let client = server.client(from, &asker);
                let client = clients.spawn(async move {
                    // An error needs no report here: the doctor reports it.
                    let limit = HELLO_TIMEOUT + RECEIVE_TIMEOUT + SEND_TIMEOUT;
                    let _ = timeout(limit, client.answer(stream)).await;
                });
                running.push((from, client));
            } else {
                // A reset leaves no socket in TIME_WAIT.
                let _ = stream.set_zero_linger();
            }
        }
        sleep(PAUSE).await;
    }
}

/// The number of bytes that a client will send, and its nonce.
fn parse_hello(hello: &str) -> Option<(usize, Nonce)> {
    let (bytes, nonce) = hello.strip_prefix(HELLO)?.split_once(' ')?;
    let bytes = bytes.parse().ok().filter(|bytes| *bytes <= MAX_BYTES)?;
    Some((bytes, u64::from_str_radix(nonce, 16).ok()?.to_be_bytes()))
}

impl Client {
    /// Answers the question of the first line.
    async fn answer(self, mut stream: TcpStream) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let hello = timeout(HELLO_TIMEOUT, read_line(&mut stream)).await??;
        if let Some(family) = tunnel::parse(&hello) {
            return tunnel::answer(&mut stream, family, self.subnets, self.devices, self.port)
                .await;
        }
        match parse_hello(&hello) {
            Some((announced, nonce)) => self.count(stream, announced, nonce).await,
            None => Ok(()),
        }
    }

    /// Reads the announced bytes, reports their number, and sends as many, at most a few segments.
    async fn count(&self, mut stream: TcpStream, announced: usize, nonce: Nonce) -> io::Result<()> {
        let mut received = 0;
        // A timeout is not a failure: the bytes that have arrived by then are reported.
        if let Ok(taken) =
            timeout(RECEIVE_TIMEOUT, take(&mut stream, announced, &mut received)).await
        {
            taken?;
        }
        let bytes = amount(&stream)?.min(received);
        let largest_datagram = self.log.largest(self.from, nonce);
        let mtu = self.mtu;
        let time = clock();
        let report = Arrivals { version: 1, received, mtu, largest_datagram, bytes, time };
        let line = serde_json::to_string(&report).map_err(io::Error::other)? + "\n";
        let (mut reader, mut writer) = stream.split();
        // In a packet of its own, so that it arrives where large segments are lost.
        tokio::io::AsyncWriteExt::write_all(&mut writer, line.as_bytes()).await?;
        fill(&mut writer, bytes).await?;
        // Closing a socket with unread data resets the connection and loses data in transit.
        take(&mut reader, MAX_BYTES, &mut 0).await
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::SubnetManager;
    use flannel_core::status::Rejection;
    use flannel_core::testing::FakeSubnets;

    use super::*;

    #[tokio::test]
    async fn a_rejected_lease_is_not_answered() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        subnets.put("10.1.7.0-24", "127.0.0.1");
        subnets.put("10.1.8.0-24", "192.0.2.8");
        let (publish, status) = watch::channel(Arc::new(Status::default()));
        let views = subnets.watch_leases().await.unwrap();
        let [tunnels, bare, public] = Default::default();
        let config = ServerConfig { port: 0, tunnels, bare, public, mtu: 1450, views, status };
        let server = Server::new(&config, NodeAddress::Tunnel);
        let other = |n| server.other(IpAddr::from([10, 1, n, 0])).is_some();
        assert_eq!([7, 8, 9].map(other), [true, true, false]);
        let why = Rejection::Rejected(
            "its public address 127.0.0.1 is not a unicast host address".into(),
        );
        publish.send_modify(|status| {
            Arc::make_mut(status).rejected =
                [("10.1.7.0-24".parse().unwrap(), why)].into_iter().collect();
        });
        assert_eq!([7, 8, 9].map(other), [false, true, false]);
    }

    #[tokio::test]
    async fn the_server_sends_at_most_as_many_bytes_as_it_received() {
        let (_subnets, config) = config_with(&["127.0.0.7"]).await;
        let server = Server::new(&config, NodeAddress::Public);
        let lease = server.other([127, 0, 0, 7].into()).unwrap();
        for arriving in [0, 700, 100_000] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let daemon = async {
                let (stream, from) = listener.accept().await.unwrap();
                let _ = server.client(from.ip(), &lease).answer(stream).await;
            };
            let client = async {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let announced = MAX_BYTES;
                let hello = format!("{HELLO}{announced} 00000000000000ff\n");
                tokio::io::AsyncWriteExt::write_all(&mut stream, hello.as_bytes()).await.unwrap();
                let (mut reader, mut writer) = stream.split();
                let send = fill(&mut writer, arriving);
                let receive = async {
                    let report: Arrivals =
                        serde_json::from_str(&read_line(&mut reader).await.unwrap()).unwrap();
                    assert_eq!(report.received, arriving.min(MAX_BYTES));
                    assert!(
                        report.bytes <= report.received && (arriving == 0) == (report.bytes == 0),
                        "{report:?}"
                    );
                    take(&mut reader, report.bytes, &mut 0).await.unwrap();
                };
                let (_, ()) = tokio::join!(send, receive);
            };
            tokio::join!(daemon, client);
        }
    }

    /// A server that knows nodes by public addresses, which are of 127.0.0.0/8 so that a socket can
    /// be bound to them.
    async fn config_with(nodes: &[&str]) -> (FakeSubnets, ServerConfig) {
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

    /// The error with which a connection ends. It may come before `connect` returns.
    async fn end(connected: io::Result<TcpStream>) -> io::ErrorKind {
        let read = async { tokio::io::AsyncReadExt::read_u8(&mut connected?).await };
        read.await.unwrap_err().kind()
    }

    #[tokio::test]
    async fn one_node_cannot_take_all_connections() {
        let (_subnets, config) = config_with(&["127.0.0.7", "127.0.0.8"]).await;
        let server = Server::new(&config, NodeAddress::Public);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let to = listener.local_addr().unwrap();
        let clients = async {
            let mut silent = Vec::new();
            for _ in 0..2 * MAX_CLIENTS {
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

    /// The end that closes a connection first keeps it for a minute, in TIME_WAIT.
    #[tokio::test]
    async fn a_refused_connection_leaves_no_socket() {
        let (_subnets, config) = config_with(&["127.0.0.7"]).await;
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
    async fn a_port_in_use_is_tried_again_without_an_event() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let (_publish, status) = watch::channel(Arc::new(Status::default()));
        let views = watch::channel(View::unknown()).1;
        let tunnels = Dual { v4: Some(("lo".parse().unwrap(), address.ip())), v6: None };
        let [bare, public] = Default::default();
        let config =
            ServerConfig { port: address.port(), tunnels, bare, public, mtu: 1450, views, status };
        let client = async {
            sleep(RETRY / 2).await;
            drop(taken);
            let mut tries = 0;
            while TcpStream::connect(address).await.is_err() {
                tries += 1;
                assert!(tries < 100, "the server does not listen");
                sleep(Duration::from_secs(1)).await;
            }
        };
        tokio::select! {
            never = serve(config) => match never {},
            () = client => (),
        }
    }
}
