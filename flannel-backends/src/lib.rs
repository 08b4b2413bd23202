#![doc = include_str!("../README.md")]

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::backend::{Alloc, Datapath};
use flannel_core::kernel::Footprint;
use flannel_core::object::LinkName;
use flannel_core::{Backend, Config};

/// The backends that a network config can name. [`Backends::default`] has those of this build.
#[derive(Debug, Clone)]
pub struct Backends {
    all: Vec<&'static dyn Backend>,
}

impl Default for Backends {
    fn default() -> Self {
        Self { all: vec![&VxlanBackend, &HostGw, &Alloc] }
    }
}

/// The config names a backend that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "network config: field Backend.Type: {kind:?} is not a backend of this build; it has {known}"
)]
pub struct UnknownBackend {
    /// The type in the config.
    pub kind: String,
    /// The types of this build.
    pub known: String,
}

impl Backends {
    /// The list with one backend more.
    pub fn with(mut self, backend: &'static dyn Backend) -> Self {
        self.all.push(backend);
        self
    }

    /// All backends.
    pub fn iter(&self) -> impl Iterator<Item = &'static dyn Backend> {
        self.all.iter().copied()
    }

    /// The backend of a type (in lower case).
    ///
    /// # Errors
    /// There is none of this type.
    pub fn find(&self, kind: &str) -> Result<&'static dyn Backend, UnknownBackend> {
        self.iter().find(|backend| backend.kind() == kind).ok_or_else(|| {
            let known: Vec<&str> = self.iter().map(Backend::kind).collect();
            UnknownBackend { kind: kind.to_owned(), known: known.join(", ") }
        })
    }

    /// How packets of pods travel with this config. Of an unknown backend, or one whose options are
    /// wrong, nothing is known: then it is the default.
    pub fn datapath(&self, config: &Config) -> Datapath {
        let backend = self.find(&config.backend.kind).ok();
        backend.and_then(|backend| backend.datapath(config).ok()).unwrap_or_default()
    }

    /// The backend type in the leases of a network with this config. An unknown backend has its own.
    pub fn lease_type<'a>(&'a self, config: &'a Config) -> &'a str {
        let kind = &config.backend.kind;
        self.find(kind).map_or(kind, |backend| backend.lease_type())
    }

    /// The devices that a network may have, those of families that are off included.
    pub fn links(&self, uplink: LinkName, config: &Config) -> Vec<LinkName> {
        let backend = self.find(&config.backend.kind).ok();
        let footprint = backend.and_then(|backend| backend.footprint(config, Some(uplink)).ok());
        footprint.map(|footprint| footprint.links.into_iter().collect()).unwrap_or_default()
    }

    /// What a network may have in the kernel, for any external interface. A network of an unknown
    /// backend, or of one whose options are wrong, may have anything in its pod networks.
    pub fn footprint(&self, config: &Config) -> Footprint {
        let backend = self.find(&config.backend.kind).ok();
        let footprint = backend.and_then(|backend| backend.footprint(config, None).ok());
        footprint.unwrap_or_else(|| Footprint {
            networks: config.pod_networks().collect(),
            blackholes: true,
            ..Footprint::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_unknown_ones_are_listed() {
        let backends = Backends::default();
        assert_eq!(backends.find("host-gw").unwrap().lease_type(), "host-gw");
        assert_eq!(backends.find("alloc").unwrap().lease_type(), "");
        let error = backends.find("vlxan").unwrap_err().to_string();
        assert!(error.contains("\"vlxan\"") && error.contains("vxlan, host-gw, alloc"), "{error}");
    }
}
