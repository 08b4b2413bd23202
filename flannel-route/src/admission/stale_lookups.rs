//! The kernel's answers to the lookups of plans, and the answers that may have changed.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::backend::Reach;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_core::{Kernel, Subnet};

/// The answers to lookups of plans that are stale: they may have changed.
#[derive(Debug, Default)]
pub struct StaleLookups {
    all: bool,
    /// The link that routes are on changed: the lookups must be repeated soon.
    urgent: bool,
    /// Answers for addresses inside these subnets.
    under: BTreeSet<Subnet>,
    /// The links in the answers, of routes with or without a gateway. It may have outdated links.
    links: BTreeSet<LinkName>,
    /// Why the kernel could not answer the last time it was asked.
    error: Option<KernelError>,
}

impl StaleLookups {
    /// Whether lookups must be repeated soon, because the link that routes are on changed.
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Whether any answer is stale.
    pub fn is_any(&self) -> bool {
        self.all || !self.under.is_empty()
    }

    /// Why the kernel could not answer a lookup; `None`: it answered all.
    pub fn error(&self) -> Option<&KernelError> {
        self.error.as_ref()
    }

    /// Marks all answers as stale.
    pub fn invalidate_all(&mut self) {
        self.all = true;
    }

    /// Marks the answers for addresses inside `subnet` as stale.
    pub fn invalidate_under(&mut self, subnet: Subnet) {
        self.under.insert(subnet);
    }

    /// Notes a change of a link. If `carries_routes`, all answers are stale and urgent. Otherwise
    /// they are stale if an answer has this link.
    pub fn invalidate_link(&mut self, link: LinkName, carries_routes: bool) {
        self.urgent |= carries_routes;
        self.all |= self.urgent || self.links.contains(&link);
    }

    /// Returns the subnets whose answers are stale (`None`: all answers), for
    /// [`Admission::recheck`](crate::admission::Admission::recheck). Afterwards no answer is stale.
    pub fn take(&mut self) -> Vec<Option<Subnet>> {
        self.urgent = false;
        let under = std::mem::take(&mut self.under);
        if std::mem::take(&mut self.all) {
            self.links.clear();
            self.error = None;
            return vec![None];
        }
        // A subnet is sorted directly before the subnets inside it.
        let mut parts: Vec<Option<Subnet>> = Vec::new();
        for subnet in under {
            if !matches!(parts.last(), Some(Some(last)) if last.covers(&subnet)) {
                parts.push(Some(subnet));
            }
        }
        parts
    }

    /// Notes the links in the answers. If a lookup had no answer, all answers are stale.
    pub fn note(&mut self, answers: Answers<'_>) {
        self.links.append(&mut answers.links.into_inner());
        if let Some(error) = answers.error.into_inner() {
            self.all = true;
            self.error = Some(error);
        }
    }
}

/// A kernel that answers the lookups of plans.
pub struct Answers<'a> {
    kernel: &'a dyn Kernel,
    links: RefCell<BTreeSet<LinkName>>,
    error: RefCell<Option<KernelError>>,
}

impl<'a> Answers<'a> {
    /// Answers from this kernel. Asking may block.
    pub fn new(kernel: &'a dyn Kernel) -> Self {
        Self { kernel, links: RefCell::default(), error: RefCell::default() }
    }

    /// How packets reach an address. `None`: the kernel could not answer. Blocks.
    pub fn on_link(&self, address: IpAddr) -> Option<Reach> {
        let answer =
            self.kernel.lookup(address).map_err(|error| self.error.replace(Some(error))).ok()?;
        self.links.borrow_mut().extend(answer.link);
        Some(Reach::from(&answer))
    }
}
