//! etcd leases, to which the keys of a holder are attached. They are granted at the first use, then
//! renewed.

use std::time::Duration;

use etcd_client::LeaseGrantOptions;
use flannel_core::{Error, Result};
use flannel_subnet::{HolderId, LeaseGrant};

use crate::client::failure::{self, Failure};
use crate::registry::store::Store;

impl Store {
    /// Grants or renews the etcd lease before a write, so that its whole time is left.
    pub(crate) async fn take_lease(&self, key: &str, grant: LeaseGrant) -> Result<i64> {
        let LeaseGrant { holder, ttl } = grant;
        let id = lease_id(holder).ok_or_else(|| Error::Refused {
            store: self.to_string(),
            reason: format!(
                "the holder ID {holder} cannot be the ID of an etcd lease; expected 1 to 2^63 - 1"
            )
            .into(),
        })?;
        let seconds =
            i64::try_from(ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0)).unwrap_or(i64::MAX);
        let mut renew = *self.known_holder() == Some(holder);
        loop {
            let granted = if renew {
                self.renew(key, holder).await?
            } else {
                self.grant(key, id, seconds).await?
            };
            match granted {
                Some(got) if got < Duration::from_secs(seconds.unsigned_abs()) => {
                    return Err(self.error(
                        key,
                        format!(
                            "the etcd lease {holder} has a time to live of {got:?}, not {ttl:?}: \
                             revoke it, or wait until it expires"
                        ),
                    ));
                }
                Some(_) => {
                    *self.known_holder() = Some(holder);
                    return Ok(id);
                }
                // The etcd lease to grant exists, or the one to renew does not.
                None => renew = !renew,
            }
        }
    }

    /// Grants an etcd lease and returns its time to live, or `None` if it exists.
    async fn grant(&self, key: &str, id: i64, seconds: i64) -> Result<Option<Duration>> {
        let answer = self.attempts.ask(key, |connection| async move {
            let options = LeaseGrantOptions::new().with_id(id);
            match connection.client.lease_client().grant(seconds, Some(options)).await {
                Ok(granted) => Ok(Some(Duration::from_secs(granted.ttl().unsigned_abs()))),
                Err(error) if failure::says(&error, "lease already exists") => Ok(None),
                Err(error) => Err(error.into()),
            }
        });
        Ok(answer.await?.value)
    }

    /// Renews an etcd lease and returns its time to live, or `None` if it does not exist.
    pub(crate) async fn renew(&self, key: &str, holder: HolderId) -> Result<Option<Duration>> {
        let Some(id) = lease_id(holder) else { return Ok(None) };
        let answer = self.attempts.ask(key, |connection| async move {
            let (mut keeper, mut answers) =
                match connection.client.lease_client().keep_alive(id).await {
                    Err(etcd_client::Error::LeaseKeepAliveError(text))
                        if text == "lease not found" =>
                    {
                        return Ok(None);
                    }
                    opened => opened?,
                };
            // The client does not return the first answer.
            keeper.keep_alive().await?;
            let answer = answers.message().await?;
            let ttl = answer.ok_or_else(|| Failure::later("it ended the renewal"))?.ttl();
            Ok(u64::try_from(ttl).ok().filter(|ttl| *ttl > 0).map(Duration::from_secs))
        });
        Ok(answer.await?.value)
    }

    /// The remaining time of an etcd lease without a renewal, or `None` if it does not exist.
    pub(crate) async fn remaining(&self, key: &str, holder: HolderId) -> Result<Option<Duration>> {
        let Some(id) = lease_id(holder) else { return Ok(None) };
        let answer = self.attempts.ask(key, |connection| async move {
            let left = connection.client.lease_client().time_to_live(id, None).await?;
            // -1 if it does not exist.
            Ok(u64::try_from(left.ttl()).ok().map(Duration::from_secs))
        });
        Ok(answer.await?.value)
    }
}

fn lease_id(holder: HolderId) -> Option<i64> {
    i64::try_from(holder.0).ok().filter(|id| *id > 0)
}
