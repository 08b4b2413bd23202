//! A proxy between a registry and etcd that can drop etcd's answers and hold back requests.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::server::Etcd;

/// What the proxy does with connections.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Behaviour {
    muted: bool,
    /// Connections of earlier generations are closed.
    generation: u32,
    /// The number of bytes of answers after which requests are held back.
    hold_after: Option<usize>,
    /// Requests are held back.
    holds: bool,
}

/// The proxy ends with the runtime.
pub(crate) struct Proxy {
    pub(crate) endpoint: String,
    behaviour: watch::Sender<Behaviour>,
}

impl Proxy {
    pub(crate) async fn of(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let to = etcd.endpoint.trim_start_matches("http://").to_owned();
        let behaviour = watch::Sender::new(Behaviour::default());
        let shared = behaviour.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(forward(near, to.clone(), shared.clone()));
            }
        });
        Self { endpoint, behaviour }
    }

    /// Requests reach etcd, and its answers are dropped.
    pub(crate) fn mute(&self) {
        self.behaviour.send_modify(|now| now.muted = true);
    }

    /// All connections end. New ones work.
    pub(crate) fn cut(&self) {
        self.behaviour.send_modify(|now| {
            *now = Behaviour { generation: now.generation + 1, ..Behaviour::default() };
        });
    }

    /// After this number of bytes of answers, further requests do not reach etcd until
    /// [`Proxy::release`].
    pub(crate) fn hold_after(&self, bytes: usize) {
        self.behaviour.send_modify(|now| now.hold_after = Some(bytes));
    }

    /// Waits until requests are held back.
    pub(crate) async fn holds(&self) {
        drop(self.behaviour.subscribe().wait_for(|now| now.holds).await.unwrap());
    }

    /// Ends the effect of [`Proxy::hold_after`].
    pub(crate) fn release(&self) {
        self.behaviour.send_modify(|now| {
            now.hold_after = None;
            now.holds = false;
        });
    }
}

async fn forward(near: TcpStream, to: String, behaviour: watch::Sender<Behaviour>) {
    let born = behaviour.borrow().generation;
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = TcpStream::connect(to).await.unwrap().into_split();
    let mut ends = behaviour.subscribe();
    let cut = async move { drop(ends.wait_for(|now| now.generation > born).await) };
    let mut gate = behaviour.subscribe();
    let requests = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(length @ 1..) = near_read.read(&mut buffer).await {
            drop(gate.wait_for(|now| !now.holds).await);
            if far_write.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    let answers = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(length @ 1..) = far_read.read(&mut buffer).await {
            // Before the end of this answer is sent, so that no request follows it.
            behaviour.send_modify(|now| {
                now.hold_after = now.hold_after.map(|left| left.saturating_sub(length));
                now.holds = now.hold_after == Some(0);
            });
            let muted = behaviour.borrow().muted;
            if !muted && near_write.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        () = requests => (),
        () = answers => (),
        () = cut => (),
    }
}
