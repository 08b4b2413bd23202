//! The external interface: which one it is, and when it holds no longer.
//!
//! The one thing to know: choosing may read all routes of the host, so it is done on a thread that may block.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{Config, ExternalInterface, Family};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;

use crate::error::Error;

/// Until the kernel, which could not be watched, is watched again.
const WATCH_RETRY: Duration = Duration::from_secs(1);

/// The external interface, and how it was chosen.
pub(crate) struct Chosen {
    pub(crate) kernel: Arc<NetlinkKernel>,
    pub(crate) iface: ExternalInterface,
    selectors: Selectors,
}

impl Chosen {
    /// Chooses for the networks of `config`.
    pub(crate) async fn choose(
        kernel: &Arc<NetlinkKernel>,
        selectors: Selectors,
        config: &Config,
    ) -> Result<Self, Error> {
        let kernel = Arc::clone(kernel);
        let families: Vec<_> = config.networks.families().collect();
        let choice = tokio::task::spawn_blocking(move || {
            let iface = kernel.external_interface(&selectors, families)?;
            Ok::<_, Error>(Self { kernel, iface, selectors })
        });
        let chosen = choice.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
        if let Some(IpAddr::V6(address)) = chosen.iface.public.v6.filter(|_| config.networks.v6.is_some())
            && address.is_unicast_link_local()
        {
            let reason = format!("its only IPv6 address {address} is link-local, which peers cannot reach");
            return Err(Error::UnfitInterface { name: chosen.iface.name, reason });
        }
        Ok(chosen)
    }

    /// Waits until another choice is needed, and possible.
    pub(crate) async fn changed(&self, config: &Config) -> String {
        let families: Vec<_> = config.networks.families().collect();
        let mut said = false;
        loop {
            match self.kernel.interface_changed(&self.iface, &self.selectors, &families).await {
                Ok(reason) => return reason,
                Err(error) if !std::mem::replace(&mut said, true) => {
                    tracing::warn!("{} cannot be watched, trying on: {error}", self.iface.name);
                }
                Err(_) => (),
            }
            tokio::time::sleep(WATCH_RETRY).await;
        }
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
