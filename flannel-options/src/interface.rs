//! The options that choose the external interface.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_netlink::iface::Selectors;

use crate::command_line::go_flags::go_bool;

/// The choice of the external interface.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct InterfaceFlags {
    /// The interface towards the other hosts, by name or address; may be repeated, the first that
    /// fits is used
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub iface: Vec<String>,

    /// The same by regular expression, matched against addresses first and names second; after all
    /// --iface
    #[arg(long, value_name = "REGEX", value_parser = regex)]
    pub iface_regex: Vec<String>,

    /// The interface with an address in one of these networks, and that address; may be repeated;
    /// after --iface-regex
    #[arg(long, value_name = "CIDR")]
    pub iface_cidr: Vec<Subnet>,

    /// The interface with the InternalIP of this Kubernetes node, and that address; after
    /// --iface-cidr
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub iface_node_ip: bool,

    /// Use the interface of the route to this address, if nothing above fits
    #[arg(long, value_name = "ADDRESS")]
    pub iface_can_reach: Option<IpAddr>,

    /// The public IPv4 address of this host. Without --iface and the like it also selects the
    /// interface; an address that no interface has (behind NAT) needs --iface
    #[arg(long, value_name = "ADDRESS")]
    pub public_ip: Option<Ipv4Addr>,

    /// The public IPv6 address of this host
    #[arg(long, value_name = "ADDRESS")]
    pub public_ipv6: Option<Ipv6Addr>,
}

impl InterfaceFlags {
    /// The options as typed values. An empty text counts as not given.
    pub fn selectors(&self) -> Selectors {
        let given = |all: &[String]| all.iter().filter(|text| !text.is_empty()).cloned().collect();
        Selectors {
            iface: given(&self.iface),
            iface_regex: given(&self.iface_regex),
            iface_cidr: self.iface_cidr.clone(),
            by_node_address: self.iface_node_ip,
            can_reach: self.iface_can_reach,
            public: Dual::from_fn(|family| match family {
                Family::V4 => self.public_ip.map(IpAddr::V4),
                Family::V6 => self.public_ipv6.map(IpAddr::V6),
            }),
            ..Selectors::default()
        }
    }
}

/// Checks a regular expression.
fn regex(text: &str) -> Result<String, String> {
    match regex_lite::Regex::new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{error}; expected one such as ^eth[0-9]")),
    }
}
