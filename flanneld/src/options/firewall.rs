//! The options for routes and firewall rules.

use std::time::Duration;

use flannel_options::go_flags::{go_bool, go_int};

use crate::config::{FirewallConfig, NexthopObjects};

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
    /// address of this host
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set)]
    pub ip_masq: bool,

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

impl FirewallFlags {
    /// The configuration that these flags ask for.
    pub(crate) fn config(&self) -> FirewallConfig {
        FirewallConfig {
            masquerade: self.ip_masq,
            fully_random: !self.ip_masq_fully_random_disable,
            forward: self.iptables_forward_rules,
            forward_required: self.forward_rules_given,
            resync: Duration::from_secs(self.iptables_resync.unsigned_abs()),
        }
    }
}
