//! The backends of one network.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::backend::{Datapath, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::object::{Key, LinkName};
use flannel_core::status::{Failure, Status};
use flannel_core::{Backend, Config};
use flannel_route::PreparedBackend;
use flannel_route::moving::{BackendUse, NodeBackends};

use crate::config::DaemonConfig;
use crate::error::Error;

/// A backend that runs.
#[derive(Clone)]
pub(crate) struct ActiveBackend {
    pub(crate) backend: Arc<dyn Backend>,
    /// The network config with this backend.
    pub(crate) config: Config,
    pub(crate) usage: BackendUse,
}

/// The backends of one network, ready to be joined.
pub(crate) struct PreparedBackends {
    pub(crate) backends: ActiveBackends,
    /// The preparation of each backend, in the order of [`ActiveBackends::all`].
    pub(super) prepared: Vec<Prepared>,
}

impl PreparedBackends {
    /// The backends for [`Host::join_prepared`](flannel_route::Host::join_prepared).
    pub(crate) fn take_prepared(&mut self) -> Vec<PreparedBackend<'_>> {
        let prepared = std::mem::take(&mut self.prepared);
        let ranks = self.backends.offer_ranks();
        self.backends
            .all
            .iter()
            .zip(prepared)
            .zip(ranks)
            .map(|((it, prepared), rank)| {
                let in_use = flannel_route::BackendInUse::new(&*it.backend, &it.config);
                PreparedBackend { in_use: in_use.with_offer_rank(rank), prepared }
            })
            .collect()
    }
}

/// The backends of one network.
#[derive(Clone)]
pub(crate) struct ActiveBackends {
    /// In the order in which they are used for a peer that offers several.
    pub(crate) all: Vec<ActiveBackend>,
    /// In the order of the offers in the lease.
    pub(crate) order: NodeBackends,
    /// The backends that cannot be set up now. They are recorded, and tried again.
    pub(crate) absent: Vec<ActiveBackend>,
    /// The backend of the network config.
    pub(crate) target: Arc<dyn Backend>,
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

impl ActiveBackends {
    /// Whether this backend is one of them.
    pub(crate) fn runs(&self, backend: &dyn Backend) -> bool {
        self.all.iter().any(|it| it.backend.kind() == backend.kind())
    }

    /// The place of each backend's offer in the lease, in the order of `all`, or `None` if its
    /// offer is not published.
    fn offer_ranks(&self) -> Vec<Option<usize>> {
        self.all
            .iter()
            .map(|it| self.order.offered().position(|usage| *usage == it.usage))
            .collect()
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

    /// Whether the devices and addresses of the target are in the kernel. Devices of another
    /// backend may be missing: the cluster may leave it because they cannot be made.
    pub(crate) fn is_in_place(&self, status: &Status) -> bool {
        let is_known = status.settled && status.kernel_error.is_none();
        status.own_in_place || (is_known && self.failures(status).next().is_none())
    }

    /// The failures of devices and addresses of the target.
    fn failures<'a>(&self, status: &'a Status) -> impl Iterator<Item = &'a Failure> {
        let mut targets = self.all.iter().filter(|it| it.backend.kind() == self.target.kind());
        let footprint = targets.find_map(|it| it.backend.footprint(&it.config, None).ok());
        let footprint = footprint.unwrap_or_default();
        let of_node = status.failing.iter().filter(|(_, failure)| failure.peer.is_none());
        of_node
            .filter(move |(key, _)| !matches!(key, Key::Route(_)) && footprint.concerns(key))
            .map(|(_, failure)| failure)
    }

    /// The footprint of all backends.
    ///
    /// # Errors
    /// The options of a backend are wrong.
    pub(crate) fn footprint(&self, uplink: Option<LinkName>) -> Result<Footprint, Error> {
        let mut footprint = Footprint::default();
        for ActiveBackend { backend, config, .. } in &self.all {
            footprint.merge(backend.footprint(config, uplink)?);
        }
        Ok(footprint)
    }

    /// The datapath of all backends.
    pub(crate) fn datapath(&self, settings: &DaemonConfig) -> Datapath {
        let mut datapaths = self.all.iter().map(|it| settings.backends.datapath(&it.config));
        let mut first = datapaths.next().unwrap_or_default();
        datapaths.for_each(|datapath| first.merge(datapath));
        first
    }

    /// The devices of withdrawn backends.
    pub(crate) fn withdrawn_devices(&self) -> Vec<LinkName> {
        self.all
            .iter()
            .filter(|it| !it.usage.offered)
            .filter_map(|it| it.backend.footprint(&it.config, None).ok())
            .flat_map(|footprint| footprint.links)
            .collect()
    }
}
