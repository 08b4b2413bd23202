//! The list of backends.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::backend::Datapath;
use flannel_core::kernel::Footprint;
use flannel_core::object::LinkName;
use flannel_core::{Backend, Config};

/// The backends that a network config can name.
///
/// A backend may keep state, for example the tasks of `extension`. Clones of a list have the same
/// backends, so give each daemon of a process a list of its own.
#[derive(Debug, Clone, Default)]
pub struct Backends {
    all: Vec<Arc<dyn Backend>>,
}

/// The config names a backend that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "network config: field Backend.Type: {kind:?} is not a backend of this build; it has {known}"
)]
pub struct UnknownBackend {
    /// The type in the config.
    pub kind: String,
    /// The types that exist, separated by commas.
    pub known: String,
}

impl Backends {
    /// Adds a backend. Of several backends with one type, the first one is used.
    #[must_use]
    pub fn with(mut self, backend: Arc<dyn Backend>) -> Self {
        self.all.push(backend);
        self
    }

    /// Replaces the backend with the same type, if the list has one.
    pub(crate) fn replacing(mut self, backend: &Arc<dyn Backend>) -> Self {
        for other in self.all.iter_mut().filter(|other| other.kind() == backend.kind()) {
            *other = Arc::clone(backend);
        }
        self
    }

    /// All backends.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Backend>> {
        self.all.iter()
    }

    /// The backend of a type in lower case.
    ///
    /// # Errors
    /// A backend of this type does not exist. The error lists all types.
    pub fn find(&self, kind: &str) -> Result<&Arc<dyn Backend>, UnknownBackend> {
        self.iter().find(|backend| backend.kind() == kind).ok_or_else(|| {
            let known: Vec<&str> = self.iter().map(|backend| backend.kind()).collect();
            UnknownBackend { kind: kind.to_owned(), known: known.join(", ") }
        })
    }

    /// [`Backend::datapath`]. The default if the backend is unknown or its options are wrong.
    pub fn datapath(&self, config: &Config) -> Datapath {
        let backend = self.find(&config.backend.kind).ok();
        backend.and_then(|backend| backend.datapath(config).ok()).unwrap_or_default()
    }

    /// The lease types of the backends in this list that encrypt. Whether a backend encrypts may
    /// depend on its options. The backend that `config` names is judged by its options there, and
    /// all others by empty options.
    pub fn encrypted_types(&self, config: &Config) -> BTreeSet<&'static str> {
        let encrypts = |backend: &&Arc<dyn Backend>| {
            let mut config = config.clone();
            if config.backend.kind != backend.kind() {
                config.backend.options = "{}".to_owned();
            }
            backend.datapath(&config).is_ok_and(|datapath| !datapath.encrypted.is_empty())
        };
        self.iter().filter(encrypts).map(|backend| backend.lease_type()).collect()
    }

    /// [`Backend::lease_type`]. For an unknown backend, the type in the config.
    pub fn lease_type<'a>(&'a self, config: &'a Config) -> &'a str {
        let kind = &config.backend.kind;
        self.find(kind).map_or(kind, |backend| backend.lease_type())
    }

    /// The devices that a network with this config owns, those of disabled families included.
    pub fn links(&self, uplink: LinkName, config: &Config) -> Vec<LinkName> {
        let footprint = self.known_footprint(config, Some(uplink));
        footprint.map(|footprint| footprint.links.into_iter().collect()).unwrap_or_default()
    }

    /// [`Backend::footprint`] without an external interface. If the backend is unknown or its
    /// options are wrong, everything inside the pod networks.
    pub fn footprint(&self, config: &Config) -> Footprint {
        self.known_footprint(config, None).unwrap_or_else(|| Footprint {
            networks: config.pod_networks().collect(),
            blackholes: true,
            ..Footprint::default()
        })
    }

    /// [`Backend::footprint`], or `None` if the backend is unknown or its options are wrong.
    pub fn known_footprint(&self, config: &Config, uplink: Option<LinkName>) -> Option<Footprint> {
        self.find(&config.backend.kind).ok()?.footprint(config, uplink).ok()
    }
}
