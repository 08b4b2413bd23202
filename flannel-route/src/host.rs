//! From a backend to a network that can run: prepare, acquire the lease, build.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::{Handshakes, PathMtus, ViewFilter};
use crate::annex::WithAnnexes;
use flannel_core::backend::{
    Built, ExternalInterface, MemorySecrets, Node, NodeLease, Prepared, Secrets,
};
use flannel_core::kernel::ProcessNames;
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Backend, Config, Error, Kernel, Lease, Result, SubnetManager};
use tokio::sync::watch;

use crate::host_network::{CustomNetwork, HostNetwork};
use crate::kernel_network::KernelNetwork;

/// This host: its interface, its kernel, and the source of its leases.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Host {
    /// The interface that connects it with its peers.
    pub uplink: ExternalInterface,
    /// Its kernel.
    pub kernel: Arc<dyn Kernel>,
    /// The source of its lease, and of its peers' leases.
    pub subnets: Arc<dyn SubnetManager>,
    /// See [`Node::machine_id`].
    pub machine_id: String,
    /// The secrets that backends keep on this host.
    pub secrets: Arc<dyn Secrets>,
    /// The directory in which an annex keeps its files. `None`: annexes keep nothing over restarts.
    pub state_dir: Option<PathBuf>,
    /// See [`KernelNetwork::with_process_names`]. `None`: the network does not look up names.
    pub process_names: Option<Arc<dyn ProcessNames>>,
}

/// Options of [`Host::join`].
#[derive(Debug, Clone, Default)]
pub struct JoinOptions {
    /// [`Hints::lapsed`](flannel_core::subnet::Hints::lapsed): the lease has expired, and the store
    /// does not answer. The network then reaches peers, but installs no address of this lease. When
    /// a view is [`Live`](flannel_core::lease::Origin::Live), the store answers again: drop the
    /// network, read the hints and join again. `None`: `join` acquires a lease.
    pub lapsed: Option<Lease>,
    /// See [`KernelNetwork::drop_unused_addresses`]. Has no effect on a network that runs itself.
    pub drop_unused_addresses: bool,
    /// See [`KernelNetwork::with_resync`]. Has no effect on a network that runs itself.
    pub resync: Option<Duration>,
    /// See [`KernelNetwork::with_path_mtus`]. Has no effect on a network that runs itself.
    pub path_mtus: Option<watch::Receiver<PathMtus>>,
    /// See [`KernelNetwork::with_handshakes`]. Has no effect on a network that runs itself.
    pub handshakes: Option<watch::Receiver<Handshakes>>,
    /// The attributes in the lease of the last run. If the data of the same backends differ from
    /// them now, for example by another key, the lease keeps the data until the next join
    /// ([`HostNetwork::withholds_offers`]). So the kernel has the new key before peers use it.
    /// `None`: the offers are published at once.
    pub published: Option<LeaseAttrs>,
}

/// A backend of a network, and its preparation by [`Host::prepare`].
#[derive(Debug)]
pub struct PreparedMember<'a> {
    /// The backend.
    pub backend: &'a dyn Backend,
    /// The network config with this backend.
    pub config: &'a Config,
    /// The result of [`Host::prepare`] for both.
    pub prepared: Prepared,
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
        let (machine_id, state_dir, process_names) = Default::default();
        Self { uplink, kernel, subnets, machine_id, secrets, state_dir, process_names }
    }

    /// The same host with a directory for the files of annexes. See [`Backend::annexes`].
    #[must_use]
    pub fn with_state_dir(self, dir: impl Into<PathBuf>) -> Self {
        Self { state_dir: Some(dir.into()), ..self }
    }

    /// The same host with this machine id. See [`Node::machine_id`].
    #[must_use]
    pub fn with_machine_id(self, machine_id: impl Into<String>) -> Self {
        Self { machine_id: machine_id.into(), ..self }
    }

    /// The same host with these secrets, for example in files (`flannel_options::FileSecrets`).
    #[must_use]
    pub fn with_secrets(self, secrets: Arc<dyn Secrets>) -> Self {
        Self { secrets, ..self }
    }

    /// The same host with process names, for example of `flannel_netlink::NetlinkKernel`. See
    /// [`KernelNetwork::with_process_names`].
    #[must_use]
    pub fn with_process_names(self, names: Arc<dyn ProcessNames>) -> Self {
        Self { process_names: Some(names), ..self }
    }

    /// Prepares the backend, acquires the node's lease with its offer, and builds the network. It
    /// writes no kernel object: a network writes only while it runs. [`Backend::prepare`] validates
    /// the config, so `join` does not call [`Backend::validate`].
    ///
    /// Neither `join` nor the network renews the lease. The caller runs
    /// [`SubnetManager::hold_lease`] with the lease of the network's handle, at the same time as
    /// [`HostNetwork::run`]. If it returns, the caller drops `run`. A lapsed lease is not held. The
    /// [front page](crate#the-lease) lists the other futures that a caller may run.
    ///
    /// # Errors
    /// The backend refuses the config or the host, or the lease cannot be acquired
    /// ([`SubnetManager::acquire_lease`]).
    ///
    /// # Cancel safety
    /// If the future is dropped, a lease may have been acquired. The next call finds it.
    pub async fn join(
        &self,
        backend: &dyn Backend,
        config: &Config,
        options: JoinOptions,
    ) -> Result<HostNetwork> {
        self.join_all(&[(backend, config)], &[0], options).await
    }

    /// The same for a node that moves from one backend to another, with the networks of several
    /// backends in one. A peer is reached by the first of `members` that accepts one of its offers.
    /// The objects of this node are those of all members, and the MTU is the smallest.
    ///
    /// `offers` has the indexes of the members whose offers the lease publishes, the preferred one
    /// first. The pod networks of all configs must be the same.
    ///
    /// # Errors
    /// As [`Host::join`]. There is more than one member, and one
    /// [cannot move](Backend::can_move). `offers` is empty, has a number twice, or a number in it
    /// is not an index of `members`. In these cases nothing was done.
    ///
    /// # Cancel safety
    /// As [`Host::join`].
    pub async fn join_all(
        &self,
        members: &[(&dyn Backend, &Config)],
        offers: &[usize],
        options: JoinOptions,
    ) -> Result<HostNetwork> {
        if !is_selection(offers, members.len()) {
            return Err(no_selection(offers, members.iter().map(|(backend, _)| *backend)));
        }
        let mut alone = members.iter().filter(|(backend, _)| !backend.can_move());
        if let Some((backend, _)) = alone.next().filter(|_| members.len() > 1) {
            return Err(runs_alone(*backend));
        }
        let mut prepared = Vec::new();
        for (backend, config) in members {
            let prepared_member = self.prepare(*backend, config).await?;
            prepared.push(PreparedMember { backend: *backend, config, prepared: prepared_member });
        }
        self.join_prepared(prepared, offers, options).await
    }

    /// The first part of [`Host::join_all`], for one of its members: [`Backend::prepare`]. The
    /// second part is [`Host::join_prepared`]. So a caller can leave out a member that cannot be
    /// prepared, and can record the others before their offers are published.
    ///
    /// # Errors
    /// Those of [`Backend::prepare`].
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn prepare(&self, backend: &dyn Backend, config: &Config) -> Result<Prepared> {
        let node =
            Node::new(&self.uplink, &self.machine_id, &self.kernel, &*self.secrets, &*self.subnets);
        backend.prepare(&node, config).await
    }

    /// The second part of [`Host::join_all`]: acquires the lease with the offers of `members`, and
    /// builds the network.
    ///
    /// # Errors
    /// Those of [`Host::join_all`], except those of [`Backend::prepare`].
    ///
    /// # Cancel safety
    /// As [`Host::join`].
    pub async fn join_prepared(
        &self,
        members: Vec<PreparedMember<'_>>,
        offers: &[usize],
        options: JoinOptions,
    ) -> Result<HostNetwork> {
        let Some((first, others)) =
            offers.split_first().filter(|_| is_selection(offers, members.len()))
        else {
            return Err(no_selection(offers, members.iter().map(|member| member.backend)));
        };
        let mut alone = members.iter().filter(|member| !member.backend.can_move());
        if let Some(member) = alone.next().filter(|_| members.len() > 1) {
            return Err(runs_alone(member.backend));
        }
        let mut annexes = Vec::new();
        for member in &members {
            annexes.extend(member.backend.annexes(self.state_dir.as_deref()));
        }
        let offer = |member: &usize| members[*member].prepared.offer.clone();
        let offers_now =
            LeaseAttrs { preferred: offer(first), others: others.iter().map(offer).collect() };
        let attrs = match &options.published {
            Some(last) => with_data_of(last, &offers_now),
            None => offers_now.clone(),
        };
        let withholds_offers = attrs.to_json() != offers_now.to_json();
        let lease = match options.lapsed {
            Some(lease) => NodeLease::Lapsed(Lease { attrs, ..lease }),
            None => NodeLease::Held(self.subnets.acquire_lease(&attrs).await?),
        };
        let networks = members[*first].config.pod_networks().collect();
        let runs_alone_here = members.len() == 1;
        let mut kernel = Arc::clone(&self.kernel);
        if !annexes.is_empty() {
            kernel = Arc::new(WithAnnexes::new(kernel, annexes));
        }
        let mut blueprints = Vec::new();
        for PreparedMember { backend, config, prepared } in members {
            match (prepared.build)(&lease)? {
                Built::Kernel(blueprint) if config.require_encryption => {
                    blueprints.push(blueprint.only_encrypted(&backend.datapath(config)?));
                }
                Built::Kernel(blueprint) => blueprints.push(blueprint),
                Built::Custom(_) if !runs_alone_here => return Err(runs_alone(backend)),
                Built::Custom(_) if config.require_encryption && !encrypts(backend, config)? => {
                    let reason =
                        "the network config has RequireEncryption, and it does not encrypt";
                    let (backend, reason) = (backend.kind().to_owned(), reason.to_owned());
                    return Err(Error::Backend { backend, reason });
                }
                Built::Custom(network) => {
                    let own = lease.lease().clone();
                    let filter = ViewFilter::new(own, networks, backend.lease_type());
                    return Ok(HostNetwork::Custom(Box::new(CustomNetwork { network, filter })));
                }
            }
        }
        let mut network = KernelNetwork::new(kernel, lease, networks, blueprints);
        (network.names, network.resync) = (self.process_names.clone(), options.resync);
        network.mtus = options.path_mtus.unwrap_or(network.mtus);
        network.handshakes = options.handshakes.unwrap_or(network.handshakes);
        network.withholds_offers = withholds_offers;
        if options.drop_unused_addresses {
            network = network.drop_unused_addresses();
        }
        Ok(HostNetwork::Kernel(Box::new(network)))
    }
}

/// The offers with the data of the last run, if they are of the same backends.
fn with_data_of(last: &LeaseAttrs, now: &LeaseAttrs) -> LeaseAttrs {
    let kinds = |attrs: &LeaseAttrs| attrs.offers().map(|it| it.kind.clone()).collect();
    let [before, after]: [Vec<_>; 2] = [kinds(last), kinds(now)];
    let mut attrs = now.clone();
    if before == after {
        attrs.preferred.data = last.preferred.data.clone();
        for (offer, last) in attrs.others.iter_mut().zip(&last.others) {
            offer.data = last.data.clone();
        }
    }
    attrs
}

fn encrypts(backend: &dyn Backend, config: &Config) -> Result<bool> {
    Ok(!backend.datapath(config)?.encrypted.is_empty())
}

/// Whether the offers are different indexes of one or more of so many members.
fn is_selection(offers: &[usize], members: usize) -> bool {
    let are_once = (1..offers.len()).all(|end| !offers[..end].contains(&offers[end]));
    !offers.is_empty() && are_once && offers.iter().all(|member| *member < members)
}

fn no_selection<'a>(offers: &[usize], backends: impl Iterator<Item = &'a dyn Backend>) -> Error {
    let kinds: Vec<_> = backends.map(|backend| backend.kind()).collect();
    let backend = if kinds.is_empty() { "(none)".to_owned() } else { kinds.join(", ") };
    let reason = format!("the offers {offers:?} are not different indexes of one or more backends");
    Error::Backend { backend, reason }
}

fn runs_alone(backend: &dyn Backend) -> Error {
    let reason = "it does not run beside another backend".to_owned();
    Error::Backend { backend: backend.kind().to_owned(), reason }
}
