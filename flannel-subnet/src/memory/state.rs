//! What a store in memory holds.

use std::collections::BTreeMap;
use std::time::Duration;

use flannel_core::lease::{KeyError, LeaseAttrs, Revision};
use flannel_core::{Error, Lease, Result, Subnets};
use tokio::time::Instant;

use crate::registry::{Entry, HolderId, LeaseGrant, Now};

/// How many changes are remembered for watches that lag behind.
const HISTORY: usize = 16_384;

/// The content of a store, and the changes that led to it.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) config: Option<String>,
    pub(super) revision: u64,
    pub(super) keys: BTreeMap<String, Stored>,
    pub(super) holders: BTreeMap<HolderId, Holder>,
    /// Which key changed at which revision; everything up to `forgotten` is forgotten.
    pub(super) history: BTreeMap<u64, String>,
    pub(super) forgotten: u64,
    pub(super) outage: bool,
    pub(super) delay: Duration,
}

#[derive(Debug)]
pub(super) struct Stored {
    /// What key and value say, or why they cannot be read.
    pub(super) said: Result<(Subnets, LeaseAttrs), String>,
    pub(super) holder: Option<HolderId>,
    pub(super) since: u64,
    pub(super) revision: u64,
}

#[derive(Debug)]
pub(super) struct Holder {
    pub(super) ttl: Duration,
    pub(super) end: Instant,
}

impl State {
    pub(super) fn expire(&mut self, now: Instant) {
        let over = self.holders.iter().filter(|(_, holder)| holder.end <= now);
        for holder in over.map(|(holder, _)| *holder).collect::<Vec<_>>() {
            self.end_holder(holder);
        }
    }

    pub(super) fn end_holder(&mut self, holder: HolderId) {
        self.holders.remove(&holder);
        let keys = self.keys.iter().filter(|(_, stored)| stored.holder == Some(holder));
        for key in keys.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            self.remove(&key);
        }
    }

    pub(super) fn put(&mut self, key: &str, value: &str, grant: Option<LeaseGrant>) {
        let subnets = key.parse().map_err(|error: KeyError| error.to_string());
        let said = subnets.and_then(|subnets| {
            let attrs = LeaseAttrs::from_json(value).map_err(|error| error.to_string())?;
            Ok((subnets, attrs))
        });
        let revision = self.log(key);
        let since = self.keys.get(key).map_or(revision, |stored| stored.since);
        let holder = grant.map(|grant| grant.holder);
        self.keys.insert(key.to_owned(), Stored { said, holder, since, revision });
        if let Some(LeaseGrant { holder, ttl }) = grant {
            self.holders.insert(holder, Holder { ttl, end: Instant::now() + ttl });
        }
    }

    pub(super) fn remove(&mut self, key: &str) {
        if self.keys.remove(key).is_some() {
            self.log(key);
        }
    }

    pub(super) fn log(&mut self, key: &str) -> u64 {
        self.revision += 1;
        self.history.insert(self.revision, key.to_owned());
        if self.history.len() > HISTORY {
            self.forgotten =
                self.history.pop_first().map_or(self.forgotten, |(revision, _)| revision);
        }
        self.revision
    }

    pub(super) fn read(&self, key: &str) -> Now {
        let Some(stored) = self.keys.get(key) else { return Now::Gone };
        match stored.said.clone() {
            Ok((subnets, attrs)) => {
                let (since, revision) = (Revision(stored.since), Revision(stored.revision));
                let lease = Lease { subnets, attrs, expires: None, since, revision };
                Now::Held(Entry { lease: lease.into(), holder: stored.holder })
            }
            Err(reason) => Now::Unreadable(reason),
        }
    }

    /// The key, if it is at this revision (`None`: if it does not exist).
    pub(super) fn at(&self, subnets: &Subnets, at: Option<Revision>) -> Result<String> {
        let key = subnets.to_string();
        if self.keys.get(&key).map(|stored| Revision(stored.revision)) == at {
            return Ok(key);
        }
        Err(Error::Conflict { subnets: *subnets })
    }
}
