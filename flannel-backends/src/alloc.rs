use async_trait::async_trait;

use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::Offer;
use flannel_core::object::LinkName;
use flannel_core::{Backend, Config, Result};

/// The backend `alloc`: allocates a subnet, accepts every lease and installs nothing. It has no
/// options. It is for hosts whose routes another program installs, and it is the smallest
/// implementation of [`Backend`].
///
/// **Source**: flannel `pkg/backend/alloc/alloc.go`; its leases carry no backend type.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alloc;

#[async_trait]
impl Backend for Alloc {
    fn kind(&self) -> &'static str {
        "alloc"
    }

    fn lease_type(&self) -> &'static str {
        ""
    }

    fn option_names(&self) -> Option<&'static [&'static str]> {
        Some(&[])
    }

    fn validate(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, _: &Config, _: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint::default())
    }

    async fn prepare(&self, node: &Node<'_>, _: &Config) -> Result<Prepared> {
        let offer = Offer::new(node.uplink.public);
        let mtu = node.uplink.mtu;
        Ok(Prepared::new(offer, move |_| {
            let blueprint = Blueprint::new(mtu, |_, _, _, _| Ok(()));
            Ok(blueprint.with_any_lease_type())
        }))
    }
}
