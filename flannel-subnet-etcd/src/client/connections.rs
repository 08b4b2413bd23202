//! One connection per endpoint, made when it is needed, and again when the TLS files change.
//!
//! No lock is held while a connection is made, so a connect that hangs delays only its own request.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use etcd_client::{Channel, Client, ConnectOptions};
use flannel_core::runtime::lock;
use flannel_core::{Error, Result};
use http::Uri;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::ClientConfig;
use tonic::transport::Channel as TonicChannel;
use tower::ServiceExt;

use crate::client::failure::{Failure, Retry, says};
use crate::client::tls::{FileVersion, TlsContent, TlsFiles};
use crate::options::EtcdOptions;

/// The silence after which the server is pinged. etcd closes connections that ping more often than
/// every 5 s, or while no request waits.
const SILENCE: Duration = Duration::from_millis(5500);

/// The time limit for the reply to a ping.
const REPLY: Duration = Duration::from_secs(4);

/// A connection that several requests can share. tonic reconnects it.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) client: Client,
    /// The configuration of TLS it was made with, or `None` if it does not use TLS.
    tls: Option<Arc<TlsContent>>,
    /// The number of connections before it.
    number: usize,
    /// The last refusal of the server.
    refusal: Arc<Mutex<Option<Failure>>>,
}

impl Connection {
    fn is_made_with(&self, tls: Option<&Arc<TlsContent>>) -> bool {
        match (&self.tls, tls) {
            (Some(ours), Some(other)) => Arc::ptr_eq(ours, other),
            (ours, other) => ours.is_none() && other.is_none(),
        }
    }

    /// Explains the outcome of a request. In TLS 1.3 the server may close the connection before its
    /// alert about our certificate is read. Then the last refusal of the server still holds.
    pub(crate) fn interpret<T>(&self, outcome: Result<T, Failure>) -> Result<T, Failure> {
        let mut refusal = lock(&self.refusal);
        match &outcome {
            Ok(_) => *refusal = None,
            Err(failure) if failure.retry == Retry::OtherEndpoint => {
                *refusal = Some(failure.clone());
            }
            Err(failure) if failure.is_hanging_up() => {
                return refusal.clone().map_or(outcome, Err);
            }
            Err(_) => (),
        }
        outcome
    }
}

struct Endpoint {
    url: String,
    connection: Mutex<Option<Connection>>,
}

impl Endpoint {
    fn is_tls(&self) -> bool {
        self.url.starts_with("https://")
    }
}

/// The connections to all endpoints.
pub(crate) struct Connections {
    pub(crate) options: EtcdOptions,
    endpoints: Vec<Endpoint>,
    /// The place of the endpoint in use.
    current: AtomicUsize,
    /// The number of connections made so far.
    made: AtomicUsize,
    /// `None` if no endpoint uses TLS.
    tls: Option<Arc<TlsFiles>>,
    /// The versions of the files whose error is in the log.
    logged: Mutex<Option<Vec<Option<FileVersion>>>>,
}

impl Connections {
    pub(crate) fn new(options: EtcdOptions) -> Result<Self> {
        let refused =
            |reason: String| Error::Refused { store: "etcd".into(), reason: reason.into() };
        let options = options.checked().map_err(|error| refused(error.to_string()))?;
        options.warn_of_plain();
        let endpoints: Vec<Endpoint> = options
            .endpoints
            .iter()
            .map(|url| Endpoint { url: url.clone(), connection: Mutex::default() })
            .collect();
        let tls = if endpoints.iter().any(Endpoint::is_tls) {
            Some(Arc::new(TlsFiles::open(&options).map_err(refused)?))
        } else {
            None
        };
        Ok(Self {
            options,
            current: AtomicUsize::new(fastrand::usize(..endpoints.len())),
            endpoints,
            made: AtomicUsize::new(0),
            tls,
            logged: Mutex::default(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// The place of the endpoint in use.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn name(&self, place: usize) -> &str {
        &self.endpoints[place].url
    }

    /// Uses the endpoint after `place`, unless another request has changed it already.
    pub(crate) fn move_on(&self, place: usize) {
        let next = (place + 1) % self.len();
        let _ = self.current.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The connection to an endpoint, made again if the TLS files have changed.
    pub(crate) async fn connect(&self, place: usize) -> Result<Connection, Failure> {
        let endpoint = &self.endpoints[place];
        let tls = match &self.tls {
            Some(files) if endpoint.is_tls() => Some(files.current().await),
            _ => None,
        };
        let known = lock(&endpoint.connection).clone();
        if let Some(known) = &known
            && known.is_made_with(tls.as_ref())
        {
            return Ok(known.clone());
        }
        let client = match (self.make(&endpoint.url, tls.as_deref()).await, known) {
            (Ok(client), _) => client,
            (Err(failure), Some(known)) if failure.retry == Retry::Never => {
                // Perhaps only one of the two files was replaced yet.
                self.log_unused_files(&endpoint.url, tls.as_deref(), &failure);
                return Ok(known);
            }
            (Err(failure), _) => return Err(failure),
        };
        let mut connection = lock(&endpoint.connection);
        // Another request may have made one meanwhile.
        let other = connection.as_ref().filter(|now| now.is_made_with(tls.as_ref()));
        if let Some(other) = other {
            return Ok(other.clone());
        }
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let made = Connection { client, tls, number, refusal: Arc::default() };
        *connection = Some(made.clone());
        Ok(made)
    }

    /// Logs once for each version of the files that they cannot be used.
    fn log_unused_files(&self, endpoint: &str, tls: Option<&TlsContent>, failure: &Failure) {
        let versions = tls.map(|tls| tls.versions.clone()).unwrap_or_default();
        let mut logged = lock(&self.logged);
        if logged.as_ref() != Some(&versions) {
            *logged = Some(versions);
            tracing::warn!(
                %endpoint, reason = failure.text,
                "the changed TLS files are not used yet"
            );
        }
    }

    /// Drops a broken connection, unless it was replaced already.
    pub(crate) fn forget(&self, place: usize, broken: &Connection) {
        let mut connection = lock(&self.endpoints[place].connection);
        if connection.as_ref().is_some_and(|now| now.number == broken.number) {
            *connection = None;
        }
    }

    async fn make(&self, endpoint: &str, tls: Option<&TlsContent>) -> Result<Client, Failure> {
        let tls = tls.map(|tls| tls.config.clone().map_err(Failure::never)).transpose()?;
        let connect_timeout = self.options.request_timeout;
        let channel = || channel(endpoint, tls.clone(), connect_timeout);
        let options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        let with_user = match (&self.options.username, &self.options.password) {
            (Some(user), Some(password)) => options.clone().with_user(user, password),
            _ => options.clone(),
        };
        match Client::from_channel(channel()?, Some(with_user)).await {
            Err(error) if says(&error, "authentication is not enabled") => {
                tracing::debug!(%endpoint, "authentication is not enabled, the user is ignored");
                Ok(Client::from_channel(channel()?, Some(options)).await?)
            }
            connected => Ok(connected?),
        }
    }
}

/// A channel that connects to an endpoint when it is used, and again after a failure.
fn channel(
    endpoint: &str,
    tls: Option<Arc<ClientConfig>>,
    connect_timeout: Duration,
) -> Result<Channel, Failure> {
    let invalid = |error: &dyn std::error::Error| Failure::never(format!("{endpoint}: {error}"));
    let url: Uri = endpoint.parse().map_err(|error| invalid(&error))?;
    let builder = |url: Uri| {
        TonicChannel::builder(url)
            .http2_keep_alive_interval(SILENCE)
            .keep_alive_timeout(REPLY)
            .keep_alive_while_idle(false)
            .connect_timeout(connect_timeout)
    };
    let Some(tls) = tls else { return Ok(Channel::Tonic(builder(url).connect_lazy())) };
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    let https = HttpsConnector::from((http, tls));
    // tonic refuses `https` if another crate of the program enables its own TLS.
    let plain = endpoint.replacen("https://", "http://", 1);
    let plain: Uri = plain.parse().map_err(|error| invalid(&error))?;
    let endpoint = builder(plain).origin(url.clone());
    let connector = https.map_request(move |_: Uri| url.clone());
    Ok(Channel::Tonic(endpoint.connect_with_connector_lazy(connector)))
}
