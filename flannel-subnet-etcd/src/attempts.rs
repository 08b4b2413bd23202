//! A request until it is answered: at one endpoint after the other, and with pauses.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flannel_core::{Error, Result};
use tokio::time::{Instant, timeout};

use crate::connections::{Connection, Connections};
use crate::failure::{Cure, Trouble};
use crate::options::EtcdOptions;
use flannel_subnet::Backoff;

/// An answer, perhaps not to the first attempt.
pub(crate) struct Answer<T> {
    pub(crate) value: T,
    /// Earlier attempts got no answer: they may have been carried out or not.
    pub(crate) repeated: bool,
}

/// Repeats requests.
pub(crate) struct Attempts {
    connections: Connections,
    /// Why no endpoint answers, since the last answer.
    trouble: Mutex<Option<String>>,
}

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

    /// Why requests are not answered at present.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.note().clone()
    }

    fn note(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request that is about `key` until it is answered, nothing can help, or patience is at an end.
    pub(crate) async fn ask<T, F>(
        &self,
        key: &str,
        request: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<Answer<T>>
    where
        F: Future<Output = Result<T, Trouble>> + Send,
    {
        let connections = &self.connections;
        let begin = Instant::now();
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));
        let mut failures: Vec<Option<Trouble>> = vec![None; connections.len()];
        for attempt in 0.. {
            let place = connections.current();
            let trouble = match self.attempt(place, key, &request).await {
                Ok(value) => {
                    *self.note() = None;
                    return Ok(Answer { value, repeated: attempt > 0 });
                }
                Err(trouble) => trouble,
            };
            let endpoint = connections.name(place);
            if trouble.cure == Cure::People {
                return Err(Error::Refused {
                    store: format!("etcd {endpoint}"),
                    reason: trouble.text,
                });
            }
            tracing::debug!(endpoint, key, "no answer: {}", trouble.text);
            failures[place] = Some(trouble);
            connections.move_on(place);
            let all = failures.iter().flatten();
            let hopeless = all.clone().filter(|trouble| trouble.cure == Cure::Endpoint).count()
                == failures.len();
            // Every endpoint gets its chance before anybody waits or gives up.
            let all_asked = failures.iter().all(Option::is_some);
            if hopeless || (all_asked && begin.elapsed() >= self.options().patience) {
                return Err(self.give_up(key, &failures, hopeless));
            }
            if all_asked {
                *self.note() = Some(format!("etcd: {key}: {}", self.each(&failures)));
                tokio::time::sleep(backoff.pause()).await;
            }
        }
        unreachable!("attempts are not counted out")
    }

    async fn attempt<T, F>(
        &self,
        place: usize,
        key: &str,
        request: impl Fn(Connection) -> F + Send + Sync,
    ) -> Result<T, Trouble>
    where
        F: Future<Output = Result<T, Trouble>> + Send,
    {
        let within = self.options().request_timeout;
        let outcome = timeout(within, async {
            let connection = self.connections.connect(place).await;
            let connection =
                connection.map_err(|trouble| trouble.explained(key, self.options()))?;
            let outcome = connection.interpret(request(connection.clone()).await);
            let outcome = outcome.map_err(|trouble| trouble.explained(key, self.options()));
            if outcome.as_ref().is_err_and(|trouble| trouble.cure == Cure::Connection) {
                self.connections.forget(place, &connection).await;
            }
            outcome
        });
        outcome
            .await
            .unwrap_or_else(|_| Err(Trouble::passing(format!("no answer within {within:?}"))))
    }

    /// What is wrong with each endpoint.
    fn each(&self, failures: &[Option<Trouble>]) -> String {
        let each: Vec<String> = failures
            .iter()
            .enumerate()
            .filter_map(|(place, trouble)| Some((place, trouble.as_ref()?)))
            .map(|(place, trouble)| format!("{}: {}", self.connections.name(place), trouble.text))
            .collect();
        each.join("; ")
    }

    fn give_up(&self, key: &str, failures: &[Option<Trouble>], hopeless: bool) -> Error {
        let each = self.each(failures);
        if hopeless {
            return Error::Refused { store: "etcd".into(), reason: each };
        }
        Error::Store { store: format!("etcd: {key}"), source: each.into() }
    }
}
