//! Stand-ins for the store and the secrets of this node during a trial.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use flannel_core::backend::{MakeSecret, Secrets};
use flannel_core::lease::{LeaseAttrs, View};
use flannel_core::object::Secret;
use flannel_core::subnet::{Hints, LeaseEnd, Ownership, StoreStatus};
use flannel_core::{Config, Lease, SubnetManager};
use flannel_options::FileSecrets;
use tokio::sync::watch;

/// The store as this node knows it, so that a repeated trial sends it no request.
#[derive(Debug)]
pub(in crate::run) struct KnownStore {
    pub(in crate::run) subnets: Arc<dyn SubnetManager>,
    /// The hints of the last start.
    pub(in crate::run) hints: Hints,
}

#[async_trait]
impl SubnetManager for KnownStore {
    async fn network_config(&self) -> flannel_core::Result<Config> {
        self.subnets.network_config().await
    }

    fn use_config(&self, config: &Config) {
        self.subnets.use_config(config);
    }

    async fn hints(&self) -> flannel_core::Result<Hints> {
        Ok(self.hints.clone())
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
        self.subnets.acquire_lease(attrs).await
    }

    fn publishes_attrs(&self) -> bool {
        self.subnets.publishes_attrs()
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> flannel_core::Result<Lease> {
        self.subnets.publish(held, attrs).await
    }

    async fn hold_lease(&self, held: &Lease) -> flannel_core::Result<LeaseEnd> {
        self.subnets.hold_lease(held).await
    }

    async fn watch_leases(&self) -> flannel_core::Result<watch::Receiver<View>> {
        self.subnets.watch_leases().await
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.subnets.ownership()
    }

    fn store_status(&self) -> StoreStatus {
        self.subnets.store_status()
    }
}

/// The secrets of this node, without storing a new one.
#[derive(Debug)]
pub(in crate::run) struct UnsavedSecrets(pub(in crate::run) FileSecrets);

#[async_trait]
impl Secrets for UnsavedSecrets {
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret> {
        let is_missing = AtomicBool::new(false);
        let none = || {
            is_missing.store(true, Ordering::Relaxed);
            Err(io::Error::from(io::ErrorKind::NotFound))
        };
        match self.0.get_or_create(name, &none).await {
            Err(_) if is_missing.load(Ordering::Relaxed) => make(),
            stored => stored,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_question_stores_no_secret_and_reads_those_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        let files = || FileSecrets::new(dir.path());
        let unsaved = UnsavedSecrets(files());
        let make = |byte: u8| move || Ok(Secret::new([byte; 32]));
        let made = unsaved.get_or_create("wireguard", &make(7)).await.unwrap();
        assert_eq!(made.expose(), [7; 32]);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        files().get_or_create("wireguard", &make(8)).await.unwrap();
        let read = unsaved.get_or_create("wireguard", &make(9)).await.unwrap();
        assert_eq!(read.expose(), [8; 32]);
    }
}
