//! An etcd for the bench: `etcd` in the search path, or the program `ETCD`.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use etcd_client::Client;
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The prefix of keys.
pub(crate) const PREFIX: &str = "/coreos.com/network";

/// An etcd that runs. Dropping it ends the process.
pub(crate) struct Etcd {
    _dir: tempfile::TempDir,
    child: Child,
    endpoint: String,
}

impl Etcd {
    pub(crate) async fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let port = || -> std::io::Result<u16> {
            Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
        };
        let endpoint = format!("http://127.0.0.1:{}", port()?);
        let peer = format!("http://127.0.0.1:{}", port()?);
        let program = std::env::var_os("ETCD").unwrap_or_else(|| "etcd".into());
        let child = Command::new(&program)
            .args([
                "--name",
                "m0",
                "--listen-client-urls",
                &endpoint,
                "--advertise-client-urls",
                &endpoint,
            ])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("m0={peer}"), "--data-dir"])
            .arg(dir.path().join("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| {
                format!("{program:?}: install Debian's etcd-server, or name etcd in ETCD")
            })?;
        let etcd = Self { _dir: dir, child, endpoint };
        let begin = Instant::now();
        while let Err(error) = etcd.client().await?.get("/", None).await {
            anyhow::ensure!(
                begin.elapsed() < Duration::from_secs(30),
                "etcd does not answer: {error}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(etcd)
    }

    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub(crate) async fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::connect([&self.endpoint], None).await?)
    }

    /// A new connection, as a daemon opens it.
    pub(crate) fn registry(&self) -> anyhow::Result<EtcdRegistry> {
        let endpoints = vec![self.endpoint.clone()];
        Ok(EtcdRegistry::new(EtcdOptions { endpoints, ..EtcdOptions::default() })?)
    }

    /// The numbers of unary requests and of streams, as etcd counts them.
    pub(crate) async fn requests(&self) -> anyhow::Result<(u64, u64)> {
        let mut stream = TcpStream::connect(self.endpoint.trim_start_matches("http://")).await?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        let lines = text.lines().filter(|line| line.starts_with("grpc_server_started_total{"));
        let mut unary = 0;
        let mut streams = 0;
        for line in lines {
            let count = line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok());
            let count = count.with_context(|| format!("no figure in {line:?}"))? as u64;
            *(if line.contains("\"unary\"") { &mut unary } else { &mut streams }) += count;
        }
        Ok((unary, streams))
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
