#![doc = include_str!("../README.md")]

mod file;
mod step;

#[cfg(test)]
mod model;

use flannel_core::config::BackendConfig;

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
