//! A network that runs itself gets the peers that this node accepts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use flannel_core::backend::{Blueprint, Datapath, ExternalInterface, Node, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::{LeaseAttrs, Offer, View};
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::object::LinkName;
use flannel_core::status::Status;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, Config, Error, Network, Result, SubnetManager};
use flannel_route::{Host, JoinOptions};
use tokio::sync::{mpsc, watch};

/// A backend whose network reports the subnets of its peers.
#[derive(Debug)]
struct Reporter(Mutex<Option<mpsc::UnboundedSender<Vec<String>>>>);

#[derive(Debug)]
struct Reports {
    handle: NetworkHandle,
    sender: mpsc::UnboundedSender<Vec<String>>,
}

#[async_trait]
impl Backend for Reporter {
    fn kind(&self) -> &'static str {
        "reporter"
    }

    fn can_move(&self) -> bool {
        false
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
        let sender = self.0.lock().expect("no test panics with it").take().expect("prepared once");
        let offer = Offer::new(node.uplink.public);
        Ok(Prepared::with_network(offer, move |lease| {
            let (_, status) = watch::channel(Arc::new(Status::default()));
            let handle = NetworkHandle::new(lease.lease().clone(), 1500, status);
            Ok(Box::new(Reports { handle, sender }))
        }))
    }
}

#[async_trait]
impl Network for Reports {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    async fn run(self: Box<Self>, mut views: watch::Receiver<View>) -> Result<Ended> {
        loop {
            let view = views.borrow_and_update().clone();
            let subnets = view.leases.iter().map(|lease| lease.subnets.to_string()).collect();
            let _ = self.sender.send(subnets);
            if views.changed().await.is_err() {
                return Ok(Ended::ViewsClosed);
            }
        }
    }
}

fn host(subnets: &FakeSubnets) -> Host {
    let address = [std::net::IpAddr::from([192, 0, 2, 1])].into_iter().collect();
    Host::new(
        ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("the test says so"),
        Arc::new(FakeKernel::with_uplink("eth0")),
        Arc::new(subnets.clone()),
    )
}

#[tokio::test]
async fn a_network_that_runs_itself_gets_the_accepted_peers() {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let attrs = |kind: &'static str, n: u8| {
        let public = [[192, 0, 2, n].into()].into_iter().collect();
        LeaseAttrs::from(Offer::new(public).with_kind(kind))
    };
    let host = host(&subnets);
    let (sender, mut reports) = mpsc::unbounded_channel();
    let backend = Reporter(Mutex::new(Some(sender)));
    let config = subnets.network_config().await.unwrap();
    let network = host.join(&backend, &config, JoinOptions::default()).await.unwrap().network;
    let own = network.handle().lease.subnets;
    assert_eq!(network.handle().lease.attrs.preferred.kind, "reporter", "filled in by the host");
    subnets.put_attrs("10.1.7.0-24", attrs("reporter", 7));
    subnets.put_attrs("10.1.8.0-24", attrs("vxlan", 8));
    subnets.put_attrs("10.1.7.128-25", attrs("reporter", 9));
    let views = subnets.watch_leases().await.unwrap();
    let task = tokio::spawn(network.run(views));
    assert_eq!(reports.recv().await.unwrap(), ["10.1.7.0-24"], "{own} is this node's lease");
    subnets.put_attrs("10.1.8.0-24", attrs("reporter", 8));
    assert_eq!(reports.recv().await.unwrap(), ["10.1.7.0-24", "10.1.8.0-24"]);
    task.abort();
}

/// Refuses every config. `prepare` relies on `validate`.
#[derive(Debug, Default)]
struct Refusing {
    prepared: AtomicBool,
}

#[async_trait]
impl Backend for Refusing {
    fn kind(&self) -> &'static str {
        "refusing"
    }

    fn validate(&self, _: &Config, uplink: Option<&ExternalInterface>) -> Result<()> {
        let uplink = uplink.expect("the host has an interface");
        Err(Error::Backend {
            backend: "refusing".into(),
            reason: format!("not on {}", uplink.name),
        })
    }

    fn datapath(&self, _: &Config) -> Result<Datapath> {
        Ok(Datapath::default())
    }

    fn footprint(&self, _: &Config, _: Option<LinkName>) -> Result<Footprint> {
        Ok(Footprint::default())
    }

    async fn prepare(&self, _: &Node<'_>, _: &Config) -> Result<Prepared> {
        self.prepared.store(true, Ordering::Relaxed);
        Ok(Prepared::new(Offer::default(), |_| Ok(Blueprint::new(1500, |_, _, _, _| Ok(())))))
    }
}

#[tokio::test]
async fn a_config_that_validate_refuses_is_not_prepared() {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let config = subnets.network_config().await.unwrap();
    let host = host(&subnets);
    let backend = Refusing::default();
    let of_join = host.join(&backend, &config, JoinOptions::default()).await.unwrap_err();
    let of_prepare = host.prepare(&backend, &config).await.unwrap_err();
    for error in [of_join, of_prepare] {
        assert_eq!(error.to_string(), "backend refusing: not on eth0");
    }
    assert!(!backend.prepared.load(Ordering::Relaxed));
    // No lease was acquired either.
    let views = subnets.watch_leases().await.unwrap();
    assert!(views.borrow().leases.is_empty());
}
