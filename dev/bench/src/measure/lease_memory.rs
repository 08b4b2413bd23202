//! The memory of the set of all leases: the resident memory with leases, minus the
//! resident memory without them.
//!
//! Another process holds them, so that the writer of the store does not count. It is measured
//! without leases first, so that code and buffers do not count.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use etcd_client::{Client, Txn, TxnOp};
use flannel_core::lease::Origin;
use flannel_subnet::Reflector;
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

use crate::parts::etcd::{Etcd, PREFIX};
use crate::parts::report::Report;

const LIMIT_KIB: u64 = 10 * 1024;
/// The number of keys in one request to etcd.
const BATCH: u32 = 100;

pub(crate) fn run(leases: u32) -> anyhow::Result<Report> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let etcd = Etcd::start().await?;
        fill(&mut etcd.client().await?, leases).await?;
        let me = std::env::current_exe()?;
        let child = Command::new(me)
            .args(["hold-leases", "--endpoint", etcd.endpoint(), "--leases", &leases.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()?;
        anyhow::ensure!(child.status.success(), "the holder failed: {}", child.status);
        let text = String::from_utf8(child.stdout)?;
        let rss = text.trim().parse().with_context(|| format!("no figure in {text:?}"))?;
        let much = (rss > LIMIT_KIB).then(|| format!("{rss} KiB, the limit is {LIMIT_KIB}"));
        Ok(Report {
            nodes: Some(leases),
            rss_kib: Some(rss),
            wrong: much.into_iter().collect(),
            ..Report::default()
        })
    })
}

async fn fill(client: &mut Client, leases: u32) -> anyhow::Result<()> {
    for first in (0..leases).step_by(BATCH as usize) {
        let puts = (first..leases.min(first + BATCH)).map(|n| {
            let [_, a, b, c] = n.to_be_bytes();
            let public = format!("172.{}.{b}.{c}", 16 + a);
            let data = format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:{a:02x}:{b:02x}:{c:02x}"}}"#);
            let value = format!(
                concat!(
                    r#"{{"PublicIP":"{}","PublicIPv6":null,"BackendType":"vxlan","#,
                    r#""BackendData":{}}}"#
                ),
                public, data
            );
            TxnOp::put(format!("{PREFIX}/subnets/10.{b}.{c}.0-24"), value, None)
        });
        client.txn(Txn::new().and_then(puts.collect::<Vec<_>>())).await?;
    }
    Ok(())
}

/// The process that holds the leases. It prints their memory in KiB.
pub(crate) fn hold(endpoint: &str, leases: u32) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let with_prefix = |prefix: &str| EtcdOptions {
            endpoints: vec![endpoint.to_owned()],
            prefix: prefix.to_owned(),
            ..EtcdOptions::default()
        };
        let _none = follow(with_prefix("/none"), 0).await?;
        let before = resident()?;
        let _all = follow(with_prefix(PREFIX), leases).await?;
        println!("{}", resident()?.saturating_sub(before));
        Ok(())
    })
}

async fn follow(options: EtcdOptions, leases: u32) -> anyhow::Result<Reflector> {
    let reflector = Reflector::start(Arc::new(EtcdRegistry::new(options)?));
    let mut views = reflector.views();
    let live = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
    let count = tokio::time::timeout(Duration::from_secs(60), live).await??.leases.len();
    anyhow::ensure!(count == leases as usize, "{count} leases of {leases}");
    Ok(reflector)
}

fn resident() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let figure = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
    figure.context("no VmRSS in /proc/self/status")
}
