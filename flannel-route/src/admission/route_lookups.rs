//! Looks up routes in the kernel for plans.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::Kernel;
use flannel_core::backend::Reach;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;

/// Looks up routes in a kernel for plans. Notes the links in the results, for
/// [`StaleLookups::note`](crate::admission::StaleLookups::note).
pub struct RouteLookups<'a> {
    kernel: &'a dyn Kernel,
    links: RefCell<BTreeSet<LinkName>>,
    error: RefCell<Option<KernelError>>,
}

/// What [`RouteLookups`] has noted.
pub(crate) struct Noted {
    /// The links in the results.
    pub(crate) links: BTreeSet<LinkName>,
    /// The error of the last lookup that failed, or `None` if all lookups had a result.
    pub(crate) error: Option<KernelError>,
}

impl<'a> RouteLookups<'a> {
    /// Lookups in this kernel.
    pub fn new(kernel: &'a dyn Kernel) -> Self {
        Self { kernel, links: RefCell::default(), error: RefCell::default() }
    }

    /// How packets reach an address, or `None` if the kernel returned an error. Blocks as
    /// [`Kernel::lookup`] does.
    pub fn on_link(&self, address: IpAddr) -> Option<Reach> {
        match self.kernel.lookup(address) {
            Ok(route) => {
                self.links.borrow_mut().extend(route.link);
                Some(Reach::from(&route))
            }
            Err(error) => {
                self.error.replace(Some(error));
                None
            }
        }
    }

    pub(crate) fn into_noted(self) -> Noted {
        Noted { links: self.links.into_inner(), error: self.error.into_inner() }
    }
}
