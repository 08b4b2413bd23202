#![doc = include_str!("../README.md")]

mod drops;
mod error;
mod firewall;
mod guard;
mod iptables;
mod masquerade;
mod nft;
mod ownership;
mod rules;
mod status;

pub use drops::{
    Effect, Flow, LegacyMemory, PodPackets, Stop, StoppingRule, Stops, TunnelPackets,
    stopped_packets,
};
pub use error::Error;
pub use firewall::{Firewall, Mode, Options, cleanup, cleanup_for_go, cleanup_networks, leftovers};
pub use guard::{Guard, Guarded, TunnelEnd, Usual};
pub use iptables::program::{Programs, Variant};
pub use masquerade::{Masquerade, PortRange};
pub use rules::{Chain, KUBE_PROXY_MARK, Nat, Protocol, Rule, RuleOptions, Rules, Side, Verdict};
pub use status::{Cleanup, Contested, Deviation, Dropped, Failure, Fault, Packets, Repair, Status};
