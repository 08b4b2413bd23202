//! A new network namespace with an uplink.

use std::net::IpAddr;
use std::sync::Arc;

use anyhow::Context;
use flannel_core::SubnetManager;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{Netns, ip};
use flannel_route::{EngineOptions, Host, JoinOptions};

use crate::parts::cluster::{Families, device};
use crate::parts::floor::delete;

/// A new network namespace with `eth0` up.
pub(crate) struct Fixture {
    pub(crate) netns: Netns,
}

impl Fixture {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let netns = Netns::new().context(
            "a network namespace is needed: run as root, or in `unshare --user --map-root-user`",
        )?;
        netns.run(|| {
            ip("link add eth0 type veth peer name wire");
            ip("link set wire up");
            ip("address add 192.0.2.1/24 dev eth0");
            ip("address add 2001:db8::1/64 dev eth0 nodad");
            ip("link set eth0 up");
            // Peers are behind a router.
            ip("route add default via 192.0.2.254");
            ip("-6 route add default via 2001:db8::ffff");
        });
        Ok(Self { netns })
    }

    /// Removes all objects of the peers in a cheap order. Otherwise the kernel removes them with
    /// the namespace, while the next run is measured. Errors are added to `wrong`.
    pub(crate) fn clear(&self, peers: u32, families: Families, wrong: &mut Vec<String>) {
        let cleared = self.netns.run(|| {
            delete(peers, families)?;
            ip("nexthop flush");
            families.iter().for_each(|family| drop(ip(&format!("link del {}", device(family)))));
            anyhow::Ok(())
        });
        if let Err(error) = cleared {
            wrong.push(format!("not all objects could be removed: {error:#}"));
        }
    }

    /// This host, for a backend.
    pub(crate) fn host(&self, subnets: Arc<dyn SubnetManager>) -> anyhow::Result<BenchHost> {
        let address: Dual<IpAddr> =
            [IpAddr::from([192, 0, 2, 1]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1])]
                .into_iter()
                .collect();
        let iface = ExternalInterface::new("eth0".parse()?, 1500, address)
            .with_reason("it is the only one");
        let kernel = Arc::new(NetlinkKernel::open_in(self.netns.path())?);
        let host = Host::new(iface, kernel.clone(), subnets);
        let engine = EngineOptions::default().with_process_names(kernel);
        Ok(BenchHost { host, options: JoinOptions::default().with_engine(engine) })
    }
}

/// A host, with the options by which the daemon joins a network there.
pub(crate) struct BenchHost {
    pub(crate) host: Host,
    pub(crate) options: JoinOptions,
}
