//! The lookups of plans whose results may have changed.

use std::collections::BTreeSet;

use flannel_core::Subnet;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;

use crate::admission::route_lookups::RouteLookups;

/// The lookups of plans that are stale: their results may have changed.
#[derive(Debug, Default)]
pub struct StaleLookups {
    all: bool,
    /// The link that carries the routes changed: the lookups must be repeated soon.
    urgent: bool,
    /// The lookups of addresses inside these subnets are stale.
    under: BTreeSet<Subnet>,
    /// The links in the results. Links that no result has any more stay here until all lookups are
    /// repeated.
    links: BTreeSet<LinkName>,
    /// Why a lookup has failed last.
    error: Option<KernelError>,
}

/// The lookups to repeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LookupScope {
    /// All lookups.
    All,
    /// The lookups of addresses inside this subnet.
    Under(Subnet),
}

impl StaleLookups {
    /// Whether lookups must be repeated soon, because the link that carries the routes changed.
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    /// Whether any lookup is stale.
    pub fn is_any(&self) -> bool {
        self.all || !self.under.is_empty()
    }

    /// Why a lookup has failed, or `None` if all lookups had a result since all were last repeated.
    pub fn error(&self) -> Option<&KernelError> {
        self.error.as_ref()
    }

    /// Marks all lookups as stale.
    pub fn invalidate_all(&mut self) {
        self.all = true;
    }

    /// Marks the lookups of addresses inside `subnet` as stale.
    pub fn invalidate_under(&mut self, subnet: Subnet) {
        self.under.insert(subnet);
    }

    /// Notes a change of a link. If `carries_routes`, all lookups are stale and urgent. Otherwise
    /// all lookups are stale if the result of one has this link.
    pub fn invalidate_link(&mut self, link: LinkName, carries_routes: bool) {
        self.urgent |= carries_routes;
        self.all |= self.urgent || self.links.contains(&link);
    }

    /// Returns the stale lookups, for [`Admission::recheck`](crate::admission::Admission::recheck).
    /// Afterwards no lookup is stale. The subnets that it returns do not overlap.
    pub fn take(&mut self) -> Vec<LookupScope> {
        self.urgent = false;
        let under = std::mem::take(&mut self.under);
        if std::mem::take(&mut self.all) {
            self.links.clear();
            self.error = None;
            return vec![LookupScope::All];
        }
        // A subnet is sorted directly before the subnets inside it.
        let mut apart: Vec<Subnet> = Vec::new();
        for subnet in under {
            if !apart.last().is_some_and(|last| last.covers(&subnet)) {
                apart.push(subnet);
            }
        }
        apart.into_iter().map(LookupScope::Under).collect()
    }

    /// Notes the links in the results of lookups. If a lookup failed, all lookups are stale.
    pub fn note(&mut self, lookups: RouteLookups<'_>) {
        let mut noted = lookups.into_noted();
        self.links.append(&mut noted.links);
        if let Some(error) = noted.error {
            self.all = true;
            self.error = Some(error);
        }
    }
}
