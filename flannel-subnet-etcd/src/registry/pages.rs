//! The list of all leases: read in pages at one revision, with bounded memory.
//!
//! A party that may write below the prefix can store a gigabyte there. No answer is larger than
//! [`LARGEST_ANSWER`], values that are too large are dropped page by page, and the leases of a list
//! have at most [`LARGEST_LIST`] bytes in all.

use std::sync::atomic::Ordering;

use etcd_client::{GetOptions, GetResponse, KeyValue};
use flannel_core::Result;
use flannel_core::lease::{Revision, TooLarge};
use flannel_subnet::{Entry, LeaseList, MOST_SKIPPED, SkipReason, Skipped};
use tonic::Code;

use super::keys::{read, revision};
use super::store::{LARGEST_ANSWER, Store, kv};
use crate::client::failure::says;

/// The number of keys in the first page. Its size shows how many keys the next one may have.
const FIRST_KEYS: usize = 64;
/// The largest number of keys in a page. 8192 leases of nodes have about 3 MB.
pub(crate) const MOST_KEYS: usize = 8192;
/// The factor by which the next page may have more keys, or fewer after one that was too large.
const STEP: usize = 8;
/// The largest sum of the values of all leases in a list, in bytes. 100,000 leases of nodes have
/// about 40 MB.
pub(crate) const LARGEST_LIST: usize = 64 << 20;
/// How often a list begins again because its revision was compacted meanwhile.
const RESTARTS: u32 = 3;

/// A page that etcd answered, or why it did not.
enum Page {
    Read(GetResponse),
    /// It is larger than [`LARGEST_ANSWER`].
    TooLarge,
    /// etcd does not have the revision. It was compacted, or the store was replaced.
    Forgotten,
}

/// The content of a page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Keys and values.
    Whole,
    /// One key, whose value is larger than an answer.
    Key,
}

/// A page that could be read.
struct Part {
    page: GetResponse,
    content: Content,
}

impl Store {
    /// The list of these keys, which are all below the prefix.
    pub(crate) fn lease_list(&self, kvs: &[KeyValue], at: Revision) -> LeaseList {
        let mut leases = Leases::default();
        kvs.iter().for_each(|kv| leases.take(self.keys.name(kv.key()), kv));
        leases.into_list(at)
    }

    /// The list of all keys below the prefix.
    pub(crate) async fn list(&self) -> Result<LeaseList> {
        for _ in 0..RESTARTS {
            if let Some(list) = self.list_at_one_revision().await? {
                return Ok(list);
            }
        }
        Err(self.error(self.keys.leases(), "its revisions are compacted faster than it is listed"))
    }

    /// The list of all keys, or `None` if etcd has forgotten the revision meanwhile.
    async fn list_at_one_revision(&self) -> Result<Option<LeaseList>> {
        let mut leases = Leases::default();
        let mut next = self.keys.leases().as_bytes().to_vec();
        let mut at = 0;
        let mut limit = FIRST_KEYS;
        loop {
            let Some(Part { mut page, content }) = self.part(&next, at, &mut limit).await? else {
                return Ok(None);
            };
            if at == 0 {
                // The headers of later pages have the present revision, not the revision of the
                // list.
                at = page.header().map_or(0, etcd_client::ResponseHeader::revision);
            }
            let more = page.more();
            let kvs = page.take_kvs();
            let bytes: usize = kvs.iter().map(|kv| kv.key().len() + kv.value().len()).sum();
            if let Some(last) = kvs.last() {
                next = [last.key(), &[0]].concat();
                let fit = LARGEST_ANSWER / 2 / (bytes / kvs.len()).max(1);
                limit = fit.clamp(1, STEP * limit);
            }
            for kv in kvs {
                let key = self.keys.name(kv.key());
                match content {
                    Content::Whole => leases.take(key, &kv),
                    Content::Key => {
                        let reason = TooLarge { size: LARGEST_ANSWER }.into();
                        leases.skip(key, reason, revision(kv.mod_revision()));
                    }
                }
            }
            if !more {
                let most = self.most_keys.load(Ordering::Relaxed);
                self.most_keys.store((2 * most).min(MOST_KEYS), Ordering::Relaxed);
                return Ok(Some(leases.into_list(revision(at))));
            }
        }
    }

    /// The page from `first` on at the revision `at`, with at most `limit` keys. The limit falls
    /// until the page is small enough. Returns `None` if etcd has forgotten the revision.
    async fn part(&self, first: &[u8], at: i64, limit: &mut usize) -> Result<Option<Part>> {
        let mut content = Content::Whole;
        loop {
            *limit = (*limit).min(self.most_keys.load(Ordering::Relaxed));
            let page = self.page(first, at, *limit, content).await;
            let fewer = (*limit / STEP).max(1);
            // A page that etcd cannot send in time may be too large. A small page fails for another
            // reason, such as an outage, after which the next list need not be slow.
            let is_too_large = match &page {
                Ok(Page::Read(_) | Page::Forgotten) => false,
                Ok(Page::TooLarge) => true,
                Err(_) => *limit > FIRST_KEYS,
            };
            if is_too_large {
                self.most_keys.store(fewer.max(FIRST_KEYS), Ordering::Relaxed);
            }
            match page? {
                Page::Read(page) => return Ok(Some(Part { page, content })),
                Page::Forgotten => return Ok(None),
                Page::TooLarge if content == Content::Key => {
                    return Err(self.error(self.keys.leases(), "a key is larger than an answer"));
                }
                Page::TooLarge if *limit == 1 => content = Content::Key,
                Page::TooLarge => *limit = fewer,
            }
        }
    }

    /// At most `limit` keys from `first` on, at the revision `at`. 0 means the present revision.
    async fn page(&self, first: &[u8], at: i64, limit: usize, content: Content) -> Result<Page> {
        let mut options = GetOptions::new()
            .with_range(self.keys.end_of_leases())
            .with_limit(limit.try_into().unwrap_or(i64::MAX))
            .with_revision(at);
        if content == Content::Key {
            options = options.with_keys_only();
        }
        let answer = self.attempts.ask(self.keys.leases(), |connection| {
            let first = first.to_vec();
            let options = options.clone();
            async move {
                match kv(&connection).get(first, Some(options)).await {
                    Err(error) if is_too_large(&error) => Ok(Page::TooLarge),
                    Err(error) if is_forgotten(&error) => Ok(Page::Forgotten),
                    answer => Ok(Page::Read(answer?)),
                }
            }
        });
        Ok(answer.await?.value)
    }
}

/// The begin of etcd's messages about a revision that it does not have. They have the same status
/// code as an answer that is too large.
const NO_REVISION: &str = "etcdserver: mvcc: required revision";

fn is_out_of_range(error: &etcd_client::Error) -> bool {
    matches!(error, etcd_client::Error::GRpcStatus(status) if status.code() == Code::OutOfRange)
}

/// Whether etcd does not have the revision that was asked for.
fn is_forgotten(error: &etcd_client::Error) -> bool {
    is_out_of_range(error) && says(error, NO_REVISION)
}

/// Whether an answer is larger than [`LARGEST_ANSWER`].
pub(crate) fn is_too_large(error: &etcd_client::Error) -> bool {
    is_out_of_range(error) && !says(error, NO_REVISION)
}

/// The leases of the pages so far.
#[derive(Default)]
struct Leases {
    kept: Vec<Kept>,
    /// The sum of their sizes.
    bytes: usize,
    skipped: Vec<Skipped>,
    /// The number of further skipped keys.
    more: usize,
}

struct Kept {
    entry: Entry,
    size: usize,
}

impl Kept {
    /// The order in which leases are kept if there is no room for all. It depends on the content of
    /// the store alone, so all nodes keep the same leases. A lease of a node has less than 1 KiB.
    fn rank(&self) -> (usize, Revision, String) {
        let (since, key) = self.entry.lease.precedence();
        (self.size.next_power_of_two().max(1024), since, key)
    }
}

impl Leases {
    fn take(&mut self, key: String, kv: &KeyValue) {
        match read(&key, kv) {
            Ok(entry) => {
                let size = kv.value().len();
                self.bytes += size;
                self.kept.push(Kept { entry, size });
                if self.bytes > 2 * LARGEST_LIST {
                    self.make_room();
                }
            }
            Err(reason) => self.skip(key, reason, revision(kv.mod_revision())),
        }
    }

    fn skip(&mut self, key: String, reason: SkipReason, revision: Revision) {
        if self.skipped.len() == MOST_SKIPPED {
            self.more += 1;
            return;
        }
        self.skipped.push(Skipped { key, reason, revision });
    }

    /// Keeps the first leases by rank, as many as [`LARGEST_LIST`] allows.
    fn make_room(&mut self) {
        self.kept.sort_by_cached_key(Kept::rank);
        let mut bytes = 0;
        let end = self.kept.iter().position(|kept| {
            bytes += kept.size;
            bytes > LARGEST_LIST
        });
        let dropped = self.kept.split_off(end.unwrap_or(self.kept.len()));
        self.bytes = self.kept.iter().map(|kept| kept.size).sum();
        let reason = SkipReason::NoRoom { most: LARGEST_LIST };
        for Kept { entry, .. } in dropped {
            let lease = &entry.lease;
            self.skip(lease.subnets.to_string(), reason.clone(), lease.revision);
        }
    }

    fn into_list(mut self, revision: Revision) -> LeaseList {
        if self.bytes > LARGEST_LIST {
            self.make_room();
        }
        if self.more > 0 {
            let key = format!("({} more keys)", self.more);
            let reason = SkipReason::Unreadable("not even their names are kept".into());
            self.skipped.push(Skipped { key, reason, revision: Revision::default() });
        }
        let entries = self.kept.into_iter().map(|kept| kept.entry).collect();
        LeaseList { entries, skipped: self.skipped, revision }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::Lease;
    use flannel_core::lease::LeaseAttrs;

    use super::*;

    fn kept(n: u32, since: u64, size: usize) -> Kept {
        let [_, a, b, c] = n.to_be_bytes();
        let lease = Lease {
            subnets: format!("10.{a}.{b}.{}-31", c & 254).parse().unwrap(),
            attrs: LeaseAttrs::default(),
            expires: None,
            since: Revision(since),
            revision: Revision(since),
        };
        Kept { entry: Entry { lease: lease.into(), holder: None }, size }
    }

    fn fill(leases: &mut Leases, all: impl Iterator<Item = Kept>) {
        for one in all {
            leases.bytes += one.size;
            leases.kept.push(one);
            if leases.bytes > 2 * LARGEST_LIST {
                leases.make_room();
            }
        }
    }

    #[test]
    fn leases_of_nodes_are_kept_first_and_then_the_earliest() {
        let large = (0..40_000).map(|n| kept(2 * n, u64::from(n), 16_384));
        let of_nodes = (50_000..50_100).map(|n| kept(2 * n, u64::from(n), 400));
        let mut one_way = Leases::default();
        fill(&mut one_way, large.chain(of_nodes));
        let large = (0..40_000).rev().map(|n| kept(2 * n, u64::from(n), 16_384));
        let of_nodes = (50_000..50_100).map(|n| kept(2 * n, u64::from(n), 400));
        let mut other_way = Leases::default();
        fill(&mut other_way, of_nodes.chain(large));
        let one = one_way.into_list(Revision(1));
        let other = other_way.into_list(Revision(1));
        let names = |list: &LeaseList| {
            list.entries
                .iter()
                .map(|entry| entry.lease.subnets.to_string())
                .collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!(names(&one), names(&other), "the order of the pages does not matter");
        assert_eq!(one.entries.len(), 100 + (LARGEST_LIST - 100 * 400) / 16_384);
        assert!(one.entries.iter().all(
            |entry| entry.lease.since < Revision(4096) || entry.lease.since >= Revision(50_000)
        ));
        assert!(one.skipped.iter().all(|skipped| !skipped.reason.keeps_last()));
    }

    #[test]
    fn the_number_of_skipped_keys_is_bounded() {
        let mut leases = Leases::default();
        for _ in 0..MOST_SKIPPED + 3 {
            let reason = SkipReason::Unreadable("no lease".into());
            leases.skip("lock".into(), reason, Revision(1));
        }
        let list = leases.into_list(Revision(1));
        assert_eq!(list.skipped.len(), MOST_SKIPPED + 1);
        assert_eq!(list.skipped[MOST_SKIPPED].key, "(3 more keys)");
    }
}
