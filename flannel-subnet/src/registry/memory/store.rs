//! The content of a store in memory, and the requests that read and write it.

use std::collections::BTreeMap;
use std::time::Duration;

use flannel_core::address::ParseError;
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::{Error, Lease, Result, Subnets};
use tokio::time::Instant;

use crate::registry::history::History;
use crate::registry::{
    Entry, HolderId, LeaseGrant, LeaseList, Now, SkipReason, Skipped, value_to_write,
};

/// The content of a store in memory, its latest changes, and the faults that a test has set.
#[derive(Debug, Default)]
pub(crate) struct MemoryStore {
    pub(crate) config: Option<String>,
    pub(crate) history: History,
    /// Every request fails.
    pub(crate) outage: bool,
    /// The delay of each reply.
    pub(crate) delay: Duration,
    keys: BTreeMap<String, Stored>,
    holders: BTreeMap<HolderId, Holder>,
}

#[derive(Debug)]
struct Stored {
    /// The key and the value, or the reason why they are unreadable.
    content: Result<(Subnets, LeaseAttrs), SkipReason>,
    holder: Option<HolderId>,
    since: Revision,
    revision: Revision,
}

#[derive(Debug)]
struct Holder {
    ttl: Duration,
    end: Instant,
}

/// The subnets and attributes of a key and its value.
fn read(key: &str, value: &str) -> Result<(Subnets, LeaseAttrs), SkipReason> {
    let subnets = key.parse().map_err(|error: ParseError| SkipReason::unreadable(&error))?;
    TooLarge::check(value.len())?;
    let attrs = LeaseAttrs::from_json(value).map_err(|error| SkipReason::unreadable(&error))?;
    Ok((subnets, attrs))
}

impl MemoryStore {
    /// Ends the expired holders.
    pub(crate) fn expire(&mut self, now: Instant) {
        let expired: Vec<HolderId> = self
            .holders
            .iter()
            .filter(|(_, holder)| holder.end <= now)
            .map(|(id, _)| *id)
            .collect();
        for holder in expired {
            self.end_holder(holder);
        }
    }

    /// The time at which the next holder expires.
    pub(crate) fn next_end(&self) -> Option<Instant> {
        self.holders.values().map(|holder| holder.end).min()
    }

    /// Forgets a holder and deletes its keys.
    pub(crate) fn end_holder(&mut self, holder: HolderId) {
        self.holders.remove(&holder);
        let keys: Vec<String> = self
            .keys
            .iter()
            .filter(|(_, stored)| stored.holder == Some(holder))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            self.remove(&key);
        }
    }

    pub(crate) fn put(&mut self, key: &str, value: &str, grant: Option<LeaseGrant>) {
        let content = read(key, value);
        let revision = self.history.push(key);
        let since = self.keys.get(key).map_or(revision, |stored| stored.since);
        let holder = grant.map(|grant| grant.holder);
        self.keys.insert(key.to_owned(), Stored { content, holder, since, revision });
        if let Some(LeaseGrant { holder, ttl }) = grant {
            self.holders.insert(holder, Holder { ttl, end: Instant::now() + ttl });
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        if self.keys.remove(key).is_some() {
            self.history.push(key);
        }
    }

    pub(crate) fn read(&self, key: &str) -> Now {
        let Some(stored) = self.keys.get(key) else { return Now::Gone };
        match stored.content.clone() {
            Ok((subnets, attrs)) => {
                let Stored { holder, since, revision, .. } = *stored;
                let lease = Lease { subnets, attrs, expires: None, since, revision };
                Now::Held(Entry { lease: lease.into(), holder })
            }
            Err(reason) => Now::Unreadable(reason),
        }
    }

    pub(crate) fn list(&self) -> LeaseList {
        let mut listing = LeaseList { revision: self.history.revision(), ..LeaseList::default() };
        for (key, stored) in &self.keys {
            match self.read(key) {
                Now::Held(entry) => listing.entries.push(entry),
                Now::Unreadable(reason) => listing.skipped.push(Skipped {
                    key: key.clone(),
                    reason,
                    revision: stored.revision,
                }),
                Now::Gone => (),
            }
        }
        listing
    }

    pub(crate) fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        match self.read(&subnets.to_string()) {
            Now::Held(entry) => Ok(Some(entry)),
            Now::Gone => Ok(None),
            Now::Unreadable(reason) => {
                Err(Error::Store { store: format!("memory: {subnets}"), source: reason.into() })
            }
        }
    }

    /// Writes a key at this revision. If `at` is `None`, the key must not exist.
    pub(crate) fn write(
        &mut self,
        subnets: &Subnets,
        at: Option<Revision>,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let key = self.key_at(subnets, at)?;
        self.put(&key, &value_to_write(&"memory", subnets, attrs)?, grant);
        self.entry(subnets)?.ok_or(Error::Conflict { subnets: *subnets })
    }

    pub(crate) fn delete(&mut self, subnets: &Subnets, at: Revision) -> Result<()> {
        let key = self.key_at(subnets, Some(at))?;
        self.remove(&key);
        Ok(())
    }

    pub(crate) fn keep_alive(&mut self, holder: HolderId) -> Option<Duration> {
        let holder = self.holders.get_mut(&holder)?;
        holder.end = Instant::now() + holder.ttl;
        Some(holder.ttl)
    }

    /// The time for which the keys of this holder are kept.
    pub(crate) fn remaining(&self, holder: HolderId) -> Option<Duration> {
        Some(self.holders.get(&holder)?.end.saturating_duration_since(Instant::now()))
    }

    /// The key, if it is at this revision. If `at` is `None`, the key must not exist.
    fn key_at(&self, subnets: &Subnets, at: Option<Revision>) -> Result<String> {
        let key = subnets.to_string();
        if self.keys.get(&key).map(|stored| stored.revision) == at {
            return Ok(key);
        }
        Err(Error::Conflict { subnets: *subnets })
    }
}
