//! Checks of the rules of other programs: what they do with packets of pods.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_firewall::{Effect, Flow, Stop};

use super::HostFacts;
use crate::finding::{Check, Finding};
use crate::remedy::firewall::admit;

/// The largest number of rules that have a finding each.
const MOST_RULES: usize = 5;
/// The largest number of pods that a finding names.
const MOST_PODS: usize = 3;

pub(super) fn stops(facts: &HostFacts) -> Vec<Finding> {
    let of = |stop: &Stop| Some(finding(stop, facts, facts.pod_networks[stop.family]?));
    let mut found: Vec<Finding> = facts.stops.iter().filter_map(of).collect();
    let more = found.len().saturating_sub(MOST_RULES);
    found.truncate(MOST_RULES);
    if let (Some(last), 1..) = (found.last_mut(), more) {
        last.text.push_str(&format!("; {more} more rules stop packets of pods too"));
    }
    found
}

/// The finding about the first rule that stops packets to a pod: from this node, or from its pods.
pub(super) fn on_the_way(facts: &HostFacts, address: IpAddr) -> Option<Finding> {
    let family = Family::of(address);
    let network = facts.pod_networks[family].filter(|network| network.contains(address))?;
    let is_own = facts.own[family].is_some_and(|own| own.contains(address));
    let flows: &[Flow] = if is_own { &[Flow::ToPod] } else { &[Flow::FromPod, Flow::FromHost] };
    let concerns = |stop: &&Stop| {
        stop.family == family
            && stop.flows.iter().any(|flow| flows.contains(flow))
            && (stop.pods.is_empty() || stop.pods.contains(&address))
            && !matches!(stop.effect, Effect::Translate(_))
    };
    Some(finding(facts.stops.iter().find(concerns)?, facts, network))
}

fn finding(stop: &Stop, facts: &HostFacts, network: Subnet) -> Finding {
    let verb = match stop.effect {
        Effect::Drop => "drops",
        Effect::Reject => "rejects",
        Effect::Queue => "leaves to a program that does not run",
        _ => "gives other addresses to",
    };
    let flows: Vec<String> = stop.flows.iter().map(ToString::to_string).collect();
    let mut text = format!("{stop} {verb} {} packets {}", stop.family, flows.join(", and "));
    let pods: Vec<String> = stop.pods.iter().take(MOST_PODS).map(ToString::to_string).collect();
    if !pods.is_empty() {
        text.push_str(&format!(": those of {}", pods.join(", ")));
        let more = stop.pods.len() - pods.len();
        if more > 0 {
            text.push_str(&format!(" and {more} more"));
        }
    } else if stop.rule.is_none() {
        text.push_str(": no rule before accepts them");
    }
    let remedy = admit(stop, network, facts.tunnels.first().copied().or(facts.uplink));
    Finding::warning(Check::ForwardDrop, text).with_remedy(remedy)
}
