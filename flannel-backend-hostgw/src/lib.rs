#![doc = include_str!("../README.md")]

use async_trait::async_trait;
use flannel_core::{
    Backend, Blueprint, Config, Env, Error, ExternalInterface, Host, KernelNetwork, Lease,
    LeaseAttrs, LinkName, Network, Object, Owned, Rejected, Result, Route, State, Via,
};

/// The backend type in leases.
const TYPE: &str = "host-gw";

/// The backend `host-gw`: a route to every peer's subnet, through the peer itself. All nodes must share a link.
///
/// No options. **Source**: flannel `pkg/backend/hostgw/hostgw.go`, `pkg/backend/route_network.go`.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostGw;

#[async_trait]
impl Backend for HostGw {
    fn name(&self) -> &'static str {
        TYPE
    }

    fn owned(&self, uplink: LinkName, config: &Config) -> Result<Owned> {
        let networks = config.pod_networks().collect();
        // Those for the own subnets.
        Ok(Owned { networks, routes_on: [uplink].into(), blackholes: true, ..Owned::default() })
    }

    fn check(&self, config: &Config, iface: Option<&ExternalInterface>) -> Result<()> {
        let Some(iface) = iface else { return Ok(()) };
        for family in config.networks.families() {
            let (address, public) = (iface.address[family], iface.public[family]);
            let refuse = |reason| Error::Backend { backend: TYPE.into(), reason };
            let Some(address) = address else {
                let name = iface.name;
                return Err(refuse(format!(
                    "{name} has no {family} address, which the network config enables"
                )));
            };
            if let Some(public) = public.filter(|public| *public != address) {
                return Err(refuse(format!(
                    "the public address {public} is not the address of {} ({address}): peers use it as their \
                     gateway, so it must be on the shared link (NAT needs a tunnel, for example vxlan)",
                    iface.name
                )));
            }
        }
        Ok(())
    }

    async fn register(&self, host: &Host, config: &Config) -> Result<Box<dyn Network>> {
        self.check(config, Some(&host.iface))?;
        let attrs = LeaseAttrs {
            public: flannel_core::Dual::from_fn(|family| {
                host.iface.address[family].filter(|_| config.networks[family].is_some())
            }),
            backend_type: TYPE.into(),
            ..LeaseAttrs::default()
        };
        let lease = host.subnets.acquire_lease(&attrs).await?;
        let uplink = host.iface.name;
        let blueprint = Blueprint {
            lease,
            networks: config.pod_networks().collect(),
            mtu: host.iface.mtu,
            owned: self.owned(uplink, config)?,
            base: State::default(),
            plan: Box::new(move |lease, env, objects| plan(uplink, lease, env, objects)),
        };
        Ok(Box::new(KernelNetwork::new(host.kernel.clone(), blueprint)))
    }
}

/// One route per family, if the peer is on the link.
fn plan(
    uplink: LinkName,
    lease: &Lease,
    env: &Env<'_>,
    objects: &mut Vec<Object>,
) -> Result<(), Rejected> {
    if lease.attrs.backend_type != TYPE {
        let theirs = &lease.attrs.backend_type;
        return Err(Rejected(format!("its backend type is {theirs:?}, this node's is {TYPE:?}")));
    }
    let mut far = None;
    for peer in lease.endpoints() {
        // What one family lacks is no reason to lose the other.
        let Some(gateway) = peer.public else { continue };
        if env.on_link(gateway) == Some(uplink) {
            let via = Via::Gateway { gateway, link: uplink, onlink: false };
            objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
        } else {
            let reason = format!(
                "its public address {gateway} is not directly on the link {uplink}, which host-gw needs"
            );
            env.remark(reason.clone());
            far = Some(reason);
        }
    }
    if objects.is_empty() {
        return Err(Rejected(far.unwrap_or_else(|| "it has no public address".into())));
    }
    Ok(())
}
