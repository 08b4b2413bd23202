//! Settings of other programs, which are only read.

use flannel_core::address::Family;
use flannel_netlink::foreign::{Attached, RuleAction, Share};
use flannel_netlink::testing::{in_netns, ip, run};

use super::{name, uplinks};

#[test]
fn rules_and_their_tables_are_read() {
    in_netns(|| {
        let kernel = uplinks();
        for (args, ours) in [("", "10.1.0.0/16"), ("-6 ", "fd00:1::/32")] {
            let pods: flannel_core::Subnet = ours.parse().unwrap();
            let family = pods.family();
            let before = kernel.rules(family).unwrap();
            assert!(before.iter().any(|rule| rule.action == RuleAction::Table(254)), "{before:?}");
            ip(&format!("{args}rule add pref 300 not fwmark 9 table 300 suppress_prefixlength 0"));
            ip(&format!("{args}rule add pref 100 from {pods} to {pods} iif up0 table 7"));
            ip(&format!("{args}rule add pref 200 to {pods} prohibit"));
            let rules = kernel.rules(family).unwrap();
            let rule_at = |priority| rules.iter().find(|rule| rule.priority == priority).unwrap();
            let first = rule_at(100);
            assert_eq!(
                first.to_string(),
                format!("pref 100 from {pods} to {pods} iif up0 lookup 7")
            );
            assert_eq!(first.rest, Share::All);
            let second = rule_at(200);
            assert_eq!(second.to_string(), format!("pref 200 to {pods} prohibit"));
            let third = rule_at(300);
            assert_eq!(third.to_string(), "pref 300 not lookup 300");
            assert_eq!(third.rest, Share::None);
            assert_eq!(third.suppressed, Some(0));
            assert!(rules.is_sorted_by_key(|rule| rule.priority), "{rules:?}");
            for rule in [first, second, third] {
                ip(&format!("{args}rule del {rule}"));
            }
            assert_eq!(kernel.rules(family).unwrap(), before);

            assert_eq!(kernel.table(300, pods).unwrap(), []);
            let (inside, gateway) = match family {
                Family::V4 => ("10.1.7.0/24", "192.0.2.9"),
                Family::V6 => ("fd00:1:7::/48", "2001:db8::9"),
            };
            ip(&format!("{args}route add {inside} via {gateway} dev up0 table 300"));
            ip(&format!("{args}route add throw default table 300"));
            let (default, others): (Vec<_>, Vec<_>) = kernel
                .table(300, pods)
                .unwrap()
                .into_iter()
                .partition(|route| route.dst.is_everything());
            assert!(default.len() == 1 && default[0].throw, "{default:?}");
            let text = format!("{inside} via {gateway} dev up0");
            assert_eq!(others.iter().map(ToString::to_string).collect::<Vec<_>>(), [text]);
        }
    });
}

#[test]
fn filters_and_queues_of_a_device_are_read() {
    in_netns(|| {
        let kernel = uplinks();
        let attached = || kernel.attached(name("up0")).unwrap();
        let tc = |args: &str| drop(run("tc", args));
        assert_eq!(attached().queue.as_deref(), Some("noqueue"));
        for parent in ["clsact", "ingress"] {
            tc(&format!("qdisc add dev up0 {parent}"));
            assert!(attached().filters.is_empty());
            tc("filter add dev up0 ingress protocol ip u32 match u32 0 0");
            assert_eq!(Vec::from_iter(attached().filters), ["u32"], "{parent}");
            tc("filter delete dev up0 ingress");
            tc("filter delete dev up0 egress");
            assert!(attached().filters.is_empty(), "{parent}");
            tc(&format!("qdisc delete dev up0 {parent}"));
        }
        tc("qdisc add dev up0 root tbf rate 1mbit burst 32kbit latency 400ms");
        let found = attached();
        assert!(found.queue.as_deref() == Some("tbf") && found.xdp.is_empty(), "{found:?}");
        assert_eq!(kernel.attached(name("none")).unwrap(), Attached::default());
    });
}
