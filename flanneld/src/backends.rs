//! The backends of this build: an explicit list, so that what is there can be seen.

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::{Alloc, Backend, Config, Datapath, Dual, LinkName, Owned};

use crate::error::Error;

/// All backends.
pub(crate) fn all() -> [&'static dyn Backend; 3] {
    [&VxlanBackend, &HostGw, &Alloc]
}

/// The backend that the network config names (in lower case).
pub(crate) fn find(kind: &str) -> Result<&'static dyn Backend, Error> {
    all().into_iter().find(|backend| backend.kind() == kind).ok_or_else(|| {
        let known: Vec<&str> = all().iter().map(|backend| backend.kind()).collect();
        Error::UnknownBackend { kind: kind.to_owned(), known: known.join(", ") }
    })
}

/// How packets travel between nodes; as with a backend without tunnel where the config is wrong.
pub(crate) fn datapath(config: &Config) -> Datapath {
    find(&config.backend.kind).and_then(|backend| Ok(backend.datapath(config)?)).unwrap_or_default()
}

/// The device through which each enabled family's packets go to peers; none with a backend that needs none.
pub(crate) fn devices(config: &Config) -> Dual<LinkName> {
    datapath(config).devices
}

/// What a network has in the kernel, by whichever external interface. Of a backend that is unknown or whose options are wrong:
/// what may be inside the pod networks.
pub(crate) fn footprint(config: &Config) -> Owned {
    let footprint =
        find(&config.backend.kind).and_then(|backend| Ok(backend.footprint(config, None)?));
    footprint.unwrap_or_else(|_| Owned {
        networks: config.pod_networks().collect(),
        blackholes: true,
        ..Owned::default()
    })
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
