//! etcd as a child process: alone or as a cluster, with any arguments.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use etcd_client::{Client, ConnectOptions};
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::time::Instant;

/// One member. Its drop ends it.
pub(crate) struct Etcd {
    dir: TempDir,
    child: Option<Child>,
    pub(crate) endpoint: String,
    args: Vec<String>,
}

/// The program: the value of its environment variable, or a program in the search path.
fn program(name: &str) -> PathBuf {
    let variable = name.to_uppercase();
    std::env::var_os(&variable).map_or_else(|| name.into(), PathBuf::from)
}

/// A free port outside the system's range for connections, because a member that was killed uses it
/// again.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let n =
            std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 10_000 + (n % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// In memory if there is room for many members with a log of 128 MiB each. No test is about the
/// disk, and each write waits for it.
fn dir_for_data() -> TempDir {
    let memory = Path::new("/dev/shm");
    let room = statvfs(memory).is_ok_and(|fs| fs.blocks_available() * fs.fragment_size() > 4 << 30);
    let in_memory = if room { TempDir::new_in(memory).ok() } else { None };
    in_memory.unwrap_or_else(|| TempDir::new().unwrap())
}

impl Etcd {
    /// A single member that answers.
    pub(crate) async fn start() -> Self {
        let etcd = Self::spawn("http", &[]);
        etcd.ready().await;
        etcd
    }

    /// A single member with more arguments. `scheme` is `http` or `https`.
    pub(crate) fn spawn(scheme: &str, more: &[String]) -> Self {
        Self::spawn_on("127.0.0.1", scheme, more)
    }

    /// A single member for clients at this address of the calling thread's network namespace.
    pub(crate) fn spawn_on(address: &str, scheme: &str, more: &[String]) -> Self {
        let client = free_port();
        let peer = free_port();
        let peers = format!("m0=http://127.0.0.1:{peer}");
        Self::member("m0", &format!("{scheme}://{address}:{client}"), peer, &peers, more)
    }

    /// A cluster of three members that answers.
    pub(crate) async fn cluster() -> Vec<Self> {
        Self::cluster_on("127.0.0.1").await
    }

    /// A cluster of three members that answers, for clients at this address of the calling thread's
    /// network namespace.
    pub(crate) async fn cluster_on(address: &str) -> Vec<Self> {
        let peers = [free_port(), free_port(), free_port()];
        let all: Vec<_> = peers
            .iter()
            .enumerate()
            .map(|(n, peer)| format!("m{n}=http://127.0.0.1:{peer}"))
            .collect();
        let mut members = Vec::new();
        for (n, peer) in peers.into_iter().enumerate() {
            let endpoint = format!("http://{address}:{}", free_port());
            members.push(Self::member(&format!("m{n}"), &endpoint, peer, &all.join(","), &[]));
        }
        for member in &members {
            member.ready().await;
        }
        members
    }

    fn member(name: &str, endpoint: &str, peer: u16, peers: &str, more: &[String]) -> Self {
        let dir = dir_for_data();
        let peer = format!("http://127.0.0.1:{peer}");
        let mut args: Vec<String> = [
            "--name",
            name,
            "--listen-client-urls",
            endpoint,
            "--advertise-client-urls",
            endpoint,
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
            "--initial-cluster",
            peers,
        ]
        .map(str::to_owned)
        .into();
        args.extend(more.iter().cloned());
        let mut etcd = Self { dir, child: None, endpoint: endpoint.to_owned(), args };
        etcd.go();
        etcd
    }

    /// Starts the process, again after [`Etcd::kill`].
    pub(crate) fn go(&mut self) {
        let log =
            File::options().create(true).append(true).open(self.dir.path().join("log")).unwrap();
        let program = program("etcd");
        let child = Command::new(&program)
            .arg("--data-dir")
            .arg(self.data())
            .args(&self.args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.unwrap_or_else(|error| {
            panic!(
                "{program:?} cannot be started: {error}; install Debian's etcd-server, or set ETCD \
                 to the program"
            )
        }));
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its name, URL and cluster members, for which data are restored.
    pub(crate) fn initial_cluster(&self) -> [String; 3] {
        ["--name", "--initial-cluster", "--initial-advertise-peer-urls"].map(|flag| {
            let at = self.args.iter().position(|arg| arg == flag).unwrap();
            self.args[at + 1].clone()
        })
    }

    /// Replaces the data of the member.
    pub(crate) fn replace_data(&self, with: &Path) {
        fs::remove_dir_all(self.data()).unwrap();
        fs::rename(with, self.data()).unwrap();
    }

    pub(crate) fn endpoints(&self) -> Vec<String> {
        vec![self.endpoint.clone()]
    }

    /// A new client.
    pub(crate) async fn client(&self) -> Client {
        self.client_as(None).await
    }

    pub(crate) async fn client_as(&self, user: Option<(&str, &str)>) -> Client {
        let mut options = ConnectOptions::new().with_timeout(Duration::from_secs(10));
        if let Some((name, password)) = user {
            options = options.with_user(name, password);
        }
        Client::connect([&self.endpoint], Some(options)).await.unwrap()
    }

    /// Waits until it answers.
    pub(crate) async fn ready(&self) {
        let begin = Instant::now();
        loop {
            let mut client = self.client().await;
            match client.get("/", None).await {
                Ok(_) => return,
                Err(error) => assert!(
                    begin.elapsed() < Duration::from_secs(30),
                    "{}: {error}; it says: {}",
                    self.endpoint,
                    fs::read_to_string(self.dir.path().join("log")).unwrap()
                ),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn put(&self, key: &str, value: &str) {
        self.client().await.put(key, value, None).await.unwrap();
    }

    /// Puts a key, and blocks until it is there.
    pub(crate) fn put_now(&self, key: &str, value: &str) {
        std::thread::scope(|scope| {
            let put = scope.spawn(|| {
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(self.put(key, value));
            });
            put.join().unwrap();
        });
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().unwrap().id();
        kill(Pid::from_raw(pid.cast_signed()), signal).unwrap();
    }

    /// Stops the process at any point until [`Etcd::resume`]. Its connections stay open.
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn snapshot(&self, file: &Path) {
        self.etcdctl(&["snapshot", "save", file.to_str().unwrap()]);
    }

    pub(crate) fn etcdctl(&self, args: &[&str]) -> Output {
        let mut all = vec!["--endpoints", &self.endpoint];
        all.extend_from_slice(args);
        etcdctl(&all)
    }
}

pub(crate) fn etcdctl(args: &[&str]) -> Output {
    let program = program("etcdctl");
    let output = Command::new(&program).env("ETCDCTL_API", "3").args(args).output();
    let output = output.unwrap_or_else(|error| {
        panic!(
            "{program:?} cannot be started: {error}; install Debian's etcd-client, or set ETCDCTL \
             to the program"
        )
    });
    assert!(output.status.success(), "etcdctl {args:?}: {output:?}");
    output
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
