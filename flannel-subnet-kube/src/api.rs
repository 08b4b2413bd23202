//! Requests to the API server, and the meaning of its refusals.
//!
//! Refused credentials are read again, because a token may have been rotated. Requests are counted
//! for the status of the store.

mod connection;
mod exec;
pub(crate) mod kubeconfig;
pub(crate) mod pause;
mod proxy;
mod tls;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use flannel_core::Error;
use flannel_core::lease::Revision;
use flannel_core::runtime::lock;
use flannel_core::subnet::{
    Confirmed, LastError, StoreFailure, StoreKind, StoreReason, StoreStatus,
};
use flannel_tls::Refusal;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming as Body;
use serde::Deserialize;
use tokio::time::{sleep, timeout};

pub(crate) use connection::Source;
use connection::{Cause, Connection, Unsent};
use pause::Pause;

/// The time limit for the head of an answer, and for each part of its body.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Repetitions of a request that the server answers with "too many requests".
const REPEATS: u32 = 3;
/// The upper limit of the first pause before a repetition.
const FIRST: Duration = Duration::from_millis(400);
/// The longest pause before a repetition, even if the server asks for a longer one.
const LONGEST: Duration = Duration::from_secs(10);
/// The largest part of an error body that is read, in bytes.
const REFUSAL: usize = 64 * 1024;

/// Why a request has no answer. The caller reacts differently to each variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The requested version is too old. A list is necessary.
    Gone,
    /// The object does not exist.
    NotFound(String),
    /// The server is overloaded. A later attempt may succeed, after the time that the server may
    /// ask for.
    Busy { after: Option<Duration>, reason: String },
    /// Only an operator or other credentials can help.
    Refused(StoreReason),
    /// This account lacks a permission. Only an operator can help.
    Forbidden(String),
    /// The server or a proxy answers with another error. A later attempt may succeed.
    Erred(String),
    /// The server's cache has not reached the requested version, which may not exist. A later
    /// attempt may succeed.
    TooLarge(String),
    /// No data arrived for this time.
    Silent(Duration),
    /// Anything else. A later attempt may succeed.
    Failed(StoreReason),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gone => f.write_str("the requested version is too old (410)"),
            Self::Silent(patience) => write!(f, "no data arrived for {} s", patience.as_secs()),
            Self::Refused(reason) | Self::Failed(reason) => reason.fmt(f),
            Self::NotFound(reason)
            | Self::Forbidden(reason)
            | Self::Erred(reason)
            | Self::TooLarge(reason)
            | Self::Busy { reason, .. } => f.write_str(reason),
        }
    }
}

impl Failure {
    fn cause(&self) -> StoreFailure {
        match self {
            Self::Refused(reason) | Self::Failed(reason) => reason.failure.clone(),
            Self::Forbidden(_) => StoreFailure::Forbidden,
            _ => StoreFailure::Other,
        }
    }
}

/// One request. `verb` and `resource` are RBAC's names.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) verb: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) path: String,
    /// A strategic merge patch.
    pub(crate) patch: Option<String>,
}

/// The API server.
pub(crate) struct Api {
    /// `kube:` and the URL.
    name: String,
    source: Source,
    current: Mutex<Current>,
    /// Held while credentials are read again, so that a plugin runs once for all requests.
    /// It has the reason why the last attempt failed, or `None`.
    renewing: tokio::sync::Mutex<Option<String>>,
    /// The number of attempts to read credentials again that have ended.
    renewals: AtomicU64,
    stats: Mutex<StoreStatus>,
}

#[derive(Clone)]
struct Current {
    connection: Connection,
    /// The number of connections before it.
    generation: u64,
}

/// What is read again for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Renewal {
    /// Everything: a plugin runs.
    All,
    /// The files. A plugin cannot help, so what it printed stays until it expires.
    Files,
}

impl Renewal {
    /// What may help after a handshake that failed.
    fn after(cause: &Cause) -> Self {
        match cause {
            Cause::Tls(Refusal::Server(_) | Refusal::Handshake(_)) => Self::Files,
            _ => Self::All,
        }
    }
}

/// A request without an answer.
struct Unanswered {
    failure: Failure,
    /// What is read again if the failure is a refusal.
    renewal: Renewal,
}

impl From<Failure> for Unanswered {
    fn from(failure: Failure) -> Self {
        Self { failure, renewal: Renewal::All }
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Api {
    /// Reads the configuration, and sends no request.
    ///
    /// # Errors
    /// The configuration cannot be read or used.
    pub(crate) async fn open(source: Source) -> Result<Self, Error> {
        let refused = |reason: String| Error::Refused {
            store: "the Kubernetes API".to_owned(),
            reason: reason.into(),
        };
        let connection = source.connection(None).await.map_err(refused)?;
        connection.warn_if_insecure();
        let url = connection.url();
        let name = format!("kube:{url}");
        let kind = StoreKind::Kubernetes { url };
        let stats = StoreStatus::new(name.clone(), kind);
        Ok(Self {
            name,
            source,
            current: Mutex::new(Current { connection, generation: 0 }),
            renewing: tokio::sync::Mutex::default(),
            renewals: AtomicU64::new(0),
            stats: Mutex::new(stats),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn status(&self) -> StoreStatus {
        self.stats().clone()
    }

    pub(crate) fn stats(&self) -> MutexGuard<'_, StoreStatus> {
        lock(&self.stats)
    }

    /// Notes that the server answered, and the version in its answer.
    pub(crate) fn confirm(&self, revision: Option<Revision>) {
        let mut stats = self.stats();
        let known = revision.or_else(|| stats.confirmed.map(|answer| answer.revision));
        let revision = known.unwrap_or_default();
        stats.confirmed = Some(Confirmed { revision, at: SystemTime::now() });
        stats.last_error = None;
    }

    /// Notes the failure of a request, or of the stream after its answer.
    pub(crate) fn failed(&self, verb: &'static str, failure: &Failure) {
        let mut stats = self.stats();
        stats.calls.entry(verb).or_default().failed += 1;
        stats.last_error = Some(LastError {
            text: failure.to_string(),
            failure: failure.cause(),
            at: SystemTime::now(),
        });
    }

    /// The error of the trait for a failure of `call`.
    pub(crate) fn error(&self, call: &Call, failure: Failure) -> Error {
        let store = self.name.clone();
        match failure {
            Failure::Refused(reason) => Error::Refused { store, reason },
            Failure::Forbidden(text) => {
                Error::Refused { store, reason: StoreReason::new(text, StoreFailure::Forbidden) }
            }
            Failure::NotFound(reason) => Error::NotReady { store, reason },
            failure => {
                let text = format!("{} {}: {failure}", call.verb, call.resource);
                Error::Store { store, source: StoreReason::new(text, failure.cause()).into() }
            }
        }
    }

    /// The complete answer to a request, which is repeated if the server is overloaded.
    pub(crate) async fn ask(&self, call: &Call) -> Result<Bytes, Error> {
        let mut pause = Pause::within(FIRST, LONGEST);
        let mut repeats = 0;
        let failure = loop {
            match self.send(call).await {
                Ok(answer) => match read(answer, usize::MAX).await {
                    Ok(bytes) => {
                        self.confirm(None);
                        return Ok(bytes);
                    }
                    Err(failure) => {
                        self.failed(call.verb, &failure);
                        break failure;
                    }
                },
                Err(Failure::Busy { after, .. }) if repeats < REPEATS => {
                    repeats += 1;
                    // The random part prevents nodes from retrying at the same moment.
                    sleep(after.unwrap_or_default().min(LONGEST) + pause.next()).await;
                }
                Err(failure) => break failure,
            }
        };
        Err(self.error(call, failure))
    }

    /// Sends one request and returns the head of a successful answer.
    pub(crate) async fn send(&self, call: &Call) -> Result<Response<Body>, Failure> {
        let mut current = self.current();
        if current.connection.has_expired()
            && let Err(why) = self.renew(&mut current, Renewal::All).await
        {
            let text = format!("the credentials have expired, and cannot be read again: {why}");
            let failure = Failure::Failed(text.into());
            self.failed(call.verb, &failure);
            return Err(failure);
        }
        let mut outcome = self.try_send(&current.connection, call).await;
        if let Err(Unanswered { failure: Failure::Refused(reason), renewal }) = &outcome {
            outcome = match self.renew(&mut current, *renewal).await {
                Ok(()) => self.try_send(&current.connection, call).await,
                Err(why) => {
                    let text = format!("{reason}; the credentials cannot be read again: {why}");
                    Err(Failure::Refused(StoreReason::new(text, reason.failure.clone())).into())
                }
            };
        }
        let outcome = outcome.map_err(|unanswered| unanswered.failure);
        match &outcome {
            Ok(_) => {}
            // "Too old" and "not found" are answers of the server.
            Err(Failure::Gone | Failure::NotFound(_)) => self.confirm(None),
            Err(failure) => self.failed(call.verb, failure),
        }
        outcome
    }

    fn current(&self) -> Current {
        lock(&self.current).clone()
    }

    /// Reads credentials and certificates again, unless another request has just done so. A
    /// failure is that of all requests that waited for it.
    async fn renew(&self, used: &mut Current, renewal: Renewal) -> Result<(), String> {
        let known = self.renewals.load(Ordering::Acquire);
        let mut failed = self.renewing.lock().await;
        let now = self.current();
        if now.generation != used.generation {
            *used = now;
            return Ok(());
        }
        if self.renewals.load(Ordering::Acquire) != known
            && let Some(why) = &*failed
        {
            return Err(why.clone());
        }
        let printed = match renewal {
            Renewal::All => None,
            Renewal::Files => used.connection.printed(),
        };
        let outcome = self.source.connection(printed).await;
        *failed = outcome.as_ref().err().cloned();
        self.renewals.fetch_add(1, Ordering::AcqRel);
        let connection = outcome?;
        if !used.connection.is_insecure() {
            connection.warn_if_insecure();
        }
        let mut current = lock(&self.current);
        *current = Current { connection, generation: current.generation.max(used.generation) + 1 };
        *used = current.clone();
        Ok(())
    }

    async fn try_send(
        &self,
        connection: &Connection,
        call: &Call,
    ) -> Result<Response<Body>, Unanswered> {
        self.stats().calls.entry(call.verb).or_default().sent += 1;
        let method = if call.patch.is_some() { Method::PATCH } else { Method::GET };
        let mut request = Request::builder()
            .method(method)
            .uri(&call.path)
            .header(header::ACCEPT, "application/json");
        if call.patch.is_some() {
            request =
                request.header(header::CONTENT_TYPE, "application/strategic-merge-patch+json");
        }
        let body = Bytes::from(call.patch.clone().unwrap_or_default());
        let request = request
            .body(Full::new(body))
            .map_err(|error| Failure::Failed(error.to_string().into()))?;
        let answer = match timeout(PATIENCE, connection.send(request)).await {
            Err(_) => return Err(Failure::Silent(PATIENCE).into()),
            Ok(Err(unsent)) => {
                let renewal = Renewal::after(&unsent.cause);
                return Err(Unanswered { failure: unreachable(unsent), renewal });
            }
            Ok(Ok(answer)) => answer,
        };
        if answer.status().is_success() {
            Ok(answer)
        } else {
            Err(refusal(call, answer).await.into())
        }
    }
}

/// The next part of a body, or `None` at its end.
pub(crate) async fn part(body: &mut Body, patience: Duration) -> Result<Option<Bytes>, Failure> {
    loop {
        match timeout(patience, body.frame()).await {
            Err(_) => return Err(Failure::Silent(patience)),
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => {
                return Err(Failure::Failed(format!("the answer was cut: {error}").into()));
            }
            Ok(Some(Ok(frame))) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

/// The body of an answer, up to `most` bytes.
pub(crate) async fn read(answer: Response<Body>, most: usize) -> Result<Bytes, Failure> {
    let mut body = answer.into_body();
    let mut all = Vec::new();
    while let Some(bytes) = part(&mut body, PATIENCE).await? {
        all.extend_from_slice(&bytes[..bytes.len().min(most - all.len())]);
        if all.len() == most {
            break;
        }
    }
    Ok(all.into())
}

/// The failure of a request that was not sent.
fn unreachable(Unsent { reason, cause }: Unsent) -> Failure {
    let of_time = StoreFailure::of_tls(&reason);
    let refused = |text, failure| Failure::Refused(StoreReason::new(text, failure));
    match cause {
        Cause::Tls(refusal @ Refusal::Server(_)) => {
            let text = format!(
                "the API server's certificate is not accepted ({reason}): {refusal}; expected one \
                 that the CA of the kubeconfig or of the service account has signed for this \
                 address"
            );
            let is_of_time = of_time == StoreFailure::CertificateTime;
            refused(text, if is_of_time { of_time } else { StoreFailure::ServerCertificate })
        }
        Cause::Tls(Refusal::Client(_)) => {
            let text = format!(
                "this node is not accepted as a client ({reason}): expected a valid client \
                 certificate"
            );
            refused(text, of_time)
        }
        Cause::Tls(refusal @ Refusal::NotTls) => {
            let text = format!("the API server does not answer: {refusal} ({reason})");
            Failure::Failed(StoreReason::new(text, of_time))
        }
        Cause::Tls(refusal) => {
            let text = format!("the API server, or a proxy before it: {refusal} ({reason})");
            refused(text, of_time)
        }
        Cause::Token(path) => {
            Failure::Failed(StoreReason::new(reason, StoreFailure::Token { path }))
        }
        Cause::Other => Failure::Failed(StoreReason::new(reason, of_time)),
    }
}

/// The server's own description of an error.
#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    message: String,
    #[serde(default)]
    details: Option<Details>,
}

#[derive(Default, Deserialize)]
struct Details {
    #[serde(default)]
    causes: Vec<StatusCause>,
}

#[derive(Deserialize)]
struct StatusCause {
    #[serde(default)]
    reason: String,
}

impl Status {
    /// Whether the cache has not reached the requested version. It may never have existed.
    ///
    /// **Source**: client-go `tools/cache/reflector.go: isTooLargeResourceVersionError`, for
    /// Kubernetes 1.18.6 and later.
    fn is_too_large(&self) -> bool {
        self.details
            .iter()
            .flat_map(|details| &details.causes)
            .any(|cause| cause.reason == "ResourceVersionTooLarge")
    }
}

/// The failure of a request that the server refused.
async fn refusal(call: &Call, answer: Response<Body>) -> Failure {
    let status = answer.status();
    let after = answer
        .headers()
        .get(header::RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .map(Duration::from_secs);
    let bytes = read(answer, REFUSAL).await.unwrap_or_default();
    let parsed = serde_json::from_slice::<Status>(&bytes).ok();
    let is_too_large = parsed.as_ref().is_some_and(Status::is_too_large);
    let message = parsed
        .map_or_else(|| String::from_utf8_lossy(&bytes).trim().to_owned(), |parsed| parsed.message);
    let Call { verb, resource, .. } = call;
    match status {
        StatusCode::GONE => Failure::Gone,
        StatusCode::NOT_FOUND => Failure::NotFound(message),
        StatusCode::TOO_MANY_REQUESTS => {
            Failure::Busy { after, reason: format!("too many requests (429): {message}") }
        }
        _ if is_too_large => Failure::TooLarge(format!("{status}: {message}")),
        StatusCode::SERVICE_UNAVAILABLE if after.is_some() => {
            Failure::Busy { after, reason: format!("not available (503): {message}") }
        }
        StatusCode::UNAUTHORIZED => {
            let text = format!(
                "the API server does not accept this node's credentials (401, {message}): expected \
                 a valid token or client certificate"
            );
            Failure::Refused(StoreReason::new(text, StoreFailure::Unauthorized))
        }
        StatusCode::FORBIDDEN => Failure::Forbidden(format!(
            "forbidden: this node's account needs the verb {verb:?} on the resource {resource:?} \
             (403, {message})"
        )),
        // As in client-go, any error of the server can ask for a pause.
        status if status.is_server_error() && after.is_some() => {
            Failure::Busy { after, reason: format!("{status}: {message}") }
        }
        status => Failure::Erred(format!("{status}: {message}")),
    }
}

/// An error with its causes, without causes that repeat the text.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Escapes a value in a query.
pub(crate) fn escape(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                char::from(byte).to_string()
            }
            byte => format!("%{byte:02X}"),
        })
        .collect()
}
