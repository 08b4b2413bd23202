//! An API server for tests: nodes and pods over HTTP, strict about what it is asked, with faults.
//!
//! What a real API server would not do, or what a client of ours must not ask, is a *violation*:
//! the request fails, and so does the test, at the latest when the server is dropped.

mod answer;
mod client;
mod faults;
mod store;
mod stream;

use std::io::Cursor;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use hyper_util::rt::TokioIo;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use client::Clients;
use faults::Faults;
pub use faults::{Cut, Held};
use store::Store;

/// A server that ends with the value.
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
    /// The version, for watches that wait.
    pub(crate) changes: watch::Sender<u64>,
    pub(crate) cuts: watch::Sender<(u64, Cut)>,
    pub(crate) bookmarks: watch::Sender<u64>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ApiServer {
    /// A server on a port of its own on the loopback interface.
    ///
    /// # Panics
    /// There is no port, or no thread.
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

    /// A server that speaks TLS with this certificate, on the loopback interface. Both are PEM. It
    /// asks clients for a certificate, and as a real one it does so without looking at it before
    /// there is a request.
    ///
    /// # Panics
    /// Certificate or key cannot be used.
    pub fn with_tls(certificate: &str, key: &str) -> Self {
        let chain =
            CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
        let key = PrivateKeyDer::from_pem_reader(Cursor::new(key)).expect("a key in PEM");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on the loopback interface");
        Self::start(listener, Some((chain.expect("certificates in PEM"), key)))
    }

    fn start(
        listener: TcpListener,
        tls: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
    ) -> Self {
        let address = listener.local_addr().expect("a bound socket has an address");
        listener.set_nonblocking(true).expect("a socket can be non-blocking");
        let shared = Arc::new(Shared {
            store: Mutex::default(),
            faults: Mutex::default(),
            requests: Mutex::default(),
            patches: Mutex::default(),
            violations: Mutex::default(),
            changes: watch::channel(0).0,
            cuts: watch::channel((0, Cut::Clean)).0,
            bookmarks: watch::channel(0).0,
        });
        let tls = tls.map(|(chain, key)| acceptor(chain, key, &shared));
        let (stop, stopped) = watch::channel(false);
        let (scheme, server) = (if tls.is_some() { "https" } else { "http" }, Arc::clone(&shared));
        let serve = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(serve(listener, tls, server, stopped));
        };
        let thread = std::thread::Builder::new()
            .name("api-server".to_owned())
            .spawn(serve)
            .expect("a thread");
        Self { shared, address, scheme, thread: Some(thread), stop }
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    /// Creates a node, or replaces it. `node` needs no more than what matters; a name and a
    /// creation time are added.
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node(&self, name: &str, node: Value) {
        let version = lock(&self.shared.store).put(name, node);
        self.shared.changes.send_replace(version);
    }

    /// Creates or replaces many nodes at once. Watches that are open learn only that they missed
    /// something.
    pub fn fill(&self, nodes: impl IntoIterator<Item = (String, Value)>) {
        let mut store = lock(&self.shared.store);
        nodes.into_iter().for_each(|(name, node)| _ = store.put(&name, node));
        store.forget();
        self.shared.changes.send_replace(store.version);
    }

    /// A node as it is now.
    pub fn node(&self, name: &str) -> Option<Value> {
        lock(&self.shared.store).node(name)
    }

    /// An annotation of a node.
    pub fn annotation(&self, node: &str, name: &str) -> Option<String> {
        Some(self.node(node)?["metadata"]["annotations"][name].as_str()?.to_owned())
    }

    /// A condition of a node.
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
    /// There is no such node.
    pub fn modify(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let mut node = self.node(name).expect("the node exists");
        change(&mut node);
        self.put_node(name, node);
    }

    /// Writes a node with another version and nothing else changed, as a kubelet does all the time.
    ///
    /// # Panics
    /// There is no such node.
    pub fn heartbeat(&self, name: &str) {
        let version = lock(&self.shared.store).heartbeat(name);
        self.shared.changes.send_replace(version);
    }

    /// Deletes a node.
    pub fn delete_node(&self, name: &str) {
        let version = lock(&self.shared.store).delete(name);
        self.shared.changes.send_replace(version);
    }

    /// A pod on a node; an empty name: on none yet.
    pub fn put_pod(&self, namespace: &str, name: &str, node: &str) {
        let spec = if node.is_empty() { json!({}) } else { json!({ "nodeName": node }) };
        let pod = json!({ "kind": "Pod", "apiVersion": "v1", "metadata": { "name": name, "namespace": namespace }, "spec": spec });
        lock(&self.shared.store).pods.insert(format!("{namespace}/{name}"), pod);
    }

    /// What was asked so far: `GET /api/v1/nodes?…`.
    pub fn requests(&self) -> Vec<String> {
        lock(&self.shared.requests).clone()
    }

    /// What was written so far, patch by patch.
    pub fn patches(&self) -> Vec<Value> {
        lock(&self.shared.patches).clone()
    }

    /// How many requests contain this text.
    pub fn count(&self, text: &str) -> usize {
        lock(&self.shared.requests).iter().filter(|request| request.contains(text)).count()
    }

    /// What nobody should have asked, which is forgotten with the call.
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

fn acceptor(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    shared: &Arc<Shared>,
) -> TlsAcceptor {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let clients = Arc::new(Clients(Arc::clone(shared)));
    let config = config.expect("versions of TLS").with_client_cert_verifier(clients);
    TlsAcceptor::from(Arc::new(
        config.with_single_cert(chain, key).expect("a key of the certificate"),
    ))
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
        let (shared, tls) = (Arc::clone(&shared), tls.clone());
        tokio::spawn(async move {
            let http = hyper::server::conn::http1::Builder::new();
            let serves = |client: Vec<CertificateDer<'static>>| {
                hyper::service::service_fn(move |request| {
                    answer::answer(Arc::clone(&shared), client.clone(), request)
                })
            };
            // A client that goes is no matter of ours.
            match tls {
                Some(tls) => {
                    if let Ok(connection) = tls.accept(connection).await {
                        let client =
                            connection.get_ref().1.peer_certificates().unwrap_or_default().to_vec();
                        _ = http.serve_connection(TokioIo::new(connection), serves(client)).await;
                    }
                }
                None => {
                    _ = http.serve_connection(TokioIo::new(connection), serves(Vec::new())).await;
                }
            }
        });
    }
}
