//! What [`Host::join`](crate::Host::join) takes and returns.

use flannel_core::backend::Prepared;
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Backend, Config, Lease, Network, Subnets};

use crate::kernel_network::EngineOptions;

/// Options of [`Host::join`](crate::Host::join).
///
/// ```
/// use std::time::Duration;
/// use flannel_route::{EngineOptions, JoinOptions};
///
/// let engine = EngineOptions::default().with_resync(Duration::from_secs(60));
/// let options = JoinOptions::default().with_engine(engine);
/// assert_eq!(options.lapsed, None);
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct JoinOptions {
    /// A lease that has expired while the store does not answer
    /// ([`Hints::lapsed`](flannel_core::subnet::Hints::lapsed)). The network then reaches peers,
    /// but does not install addresses of this lease. When a view is
    /// [`Live`](flannel_core::lease::Origin::Live), the store answers again: drop the network, read
    /// the hints and join again. If it is `None`, `join` acquires a lease.
    pub lapsed: Option<Lease>,
    /// The attributes in the lease of the last run. If the same backends have other data now, for
    /// example another key, the lease keeps the data of the last run until the next join
    /// ([`Joined::withholds_offers`]). So the kernel has the new key before peers use it. If it is
    /// `None`, the offers are published at once.
    pub published: Option<LeaseAttrs>,
    /// The subnets that the lease will probably have
    /// ([`Hints::previous`](flannel_core::subnet::Hints::previous)). If the lease gets others, or
    /// if it is `None`, an offer that depends on the subnets
    /// ([`Prepared::complete_offer`](flannel_core::backend::Prepared::complete_offer)) is written
    /// twice.
    pub previous: Option<Subnets>,
    /// Options of the route engine, which runs the networks of kernel objects.
    pub engine: EngineOptions,
}

impl JoinOptions {
    /// Sets [`JoinOptions::lapsed`].
    #[must_use]
    pub fn with_lapsed(self, lapsed: Option<Lease>) -> Self {
        Self { lapsed, ..self }
    }

    /// Sets [`JoinOptions::published`].
    #[must_use]
    pub fn with_published(self, published: Option<LeaseAttrs>) -> Self {
        Self { published, ..self }
    }

    /// Sets [`JoinOptions::previous`].
    #[must_use]
    pub fn with_previous(self, previous: Option<Subnets>) -> Self {
        Self { previous, ..self }
    }

    /// Sets [`JoinOptions::engine`].
    #[must_use]
    pub fn with_engine(self, engine: EngineOptions) -> Self {
        Self { engine, ..self }
    }
}

/// A network that this host has joined.
#[derive(Debug)]
#[non_exhaustive]
pub struct Joined {
    /// The network. It writes kernel objects only while it [runs](Network::run).
    pub network: Box<dyn Network>,
    /// Whether the lease has the backend data of the last run, because the present data differ from
    /// them ([`JoinOptions::published`]). When the objects of this node are in place, join again
    /// without that option, to publish the offers.
    pub withholds_offers: bool,
    /// Whether packets to a peer pass by the first backend only after a handshake
    /// ([`Blueprint::handshakes`](flannel_core::backend::Blueprint::handshakes)).
    pub needs_handshakes: bool,
}

/// One of the backends that a node uses at the same time
/// ([`Host::join_all`](crate::Host::join_all)).
///
/// ```
/// use flannel_route::BackendInUse;
///
/// /// Peers that offer both backends are reached by `new`. Go flannel still reads the offer of
/// /// `old`.
/// fn both<'a>(new: BackendInUse<'a>, old: BackendInUse<'a>) -> [BackendInUse<'a>; 2] {
///     [new.with_offer_rank(Some(1)), old.with_offer_rank(Some(0))]
/// }
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct BackendInUse<'a> {
    /// The backend.
    pub backend: &'a dyn Backend,
    /// The network config with this backend.
    pub config: &'a Config,
    /// The rank of its offer in the lease, or `None` if the offer is not published. The offer with
    /// the lowest rank is the [preferred](LeaseAttrs::preferred) one. Offers of equal rank keep the
    /// order of the backends.
    pub offer_rank: Option<usize>,
}

impl<'a> BackendInUse<'a> {
    /// A backend whose offer is published with the rank 0.
    pub const fn new(backend: &'a dyn Backend, config: &'a Config) -> Self {
        Self { backend, config, offer_rank: Some(0) }
    }

    /// Sets [`BackendInUse::offer_rank`].
    #[must_use]
    pub const fn with_offer_rank(self, offer_rank: Option<usize>) -> Self {
        Self { offer_rank, ..self }
    }
}

/// A backend and its preparation by [`Host::prepare`](crate::Host::prepare).
#[derive(Debug)]
pub struct PreparedBackend<'a> {
    /// The backend.
    pub in_use: BackendInUse<'a>,
    /// The result of [`Host::prepare`](crate::Host::prepare) for its backend and config.
    pub prepared: Prepared,
}
