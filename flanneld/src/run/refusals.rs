//! The config of the store that this host does not use, and when it is tried again.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use flannel_core::Config;
use flannel_core::runtime::lock;
use tokio::sync::watch;
use tokio::time::Instant;

/// The pause after the first failure of the devices. Each further one doubles it: a network whose
/// devices replace the devices of the network before is down while they fail.
const FIRST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(600);

/// A config of the store that this node does not use.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Refused {
    pub(crate) config: Config,
    /// Why no network can be built from it.
    pub(crate) reason: String,
}

/// Why a config is not used.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    current: Option<Refused>,
    failed: Option<Failed>,
}

/// A config whose devices could not be made, although the kernel had held them in a trial.
#[derive(Debug)]
struct Failed {
    refused: Refused,
    /// The failures one after the other.
    times: u32,
    again: Instant,
    /// Notified when a user wants a new attempt at once.
    reloads: watch::Receiver<()>,
}

impl Failed {
    fn is_due(&self) -> bool {
        Instant::now() >= self.again || self.reloads.has_changed().unwrap_or(false)
    }
}

impl Refusals {
    /// The config of the store, if it is not used.
    pub(super) fn get(&self) -> Option<Refused> {
        self.state().current.clone()
    }

    /// Sets the config of the store that is not used; `None` if the config of the store is used.
    pub(super) fn set(&self, refused: Option<Refused>) {
        self.state().current = refused;
    }

    /// Notes that the devices of a network with this config could not be made. Returns the reason
    /// for which it is not used now. A notification by `reloads` permits the next attempt at once.
    pub(super) fn failed(
        &self,
        config: &Config,
        reason: &str,
        reloads: watch::Receiver<()>,
    ) -> String {
        let mut state = self.state();
        let before = state.failed.take().filter(|before| before.refused.config == *config);
        let times = before.map_or(0, |before| before.times) + 1;
        let pause = LONGEST.min(FIRST.saturating_mul(2_u32.saturating_pow(times - 1)));
        let seconds = pause.as_secs();
        let reason = format!(
            "{reason}; failures of its devices in a row: {times}; it is tried again after \
             {seconds} s, or at once after `flannelctl reload`"
        );
        let refused = Refused { config: config.clone(), reason: reason.clone() };
        let again = Instant::now() + pause;
        state.current = Some(refused.clone());
        state.failed = Some(Failed { refused, times, again, reloads });
        reason
    }

    /// The reason for which a config is not tried yet; `None` if it may be tried.
    pub(super) fn waits(&self, config: &Config) -> Option<String> {
        let state = self.state();
        let failed = state.failed.as_ref().filter(|failed| failed.refused.config == *config)?;
        (!failed.is_due()).then(|| failed.refused.reason.clone())
    }

    /// Notes that the devices of a network with this config are in the kernel.
    pub(super) fn works(&self, config: &Config) {
        let mut state = self.state();
        state.failed = state.failed.take().filter(|failed| failed.refused.config != *config);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn config(kind: &str) -> Config {
        let text = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"KIND"}}"#;
        Config::parse(&text.replace("KIND", kind)).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn devices_that_fail_again_and_again_are_tried_ever_more_seldom() {
        let (_reload, reloads) = watch::channel(());
        let refusals = Refusals::default();
        let config = config("vxlan");
        let mut pauses = Vec::new();
        for _ in 0..9 {
            let reason = refusals.failed(&config, "no room", reloads.clone());
            assert_eq!(refusals.waits(&config).as_ref(), Some(&reason));
            assert_eq!(refusals.get().unwrap().reason, reason);
            let begin = Instant::now();
            while refusals.waits(&config).is_some() {
                advance(Duration::from_secs(1)).await;
            }
            pauses.push(begin.elapsed().as_secs());
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 600, 600, 600]);
        refusals.works(&config);
        refusals.failed(&config, "no room", reloads);
        advance(FIRST).await;
        assert_eq!(refusals.waits(&config), None, "the first failure since it worked");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reload_and_another_config_are_not_held_up() {
        let (reload, reloads) = watch::channel(());
        let refusals = Refusals::default();
        let failing = config("vxlan");
        refusals.failed(&failing, "no room", reloads);
        assert_eq!(refusals.waits(&config("host-gw")), None);
        // A trial that succeeds does not prove that the devices can be made.
        refusals.set(None);
        assert!(refusals.waits(&failing).is_some());
        refusals.works(&config("host-gw"));
        assert!(refusals.waits(&failing).is_some());
        reload.send_replace(());
        assert_eq!(refusals.waits(&failing), None);
    }
}
