//! Sends ICMP echoes and receives the answers, without blocking.

use std::io;
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use flannel_doctor::inputs::echo::{Answer, Probe};
use flannel_doctor::inputs::echo_socket::{EchoSocket, IcmpMessage};
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
    /// The same inbox. tokio reads from any socket of datagrams in this way.
    inbox: UdpSocket,
}

impl Pinger {
    /// Opens the sockets of some families.
    ///
    /// # Errors
    /// The kernel refuses one, usually because `CAP_NET_RAW` is missing.
    pub(crate) fn open(families: impl IntoIterator<Item = Family>) -> io::Result<Self> {
        // The doctor's sockets in this process have the other half of the identifiers.
        let id = std::process::id() as u16 ^ 0x8000;
        let mut sockets = Dual::default();
        for family in families {
            let echo = EchoSocket::open(family, id)?;
            echo.inbox().set_nonblocking(true)?;
            let inbox = UdpSocket::from_std(echo.inbox().try_clone()?.into())?;
            sockets[family] = Some(Sockets { echo, inbox });
        }
        Ok(Self { sockets })
    }

    /// Sends an echo. Returns the answer if this host does not send it.
    pub(crate) fn send(&self, probe: &Probe, sequence: u16) -> Option<Answer> {
        match &self.sockets[Family::of(probe.to)] {
            Some(sockets) => sockets.echo.send(probe, sequence).err(),
            None => Some(Answer::NotSent("this host's lease has no such family".to_owned())),
        }
    }

    /// Waits for the next message: the sequence number of the echo that it is about, and its
    /// content.
    ///
    /// # Cancel safety
    /// No message is lost.
    pub(crate) async fn receive(&self) -> (u16, IcmpMessage) {
        tokio::select! {
            message = receive(self.sockets.v4.as_ref()) => message,
            message = receive(self.sockets.v6.as_ref()) => message,
        }
    }
}

async fn receive(sockets: Option<&Sockets>) -> (u16, IcmpMessage) {
    let Some(Sockets { echo, inbox }) = sockets else { return std::future::pending().await };
    let mut buffer = [0; 256];
    loop {
        match inbox.recv(&mut buffer).await {
            Ok(len) => {
                if let Some(message) = echo.parse(&buffer[..len]) {
                    return message;
                }
            }
            // An error may stay, for example while the kernel has no memory.
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}
