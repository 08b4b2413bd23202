//! Plans: pure functions from the offer of a peer to kernel objects.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::kernel::RouteAnswer;
use crate::lease::{Offer, Subnets};
use crate::object::{LinkName, Object};
use crate::status::Rejection;

/// Appends the kernel objects for a peer to a list, which may already hold those of other plans.
///
/// A plan is pure: the same arguments give the same objects. If it defines a route outside the
/// subnets, the lease is rejected. The engine also calls it for this node's own lease;
/// [`Env::on_link`] then answers `None`. The keys of those objects are reserved: a lease of a peer
/// that defines one of them is rejected.
pub type Plan =
    dyn Fn(&Subnets, &Offer, &Env<'_>, &mut Vec<Object>) -> Result<(), Rejection> + Send + Sync;

/// The lookups that a plan may make. When an answer changes, the plan is called again.
pub struct Env<'a> {
    on_link: &'a ReachLookup<'a>,
    asked: RefCell<BTreeMap<IpAddr, Option<Reach>>>,
    advice: RefCell<Vec<Advice>>,
}

/// What a plan says about a lease that it accepts, for example that it cannot use one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Advice {
    /// What is wrong, as a sentence without a full stop.
    pub text: String,
    /// The public address of the lease that is wrong, or `None` if something else is.
    pub address: Option<IpAddr>,
}

impl Advice {
    /// Something is wrong with a public address of the lease.
    pub fn about(address: IpAddr, text: impl Into<String>) -> Self {
        Self { text: text.into(), address: Some(address) }
    }
}

impl From<&str> for Advice {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), address: None }
    }
}

/// A rejection of a part of the lease.
impl From<&Rejection> for Advice {
    fn from(why: &Rejection) -> Self {
        let address = if let Rejection::OwnAddress(address) = why { Some(*address) } else { None };
        Self { text: why.to_string(), address }
    }
}

/// How packets reach an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reach {
    /// Without a router, by this device.
    Direct(LinkName),
    /// By a router or not at all, or the address is one of this host.
    NotDirect,
}

impl Reach {
    /// The device by which packets reach the address without a router.
    pub const fn link(self) -> Option<LinkName> {
        match self {
            Self::Direct(link) => Some(link),
            Self::NotDirect => None,
        }
    }
}

impl From<&RouteAnswer> for Reach {
    fn from(answer: &RouteAnswer) -> Self {
        answer.on_link().map_or(Self::NotDirect, Self::Direct)
    }
}

/// A function that looks up how packets reach an address. It returns `None` if the lookup fails.
pub type ReachLookup<'a> = dyn Fn(IpAddr) -> Option<Reach> + 'a;

impl<'a> Env<'a> {
    /// An environment whose lookups call `on_link`.
    pub fn new(on_link: &'a ReachLookup<'a>) -> Self {
        Self { on_link, asked: RefCell::default(), advice: RefCell::default() }
    }

    /// Adds a sentence about the lease to the status. Call it for a lease that the plan accepts.
    pub fn advise(&self, advice: impl Into<Advice>) {
        self.advice.borrow_mut().push(advice.into());
    }

    /// The device by which packets reach `address` without a router; `None` if they need one, if
    /// there is no route, or if it is an address of this host. While the kernel cannot answer, its
    /// last answer holds (`None` if there is none).
    pub fn on_link(&self, address: IpAddr) -> Option<LinkName> {
        let mut asked = self.asked.borrow_mut();
        let answer = asked.entry(address).or_insert_with(|| (self.on_link)(address));
        answer.and_then(Reach::link)
    }

    /// The addresses that the plan looked up, with the results of the [`ReachLookup`], and its
    /// advice.
    pub fn into_parts(self) -> (BTreeMap<IpAddr, Option<Reach>>, Vec<Advice>) {
        (self.asked.into_inner(), self.advice.into_inner())
    }
}

impl std::fmt::Debug for Env<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Env").field("asked", &self.asked).finish_non_exhaustive()
    }
}
