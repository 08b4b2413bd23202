//! Plans: pure functions from an offer of one peer to kernel objects.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::lease::{Offer, Subnets};
use crate::object::LinkName;
use crate::object::Object;

/// From the subnets of a peer and one of its offers to the kernel objects that reach it.
///
/// Pure: the same offer and the same answers from [`Env`] give the same objects. Called again when
/// the lease changes or an answer does, never otherwise. Called for this node's own lease too, to
/// know which objects no peer may claim; those are not put into the kernel.
pub type Plan =
    dyn Fn(&Subnets, &Offer, &Env<'_>, &mut Vec<Object>) -> Result<(), Rejected> + Send + Sync;

/// Why a plan cannot use an offer, for example because its backend data are malformed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Rejected(pub String);

impl From<crate::json::FieldError> for Rejected {
    fn from(error: crate::json::FieldError) -> Self {
        Self(error.to_string())
    }
}

/// The facts that a plan may ask for. What it asks is remembered: when an answer changes, it is
/// called again.
pub struct Env<'a> {
    on_link: &'a Answer<'a>,
    asked: RefCell<BTreeMap<IpAddr, Option<Option<LinkName>>>>,
    advisories: RefCell<Vec<String>>,
}

/// Says which link an address is on, if any; `None` if the kernel could not say.
pub type Answer<'a> = dyn Fn(IpAddr) -> Option<Option<LinkName>> + 'a;

impl<'a> Env<'a> {
    /// An environment that answers with `on_link`: the link that an address is on, if any; `None`
    /// if that cannot be said now.
    pub fn new(on_link: &'a Answer<'a>) -> Self {
        Self { on_link, asked: RefCell::default(), advisories: RefCell::default() }
    }

    /// Notes a sentence about the lease that is worth knowing, although the plan accepts it. It
    /// ends up in the status.
    pub fn advise(&self, advisory: String) {
        self.advisories.borrow_mut().push(advisory);
    }

    /// The device by which packets reach `address` without a router; `None` if they need one, or
    /// cannot reach it, or if it is an address of this host. While the kernel cannot say, what it
    /// said last holds (`None` if it never did), and it is asked again.
    pub fn on_link(&self, address: IpAddr) -> Option<LinkName> {
        self.asked.borrow_mut().entry(address).or_insert_with(|| (self.on_link)(address)).flatten()
    }

    /// The addresses that were asked for with the answers, and the advisories.
    pub fn into_parts(self) -> (BTreeMap<IpAddr, Option<Option<LinkName>>>, Vec<String>) {
        (self.asked.into_inner(), self.advisories.into_inner())
    }
}

impl std::fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Env").field("asked", &self.asked).finish_non_exhaustive()
    }
}
