//! The trait of a store of leases, and the stores without a server.
//!
//! All writes are conditional. A key is created only if it does not exist, and replaced or deleted
//! only at the revision that was read.

mod dir;
mod history;
mod memory;
mod metered;
mod skipped;
mod values;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::backoff::FailurePauses;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::subnet::{StoreKind, StoreReason};
use flannel_core::{Error, Result, Subnets};

pub use dir::{Assign, DirLocation, DirOptions, DirRegistry, LocationError};
pub use memory::MemoryRegistry;
pub(crate) use metered::{Metered, unanswered};
pub use values::{
    Batch, ConfigText, Entry, Event, HolderId, HolderIdError, LeaseGrant, LeaseList, MOST_SKIPPED,
    Now, SkipReason, Skipped, value_to_write,
};

/// A store of leases. `Display` is its name, such as `dir:/var/lib/flannel`.
///
/// Implementations: [`MemoryRegistry`], [`DirRegistry`], and `EtcdRegistry` of the crate
/// `flannel-subnet-etcd`. `testing::registry_suite` (feature `testing`) checks one.
///
/// # For implementers
/// - **Keys.** A key is the text of [`Subnets`], its value is [`LeaseAttrs::to_json`]. The store
///   compares keys as text and may not know that two keys overlap.
/// - **Size.** A value that is larger than [`LARGEST_VALUE`] is skipped as
///   [`SkipReason::TooLarge`], and makes no list and no watch fail. [`value_to_write`] refuses to
///   write one.
/// - **Order.** Each write is atomic for all clients. If several writers create one key, or replace
///   it at one revision, exactly one succeeds. After a write has returned, [`list`](Self::list) and
///   [`entry`](Self::entry) show it to every client.
/// - **Revisions.** [`LeaseList::revision`] and [`Batch::revision`] count the changes of the whole
///   store and never decrease while the store keeps its data. [`Lease::revision`] differs for two
///   values of one key. [`Lease::since`] orders leases by their creation, or is 0 for all.
/// - **Time.** A key with a [`LeaseGrant`] is deleted, as a change that watches report, when its
///   holder has not renewed for the time to live. It must not be deleted earlier, counted from the
///   moment at which the request was sent. Renewals are not changes.
/// - **Errors.** Any request fails with [`Error::Refused`] if only an operator can help, and with
///   [`Error::Store`] if the store does not answer. The caller repeats it later.
///   [`Error::Conflict`] is an answer of the store. A registry that repeats a write whose answer
///   was lost must also check whether the write was carried out.
/// - **Time limits.** Each request except for [`config_changed`](Self::config_changed) and
///   [`Watch::next`] ends within seconds, with an error if necessary: a holder has to learn in time
///   whether its lease was renewed.
/// - **Cancel safety.** A caller may drop any future at any time. A write was then carried out or
///   not, and the caller reads to find out. A wait ([`config_changed`](Self::config_changed),
///   [`Watch::next`]) loses nothing.
///
/// [`LARGEST_VALUE`]: flannel_core::lease::LARGEST_VALUE
/// [`Lease::revision`]: flannel_core::Lease::revision
/// [`Lease::since`]: flannel_core::Lease::since
#[doc = include_str!("../docs/registry.md")]
#[async_trait]
pub trait Registry: fmt::Debug + fmt::Display + Send + Sync {
    /// The text of the network config.
    ///
    /// # Errors
    /// [`Error::NoConfig`], besides the errors of any request.
    async fn config(&self) -> Result<ConfigText>;

    /// Writes the network config if the store still has `known`, or has no config if `known` is
    /// `None`. The text is not checked. The default implementation refuses.
    ///
    /// # Errors
    /// [`config_conflict`] if the store holds another config.
    async fn write_config(&self, _known: Option<&ConfigText>, _text: &str) -> Result<()> {
        Err(Error::Refused {
            store: self.to_string(),
            reason: "its network config is written elsewhere".into(),
        })
    }

    /// Waits until the text of the config differs from `known`. `None` stands for a store without a
    /// config. The text may be incomplete while it is edited in place.
    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()>;

    /// All leases. An unreadable key is reported in [`LeaseList::skipped`] and is not an error.
    async fn list(&self) -> Result<LeaseList>;

    /// The lease with exactly these subnets, or `None` if the store has no such lease.
    ///
    /// # Errors
    /// [`Error::Store`] if the value of the key cannot be read, besides the errors of any request.
    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>>;

    /// Writes a lease if its key does not exist. Without `grant` it is a reservation.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key exists, even if it is unreadable.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry>;

    /// Writes a lease as [`create`](Self::create) does. If the key exists, it returns the current
    /// leases as an inner `Err`. The default implementation uses two requests. A store that can do
    /// it in one request should.
    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, LeaseList>> {
        match self.create(subnets, attrs, grant).await {
            Err(Error::Conflict { .. }) => self.list().await.map(Err),
            created => created.map(Ok),
        }
    }

    /// Replaces the lease at revision `at`, with its holder and time to live. `since` stays. A
    /// store that derives revisions from the content may keep the revision if the content is equal.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key has another revision or does not exist.
    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry>;

    /// Deletes the lease at revision `at`. Its holder stays known to the store.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key has another revision or does not exist.
    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()>;

    /// Renews the keys of `holder`. `subnets` names its key, for a store that renews single keys. A
    /// renewal is not a change for watches. Returns the time for which the keys are kept from now
    /// on, or `None` if the store has forgotten the holder and deleted its keys. A store does not
    /// forget a holder whose key was deleted.
    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>>;

    /// The time for which the store keeps the key of this holder from now on without a renewal.
    /// Returns `None` if the store has no such key, or does not know the time, as by default. This
    /// renews nothing.
    async fn remaining(&self, _: &Subnets, _: HolderId) -> Result<Option<Duration>> {
        Ok(None)
    }

    /// The kind of the store. The default implementation has none that programs know.
    fn kind(&self) -> StoreKind {
        StoreKind::Other
    }

    /// Why a request is being retried, or `None`.
    fn trouble(&self) -> Option<StoreReason> {
        None
    }

    /// The pauses after which failed lists and watches are repeated. The default suits a store of
    /// this machine. A server that many nodes share needs longer pauses.
    fn failure_pauses(&self) -> FailurePauses {
        FailurePauses::of_local_store()
    }

    /// The changes after the revision `after` of a [`list`](Self::list), without a gap.
    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>>;
}

/// The changes of a store, in order.
#[doc = include_str!("../docs/watch.md")]
#[async_trait]
pub trait Watch: Send {
    /// Waits for the next changes and returns all known changes as a batch. Returns `None` if some
    /// changes were missed. The caller must then list and watch again. Renewals are not changes. An
    /// empty batch confirms that the store answers and nothing changed.
    ///
    /// # Errors
    /// The store does not answer. The watch is unusable.
    async fn next(&mut self) -> Result<Option<Batch>>;
}

/// The error of [`Registry::write_config`] if the store has another config than the caller read.
pub fn config_conflict(store: &dyn fmt::Display) -> Error {
    Error::Refused {
        store: store.to_string(),
        reason: "another writer has changed the network config meanwhile: check it and try again"
            .into(),
    }
}
