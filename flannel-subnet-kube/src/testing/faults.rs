//! How the server misbehaves, and whom it lets in.

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

use super::{ApiServer, lock};

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
    /// Whether there is such a request by now. Until then whoever asks has come no further than to
    /// it.
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
    /// A proxy before the server answers with this status.
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

impl ApiServer {
    /// The next `count` requests fail with this status.
    pub fn fail(&self, count: u32, status: u16, retry_after: Option<u64>) {
        lock(&self.shared.faults).fail = Some((count, status, retry_after));
    }

    /// The next `count` watches are refused with 410.
    pub fn refuse_watches(&self, count: u32) {
        lock(&self.shared.faults).gone = count;
    }

    /// The next request that contains this text is held until what is returned is dropped: counted
    /// and decided on only then. Who asks can come no further meanwhile, however long a test takes
    /// to make what the answer is to meet. Only one is held.
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

    /// Lists that the server's cache may answer are refused (504) from now on, or no longer, as if
    /// it came to no version that is asked for.
    pub fn fail_cached_lists(&self, fail: bool) {
        lock(&self.shared.faults).no_cache = fail;
    }

    /// Lists that the server's cache may answer are not answered at all from now on, or no longer,
    /// as if it were not ready.
    pub fn block_cached_lists(&self, block: bool) {
        lock(&self.shared.faults).cache_blocks = block;
    }

    /// A load balancer before the server answers in its place from now on, with this status and a
    /// page of its own; `None`: no longer.
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

    /// Only clients with a certificate that this CA, in PEM, has signed are known from now on;
    /// watches that are open end.
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

    /// Clients who are not known are refused in the handshake from now on, as proxies do it, and
    /// not request by request.
    pub fn refuse_by_alert(&self) {
        lock(&self.shared.faults).by_alert = true;
    }

    /// All watches that are open end.
    pub fn cut(&self, how: Cut) {
        self.shared.cuts.send_modify(|(count, cut)| (*count, *cut) = (*count + 1, how));
    }

    /// Creates a node, or replaces it, and ends the watches that are open in the same breath: they
    /// learn both at once.
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node_and_cut(&self, name: &str, node: Value, how: Cut) {
        lock(&self.shared.store).put(name, node);
        self.cut(how);
    }

    /// Creates a node, or replaces it; watches, and lists that need not be the latest, learn of
    /// that and of whatever follows only [later](Self::show_all).
    ///
    /// # Panics
    /// `node` is no JSON object.
    pub fn put_node_without_event(&self, name: &str, node: Value) {
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
