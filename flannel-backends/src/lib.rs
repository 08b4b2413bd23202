#![doc = include_str!("../README.md")]

mod list;

use flannel_backend_alloc::Alloc;
use flannel_backend_extension::Extension;
use flannel_backend_hostgw::HostGw;
use flannel_backend_ipip::Ipip;
use flannel_backend_udp::UdpBackend;
use flannel_backend_vxlan::VxlanBackend;
use flannel_backend_wireguard::WireguardBackend;

pub use flannel_backend_udp::run_if_started;
pub use flannel_backend_wireguard::{SECRET as WIREGUARD_KEY, is_key as is_wireguard_key};

pub use self::list::{Backends, UnknownBackend};

/// It has an annex for each state directory.
static EXTENSION: Extension = Extension::new();

/// It has a data plane for each state directory.
static UDP: UdpBackend = UdpBackend::new();

/// The backends of this build.
pub fn all() -> Backends {
    let routing = Backends::default().with(&VxlanBackend).with(&HostGw).with(&Ipip);
    routing.with(&WireguardBackend).with(&UDP).with(&EXTENSION).with(&Alloc)
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
    fn every_backend_lists_its_options() {
        assert!(super::all().iter().all(|backend| backend.option_names().is_some()));
    }
}
