//! The routes of this host while the firewall rule of `RequireEncryption` is not in place yet.
//!
//! The network makes its routes only behind the rule, which may take long: another program holds
//! the lock of iptables, or a program is missing. But routes of an earlier run that do not encrypt
//! must not stay for that time.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, KernelError, Outcome};
use flannel_core::object::{Change, Key, LinkName, Object, ObjectSet, Route, Via};
use tokio::sync::watch;

use crate::blocking::BlockingQueue;

/// The pause between two looks at the routes.
const PAUSE: Duration = Duration::from_secs(1);

/// The routes of this host that do not leave by a device that encrypts.
pub(super) struct PlainRoutes {
    pub(super) kernel: Arc<dyn Kernel>,
    pub(super) footprint: Footprint,
    /// The devices that encrypt.
    pub(super) encrypted: BTreeSet<LinkName>,
    /// The queue of the removals.
    pub(super) queue: BlockingQueue,
}

impl PlainRoutes {
    /// Waits until the rule is in place (`ruled`), for any time. Until then, removes these routes,
    /// so that their packets are dropped. All other objects stay.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the routes as they are.
    pub(super) async fn remove_until(&self, mut ruled: watch::Receiver<bool>) {
        let wait = async {
            // The sender is gone with the firewall, which will make no rule.
            if ruled.wait_for(|ruled| *ruled).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            () = wait => {}
            never = self.keep_removing() => match never {},
        }
    }

    async fn keep_removing(&self) -> Infallible {
        let mut logged = None;
        loop {
            let kernel = Arc::clone(&self.kernel);
            let footprint = self.footprint.clone();
            let encrypted = self.encrypted.clone();
            let removed =
                self.queue.run(move || remove_plain(&*kernel, &footprint, &encrypted)).await;
            let failed = removed.err().map(|error| error.to_string());
            if failed.is_some() && failed != logged {
                let error = failed.as_deref();
                tracing::warn!(error, "a route that does not encrypt is not removed, retrying");
            }
            logged = failed;
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Removes the routes of a footprint that do not encrypt. Returns the first error.
fn remove_plain(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    encrypted: &BTreeSet<LinkName>,
) -> Result<(), KernelError> {
    let changes = removals(&kernel.snapshot(footprint)?, footprint, encrypted);
    if changes.is_empty() {
        return Ok(());
    }
    tracing::info!(changes = changes.len(), "routes that do not encrypt are removed");
    kernel.apply(footprint, &changes).into_iter().try_for_each(Outcome::into_result)
}

/// The changes that leave no route but those by devices that encrypt, and blackholes. A blackhole
/// of each pod network comes first, so that no packet follows the default route.
fn removals(
    there: &ObjectSet,
    footprint: &Footprint,
    encrypted: &BTreeSet<LinkName>,
) -> Vec<Change> {
    let device = |route: &Route| match route.via {
        Via::Gateway { link, .. } | Via::Link(link) => Some(link),
        // One whose device is not known does not count as encrypted.
        Via::Nexthop(id) => match there.get(&Key::Nexthop(id)) {
            Some(Object::Nexthop(nexthop)) => Some(nexthop.link),
            _ => None,
        },
        _ => None,
    };
    let is_plain = |route: &Route| {
        let drops = matches!(route.via, Via::Blackhole | Via::LastResort);
        let inside = footprint.networks.iter().any(|network| network.covers(&route.dst));
        inside && !drops && device(route).is_none_or(|link| !encrypted.contains(&link))
    };
    let routes = there.iter().filter_map(|object| match object {
        Object::Route(route) => Some((route.dst, *route)),
        _ => None,
    });
    let mut plain: BTreeMap<_, Route> = routes.filter(|(_, route)| is_plain(route)).collect();
    let mut changes = Vec::new();
    for network in footprint.networks.iter().filter(|_| footprint.blackholes) {
        let replaced = plain.remove(network).is_some();
        if replaced || there.get(&Key::Route(*network)).is_none() {
            let blackhole = Route { dst: *network, via: Via::Blackhole, mtu: None };
            changes.push(Change::Put(blackhole.into()));
        }
    }
    changes.extend(plain.into_values().map(|route| Change::Delete(route.into())));
    changes
}

#[cfg(test)]
mod tests {
    use flannel_core::address::Subnet;
    use flannel_core::testing::FakeKernel;

    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    fn route(dst: &str, link: &str) -> Object {
        let via = Via::Gateway {
            gateway: [192, 0, 2, 7].into(),
            link: link.parse().unwrap(),
            onlink: true,
        };
        Route { dst: subnet(dst), via, mtu: None }.into()
    }

    fn footprint() -> Footprint {
        Footprint {
            networks: vec![subnet("10.1.0.0/16"), subnet("10.2.0.0/16")],
            routes_on: ["eth0", "wg0"].into_iter().map(|link| link.parse().unwrap()).collect(),
            blackholes: true,
            ..Footprint::default()
        }
    }

    fn text(changes: &[Change]) -> Vec<String> {
        changes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn only_routes_that_encrypt_stay_and_blackholes_come_first() {
        let mut there = ObjectSet::default();
        for object in [
            route("10.1.7.0/24", "eth0"),
            route("10.1.8.0/24", "wg0"),
            route("10.2.0.0/16", "eth0"),
            route("10.9.0.0/24", "eth0"),
        ] {
            there.insert(object);
        }
        let encrypted = ["wg0".parse().unwrap()].into();
        let changes = removals(&there, &footprint(), &encrypted);
        assert_eq!(
            text(&changes),
            [
                "put route blackhole 10.1.0.0/16",
                "put route blackhole 10.2.0.0/16",
                "delete route 10.1.7.0/24 via 192.0.2.7 dev eth0 onlink",
            ]
        );
        let none = removals(&there, &footprint(), &BTreeSet::new());
        assert_eq!(none.len(), 4, "no device encrypts: {none:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_has_no_limit_and_plain_routes_that_return_go_again() {
        let fake = FakeKernel::with_uplink("eth0");
        let kernel: Arc<dyn Kernel> = Arc::new(fake.clone());
        let footprint = footprint();
        let (rule, ruled) = watch::channel(false);
        let plain = || {
            let there = fake.snapshot(&footprint).unwrap();
            there.get(&Key::Route(subnet("10.1.7.0/24"))).is_some()
        };
        let put = || {
            let change = Change::Put(route("10.1.7.0/24", "eth0"));
            assert_eq!(fake.apply(&footprint, &[change]), [Outcome::Done]);
        };
        let scenario = async {
            for _ in 0..3 {
                put();
                while plain() {
                    tokio::time::sleep(PAUSE / 4).await;
                }
                tokio::time::sleep(Duration::from_secs(3600)).await;
            }
            rule.send_replace(true);
            std::future::pending::<()>().await;
        };
        let encrypted = BTreeSet::new();
        let plain = PlainRoutes {
            kernel,
            footprint: footprint.clone(),
            encrypted,
            queue: BlockingQueue::default(),
        };
        tokio::select! {
            () = plain.remove_until(ruled) => {}
            () = scenario => {}
        }
        assert!(*rule.borrow(), "it waits for the rule");
    }
}
