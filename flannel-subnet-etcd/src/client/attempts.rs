//! Requests that are repeated, at one endpoint after the other, until they are answered.

use std::future::Future;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use flannel_core::runtime::lock;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Error, Result};
use tokio::time::{Instant, timeout};

use crate::client::connections::{Connection, Connections};
use crate::client::failure::{Failure, Retry};
use crate::options::EtcdOptions;
use flannel_subnet::Backoff;

/// An answer to a request.
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    /// Earlier attempts had no answer and may have been carried out.
    pub(crate) repeated: bool,
}

/// Repeats requests.
pub(crate) struct Attempts {
    connections: Connections,
    /// `None` after an answer.
    trouble: Mutex<Option<Trouble>>,
}

/// No endpoint answers.
struct Trouble {
    since: Instant,
    reason: StoreReason,
}

/// The first pause between two attempts of a request, and the longest one. After a short outage, in
/// which requests are repeated, nodes come back within about its length.
const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(10);
/// The longest one while an endpoint closes connections: it is there, and perhaps refuses this node
/// with an alert that only some attempts can read.
const LONGEST_OF_CLOSED: Duration = Duration::from_secs(1);

impl Attempts {
    pub(crate) fn new(connections: Connections) -> Self {
        Self { connections, trouble: Mutex::default() }
    }

    pub(crate) fn options(&self) -> &EtcdOptions {
        &self.connections.options
    }

    /// The endpoint in use, for messages.
    pub(crate) fn endpoint(&self) -> String {
        self.connections.name(self.connections.current()).to_owned()
    }

    /// The reason why no endpoint answers at present.
    pub(crate) fn trouble(&self) -> Option<StoreReason> {
        self.note().as_ref().map(|trouble| trouble.reason.clone())
    }

    fn note(&self) -> MutexGuard<'_, Option<Trouble>> {
        lock(&self.trouble)
    }

    /// Notes that no endpoint answers.
    fn note_trouble(&self, reason: StoreReason) {
        let mut trouble = self.note();
        let since = trouble.as_ref().map_or_else(Instant::now, |known| known.since);
        *trouble = Some(Trouble { since, reason });
    }

    /// No endpoint has answered any request for longer than [`EtcdOptions::patience`].
    fn is_outage(&self) -> bool {
        let patience = self.options().patience;
        self.note().as_ref().is_some_and(|trouble| trouble.since.elapsed() >= patience)
    }

    /// Sends a request about `key` until it is answered, no endpoint can answer it, or
    /// [`EtcdOptions::patience`] is over. During an outage that has lasted longer, each endpoint is
    /// asked once: the callers pause for a longer time, so that the nodes of a cluster do not
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
        let mut backoff = Backoff::new(FIRST, LONGEST);
        let mut closed = Backoff::new(FIRST, LONGEST_OF_CLOSED);
        let mut failures: Vec<Option<Failure>> = vec![None; connections.len()];
        for attempt in 0.. {
            let place = connections.current();
            let failure = match self.attempt(place, key, &request).await {
                Ok(value) => {
                    *self.note() = None;
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
            let all = failures.iter().flatten();
            let hopeless =
                all.clone().filter(|failure| failure.retry == Retry::OtherEndpoint).count()
                    == failures.len();
            // Every endpoint is tried before the first pause, and before giving up.
            let all_asked = failures.iter().all(Option::is_some);
            if all_asked && !hopeless {
                let StoreReason { text, failure } = self.each(&failures);
                self.note_trouble(StoreReason::new(format!("etcd: {key}: {text}"), failure));
            }
            // An endpoint that wants a new connection is there.
            let is_absent = failures.iter().flatten().all(|f| f.retry == Retry::Later);
            let is_over =
                begin.elapsed() >= self.options().patience || (is_absent && self.is_outage());
            if hopeless || (all_asked && is_over) {
                return Err(self.give_up(key, &failures, hopeless));
            }
            if all_asked {
                let is_closed = failures.iter().flatten().any(Failure::is_hanging_up);
                let pause = if is_closed { closed.pause() } else { backoff.pause() };
                tokio::time::sleep(pause).await;
            }
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
        let within = self.options().request_timeout;
        let outcome = timeout(within, async {
            let connection = self.connections.connect(place).await;
            let connection =
                connection.map_err(|failure| failure.explained(key, self.options()))?;
            let outcome = connection.interpret(request(connection.clone()).await);
            let outcome = outcome.map_err(|failure| failure.explained(key, self.options()));
            if outcome.as_ref().is_err_and(|failure| failure.retry == Retry::NewConnection) {
                self.connections.forget(place, &connection).await;
            }
            outcome
        });
        outcome
            .await
            .unwrap_or_else(|_| Err(Failure::later(format!("no answer within {within:?}"))))
    }

    /// The failure of each endpoint, with the first cause that is known.
    fn each(&self, failures: &[Option<Failure>]) -> StoreReason {
        let each: Vec<String> = failures
            .iter()
            .enumerate()
            .filter_map(|(place, failure)| Some((place, failure.as_ref()?)))
            .map(|(place, failure)| format!("{}: {}", self.connections.name(place), failure.text))
            .collect();
        let mut causes = failures.iter().flatten().map(|failure| &failure.cause);
        let cause = causes.find(|cause| **cause != StoreFailure::Other).cloned();
        StoreReason::new(each.join("; "), cause.unwrap_or_default())
    }

    fn give_up(&self, key: &str, failures: &[Option<Failure>], hopeless: bool) -> Error {
        let each = self.each(failures);
        if hopeless {
            return Error::Refused { store: "etcd".into(), reason: each };
        }
        Error::Store { store: format!("etcd: {key}"), source: each.into() }
    }
}
