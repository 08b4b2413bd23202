//! The external interface: its choice, and changes that need another choice.
//!
//! Another choice is validated before the running network is given up for it.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Config;
use flannel_core::address::Family;
use flannel_core::backend::ExternalInterface;
use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::{InterfaceState, Selectors};
use tokio::sync::watch;

use crate::error::Error;
use crate::observe::Observer;
use crate::store::wait::STORE_AGAIN;

/// The pause before the kernel is watched again after that failed.
const WATCH_RETRY: Duration = Duration::from_secs(1);
/// The pause before an unfit interface is validated again, because the cause may go unnoticed.
const SECOND_THOUGHT: Duration = Duration::from_secs(30);

/// The external interface and its selectors.
pub(crate) struct Chosen {
    pub(crate) kernel: Arc<NetlinkKernel>,
    pub(crate) iface: ExternalInterface,
    selectors: Selectors,
}

impl Chosen {
    /// Chooses for the networks of `config`. This may read all routes of the host.
    pub(crate) async fn choose(
        kernel: &Arc<NetlinkKernel>,
        selectors: Selectors,
        config: &Config,
    ) -> Result<Self, Error> {
        let kernel = Arc::clone(kernel);
        let families: Vec<_> = config.networks.families().collect();
        let chosen = blocking(move || {
            let iface = kernel.external_interface(&selectors, families)?;
            Ok::<_, Error>(Self { kernel, iface, selectors })
        })
        .await?;
        if let Some(IpAddr::V6(address)) =
            chosen.iface.public.v6.filter(|_| config.networks.v6.is_some())
            && address.is_unicast_link_local()
        {
            let reason =
                format!("its only IPv6 address {address} is link-local, which peers cannot reach");
            return Err(Error::UnfitInterface { name: chosen.iface.name, reason });
        }
        Ok(chosen)
    }

    /// Waits until another choice is needed and a network can be built with it. Returns the
    /// difference. Obstacles are logged once.
    pub(crate) async fn changed(
        &self,
        config: &Config,
        validate: impl AsyncFn() -> Result<(), Error>,
        observer: &Observer,
    ) -> String {
        let (state, states) = watch::channel(InterfaceState::Kept);
        tokio::select! {
            never = self.follow(config, &state) => match never {},
            reason = decide(self.iface.name, states, validate, observer) => reason,
        }
    }

    async fn follow(&self, config: &Config, state: &watch::Sender<InterfaceState>) -> Infallible {
        let families: Vec<_> = config.networks.families().collect();
        let mut logged = false;
        loop {
            let Err(error) =
                self.kernel.follow_interface(&self.iface, &self.selectors, &families, state).await;
            if !std::mem::replace(&mut logged, true) {
                let link = self.iface.name;
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

/// `192.0.2.1, known to peers as 198.51.100.1`.
pub(crate) fn addresses_of(iface: &ExternalInterface) -> String {
    let one = |(family, address): (Family, &IpAddr)| match iface.public[family] {
        Some(public) if public != *address => format!("{address}, known to peers as {public}"),
        _ => address.to_string(),
    };
    iface.address.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

    use std::cell::{Cell, RefCell};
    use std::pin::pin;

    use tokio::time::sleep;

    use super::*;

    /// Not a multiple of the pause between two validations.
    const LONG: Duration = Duration::from_secs(3590);

    fn smaller() -> InterfaceState {
        let iface = ExternalInterface {
            name: "eth0".parse().unwrap(),
            mtu: 1300,
            address: flannel_core::address::Dual::default(),
            public: flannel_core::address::Dual::default(),
            reason: String::new(),
        };
        InterfaceState::Other {
            now: Box::new(iface),
            difference: "eth0 has the MTU 1300 now, not 1500".into(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_choice_is_logged_and_validated_again_until_it_fits() {
        let (interface, states) = watch::channel(InterfaceState::Kept);
        let (observer, validations) = (Observer::default(), Cell::new(0));
        let obstacle = RefCell::new(Some("too small".to_owned()));
        let store_is_away = Cell::new(false);
        let validate = async || {
            validations.set(validations.get() + 1);
            if store_is_away.get() {
                let (store, source) = ("etcd".into(), "no route".into());
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
