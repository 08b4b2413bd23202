//! A custom registry: it forwards each request to another one, and prints the writes.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs as Attrs, Revision};
use flannel_core::{Result, Subnets};
use flannel_subnet::{ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch};

/// The registry `R`, with writes on standard output.
#[derive(Debug, Clone)]
pub struct Printing<R>(pub R);

impl<R: Registry> fmt::Display for Printing<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

type Grant = Option<LeaseGrant>;

#[async_trait]
impl<R: Registry> Registry for Printing<R> {
    async fn config(&self) -> Result<ConfigText> {
        self.0.config().await
    }
    async fn write_config(&self, seen: Option<&ConfigText>, text: &str) -> Result<()> {
        println!("config {text}");
        self.0.write_config(seen, text).await
    }
    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()> {
        self.0.config_changed(seen).await
    }
    async fn list(&self) -> Result<LeaseList> {
        self.0.list().await
    }
    async fn entry(&self, key: &Subnets) -> Result<Option<Entry>> {
        self.0.entry(key).await
    }
    async fn create(&self, key: &Subnets, attrs: &Attrs, grant: Grant) -> Result<Entry> {
        println!("create {key}");
        self.0.create(key, attrs, grant).await
    }
    async fn update(&self, key: &Subnets, at: Revision, to: &Attrs, by: Grant) -> Result<Entry> {
        println!("update {key}");
        self.0.update(key, at, to, by).await
    }
    async fn delete(&self, key: &Subnets, at: Revision) -> Result<()> {
        println!("delete {key}");
        self.0.delete(key, at).await
    }
    async fn keep_alive(&self, key: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.0.keep_alive(key, holder).await
    }
    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        self.0.watch(after).await
    }
}
