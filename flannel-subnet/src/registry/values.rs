//! The values that a registry takes and returns.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::text::{MAX_REASON_CHARS, shorten};
use flannel_core::{Error, Lease, Result, Subnets};

/// The ID of a holder of leases. Nodes with one public address have different IDs.
///
/// A node chooses its ID at random once and keeps it in its state directory. `Display` writes 16
/// hexadecimal digits, `FromStr` reads 1 to 16. In etcd it is the ID of an etcd lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderId(pub u64);

impl HolderId {
    /// A new ID, from 1 to 2^63 - 1. etcd accepts no other number as the ID of a lease.
    ///
    /// The kernel chooses it. A generator that is seeded with the time can choose one ID for two
    /// nodes that start at the same moment, and each would then take the lease of the other.
    ///
    /// # Panics
    /// The system has neither the call `getrandom` nor `/dev/urandom`.
    pub fn random() -> Self {
        let bits = getrandom::u64().expect("Linux has getrandom since 3.17, and /dev/urandom");
        Self((bits >> 1).max(1))
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The error of a text that is not a [`HolderId`].
pub use flannel_core::address::ParseError as HolderIdError;

impl FromStr for HolderId {
    type Err = HolderIdError;
    fn from_str(text: &str) -> Result<Self, HolderIdError> {
        let error = || HolderIdError {
            text: text.to_owned(),
            expected: "a holder ID: 1 to 16 hexadecimal digits".to_owned(),
        };
        // `from_str_radix` would accept a sign.
        if !(1..=16).contains(&text.len()) || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error());
        }
        u64::from_str_radix(text, 16).map(Self).map_err(|_| error())
    }
}

/// The holder of a key, and the time for which the key is kept without a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseGrant {
    /// The holder.
    pub holder: HolderId,
    /// The time after a write or renewal for which the store keeps the key: whole seconds, at least
    /// 1.
    pub ttl: Duration,
}

/// A lease in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The lease, whose `expires` is `None`. It is shared, so that sets of leases need no copy.
    pub lease: Arc<Lease>,
    /// Its holder, or `None` for a reservation, which never expires.
    pub holder: Option<HolderId>,
}

/// Why the value of a key is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SkipReason {
    /// It is not a lease, or is unreadable. The last readable value is still used, because someone
    /// may be about to correct it.
    #[error("{0}")]
    Unreadable(String),
    /// The value is larger than [`LARGEST_VALUE`](flannel_core::lease::LARGEST_VALUE). All nodes
    /// ignore the lease, even those that know an earlier value of the key. A node that starts later
    /// cannot know that value, and all nodes must use the same leases. No new lease gets these
    /// subnets.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// All leases of the store together exceed the size limit, and this lease is left out. Smaller
    /// leases are kept first, then earlier ones. The order depends only on the content of the
    /// store, so all nodes keep the same leases. The key counts as a key without a lease.
    #[error(
        "the leases of the store have more than {most} bytes in all, and smaller or earlier ones \
         are kept first"
    )]
    NoRoom {
        /// The largest sum of the values of all leases, in bytes.
        most: usize,
    },
}

/// The largest number of skipped keys that a node knows by name. Others are only counted.
pub const MOST_SKIPPED: usize = 65_536;

impl SkipReason {
    /// The value is not a lease, for this reason. A long reason is cut, because it may quote what
    /// another party wrote, and nodes keep a reason for each skipped key.
    pub fn unreadable(reason: &dyn fmt::Display) -> Self {
        Self::Unreadable(shorten(&reason.to_string(), MAX_REASON_CHARS).into_owned())
    }

    /// Whether the last readable value of the key is still used.
    pub fn keeps_last(&self) -> bool {
        matches!(self, Self::Unreadable(_))
    }
}

/// A key that is not a lease, or is unreadable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The key, without the prefix that all keys have.
    pub key: String,
    /// The reason.
    pub reason: SkipReason,
    /// The revision at which [`Registry::update`](crate::Registry::update) can replace it, or 0 in
    /// a store that keeps no revision of it.
    pub revision: Revision,
}

/// All leases of a store at one revision, as [`Registry::list`](crate::Registry::list) returns
/// them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseList {
    /// The leases.
    pub entries: Vec<Entry>,
    /// The skipped keys. A store that keeps the last readable value of an unreadable key, such as
    /// a directory, has that key here and in `entries`.
    pub skipped: Vec<Skipped>,
    /// The revision, from which [`Registry::watch`](crate::Registry::watch) continues.
    pub revision: Revision,
}

/// The change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The key, without the prefix that all keys have.
    pub key: String,
    /// Its present content.
    pub now: Now,
}

/// The content of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Now {
    /// A lease.
    Held(Entry),
    /// A value that is not used.
    Unreadable(SkipReason),
    /// The key does not exist.
    Gone,
}

/// Changes in order. If a key has changed several times, only the last change is needed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Batch {
    /// The changes. An empty list confirms that nothing changed up to `revision`.
    pub events: Vec<Event>,
    /// The revision of the store after them.
    pub revision: Revision,
}

/// The value of a lease, for a store that writes it.
///
/// # Errors
/// [`Error::Refused`] if it is too large, because no node would use it.
pub fn value_to_write(
    store: &dyn fmt::Display,
    key: &Subnets,
    attrs: &LeaseAttrs,
) -> Result<String> {
    let value = attrs.to_json();
    match TooLarge::check(value.len()) {
        Ok(()) => Ok(value),
        Err(reason) => Err(Error::Refused {
            store: format!("{store}: {key}"),
            reason: reason.to_string().into(),
        }),
    }
}

/// The text of a network config, with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigText {
    /// The file or key, for messages.
    pub location: String,
    /// The unchecked text.
    pub text: String,
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
    }

    #[test]
    fn the_reason_for_a_skipped_key_is_bounded_whatever_it_quotes() {
        for text in ["é".repeat(400_000), "\u{7f}".repeat(400_000)] {
            let error = text.parse::<Subnets>().unwrap_err();
            assert!(error.text.chars().count() <= 121, "{error}");
            let of_key = SkipReason::unreadable(&error);
            let value = format!(r#"{{"PublicIP":"{}"}}"#, "é".repeat(8_000));
            let of_value = SkipReason::unreadable(&LeaseAttrs::from_json(&value).unwrap_err());
            let of_text = SkipReason::unreadable(&text);
            for reason in [of_key, of_value, of_text] {
                let shown = reason.to_string();
                assert!(shown.chars().count() <= MAX_REASON_CHARS + 1, "{shown}");
            }
        }
        assert_eq!(SkipReason::unreadable(&"no lease").to_string(), "no lease");
    }

    #[test]
    fn nodes_that_start_at_one_moment_have_different_holder_ids() {
        // The seed of fastrand is a hash of the time.
        fastrand::seed(7);
        let a = HolderId::random();
        fastrand::seed(7);
        let b = HolderId::random();
        assert!(a != b && i64::try_from(a.0).is_ok_and(|a| a > 0), "{a} {b}");
    }
}
