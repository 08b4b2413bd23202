//! The route engine alone, without a store: it installs routes for your own leases. The engine
//! repairs routes while `run` is polled. This example ends when all routes are in place.

use std::sync::Arc;

use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Origin, Revision, View};
use flannel_core::object::{LinkName, Route, Via};
use flannel_core::{Lease, Network};
use flannel_netlink::NetlinkKernel;
use flannel_route::KernelNetwork;
use tokio::sync::watch;

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(embed)
}

async fn embed() -> anyhow::Result<()> {
    let eth0: LinkName = "eth0".parse()?;
    let leases: LeaseSet = [lease("10.1.1.0-24", "192.0.2.1")?, lease("10.1.7.0-24", "192.0.2.7")?]
        .into_iter()
        .collect();
    let (_views, views) =
        watch::channel(View { leases, origin: Origin::Live { revision: Revision(1) } });
    let pods = "10.1.0.0/16".parse()?;
    let footprint =
        Footprint { networks: vec![pods], routes_on: [eth0].into(), ..Footprint::default() };
    let blueprint = Blueprint::new(1500, move |subnets, offer, _env, objects| {
        for peer in offer.endpoints(subnets) {
            let Some(gateway) = peer.public else { continue };
            let via = Via::Gateway { gateway, link: eth0, onlink: false };
            objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
        }
        Ok(())
    })
    .with_footprint(footprint);
    let own = NodeLease::Held(lease("10.1.1.0-24", "192.0.2.1")?);
    let kernel = Arc::new(NetlinkKernel::open()?);
    let network = KernelNetwork::new(kernel, own, [pods].into_iter().collect(), vec![blueprint]);
    let mut status = network.handle().status;
    tokio::select! {
        ended = Box::new(network).run(views) => anyhow::bail!("the network ended: {ended:?}"),
        synced = status.wait_for(|status| status.in_sync) => {
            println!("in sync with {} peer", synced?.peers);
        }
    }
    Ok(())
}

fn lease(key: &str, public: &str) -> anyhow::Result<Lease> {
    let public = [public.parse::<std::net::IpAddr>()?].into_iter().collect();
    let attrs = LeaseAttrs::from(Offer::new(public));
    let revision = Revision(1);
    Ok(Lease { subnets: key.parse()?, attrs, expires: None, since: revision, revision })
}
