//! Plans: pure functions from the offer of a peer to kernel objects.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::kernel::RouteAnswer;
use crate::lease::{Offer, Subnets};
use crate::object::{LinkName, Object};
use crate::status::Rejection;

/// Appends the kernel objects for a peer to a list. The list may already have objects of other
/// plans.
///
/// A plan is pure: equal arguments give equal objects. If it defines a route outside the subnets,
/// the lease is rejected. The engine also calls the plan for this node's own lease. Then
/// [`Env::on_link`] returns `None`, and the keys of the objects are reserved: a lease of a peer
/// that defines an object with such a key is rejected.
pub type Plan =
    dyn Fn(&Subnets, &Offer, &Env<'_>, &mut Vec<Object>) -> Result<(), Rejection> + Send + Sync;

/// Whether a lease with these subnets and this offer proves that an object of the plan is its own,
/// for example by a signature in the backend data. A lease that defines the object without a proof
/// is then rejected, whichever lease was created first.
///
/// A proof is pure, and depends on nothing else, so that all nodes decide alike. It is asked only
/// if two leases define an object with the same key, so it may be slow. A node may see only the
/// subnets of the families that its config enables.
pub type Proof = dyn Fn(&Subnets, &Offer, &Object) -> bool + Send + Sync;

/// What a plan may ask and report. If an answer to a lookup changes, the plan is called again.
pub struct Env<'a> {
    on_link: &'a ReachLookup<'a>,
    asked: RefCell<BTreeMap<IpAddr, Option<Reach>>>,
    advice: RefCell<Vec<Advice>>,
}

/// A remark of a plan about a lease that it accepts. `Display` is a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[non_exhaustive]
pub enum Advice {
    /// Its tunnel has another network identifier (VNI of vxlan) than this node's. Each of the nodes
    /// drops the packets of the other.
    #[error("it has the VNI {theirs}, and this node has {ours}: each drops the other's packets")]
    OtherVni {
        /// The identifier in the lease.
        theirs: u32,
        /// The identifier of this node.
        ours: u32,
    },
    /// A public address of the lease is wrong.
    #[error("{text}")]
    OfAddress {
        /// The address.
        address: IpAddr,
        /// What is wrong, as a sentence without a full stop.
        text: String,
    },
    /// Something else is wrong. The value is a sentence without a full stop.
    #[error("{0}")]
    Other(String),
}

impl Advice {
    /// A remark about a public address of the lease. The text is a sentence without a full stop.
    pub fn about(address: IpAddr, text: impl Into<String>) -> Self {
        Self::OfAddress { address, text: text.into() }
    }
}

impl From<&str> for Advice {
    fn from(text: &str) -> Self {
        Self::Other(text.to_owned())
    }
}

/// A remark about the part of the lease that was rejected.
impl From<&Rejection> for Advice {
    fn from(why: &Rejection) -> Self {
        match why {
            Rejection::OwnAddress(address) => Self::about(*address, why.to_string()),
            _ => Self::Other(why.to_string()),
        }
    }
}

/// How packets reach an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reach {
    /// Without a router, by this device.
    Direct(LinkName),
    /// By a router or not at all, or the address belongs to this host.
    NotDirect,
}

impl Reach {
    /// The device by which packets reach the address without a router, or `None`.
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

    /// Adds a remark about the lease to the status. Call this for a lease that the plan accepts.
    pub fn advise(&self, advice: impl Into<Advice>) {
        self.advice.borrow_mut().push(advice.into());
    }

    /// Calls `plan` for each of `ends`, such as the endpoints of a peer. `plan` appends the objects
    /// of one end to `objects`, nothing if it does not use the end. If an end is rejected, the
    /// others are still used, and the reason becomes advice.
    ///
    /// # Errors
    /// No object was added: the last rejection, or [`Rejection::Rejected`] with the text `unused`
    /// if no end was rejected.
    pub fn plan_each<T>(
        &self,
        ends: impl IntoIterator<Item = T>,
        objects: &mut Vec<Object>,
        unused: &str,
        mut plan: impl FnMut(T, &mut Vec<Object>) -> Result<(), Rejection>,
    ) -> Result<(), Rejection> {
        let before = objects.len();
        let mut rejections = Vec::new();
        for end in ends {
            rejections.extend(plan(end, objects).err());
        }
        if objects.len() == before {
            return Err(rejections.pop().unwrap_or_else(|| Rejection::Rejected(unused.into())));
        }
        rejections.iter().for_each(|rejection| self.advise(rejection));
        Ok(())
    }

    /// The device by which packets reach `address` without a router. `None` if they need a router
    /// or have no route, or if the address belongs to this host. While the kernel cannot answer,
    /// this is its last answer, or `None` if it never answered.
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
