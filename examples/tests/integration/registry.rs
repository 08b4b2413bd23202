//! A registry that no other crate knows: the lease engine's suite, and two whole daemons on it in
//! one process, with the backend of this crate.

use std::sync::Arc;
use std::time::Duration;

use examples::Lane;
use examples::Printing;
use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab};
use flannel_subnet::testing::{Fixture, registry_suite};
use flannel_subnet::{MemoryRegistry, Registry};
use flanneld::{Daemon, DaemonConfig, MasqueradedFamilies, StoreConfig};
use tokio::sync::oneshot;

const PATIENCE: Duration = Duration::from_secs(60);

/// The registry of the example `custom_registry` passes the suite that the project's own registries
/// pass.
#[tokio::test(start_paused = true)]
async fn the_registry_of_the_example_passes_the_suite() {
    let store = MemoryRegistry::new();
    registry_suite(&Fixture {
        registry: Arc::new(Printing(store.clone())),
        other: Arc::new(Printing(store.clone())),
        put_raw: &|key, value| store.put_raw(key, value, None),
        put_config: &|text| store.set_config(Some(text)),
    })
    .await;
}

/// The config of a daemon, without a command line or environment.
fn config(host: &Host, registry: Arc<dyn Registry>) -> DaemonConfig {
    let mut config = DaemonConfig::new(StoreConfig::Registry(registry));
    config.backends = config.backends.with(Arc::new(Lane));
    config.interface.iface = vec!["eth0".into()];
    config.subnet_file = host.subnet_file();
    config.state_dir = host.dir().join("state");
    config.firewall.masquerade = MasqueradedFamilies::Both;
    config
}

/// Runs a daemon until `stopped`. It must be ready then.
fn run(host: &Host, registry: Arc<dyn Registry>, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let daemon = Daemon::new(config(host, registry));
        let ready = async {
            let _ = stopped.await;
            tokio::time::timeout(PATIENCE, daemon.ready()).await.unwrap();
        };
        tokio::select! {
            ended = daemon.run() => panic!("{}: {ended:?}", host.name()),
            () = ready => {}
        }
    });
}

/// Two daemons in this process share a registry in its memory, and their pods reach each other.
#[test]
fn daemons_run_on_a_custom_registry() {
    as_root(|| {
        let network = r#"{"Network":"10.244.0.0/16",
            "EnableIPv6":true,"IPv6Network":"fd00:10:244::/48",
            "EnableNFTables":true,"Backend":{"Type":"lane","Lane":9}}"#;
        let store = MemoryRegistry::with_config(network);
        let lab = Lab::builder().hosts(2).families(Family::BOTH).start().unwrap();
        let mut stops = Vec::new();
        std::thread::scope(|scope| {
            for host in lab.hosts() {
                let (stop, stopped) = oneshot::channel::<()>();
                stops.push(stop);
                let registry: Arc<dyn Registry> = Arc::new(Printing(store.clone()));
                // A daemon runs in the network namespace of its thread.
                scope.spawn(move || host.namespace().run(|| run(host, registry, stopped)).unwrap());
            }
            let reached = lab.wait_until_reachable(PATIENCE);
            // Ends the daemons, so that the scope ends also after a failure.
            drop(stops);
            let matrix = reached.unwrap();
            assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
            assert_eq!(matrix.pairs.len(), 4, "both ways, by both families");
        });
        // The data path stays, and each host has its own lease.
        assert!(lab.matrix(PATIENCE).unwrap().is_complete());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let entries = runtime.block_on(store.list()).unwrap().entries;
        assert_eq!(entries.len(), 2);
        assert!(entries.iter().all(|entry| entry.lease.attrs.preferred.kind == "lane/1"));
    });
}
