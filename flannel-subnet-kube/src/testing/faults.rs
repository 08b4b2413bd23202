//! The faults and permissions of the test server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use serde_json::Value;
use tokio::sync::watch;

use super::store::NodesAt;
use super::{ApiServer, lock};

/// The way in which open watches end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The connection breaks in the middle of an event.
    MidEvent,
    /// The server ends it regularly.
    Clean,
    /// The server sends an event that the version is too old (410).
    Gone,
    /// The server sends an error event with this code.
    Error(u16),
}

/// A request that waits for its answer until this value is dropped.
#[derive(Debug)]
pub struct Held {
    is_there: watch::Receiver<bool>,
    /// Its drop lets the request continue.
    _keeps: watch::Sender<()>,
}

impl Held {
    /// Whether a request is held now.
    pub fn is_there(&self) -> bool {
        *self.is_there.borrow()
    }
}

/// The nodes of the server at some time, with their version.
#[derive(Debug)]
pub struct Backup(NodesAt);

/// The server's side of [`Held`].
#[derive(Debug)]
pub(crate) struct Gate {
    pub(crate) text: String,
    pub(crate) is_there: watch::Sender<bool>,
    pub(crate) opens: watch::Receiver<()>,
}

/// Failures of requests.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// The number of requests that will fail.
    pub(crate) left: u32,
    pub(crate) status: u16,
    /// The header `Retry-After`, in seconds.
    pub(crate) retry_after: Option<u64>,
}

/// The faults of the server.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    pub(crate) failures: Failures,
    /// This many watches are refused with 410.
    pub(crate) gone: u32,
    pub(crate) watch_failures: Failures,
    /// No request has an answer.
    pub(crate) silent: bool,
    /// Holds the next request with this text.
    pub(crate) gate: Option<Gate>,
    /// The pause before each item of a list.
    pub(crate) slow: Duration,
    /// This many lists, or pages of them, break in the middle.
    pub(crate) cut_lists: u32,
    /// The cache never reaches the requested version of a list.
    pub(crate) no_cache: bool,
    /// Lists that may come from the cache have no answer.
    pub(crate) cache_blocks: bool,
    /// A proxy answers with this status.
    pub(crate) proxy: Option<u16>,
    /// Verbs and resources that the account may not use.
    pub(crate) forbidden: BTreeSet<(String, String)>,
    /// The only accepted header `Authorization`.
    pub(crate) authorization: Option<String>,
    /// The verifier of the clients' certificates.
    pub(crate) clients: Option<Arc<dyn ClientCertVerifier>>,
    /// Unknown clients are refused in the handshake.
    pub(crate) by_alert: bool,
}

impl ApiServer {
    /// The next `count` requests fail with this status.
    pub fn fail(&self, count: u32, status: u16, retry_after: Option<u64>) {
        lock(&self.shared.faults).failures = Failures { left: count, status, retry_after };
    }

    /// The next `count` watches are refused with 410.
    pub fn refuse_watches(&self, count: u32) {
        lock(&self.shared.faults).gone = count;
    }

    /// The next `count` watches fail with this status. Other requests are answered.
    pub fn fail_watches(&self, count: u32, status: u16) {
        lock(&self.shared.faults).watch_failures =
            Failures { left: count, status, retry_after: None };
    }

    /// No request has an answer from now on, or each has one again, as if the server was
    /// overloaded.
    pub fn be_silent(&self, silent: bool) {
        lock(&self.shared.faults).silent = silent;
    }

    /// Holds the next request that contains this text until the returned value is dropped. It is
    /// counted and decided on only then. Only one request is held.
    pub fn hold(&self, text: &str) -> Held {
        let (gate_is_there, is_there) = watch::channel(false);
        let (keeps, opens) = watch::channel(());
        lock(&self.shared.faults).gate =
            Some(Gate { text: text.to_owned(), is_there: gate_is_there, opens });
        Held { is_there, _keeps: keeps }
    }

    /// Delays each item of a list.
    pub fn slow_lists(&self, pause: Duration) {
        lock(&self.shared.faults).slow = pause;
    }

    /// The next `count` lists, or pages of them, break in their middle.
    pub fn cut_lists(&self, count: u32) {
        lock(&self.shared.faults).cut_lists = count;
    }

    /// Lists that the server's cache may answer are refused (504, "resource version too large")
    /// from now on, or no longer, as if the cache never reached the requested version.
    pub fn fail_cached_lists(&self, fail: bool) {
        lock(&self.shared.faults).no_cache = fail;
    }

    /// Lists that the server's cache may answer have no answer from now on, or have one again, as
    /// if the cache were not ready.
    pub fn block_cached_lists(&self, block: bool) {
        lock(&self.shared.faults).cache_blocks = block;
    }

    /// From now on a load balancer answers instead of the server, with this status and its own
    /// page. With `None` the server answers again.
    pub fn answer_as_proxy(&self, status: Option<u16>) {
        lock(&self.shared.faults).proxy = status;
    }

    /// Forbids the account this verb on this resource.
    pub fn forbid(&self, verb: &str, resource: &str) {
        lock(&self.shared.faults).forbidden.insert((verb.to_owned(), resource.to_owned()));
    }

    /// Allows the account this verb on this resource again.
    pub fn permit(&self, verb: &str, resource: &str) {
        lock(&self.shared.faults).forbidden.remove(&(verb.to_owned(), resource.to_owned()));
    }

    /// Allows the account everything again.
    pub fn permit_all(&self) {
        lock(&self.shared.faults).forbidden.clear();
    }

    /// Accepts only this token from now on. Open watches end.
    pub fn expect_token(&self, token: &str) {
        self.expect_authorization(&format!("Bearer {token}"));
    }

    /// Accepts only requests with this header `Authorization` from now on. Open watches end.
    pub fn expect_authorization(&self, value: &str) {
        lock(&self.shared.faults).authorization = Some(value.to_owned());
        self.cut(Cut::Clean);
    }

    /// Accepts only clients with a certificate of this CA, in PEM, from now on. Open watches end.
    ///
    /// # Panics
    /// `ca` is not a certificate.
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

    /// Refuses unknown clients in the handshake from now on, like proxies, instead of their
    /// requests.
    pub fn refuse_by_alert(&self) {
        lock(&self.shared.faults).by_alert = true;
    }

    /// Ends all open watches.
    pub fn cut(&self, how: Cut) {
        self.shared.cuts.send_replace(how);
    }

    /// Creates or replaces a node and ends the open watches in one step, so that they receive both
    /// at once.
    ///
    /// # Panics
    /// `node` is not a JSON object.
    pub fn put_node_and_cut(&self, name: &str, node: Value, how: Cut) {
        lock(&self.shared.store).put(name, node);
        self.cut(how);
    }

    /// Creates or replaces a node. Watches, and lists that may be old, see this and all later
    /// changes only after [`show_all`](Self::show_all).
    ///
    /// # Panics
    /// `node` is not a JSON object.
    pub fn put_node_without_event(&self, name: &str, node: Value) {
        let mut store = lock(&self.shared.store);
        store.delay();
        store.put(name, node);
    }

    /// The server's cache is up to date again.
    pub fn show_all(&self) {
        let mut store = lock(&self.shared.store);
        store.late = None;
        self.shared.changes.send_replace(store.version);
    }

    /// Makes all versions except for the latest too old.
    pub fn forget_history(&self) {
        lock(&self.shared.store).forget();
    }

    /// The present nodes, for [`restore`](Self::restore).
    pub fn back_up(&self) -> Backup {
        Backup(lock(&self.shared.store).cached())
    }

    /// Restores the nodes and their versions from a backup of the server's store.
    pub fn restore(&self, backup: &Backup) {
        lock(&self.shared.store).restore(backup.0.clone());
    }

    /// Sends all watches a bookmark.
    pub fn bookmark(&self) {
        self.shared.bookmarks.send_replace(());
    }
}
