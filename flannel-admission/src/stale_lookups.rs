//! The kernel's answers to the questions of plans, and which of them may no longer hold.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_core::{Kernel, Subnet};

/// Which answers that plans were given are stale.
#[derive(Debug, Default)]
pub struct StaleLookups {
    all: bool,
    /// The link that routes are on changed: answers cannot wait.
    urgent: bool,
    /// Answers about addresses inside these subnets.
    under: BTreeSet<Subnet>,
    /// The links that answers led to, directly or through a router. Some may lead there no longer.
    links: BTreeSet<LinkName>,
    /// Why the kernel could not answer the last time it was asked.
    error: Option<KernelError>,
}

impl StaleLookups {
    /// Plans have to be asked again now.
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// An answer is stale.
    pub fn is_any(&self) -> bool {
        self.all || !self.under.is_empty()
    }

    /// Why the kernel could not answer a question; `None`: it answered all.
    pub fn error(&self) -> Option<&KernelError> {
        self.error.as_ref()
    }

    /// All answers are stale.
    pub fn invalidate_all(&mut self) {
        self.all = true;
    }

    /// Answers about addresses inside `subnet` are stale.
    pub fn invalidate_under(&mut self, subnet: Subnet) {
        self.under.insert(subnet);
    }

    /// A link changed, which may carry routes.
    pub fn invalidate_link(&mut self, link: LinkName, carries_routes: bool) {
        self.urgent |= carries_routes;
        self.all |= self.urgent || self.links.contains(&link);
    }

    /// The subnets whose answers are stale (`None`: all answers), and none afterwards.
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

    /// Notes the links that answers led to. A question without an answer is asked again.
    pub fn note(&mut self, answers: Answers<'_>) {
        self.links.append(&mut answers.links.into_inner());
        if let Some(error) = answers.error.into_inner() {
            self.all = true;
            self.error = Some(error);
        }
    }
}

/// A kernel that answers plans.
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

    /// The link that an address is on; `None` if the kernel cannot say.
    pub fn on_link(&self, address: IpAddr) -> Option<Option<LinkName>> {
        let answer =
            self.kernel.lookup(address).map_err(|error| self.error.replace(Some(error))).ok()?;
        self.links.borrow_mut().extend(answer.link);
        Some(answer.on_link())
    }
}
