//! A proxy between a registry and etcd that can drop etcd's answers and hold back requests.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::server::Etcd;

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct State {
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
    state: watch::Sender<State>,
}

impl Proxy {
    pub(crate) async fn of(etcd: &Etcd) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let to = etcd.endpoint.trim_start_matches("http://").to_owned();
        let (state, watched) = watch::channel(State::default());
        let changes = state.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(forward(near, to.clone(), watched.clone(), changes.clone()));
            }
        });
        Self { endpoint, state }
    }

    /// Requests reach etcd, and its answers are dropped.
    pub(crate) fn mute(&self) {
        self.state.send_modify(|state| state.muted = true);
    }

    /// All connections end. New ones work.
    pub(crate) fn cut(&self) {
        self.state.send_modify(|state| {
            *state = State { generation: state.generation + 1, ..State::default() };
        });
    }

    /// After this number of bytes of answers, further requests do not reach etcd until
    /// [`Proxy::release`].
    pub(crate) fn hold_after(&self, bytes: usize) {
        self.state.send_modify(|state| state.hold_after = Some(bytes));
    }

    /// Waits until requests are held back.
    pub(crate) async fn holds(&self) {
        drop(self.state.subscribe().wait_for(|state| state.holds).await.unwrap());
    }

    pub(crate) fn release(&self) {
        self.state.send_modify(|state| (state.hold_after, state.holds) = (None, false));
    }
}

async fn forward(
    near: TcpStream,
    to: String,
    state: watch::Receiver<State>,
    changes: watch::Sender<State>,
) {
    let born = state.borrow().generation;
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = TcpStream::connect(to).await.unwrap().into_split();
    let mut ends = state.clone();
    let cut = async move { drop(ends.wait_for(|now| now.generation > born).await) };
    let mut gate = state.clone();
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
            changes.send_modify(|now| {
                now.hold_after = now.hold_after.map(|left| left.saturating_sub(length));
                now.holds = now.hold_after == Some(0);
            });
            let muted = state.borrow().muted;
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
