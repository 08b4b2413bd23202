//! The choice of the external interface.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::Config;
use flannel_core::address::Family;
use flannel_core::backend::ExternalInterface;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;

use crate::error::Error;

/// The external interface and its selectors.
pub(crate) struct Chosen {
    pub(crate) kernel: Arc<NetlinkKernel>,
    pub(crate) iface: ExternalInterface,
    pub(crate) selectors: Selectors,
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
        let selectors = Selectors { pod_networks: config.pod_networks().collect(), ..selectors };
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
}

/// `192.0.2.1, known to peers as 198.51.100.1`.
pub(crate) fn addresses_of(iface: &ExternalInterface) -> String {
    let one = |(family, address): (Family, &IpAddr)| match iface.public[family] {
        Some(public) if public != *address => format!("{address}, known to peers as {public}"),
        _ => address.to_string(),
    };
    iface.address.iter().map(one).collect::<Vec<_>>().join(", ")
}
