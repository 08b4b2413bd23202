//! An API server for tests: nodes and pods over HTTP, with strict checks and faults.
//!
//! A request that a real API server would not serve, or that this crate's client must not send, is
//! a *violation*. The request fails. The test fails too, at the latest when the server is dropped.

mod answer;
mod client;
mod faults;
mod store;
mod stream;

use std::io::Cursor;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use flannel_core::runtime::lock;
use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use client::Clients;
use faults::Faults;
pub use faults::{Backup, Cut, Held};
use store::Store;

/// A server that runs until this value is dropped.
///
/// # Panics
/// When it is dropped, if there was a violation.
#[derive(Debug)]
pub struct ApiServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    scheme: &'static str,
    thread: Option<JoinHandle<()>>,
    stop: watch::Sender<bool>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: Mutex<Store>,
    pub(crate) faults: Mutex<Faults>,
    pub(crate) requests: Mutex<Vec<String>>,
    pub(crate) patches: Mutex<Vec<Value>>,
    pub(crate) violations: Mutex<Vec<String>>,
    /// The version, for waiting watches.
    pub(crate) changes: watch::Sender<u64>,
    /// How open watches end. A new value ends them, even if it equals the last one.
    pub(crate) cuts: watch::Sender<Cut>,
    /// A new value makes watches send a bookmark.
    pub(crate) bookmarks: watch::Sender<()>,
}

/// The certificate and key of the server.
struct Certified {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl ApiServer {
    /// A server on its own port of the loopback interface.
    ///
    /// # Panics
    /// No port is free, or the thread cannot be started.
    #[expect(clippy::new_without_default, reason = "it starts a thread")]
    pub fn new() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").expect("a port on the loopback interface"))
    }

    /// A server on this socket, which may be in another network namespace.
    ///
    /// # Panics
    /// The socket cannot be used.
    pub fn on(listener: TcpListener) -> Self {
        Self::start(listener, None)
    }

    /// A server with TLS on the loopback interface. The certificate and the key are PEM. Like a
    /// real API server it asks clients for a certificate, and does not check it before a request.
    ///
    /// # Panics
    /// The certificate or key cannot be used.
    pub fn with_tls(certificate: &str, key: &str) -> Self {
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .expect("certificates in PEM");
        let key = PrivateKeyDer::from_pem_reader(Cursor::new(key)).expect("a key in PEM");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on the loopback interface");
        Self::start(listener, Some(Certified { chain, key }))
    }

    fn start(listener: TcpListener, certified: Option<Certified>) -> Self {
        let address = listener.local_addr().expect("a bound socket has an address");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            patches: Mutex::default(),
            violations: Mutex::default(),
            changes: watch::channel(0).0,
            cuts: watch::channel(Cut::Clean).0,
            bookmarks: watch::channel(()).0,
        });
        let tls = certified.map(|certified| acceptor(certified, &shared));
        let (stop, stopped) = watch::channel(false);
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("api-server".to_owned())
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                    .expect("a runtime");
                runtime.block_on(serve(listener, tls, server, stopped));
            })
            .expect("a thread");
        Self { shared, address, scheme, thread: Some(thread), stop }
    }

    /// Its URL.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// Creates or replaces a node. A name and a creation time are added to `node`.
    ///
    /// # Panics
    /// `node` is not a JSON object.
    pub fn put_node(&self, name: &str, node: Value) {
        let version = lock(&self.shared.store).put(name, node);
        self.shared.changes.send_replace(version);
    }

    /// Creates or replaces many nodes at once. Open watches only learn that they missed changes.
    pub fn fill(&self, nodes: impl IntoIterator<Item = (String, Value)>) {
        let mut store = lock(&self.shared.store);
        nodes.into_iter().for_each(|(name, node)| _ = store.put(&name, node));
        store.forget();
        self.shared.changes.send_replace(store.version);
    }

    /// The present state of a node, or `None` if it does not exist.
    pub fn node(&self, name: &str) -> Option<Value> {
        lock(&self.shared.store).node(name)
    }

    /// An annotation of a node, or `None` if it does not exist.
    pub fn annotation(&self, node: &str, name: &str) -> Option<String> {
        Some(self.node(node)?["metadata"]["annotations"][name].as_str()?.to_owned())
    }

    /// A condition of a node, or `None` if it does not exist.
    pub fn condition(&self, node: &str, kind: &str) -> Option<Value> {
        let node = self.node(node)?;
        node["status"]["conditions"]
            .as_array()?
            .iter()
            .find(|condition| condition["type"] == kind)
            .cloned()
    }

    /// Changes a node.
    ///
    /// # Panics
    /// The node does not exist.
    pub fn modify(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut node = self.node(name).expect("the node exists");
        change(&mut node);
        self.put_node(name, node);
    }

    /// Writes a node with only another version, like a kubelet.
    ///
    /// # Panics
    /// The node does not exist.
    pub fn heartbeat(&self, name: &str) {
        let version = lock(&self.shared.store).heartbeat(name);
        self.shared.changes.send_replace(version);
    }

    /// Deletes a node.
    pub fn delete_node(&self, name: &str) {
        let version = lock(&self.shared.store).delete(name);
        self.shared.changes.send_replace(version);
    }

    /// Creates a pod on a node. If `node` is empty, the pod is not on a node.
    pub fn put_pod(&self, namespace: &str, name: &str, node: &str) {
        let spec = if node.is_empty() { json!({}) } else { json!({ "nodeName": node }) };
        let metadata = json!({ "name": name, "namespace": namespace });
        let pod = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec });
        lock(&self.shared.store).pods.insert(format!("{namespace}/{name}"), pod);
    }

    /// All requests so far: `GET /api/v1/nodes?…`.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.shared.requests).clone()
    }

    /// All patches so far.
    pub fn patches(&self) -> Vec<Value> {
        lock(&self.shared.patches).clone()
    }

    /// The number of requests that contain this text.
    pub fn count(&self, text: &str) -> usize {
        lock(&self.shared.requests).iter().filter(|request| request.contains(text)).count()
    }

    /// Takes the violations, which then do not fail the test.
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.shared.violations))
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the API server panicked");
        }
        let violations = self.take_violations();
        assert!(violations.is_empty() || std::thread::panicking(), "violations: {violations:#?}");
    }
}

fn acceptor(certified: Certified, shared: &Arc<Shared>) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions of TLS")
        .with_client_cert_verifier(Arc::new(Clients(Arc::clone(shared))))
        .with_single_cert(certified.chain, certified.key)
        .expect("a key of the certificate");
    TlsAcceptor::from(Arc::new(config))
}

async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    shared: Arc<Shared>,
    mut stopped: watch::Receiver<bool>,
) {
    let listener =
        tokio::net::TcpListener::from_std(listener).expect("a non-blocking socket and a runtime");
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stopped.wait_for(|stop| *stop) => return,
        };
        let Ok((connection, _)) = accepted else { continue };
        let _ = connection.set_nodelay(true);
        let shared = Arc::clone(&shared);
        let tls = tls.clone();
        tokio::spawn(async move {
            let http = hyper::server::conn::http1::Builder::new();
            let service = |client: Vec<CertificateDer<'static>>| {
                hyper::service::service_fn(move |request| {
                    answer::answer(Arc::clone(&shared), client.clone(), request)
                })
            };
            // An error means that the client has disconnected.
            match tls {
                Some(tls) => {
                    if let Ok(connection) = tls.accept(connection).await {
                        let (_, session) = connection.get_ref();
                        let client = session.peer_certificates().unwrap_or_default().to_vec();
                        _ = http.serve_connection(TokioIo::new(connection), service(client)).await;
                    }
                }
                None => {
                    _ = http.serve_connection(TokioIo::new(connection), service(Vec::new())).await;
                }
            }
        });
    }
}
