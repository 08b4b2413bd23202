//! The whole daemon in your own program, from typed values: no command line, no environment.

use flannel_subnet::{DirLocation, DirOptions};
use flanneld::{Daemon, DaemonConfig, StoreConfig};

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(embed)
}

async fn embed() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(
        dir.path().join("config"),
        r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "vxlan"}}"#,
    )?;
    let store = DirLocation { path: dir.path().to_owned(), options: DirOptions::default() };

    let mut config = DaemonConfig::new(StoreConfig::Directory(store));
    config.interface.iface = vec!["eth0".into()];
    config.subnet_file = dir.path().join("subnet.env");
    config.state_dir = dir.path().join("state");
    config.firewall.forward = false;

    let daemon = Daemon::new(config);
    // Dropping `run` stops the daemon and leaves the data path in place.
    tokio::select! {
        ended = daemon.run() => ended.map(|never| match never {})?,
        () = daemon.ready() => {}
    }
    let network = daemon.status().network;
    println!(
        "ready: {}",
        std::fs::read_to_string(dir.path().join("subnet.env"))?.replace('\n', " ")
    );
    anyhow::ensure!(network.is_none(), "the network ends with run");
    Ok(())
}
