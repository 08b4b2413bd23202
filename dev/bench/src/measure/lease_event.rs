//! The time from a put in etcd to our set of leases, and to a plain watch of etcd in the same run.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use etcd_client::WatchOptions;
use flannel_core::Subnets;
use flannel_core::lease::Origin;
use flannel_subnet::Reflector;
use tokio::time::timeout;

use crate::parts::etcd::{Etcd, PREFIX};
use crate::parts::report::{Report, percentile};

const P99_MS: f64 = 5.0;
const RATIO: f64 = 1.5;
const VALUE: &str = concat!(
    r#"{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"vxlan","#,
    r#""BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#
);

/// The timeout of an event.
const LIMIT: Duration = Duration::from_secs(10);

pub(crate) fn run(events: u32) -> anyhow::Result<Report> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(measure(events))
}

async fn measure(events: u32) -> anyhow::Result<Report> {
    let etcd = Etcd::start().await?;
    let reflector = Reflector::start(Arc::new(etcd.registry()?));
    let mut views = reflector.views();
    views.wait_for(|view| matches!(view.origin, Origin::Live { .. })).await?;
    let options = WatchOptions::new().with_prefix();
    let mut plain = etcd.client().await?.watch(format!("{PREFIX}/subnets/"), Some(options)).await?;
    plain.message().await?.context("no watch")?;
    let mut writer = etcd.client().await?;
    let mut ours = Vec::new();
    let mut theirs = Vec::new();
    // The first ones warm up.
    for n in 0..events + 50 {
        let text = format!("10.{}.{}.0-24", n >> 8 & 255, n & 255);
        let subnets: Subnets = text.parse()?;
        let begin = Instant::now();
        let put = writer.put(format!("{PREFIX}/subnets/{text}"), VALUE, None);
        let view = async {
            drop(views.wait_for(|view| view.leases.get(&subnets).is_some()).await?);
            anyhow::Ok(begin.elapsed())
        };
        let watch = async {
            let message = plain.message().await?.context("the plain watch ended")?;
            anyhow::ensure!(!message.events().is_empty(), "not an event");
            Ok(begin.elapsed())
        };
        // The order alternates, so that neither is always first.
        let both = async {
            if n % 2 == 0 {
                let (put, view, watch) = tokio::join!(biased; put, view, watch);
                anyhow::Ok((put?, view?, watch?))
            } else {
                let (put, watch, view) = tokio::join!(biased; put, watch, view);
                anyhow::Ok((put?, view?, watch?))
            }
        };
        let (_, view, watch) = timeout(LIMIT, both).await.context("an event was lost")??;
        if n >= 50 {
            ours.push(view.as_secs_f64() * 1e3);
            theirs.push(watch.as_secs_f64() * 1e3);
        }
    }
    let p50 = percentile(&ours, 50);
    let p99 = percentile(&ours, 99);
    let floor = percentile(&theirs, 50);
    let mut report = Report {
        events: Some(events),
        p50_ms: Some(p50),
        p99_ms: Some(p99),
        floor_p50_ms: Some(floor),
        floor_p99_ms: Some(percentile(&theirs, 99)),
        ratio: Some(p50 / floor),
        ..Report::default()
    };
    report.at_most("p99_ms", report.p99_ms, P99_MS);
    report.at_most("ratio", report.ratio, RATIO);
    Ok(report)
}
