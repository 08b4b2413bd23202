//! Lists of all nodes, page by page.

use std::time::Duration;

use flannel_core::lease::Revision;
use hyper::body::Incoming as Body;
use serde::Deserialize;
use tokio::time::Instant;

use super::split::{NotAList, Splitter};
use super::{Following, Own};
use crate::api::{Call, Failure, PATIENCE, escape, part, read};
use crate::node::Wire;

/// The number of nodes in one page.
const PAGE: u32 = 500;
/// If the server's cache is late for longer, lists come from the server's store. The cache counts
/// as late only if the server says so several times in a row, because an overloaded server must not
/// get more work.
const LATE: Duration = Duration::from_secs(10);

/// The time during which the server's cache was late.
#[derive(Clone, Copy)]
pub(super) struct LateCache {
    /// When the server first said so.
    first: Instant,
    /// When the server last said so.
    last: Instant,
}

/// The required version of a list. Both allow an answer from the server's cache, because all nodes
/// may request a list at once.
pub(super) enum Freshness {
    /// At least the last write of this node. Its version is read first.
    Own,
    /// At least this version.
    Version(String),
}

/// The metadata of a page.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Page {
    #[serde(default)]
    pub(super) resource_version: String,
    #[serde(default, rename = "continue")]
    next: String,
}

impl Following {
    /// Lists all nodes, and returns the version of the list. The list may come from the server's
    /// cache, unless that was late for too long.
    pub(super) async fn list(&mut self, freshness: &Freshness) -> Result<String, Failure> {
        // Set again below if this list fails because of the cache.
        let late = self.late.take();
        let may_use_cache = late.is_none_or(|late| late.last - late.first < LATE);
        let oldest = match freshness {
            Freshness::Own if may_use_cache => self.own_version().await?,
            Freshness::Version(version) if may_use_cache => Some(version.clone()),
            _ => None,
        };
        self.nodes.begin();
        let mut own = Own::Gone;
        let mut token = String::new();
        loop {
            let query = match (&oldest, &*token) {
                (Some(version), "") => {
                    format!("resourceVersion={}&resourceVersionMatch=NotOlderThan", escape(version))
                }
                // With a limit the server reads its store.
                (None, "") => format!("limit={PAGE}"),
                (_, token) => format!("limit={PAGE}&continue={}", escape(token)),
            };
            let path = format!("/api/v1/nodes?{query}");
            let call = Call { verb: "list", resource: "nodes", path, patch: None };
            let answer = self.api.send(&call).await;
            // The version may never have existed.
            if oldest.is_some() && matches!(answer, Err(Failure::TooLarge(_))) {
                let now = Instant::now();
                let first = late.map_or(now, |late| late.first);
                self.late = Some(LateCache { first, last: now });
            }
            let body = answer?.into_body();
            let page = self.page(body, &mut own).await?;
            if page.next.is_empty() {
                self.nodes.complete();
                self.nodes.expire();
                self.set_own(own);
                let revision = Revision(page.resource_version.parse().unwrap_or_default());
                self.api.confirm(Some(revision));
                self.publish(revision);
                return Ok(page.resource_version);
            }
            token = page.next;
        }
    }

    /// The latest version of this node, or `None` if the node does not exist. A cache that is older
    /// could have deleted nodes, and lack new nodes.
    async fn own_version(&self) -> Result<Option<String>, Failure> {
        let path = format!("/api/v1/nodes/{}", self.own);
        let call = Call { verb: "get", resource: "nodes", path, patch: None };
        let answer = match self.api.send(&call).await {
            Err(Failure::NotFound(_)) => return Ok(None),
            answer => answer?,
        };
        let bytes = read(answer, usize::MAX).await?;
        let wire: Wire<'_> = serde_json::from_slice(&bytes).map_err(|error| {
            Failure::Failed(format!("get nodes: the answer cannot be read: {error}").into())
        })?;
        Ok(Some(wire.metadata.resource_version.into_owned()).filter(|version| !version.is_empty()))
    }

    /// Reads one page, item by item.
    async fn page(&mut self, mut body: Body, own: &mut Own) -> Result<Page, Failure> {
        let not_a_list = || Failure::Failed("list nodes: the answer is not a list".into());
        let mut splitter = Splitter::default();
        while let Some(bytes) = part(&mut body, PATIENCE).await? {
            splitter
                .feed(&bytes, |item| -> Result<(), serde_json::Error> {
                    let wire: Wire<'_> = serde_json::from_slice(item)?;
                    if wire.metadata.name == self.own {
                        *own = self.read_options.own(&wire);
                    }
                    self.nodes.put(&wire);
                    Ok(())
                })
                .map_err(|NotAList| not_a_list())?
                .map_err(|error| Failure::Failed(format!("list nodes: {error}").into()))?;
        }
        let metadata = splitter.end().map_err(|NotAList| not_a_list())?;
        let page: Page = serde_json::from_slice(&metadata).map_err(|_| not_a_list())?;
        if page.resource_version.is_empty() { Err(not_a_list()) } else { Ok(page) }
    }
}
