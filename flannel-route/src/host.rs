//! From a backend to a network that can run: prepare, acquire the lease, build.

use std::path::PathBuf;
use std::sync::Arc;

use flannel_core::address::Dual;
use flannel_core::backend::{
    Build, ExternalInterface, MemorySecrets, Node, NodeLease, Prepared, Secrets,
};
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Backend, Config, Error, Kernel, Lease, Result, Subnet, SubnetManager, Subnets};

use crate::filtered_network::FilteredNetwork;
use crate::join::{BackendInUse, JoinOptions, Joined, PreparedBackend};
use crate::kernel_network::{EngineOptions, KernelNetwork};
use crate::record_keepers::WithRecordKeepers;

/// The host on which networks run: its interface, its kernel, and the source of its leases.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Host {
    /// The interface that connects the host with its peers.
    pub uplink: ExternalInterface,
    /// The kernel of the host.
    pub kernel: Arc<dyn Kernel>,
    /// The source of the leases of the host and of its peers.
    pub subnets: Arc<dyn SubnetManager>,
    /// See [`Node::machine_id`].
    pub machine_id: String,
    /// The secrets that backends keep on this host.
    pub secrets: Arc<dyn Secrets>,
    /// The directory in which a record keeper keeps its files. If it is `None`, record keepers lose
    /// their state at a restart.
    pub state_dir: Option<PathBuf>,
}

impl Host {
    /// A host without a machine id. Its secrets are kept in memory, as long as this value and its
    /// clones exist.
    pub fn new(
        uplink: ExternalInterface,
        kernel: Arc<dyn Kernel>,
        subnets: Arc<dyn SubnetManager>,
    ) -> Self {
        let secrets = Arc::new(MemorySecrets::default());
        Self { uplink, kernel, subnets, machine_id: String::new(), secrets, state_dir: None }
    }

    /// Sets the directory for the files of record keepers. See [`Backend::record_keepers`].
    #[must_use]
    pub fn with_state_dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { state_dir: Some(dir.into()), ..self }
    }

    /// Sets the machine id. See [`Node::machine_id`].
    #[must_use]
    pub fn with_machine_id(self, machine_id: impl Into<String>) -> Self {
        Self { machine_id: machine_id.into(), ..self }
    }

    /// Sets the secrets, for example in files (`flannel_options::FileSecrets`).
    #[must_use]
    pub fn with_secrets(self, secrets: Arc<dyn Secrets>) -> Self {
        Self { secrets, ..self }
    }

    /// Prepares the backend, acquires the node's lease with its offer, and builds the network. It
    /// writes no kernel object: a network writes only while it runs.
    ///
    /// Neither `join` nor the network renews the lease. The caller runs
    /// [`SubnetManager::hold_lease`] with the lease of the network's handle, at the same time as
    /// [`Network::run`](flannel_core::Network::run). When `hold_lease` returns, the caller drops
    /// the future of `run`. Do not call `hold_lease` for a lapsed lease ([`JoinOptions::lapsed`]).
    /// The [front page](crate#the-lease) lists the other futures that a caller may run.
    ///
    /// # Errors
    /// The backend refuses the config or the host, or the lease cannot be acquired
    /// ([`SubnetManager::acquire_lease`]) or completed ([`SubnetManager::publish`]). After
    /// [`Error::Conflict`] another call may succeed.
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease may have been acquired. The next call finds it.
    pub async fn join(
        &self,
        backend: &dyn Backend,
        config: &Config,
        options: JoinOptions,
    ) -> Result<Joined> {
        self.join_all(&[BackendInUse::new(backend, config)], options).await
    }

    /// Joins a network of several backends, for a node that moves from one backend to another.
    /// Packets to a peer take the first of `backends` that accepts an offer of the peer. The
    /// network has the objects of all backends, and the smallest of their MTUs. The pod networks of
    /// all configs must be the same.
    ///
    /// # Errors
    /// The errors of [`Host::join`]. It is also an error if no backend publishes an offer, or if
    /// there are several backends and one [cannot move](Backend::can_move). In these two cases
    /// nothing was done.
    ///
    /// # Cancel safety
    /// As [`Host::join`].
    pub async fn join_all(
        &self,
        backends: &[BackendInUse<'_>],
        options: JoinOptions,
    ) -> Result<Joined> {
        check_selection(backends.iter())?;
        let mut all = Vec::new();
        for in_use in backends {
            let prepared = self.prepare(in_use.backend, in_use.config).await?;
            all.push(PreparedBackend { in_use: *in_use, prepared });
        }
        self.join_prepared(all, options).await
    }

    /// The first part of [`Host::join_all`] for one of its backends: [`Backend::validate`] and
    /// [`Backend::prepare`]. The second part is [`Host::join_prepared`]. So a caller can leave out
    /// a backend that cannot be prepared, and can record the others before their offers are
    /// published.
    ///
    /// The offer and the blueprint get the backend's [lease type](Backend::lease_type).
    ///
    /// # Errors
    /// The errors of [`Backend::validate`] and [`Backend::prepare`].
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn prepare(&self, backend: &dyn Backend, config: &Config) -> Result<Prepared> {
        backend.validate(config, Some(&self.uplink))?;
        let node =
            Node::new(&self.uplink, &self.machine_id, &self.kernel, &*self.secrets, &*self.subnets);
        let lease_type = backend.lease_type();
        let mut prepared = backend.prepare(&node, config).await?;
        prepared.offer.kind = lease_type.into();
        Ok(prepared.map_blueprint(move |mut blueprint, _| {
            blueprint.lease_type = (!blueprint.any_lease_type).then_some(lease_type);
            blueprint
        }))
    }

    /// The second part of [`Host::join_all`]: acquires the lease with the offers of `backends`, and
    /// builds the network.
    ///
    /// # Errors
    /// The errors of [`Host::join_all`], except the errors of [`Host::prepare`].
    ///
    /// # Cancel safety
    /// As [`Host::join`].
    pub async fn join_prepared(
        &self,
        backends: Vec<PreparedBackend<'_>>,
        options: JoinOptions,
    ) -> Result<Joined> {
        check_selection(backends.iter().map(|prepared| &prepared.in_use))?;
        let kernel = self.kernel_of(&backends);
        let networks = backends[0].in_use.config.pod_networks().collect();
        let Acquired { lease, withholds_offers } = match &options.lapsed {
            Some(lease) => {
                let Asked { attrs, withholds_offers } =
                    asked(&backends, &options, Some(&lease.subnets));
                let lease = NodeLease::Lapsed(Lease { attrs, ..lease.clone() });
                Acquired { lease, withholds_offers }
            }
            None => self.acquire(&backends, &options).await?,
        };
        let joined = build(backends, kernel, lease, networks, options.engine)?;
        Ok(Joined { withholds_offers, ..joined })
    }

    /// Acquires the lease. If an offer depends on the subnets of the lease, the previous subnets
    /// are expected. If the lease has others, the offers are published again.
    async fn acquire(
        &self,
        backends: &[PreparedBackend<'_>],
        options: &JoinOptions,
    ) -> Result<Acquired> {
        let depends = |backend: &PreparedBackend<'_>| backend.prepared.complete_offer.is_some();
        let completes = self.subnets.publishes_attrs() && backends.iter().any(depends);
        let expected = options.previous.filter(|_| completes);
        let first = asked(backends, options, expected.as_ref());
        let lease = self.subnets.acquire_lease(&first.attrs).await?;
        if !completes || expected == Some(lease.subnets) {
            let lease = NodeLease::Held(lease);
            return Ok(Acquired { lease, withholds_offers: first.withholds_offers });
        }
        let complete = asked(backends, options, Some(&lease.subnets));
        let lease = if complete.attrs.to_json() == first.attrs.to_json() {
            lease
        } else {
            self.subnets.publish(&lease, &complete.attrs).await?
        };
        let lease = NodeLease::Held(lease);
        Ok(Acquired { lease, withholds_offers: complete.withholds_offers })
    }

    /// The kernel of a network of these backends, with the records of their record keepers.
    fn kernel_of(&self, backends: &[PreparedBackend<'_>]) -> Arc<dyn Kernel> {
        let mut record_keepers = Vec::new();
        for PreparedBackend { in_use, .. } in backends {
            record_keepers.extend(in_use.backend.record_keepers(self.state_dir.as_deref()));
        }
        let kernel = Arc::clone(&self.kernel);
        if record_keepers.is_empty() {
            kernel
        } else {
            Arc::new(WithRecordKeepers::new(kernel, record_keepers))
        }
    }
}

/// Builds a network for the lease. [`check_selection`] has accepted the backends.
fn build(
    backends: Vec<PreparedBackend<'_>>,
    kernel: Arc<dyn Kernel>,
    lease: NodeLease,
    networks: Dual<Subnet>,
    options: EngineOptions,
) -> Result<Joined> {
    let is_single = backends.len() == 1;
    let mut blueprints = Vec::new();
    for PreparedBackend { in_use, prepared } in backends {
        let BackendInUse { backend, config, .. } = in_use;
        match prepared.build {
            Build::Blueprint(build) => {
                let blueprint = build(&lease)?;
                blueprints.push(if config.require_encryption {
                    blueprint.only_encrypted(&backend.datapath(config)?)
                } else {
                    blueprint
                });
            }
            // It has returned `true` from `can_move`, which is wrong.
            Build::Network(_) if !is_single => return Err(cannot_move(backend)),
            Build::Network(build) => {
                if config.require_encryption && backend.datapath(config)?.encrypted.is_empty() {
                    let why = "the network config has RequireEncryption, and it does not encrypt";
                    return Err(refuse(backend, why));
                }
                let inner = build(&lease)?;
                let own = lease.lease().clone();
                let network = FilteredNetwork::new(inner, own, networks, backend.lease_type());
                return Ok(Joined {
                    network: Box::new(network),
                    withholds_offers: false,
                    needs_handshakes: false,
                });
            }
        }
    }
    let needs_handshakes = blueprints.first().is_some_and(|blueprint| blueprint.handshakes);
    let network = KernelNetwork::new(kernel, lease, networks, blueprints).with_options(options);
    Ok(Joined { network: Box::new(network), withholds_offers: false, needs_handshakes })
}

/// The lease of this node, with the offers that it publishes.
struct Acquired {
    lease: NodeLease,
    /// [`Asked::withholds_offers`].
    withholds_offers: bool,
}

/// What the store is asked to publish.
struct Asked {
    attrs: LeaseAttrs,
    /// The data of the last run is published, and the backends have other data now.
    withholds_offers: bool,
}

/// What to publish in a lease with these subnets, or before the subnets are known.
fn asked(
    backends: &[PreparedBackend<'_>],
    options: &JoinOptions,
    subnets: Option<&Subnets>,
) -> Asked {
    let now = offers(backends, subnets);
    let Some(last) = &options.published else {
        return Asked { attrs: now, withholds_offers: false };
    };
    // An offer without what depends on the subnets, or with other subnets, is not another offer.
    let is_last = |offers: &LeaseAttrs| with_data_of(last, offers).to_json() == offers.to_json();
    let same = [None, options.previous.as_ref(), subnets];
    if same.into_iter().any(|subnets| is_last(&offers(backends, subnets))) {
        return Asked { attrs: now, withholds_offers: false };
    }
    Asked { attrs: with_data_of(last, &now), withholds_offers: true }
}

/// The attributes of a lease with the offers of these backends, by rank. The offers are complete if
/// the subnets of the lease are known.
fn offers(backends: &[PreparedBackend<'_>], subnets: Option<&Subnets>) -> LeaseAttrs {
    let published = backends.iter().filter(|backend| backend.in_use.offer_rank.is_some());
    let mut ranked: Vec<_> = published.collect();
    ranked.sort_by_key(|backend| backend.in_use.offer_rank);
    let mut offers = ranked.into_iter().map(|backend| {
        let mut offer = backend.prepared.offer.clone();
        if let (Some(complete), Some(subnets)) = (&backend.prepared.complete_offer, subnets) {
            complete(subnets, &mut offer);
        }
        offer
    });
    LeaseAttrs { preferred: offers.next().unwrap_or_default(), others: offers.collect() }
}

/// The offers with the data of the last run, if the last run offered the same backends.
fn with_data_of(last: &LeaseAttrs, now: &LeaseAttrs) -> LeaseAttrs {
    let mut attrs = now.clone();
    let before = last.offers().map(|offer| &offer.kind);
    if before.eq(now.offers().map(|offer| &offer.kind)) {
        attrs.preferred.data = last.preferred.data.clone();
        for (offer, last) in attrs.others.iter_mut().zip(&last.others) {
            offer.data = last.data.clone();
        }
    }
    attrs
}

/// Checks that a network can have these backends.
fn check_selection<'a>(backends: impl Iterator<Item = &'a BackendInUse<'a>> + Clone) -> Result<()> {
    if backends.clone().all(|in_use| in_use.offer_rank.is_none()) {
        let kinds: Vec<_> = backends.map(|in_use| in_use.backend.kind()).collect();
        let backend = if kinds.is_empty() { "(none)".to_owned() } else { kinds.join(", ") };
        let reason = "at least one backend must publish its offer".to_owned();
        return Err(Error::Backend { backend, reason });
    }
    let is_single = backends.clone().count() == 1;
    match backends.into_iter().find(|in_use| !in_use.backend.can_move()) {
        Some(in_use) if !is_single => Err(cannot_move(in_use.backend)),
        _ => Ok(()),
    }
}

fn cannot_move(backend: &dyn Backend) -> Error {
    refuse(backend, "it does not run beside another backend")
}

fn refuse(backend: &dyn Backend, reason: &str) -> Error {
    Error::Backend { backend: backend.kind().to_owned(), reason: reason.to_owned() }
}
