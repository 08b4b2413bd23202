//! One connection per endpoint, made when it is needed, and again when the TLS files change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex as StdMutex};
use std::time::Duration;

use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use flannel_core::runtime::lock;
use flannel_core::{Credential, Error, Result};
use tokio::sync::Mutex;

use crate::client::failure::{Failure, Retry, says};
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
    files: Files,
    /// The number of connections before it.
    number: usize,
    /// The last refusal of the server.
    refusal: Arc<StdMutex<Option<Failure>>>,
}

impl Connection {
    /// In TLS 1.3 the server may close the connection before its alert about our certificate is
    /// read. Then its last refusal still holds.
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

/// The TLS files as they were read: device, inode, size, time of modification.
type Files = Vec<Option<(u64, u64, u64, i64, i64)>>;

pub(crate) struct Connections {
    pub(crate) options: EtcdOptions,
    endpoints: Vec<(String, Mutex<Option<Connection>>)>,
    current: AtomicUsize,
    made: AtomicUsize,
    /// The files whose error is in the log.
    logged: StdMutex<Option<Files>>,
}

impl Connections {
    pub(crate) fn new(options: EtcdOptions) -> Result<Self> {
        let refused =
            |reason: String| Error::Refused { store: "etcd".into(), reason: reason.into() };
        let options = options.checked().map_err(|error| refused(error.to_string()))?;
        options.warn_of_plain();
        if options.endpoints.iter().any(|endpoint| is_tls(endpoint)) {
            tls(&options).map_err(refused)?;
        }
        let endpoints: Vec<_> =
            options.endpoints.iter().map(|endpoint| (endpoint.clone(), Mutex::default())).collect();
        let current = AtomicUsize::new(fastrand::usize(..endpoints.len()));
        Ok(Self {
            options,
            endpoints,
            current,
            made: AtomicUsize::new(0),
            logged: StdMutex::default(),
        })
    }

    pub(crate) fn len(&self) -> usize {
        self.endpoints.len()
    }

    /// The endpoint in use.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn name(&self, place: usize) -> &str {
        &self.endpoints[place].0
    }

    /// Uses the endpoint after `place`, unless another request has changed it already.
    pub(crate) fn move_on(&self, place: usize) {
        let next = (place + 1) % self.len();
        let _ = self.current.compare_exchange(place, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The connection to an endpoint, made again if the TLS files have changed.
    pub(crate) async fn connect(&self, place: usize) -> Result<Connection, Failure> {
        let (endpoint, slot) = &self.endpoints[place];
        let mut slot = slot.lock().await;
        let files = if is_tls(endpoint) { self.files() } else { Files::new() };
        if let Some(connection) = slot.as_ref().filter(|connection| connection.files == files) {
            return Ok(connection.clone());
        }
        let connected = self.make(endpoint).await;
        if let (Err(failure), Some(old)) = (&connected, slot.as_ref())
            && failure.retry == Retry::Never
        {
            // Perhaps only one of the two files was replaced yet.
            let mut logged = lock(&self.logged);
            if logged.replace(files.clone()) != Some(files) {
                tracing::warn!(
                    %endpoint, reason = failure.text,
                    "the changed TLS files are not used yet"
                );
            }
            return Ok(old.clone());
        }
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let connection = Connection { client: connected?, files, number, refusal: Arc::default() };
        *slot = Some(connection.clone());
        Ok(connection)
    }

    /// Drops a broken connection, unless it was replaced already.
    pub(crate) async fn forget(&self, place: usize, connection: &Connection) {
        let mut slot = self.endpoints[place].1.lock().await;
        if slot.as_ref().is_some_and(|now| now.number == connection.number) {
            *slot = None;
        }
    }

    async fn make(&self, endpoint: &str) -> Result<Client, Failure> {
        let mut options = ConnectOptions::new()
            .with_keep_alive(SILENCE, REPLY)
            .with_keep_alive_while_idle(false)
            .with_connect_timeout(self.options.request_timeout)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if is_tls(endpoint) {
            options = options.with_tls(tls(&self.options).map_err(Failure::never)?);
        }
        let with_user = match (&self.options.username, &self.options.password) {
            (Some(user), Some(password)) => options.clone().with_user(user, password),
            _ => options.clone(),
        };
        match Client::connect([endpoint], Some(with_user)).await {
            Err(error) if says(&error, "authentication is not enabled") => {
                tracing::debug!(%endpoint, "authentication is not enabled, the user is ignored");
                Ok(Client::connect([endpoint], Some(options)).await?)
            }
            connected => Ok(connected?),
        }
    }

    fn files(&self) -> Files {
        let EtcdOptions { ca, certificate, key, .. } = &self.options;
        let files = [ca, certificate, key].into_iter().flatten().filter_map(Credential::file);
        let state = |path| {
            fs::metadata(path).ok().map(|m| (m.dev(), m.ino(), m.len(), m.mtime(), m.mtime_nsec()))
        };
        files.map(state).collect()
    }
}

fn is_tls(endpoint: &str) -> bool {
    endpoint.starts_with("https://")
}

/// The TLS options from the credentials. rustls supports TLS 1.2 and 1.3 only.
fn tls(options: &EtcdOptions) -> Result<TlsOptions, String> {
    let mut tls = match &options.ca {
        Some(ca) => {
            let pem = read(ca, "CERTIFICATE", "certificate")?;
            TlsOptions::new().ca_certificate(Certificate::from_pem(pem))
        }
        None => TlsOptions::new().with_native_roots(),
    };
    if let (Some(certificate), Some(key)) = (&options.certificate, &options.key) {
        let certificate = read(certificate, "CERTIFICATE", "certificate")?;
        let key = read(key, "PRIVATE KEY", "key")?;
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    Ok(tls)
}

/// A credential that has a PEM section with this label, which is a `kind`.
fn read(credential: &Credential, label: &str, kind: &str) -> Result<Vec<u8>, String> {
    let pem = credential.read().map_err(|error| format!("cannot read {credential}: {error}"))?;
    if holds(&pem, label) {
        return Ok(pem);
    }
    match credential {
        Credential::File(path) => Err(format!("{} contains no PEM {kind}", path.display())),
        Credential::Value(_) => Err(format!("a value contains no PEM {kind}")),
    }
}

fn holds(pem: &[u8], what: &str) -> bool {
    String::from_utf8_lossy(pem)
        .lines()
        .any(|line| line.starts_with("-----BEGIN") && line.contains(what))
}
