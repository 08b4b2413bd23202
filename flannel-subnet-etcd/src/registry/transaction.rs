//! Writes. Each is one transaction that compares the revision that was read.

use etcd_client::{
    Compare, CompareOp, KeyValue, PutOptions, ResponseHeader, Txn, TxnOp, TxnOpResponse,
};
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Lease, Result, Subnets};
use flannel_subnet::{Entry, LeaseGrant, value_to_write};

use crate::client::attempts::Answer;
use crate::client::failure::{self, Failure};
use crate::registry::keys::revision;
use crate::registry::pages::is_too_large;
use crate::registry::store::{Store, kv};

/// Keys that a transaction read.
pub(crate) struct Keys {
    pub(crate) kvs: Vec<KeyValue>,
    /// The revision of the store.
    pub(crate) at: Revision,
    /// Whether these are all keys that were asked for. More do not fit into an answer.
    pub(crate) are_all: bool,
}

/// The result of a transaction.
pub(crate) enum Outcome {
    /// It was carried out. This is the present key.
    Done(Option<KeyValue>),
    /// The comparison failed. These keys were read instead.
    Differs(Keys),
    /// Its etcd lease does not exist.
    NoLease,
}

impl Store {
    /// Carries out `then` if `compare` holds, and reads the key. Reads `otherwise` if it does not.
    pub(crate) async fn transaction(
        &self,
        key: &str,
        compare: Compare,
        then: TxnOp,
        otherwise: TxnOp,
    ) -> Result<Answer<Outcome>> {
        let transaction =
            Txn::new().when([compare]).and_then([then, TxnOp::get(key, None)]).or_else([otherwise]);
        let answer = self.attempts.ask(key, |connection| {
            let transaction = transaction.clone();
            async move {
                let answer = match kv(&connection).txn(transaction).await {
                    Err(error) if failure::says(&error, "requested lease not found") => {
                        return Ok(Outcome::NoLease);
                    }
                    // Only the keys of `otherwise` can be as large.
                    Err(error) if is_too_large(&error) => {
                        let at = Revision::default();
                        return Ok(Outcome::Differs(Keys { kvs: Vec::new(), at, are_all: false }));
                    }
                    answer => answer?,
                };
                let at = revision(answer.header().map_or(0, ResponseHeader::revision));
                let mut got = answer
                    .op_responses()
                    .into_iter()
                    .find_map(|answer| match answer {
                        TxnOpResponse::Get(got) => Some(got),
                        _ => None,
                    })
                    .ok_or_else(|| Failure::later("the answer to a transaction lacks the key"))?;
                let are_all = !got.more();
                let mut kvs = got.take_kvs();
                Ok(if answer.succeeded() {
                    Outcome::Done(kvs.pop())
                } else {
                    Outcome::Differs(Keys { kvs, at, are_all })
                })
            }
        });
        answer.await
    }

    /// Writes a key if `compare` holds. If it does not, returns the keys that `otherwise` reads.
    pub(crate) async fn write(
        &self,
        subnets: &Subnets,
        compare: impl Fn(&str) -> Compare + Send + Sync,
        otherwise: Option<TxnOp>,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, Keys>> {
        let key = self.keys.lease(subnets);
        let value = value_to_write(self, subnets, attrs)?;
        let otherwise = otherwise.unwrap_or_else(|| TxnOp::get(key.as_str(), None));
        let mut repeated = false;
        loop {
            let lease = match grant {
                Some(grant) => self.take_lease(&key, grant).await?,
                None => 0,
            };
            let put =
                TxnOp::put(key.as_str(), value.as_str(), Some(PutOptions::new().with_lease(lease)));
            let answer = self.transaction(&key, compare(&key), put, otherwise.clone()).await?;
            repeated |= answer.repeated;
            let kv = match answer.value {
                Outcome::Done(kv) => kv,
                Outcome::Differs(keys) => {
                    // An earlier attempt succeeded, and its answer was lost.
                    let is_ours = |kv: &&KeyValue| {
                        repeated
                            && kv.key() == key.as_bytes()
                            && kv.lease() == lease
                            && kv.value() == value.as_bytes()
                    };
                    let Some(ours) = keys.kvs.iter().find(is_ours) else { return Ok(Err(keys)) };
                    Some(ours.clone())
                }
                Outcome::NoLease => {
                    // The etcd lease expired between the two requests.
                    *self.known_holder() = None;
                    continue;
                }
            };
            let kv =
                kv.ok_or_else(|| self.error(&key, "the key was deleted while it was written"))?;
            let lease = Lease {
                subnets: *subnets,
                attrs: LeaseAttrs::from_json(&value)
                    .map_err(|source| Error::Lease { location: key.clone(), source })?,
                expires: None,
                since: revision(kv.create_revision()),
                revision: revision(kv.mod_revision()),
            };
            return Ok(Ok(Entry { lease: lease.into(), holder: grant.map(|grant| grant.holder) }));
        }
    }
}

/// Compares that the key does not exist.
pub(crate) fn absent(key: &str) -> Compare {
    Compare::version(key, CompareOp::Equal, 0)
}

/// Compares that the key is at exactly this revision.
pub(crate) fn at_revision(at: Revision) -> impl Fn(&str) -> Compare + Send + Sync {
    move |key| Compare::mod_revision(key, CompareOp::Equal, at.0.cast_signed())
}
