//! Changes of the external interface that need another choice.
//!
//! Another choice is validated before the running network is given up for it.

use std::convert::Infallible;
use std::time::Duration;

use flannel_core::object::LinkName;
use flannel_netlink::iface::InterfaceState;
use tokio::sync::watch;

use super::Ended;
use crate::error::Error;
use crate::observe::Observer;
use crate::run::network::RunningNetwork;
use crate::store::wait::STORE_AGAIN;

/// The pause before the kernel is watched again after that failed.
const WATCH_RETRY: Duration = Duration::from_secs(1);
/// The pause before an unfit interface is validated again, because the cause may go unnoticed.
const SECOND_THOUGHT: Duration = Duration::from_secs(30);

/// Watches the external interface of a network.
pub(crate) struct UplinkController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl UplinkController<'_> {
    /// Runs until another choice is needed and a network can be built with it. Obstacles are logged
    /// once.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        let (state, states) = watch::channel(InterfaceState::Kept);
        let validate = async || network.validate_stored().await;
        let difference = tokio::select! {
            never = self.follow(&state) => match never {},
            difference =
                decide(network.uplink.iface.name, states, validate, network.observer) => difference,
        };
        Ended::Rebuild(difference)
    }

    async fn follow(&self, state: &watch::Sender<InterfaceState>) -> Infallible {
        let uplink = &self.network.uplink;
        let families: Vec<_> = self.network.config.networks.families().collect();
        let mut logged = false;
        loop {
            let followed =
                uplink.kernel.follow_interface(&uplink.iface, &uplink.selectors, &families, state);
            let Err(error) = followed.await;
            if !std::mem::replace(&mut logged, true) {
                let link = uplink.iface.name;
                tracing::warn!(%link, %error, "the external interface cannot be watched, retrying");
            }
            tokio::time::sleep(WATCH_RETRY).await;
        }
    }
}

/// Waits until there is another choice that passes `validate`. Returns the difference.
async fn decide(
    name: LinkName,
    mut states: watch::Receiver<InterfaceState>,
    validate: impl AsyncFn() -> Result<(), Error>,
    observer: &Observer,
) -> String {
    let mut unfit = None;
    loop {
        let state = states.borrow_and_update().clone();
        let mut patience = SECOND_THOUGHT;
        let why = match state {
            InterfaceState::Kept => None,
            InterfaceState::Lost(why) => Some(why),
            InterfaceState::Other { difference, .. } => match validate().await {
                Ok(()) => return difference,
                Err(error) => {
                    // The store is usually reached by that interface.
                    if error.is_of_store() {
                        patience = STORE_AGAIN;
                    }
                    Some(format!("{difference}: {error}"))
                }
            },
        };
        if why != unfit {
            match &why {
                Some(why) => {
                    let text = "the external interface has changed, the network stays as it is";
                    tracing::warn!(link = %name, reason = %why, "{text}");
                }
                None => tracing::info!(link = %name, "the external interface is as before again"),
            }
            observer.note(|facts| facts.unfit_interface = why.clone());
            unfit = why;
        }
        let patience = if unfit.is_some() { patience } else { Duration::MAX };
        // The sender lives as long as this.
        let _ = tokio::time::timeout(patience, states.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

    use std::cell::{Cell, RefCell};
    use std::pin::pin;

    use flannel_core::address::Dual;
    use flannel_core::backend::ExternalInterface;
    use tokio::time::sleep;

    use super::*;

    /// A time that is not a multiple of the pause between two validations.
    const LONG: Duration = Duration::from_secs(3590);

    fn smaller() -> InterfaceState {
        let iface = ExternalInterface::new("eth0".parse().unwrap(), 1300, Dual::default());
        InterfaceState::Other {
            now: Box::new(iface),
            difference: "eth0 has the MTU 1300 now, not 1500".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_choice_is_logged_and_validated_again_until_it_fits() {
        let (interface, states) = watch::channel(InterfaceState::Kept);
        let observer = Observer::default();
        let validations = Cell::new(0);
        let obstacle = RefCell::new(Some("too small".to_owned()));
        let store_is_away = Cell::new(false);
        let validate = async || {
            validations.set(validations.get() + 1);
            if store_is_away.get() {
                let store = "etcd".into();
                let source = "no route".into();
                return Err(flannel_core::Error::Store { store, source }.into());
            }
            let name = "eth0".parse().unwrap();
            obstacle
                .borrow()
                .clone()
                .map_or(Ok(()), |reason| Err(Error::UnfitInterface { name, reason }))
        };
        let mut running = pin!(decide("eth0".parse().unwrap(), states, &validate, &observer));
        let mut after_an_hour = async || {
            tokio::select! {
                ended = &mut running => panic!("{ended}"),
                () = sleep(LONG) => observer.snapshot().facts.unfit_interface,
            }
        };
        assert_eq!(
            (after_an_hour().await, validations.get()),
            (None, 0),
            "the interface has not changed"
        );
        interface.send_replace(smaller());
        let why = after_an_hour().await.unwrap();
        assert!(
            why.contains("MTU 1300 now, not 1500: external interface eth0: too small"),
            "{why}"
        );
        assert_eq!(validations.take(), 120, "every 30 s");
        interface.send_replace(InterfaceState::Lost("eth0 is gone".into()));
        assert_eq!(
            (after_an_hour().await.as_deref(), validations.get()),
            (Some("eth0 is gone"), 0)
        );
        interface.send_replace(InterfaceState::Kept);
        assert_eq!(after_an_hour().await, None);
        interface.send_replace(smaller());
        assert!(after_an_hour().await.is_some());
        // A store that does not answer usually answers again soon.
        validations.set(0);
        store_is_away.set(true);
        interface.send_replace(smaller());
        let why = after_an_hour().await.unwrap();
        assert!(
            why.contains("not 1500: ") && validations.get() > 3_500,
            "{why}, validations {} times",
            validations.get()
        );
        store_is_away.set(false);
        obstacle.take();
        let reason = tokio::time::timeout(SECOND_THOUGHT, running).await.unwrap();
        assert_eq!(reason, "eth0 has the MTU 1300 now, not 1500");
    }
}
