//! Requests that are repeated, at one endpoint after the other, until they are answered.

use std::future::Future;
use std::sync::Mutex;
use std::time::Duration;

use flannel_core::runtime::lock;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Error, Result};
use tokio::time::{Instant, timeout};

use crate::client::connections::{Connection, Connections};
use crate::client::failure::{Failure, Retry};
use crate::options::EtcdOptions;
use flannel_subnet::Backoff;

/// An answer of etcd to a request.
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    /// Earlier attempts had no answer and may have been carried out.
    pub(crate) repeated: bool,
}

/// Repeats requests.
pub(crate) struct Attempts {
    connections: Connections,
    /// `None` after an answer.
    outage: Mutex<Option<Outage>>,
}

/// No endpoint answers.
struct Outage {
    since: Instant,
    reason: StoreReason,
}

/// The first pause between two attempts of a request.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// The longest pause. After a short outage, in which requests are repeated, nodes come back within
/// about its length.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause while an endpoint closes connections. Such an endpoint is reachable, and
/// perhaps refuses this node with an alert that only some attempts can read.
const LONGEST_PAUSE_OF_CLOSED: Duration = Duration::from_secs(1);

impl Attempts {
    pub(crate) fn new(connections: Connections) -> Self {
        Self { connections, outage: Mutex::default() }
    }

    pub(crate) fn options(&self) -> &EtcdOptions {
        &self.connections.options
    }

    /// The endpoint in use, for messages.
    pub(crate) fn endpoint(&self) -> String {
        self.connections.name(self.connections.current()).to_owned()
    }

    /// Why no endpoint answers, or `None` if one does.
    pub(crate) fn trouble(&self) -> Option<StoreReason> {
        lock(&self.outage).as_ref().map(|outage| outage.reason.clone())
    }

    /// Notes that no endpoint answers.
    fn note_outage(&self, reason: StoreReason) {
        let mut outage = lock(&self.outage);
        let since = outage.as_ref().map_or_else(Instant::now, |known| known.since);
        *outage = Some(Outage { since, reason });
    }

    /// Whether no endpoint has answered any request for longer than [`EtcdOptions::patience`].
    fn is_long_outage(&self) -> bool {
        let patience = self.options().patience;
        lock(&self.outage).as_ref().is_some_and(|outage| outage.since.elapsed() >= patience)
    }

    /// Sends a request about `key` until it is answered, no endpoint can answer it, or
    /// [`EtcdOptions::patience`] is over. During an outage that has lasted longer, each endpoint is
    /// asked once. Its callers pause for a longer time, so that the nodes of a cluster do not
    /// return together.
    pub(crate) async fn ask<T, F>(
        &self,
        key: &str,
        request: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<Answer<T>>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let connections = &self.connections;
        let begin = Instant::now();
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut closed_backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE_OF_CLOSED);
        let mut failures: Vec<Option<Failure>> = vec![None; connections.len()];
        for attempt in 0.. {
            let place = connections.current();
            let failure = match self.attempt(place, key, &request).await {
                Ok(value) => {
                    *lock(&self.outage) = None;
                    return Ok(Answer { value, repeated: attempt > 0 });
                }
                Err(failure) => failure,
            };
            let endpoint = connections.name(place);
            if failure.retry == Retry::Never {
                return Err(Error::Refused {
                    store: format!("etcd {endpoint}"),
                    reason: StoreReason::new(failure.text, failure.cause),
                });
            }
            tracing::debug!(endpoint, key, reason = failure.text, "no answer");
            failures[place] = Some(failure);
            connections.move_on(place);
            // Every endpoint is tried before the first pause, and before giving up.
            let Some(all): Option<Vec<&Failure>> = failures.iter().map(Option::as_ref).collect()
            else {
                continue;
            };
            let reasons = self.reasons(&all);
            if all.iter().all(|failure| failure.retry == Retry::OtherEndpoint) {
                return Err(Error::Refused { store: "etcd".into(), reason: reasons });
            }
            let text = format!("etcd: {key}: {reasons}");
            self.note_outage(StoreReason::new(text, reasons.failure.clone()));
            // An endpoint that wants a new connection is reachable.
            let is_unreachable = all.iter().all(|failure| failure.retry == Retry::Later);
            if begin.elapsed() >= self.options().patience
                || (is_unreachable && self.is_long_outage())
            {
                return Err(Error::Store { store: format!("etcd: {key}"), source: reasons.into() });
            }
            let is_closed = all.iter().any(|failure| failure.is_hanging_up());
            let pause = if is_closed { closed_backoff.pause() } else { backoff.pause() };
            tokio::time::sleep(pause).await;
        }
        unreachable!("the number of attempts is not limited")
    }

    async fn attempt<T, F>(
        &self,
        place: usize,
        key: &str,
        request: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>> + Send,
    {
        let limit = self.options().request_timeout;
        let outcome = timeout(limit, async {
            let connection = self
                .connections
                .connect(place)
                .await
                .map_err(|failure| failure.explained(key, self.options()))?;
            let outcome = connection
                .interpret(request(connection.clone()).await)
                .map_err(|failure| failure.explained(key, self.options()));
            if outcome.as_ref().is_err_and(|failure| failure.retry == Retry::NewConnection) {
                self.connections.forget(place, &connection);
            }
            outcome
        });
        outcome.await.unwrap_or_else(|_| Err(Failure::later(format!("no answer within {limit:?}"))))
    }

    /// The reasons for the failures of all endpoints, in their order, with the first cause that is
    /// known.
    fn reasons(&self, failures: &[&Failure]) -> StoreReason {
        let reasons: Vec<String> = failures
            .iter()
            .enumerate()
            .map(|(place, failure)| format!("{}: {}", self.connections.name(place), failure.text))
            .collect();
        let mut causes = failures.iter().map(|failure| &failure.cause);
        let cause = causes.find(|cause| **cause != StoreFailure::Other).cloned();
        StoreReason::new(reasons.join("; "), cause.unwrap_or_default())
    }
}
