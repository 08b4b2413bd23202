//! Both engines in one process, without the daemon: leases from a directory, vxlan in the kernel.

use std::sync::Arc;

use flannel_backend_vxlan::VxlanBackend;
use flannel_core::SubnetManager;
use flannel_core::address::Family;
use flannel_core::lease::LeaseAttrs;
use flannel_netlink::{NetlinkKernel, iface::Selectors};
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{DirOptions, DirRegistry, HolderId, Identity, LocalManager, Registry};

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(embed)
}

async fn embed() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(
        dir.path().join("config"),
        r#"{"Network": "10.1.0.0/16", "Backend": {"Type": "vxlan"}}"#,
    )?;
    let registry = Arc::new(DirRegistry::open(dir.path(), DirOptions::default()).await?);
    let peer = r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan",
        "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:07"}}"#;
    registry.create(&"10.1.7.0-24".parse()?, &LeaseAttrs::from_json(peer)?, None).await?;

    let identity =
        Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
    let subnets: Arc<dyn SubnetManager> = Arc::new(LocalManager::new(registry, identity));
    let kernel = Arc::new(NetlinkKernel::open()?);
    let selectors = Selectors { iface: vec!["eth0".into()], ..Selectors::default() };
    let iface = kernel.external_interface(&selectors, [Family::V4])?;
    let host = Host::new(iface, kernel, subnets.clone()).with_machine_id("example");

    let network = host
        .join(&VxlanBackend, &subnets.network_config().await?, JoinOptions::default())
        .await?
        .network;
    let handle = network.handle();
    let mut status = handle.status.clone();
    tokio::select! {
        ended = network.run(subnets.watch_leases().await?) => {
            anyhow::bail!("the network ended: {ended:?}")
        }
        end = subnets.hold_lease(&handle.lease) => anyhow::bail!("the lease ended: {end:?}"),
        synced = status.wait_for(|status| status.in_sync && status.peers == 1) => drop(synced?),
    }
    println!(
        "own subnet {}, MTU {}, {} peer in the kernel",
        handle.lease.subnets,
        handle.mtu,
        status.borrow().peers
    );
    Ok(())
}
