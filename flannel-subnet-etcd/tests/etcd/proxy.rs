//! A proxy between a registry and etcd that can drop etcd's answers.

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::server::Etcd;

#[derive(Clone, Copy, PartialEq, Eq)]
struct State {
    muted: bool,
    /// Connections of earlier generations are closed.
    generation: u32,
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
        let (state, watched) = watch::channel(State { muted: false, generation: 0 });
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(forward(near, to.clone(), watched.clone()));
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
        self.state
            .send_modify(|state| *state = State { muted: false, generation: state.generation + 1 });
    }
}

async fn forward(near: TcpStream, to: String, state: watch::Receiver<State>) {
    let born = state.borrow().generation;
    let (mut near_read, mut near_write) = near.into_split();
    let (mut far_read, mut far_write) = TcpStream::connect(to).await.unwrap().into_split();
    let mut ends = state.clone();
    let cut = async move { drop(ends.wait_for(|now| now.generation > born).await) };
    let answers = async move {
        let mut buffer = vec![0; 65_536];
        while let Ok(length @ 1..) = far_read.read(&mut buffer).await {
            let muted = state.borrow().muted;
            if !muted && near_write.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        _ = copy(&mut near_read, &mut far_write) => (),
        () = answers => (),
        () = cut => (),
    }
}
