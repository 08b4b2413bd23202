//! Devices and peers for tests.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use flannel_core::address::{Dual, Family};

use crate::device::Devices;
use crate::peers::Target;

/// What the tunnels of vxlan cost.
pub(crate) fn overheads() -> Dual<u32> {
    Dual::from_fn(|family: Family| Some(flannel_backend_vxlan::overhead(family)))
}

/// A host with a vxlan tunnel of IPv4.
pub(crate) fn devices() -> Devices {
    Devices {
        tunnels: Dual { v4: Some("flannel.1".parse().unwrap()), v6: None },
        mtu: Some(1450),
        ..no_devices()
    }
}

/// A vxlan host without tunnels yet.
pub(crate) fn no_devices() -> Devices {
    Devices { backend: "vxlan".into(), overheads: overheads(), ..Devices::default() }
}

/// A peer.
pub(crate) fn target(backend: &str) -> Target {
    Target {
        key: "10.1.7.0-24".into(),
        subnets: vec!["10.1.7.0/24".parse().unwrap()],
        public: Dual { v4: Some("192.0.2.7".parse().unwrap()), v6: None },
        backend: backend.into(),
        state: "in place".into(),
    }
}
