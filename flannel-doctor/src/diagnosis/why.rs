//! Explains the path of packets to one address, from the lease to the kernel's route look-up.
//!
//! The verdict compares the objects that the leases need with the kernel's answer over all routing
//! tables. So it shows a route or rule of another program even if all objects of flannel are in
//! place.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::{
    Deployment, More, ObjectReport, ObjectState as ObjectStateReport, RejectionReport, VERSION,
    WhyReport,
};
use flannel_core::backend::Advice;
use flannel_core::error::holder;
use flannel_core::kernel::{KernelError, RouteAnswer};
use flannel_core::object::{LinkName, Object, Via};
use flannel_core::status::{ObjectState, Rejection};
use flannel_core::{Config, Kernel, Lease, Remedy};

use crate::finding::Finding;
use crate::remedy::{one_vni, render};

/// Looks up the route to an address, on a thread for blocking work.
pub async fn lookup(kernel: Arc<dyn Kernel>, address: IpAddr) -> Result<RouteAnswer, KernelError> {
    let answer = tokio::task::spawn_blocking(move || kernel.lookup(address)).await;
    answer.unwrap_or_else(|_| Err(KernelError::explained(5, "the look-up was cancelled")))
}

/// The network's explanation of a peer.
pub struct Explained {
    /// The lease.
    pub lease: Arc<Lease>,
    /// Why the lease is rejected, or `None` if it is accepted.
    pub rejection: Option<Rejection>,
    /// The objects of the lease, with their states.
    pub objects: Vec<(Object, ObjectState)>,
    /// What is wrong with the lease although it is accepted.
    pub advice: Vec<Advice>,
}

/// The inputs for one address.
pub struct RouteInputs<'a> {
    /// The daemon itself makes the diagnosis.
    pub daemon: bool,
    /// How the daemon is deployed.
    pub deployment: Deployment,
    /// The network config.
    pub config: Option<&'a Config>,
    /// This node's lease.
    pub own: Option<&'a Lease>,
    /// The lease whose subnet holds the address, if the daemon did not explain it.
    pub lease: Option<&'a Lease>,
    /// The network's explanation of the peer.
    pub explanation: Option<Explained>,
    /// The device of the packets to peers that have no route of their own: a route for the whole
    /// network leads to it. `None` without such a route, or if it is not the same for all peers.
    pub device: Option<LinkName>,
    /// The kernel's answer.
    pub answer: Result<RouteAnswer, KernelError>,
    /// The finding about a rule of another program that stops the packets.
    pub stop: Option<Finding>,
}

impl Default for RouteInputs<'_> {
    fn default() -> Self {
        Self {
            daemon: false,
            deployment: Deployment::default(),
            config: None,
            own: None,
            lease: None,
            explanation: None,
            device: None,
            answer: Ok(RouteAnswer::default()),
            stop: None,
        }
    }
}

/// The report on an address.
pub fn diagnose(address: IpAddr, facts: &RouteInputs<'_>) -> WhyReport {
    let network =
        facts.config.and_then(|config| config.pod_networks().find(|n| n.contains(address)));
    let own = facts.own.filter(|lease| lease.subnets.iter().any(|subnet| subnet.contains(address)));
    let lease = own.or_else(|| facts.explanation.as_ref().map(|e| &*e.lease)).or(facts.lease);
    let rejection = facts.explanation.as_ref().and_then(|e| e.rejection.as_ref());
    let objects: Vec<ObjectReport> = facts
        .explanation
        .iter()
        .flat_map(|e| &e.objects)
        .map(|(object, how)| wanted(object, how))
        .collect();
    let mut verdict = verdict(address, facts, own.is_some(), network.is_some(), lease);
    if let Some(stop) = facts.stop.as_ref().filter(|_| verdict.ok) {
        verdict = Verdict::bad(stop.text.clone(), stop.remedy.clone());
    }
    let Verdict { ok, text, remedy } = verdict;
    WhyReport {
        version: VERSION,
        address: address.to_string(),
        ok,
        verdict: text,
        hint: remedy.map(|remedy| render(&remedy, facts.deployment)),
        network: network.map(|network| network.to_string()),
        lease: lease.map(|lease| lease.subnets.to_string()),
        node: lease
            .map(|lease| if own.is_some() { "this node".to_owned() } else { holder(&lease.attrs) }),
        rejection: rejection.map(RejectionReport::from),
        objects,
        kernel: match &facts.answer {
            Ok(answer) if answer.local => "it is an address of this host".to_owned(),
            Ok(answer) => way(answer.gateway, answer.link),
            Err(error) => format!("not known: {error}"),
        },
        tunnel: None,
        stale: None,
        more: More::new(),
    }
}

fn wanted(object: &Object, how: &ObjectState) -> ObjectReport {
    let state = match how {
        ObjectState::InPlace => ObjectStateReport::InPlace,
        ObjectState::Failing(failure) => {
            ObjectStateReport::Failing { error: failure.error.to_string() }
        }
        ObjectState::Unwanted => ObjectStateReport::Unwanted,
        _ => ObjectStateReport::Pending,
    };
    ObjectReport { object: object.to_string(), state }
}

/// The device and the gateway of the wanted route to the address.
fn wanted_way(
    address: IpAddr,
    objects: &[(Object, ObjectState)],
) -> Option<(LinkName, Option<IpAddr>)> {
    let route = objects.iter().find_map(|(object, _)| match object {
        Object::Route(route) if route.dst.contains(address) => Some(route),
        _ => None,
    })?;
    match route.via {
        Via::Gateway { gateway, link, .. } => Some((link, Some(gateway))),
        Via::Link(link) => Some((link, None)),
        Via::Nexthop(id) => objects.iter().find_map(|(object, _)| match object {
            Object::Nexthop(nexthop) if nexthop.id == id => {
                Some((nexthop.link, Some(nexthop.gateway)))
            }
            _ => None,
        }),
        _ => None,
    }
}

/// Deletes the route in use for an address, but never the default route.
fn unshadow(address: IpAddr) -> Remedy {
    let ip = if address.is_ipv4() { "ip" } else { "ip -6" };
    Remedy::run(format!("{ip} route del $({ip} route get fibmatch {address} | grep -v ^default)"))
        .remark(format!("first see {ip} rule: if a rule is the cause, delete it instead"))
}

/// `via 192.0.2.254 dev eth0`, for example.
fn way(gateway: Option<IpAddr>, link: Option<LinkName>) -> String {
    match (gateway, link) {
        (Some(gateway), Some(link)) => format!("via {gateway} dev {link}"),
        (None, Some(link)) => format!("dev {link}"),
        (_, None) => "nowhere".to_owned(),
    }
}

/// What the diagnosis says about an address.
struct Verdict {
    ok: bool,
    /// A sentence without a full stop.
    text: String,
    remedy: Option<Remedy>,
}

impl Verdict {
    /// Packets take the right route.
    fn good(text: impl Into<String>) -> Self {
        Self { ok: true, text: text.into(), remedy: None }
    }

    /// Packets do not take the right route.
    fn bad(text: impl Into<String>, remedy: impl Into<Option<Remedy>>) -> Self {
        Self { ok: false, text: text.into(), remedy: remedy.into() }
    }
}

fn verdict(
    address: IpAddr,
    facts: &RouteInputs<'_>,
    own: bool,
    in_network: bool,
    lease: Option<&Lease>,
) -> Verdict {
    let answer = match &facts.answer {
        Ok(answer) => answer,
        Err(error) => return Verdict::bad(format!("the route look-up failed: {error}"), None),
    };
    if own {
        let text = if answer.local {
            "it is an address of this node"
        } else {
            "it is in this node's own subnet"
        };
        let bridge = "the CNI plugin's bridge delivers the packets, not flannel";
        return Verdict::good(format!("{text}: {bridge}"));
    }
    let Some(lease) = lease else {
        return match (facts.config, in_network) {
            (Some(_), true) => Verdict::bad(
                "no node holds a subnet that contains it",
                Remedy::ListLeases.remark("check whether the node that should hold it runs"),
            ),
            (Some(_), false) => {
                Verdict::bad("it lies outside the pod networks: flannel has no route to it", None)
            }
            (None, _) => Verdict::bad("nothing is known about it", None),
        };
    };
    let Some(explanation) = &facts.explanation else {
        let holder = holder(&lease.attrs);
        return if facts.daemon {
            let text =
                format!("it belongs to {holder}, whose lease has arrived and waits for its turn");
            Verdict::bad(text, Remedy::WatchStatus)
        } else {
            let text = format!("it belongs to {holder}, and the daemon does not answer");
            Verdict::bad(text, Remedy::StartDaemon)
        };
    };
    of_peer(address, lease, explanation, facts.device, answer)
}

/// The verdict on a peer that the network knows. `device` is the one of the network.
fn of_peer(
    address: IpAddr,
    lease: &Lease,
    explanation: &Explained,
    device: Option<LinkName>,
    answer: &RouteAnswer,
) -> Verdict {
    if let Some(why) = &explanation.rejection {
        return Verdict::bad(format!("its lease {} is rejected: {why}", lease.subnets), None);
    }
    let mut states = explanation.objects.iter().map(|(_, how)| how);
    if !explanation.objects.is_empty() && states.all(|how| *how == ObjectState::Pending) {
        let node = holder(&lease.attrs);
        let text = format!(
            "it belongs to {node}, but none of that lease's objects is in place yet: they are \
             queued"
        );
        return Verdict::bad(text, Remedy::WatchStatus);
    }
    let bad = explanation.objects.iter().find(|(_, how)| !matches!(how, ObjectState::InPlace));
    if let Some((object, how)) = bad {
        let state = wanted(object, how).state;
        let error = match &state {
            ObjectStateReport::Failing { error } => format!(": {error}"),
            _ => String::new(),
        };
        let watch = (*how == ObjectState::Pending).then_some(Remedy::WatchStatus);
        return Verdict::bad(format!("{object} is {state}{error}"), watch);
    }
    let wanted = wanted_way(address, &explanation.objects).or_else(|| Some((device?, None)));
    if let Some((link, gateway)) = wanted
        && (answer.link != Some(link) || answer.gateway != gateway)
    {
        let is = way(answer.gateway, answer.link);
        let should = way(gateway, Some(link));
        let text = format!(
            "shadowed: packets go {is} instead of {should}, because of a more specific route or a \
             rule of another program"
        );
        return Verdict::bad(text, unshadow(address));
    }
    let way =
        wanted.map(|(link, _)| format!("packets go through {link} to {}", holder(&lease.attrs)));
    let drops = |advice: &&Advice| matches!(advice, Advice::OtherVni { .. });
    if let Some(advice) = explanation.advice.iter().find(drops) {
        let way = way.unwrap_or_else(|| "packets arrive".to_owned());
        return Verdict::bad(format!("{way}, which drops them: {advice}"), one_vni());
    }
    let way = way.map_or_else(String::new, |way| format!("{way}, "));
    Verdict::good(format!("{way}everything is in place"))
}

#[cfg(test)]
mod tests {
    use flannel_core::lease::{LeaseAttrs, Revision};
    use flannel_core::object::{MacAddr, Neigh, Record, Route};

    use super::*;
    use crate::finding::Check;

    fn peer() -> Lease {
        Lease {
            subnets: "10.1.7.0-24".parse().unwrap(),
            attrs: LeaseAttrs::from_json(r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan"}"#)
                .unwrap(),
            expires: None,
            since: Revision(1),
            revision: Revision(1),
        }
    }

    fn route() -> Object {
        let via = Via::Gateway {
            gateway: "10.1.7.0".parse().unwrap(),
            link: "flannel.1".parse().unwrap(),
            onlink: true,
        };
        Route { dst: "10.1.7.0/24".parse().unwrap(), via, mtu: None }.into()
    }

    #[test]
    fn a_peer_without_a_route_of_its_own_uses_the_device_of_the_network() {
        let address = "10.1.7.9".parse().unwrap();
        let device = "flannel0".parse().unwrap();
        let subnet = "10.1.7.0/24".parse().unwrap();
        let record = Object::from(Record::new("udp", subnet, "to 192.0.2.7:8285"));
        let ask = |answer| {
            let objects = vec![(record.clone(), ObjectState::InPlace)];
            let mut lease = peer();
            lease.attrs.preferred.kind = "".into();
            let explanation =
                Explained { lease: Arc::new(lease), rejection: None, objects, advice: Vec::new() };
            let inputs = RouteInputs {
                explanation: Some(explanation),
                device: Some(device),
                answer: Ok(answer),
                ..Default::default()
            };
            diagnose(address, &inputs)
        };
        let good = ask(RouteAnswer::via(device, None, None));
        let expected = "packets go through flannel0 to 192.0.2.7, everything is in place";
        assert_eq!((good.ok, &*good.verdict), (true, expected));
        let wrong = ask(RouteAnswer::via("eth1".parse().unwrap(), None, None));
        let expected = "shadowed: packets go dev eth1 instead of dev flannel0, because";
        assert!(!wrong.ok && wrong.verdict.starts_with(expected), "{wrong:?}");
    }

    #[test]
    fn the_verdict_names_the_layer_that_fails() {
        let config = Config::parse(r#"{"Network":"10.1.0.0/16"}"#).unwrap();
        let own = Lease { subnets: "10.1.5.0-24".parse().unwrap(), ..peer() };
        let address: IpAddr = "10.1.7.9".parse().unwrap();
        let right =
            RouteAnswer::via("flannel.1".parse().unwrap(), Some("10.1.7.0".parse().unwrap()), None);
        let wrong = RouteAnswer::via("eth1".parse().unwrap(), None, None);
        let explain = |how: ObjectState, rejection: Option<Rejection>| Explained {
            lease: Arc::new(peer()),
            rejection,
            objects: vec![(route(), how)],
            advice: Vec::new(),
        };
        let ask = |address: IpAddr, explanation: Option<Explained>, answer: RouteAnswer| {
            let facts = RouteInputs {
                daemon: true,
                deployment: Deployment::Systemd,
                config: Some(&config),
                own: Some(&own),
                lease: None,
                explanation,
                device: None,
                answer: Ok(answer),
                stop: None,
            };
            diagnose(address, &facts)
        };
        let good = ask(address, Some(explain(ObjectState::InPlace, None)), right);
        assert!(good.ok && good.verdict.starts_with("packets go through flannel.1"), "{good:?}");
        assert_eq!(good.node.as_deref(), Some("192.0.2.7 (vxlan)"));
        let shadowed = ask(address, Some(explain(ObjectState::InPlace, None)), wrong);
        assert!(
            !shadowed.ok
                && shadowed.verdict.starts_with("shadowed: packets go dev eth1 instead of"),
            "{shadowed:?}"
        );
        let pending = ask(address, Some(explain(ObjectState::Pending, None)), right);
        assert!(
            pending.verdict.contains("none of that lease's objects is in place yet"),
            "{pending:?}"
        );
        assert_eq!(pending.hint.as_deref(), Some("flannelctl watch"));
        assert_eq!(
            (pending.objects.len(), &pending.objects[0].state),
            (1, &ObjectStateReport::Pending)
        );
        let mut half = explain(ObjectState::InPlace, None);
        half.objects.push((
            Object::from(Neigh {
                link: "flannel.1".parse().unwrap(),
                address: [10, 1, 7, 0].into(),
                mac: MacAddr([1; 6]),
            }),
            ObjectState::Pending,
        ));
        let half = ask(address, Some(half), right);
        assert!(
            half.verdict.starts_with("neigh ") && half.verdict.ends_with("is pending"),
            "{half:?}"
        );
        let mut other = explain(ObjectState::InPlace, None);
        other.advice.push("a remark".into());
        assert!(ask(address, Some(other), right).ok);
        let mut other = explain(ObjectState::InPlace, None);
        other.advice.push(Advice::OtherVni { theirs: 4096, ours: 1 });
        let other = ask(address, Some(other), right);
        let text = "packets go through flannel.1 to 192.0.2.7 (vxlan), which drops them: it has \
                    the VNI 4096, and this node has 1";
        assert!(!other.ok && other.verdict.starts_with(text), "{other:?}");
        let rejected = ask(
            address,
            Some(explain(
                ObjectState::Unwanted,
                Some(Rejection::Rejected("another backend".into())),
            )),
            right,
        );
        assert!(rejected.verdict.ends_with("rejected: another backend"), "{rejected:?}");
        // The lease is in the store, but the network has not processed it yet.
        for (daemon, hint) in [(true, "flannelctl watch"), (false, "systemctl start flanneld")] {
            let lease = peer();
            let facts = RouteInputs {
                daemon,
                lease: Some(&lease),
                answer: Ok(right),
                ..RouteInputs::default()
            };
            let waits = diagnose(address, &facts);
            assert_eq!((waits.ok, waits.hint.as_deref()), (false, Some(hint)), "{waits:?}");
            assert_eq!(waits.verdict.contains("waits for its turn"), daemon, "{waits:?}");
        }
        let nobody = ask("10.1.99.1".parse().unwrap(), None, right);
        assert!(nobody.verdict.starts_with("no node holds"), "{nobody:?}");
        let outside = ask("10.9.9.9".parse().unwrap(), None, right);
        assert!(outside.verdict.starts_with("it lies outside"), "{outside:?}");
        let stop = Finding::warning(Check::ForwardDrop, "rule `drop`").with_command("nft …");
        let facts = RouteInputs {
            config: Some(&config),
            explanation: Some(explain(ObjectState::InPlace, None)),
            answer: Ok(right),
            stop: Some(stop.clone()),
            ..RouteInputs::default()
        };
        let stopped = diagnose(address, &facts);
        assert_eq!((stopped.ok, &*stopped.verdict), (false, "rule `drop`"));
        assert_eq!(stopped.hint.as_deref(), Some("nft …"));
        let ours = ask("10.1.5.4".parse().unwrap(), None, right);
        assert!(ours.ok && ours.node.as_deref() == Some("this node"), "{ours:?}");
    }
}
