#![doc = include_str!("../README.md")]

mod list;

use std::sync::LazyLock;

use flannel_backend_alloc::Alloc;
use flannel_backend_extension::Extension;
use flannel_backend_hostgw::HostGw;
use flannel_backend_ipip::Ipip;
use flannel_backend_udp::UdpBackend;
use flannel_backend_vxlan::VxlanBackend;
use flannel_backend_wireguard::WireguardBackend;
use flannel_firewall::{Guarded, Usual};

pub use flannel_backend_udp::run_if_started;
pub use flannel_backend_wireguard::{SECRET as WIREGUARD_KEY, is_key as is_wireguard_key};

pub use self::list::{Backends, UnknownBackend};

/// It has an annex for each state directory.
static EXTENSION: Extension = Extension::new();

/// It has a data plane for each state directory.
static UDP: LazyLock<Guarded<UdpBackend>> =
    LazyLock::new(|| Guarded::new(UdpBackend::new(), "guard-udp", Usual::Always));

/// Behind a NAT, and on nodes with several ways to a peer, packets may come from other addresses
/// than Go flannel expects, so a config has to ask for the check.
static VXLAN: LazyLock<Guarded<VxlanBackend>> =
    LazyLock::new(|| Guarded::new(VxlanBackend, "guard-vxlan", Usual::Off));

static IPIP: LazyLock<Guarded<Ipip>> =
    LazyLock::new(|| Guarded::new(Ipip, "guard-ipip", Usual::IfPossible));

static UNGUARDED_IPIP: LazyLock<Guarded<Ipip>> =
    LazyLock::new(|| Guarded::new(Ipip, "guard-ipip", Usual::Off));

/// The backends of this build.
pub fn all() -> Backends {
    let routing = Backends::default().with(&*VXLAN).with(&HostGw).with(&*IPIP);
    routing.with(&WireguardBackend).with(&*UDP).with(&EXTENSION).with(&Alloc)
}

/// The same backends. A tunnel without ports (`ipip`) takes packets from every host, unless the
/// config has `SourceCheck`.
pub fn without_guard_of_protocols(backends: Backends) -> Backends {
    backends.replacing(&*UNGUARDED_IPIP)
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_found_and_unknown_ones_are_listed() {
        let backends = super::all();
        assert_eq!(backends.find("host-gw").unwrap().lease_type(), "host-gw");
        assert_eq!(backends.find("alloc").unwrap().lease_type(), "");
        let error = backends.find("vlxan").unwrap_err().to_string();
        assert!(
            error.contains("\"vlxan\"")
                && error.contains("vxlan, host-gw, ipip, wireguard, udp, extension, alloc"),
            "{error}"
        );
    }

    #[test]
    fn every_tunnel_that_takes_packets_of_strangers_has_the_option_of_its_guard() {
        for backends in [super::all(), super::without_guard_of_protocols(super::all())] {
            let has_check = |kind| {
                backends.find(kind).unwrap().option_names().unwrap().contains(&"SourceCheck")
            };
            let guarded = ["vxlan", "ipip", "udp"];
            let others = ["host-gw", "wireguard", "extension", "alloc"];
            assert!(guarded.into_iter().all(has_check));
            assert!(!others.into_iter().any(has_check));
        }
    }

    #[test]
    fn every_backend_lists_its_options() {
        assert!(super::all().iter().all(|backend| backend.option_names().is_some()));
    }
}
