//! Questions to the network that runs: whether another one can be built from a config.

use std::convert::Infallible;

use flannel_api::ProblemCause;
use flannel_core::Config;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::error::Error;

/// What the node would do differently than the config says, or the obstacle.
pub(crate) type Answer = Result<Vec<ProblemCause>, String>;

/// A queue of questions. Each network answers while it runs.
#[derive(Debug)]
pub(super) struct Trials {
    questions: mpsc::Sender<Trial>,
    asked: Mutex<mpsc::Receiver<Trial>>,
}

/// A config, and the place for the answer.
#[derive(Debug)]
struct Trial {
    config: Config,
    answer: oneshot::Sender<Answer>,
}

impl Default for Trials {
    fn default() -> Self {
        let (questions, asked) = mpsc::channel(1);
        Self { questions, asked: Mutex::new(asked) }
    }
}

impl Trials {
    /// Whether a network can be built from `config`, and how. `None` if the
    /// network has ended before it answered.
    pub(super) async fn ask(&self, config: Config) -> Option<Answer> {
        let (answer, answered) = oneshot::channel();
        self.questions.send(Trial { config, answer }).await.ok()?;
        answered.await.ok()
    }

    /// Answers the questions by `check`, until the future is dropped.
    pub(super) async fn answer(
        &self,
        check: impl AsyncFn(&Config) -> Result<Vec<ProblemCause>, Error>,
    ) -> Infallible {
        let mut asked = self.asked.lock().await;
        // The sender lives as long as the queue.
        while let Some(Trial { config, answer }) = asked.recv().await {
            // Clients that are gone need no answer.
            if answer.is_closed() {
                continue;
            }
            let result = check(&config).await.map_err(|error| error.to_string());
            drop(answer.send(result));
        }
        std::future::pending().await
    }
}
