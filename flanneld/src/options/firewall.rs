//! The options for routes and firewall rules.

use std::time::Duration;

use flannel_options::go_flags::{go_bool, go_int};

use crate::config::{FirewallConfig, NexthopObjects};

/// The kind of routes.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct RouteFlags {
    /// Drop packets for those addresses of this host's subnet that no pod has, instead of sending
    /// them to the default route
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub ip_blackhole_route: bool,

    /// Let IPv4 routes to other hosts go by nexthop objects, which makes thousands of them quick:
    /// where the kernel has them, or else stop, or never
    #[arg(long, value_name = "auto|on|off", default_value = "auto", hide_possible_values = true)]
    pub nexthop_objects: NexthopObjects,
}

/// What becomes of packets between pods and the rest of the world.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct FirewallFlags {
    /// Hide pod addresses from everything outside the pod network
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub ip_masq: bool,

    /// Where masquerading has to change source ports, do not choose them at random
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub ip_masq_fully_random_disable: bool,

    /// Accept forwarded packets from and to pods
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = true, value_parser = go_bool, action = clap::ArgAction::Set)]
    pub iptables_forward_rules: bool,

    /// The last was given by name, on the command line or in the environment, whatever its value.
    #[arg(skip)]
    pub(crate) forward_rules_given: bool,

    /// Check the rules every so many seconds; in nftables mode changes are noticed at once all the
    /// same
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = go_int(1..=86_400))]
    pub iptables_resync: i64,
}

impl FirewallFlags {
    /// The same as typed values.
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
