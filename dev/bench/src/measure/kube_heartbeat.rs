//! The processor time for heartbeats of kubelets: the thread that watches all nodes, against a
//! thread that skips the same bytes in the same run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::SubnetManager;
use flannel_subnet_kube::testing::ApiServer;
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::de::IgnoredAny;
use tokio::sync::oneshot;

use crate::measure::kube::{fill, follow};
use crate::parts::report::{Report, median};

const RATE: u32 = 1000;
const RATIO: f64 = 1.5;
/// The number of rounds, one after the other.
const ROUNDS: u32 = 5;
/// The timeout of each step.
const PATIENCE: Duration = Duration::from_secs(60);

/// A thread whose processor time can be read.
struct Worker {
    task: String,
    /// The latest resource version that it has read.
    version: Arc<AtomicU64>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<anyhow::Result<()>>>,
}

impl Worker {
    fn start<F>(
        work: impl FnOnce(Arc<AtomicU64>, oneshot::Receiver<()>) -> F + Send + 'static,
    ) -> anyhow::Result<Self>
    where
        F: Future<Output = anyhow::Result<()>>,
    {
        let version = Arc::<AtomicU64>::default();
        let (stop, stopped) = oneshot::channel();
        let (sender, receiver) = mpsc::channel();
        let shared = Arc::clone(&version);
        let thread = std::thread::spawn(move || {
            let task = std::fs::read_link("/proc/thread-self")?;
            sender.send(task)?;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(work(shared, stopped))
        });
        let task = format!("/proc/{}", receiver.recv()?.display());
        Ok(Self { task, version, stop: Some(stop), thread: Some(thread) })
    }

    /// Its processor time so far, in seconds.
    fn processor_time(&self) -> anyhow::Result<f64> {
        let text = std::fs::read_to_string(format!("{}/schedstat", self.task))?;
        let nanoseconds: f64 = text.split(' ').next().context("no figure")?.parse()?;
        Ok(nanoseconds / 1e9)
    }

    async fn reaches(&self, version: u64) -> anyhow::Result<()> {
        let begin = Instant::now();
        while self.version.load(Ordering::Relaxed) < version {
            ensure!(
                begin.elapsed() < PATIENCE,
                "it does not reach version {version}: {}",
                self.version.load(Ordering::Relaxed)
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Reads a watch, and skips its content.
async fn skip(
    url: String,
    from: u64,
    version: Arc<AtomicU64>,
    stop: oneshot::Receiver<()>,
) -> anyhow::Result<()> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let query =
        format!("watch=true&allowWatchBookmarks=true&timeoutSeconds=600&resourceVersion={from}");
    let request =
        http::Request::get(format!("{url}/api/v1/nodes?{query}")).body(Empty::<Bytes>::new())?;
    let mut body = client.request(request).await?.into_body();
    let mut held = Vec::new();
    version.store(from, Ordering::Relaxed);
    let skip = async {
        while let Some(frame) = body.frame().await {
            let Ok(bytes) = frame?.into_data() else { continue };
            let mut rest = &bytes[..];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let line = &rest[..end];
                let behind = &rest[end + 1..];
                rest = behind;
                // A complete line is decoded in place, as a daemon does.
                let line = if held.is_empty() {
                    line
                } else {
                    held.extend_from_slice(line);
                    &held
                };
                serde_json::from_slice::<IgnoredAny>(line)?;
                held.clear();
                version.fetch_add(1, Ordering::Relaxed);
            }
            held.extend_from_slice(rest);
        }
        anyhow::Ok(())
    };
    tokio::select! {
        ended = skip => ended,
        _ = stop => Ok(()),
    }
}

pub(crate) fn run(nodes: u32, seconds: u64) -> anyhow::Result<Report> {
    let server = ApiServer::new();
    fill(&server, nodes);
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(measure(&server, nodes, seconds))
}

async fn measure(server: &ApiServer, nodes: u32, seconds: u64) -> anyhow::Result<Report> {
    let dir = tempfile::tempdir()?;
    let (manager, views) = follow(&server.url(), dir.path(), nodes).await?;
    let begin = manager.store_status().confirmed.context("nothing confirmed")?.revision.0;
    drop((manager, views));
    let url = server.url();
    let here = dir.path().to_owned();
    let floor = Worker::start(move |version, stop| skip(url, begin, version, stop))?;
    floor.reaches(begin).await?;
    let ours = follower(server.url(), here, nodes)?;
    ours.reaches(begin).await?;
    let mut ratios = Vec::new();
    let mut own = Vec::new();
    let mut skipped = Vec::new();
    let mut version = begin;
    for _ in 0..ROUNDS {
        let before = (ours.processor_time()?, floor.processor_time()?);
        let count = RATE * u32::try_from(seconds)?;
        let mut pace = tokio::time::interval(Duration::from_secs(1) / RATE);
        for n in 0..count {
            pace.tick().await;
            server.heartbeat(&format!("node-{}", 2 + n % nodes));
        }
        version += u64::from(count);
        ours.reaches(version).await?;
        floor.reaches(version).await?;
        let a = ours.processor_time()? - before.0;
        let b = floor.processor_time()? - before.1;
        own.push(a);
        skipped.push(b);
        ratios.push(a / b);
    }
    let mut report = Report {
        nodes: Some(nodes),
        events: Some(RATE * u32::try_from(seconds)? * ROUNDS),
        seconds: Some(median(own)),
        floor_seconds: Some(median(skipped)),
        ratio: Some(median(ratios)),
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    Ok(report)
}

/// Follows all nodes as a daemon does, and fails if the set of leases changes.
fn follower(url: String, dir: std::path::PathBuf, nodes: u32) -> anyhow::Result<Worker> {
    Worker::start(move |version, mut stop| async move {
        let (manager, mut views) = follow(&url, &dir, nodes).await?;
        views.mark_unchanged();
        let look = async {
            let mut pace = tokio::time::interval(Duration::from_millis(20));
            loop {
                pace.tick().await;
                if views.has_changed()? {
                    anyhow::bail!("a heartbeat changed the set of leases");
                }
                let confirmed = manager.store_status().confirmed.context("nothing confirmed")?;
                version.store(confirmed.revision.0, Ordering::Relaxed);
            }
        };
        tokio::select! {
            ended = look => {
                // The thread ends, and a wait for a version fails.
                version.store(0, Ordering::Relaxed);
                ended
            }
            _ = &mut stop => Ok(()),
        }
    })
}
