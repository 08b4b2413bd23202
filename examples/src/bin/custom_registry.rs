//! The whole daemon on a custom registry, [`Printing`].

use std::sync::Arc;

use examples::Printing;
use flannel_subnet::{MemoryRegistry, Registry};
use flanneld::{Daemon, DaemonConfig, StoreConfig};

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(embed)
}

async fn embed() -> anyhow::Result<()> {
    let network = r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "host-gw"}}"#;
    let registry = Arc::new(Printing(MemoryRegistry::with_config(network)));

    let dir = tempfile::tempdir()?;
    let mut config = DaemonConfig::new(StoreConfig::Registry(registry.clone()));
    config.interface.iface = vec!["eth0".into()];
    config.subnet_file = dir.path().join("subnet.env");
    config.state_dir = dir.path().join("state");
    config.firewall.forward = false;

    let daemon = Daemon::new(config);
    tokio::select! {
        ended = daemon.run() => ended.map(|never| match never {})?,
        () = daemon.ready() => {}
    }
    println!("ready, with {} lease in {registry}", registry.list().await?.entries.len());
    Ok(())
}
