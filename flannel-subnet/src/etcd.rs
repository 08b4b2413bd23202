//! A store in etcd, which shares its cluster with Go flannel, byte for byte.
//!
//! The one thing to know: a mark *is* the ID of an etcd lease, which we choose. A renewal keeps that lease alive
//! and writes no key, so that it wakes nobody; every write is a transaction on the revision that was read, and
//! is repeated only together with a look at whether it was carried out already.
//!
//! The client is etcd-client. The other one, etcd-rs, cannot be used by a daemon that runs as root: its network
//! path has four advisories that no release of those lines will mend (RUSTSEC-2026-0258, -0098, -0099, -0104), it
//! brings a second gRPC and TLS stack, and it cannot tell a compaction from a cancellation. Neither retries, fails
//! over or resumes: that is done here.
//!
//! **Source**: flannel `pkg/subnet/etcd/registry.go`, for keys, values and time to live.

mod attempts;
mod connections;
mod failure;
mod keys;
mod options;
mod watch;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{
    Compare, CompareOp, GetOptions, GetResponse, KeyValue, KvClient, LeaseGrantOptions, PutOptions,
    Txn, TxnOp, TxnOpResponse, WatchOptions,
};
use flannel_core::{Error, Lease, LeaseAttrs, Result, Revision, Subnets};

use crate::registry::{
    ConfigText, Entry, Listing, Mark, Now, Registry, Skipped, Tenure, Watch, config_conflict,
};
use attempts::{Answer, Attempts};
use connections::{Connection, Connections};
use failure::Trouble;
use keys::{Keys, read, revision};
pub use options::{EtcdOptions, EtcdOptionsError};
use watch::EtcdWatch;

/// Above what any network has: 4 MiB, the client's own limit, ends at 13,000 leases.
const LARGEST_ANSWER: usize = 1 << 30;

/// A registry in etcd (API version 3, tested from 3.4). Clones are the same registry, on the same connections.
///
/// - **Endpoints**: one connection at a time, to an endpoint chosen at random and kept while it answers. A request
///   that gets no answer is repeated at the next endpoint, with growing random pauses, for as long as
///   [`EtcdOptions::patience`] says: a killed leader or a dead endpoint costs time, but no failed request.
/// - **Dead connections** (the peer is gone without a word) are noticed within 10 s while anything is waited for.
/// - **TLS** 1.2 or newer where an endpoint says `https://`. The files are read again when they have changed, at
///   the next request.
/// - **Errors** that no waiting can mend (a wrong password, a missing permission, a certificate that is not
///   accepted at any endpoint) come at once as [`Error::Refused`]; all others are [`Error::Store`].
/// - **Fencing** counts on etcd's lessor. Before 3.4.31 and 3.5.13 a leader that was replaced without knowing it may still
///   confirm a renewal: what it was frozen for must then be less than a thousandth of the time to live (86 s of a day),
///   which ownership ends early by. An etcd restored from a backup knows nothing of what happened after it: until
///   every holder has listed again, a subnet that was given away since then may have two.
/// - Time to live is counted by etcd, in whole seconds and not below about twice its election timeout.
#[derive(Clone)]
pub struct EtcdRegistry(Arc<Shared>);

struct Shared {
    attempts: Attempts,
    keys: Keys,
    name: String,
    /// Whose etcd lease is known to exist: it is renewed before it is used, not granted.
    known: Mutex<Option<Mark>>,
}

impl EtcdRegistry {
    /// A registry on these endpoints. Nothing is connected yet: etcd may come later.
    ///
    /// # Errors
    /// [`Error::Refused`]: an endpoint is no URL, a file cannot be read or holds no certificate or key, or of
    /// two options that belong together one is missing.
    ///
    /// # Blocking
    /// Reads the files of certificates and keys.
    pub fn new(options: EtcdOptions) -> Result<Self> {
        let keys = Keys::new(&options.prefix);
        let attempts = Attempts::new(Connections::new(options)?);
        let options = attempts.options();
        let mut name = format!("etcd:{}", options.endpoints.join(","));
        // Another prefix is another store: what was cached of one is not the other's.
        if options.prefix != EtcdOptions::default().prefix {
            name += &format!(" (prefix {})", options.prefix);
        }
        Ok(Self(Arc::new(Shared { attempts, keys, name, known: Mutex::default() })))
    }

    fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Store { store: format!("{self}: {key}"), source: reason.into().into() }
    }

    /// One key, or with `prefix` all that begin with it.
    async fn get(&self, key: &str, prefix: bool) -> Result<GetResponse> {
        let answer = self.0.attempts.ask(key, |connection| {
            let key = key.to_owned();
            let options = prefix.then(|| GetOptions::new().with_prefix());
            async move { Ok(kv(&connection).get(key, options).await?) }
        });
        Ok(answer.await?.value)
    }

    /// What these keys are, read at that revision.
    fn listing(&self, kvs: Vec<KeyValue>, at: Revision) -> Listing {
        let mut listing = Listing { revision: at, ..Listing::default() };
        for kv in kvs {
            let key = self.0.keys.name(kv.key());
            match read(&key, &kv) {
                Ok(entry) => listing.entries.push(entry),
                Err(reason) => {
                    let revision = revision(kv.mod_revision());
                    listing.skipped.push(Skipped { key, reason, revision });
                }
            }
        }
        listing
    }

    /// Makes sure that the etcd lease exists and has all its time before it. A later `known` is not needed:
    /// time counts from before the write.
    async fn take_lease(&self, key: &str, tenure: Tenure) -> Result<i64> {
        let Tenure { mark, ttl } = tenure;
        let id = lease_id(mark).ok_or_else(|| Error::Refused {
            store: self.to_string(),
            reason: format!(
                "the mark {mark} is no ID of an etcd lease; choose one from 1 to 2^63 - 1"
            ),
        })?;
        let seconds =
            i64::try_from(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).unwrap_or(i64::MAX);
        let is_known = *self.0.known.lock().unwrap_or_else(PoisonError::into_inner) == Some(mark);
        let mut renew = is_known;
        loop {
            let granted = if renew {
                self.renew(key, mark).await?
            } else {
                self.grant(key, id, seconds).await?
            };
            match granted {
                Some(got) if got < Duration::from_secs(seconds.unsigned_abs()) => {
                    return Err(self.error(
                        key,
                        format!(
                            "the etcd lease {mark} lives for {got:?} only, not for {ttl:?}: end it or wait"
                        ),
                    ));
                }
                Some(_) => {
                    *self.0.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(mark);
                    return Ok(id);
                }
                // Granting found it there, renewing found it gone: look again, the other way.
                None => renew = !renew,
            }
        }
    }

    /// `None`: it exists.
    async fn grant(&self, key: &str, id: i64, seconds: i64) -> Result<Option<Duration>> {
        let answer = self.0.attempts.ask(key, |connection| async move {
            let options = LeaseGrantOptions::new().with_id(id);
            match connection.client.lease_client().grant(seconds, Some(options)).await {
                Ok(granted) => Ok(Some(Duration::from_secs(granted.ttl().unsigned_abs()))),
                Err(error) if failure::says(&error, "lease already exists") => Ok(None),
                Err(error) => Err(error.into()),
            }
        });
        Ok(answer.await?.value)
    }

    /// `None`: it does not exist.
    async fn renew(&self, key: &str, mark: Mark) -> Result<Option<Duration>> {
        let Some(id) = lease_id(mark) else { return Ok(None) };
        let answer = self.0.attempts.ask(key, |connection| async move {
            let (mut keeper, mut answers) =
                match connection.client.lease_client().keep_alive(id).await {
                    Err(etcd_client::Error::LeaseKeepAliveError(text))
                        if text == "lease not found" =>
                    {
                        return Ok(None);
                    }
                    opened => opened?,
                };
            // The client keeps the first answer for itself.
            keeper.keep_alive().await?;
            let answer = answers.message().await?;
            let ttl = answer.ok_or_else(|| Trouble::passing("it ended the renewal"))?.ttl();
            Ok(u64::try_from(ttl).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs))
        });
        Ok(answer.await?.value)
    }

    /// Carries out `then` if `compare` holds, and reads the key; reads `otherwise` if it does not.
    async fn transaction(
        &self,
        key: &str,
        compare: Compare,
        then: TxnOp,
        otherwise: TxnOp,
    ) -> Result<Answer<Outcome>> {
        let transaction =
            Txn::new().when([compare]).and_then([then, TxnOp::get(key, None)]).or_else([otherwise]);
        let answer = self.0.attempts.ask(key, |connection| {
            let transaction = transaction.clone();
            async move {
                let answer = match kv(&connection).txn(transaction).await {
                    Err(error) if failure::says(&error, "requested lease not found") => {
                        return Ok(Outcome::NoLease);
                    }
                    answer => answer?,
                };
                let now = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
                let kvs = answer.op_responses().into_iter().find_map(|answer| match answer {
                    TxnOpResponse::Get(mut got) => Some(got.take_kvs()),
                    _ => None,
                });
                let mut kvs = kvs
                    .ok_or_else(|| Trouble::passing("the answer to a transaction lacks the key"))?;
                Ok(if answer.succeeded() {
                    Outcome::Done(kvs.pop())
                } else {
                    Outcome::Differs(kvs, revision(now))
                })
            }
        });
        answer.await
    }

    /// Writes a key for which `compare` holds; or else what `otherwise` reads, and when.
    async fn write(
        &self,
        subnets: &Subnets,
        compare: impl Fn(&str) -> Compare + Send + Sync,
        otherwise: Option<TxnOp>,
        attrs: &LeaseAttrs,
        tenure: Option<Tenure>,
    ) -> Result<Result<Entry, (Vec<KeyValue>, Revision)>> {
        let key = self.0.keys.lease(subnets);
        let value = attrs.to_json();
        let otherwise = otherwise.unwrap_or_else(|| TxnOp::get(key.as_str(), None));
        let mut repeated = false;
        loop {
            let lease = match tenure {
                Some(tenure) => self.take_lease(&key, tenure).await?,
                None => 0,
            };
            let put =
                TxnOp::put(key.as_str(), value.as_str(), Some(PutOptions::new().with_lease(lease)));
            let answer = self.transaction(&key, compare(&key), put, otherwise.clone()).await?;
            repeated |= answer.repeated;
            let kv = match answer.value {
                Outcome::Done(kv) => kv,
                Outcome::Differs(kvs, now) => {
                    // Carried out by an earlier attempt, whose answer was lost.
                    let ours = |kv: &&KeyValue| {
                        repeated
                            && kv.key() == key.as_bytes()
                            && kv.lease() == lease
                            && kv.value() == value.as_bytes()
                    };
                    match kvs.iter().find(ours).cloned() {
                        None => return Ok(Err((kvs, now))),
                        kv => kv,
                    }
                }
                Outcome::NoLease => {
                    // It ran out between the two requests.
                    *self.0.known.lock().unwrap_or_else(PoisonError::into_inner) = None;
                    continue;
                }
            };
            let kv = kv.ok_or_else(|| self.error(&key, "the key is gone while it was written"))?;
            let lease = Lease {
                subnets: *subnets,
                attrs: LeaseAttrs::from_json(&value)
                    .map_err(|source| Error::Lease { location: key.clone(), source })?,
                expires: None,
                since: revision(kv.create_revision()),
                revision: revision(kv.mod_revision()),
            };
            return Ok(Ok(Entry { lease: lease.into(), mark: tenure.map(|tenure| tenure.mark) }));
        }
    }
}

/// What became of a transaction.
enum Outcome {
    /// It was carried out, and this is the key now.
    Done(Option<KeyValue>),
    /// The comparison failed, and this was read instead, at that revision of the store.
    Differs(Vec<KeyValue>, Revision),
    /// The etcd lease that it names does not exist.
    NoLease,
}

fn kv(connection: &Connection) -> KvClient {
    connection.client.kv_client().max_decoding_message_size(LARGEST_ANSWER)
}

fn absent(key: &str) -> Compare {
    Compare::version(key, CompareOp::Equal, 0)
}

fn lease_id(mark: Mark) -> Option<i64> {
    i64::try_from(mark.0).ok().filter(|id| *id > 0)
}

fn at_revision(at: Revision) -> impl Fn(&str) -> Compare + Send + Sync {
    move |key| Compare::mod_revision(key, CompareOp::Equal, at.0.cast_signed())
}

impl fmt::Display for EtcdRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.name)
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
        match self.get(key, false).await?.take_kvs().pop() {
            Some(kv) => {
                Ok(ConfigText { location, text: String::from_utf8_lossy(kv.value()).into_owned() })
            }
            None => Err(Error::NoConfig { location }),
        }
    }

    async fn write_config(&self, seen: Option<&ConfigText>, text: &str) -> Result<()> {
        let key = self.0.keys.config();
        let compare = match seen {
            Some(seen) => Compare::value(key, CompareOp::Equal, seen.text.as_str()),
            None => absent(key),
        };
        let put = TxnOp::put(key, text, None);
        let answer = self.transaction(key, compare, put, TxnOp::get(key, None)).await?;
        match answer.value {
            Outcome::Done(_) => Ok(()),
            // By an earlier attempt, whose answer was lost.
            Outcome::Differs(kvs, _)
                if answer.repeated
                    && kvs.first().is_some_and(|kv| kv.value() == text.as_bytes()) =>
            {
                Ok(())
            }
            Outcome::Differs(..) | Outcome::NoLease => Err(config_conflict(self)),
        }
    }

    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()> {
        let key = self.0.keys.config();
        loop {
            let mut got = self.get(key, false).await?;
            let after = got.header().map_or(0, etcd_client::ResponseHeader::revision);
            let now =
                got.take_kvs().pop().map(|kv| String::from_utf8_lossy(kv.value()).into_owned());
            if now != seen.as_ref().map(|seen| seen.text.clone()) {
                return Ok(());
            }
            let options = WatchOptions::new();
            let mut watch =
                EtcdWatch::open(&self.0.attempts, key, options, revision(after)).await?;
            // A gap is a reason to read again too.
            while watch.next().await?.is_some_and(|batch| batch.events.is_empty()) {}
        }
    }

    async fn list(&self) -> Result<Listing> {
        let mut got = self.get(self.0.keys.leases(), true).await?;
        let now = got.header().map_or(0, etcd_client::ResponseHeader::revision);
        Ok(self.listing(got.take_kvs(), revision(now)))
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        let key = self.0.keys.lease(subnets);
        let Some(kv) = self.get(&key, false).await?.take_kvs().pop() else { return Ok(None) };
        read(&self.0.keys.name(kv.key()), &kv).map(Some).map_err(|reason| self.error(&key, reason))
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        tenure: Option<Tenure>,
    ) -> Result<Entry> {
        let written = self.write(subnets, absent, None, attrs, tenure).await?;
        written.map_err(|_| Error::Conflict { subnets: *subnets })
    }

    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        tenure: Option<Tenure>,
    ) -> Result<Result<Entry, Listing>> {
        let all = TxnOp::get(self.0.keys.leases(), Some(GetOptions::new().with_prefix()));
        let written = self.write(subnets, absent, Some(all), attrs, tenure).await?;
        Ok(written.map_err(|(kvs, now)| self.listing(kvs, now)))
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        tenure: Option<Tenure>,
    ) -> Result<Entry> {
        let written = self.write(subnets, at_revision(at), None, attrs, tenure).await?;
        written.map_err(|_| Error::Conflict { subnets: *subnets })
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let key = self.0.keys.lease(subnets);
        let delete = TxnOp::delete(key.as_str(), None);
        let get = TxnOp::get(key.as_str(), None);
        let answer = self.transaction(&key, at_revision(at)(&key), delete, get).await?;
        match answer.value {
            Outcome::Done(_) => Ok(()),
            // By an earlier attempt, whose answer was lost.
            Outcome::Differs(kvs, _) if answer.repeated && kvs.is_empty() => Ok(()),
            Outcome::Differs(..) | Outcome::NoLease => Err(Error::Conflict { subnets: *subnets }),
        }
    }

    async fn keep_alive(&self, subnets: &Subnets, mark: Mark) -> Result<Option<Duration>> {
        self.renew(&self.0.keys.lease(subnets), mark).await
    }

    fn trouble(&self) -> Option<String> {
        self.0.attempts.trouble()
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let options = WatchOptions::new().with_prefix();
        let watch = EtcdWatch::open(&self.0.attempts, self.0.keys.leases(), options, after).await?;
        Ok(Box::new(watch))
    }
}

/// What a key holds after a change.
fn now(key: &str, kv: Option<&KeyValue>) -> Now {
    match kv.map(|kv| read(key, kv)) {
        Some(Ok(entry)) => Now::Held(entry),
        Some(Err(reason)) => Now::Unreadable(reason),
        None => Now::Gone,
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
