#![doc = include_str!("../README.md")]

mod alloc;
mod list;

use std::sync::Arc;

use flannel_backend_extension::Extension;
use flannel_backend_hostgw::HostGw;
use flannel_backend_ipip::Ipip;
use flannel_backend_udp::{Program, UdpBackend};
use flannel_backend_vxlan::VxlanBackend;
use flannel_backend_wireguard::WireguardBackend;
use flannel_core::Backend;
use flannel_firewall::{Guarded, Usual};

pub use flannel_backend_udp::{Started, ThisProgram, run_if_started};
pub use flannel_backend_wireguard::{SECRET as WIREGUARD_KEY, is_key as is_wireguard_key};

pub use self::alloc::Alloc;
pub use self::list::{Backends, UnknownBackend};

/// The name of the guard of `ipip`.
const IPIP_GUARD: &str = "guard-ipip";

/// The backends of this build, as new values: two lists share no state. The process that moves the
/// packets of `udp` runs the program `flannel-udp`, which has to be beside this program or in
/// `PATH`.
pub fn all() -> Backends {
    with_udp_program(Program::Installed)
}

/// The same backends, but the process that moves the packets of `udp` runs this program.
pub fn all_in(program: ThisProgram) -> Backends {
    with_udp_program(Program::This(program))
}

fn with_udp_program(program: Program) -> Backends {
    // Behind a NAT, and on nodes with several ways to a peer, packets may come from other addresses
    // than Go flannel expects, so for vxlan a config has to ask for the check.
    Backends::default()
        .with(Arc::new(Guarded::new(VxlanBackend, "guard-vxlan", Usual::Off)))
        .with(Arc::new(HostGw))
        .with(Arc::new(Guarded::new(Ipip, IPIP_GUARD, Usual::IfPossible)))
        .with(Arc::new(WireguardBackend))
        .with(Arc::new(Guarded::new(UdpBackend::new(program), "guard-udp", Usual::Always)))
        .with(Arc::new(Extension::new()))
        .with(Arc::new(Alloc))
}

/// The same backends, but `ipip` accepts tunnel packets from every host by default. A `SourceCheck`
/// in the config still applies. `ipip` is the only backend here whose tunnel has no ports.
/// `flanneld` uses this for `--tunnel-peers-only=false`.
pub fn with_ipip_check_off(backends: Backends) -> Backends {
    let ipip: Arc<dyn Backend> = Arc::new(Guarded::new(Ipip, IPIP_GUARD, Usual::Off));
    backends.replacing(&ipip)
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
        for backends in [super::all(), super::with_ipip_check_off(super::all())] {
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
    fn two_lists_share_no_backend() {
        let first = super::all();
        let second = super::all();
        for backend in first.iter() {
            let other = second.find(backend.kind()).unwrap();
            assert!(!std::sync::Arc::ptr_eq(backend, other), "{}", backend.kind());
        }
    }

    #[test]
    fn every_backend_lists_its_options() {
        assert!(super::all().iter().all(|backend| backend.option_names().is_some()));
    }
}
