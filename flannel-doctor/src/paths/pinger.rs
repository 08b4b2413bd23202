//! Sends ICMP echoes and receives the answers, without blocking.

use std::io;
use std::time::Duration;

use crate::inputs::echo::EchoResult;
use crate::inputs::echo_socket::{Echo, EchoSocket, IcmpMessage};
use flannel_core::address::{Dual, Family};
use tokio::net::UdpSocket;

/// The pause after a failure to receive.
const PAUSE: Duration = Duration::from_millis(100);

/// Sockets for echoes of both families.
#[derive(Debug)]
pub(crate) struct Pinger {
    sockets: Dual<Sockets>,
}

/// The sockets of a family.
#[derive(Debug)]
struct Sockets {
    echo: EchoSocket,
    /// The inbox of `echo`, for the runtime.
    inbox: UdpSocket,
}

impl Pinger {
    /// Opens the sockets of some families.
    ///
    /// # Errors
    /// The kernel refuses one, usually because `CAP_NET_RAW` is missing.
    pub(crate) fn open(families: impl IntoIterator<Item = Family>) -> io::Result<Self> {
        let mut sockets = Dual::default();
        for family in families {
            let echo = EchoSocket::open(family)?;
            echo.inbox().set_nonblocking(true)?;
            let inbox = UdpSocket::from_std(echo.inbox().try_clone()?)?;
            sockets[family] = Some(Sockets { echo, inbox });
        }
        Ok(Self { sockets })
    }

    /// Sends an echo, in an IP packet of `size` bytes. Returns the answer if this host does not
    /// send it.
    pub(crate) fn send(&self, echo: &Echo, size: u16) -> Option<EchoResult> {
        match &self.sockets[Family::of(echo.to)] {
            Some(sockets) => sockets.echo.send(echo, size).err(),
            None => Some(EchoResult::NotSent("this host's lease has no such family".to_owned())),
        }
    }

    /// Waits for the next message: the echo that it is about, and its content.
    ///
    /// # Cancel safety
    /// No message is lost.
    pub(crate) async fn receive(&self) -> (Echo, IcmpMessage) {
        tokio::select! {
            message = receive(self.sockets.v4.as_ref()) => message,
            message = receive(self.sockets.v6.as_ref()) => message,
        }
    }
}

async fn receive(sockets: Option<&Sockets>) -> (Echo, IcmpMessage) {
    let Some(Sockets { echo, inbox }) = sockets else { return std::future::pending().await };
    let mut buffer = [0; 256];
    loop {
        match inbox.recv_from(&mut buffer).await {
            Ok((len, from)) => {
                if let Some(message) = echo.parse(from.ip(), &buffer[..len]) {
                    return message;
                }
            }
            // An error may stay, for example while the kernel has no memory.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}
