//! The options for routes and firewall rules.

use std::net::IpAddr;
use std::time::Duration;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;
use flannel_firewall::PortRange;
use flannel_options::go_flags::{go_bool, go_int};

use crate::config::{FirewallConfig, MasqueradedFamilies, NexthopObjects};

/// The kind of routes.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct RouteFlags {
    /// Drop packets to unused addresses of this host's subnet, instead of sending them to the
    /// default route
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub ip_blackhole_route: bool,

    /// Use nexthop objects for IPv4 routes, which are faster with thousands of hosts: auto if the
    /// kernel has them, on or stop, off
    #[arg(long, value_name = "auto|on|off", default_value = "auto", hide_possible_values = true)]
    pub nexthop_objects: NexthopObjects,

    /// The period of complete comparisons with the kernel, in seconds, for changes that it did not
    /// report; 0: none
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = go_int(0..=86_400))]
    pub kernel_resync: i64,

    /// Where full-size packets to a node are lost and smaller ones pass, give the route to it the
    /// MTU that passes, until full size passes again
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub path_mtu: bool,

    /// Run the commands of a network config with the backend extension. Then all who may write the
    /// config may run programs on this host
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub allow_commands: bool,
}

/// The options of the firewall.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct FirewallFlags {
    /// Masquerade packets from pods to addresses outside the pod network: they leave with the
    /// address of this host; ipv4 or ipv6: only packets of this family
    #[arg(long, value_name = "true|false|ipv4|ipv6", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value = "false", action = clap::ArgAction::Set)]
    pub ip_masq: MasqueradedFamilies,

    /// Do not masquerade packets to this network, besides those in IPMasqExclude of the network
    /// config; may be repeated, or be a list with commas
    #[arg(long, value_name = "CIDR", value_delimiter = ',', value_parser = excluded)]
    pub ip_masq_exclude: Vec<Subnet>,

    /// Masqueraded packets leave with this address instead of the address of the device; may be
    /// given once for each family
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub ip_masq_source: Vec<IpAddr>,

    /// Masqueraded packets of TCP, UDP and SCTP leave from one of these ports
    #[arg(long, value_name = "FIRST-LAST")]
    pub ip_masq_ports: Option<PortRange>,

    /// Masquerade only packets that leave by this interface; may be repeated, or be a list with
    /// commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub ip_masq_interface: Vec<LinkName>,

    /// Do not choose the source ports of masqueraded packets at random
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub ip_masq_fully_random_disable: bool,

    /// Accept forwarded packets from and to pods
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = true, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub iptables_forward_rules: bool,

    /// The forward rules were given on the command line or in the environment, with any value.
    #[arg(skip)]
    pub(crate) forward_rules_given: bool,

    /// The default of SourceCheck for the backend ipip on this host: true accepts tunnel packets
    /// only from nodes, false from every host; a SourceCheck in the network config wins
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = true, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub tunnel_peers_only: bool,

    /// The period of checks of the rules, in seconds; changes by other programs are also noticed at
    /// once
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = go_int(1..=86_400))]
    pub iptables_resync: i64,
}

/// Reads a value of `--ip-masq-exclude`.
fn excluded(text: &str) -> Result<Subnet, String> {
    let subnet = text.trim().parse().ok().filter(|subnet: &Subnet| !subnet.is_everything());
    subnet.ok_or_else(|| "expected a network, for example 10.0.0.0/8".to_owned())
}

impl FirewallFlags {
    /// Checks that the options of masquerading fit together.
    ///
    /// # Errors
    /// The text of the error.
    pub(crate) fn check(&self) -> Result<(), String> {
        for family in Family::BOTH {
            let given = self.ip_masq_source.iter().filter(|it| Family::of(**it) == family);
            if given.count() > 1 {
                return Err(format!("--ip-masq-source: expected one {family} address"));
            }
        }
        let needs_masq = [
            ("--ip-masq-exclude", self.ip_masq_exclude.is_empty()),
            ("--ip-masq-source", self.ip_masq_source.is_empty()),
            ("--ip-masq-ports", self.ip_masq_ports.is_none()),
            ("--ip-masq-interface", self.ip_masq_interface.is_empty()),
        ];
        match needs_masq.iter().find(|(_, is_absent)| !is_absent) {
            Some((option, _)) if !self.ip_masq.is_any() => {
                Err(format!("{option} needs masquerading; expected --ip-masq"))
            }
            _ => Ok(()),
        }
    }

    /// The configuration that these flags ask for.
    pub(crate) fn config(&self) -> FirewallConfig {
        let of = |family| self.ip_masq_source.iter().find(|it| Family::of(**it) == family);
        FirewallConfig {
            masquerade: self.ip_masq,
            masquerade_exclude: self.ip_masq_exclude.clone(),
            masquerade_source: Dual::from_fn(|family| of(family).copied()),
            masquerade_ports: self.ip_masq_ports,
            masquerade_devices: self.ip_masq_interface.clone(),
            fully_random: !self.ip_masq_fully_random_disable,
            forward: self.iptables_forward_rules,
            forward_required: self.forward_rules_given,
            resync: Duration::from_secs(self.iptables_resync.unsigned_abs()),
        }
    }
}
