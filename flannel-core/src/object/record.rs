//! Records: entries of record keepers.

use std::fmt;

use super::Secret;
use crate::address::Subnet;

/// State of a peer outside the kernel, which a [`RecordKeeper`](crate::kernel::RecordKeeper) keeps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Record {
    /// The name of the record keeper ([`RecordKeeper::name`](crate::kernel::RecordKeeper::name)).
    pub keeper: &'static str,
    /// A subnet of the peer.
    pub subnet: Subnet,
    /// Boxed, because most objects are not records.
    content: Box<Content>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Content {
    data: Box<str>,
    secret: Option<Secret>,
    is_last: bool,
}

impl Record {
    /// A record without a secret. See [`data`](Self::data) for `data`.
    pub fn new(keeper: &'static str, subnet: Subnet, data: impl Into<Box<str>>) -> Self {
        let content = Content { data: data.into(), secret: None, is_last: false };
        Self { keeper, subnet, content: Box::new(content) }
    }

    /// Sets the [secret](Self::secret).
    #[must_use]
    pub fn with_secret(mut self, secret: Secret) -> Self {
        self.content.secret = Some(secret);
        self
    }

    /// Marks the record as one that makes its keeper refuse packets, such as the end of a tunnel on
    /// this node. The engine puts it after the records of all peers, and only when the leases are
    /// complete and live. Otherwise the keeper would refuse packets of peers that it does not know
    /// yet. An equal record of an earlier run stays until then. A different record of an earlier
    /// run is deleted at the start, because it refuses packets for an address or a port that this
    /// node no longer has.
    #[must_use]
    pub fn put_last(mut self) -> Self {
        self.content.is_last = true;
        self
    }

    /// Whether the record is [put last](Self::put_last).
    pub fn is_last(&self) -> bool {
        self.content.is_last
    }

    /// The content, in a form on which the keeper and the plan agree. The status shows it.
    pub fn data(&self) -> &str {
        &self.content.data
    }

    /// The secret part of the content, which no output shows, or `None` if the record has no
    /// secret.
    pub fn secret(&self) -> Option<&Secret> {
        self.content.secret.as_ref()
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keeper, subnet, content } = self;
        let Content { data, secret, .. } = &**content;
        write!(f, "record {keeper} {subnet} {data}")?;
        secret.as_ref().map_or(Ok(()), |secret| write!(f, " {secret}"))
    }
}
