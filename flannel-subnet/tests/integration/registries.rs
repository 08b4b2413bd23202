//! Every registry passes the same suite.

use std::fs;
use std::sync::Arc;

use flannel_subnet::testing::{Fixture, registry_suite};
use flannel_subnet::{DirOptions, DirRegistry, MemoryRegistry};

#[tokio::test(start_paused = true)]
async fn memory_registry_passes_the_suite() {
    let registry = MemoryRegistry::new();
    registry_suite(&Fixture {
        registry: Arc::new(registry.clone()),
        other: Arc::new(registry.clone()),
        put_raw: &|key, value| registry.put_raw(key, value, None),
        put_config: &|text| registry.set_config(Some(text)),
    })
    .await;
}

#[tokio::test]
async fn dir_registry_passes_the_suite() {
    dir_suite().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dir_registry_passes_the_suite_on_many_threads() {
    dir_suite().await;
}

async fn dir_suite() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("net");
    let registry = DirRegistry::open(&path, DirOptions::default()).await.unwrap();
    let other = DirRegistry::open(&path, DirOptions::default()).await.unwrap();
    registry_suite(&Fixture {
        registry: Arc::new(registry),
        other: Arc::new(other),
        put_raw: &|key, value| fs::write(path.join("subnets").join(key), value).unwrap(),
        put_config: &|text| fs::write(path.join("config"), text).unwrap(),
    })
    .await;
}
