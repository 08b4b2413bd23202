//! The options of a data plane.

use std::net::IpAddr;

use crate::control::Prefix;
use serde::{Deserialize, Serialize};

/// The options of a data plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// The name of the tun device.
    pub device: String,
    /// The addresses of the node, at most one of each family, between which datagrams travel.
    pub local: Vec<IpAddr>,
    /// The UDP port of all nodes.
    pub port: u16,
    /// The subnets of the node, at most one of each family. Their first addresses are those of the
    /// device, from which errors are sent.
    pub own: Vec<Prefix>,
    /// Datagrams leave from `port` only, for firewalls that expect it. Otherwise each thread has a
    /// port, so that nodes can spread flows over their processors.
    pub one_port: bool,
    /// A packet is accepted only from the node of its source address.
    pub checks_source: bool,
    /// Other packets are only counted, and accepted too.
    #[serde(default)]
    pub counts_only: bool,
    /// The number of queues; `None`: that of processors, at most eight.
    pub queues: Option<usize>,
}
