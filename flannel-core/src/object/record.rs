//! Records of annexes.

use std::fmt;

use super::Secret;
use crate::address::Subnet;

/// An entry that an [`Annex`](crate::kernel::Annex) keeps for a peer. It is not in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Record {
    /// The annex ([`Annex::name`](crate::kernel::Annex::name)).
    pub annex: &'static str,
    /// A subnet of the peer.
    pub subnet: Subnet,
    /// Boxed, because most objects are no records.
    content: Box<(Box<str>, Option<Secret>)>,
}

impl Record {
    /// A record without a secret.
    pub fn new(annex: &'static str, subnet: Subnet, data: impl Into<Box<str>>) -> Self {
        Self { annex, subnet, content: Box::new((data.into(), None)) }
    }

    /// The same record with this secret.
    #[must_use]
    pub fn with_secret(mut self, secret: Secret) -> Self {
        self.content.1 = Some(secret);
        self
    }

    /// The content, in a form that the annex and the plan agree on. The status shows it.
    pub fn data(&self) -> &str {
        &self.content.0
    }

    /// Content that no output shows; `None`: there is none.
    pub fn secret(&self) -> Option<&Secret> {
        self.content.1.as_ref()
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { annex, subnet, content } = self;
        let (data, secret) = &**content;
        write!(f, "record {annex} {subnet} {data}")?;
        secret.as_ref().map_or(Ok(()), |secret| write!(f, " {secret}"))
    }
}
