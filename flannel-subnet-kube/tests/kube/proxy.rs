//! The API server behind a proxy, which the kubeconfig names.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flannel_core::SubnetManager;
use flannel_core::runtime::lock;
use flannel_subnet_kube::testing::ApiServer;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};

use crate::fixture::{Fixture, V4, blank, until};

/// The name of the API server, which only the proxy knows.
const NAME: &str = "api.example";

/// A proxy that sends all connections to the API server. It notes what clients ask for.
struct Proxy {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
}

/// The protocol of a proxy, and its answer.
#[derive(Clone, Copy)]
enum Kind {
    /// HTTP CONNECT with this status.
    Http(u16),
    Socks,
}

impl Proxy {
    async fn start(kind: Kind, server: &ApiServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let url: http::Uri = server.url().parse().unwrap();
        let to = url.authority().unwrap().to_string();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let (to, notes) = (to.clone(), Arc::clone(&notes));
                tokio::spawn(async move {
                    let mut near = BufReader::new(near);
                    let request = match kind {
                        Kind::Http(status) => answer_http(&mut near, status).await,
                        Kind::Socks => answer_socks(&mut near).await,
                    };
                    lock(&notes).push(request);
                    let mut far = TcpStream::connect(to).await.unwrap();
                    let _ = copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
        Self { address, asked }
    }

    fn asked(&self) -> Vec<String> {
        lock(&self.asked).clone()
    }
}

/// Answers CONNECT. Returns its head.
async fn answer_http(near: &mut BufReader<TcpStream>, status: u16) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(near.read_line(&mut head).await.unwrap(), 0, "{head}");
    }
    let answer = format!("HTTP/1.1 {status} from the proxy\r\n\r\n");
    near.write_all(answer.as_bytes()).await.unwrap();
    head
}

/// Answers a request of SOCKS 5 without a password. Returns the host that is asked for.
async fn answer_socks(near: &mut BufReader<TcpStream>) -> String {
    let mut greeting = [0; 2];
    near.read_exact(&mut greeting).await.unwrap();
    near.read_exact(&mut vec![0; usize::from(greeting[1])]).await.unwrap();
    near.write_all(&[5, 0]).await.unwrap();
    // Version, CONNECT, 0, a name, its length.
    let mut head = [0; 5];
    near.read_exact(&mut head).await.unwrap();
    assert_eq!(head[..4], [5, 1, 0, 3]);
    let mut name = vec![0; usize::from(head[4])];
    near.read_exact(&mut name).await.unwrap();
    let port = near.read_u16().await.unwrap();
    near.write_all(&[5, 0, 0, 1, 0, 0, 0, 0, 0, 0]).await.unwrap();
    format!("{}:{port}", String::from_utf8(name).unwrap())
}

fn server() -> (ApiServer, String) {
    let signed = rcgen::generate_simple_self_signed([NAME.to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    let ca = STANDARD.encode(signed.cert.pem());
    (server, format!("server: \"https://{NAME}:6443\", certificate-authority-data: {ca}"))
}

#[tokio::test]
async fn the_api_server_is_reached_through_a_proxy() {
    let fixture = Fixture::new(V4);
    let (server, cluster) = server();
    for (kind, scheme, says) in [
        (Kind::Http(200), "http://user:sesame@", "CONNECT api.example:6443 HTTP/1.1\r\n"),
        (Kind::Socks, "socks5://", "api.example:6443"),
    ] {
        let proxy = Proxy::start(kind, &server).await;
        let cluster = format!("{cluster}, proxy-url: \"{scheme}{}\"", proxy.address);
        let manager = fixture.with_kubeconfig(&cluster, "").await.unwrap();
        manager.hints().await.unwrap();
        let views = manager.watch_leases().await.unwrap();
        until(|| server.count("watch=") > 0).await;
        drop(views);
        let asked = proxy.asked();
        assert!(asked.iter().all(|request| request.starts_with(says)), "{asked:?}");
        if let Kind::Http(_) = kind {
            // The base64 form of `user:sesame`.
            assert!(asked[0].contains("Proxy-Authorization: Basic dXNlcjpzZXNhbWU=\r\n"));
        }
    }
}

#[tokio::test]
async fn the_port_of_http_is_80() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    for (kind, scheme, says) in [
        (Kind::Http(200), "http", "CONNECT api.example:80 HTTP/1.1\r\n"),
        (Kind::Socks, "socks5", "api.example:80"),
    ] {
        let proxy = Proxy::start(kind, &fixture.server).await;
        let url = format!("{scheme}://{}", proxy.address);
        let cluster = format!("server: \"http://{NAME}\", proxy-url: \"{url}\"");
        let manager = fixture.with_kubeconfig(&cluster, "").await.unwrap();
        manager.hints().await.unwrap();
        let asked = proxy.asked();
        assert!(asked.iter().all(|request| request.starts_with(says)), "{asked:?}");
    }
}

/// This machine is reached directly. The test runs again, because its environment does not change.
#[test]
fn a_proxy_of_the_environment_that_is_not_used_may_be_wrong() {
    let test = "plugin::a_user_may_have_a_password";
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env("HTTPS_PROXY", "http://[")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test]
async fn a_proxy_that_refuses_is_named() {
    let fixture = Fixture::new(V4);
    let (server, cluster) = server();
    let proxy = Proxy::start(Kind::Http(407), &server).await;
    let cluster = format!("{cluster}, proxy-url: \"http://user:sesame@{}\"", proxy.address);
    let manager = fixture.with_kubeconfig(&cluster, "").await.unwrap();
    let error = manager.hints().await.unwrap_err().to_string();
    let says = format!("the proxy http://{}/ does not connect", proxy.address);
    assert!(error.contains(&says) && error.contains("authorization required"), "{error}");
    assert!(!error.contains("sesame"), "{error}");
    assert_eq!(server.count(""), 0);
}
