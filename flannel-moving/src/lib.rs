#![doc = include_str!("../README.md")]

mod file;
mod step;

#[cfg(test)]
mod model;

use std::sync::Arc;

use flannel_core::config::BackendConfig;
use flannel_core::lease::View;
use flannel_core::{Lease, Subnets};

pub use self::file::Damaged;
pub use self::step::{Blockers, Seen, Step, Tunnels, Wait};

/// A backend that this node runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The type of its offers ([`Offer::kind`](flannel_core::lease::Offer::kind)). If they have
    /// none, the name of the backend: such a backend cannot move.
    pub lease_type: String,
    /// Its part of the network config.
    pub backend: BackendConfig,
    /// The node's lease offers it. Otherwise its devices are not in place yet, or peers may still
    /// send packets to them.
    pub offered: bool,
}

/// The backends that this node runs: one, or several while it moves.
///
/// The offered ones come first, in the order of the offers in the lease. No two of them have the
/// same lease type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeBackends(Vec<Member>);

impl NodeBackends {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Member> {
        self.0.iter()
    }

    /// Whether the node runs more than one.
    pub fn is_moving(&self) -> bool {
        self.0.len() > 1
    }

    /// Takes in the backend of the network config. A member of the same type gets the new options
    /// at once: peers learn them from its new offer. A new member is not offered yet, unless no
    /// other is.
    pub fn aim_at(&mut self, lease_type: &str, backend: &BackendConfig) {
        let backend = backend.clone();
        let offered = !self.0.iter().any(|member| member.offered);
        match self.0.iter_mut().find(|member| member.lease_type == lease_type) {
            Some(member) => {
                member.backend = backend;
                member.offered |= offered;
            }
            None => {
                let lease_type = lease_type.to_owned();
                self.0.push(Member { lease_type, backend, offered });
            }
        }
        self.sort();
    }

    /// Adds `others` as members that are not offered, except those of a type that is there already.
    pub fn add<'a>(&mut self, others: impl IntoIterator<Item = &'a Member>) {
        for member in others {
            if !self.0.iter().any(|known| known.lease_type == member.lease_type) {
                self.0.push(Member { offered: false, ..member.clone() });
            }
        }
    }

    /// Leaves out the members that cannot be built now, except the `target`. The rest is what the
    /// node runs: if no other member is offered, the target is. The second part has the members
    /// that were left out, as ones that are not offered. The record keeps them ([`Self::add`]),
    /// because they may be built later, or have devices to remove.
    pub fn without(
        &self,
        target: &str,
        is_broken: impl Fn(&Member) -> bool,
    ) -> (Self, Vec<Member>) {
        let is_out = |member: &Member| member.lease_type != target && is_broken(member);
        let (mut runs, mut aside) = (Self::default(), Vec::new());
        for member in self.iter() {
            match is_out(member) {
                true => aside.push(Member { offered: false, ..member.clone() }),
                false => runs.0.push(member.clone()),
            }
        }
        if runs.offered().next().is_none() {
            runs.0.iter_mut().for_each(|member| member.offered = member.lease_type == target);
            runs.sort();
        }
        (runs, aside)
    }

    /// The lease of a node that is reached by a backend of this `lease_type`, and by no offered
    /// member of another type.
    pub fn user_of<'a>(
        &self,
        lease_type: &str,
        (own, view): (Subnets, &'a View),
    ) -> Option<&'a Arc<Lease>> {
        let others = || self.offered().filter(|member| member.lease_type != lease_type);
        let is_other = |lease: &Lease| others().any(|it| step::offers(lease, &it.lease_type));
        let mut leases = view.leases.iter().filter(|lease| lease.subnets != own);
        leases.find(|lease| step::offers(lease, lease_type) && !is_other(lease))
    }

    /// Keeps the members that are `kept`.
    pub fn retain(&mut self, kept: impl FnMut(&Member) -> bool) {
        self.0.retain(kept);
    }

    /// The members whose offers the lease has, the preferred one first.
    pub fn offered(&self) -> impl Iterator<Item = &Member> {
        self.0.iter().filter(|member| member.offered)
    }

    /// All members, in the order in which this node uses them to reach a peer that offers several:
    /// `target` first if this node offers it too, then the offered ones.
    pub fn by_use(&self, target: &str) -> impl Iterator<Item = &Member> {
        let is_target = move |member: &&Member| member.offered && member.lease_type == target;
        let others = self.0.iter().filter(move |member| !is_target(member));
        self.0.iter().filter(is_target).chain(others)
    }

    /// Restores the order. It is stable.
    fn sort(&mut self) {
        self.0.sort_by_key(|member| !member.offered);
    }
}
