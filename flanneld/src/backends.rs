//! The backends of this build: an explicit list, so that what is there can be seen.

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::{Alloc, Backend, Config, Dual, LinkName, Owned};

use crate::error::Error;

/// All backends.
pub(crate) fn all() -> [&'static dyn Backend; 3] {
    [&VxlanBackend, &HostGw, &Alloc]
}

/// The backend that the network config names (in lower case).
pub(crate) fn find(kind: &str) -> Result<&'static dyn Backend, Error> {
    all().into_iter().find(|backend| backend.name() == kind).ok_or_else(|| {
        let known: Vec<&str> = all().iter().map(|backend| backend.name()).collect();
        Error::UnknownBackend { kind: kind.to_owned(), known: known.join(", ") }
    })
}

/// The device through which each enabled family's packets go to peers; none with a backend that needs none.
pub(crate) fn devices(config: &Config) -> Dual<LinkName> {
    match config.backend.kind.as_str() {
        kind if kind == VxlanBackend.name() => VxlanBackend.devices(config).unwrap_or_default(),
        _ => Dual::default(),
    }
}

/// What a network has in the kernel, by whichever external interface, and as far as that is known of a backend whose options are wrong, or
/// that there is not. Nothing with a backend that puts nothing there.
pub(crate) fn footprint(config: &Config) -> Owned {
    if config.backend.kind == Alloc.name() {
        return Owned::default();
    }
    let links = devices(config).values().copied().collect();
    Owned { links, networks: config.pod_networks().collect(), blackholes: true, ..Owned::default() }
}

/// Peers on the same link are reached without the tunnel.
pub(crate) fn direct_routing(config: &Config) -> bool {
    let options = || flannel_backend_vxlan::Options::parse(&config.backend);
    config.backend.kind == VxlanBackend.name()
        && options().is_ok_and(|options| options.direct_routing)
}

/// Packets of pods go between some nodes as they are, without a tunnel.
pub(crate) fn has_bare_routes(config: &Config) -> bool {
    config.backend.kind == HostGw.name() || direct_routing(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_and_unknown_ones_are_listed() {
        assert_eq!(find("host-gw").unwrap().lease_type(), "host-gw");
        assert_eq!(find("alloc").unwrap().lease_type(), "");
        let error = find("vlxan").unwrap_err().to_string();
        assert!(error.contains("\"vlxan\"") && error.contains("vxlan, host-gw, alloc"), "{error}");
    }
}
