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
    /// The subnets of the node, at most one of each family. The device has their first addresses,
    /// from which errors are sent.
    pub own: Vec<Prefix>,
    /// Whether datagrams leave from `port` only, for firewalls that expect it. Otherwise each
    /// thread has a port of its own, so that nodes can spread flows over their processors.
    pub one_port: bool,
    /// Whether a packet is accepted only from the node of its source address.
    pub checks_source: bool,
    /// Whether packets that fail this check are counted and accepted, instead of dropped.
    #[serde(default)]
    pub counts_only: bool,
    /// The number of queues, from 1 to 8. `None` stands for the number of processors, at most 8.
    pub queues: Option<usize>,
}
