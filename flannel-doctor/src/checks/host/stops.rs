//! Checks of the rules of other programs: what they do with packets of pods.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_firewall::{Effect, Flow, Stop};
use flannel_netlink::nftables::program::Translation;

use super::HostFacts;
use crate::finding::{Check, Finding};
use crate::remedy::firewall::{Devices, admit, masquerade_in_flannel};

/// The largest number of rules that have a finding each.
const MOST_RULES: usize = 5;
/// The largest number of pods that a finding names.
const MOST_PODS: usize = 3;

pub(super) fn stops(facts: &HostFacts) -> Vec<Finding> {
    let of = |stop: &Stop| Some(finding(stop, facts, facts.pod_networks[stop.family]?));
    let (of_plugin, others): (Vec<&Stop>, Vec<&Stop>) =
        facts.stops.iter().partition(|stop| is_of_plugin(stop));
    let more = others.len().saturating_sub(MOST_RULES);
    let (shown, left) = others.split_at(others.len() - more);
    let mut found: Vec<Finding> = shown.iter().filter_map(|stop| of(stop)).collect();
    if let (Some(last), 1..) = (found.last_mut(), more) {
        let changes = left.iter().any(|stop| matches!(stop.effect, Effect::Translate(_)));
        let verb = if changes { "stop or change" } else { "stop" };
        last.text.push_str(&format!("; {more} more rules {verb} packets of pods too"));
    }
    found.extend(masqueraded_by_plugin(&of_plugin));
    found
}

/// Whether the rule is of a chain that the CNI plugin `bridge` makes for each pod, which hides the
/// address of the pod.
///
/// **Source**: CNI plugins `pkg/ip: SetupIPMasq`, `pkg/utils: FormatChainName`.
fn is_of_plugin(stop: &Stop) -> bool {
    let hides =
        matches!(stop.effect, Effect::Translate(Translation::Masquerade | Translation::Source));
    hides && stop.chain.starts_with("CNI-")
}

/// One finding for the chains of all pods.
fn masqueraded_by_plugin(stops: &[&Stop]) -> Option<Finding> {
    let pods: BTreeSet<IpAddr> = stops.iter().flat_map(|stop| stop.pods.iter().copied()).collect();
    let mut text = format!(
        "the CNI plugin bridge gives the address of this node to packets from its pods to pods of \
         other nodes (chain {})",
        stops.first()?.chain
    );
    name_pods(&mut text, &pods);
    Some(Finding::warning(Check::ForwardDrop, text).with_remedy(masquerade_in_flannel()))
}

/// Adds the first pods.
fn name_pods(text: &mut String, pods: &BTreeSet<IpAddr>) {
    let names: Vec<String> = pods.iter().take(MOST_PODS).map(ToString::to_string).collect();
    if names.is_empty() {
        return;
    }
    text.push_str(&format!(": those of {}", names.join(", ")));
    let more = pods.len() - names.len();
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
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
    name_pods(&mut text, &stop.pods);
    if stop.pods.is_empty() && stop.rule.is_none() {
        text.push_str(": no rule before accepts them");
    }
    let to_peers = facts.tunnels.first().copied().or(facts.uplink);
    let remedy = admit(stop, network, Devices { to_peers, uplink: facts.uplink });
    Finding::warning(Check::ForwardDrop, text).with_remedy(remedy)
}
