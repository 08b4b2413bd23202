//! The backends of one network.

use std::collections::BTreeSet;

use flannel_core::backend::{Datapath, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::object::{Key, LinkName};
use flannel_core::status::{Failure, Status};
use flannel_core::{Backend, Config};
use flannel_route::moving::{Member, NodeBackends};
use flannel_route::{BackendInUse, PreparedBackend};

use crate::config::DaemonConfig;
use crate::error::Error;

/// A backend that runs.
#[derive(Clone)]
pub(crate) struct Runs {
    pub(super) backend: &'static dyn Backend,
    /// The network config with this backend.
    pub(super) config: Config,
    pub(super) member: Member,
}

/// The backends of one network, ready to be joined.
pub(crate) struct Lineup {
    pub(crate) team: Team,
    /// The preparation of each backend of the team, in its order.
    pub(super) prepared: Vec<Prepared>,
}

impl Lineup {
    /// The backends for [`Host::join_prepared`](flannel_route::Host::join_prepared).
    pub(crate) fn backends(&mut self) -> Vec<PreparedBackend<'_>> {
        let prepared = std::mem::take(&mut self.prepared);
        let ranks = self.team.offer_ranks();
        self.team
            .all
            .iter()
            .zip(prepared)
            .zip(ranks)
            .map(|((runs, prepared), rank)| {
                let (backend, config) = runs.member();
                let in_use = BackendInUse::new(backend, config).with_offer_rank(rank);
                PreparedBackend { in_use, prepared }
            })
            .collect()
    }
}

/// The backends of one network.
#[derive(Clone)]
pub(crate) struct Team {
    /// In the order in which they are used for a peer that offers several.
    pub(crate) all: Vec<Runs>,
    pub(super) members: NodeBackends,
    /// Those that cannot be set up now. They are recorded, and tried again.
    pub(super) aside: Vec<Runs>,
    /// That of the network config.
    pub(crate) target: &'static dyn Backend,
}

/// The devices and addresses of the target in the kernel.
#[derive(Debug)]
pub(crate) enum Devices {
    /// All are there.
    InPlace,
    /// The kernel refuses one, with the change and its error.
    Failing(String),
    /// The network has not tried all of them yet.
    Unknown,
}

impl Runs {
    /// The backend and its config.
    pub(crate) fn member(&self) -> (&dyn Backend, &Config) {
        (self.backend, &self.config)
    }
}

impl Team {
    /// Whether this backend is one of them.
    pub(crate) fn runs(&self, backend: &dyn Backend) -> bool {
        self.all.iter().any(|runs| runs.backend.kind() == backend.kind())
    }

    /// The place of each backend's offer in the lease, in the order of `all`; `None` if its offer
    /// is not published.
    fn offer_ranks(&self) -> Vec<Option<usize>> {
        let rank = |runs: &Runs| self.members.offered().position(|member| *member == runs.member);
        self.all.iter().map(rank).collect()
    }

    /// The devices on which a handshake decides whether a peer is reached by the first backend or
    /// by another one.
    pub(crate) fn handshakes_on(&self, settings: &DaemonConfig) -> BTreeSet<LinkName> {
        match &self.all[..] {
            [first, _, ..] => settings.backends.datapath(&first.config).encrypted,
            _ => BTreeSet::new(),
        }
    }

    /// Whether one of them encrypts.
    pub(crate) fn encrypts(&self, settings: &DaemonConfig) -> bool {
        !self.datapath(settings).encrypted.is_empty()
    }

    /// Whether the devices and addresses of the target are in the kernel, and why not.
    pub(crate) fn devices(&self, status: &Status) -> Devices {
        if self.is_in_place(status) {
            return Devices::InPlace;
        }
        match self.failures(status).next().filter(|_| status.settled) {
            Some(failure) => Devices::Failing(format!("{}: {}", failure.change, failure.error)),
            None => Devices::Unknown,
        }
    }

    /// Whether the devices and addresses of the target are in the kernel. Those of another backend
    /// may be missing: the cluster may leave it because they cannot be made.
    pub(crate) fn is_in_place(&self, status: &Status) -> bool {
        let is_known = status.settled && status.kernel_error.is_none();
        status.own_in_place || (is_known && self.failures(status).next().is_none())
    }

    /// The failures of devices and addresses of the target.
    fn failures<'a>(&self, status: &'a Status) -> impl Iterator<Item = &'a Failure> {
        let mut targets = self.all.iter().filter(|it| it.backend.kind() == self.target.kind());
        let footprint = targets.find_map(|it| it.backend.footprint(&it.config, None).ok());
        let footprint = footprint.unwrap_or_default();
        let concerns = move |key: &Key| !matches!(key, Key::Route(_)) && footprint.concerns(key);
        let of_node = status.failing.iter().filter(|(_, failure)| failure.peer.is_none());
        of_node.filter(move |(key, _)| concerns(key)).map(|(_, failure)| failure)
    }

    /// The footprint of all backends.
    ///
    /// # Errors
    /// The options of a backend are wrong.
    pub(crate) fn footprint(&self, uplink: Option<LinkName>) -> Result<Footprint, Error> {
        let mut footprint = Footprint::default();
        for Runs { backend, config, .. } in &self.all {
            footprint.merge(backend.footprint(config, uplink)?);
        }
        Ok(footprint)
    }

    /// The datapath of all backends.
    pub(crate) fn datapath(&self, settings: &DaemonConfig) -> Datapath {
        let mut datapaths = self.all.iter().map(|runs| settings.backends.datapath(&runs.config));
        let mut first = datapaths.next().unwrap_or_default();
        datapaths.for_each(|datapath| first.merge(datapath));
        first
    }

    /// The devices of withdrawn backends.
    pub(super) fn withdrawn_devices(&self) -> Vec<LinkName> {
        let withdrawn = self.all.iter().filter(|runs| !runs.member.offered);
        let footprint = |runs: &Runs| runs.backend.footprint(&runs.config, None).ok();
        withdrawn.filter_map(footprint).flat_map(|footprint| footprint.links).collect()
    }
}
