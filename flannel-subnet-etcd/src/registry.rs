//! The registry: which request to etcd each call makes, and what the answer means.

mod grants;
mod keys;
mod pages;
pub(crate) mod store;
mod transaction;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{Compare, CompareOp, GetOptions, TxnOp, WatchOptions};
use flannel_core::backoff::FailurePauses;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::subnet::{StoreKind, StoreReason};
use flannel_core::{Error, Result, Subnets};
use flannel_subnet::{
    ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch, config_conflict,
};

use self::keys::{read, revision};
use self::store::Store;
use self::transaction::{Keys, Outcome, absent, at_revision};
use self::watch::EtcdWatch;
use crate::options::EtcdOptions;

/// A registry in etcd (API version 3, tested from 3.4). Clones share the registry and its
/// connections.
///
/// - **Endpoints.** Requests go to one endpoint, which is chosen at random and kept while it
///   answers. A request without an answer is repeated at the next endpoint, with growing random
///   pauses, for [`EtcdOptions::patience`]. So a failed leader or endpoint delays a request, but
///   does not fail it. During an outage that has lasted longer, a request asks each endpoint once,
///   and lists are repeated after pauses that grow to two minutes, so that the nodes of a cluster
///   do not return together. After a short outage they return within about its length.
/// - **Dead connections** are noticed within 10 s while a request waits. A connect that hangs
///   delays only its own request.
/// - **TLS** 1.2 or newer if an endpoint begins with `https://`. Changed files are read again at
///   the next request.
/// - **Errors** that only an operator can resolve (a wrong password, a missing permission, a
///   certificate that no endpoint accepts) are returned at once as [`Error::Refused`]. All others
///   are [`Error::Store`].
/// - **Fencing** depends on etcd's lessor. Before 3.4.31 and 3.5.13, a leader that was frozen and
///   replaced may still confirm a renewal. A node ends its ownership early, by a thousandth of the
///   time to live (86 s of a day). So two nodes do not own one subnet if the leader was frozen for
///   less than that. An etcd that was restored from a backup does not know later changes: until
///   every holder has listed again, a subnet that was released after the backup may have two
///   holders.
/// - **Memory.** A list is read in pages at one revision. Values above
///   [`LARGEST_VALUE`](flannel_core::lease::LARGEST_VALUE) are dropped page by page, and the leases
///   of a list have at most 64 MiB in all. A watch ends after 64 MiB of values or 65,536 skipped
///   keys, and a list follows. Between two lists, the watch of a node can add up to 64 MiB of
///   leases. Another node that lists at that time may not keep them, because they exceed the limit
///   of a list. So whatever a party writes below the prefix, no node runs out of memory.
/// - Time to live is measured by etcd, in whole seconds and not below about twice its election
///   timeout.
#[derive(Clone)]
pub struct EtcdRegistry(Arc<Store>);

impl EtcdRegistry {
    /// A registry on these endpoints. It makes no connection, so etcd may start later.
    ///
    /// # Errors
    /// [`Error::Refused`] if an endpoint is not a URL, if a file cannot be read or has no
    /// certificate or key, or if one of two options that belong together is missing.
    ///
    /// # Blocking
    /// Reads the files of certificates and keys.
    pub fn new(options: EtcdOptions) -> Result<Self> {
        Ok(Self(Arc::new(Store::new(options)?)))
    }
}

impl fmt::Display for EtcdRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for EtcdRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EtcdRegistry").field(self.0.attempts.options()).finish()
    }
}

#[async_trait]
impl Registry for EtcdRegistry {
    async fn config(&self) -> Result<ConfigText> {
        let key = self.0.keys.config();
        let location = format!("{self}: {key}");
        match self.0.get(key).await?.take_kvs().pop() {
            Some(kv) => {
                Ok(ConfigText { location, text: String::from_utf8_lossy(kv.value()).into_owned() })
            }
            None => Err(Error::NoConfig { location }),
        }
    }

    async fn write_config(&self, known: Option<&ConfigText>, text: &str) -> Result<()> {
        let key = self.0.keys.config();
        let compare = match known {
            Some(known) => Compare::value(key, CompareOp::Equal, known.text.as_str()),
            None => absent(key),
        };
        let put = TxnOp::put(key, text, None);
        let answer = self.0.transaction(key, compare, put, TxnOp::get(key, None)).await?;
        match answer.value {
            Outcome::Done(_) => Ok(()),
            // An earlier attempt succeeded, and its answer was lost.
            Outcome::Differs(Keys { kvs, .. })
                if answer.repeated
                    && kvs.first().is_some_and(|kv| kv.value() == text.as_bytes()) =>
            {
                Ok(())
            }
            Outcome::Differs(..) | Outcome::NoLease => Err(config_conflict(self)),
        }
    }

    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        let key = self.0.keys.config();
        loop {
            let mut got = self.0.get(key).await?;
            let after = got.header().map_or(0, etcd_client::ResponseHeader::revision);
            let now =
                got.take_kvs().pop().map(|kv| String::from_utf8_lossy(kv.value()).into_owned());
            if now != known.as_ref().map(|known| known.text.clone()) {
                return Ok(());
            }
            let options = WatchOptions::new();
            let mut watch =
                EtcdWatch::open(&self.0.attempts, key, options, revision(after)).await?;
            // The config is read again after missed changes, too.
            while watch.next().await?.is_some_and(|batch| batch.events.is_empty()) {}
        }
    }

    async fn list(&self) -> Result<LeaseList> {
        self.0.list().await
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        let key = self.0.keys.lease(subnets);
        let Some(kv) = self.0.get(&key).await?.take_kvs().pop() else { return Ok(None) };
        read(&self.0.keys.name(kv.key()), &kv)
            .map(Some)
            .map_err(|reason| self.0.error(&key, reason.to_string()))
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let written = self.0.write(subnets, absent, None, attrs, grant).await?;
        written.map_err(|_| Error::Conflict { subnets: *subnets })
    }

    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, LeaseList>> {
        let most = self.0.most_keys.load(Ordering::Relaxed);
        let options = GetOptions::new().with_prefix().with_limit(most.try_into().unwrap_or(1));
        let all = TxnOp::get(self.0.keys.leases(), Some(options));
        match self.0.write(subnets, absent, Some(all), attrs, grant).await? {
            Ok(entry) => Ok(Ok(entry)),
            Err(Keys { kvs, at, are_all: true }) => Ok(Err(self.0.lease_list(&kvs, at))),
            Err(Keys { are_all: false, .. }) => self.list().await.map(Err),
        }
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let written = self.0.write(subnets, at_revision(at), None, attrs, grant).await?;
        written.map_err(|_| Error::Conflict { subnets: *subnets })
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let key = self.0.keys.lease(subnets);
        let delete = TxnOp::delete(key.as_str(), None);
        let get = TxnOp::get(key.as_str(), None);
        let answer = self.0.transaction(&key, at_revision(at)(&key), delete, get).await?;
        match answer.value {
            Outcome::Done(_) => Ok(()),
            // An earlier attempt succeeded, and its answer was lost.
            Outcome::Differs(Keys { kvs, are_all: true, .. })
                if answer.repeated && kvs.is_empty() =>
            {
                Ok(())
            }
            Outcome::Differs(..) | Outcome::NoLease => Err(Error::Conflict { subnets: *subnets }),
        }
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.0.renew(&self.0.keys.lease(subnets), holder).await
    }

    async fn remaining(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.0.remaining(&self.0.keys.lease(subnets), holder).await
    }

    fn kind(&self) -> StoreKind {
        StoreKind::Etcd { endpoints: self.0.attempts.options().endpoints.clone() }
    }

    fn trouble(&self) -> Option<StoreReason> {
        self.0.attempts.trouble()
    }

    fn failure_pauses(&self) -> FailurePauses {
        FailurePauses::of_shared_server()
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let options = WatchOptions::new().with_prefix();
        let watch = EtcdWatch::open(&self.0.attempts, self.0.keys.leases(), options, after).await?;
        Ok(Box::new(watch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_prefix_is_another_store() {
        let name = |prefix: &str| {
            let options = EtcdOptions { prefix: prefix.into(), ..EtcdOptions::default() };
            EtcdRegistry::new(options).unwrap().to_string()
        };
        assert_eq!(name("/coreos.com/network"), "etcd:http://127.0.0.1:4001,http://127.0.0.1:2379");
        assert!(name("/elsewhere").ends_with(" (prefix /elsewhere)"), "{}", name("/elsewhere"));
    }
}
