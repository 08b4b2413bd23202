#![doc = include_str!("../README.md")]

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::{Alloc, Backend, Config, Dual, LinkName, Owned};

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

/// How packets of pods travel to other nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Datapath {
    /// The tunnel device of each enabled family; empty without tunnels.
    pub tunnels: Dual<LinkName>,
    /// Peers on the same link are reached without the tunnel.
    pub direct_routing: bool,
    /// Packets of pods travel between some nodes without a tunnel.
    pub bare_routes: bool,
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
        self.iter().find(|backend| backend.name() == kind).ok_or_else(|| {
            let known: Vec<&str> = self.iter().map(Backend::name).collect();
            UnknownBackend { kind: kind.to_owned(), known: known.join(", ") }
        })
    }

    /// How packets of pods travel with this config.
    pub fn datapath(&self, config: &Config) -> Datapath {
        let is = |backend: &dyn Backend| config.backend.kind == backend.name();
        let direct_routing = is(&VxlanBackend)
            && flannel_backend_vxlan::Options::parse(&config.backend)
                .is_ok_and(|options| options.direct_routing);
        let tunnels = match is(&VxlanBackend) {
            true => VxlanBackend.devices(config).unwrap_or_default(),
            false => Dual::default(),
        };
        Datapath { tunnels, direct_routing, bare_routes: is(&HostGw) || direct_routing }
    }

    /// The header that a tunnel of a backend adds to each packet, in bytes; empty without tunnels.
    pub fn overhead(&self, kind: &str) -> Dual<u32> {
        match kind == VxlanBackend.name() {
            true => Dual::from_fn(|family| Some(flannel_backend_vxlan::overhead(family))),
            false => Dual::default(),
        }
    }

    /// The devices that a network may have, those of families that are off included.
    pub fn links(&self, uplink: LinkName, config: &Config) -> Vec<LinkName> {
        let owned = self.find(&config.backend.kind).ok();
        let owned = owned.and_then(|backend| backend.owned(uplink, config).ok());
        owned.map(|owned| owned.links.into_iter().collect()).unwrap_or_default()
    }

    /// What a network may have in the kernel, for any external interface. A network of an unknown
    /// backend may have anything in its pod networks; `alloc` has nothing.
    pub fn footprint(&self, config: &Config) -> Owned {
        if config.backend.kind == Alloc.name() {
            return Owned::default();
        }
        let links = self.datapath(config).tunnels.values().copied().collect();
        let networks = config.pod_networks().collect();
        Owned { links, networks, blackholes: true, ..Owned::default() }
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
