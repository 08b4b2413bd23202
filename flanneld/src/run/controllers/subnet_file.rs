//! The subnet file, which CNI plugins read.
//!
//! It is written after the firewall rules and the tunnel are in place, so that pods can start. With
//! the bridge of the pods before the tunnel, Linux would treat the tunnel's IPv6 address as the
//! anycast address of the bridge's subnet, which accepts no TCP connection.

use std::sync::Arc;

use flannel_core::SubnetEnv;
use flannel_core::status::Status;
use flannel_subnet::subnet_file;
use tokio::sync::watch;

use super::RULES;
use crate::error::Error;
use crate::run::network::RunningNetwork;

/// The subnet file of a network.
pub(crate) struct SubnetFile<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl SubnetFile<'_> {
    /// Writes the file, after the rules and the tunnel are in place, and while this node may have
    /// the subnets.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) async fn write(&self) -> Result<(), Error> {
        let network = self.network;
        let rules = RulesAndTunnel {
            required: network.config.require_encryption,
            rules: network.rules_settled.clone(),
            status: network.handle.status.clone(),
        };
        rules.wait().await;
        network.starter.own_subnets.may_be(network.handle.lease.subnets).await;
        let env = SubnetEnv {
            networks: network.config.pod_networks().collect(),
            subnets: network.handle.lease.subnets.iter().collect(),
            mtu: network.handle.mtu,
            // The CNI plugin then leaves masquerading to flannel, in both families, as in k3s.
            ip_masq: network.settings.firewall.masquerade.is_any(),
        };
        let path = network.settings.subnet_file.clone();
        let go_flannel = network.go_flannel.clone();
        network
            .go_flannel
            .writes
            .run(move || subnet_file::write(&path, &env).map(|()| go_flannel.wrote_subnet_file()))
            .await?;
        network.observer.note(|facts| facts.subnet_file = true);
        Ok(())
    }

    /// Writes the file again whenever another program has removed it. A node with a lapsed lease
    /// has no subnet file, and a node that was given other subnets has none until their network
    /// runs.
    ///
    /// # Errors
    /// Returns only if the file cannot be written.
    pub(crate) async fn restore(&self) -> Error {
        if self.network.lapsed {
            return std::future::pending().await;
        }
        let path = &self.network.settings.subnet_file;
        let own_subnets = &self.network.starter.own_subnets;
        let subnets = self.network.handle.lease.subnets;
        loop {
            own_subnets.may_be(subnets).await;
            tokio::select! {
                restored = subnet_file::restore(path, async || self.write().await) => {
                    let Err(error) = restored;
                    return error;
                }
                () = own_subnets.are_not(subnets) => {}
            }
        }
    }
}

/// What comes before the subnet file.
struct RulesAndTunnel {
    /// The rules are awaited for any time.
    required: bool,
    /// Whether the firewall rules are in place.
    rules: watch::Receiver<bool>,
    status: watch::Receiver<Arc<Status>>,
}

impl RulesAndTunnel {
    /// Waits until the rules and the tunnel are in place, for a limited time. Rules that are
    /// required are awaited for any time.
    async fn wait(self) {
        let Self { required, mut rules, mut status } = self;
        if required && rules.wait_for(|settled| *settled).await.is_err() {
            // The firewall has ended, which ends the network.
            std::future::pending::<()>().await;
        }
        // The results are dropped at once, because they lock the channels for their senders.
        let there = async {
            drop(rules.wait_for(|settled| *settled).await);
            drop(status.wait_for(|status| status.own_in_place).await);
        };
        // The wait has a limit, so that pods can start without rules.
        let _: Result<(), _> = tokio::time::timeout(RULES, there).await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, sleep, timeout};

    use super::*;

    /// Missing firewall rules or a missing tunnel delay pods for a limited time.
    #[tokio::test(start_paused = true)]
    async fn the_wait_for_rules_and_tunnel_has_a_time_limit() {
        for (settled, tunnel) in [(true, true), (true, false), (false, true), (false, false)] {
            let (_rules, rules) = watch::channel(settled);
            let mut status = Status::default();
            status.own_in_place = tunnel;
            let (_network, status) = watch::channel(Arc::new(status));
            let start = Instant::now();
            let wait = RulesAndTunnel { required: false, rules, status }.wait();
            timeout(2 * RULES, wait).await.unwrap();
            let took = start.elapsed();
            let due = if settled && tunnel { Duration::ZERO } else { RULES };
            assert!(due <= took && took < due + RULES, "{settled} {tunnel}: {took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_wait_ends_when_rules_and_tunnel_are_in_place() {
        let (settled, rules) = watch::channel(false);
        let (network, status) = watch::channel(Arc::new(Status::default()));
        let start = Instant::now();
        let changes = async {
            sleep(RULES / 4).await;
            settled.send(true).unwrap();
            sleep(RULES / 4).await;
            network.send_modify(|status| Arc::make_mut(status).own_in_place = true);
        };
        tokio::join!(RulesAndTunnel { required: false, rules, status }.wait(), changes);
        assert!(start.elapsed() < RULES * 3 / 4, "{:?}", start.elapsed());
    }

    /// Until then, packets of pods could leave unencrypted.
    #[tokio::test(start_paused = true)]
    async fn required_rules_are_awaited_for_any_time() {
        let (settled, rules) = watch::channel(false);
        let mut status = Status::default();
        status.own_in_place = true;
        let (_network, status) = watch::channel(Arc::new(status));
        let wait = RulesAndTunnel { required: true, rules, status }.wait();
        tokio::pin!(wait);
        timeout(1_000 * RULES, &mut wait).await.unwrap_err();
        settled.send(true).unwrap();
        timeout(RULES / 2, wait).await.unwrap();
    }
}
