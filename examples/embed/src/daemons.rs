//! Two daemons with two networks in one process.

use std::path::Path;

use flannel_subnet::{DirLocation, DirOptions};
use flanneld::{Daemon, DaemonConfig, StoreConfig};
use tokio::sync::oneshot;

/// A daemon with all its files in `dir`.
fn daemon(dir: &Path, network: &str) -> anyhow::Result<Daemon> {
    let path = dir.join("network");
    std::fs::create_dir_all(&path)?;
    std::fs::write(path.join("config"), network)?;
    let store = DirLocation { path, options: DirOptions::default() };
    let mut config = DaemonConfig::new(StoreConfig::Directory(store));
    config.interface.iface = vec!["eth0".into()];
    config.subnet_file = dir.join("subnet.env");
    config.state_dir = dir.join("state");
    config.firewall.forward = false;
    Ok(Daemon::new(config))
}

/// Runs two networks until both are ready, then ends both in order.
pub async fn two(dir: &Path) -> anyhow::Result<()> {
    let vxlan = |n: u8| {
        format!(r#"{{"Network": "10.{n}.0.0/16", "Backend": {{"Type": "vxlan", "VNI": {n}}}}}"#)
    };
    let first = daemon(&dir.join("first"), &vxlan(1))?;
    let second = daemon(&dir.join("second"), &vxlan(2))?;
    let (stop_first, first_stopped) = oneshot::channel::<()>();
    let (stop_second, second_stopped) = oneshot::channel::<()>();
    let both_ready = async {
        first.ready().await;
        second.ready().await;
        for daemon in [&first, &second] {
            let network = daemon.status().network;
            println!("ready: {:?}", network.map(|network| network.lease));
        }
        drop(stop_first);
        drop(stop_second);
        Ok(())
    };
    let (first, second, ()) = tokio::try_join!(
        first.run_until(first_stopped),
        second.run_until(second_stopped),
        both_ready,
    )?;
    anyhow::ensure!(first.is_err() && second.is_err(), "each channel was closed");
    println!("ended");
    Ok(())
}
