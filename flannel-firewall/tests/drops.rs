//! Policies that drop forwarded packets, made with the real tools.

#![allow(clippy::unwrap_used, reason = "a test fails that way")]

#[macro_use]
mod ground;

use std::process::Command;
use std::time::Duration;

use flannel_core::Family;
use flannel_firewall::forward_drops;
use ground::{ALL, Ground, Kind, Place, Running, rules_of};

in_every_mode!(a_policy_is_seen_wherever_it_is_and_whether_our_rules_help);

async fn a_policy_is_seen_wherever_it_is_and_whether_our_rules_help(ground: Ground, kind: Kind) {
    let drops = async || forward_drops(&ground.tools.programs()).await.unwrap();
    assert_eq!(drops().await, []);
    let made = Command::new("nft")
        .arg("add table inet guard; add chain inet guard gate { type filter hook forward priority 5; policy drop; }")
        .status();
    assert!(made.unwrap().success());
    let texts = |drops: Vec<flannel_firewall::ForwardDrop>| -> Vec<String> {
        drops.iter().map(|d| format!("{} {d} {}", d.family, d.accepts_pods)).collect()
    };
    let guard = Family::BOTH.map(|family| format!("{family} chain gate of table inet guard false"));
    assert_eq!(texts(drops().await), guard);
    assert!(Command::new("nft").args(["delete", "table", "inet", "guard"]).status().unwrap().success());
    let where_rules_are = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    for family in Family::BOTH {
        ground.tools.iptables(where_rules_are, family, "-P FORWARD DROP");
    }
    let expected = |helps: bool| -> Vec<String> {
        let suffix = if kind == Kind::IptablesLegacy { " (iptables-legacy)" } else { "" };
        [(Family::V4, "ip"), (Family::V6, "ip6")]
            .map(|(family, word)| format!("{family} chain FORWARD of table {word} filter{suffix} {helps}"))
            .into()
    };
    assert_eq!(texts(drops().await), expected(false));
    let running = Running::start(&ground, kind, rules_of(Place::Pod, ALL), Duration::from_secs(3600)).await;
    // Rules in a table of their own help nothing against the policy of another.
    assert_eq!(texts(drops().await), expected(kind != Kind::Nftables));
    running.stop().await;
}
