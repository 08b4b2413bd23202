//! Where the daemon can be asked: health and metrics over TCP, the same and the control API over a Unix socket.
//!
//! Reading verbs are `GET` and change nothing. Writing verbs are `POST`. TCP has health and metrics
//! only. Every user that may open the socket may read; `--control-group` is for that. Only root and
//! the daemon's own user may write, whatever the mode of the socket: the kernel names the user of
//! the client.
//!
//! | request | answer |
//! |---|---|
//! | `GET /healthz` | 200 as long as the daemon turns |
//! | `GET /readyz` | 200, or 503 and the reasons |
//! | `GET /metrics` | metrics for Prometheus, as OpenMetrics if `Accept` names it |
//! | `GET /v1/status` | the whole picture, JSON; with `?fresh=true` nothing that takes a process is remembered from before |
//! | `GET /v1/peers` | every peer, JSON |
//! | `GET /v1/why?address=A` | why packets for A go where they go, JSON |
//! | `POST /v1/reload` | what SIGHUP does; the result |
//! | `POST /v1/log?filter=F` | sets `--log` until SIGHUP |
//!
//! **Source**: flannel `main.go: mustRunHealthz`, for the paths and first lines of the health answers.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use async_trait::async_trait;
use flannel_api::VERSION;
use flannel_options::control::{self, DOCTOR_PORT, port};
use hyper::StatusCode;
use nix::errno::Errno;
use serde_json::json;
use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, UnixListener};

use crate::config::{ControlConfig, ControlSocket};
use crate::error::Error;
use crate::http::{Listener, Request, Response, Site, serve};
use crate::metrics::{Format, metrics};
use crate::observe::Observer;
use crate::problems::problems;
use crate::report::{peers, status_report};
use crate::why::why;

const JSON: &str = "application/json";
/// So many connections the kernel keeps until they are accepted.
const BACKLOG: i32 = 1024;
/// How a kernel without IPv6 refuses a socket of it, or its address.
const NO_IPV6: [i32; 2] = [Errno::EAFNOSUPPORT as i32, Errno::EADDRNOTAVAIL as i32];

/// The options that tell where the daemon can be asked.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct ControlFlags {
    /// Where /healthz, /readyz and /metrics are served; 0.0.0.0 and `::` mean every address of both families
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub healthz_ip: IpAddr,

    /// On which port; 0: nowhere
    #[arg(long, value_name = "PORT", default_value = "0", allow_hyphen_values = true, value_parser = port)]
    pub healthz_port: u16,

    /// The socket that flannelctl asks, or off; flanneld.sock beside the subnet file if not given
    #[arg(long, value_name = "FILE|off")]
    pub control_socket: Option<PathBuf>,

    /// The group whose members may ask over the control socket, by name or number; what changes something stays with root
    #[arg(long, value_name = "GROUP", value_parser = group)]
    pub control_group: Option<u32>,

    /// The port, TCP and UDP, on which the tunnel's address answers the doctors of other nodes and nobody else; without a tunnel
    /// the external interface's, TCP alone; 0: none
    #[arg(long, value_name = "PORT", default_value = DOCTOR_PORT, value_parser = port)]
    pub doctor_port: u16,
}

/// A group's number, by its name or as it is.
fn group(text: &str) -> Result<u32, String> {
    match text.parse() {
        // To the kernel it is none, and would leave the group as it is.
        Ok(u32::MAX) => {
            return Err(format!("{text} is no group; right would be one of getent group"));
        }
        Ok(number) => return Ok(number),
        Err(_) => {}
    }
    match nix::unistd::Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => {
            Err("this host has no such group; right would be a name of getent group, or a number"
                .to_owned())
        }
        Err(errno) => {
            Err(format!("the groups of this host cannot be read: {errno}; a number needs no name"))
        }
    }
}

impl ControlFlags {
    /// The same as typed values.
    pub(crate) fn config(&self) -> ControlConfig {
        ControlConfig {
            health: Some(SocketAddr::new(self.healthz_ip, self.healthz_port))
                .filter(|address| address.port() != 0),
            socket: match &self.control_socket {
                None => ControlSocket::BesideSubnetFile,
                Some(path) if path.as_os_str() == "off" => ControlSocket::Off,
                Some(path) => ControlSocket::At(path.clone()),
            },
            group: self.control_group,
            doctor_port: self.doctor_port,
        }
    }
}

/// The file of the control socket; `None`: there is to be none.
fn socket(socket: &ControlSocket, subnet_file: &Path) -> Option<PathBuf> {
    match socket {
        ControlSocket::BesideSubnetFile => control::socket(None, subnet_file),
        ControlSocket::At(path) => Some(path.clone()),
        ControlSocket::Off => None,
    }
}

/// Everything that listens.
#[derive(Debug)]
pub(crate) struct Servers {
    health: Option<Listener>,
    control: Option<(Listener, SocketFile)>,
}

/// A socket's file, removed when the daemon stops.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone, or another daemon's by now; a file that stays is replaced by the next start.
        let _ = fs::remove_file(&self.0);
    }
}

impl Servers {
    /// Begins to listen.
    ///
    /// # Errors
    /// An address or a socket that was asked for cannot be had. A control socket that nobody asked for is only missed.
    pub(crate) async fn open(config: &ControlConfig, subnet_file: &Path) -> Result<Self, Error> {
        let health = match config.health {
            None => None,
            Some(address) => {
                let listener = listen(address).map_err(|error| Error::Listen {
                    what: format!(
                        "--healthz-ip {} --healthz-port {}",
                        address.ip(),
                        address.port()
                    ),
                    reason: error.to_string(),
                })?;
                let bound = listener.local_addr().unwrap_or(address);
                tracing::info!("health and metrics are served at http://{bound}");
                Some(Listener::Tcp(listener))
            }
        };
        let control = match socket(&config.socket, subnet_file) {
            None => None,
            Some(path) => match open_socket(&path, config.group) {
                Ok(listener) => Some((Listener::Unix(listener), SocketFile(path))),
                Err(reason) => {
                    let what = format!("--control-socket {}", path.display());
                    let error = Error::Listen { what, reason };
                    if config.socket != ControlSocket::BesideSubnetFile {
                        return Err(error);
                    }
                    tracing::warn!("flannelctl cannot ask this daemon: {error}");
                    None
                }
            },
        };
        Ok(Self { health, control })
    }

    /// Serves for ever.
    pub(crate) async fn serve(self, observer: &Observer) -> Infallible {
        let site = |writes| Arc::new(Answers::new(observer, writes));
        let (health, control) = (self.health, self.control);
        let health = async {
            match health {
                Some(listener) => serve(listener, site(false)).await,
                None => std::future::pending().await,
            }
        };
        let control = async {
            match control {
                Some((listener, _file)) => serve(listener, site(true)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            never = health => never,
            never = control => never,
        }
    }
}

/// Listens at an address; at one that says nothing, of either family, for both families.
///
/// **Source**: Go's `net.Listen("tcp", …)`, which Go flannel calls: a kubelet probes an IPv6-only node at its IPv6 address, though
/// `0.0.0.0` is what flannel's manifest leaves in force.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let open = |address: SocketAddr| {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), None)?;
        if address.is_ipv6() {
            socket.set_only_v6(!address.ip().is_unspecified())?;
        }
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    if !address.ip().is_unspecified() {
        return open(address);
    }
    open((Ipv6Addr::UNSPECIFIED, address.port()).into()).or_else(|error| {
        match error.raw_os_error() {
            // This host has no IPv6.
            Some(errno) if NO_IPV6.contains(&errno) => {
                open((Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            _ => Err(error),
        }
    })
}

/// Puts the socket in place in one step, with its mode and group, where there is none or a dead one.
fn open_socket(path: &Path, group: Option<u32>) -> Result<UnixListener, String> {
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err("another daemon answers there".to_owned());
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if let Some(directory) = directory {
        fs::create_dir_all(directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    let name = path.file_name().ok_or("it is not the name of a file")?;
    let temporary =
        path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let _ = fs::remove_file(&temporary);
    let listener = UnixListener::bind(&temporary).map_err(|error| error.to_string())?;
    let give = |group| {
        let given = std::os::unix::fs::chown(&temporary, None, Some(group));
        given.map_err(|error| format!("--control-group {group}: {error}"))
    };
    let given = group.map_or(Ok(()), give);
    let placed = given.and_then(|()| {
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o660))
            .and_then(|()| fs::rename(&temporary, path))
            .map_err(|error| error.to_string())
    });
    if placed.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    placed.map(|()| listener)
}

/// What is answered.
struct Answers {
    observer: Observer,
    /// The control API is served too.
    control: bool,
    /// Held by the one reload that there may be at a time.
    reloading: tokio::sync::Mutex<()>,
}

#[async_trait]
impl Site for Answers {
    async fn answer(&self, request: &Request) -> Response {
        let verb = (request.method.as_str(), request.path.as_str());
        match verb {
            ("GET", "/healthz") => Response::text(StatusCode::OK, "flanneld is running"),
            ("GET", "/readyz") => self.ready(),
            ("GET", "/metrics") => {
                let format = Format::accepted(&request.accept);
                let body = metrics(&self.observer.snapshot(), format);
                Response { status: StatusCode::OK, kind: format.content_type(), body }
            }
            ("GET" | "POST", path) if self.control && path.starts_with("/v1/") => {
                self.control(request).await
            }
            ("GET" | "POST", path) => {
                Response::text(StatusCode::NOT_FOUND, format!("there is no {path} here\n"))
            }
            (method, _) => Response::text(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("{method} is not understood here\n"),
            ),
        }
    }
}

impl Answers {
    fn new(observer: &Observer, control: bool) -> Self {
        Self { observer: observer.clone(), control, reloading: tokio::sync::Mutex::default() }
    }

    fn ready(&self) -> Response {
        let problems = problems(&self.observer.snapshot());
        let errors = problems.iter().filter(|problem| problem.is_error());
        let reasons: Vec<&str> = errors.map(|problem| problem.text.as_str()).collect();
        match reasons.as_slice() {
            [] => Response::text(StatusCode::OK, "flanneld is ready"),
            reasons => Response::text(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("flanneld is not ready yet\n{}\n", reasons.join("\n")),
            ),
        }
    }

    async fn control(&self, request: &Request) -> Response {
        if request.method == "POST" && !may_write(request.uid) {
            let own = nix::unistd::geteuid();
            let error = format!(
                "what changes something is for root, and for user {own}, as whom flanneld runs"
            );
            return refusal(StatusCode::FORBIDDEN, &error);
        }
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/v1/status") => {
                let snapshot = self.observer.snapshot_of_peers().await;
                let mut report = status_report(&snapshot);
                if let Some(network) = &snapshot.network {
                    if request.parameter("fresh").is_some_and(|fresh| fresh == "true") {
                        self.observer.forget().await;
                    }
                    let look = self.observer.look(network).await;
                    (report.findings, report.unread) = (look.findings, look.unread);
                }
                answer(&json!(report))
            }
            ("GET", "/v1/peers") => {
                let snapshot = self.observer.snapshot_of_peers().await;
                answer(&json!({ "version": VERSION, "peers": peers(&snapshot) }))
            }
            ("GET", "/v1/why") => match request
                .parameter("address")
                .map(|text| text.parse::<IpAddr>())
            {
                Some(Ok(address)) => answer(&json!(why(&self.observer.snapshot(), address).await)),
                _ => refusal(
                    StatusCode::BAD_REQUEST,
                    "address is to be an IP address, as in /v1/why?address=10.1.7.9",
                ),
            },
            ("POST", "/v1/reload") => match self.reloading.try_lock() {
                Ok(_reloading) => {
                    answer(&json!({ "version": VERSION, "found": self.observer.reload().await }))
                }
                Err(_) => refusal(
                    StatusCode::SERVICE_UNAVAILABLE,
                    "everything is being read again already, and the store has not answered yet",
                ),
            },
            ("POST", "/v1/log") => match request.parameter("filter") {
                Some(filter) => match self.observer.set_log(Some(&filter)) {
                    Ok(()) => {
                        tracing::info!("the log filter is {filter} now, until SIGHUP");
                        answer(&json!({ "version": VERSION, "filter": filter }))
                    }
                    Err(error) => refusal(StatusCode::BAD_REQUEST, &error),
                },
                None => refusal(
                    StatusCode::BAD_REQUEST,
                    "filter is to be what --log takes, as in /v1/log?filter=debug",
                ),
            },
            (method, path) => {
                let error =
                    format!("this daemon has no {method} {path}; its API has version {VERSION}");
                let body = json!({ "version": VERSION, "error": error }).to_string();
                Response { status: StatusCode::NOT_FOUND, kind: JSON, body }
            }
        }
    }
}

/// Root, and the daemon's own user.
fn may_write(uid: Option<u32>) -> bool {
    uid.is_some_and(|uid| uid == 0 || uid == nix::unistd::geteuid().as_raw())
}

fn answer(value: &serde_json::Value) -> Response {
    Response { status: StatusCode::OK, kind: JSON, body: format!("{value}\n") }
}

fn refusal(status: StatusCode, error: &str) -> Response {
    let body = format!("{}\n", json!({ "version": VERSION, "error": error }));
    Response { status, kind: JSON, body }
}

#[cfg(test)]
mod tests {
    use flannel_core::status::Status;
    use flannel_netlink::testing::in_netns_async;
    use tokio::net::TcpStream;

    use super::*;
    use crate::observe::tests::network;

    async fn ask(site: &Answers, method: &str, target: &str) -> (u16, String) {
        let response = site.answer(&Request::new(method, target).by(Some(0))).await;
        (response.status.as_u16(), response.body)
    }

    #[tokio::test]
    async fn health_is_answered_as_go_flannel_does_and_readiness_with_reasons() {
        let observer = Observer::default();
        let site = Answers::new(&observer, false);
        assert_eq!(ask(&site, "GET", "/healthz").await, (200, "flanneld is running".to_owned()));
        let (status, body) = ask(&site, "GET", "/readyz").await;
        assert_eq!((status, body.lines().next()), (503, Some("flanneld is not ready yet")));
        assert!(body.contains("no network runs"), "{body}");
        let mut status = Status::default();
        (status.in_sync, status.live) = (true, true);
        let _guard = observer.running(network(status).await.1);
        let (status, body) = ask(&site, "GET", "/readyz").await;
        assert!(
            status == 503 && body.contains("does not hold its lease"),
            "no store has given one: {body}"
        );
        assert_eq!(ask(&site, "GET", "/v1/status").await.0, 404, "not over TCP");
        assert_eq!(ask(&site, "POST", "/v1/reload").await.0, 404);
        assert_eq!(ask(&site, "DELETE", "/healthz").await.0, 405);
    }

    #[tokio::test]
    async fn reading_and_writing_verbs_are_apart_and_versioned() {
        let site = Answers::new(&Observer::default(), true);
        for (method, target, status) in [
            ("GET", "/v1/status", 200),
            ("POST", "/v1/status", 404),
            ("GET", "/v1/peers", 200),
            ("GET", "/v1/why?address=10.1.7.9", 200),
            ("GET", "/v1/why?address=x", 400),
            ("GET", "/v1/reload", 404),
            ("POST", "/v1/reload", 200),
            ("POST", "/v1/log?filter=debug", 400),
            ("GET", "/v2/status", 404),
        ] {
            let (got, body) = ask(&site, method, target).await;
            assert_eq!(got, status, "{method} {target}: {body}");
            if target.starts_with("/v1/") {
                let body: serde_json::Value = serde_json::from_str(&body).unwrap();
                assert_eq!(body["version"], VERSION, "{target}");
            }
        }
    }

    /// A kubelet asks an IPv6-only node at its IPv6 address, with the options as the manifest has them.
    #[test]
    fn what_listens_everywhere_is_asked_over_either_family() {
        in_netns_async(async || {
            for (port, everywhere) in
                [(8081, Ipv4Addr::UNSPECIFIED.into()), (8082, Ipv6Addr::UNSPECIFIED.into())]
            {
                let _listener = listen(SocketAddr::new(everywhere, port)).unwrap();
                for address in ["127.0.0.1", "::1"] {
                    let address: IpAddr = address.parse().unwrap();
                    let asked = TcpStream::connect((address, port)).await;
                    assert!(asked.is_ok(), "{everywhere} at {address}: {asked:?}");
                }
            }
            for (port, address, other) in [(8083, "127.0.0.1", "::1"), (8084, "::1", "127.0.0.1")] {
                let [address, other] = [address, other].map(|text| text.parse::<IpAddr>().unwrap());
                let _listener = listen(SocketAddr::new(address, port)).unwrap();
                assert!(TcpStream::connect((address, port)).await.is_ok(), "{address}");
                assert!(
                    TcpStream::connect((other, port)).await.is_err(),
                    "{other}, though only {address} is served"
                );
            }
        });
    }

    #[tokio::test]
    async fn who_is_neither_root_nor_the_daemons_user_reads_only() {
        let site = Answers::new(&Observer::default(), true);
        let own = nix::unistd::geteuid().as_raw();
        for (uid, writes) in [(Some(0), 200), (Some(own), 200), (Some(own + 1), 403), (None, 403)] {
            let ask = async |method, target| {
                site.answer(&Request::new(method, target).by(uid)).await.status.as_u16()
            };
            assert_eq!(ask("GET", "/v1/status").await, 200, "{uid:?}");
            assert_eq!(ask("POST", "/v1/reload").await, writes, "{uid:?}");
        }
    }

    #[test]
    fn groups_have_names_and_numbers() {
        assert_eq!(group("0"), Ok(0));
        assert_eq!(group("root"), Ok(0));
        assert_eq!(group("4294967294"), Ok(4_294_967_294));
        assert!(group("4294967295").unwrap_err().contains("is no group"));
        assert!(group("no such group").unwrap_err().contains("getent group"));
    }

    #[tokio::test]
    async fn no_second_reload_waits_for_a_store_that_does_not_answer_the_first() {
        let site = Answers::new(&Observer::default(), true);
        let first = site.reloading.lock().await;
        let (status, body) = ask(&site, "POST", "/v1/reload").await;
        assert!(status == 503 && body.contains("already"), "{status} {body}");
        drop(first);
        assert_eq!(ask(&site, "POST", "/v1/reload").await.0, 200);
    }

    #[tokio::test]
    async fn a_dead_socket_is_replaced_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/flanneld.sock");
        let first = open_socket(&path, None).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert_eq!(open_socket(&path, None).unwrap_err(), "another daemon answers there");
        drop(first);
        let _second = open_socket(&path, None).unwrap();
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
