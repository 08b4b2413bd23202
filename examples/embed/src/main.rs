//! A program that embeds parts of flannel. It changes the network namespace that it runs in, and
//! expects an uplink `eth0` there.

mod backend;
mod daemons;
mod leases;
mod network;

use std::path::Path;

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["leases", endpoint, ca] => leases::on_etcd(endpoint, Path::new(ca)).await,
        ["routes"] => backend::routes().await,
        ["itself"] => network::itself().await,
        ["daemons", dir] => daemons::two(Path::new(dir)).await,
        _ => anyhow::bail!("expected leases ENDPOINT CA, routes, itself, or daemons DIR"),
    }
}
