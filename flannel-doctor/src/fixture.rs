//! Devices and peers for tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use flannel_api::PeerState;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::Dual;
use flannel_core::backend::Datapath;
use flannel_core::{Backend, Config};

use crate::inputs::devices::Devices;
use crate::inputs::network::Target;

/// The datapath of vxlan for both families.
fn vxlan() -> Datapath {
    let config = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
        "Backend":{"Type":"vxlan"}}"#;
    VxlanBackend.datapath(&Config::parse(config).unwrap()).unwrap()
}

/// A host with a vxlan tunnel of IPv4.
pub(crate) fn devices() -> Devices {
    let mut devices = Devices { mtu: Some(1450), backend: "vxlan".into(), ..Devices::default() };
    devices.datapath = vxlan();
    devices.datapath.devices.v6 = None;
    devices
}

/// A peer.
pub(crate) fn target(backend: &str) -> Target {
    Target {
        key: "10.1.7.0-24".into(),
        subnets: vec!["10.1.7.0/24".parse().unwrap()],
        public: Dual { v4: Some("192.0.2.7".parse().unwrap()), v6: None },
        backend: backend.into(),
        state: PeerState::InPlace,
        mtus: Dual::default(),
    }
}
