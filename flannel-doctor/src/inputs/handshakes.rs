//! Both ends of encrypted tunnels, over some seconds.
//!
//! A failed handshake changes only byte counters. A node adds the first handshake packet of another
//! node to its received bytes only if it accepts the packet. So the counters of both ends are
//! compared at the start and at the end of a time in which each end sends at least one such packet.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::object::{LinkName, PublicKey};
use flannel_core::runtime::blocking;
use flannel_netlink::{NetlinkKernel, Session};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::inputs::devices::Devices;
use crate::inputs::network::Target;
use crate::inputs::peers::Question;
use crate::inputs::tunnels::{TunnelToPeer, Tunnels};
use crate::path_probe::FarEnd;
use crate::path_probe::tunnel::{ANSWER_TIMEOUT, ask};

/// The kernel repeats the first packet of a handshake after 5 s, plus up to a third of a second
/// (linux `REKEY_TIMEOUT`, `REKEY_TIMEOUT_JITTER_MAX_JIFFIES`).
const WINDOW: Duration = Duration::from_millis(5_400);
/// The longest time for the questions.
pub(crate) const LONGEST: Duration = WINDOW.saturating_add(ANSWER_TIMEOUT);

/// The tunnel to a peer, at both ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handshake {
    /// The device.
    pub link: LinkName,
    /// The public key of this host's device.
    pub key: PublicKey,
    /// The UDP port of this host's device.
    pub port: u16,
    /// The digest of this host's preshared key for the peer, or `None` without a key.
    pub psk: Option<u32>,
    /// The time of the first look.
    pub time: SystemTime,
    /// This end at the first look.
    pub before: Session,
    /// This end at the second look.
    pub after: Session,
    /// The other end at both looks, or `None` if its daemon did not answer.
    pub there: [Option<FarEnd>; 2],
    /// A host rejects datagrams to the peer's port.
    pub refused: bool,
}

impl Handshake {
    fn new(to: TunnelToPeer<'_>, time: SystemTime) -> Self {
        let TunnelToPeer { link, tunnel, session } = to;
        Self {
            link,
            key: tunnel.key,
            port: tunnel.port,
            psk: to.psk_digest(),
            time,
            before: session.clone(),
            after: session.clone(),
            there: [None, None],
            refused: false,
        }
    }

    /// Whether packets of the peer were accepted here between both looks.
    pub fn arrived_here(&self) -> bool {
        self.after.received > self.before.received
    }

    /// Whether packets of this host were accepted at the peer between both looks, or `None` if it
    /// is not known.
    pub fn arrived_there(&self) -> Option<bool> {
        let [before, after] =
            self.there.each_ref().map(|end| Some(end.as_ref()?.peer.as_ref()?.received));
        Some(after? > before?)
    }

    /// Whether the peer's host showed that it is reachable.
    pub fn is_alive(&self) -> bool {
        self.refused || self.arrived_here() || self.there.iter().any(Option::is_some)
    }
}

/// Looks at the tunnels of some questions.
pub(crate) struct Watch {
    start: Instant,
    devices: Devices,
    port: u16,
    /// One for each question, or `None` if the question has no tunnel.
    looks: Vec<Option<Look>>,
}

/// The first look at one tunnel.
struct Look {
    subnet: Subnet,
    public: Option<IpAddr>,
    state: Handshake,
    there: JoinHandle<Option<FarEnd>>,
}

impl Watch {
    /// Reads the tunnels, and asks the daemons of the peers. `None` if no tunnel is encrypted.
    ///
    /// # Errors
    /// The tunnels cannot be read.
    pub(crate) async fn begin(
        questions: &[(&Target, Vec<Question>)],
        devices: &Devices,
        port: u16,
    ) -> Result<Option<Self>, String> {
        if devices.encrypted().is_empty() {
            return Ok(None);
        }
        let tunnels = read(devices).await?;
        let time = SystemTime::now();
        let tunnels = tunnels.by_subnet();
        let look = |target: &Target, question: &Question| {
            let subnet =
                *target.subnets.iter().find(|subnet| subnet.family() == question.family)?;
            let public = question.public.map(|(address, _)| address);
            let state = Handshake::new(*tunnels.get(&subnet)?, time);
            let there = tokio::spawn(ask(public, port, question.family));
            Some(Look { subnet, public, state, there })
        };
        let all = questions.iter().flat_map(|(target, of)| of.iter().map(move |q| (target, q)));
        let looks = all.map(|(target, question)| look(target, question)).collect();
        Ok(Some(Self { start: Instant::now(), devices: devices.clone(), port, looks }))
    }

    /// The state of the tunnel of each question. If any of them is `silent`, looks again after some
    /// seconds.
    ///
    /// # Errors
    /// The tunnels cannot be read again.
    pub(crate) async fn end(self, silent: &[bool]) -> Result<Vec<Option<Handshake>>, String> {
        let Self { start, devices, port, mut looks } = self;
        for look in looks.iter_mut().flatten() {
            look.state.there[0] = (&mut look.there).await.ok().flatten();
        }
        if silent.contains(&true) {
            sleep_until(start + WINDOW).await;
            let mut second = Vec::new();
            let of_silent = looks.iter_mut().zip(silent).filter(|(_, silent)| **silent);
            for look in of_silent.filter_map(|(look, _)| look.as_mut()) {
                let public = look.public;
                let family = look.subnet.family();
                let to = look.state.before.endpoint;
                let both = async move { tokio::join!(ask(public, port, family), is_refused(to)) };
                second.push((look, tokio::spawn(both)));
            }
            for (look, both) in second {
                (look.state.there[1], look.state.refused) = both.await.unwrap_or_default();
            }
            let tunnels = read(&devices).await?;
            let tunnels = tunnels.by_subnet();
            for look in looks.iter_mut().flatten() {
                if let Some(to) = tunnels.get(&look.subnet) {
                    look.state.after = to.session.clone();
                }
            }
        }
        Ok(looks.into_iter().map(|look| Some(look?.state)).collect())
    }
}

async fn read(devices: &Devices) -> Result<Tunnels, String> {
    let encrypted = devices.encrypted();
    let read = move || {
        let kernel = NetlinkKernel::open().map_err(|error| error.to_string())?;
        let (tunnels, unread) = Tunnels::read(&kernel, encrypted.values().copied());
        let mut unread = unread.into_iter();
        unread.next().map_or(Ok(tunnels), |(link, error)| Err(format!("{link}: {error}")))
    };
    blocking(read).await.map_err(|error| format!("encrypted tunnels cannot be read: {error}"))
}

/// Whether a host answers a datagram to this port with an error. A WireGuard device is silent.
async fn is_refused(to: Option<SocketAddr>) -> bool {
    let asked = async {
        let to = to.ok_or(io::ErrorKind::AddrNotAvailable)?;
        let socket = UdpSocket::bind((Family::of(to.ip()).unspecified(), 0)).await?;
        socket.connect(to).await?;
        socket.send(b"?").await?;
        socket.recv(&mut [0]).await
    };
    let answer = timeout(ANSWER_TIMEOUT, asked).await;
    matches!(answer, Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused)
}
