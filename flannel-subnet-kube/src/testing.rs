//! An API server for tests: nodes and pods over HTTP, strict about what it is asked, with faults.
//!
//! The one thing to know: what a real API server would not do, or what a client of ours must not ask, is a *violation*: the request
//! fails, and so does the test, at the latest when the server is dropped.

mod answer;
mod client;
mod store;
mod stream;

use std::collections::BTreeSet;
use std::io::Cursor;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, ServerConfig};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use client::Clients;
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

/// What happens to watches that are open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The connection breaks in the middle of an event.
    MidEvent,
    /// The server ends it in good order.
    Clean,
    /// The server says that the version is too old (410), as an event.
    Gone,
    /// The server sends another error, with this code, as an event.
    Error(u16),
}

/// A request that waits for its answer until this is dropped.
#[derive(Debug)]
pub struct Held {
    is_there: watch::Receiver<bool>,
    /// Ends with the value, which lets the request go.
    _keeps: watch::Sender<()>,
}

impl Held {
    /// Whether there is such a request by now. Until then whoever asks has come no further than to it.
    pub fn is_there(&self) -> bool {
        *self.is_there.borrow()
    }
}

/// The server's side of [`Held`].
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) text: String,
    pub(crate) is_there: watch::Sender<bool>,
    pub(crate) opens: watch::Receiver<()>,
}

/// How the server misbehaves.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// So many requests fail with this status, and this `Retry-After` in seconds.
    pub(crate) fail: Option<(u32, u16, Option<u64>)>,
    /// So many watches are refused with 410.
    pub(crate) gone: u32,
    /// The next request with its text waits before it.
    pub(crate) gate: Option<Gate>,
    /// The pause before each item of a list.
    pub(crate) slow: Duration,
    /// So many lists, or pages of them, break in their middle.
    pub(crate) cut_lists: u32,
    /// No list comes from the cache, which is never as new as is asked for.
    pub(crate) no_cache: bool,
    /// Lists that may come from the cache are never answered.
    pub(crate) cache_blocks: bool,
    /// What stands before the server answers with this status.
    pub(crate) proxy: Option<u16>,
    /// Verbs and resources that the account may not use.
    pub(crate) forbidden: BTreeSet<(String, String)>,
    /// The only token that is accepted.
    pub(crate) token: Option<String>,
    /// Who must have signed a client's certificate.
    pub(crate) clients: Option<Arc<dyn ClientCertVerifier>>,
    /// The handshake fails of a client who is not known.
    pub(crate) by_alert: bool,
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

    /// A server that speaks TLS with this certificate, on the loopback interface. Both are PEM. It asks clients for a certificate,
    /// and as a real one it does so without looking at it before there is a request.
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

    /// Creates a node, or replaces it. `node` needs no more than what matters; a name and a creation time are added.
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node(&self, name: &str, node: Value) {
        let version = lock(&self.shared.store).put(name, node);
        self.shared.changes.send_replace(version);
    }

    /// Creates or replaces many nodes at once. Watches that are open learn only that they missed something.
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

    /// The next `count` requests fail with this status.
    pub fn fail(&self, count: u32, status: u16, retry_after: Option<u64>) {
        lock(&self.shared.faults).fail = Some((count, status, retry_after));
    }

    /// The next `count` watches are refused with 410.
    pub fn refuse_watches(&self, count: u32) {
        lock(&self.shared.faults).gone = count;
    }

    /// The next request that contains this text is held until what is returned is dropped: counted and decided on only then. Who asks
    /// can come no further meanwhile, however long a test takes to make what the answer is to meet. Only one is held.
    pub fn hold(&self, text: &str) -> Held {
        let ((there, is_there), (keeps, opens)) = (watch::channel(false), watch::channel(()));
        lock(&self.shared.faults).gate =
            Some(Gate { text: text.to_owned(), is_there: there, opens });
        Held { is_there, _keeps: keeps }
    }

    /// Each item of a list comes so much later.
    pub fn slow_lists(&self, pause: Duration) {
        lock(&self.shared.faults).slow = pause;
    }

    /// The next `count` lists, or pages of them, break in their middle.
    pub fn cut_lists(&self, count: u32) {
        lock(&self.shared.faults).cut_lists = count;
    }

    /// Lists that the server's cache may answer are refused (504) from now on, or no longer, as if it came to no version that is asked for.
    pub fn fail_cached_lists(&self, fail: bool) {
        lock(&self.shared.faults).no_cache = fail;
    }

    /// Lists that the server's cache may answer are not answered at all from now on, or no longer, as if it were not ready.
    pub fn block_cached_lists(&self, block: bool) {
        lock(&self.shared.faults).cache_blocks = block;
    }

    /// A load balancer before the server answers in its place from now on, with this status and a page of its own; `None`: no longer.
    pub fn stand_before(&self, status: Option<u16>) {
        lock(&self.shared.faults).proxy = status;
    }

    /// The account may not use this verb on this resource.
    pub fn forbid(&self, verb: &str, resource: &str) {
        lock(&self.shared.faults).forbidden.insert((verb.to_owned(), resource.to_owned()));
    }

    /// The account may use this verb on this resource again.
    pub fn permit(&self, verb: &str, resource: &str) {
        lock(&self.shared.faults).forbidden.remove(&(verb.to_owned(), resource.to_owned()));
    }

    /// The account may do everything again.
    pub fn permit_all(&self) {
        lock(&self.shared.faults).forbidden.clear();
    }

    /// Only this token is accepted from now on; watches that are open end.
    pub fn expect_token(&self, token: &str) {
        lock(&self.shared.faults).token = Some(token.to_owned());
        self.cut(Cut::Clean);
    }

    /// Only clients with a certificate that this CA, in PEM, has signed are known from now on; watches that are open end.
    ///
    /// # Panics
    /// It is no certificate.
    pub fn expect_clients_of(&self, ca: &str) {
        let mut roots = RootCertStore::empty();
        let ca = CertificateDer::from_pem_slice(ca.as_bytes()).expect("a certificate in PEM");
        roots.add(ca).expect("a certificate of a CA");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        lock(&self.shared.faults).clients = Some(clients.expect("there is a CA"));
        self.cut(Cut::Clean);
    }

    /// Clients who are not known are refused in the handshake from now on, as proxies do it, and not request by request.
    pub fn refuse_by_alert(&self) {
        lock(&self.shared.faults).by_alert = true;
    }

    /// All watches that are open end.
    pub fn cut(&self, how: Cut) {
        self.shared.cuts.send_modify(|(count, cut)| (*count, *cut) = (*count + 1, how));
    }

    /// Creates a node, or replaces it, and ends the watches that are open in the same breath: they learn both at once.
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node_and_cut(&self, name: &str, node: Value, how: Cut) {
        lock(&self.shared.store).put(name, node);
        self.cut(how);
    }

    /// Creates a node, or replaces it; watches, and lists that need not be the latest, learn of that and of whatever follows only
    /// [later](Self::show_all).
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node_unseen(&self, name: &str, node: Value) {
        let mut store = lock(&self.shared.store);
        store.delay();
        store.put(name, node);
    }

    /// The server's cache is no longer late.
    pub fn show_all(&self) {
        let mut store = lock(&self.shared.store);
        store.late = None;
        self.shared.changes.send_replace(store.version);
    }

    /// Every version but the latest is too old from now on.
    pub fn forget_history(&self) {
        lock(&self.shared.store).forget();
    }

    /// Sends all watches a bookmark.
    pub fn bookmark(&self) {
        self.shared.bookmarks.send_modify(|count| *count += 1);
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
                    _ = http.serve_connection(TokioIo::new(connection), serves(Vec::new())).await
                }
            }
        });
    }
}
