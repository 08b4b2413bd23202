//! The store of leases, reduced to what the lease engine needs of it.
//!
//! Nothing is ever written blindly. A key is created only where there is none, and
//! replaced or deleted only at the revision that was read.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Lease, Result, Subnets};

/// Identifies a holder of leases: two nodes with one public address have different IDs.
///
/// A node chooses its ID at random once and keeps it in its state directory. `Display` and `FromStr` are 16
/// hexadecimal digits. In etcd it is the ID of the store's lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId(pub u64);

impl HolderId {
    /// A new ID: from 1 to 2^63 - 1, which is what etcd takes as the ID of a lease.
    pub fn random() -> Self {
        Self(fastrand::u64(1..=i64::MAX as u64))
    }
}

/// The error of [`Registry::write_config`] where the config is not the one that its writer has read.
pub fn config_conflict(store: &dyn fmt::Display) -> Error {
    Error::Refused {
        store: store.to_string(),
        reason: "somebody else has written the network config meanwhile: look at it and try again"
            .into(),
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A text is not a [`HolderId`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a holder ID: 1 to 16 hexadecimal digits")]
pub struct HolderIdError {
    /// The text.
    pub text: String,
}

impl FromStr for HolderId {
    type Err = HolderIdError;
    fn from_str(text: &str) -> Result<Self, HolderIdError> {
        let digits = (1..=16).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
        let holder = digits.then(|| u64::from_str_radix(text, 16).ok()).flatten();
        holder.map(Self).ok_or_else(|| HolderIdError { text: text.to_owned() })
    }
}

/// To whom a key is granted, and for how long unless it is renewed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseGrant {
    /// The holder.
    pub holder: HolderId,
    /// How long the store keeps the key after it was written or renewed. Stores count whole seconds, at least 1.
    pub ttl: Duration,
}

/// A lease as a store holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The lease; its `expires` is always `None`. Shared, so that who keeps it keeps no copy of it.
    pub lease: Arc<Lease>,
    /// Who holds it; `None` for a reservation, which never expires.
    pub holder: Option<HolderId>,
}

/// Something in the store that is no lease, or not a readable one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its key, without what all keys have in front.
    pub key: String,
    /// Why it was skipped.
    pub reason: String,
    /// What [`Registry::update`] takes to replace it; 0 in stores that have no revision of it.
    pub revision: Revision,
}

/// Everything that a store holds at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Listing {
    /// The leases.
    pub entries: Vec<Entry>,
    /// What was skipped. A store that remembers the last good value of an unreadable key (a directory does)
    /// lists that key here and in `entries`.
    pub skipped: Vec<Skipped>,
    /// The moment: what [`Registry::watch`] goes on from.
    pub revision: Revision,
}

/// What became of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The key, without what all keys have in front.
    pub key: String,
    /// What it holds now.
    pub now: Now,
}

/// What a key holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Now {
    /// A lease.
    Held(Entry),
    /// Something that cannot be read, and why. No reason to forget what it held before.
    Unreadable(String),
    /// Nothing.
    Gone,
}

/// Some changes, in the order in which they happened; of several to one key, only the last need be there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// The changes; empty to confirm only that nothing happened up to `revision`.
    pub events: Vec<Event>,
    /// The store's revision after them.
    pub revision: Revision,
}

/// Changes as they come.
#[async_trait]
pub trait Watch: Send {
    /// Waits for the next changes and returns all that are there, or `None` if some were missed: list again,
    /// then watch again. Renewals are no changes. A batch of none says that the store answers, and nothing changed.
    ///
    /// # Errors
    /// The store is out of reach; the watch is of no more use.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    async fn next(&mut self) -> Result<Option<Batch>>;
}

/// The text of a network config and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigText {
    /// The file or key, for messages.
    pub location: String,
    /// The text, not checked in any way.
    pub text: String,
}

/// A store of leases. `Display` is its name, such as `dir:/var/lib/flannel`.
///
/// Implementations: [`MemoryRegistry`](crate::MemoryRegistry), [`DirRegistry`](crate::DirRegistry), and
/// `EtcdRegistry` of the crate `flannel-subnet-etcd`. What each must do is `testing::registry_suite` (feature `testing`). Requests end in bounded time, with an error if
/// need be: whoever holds a lease counts on it.
///
/// ```
/// use flannel_subnet::{MemoryRegistry, Registry};
///
/// /// How many of the leases never expire.
/// async fn reservations(registry: &dyn Registry) -> flannel_core::Result<usize> {
///     let listing = registry.list().await?;
///     Ok(listing.entries.iter().filter(|entry| entry.holder.is_none()).count())
/// }
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let registry = MemoryRegistry::new();
/// registry.create(&"10.1.5.0-24".parse()?, &Default::default(), None).await?;
/// assert_eq!(reservations(&registry).await?, 1);
/// # Ok::<(), flannel_core::Error>(())
/// # }).unwrap();
/// ```
#[async_trait]
pub trait Registry: fmt::Debug + fmt::Display + Send + Sync {
    /// The network config's text.
    ///
    /// # Errors
    /// [`Error::NoConfig`], or the store is out of reach.
    async fn config(&self) -> Result<ConfigText>;

    /// Writes the network config if the store still holds what was `seen` (`None`: there was none). The text is not checked
    /// in any way.
    ///
    /// # Errors
    /// [`Error::Refused`]: somebody else has written meanwhile, or this store's config is written elsewhere, which
    /// is what this does unless implemented; or the store is out of reach.
    ///
    /// # Cancel safety
    /// Dropped half-way, the config may have been written.
    async fn write_config(&self, _seen: Option<&ConfigText>, _text: &str) -> Result<()> {
        Err(Error::Refused {
            store: self.to_string(),
            reason: "its network config is written elsewhere".into(),
        })
    }

    /// Waits until the config is not, or no longer, `seen` (`None`: there was none). What comes then may be
    /// half written, where people edit it in place.
    ///
    /// # Errors
    /// The store is out of reach.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call compares again.
    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()>;

    /// All leases. An unreadable key is skipped and reported; it never fails the list.
    ///
    /// # Errors
    /// The store is out of reach.
    async fn list(&self) -> Result<Listing>;

    /// The lease with exactly these subnets, if there is one.
    ///
    /// # Errors
    /// The store is out of reach, or what the key holds cannot be read.
    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>>;

    /// Writes a lease where there is none; without `grant`, a reservation.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key exists, or the store is out of reach.
    ///
    /// # Cancel safety
    /// Dropped half-way, the lease may have been written.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry>;

    /// Writes a lease where there is none, as [`Registry::create`] does, or else says what the store holds:
    /// `Err` if the key exists. Stores that can do both in one request should.
    ///
    /// # Errors
    /// The store is out of reach.
    ///
    /// # Cancel safety
    /// Dropped half-way, the lease may have been written.
    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, Listing>> {
        match self.create(subnets, attrs, grant).await {
            Err(Error::Conflict { .. }) => self.list().await.map(Err),
            created => created.map(Ok),
        }
    }

    /// Replaces the lease at revision `at`, holder and time included; `since` stays. A store that makes revisions
    /// from the content may keep the revision when exactly the same is written again.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key is at another revision or gone, or the
    /// store is out of reach.
    ///
    /// # Cancel safety
    /// Dropped half-way, the lease may have been written.
    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry>;

    /// Deletes the lease at revision `at`.
    ///
    /// # Errors
    /// [`Error::Conflict`] if the key is at another revision or gone, or the
    /// store is out of reach.
    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()>;

    /// Renews what `holder` holds, without a change that others would see. Returns how long it is good for from
    /// now on; `None` if the store has forgotten the holder, whose keys are gone then. A key that somebody
    /// deleted does not make the store forget its holder.
    ///
    /// # Errors
    /// The store is out of reach.
    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>>;

    /// Why requests are not answered at present, while they are repeated inside; `None`: they are, as far as is
    /// known.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// Changes after `after`, which [`Registry::list`] returned: nothing between the two is missed.
    ///
    /// # Errors
    /// The store is out of reach.
    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holder_ids_are_hexadecimal() {
        assert_eq!("ab".parse::<HolderId>().unwrap(), HolderId(0xab));
        assert_eq!(HolderId(0xab).to_string(), "00000000000000ab");
        for bad in ["", "+1", "0x1", "g", "00000000000000000"] {
            let error = bad.parse::<HolderId>().unwrap_err().to_string();
            assert!(
                error.contains(&format!("{bad:?}")) && error.contains("hexadecimal"),
                "{error}"
            );
        }
        let (a, b) = (HolderId::random(), HolderId::random());
        assert!(a != b && i64::try_from(a.0).is_ok_and(|a| a > 0));
    }
}
