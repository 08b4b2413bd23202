//! The backends and the registry of the examples, and a sandbox, so that the examples do not touch
//! the machine's network.

mod hub;
mod lane;
mod printing;

use std::process::{Child, Command, Stdio};

use anyhow::Context;

pub use hub::Hub;
pub use lane::Lane;
pub use printing::Printing;

/// Runs an example in a new network namespace with an uplink `eth0`, which has the address
/// `192.0.2.1/24`. It needs no root.
///
/// # Errors
/// The example's error, or the missing requirement of a namespace.
pub fn in_sandbox<F>(example: impl FnOnce() -> F + Send) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    flannel_lab::enter()?;
    let namespace = flannel_lab::Namespace::new("example")?;
    namespace.ip("link set lo up\n\
         link add eth0 type veth peer name wire\n\
         link set wire up\n\
         link set eth0 up\n\
         address add 192.0.2.1/24 dev eth0")?;
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.context("a runtime")?.block_on(example())
    })?
}

/// An etcd in the sandbox. It ends when this value is dropped.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    _dir: tempfile::TempDir,
}

impl Etcd {
    /// Its endpoint.
    pub const ENDPOINT: &str = "http://127.0.0.1:2379";

    /// Starts the program `ETCD`, by default `etcd`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let program = std::env::var_os("ETCD").unwrap_or_else(|| "etcd".into());
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(dir.path());
        let client = Self::ENDPOINT;
        let peer = "http://127.0.0.1:2380";
        command.args(["--listen-client-urls", client, "--advertise-client-urls", client]);
        command.args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]);
        command.args(["--initial-cluster", "default=http://127.0.0.1:2380"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(Self { child: child.context("etcd is needed")?, _dir: dir })
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The code in the guide for embedding compiles.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
struct Embedding;

/// The code in the project's README compiles.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
