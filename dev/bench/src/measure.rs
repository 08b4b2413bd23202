//! The measurements, one module each.

pub(crate) mod cni;
pub(crate) mod cold_start;
pub(crate) mod diagnosis;
pub(crate) mod firewall;
pub(crate) mod hostile_lease;
pub(crate) mod idle;
pub(crate) mod kube;
pub(crate) mod kube_heartbeat;
pub(crate) mod lease_event;
pub(crate) mod lease_memory;
pub(crate) mod lease_storm;
pub(crate) mod lost_device;
pub(crate) mod memory;
pub(crate) mod one_more;
pub(crate) mod paths;
pub(crate) mod plot;
pub(crate) mod quiet;
pub(crate) mod ready;
pub(crate) mod repair;
pub(crate) mod resync;
pub(crate) mod soak;
pub(crate) mod status;
pub(crate) mod udp;
pub(crate) mod wireguard;
