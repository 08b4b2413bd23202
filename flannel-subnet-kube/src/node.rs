//! The parts of a node that flannel reads: a few hundred of its twenty thousand bytes.
//!
//! Decoding has two stages. The first stage ([`Wire`]) scans the bytes once and borrows the
//! relevant parts. The second stage ([`Node`]) decodes these parts if they have changed.

pub(crate) mod annotations;
pub(crate) mod prefix;

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher};
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LARGEST_VALUE, Revision, TooLarge};
use flannel_core::{Lease, Subnet, Subnets};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use annotations::{MANAGED, ReadAttrs, Values, is_read, read, size};
use prefix::Prefix;

/// The condition for a node's network.
pub(crate) const CONDITION: &str = "NetworkUnavailable";
/// The type of a node's address inside its cluster.
const INTERNAL_IP: &str = "InternalIP";

/// One line of a watch.
#[derive(Debug, Deserialize)]
pub(crate) struct Event<'a> {
    #[serde(rename = "type", borrow)]
    pub(crate) kind: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) object: Wire<'a>,
}

/// A node as the API server sends it, or the status of an error event.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wire<'a> {
    #[serde(borrow)]
    pub(crate) metadata: Metadata<'a>,
    #[serde(borrow)]
    spec: Spec<'a>,
    #[serde(borrow)]
    status: Option<&'a RawValue>,
    /// The HTTP status of an error event.
    pub(crate) code: u16,
    /// The message of an error event.
    #[serde(borrow)]
    pub(crate) message: Cow<'a, str>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Metadata<'a> {
    #[serde(borrow)]
    pub(crate) name: Cow<'a, str>,
    #[serde(borrow)]
    pub(crate) resource_version: Cow<'a, str>,
    #[serde(borrow)]
    creation_timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    annotations: Option<&'a RawValue>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Spec<'a> {
    #[serde(borrow, rename = "podCIDR")]
    pod_cidr: Option<&'a RawValue>,
    #[serde(borrow, rename = "podCIDRs")]
    pod_cidrs: Option<&'a RawValue>,
}

impl Wire<'_> {
    /// A hash of all parts that a lease is made of. Allocates nothing.
    pub(crate) fn fingerprint(&self, prefix: &Prefix, hasher: &impl BuildHasher) -> u64 {
        let mut hasher = hasher.build_hasher();
        let mut add = |text: &str| {
            hasher.write(text.as_bytes());
            hasher.write_u8(0xff);
        };
        for raw in [self.metadata.creation_timestamp, self.spec.pod_cidr, self.spec.pod_cidrs] {
            add(raw.map_or("", RawValue::get));
        }
        // The second stage reports errors.
        let _ = self.each_annotation(prefix, |name, value| {
            add(name);
            add(value.get());
        });
        hasher.finish()
    }

    /// Calls `each` with the name (without the prefix) and the value of each of flannel's
    /// annotations.
    fn each_annotation(
        &self,
        prefix: &Prefix,
        each: impl FnMut(&str, &RawValue),
    ) -> Result<(), serde_json::Error> {
        let Some(raw) = self.metadata.annotations.filter(|raw| raw.get() != "null") else {
            return Ok(());
        };
        serde_json::Deserializer::from_str(raw.get())
            .deserialize_map(AnnotationVisitor { prefix, each })
    }

    /// Decodes the node.
    ///
    /// # Errors
    /// The part that cannot be decoded.
    pub(crate) fn node(&self, prefix: &Prefix) -> Result<Node, String> {
        let values = self.values(prefix)?;
        let mut pod_cidrs: Vec<String> = decode(self.spec.pod_cidrs, "spec.podCIDRs")?;
        if pod_cidrs.is_empty() {
            let one: String = decode(self.spec.pod_cidr, "spec.podCIDR")?;
            if !one.is_empty() {
                pod_cidrs.push(one);
            }
        }
        let created: String =
            decode(self.metadata.creation_timestamp, "metadata.creationTimestamp")?;
        let status: Status = decode(self.status, "status")?;
        let condition = status.conditions.into_iter().find(|condition| condition.kind == CONDITION);
        let internal = status.addresses.iter().filter(|address| address.kind == INTERNAL_IP);
        // The first one of each family is the node's address for other components.
        let internal = internal.rev().filter_map(|address| address.address.parse::<IpAddr>().ok());
        Ok(Node {
            name: self.metadata.name.as_ref().into(),
            created: sortable_time(&created),
            pod_cidrs,
            values,
            condition,
            internal: internal.collect(),
        })
    }

    /// The values of the annotations that flannel reads.
    fn values(&self, prefix: &Prefix) -> Result<Values, String> {
        let mut values = Values::new();
        let mut wrong = None;
        self.each_annotation(prefix, |name, raw| {
            if !is_read(name) {
                return;
            }
            match serde_json::from_str::<Cow<'_, str>>(raw.get()) {
                Ok(value) => _ = values.insert(name.into(), value.into()),
                Err(error) => wrong = Some(format!("annotation {prefix}{name}: {error}")),
            }
        })
        .map_err(|error| format!("annotations: {error}"))?;
        wrong.map_or(Ok(values), Err)
    }

    /// The version of the node as a number.
    pub(crate) fn revision(&self) -> Revision {
        Revision(self.metadata.resource_version.parse().unwrap_or_default())
    }
}

/// Decodes a part of a node. A missing part and `null` are the default. `name` is for the error.
fn decode<'a, T: Deserialize<'a> + Default>(
    raw: Option<&'a RawValue>,
    name: &str,
) -> Result<T, String> {
    let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(T::default()) };
    serde_json::from_str(raw.get()).map_err(|error| format!("{name}: {} ({error})", raw.get()))
}

/// Calls `each` for the annotations with this prefix, and skips the others.
struct AnnotationVisitor<'p, F> {
    prefix: &'p Prefix,
    each: F,
}

impl<'de, F: FnMut(&str, &RawValue)> Visitor<'de> for AnnotationVisitor<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(AnnotationName(name)) = map.next_key()? {
            match self.prefix.strip(&name) {
                Some(name) => (self.each)(name, map.next_value()?),
                None => drop(map.next_value::<serde::de::IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// The name of an annotation, borrowed if possible.
#[derive(Deserialize)]
struct AnnotationName<'a>(#[serde(borrow)] Cow<'a, str>);

/// The time `2026-11-21T20:19:51Z` as 20261121201951, which has the same order.
fn sortable_time(text: &str) -> u64 {
    text.bytes()
        .filter(u8::is_ascii_digit)
        .take(14)
        .fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    conditions: Vec<Condition>,
    addresses: Vec<NodeAddress>,
}

/// An address of a node.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

/// A condition of a node, without its heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(crate) struct Condition {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) message: String,
    /// The time of the last change of `status`.
    #[serde(rename = "lastTransitionTime")]
    pub(crate) since: Option<String>,
}

/// A node, without its version and its heartbeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: Box<str>,
    /// The time of its creation, as an increasing number.
    pub(crate) created: u64,
    pod_cidrs: Vec<String>,
    /// Flannel's annotations.
    pub(crate) values: Values,
    /// The condition [`CONDITION`].
    pub(crate) condition: Option<Condition>,
    /// Its addresses of type `InternalIP`.
    pub(crate) internal: Dual<IpAddr>,
}

/// The lease of a node.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeLease {
    /// `None` if the node does not run flannel, has no subnets, or has a value that prevents a
    /// lease.
    pub(crate) lease: Option<Lease>,
    /// What is wrong with the node.
    pub(crate) problems: Vec<String>,
}

impl NodeLease {
    fn none(problem: Option<String>) -> Self {
        Self { lease: None, problems: problem.into_iter().collect() }
    }
}

impl Node {
    /// The PodCIDRs of these families, or `None` if the node has no such PodCIDR.
    ///
    /// # Errors
    /// A PodCIDR that cannot be a node's subnet.
    pub(crate) fn subnets(&self, families: &[Family]) -> Result<Option<Subnets>, String> {
        let mut all = Dual::<Subnet>::default();
        for text in &self.pod_cidrs {
            let subnet: Subnet = text.parse().map_err(|error| format!("its PodCIDR {error}"))?;
            let family = subnet.family();
            if families.contains(&family) && all[family].is_none() {
                if Subnets::new([subnet]).is_none() {
                    let most = family.bits() - 1;
                    return Err(format!(
                        "its PodCIDR {text} is not a subnet for pods: expected /1 to /{most}"
                    ));
                }
                all[family] = Some(subnet);
            }
        }
        Ok(Subnets::new(all.values().copied()))
    }

    /// Whether the node runs flannel.
    pub(crate) fn is_managed(&self) -> bool {
        self.values.get(MANAGED).is_some_and(|value| &**value == "true")
    }

    /// The lease of the node, and the node's problems.
    pub(crate) fn lease(
        &self,
        revision: Revision,
        families: &[Family],
        prefix: &Prefix,
    ) -> NodeLease {
        if !self.is_managed() {
            return NodeLease::none(None);
        }
        let subnets = match self.subnets(families) {
            Ok(Some(subnets)) => subnets,
            Ok(None) => {
                let families: Vec<String> = families.iter().map(ToString::to_string).collect();
                let problem = format!("it has no PodCIDR for {}", families.join(" or "));
                return NodeLease::none(Some(problem));
            }
            Err(problem) => return NodeLease::none(Some(problem)),
        };
        if let Err(TooLarge { size }) = TooLarge::check(size(&self.values, families)) {
            return NodeLease::none(Some(format!(
                "its annotations {prefix}* for its lease have {size} bytes, expected at most \
                 {LARGEST_VALUE}: its lease is not used"
            )));
        }
        let ReadAttrs { attrs, problems } = read(&self.values, families, prefix);
        let since = Revision(self.created);
        NodeLease {
            lease: Some(Lease { subnets, attrs, expires: None, since, revision }),
            problems,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::RandomState;

    const NODE: &str = r#"{"kind":"Node","apiVersion":"v1","metadata":{
        "name":"n1","uid":"x","resourceVersion":"42",
        "creationTimestamp":"2026-11-21T20:19:51Z","labels":{"a":"b"},
        "annotations":{"other/x":"{\"y\":1}",
        "flannel.alpha.coreos.com/backend-data":"{\"VNI\":1,\"VtepMAC\":\"0a:00:00:00:00:01\"}",
        "flannel.alpha.coreos.com/backend-type":"vxlan",
        "flannel.alpha.coreos.com/kube-subnet-manager":"true",
        "flannel.alpha.coreos.com/public-ip":"192.0.2.1"},"managedFields":[{"manager":"k"}]},
        "spec":{"podCIDR":"10.1.5.0/24","podCIDRs":["10.1.5.0/24","fd00:0:0:5::/64"]},
        "status":{"conditions":[{"type":"Ready","status":"True"},
        {"type":"NetworkUnavailable","status":"False",
        "reason":"FlannelIsUp","message":"Flannel is running on this node"}],"images":[]}}"#;

    fn node(text: &str) -> Node {
        serde_json::from_str::<Wire<'_>>(text).unwrap().node(&Prefix::default()).unwrap()
    }

    fn lease(text: &str, families: &[Family]) -> NodeLease {
        node(text).lease(Revision(42), families, &Prefix::default())
    }

    #[test]
    fn a_node_is_decoded_into_a_lease() {
        let NodeLease { lease, problems } = lease(NODE, &[Family::V4]);
        let lease = lease.unwrap();
        assert_eq!(problems, Vec::<String>::new());
        assert_eq!(lease.subnets.to_string(), "10.1.5.0-24");
        assert_eq!(
            lease.attrs.preferred.data.v4.as_deref(),
            Some(r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#)
        );
        assert_eq!(lease.since, Revision(20_261_121_201_951));
        assert_eq!(lease.revision, Revision(42));
        let condition = node(NODE).condition.unwrap();
        assert_eq!(condition.status, "False");
        assert_eq!(condition.reason, "FlannelIsUp");
    }

    #[test]
    fn annotations_that_are_too_large_make_no_lease_and_others_do_not_count() {
        let data = |size: usize| {
            let text = format!("{{\\\"a\\\":\\\"{}\\\"}}", "x".repeat(size));
            NODE.replace(r#"{\"VNI\":1,\"VtepMAC\":\"0a:00:00:00:00:01\"}"#, &text)
        };
        let small = lease(&data(16_000), &[Family::V4]);
        assert!(small.lease.is_some() && small.problems.is_empty(), "{:?}", small.problems);
        let large = lease(&data(20_000), &[Family::V4]);
        assert_eq!(large.lease, None);
        assert!(
            large.problems[0]
                .starts_with("its annotations flannel.alpha.coreos.com/* for its lease have 20")
                && large.problems[0].contains("expected at most 16384"),
            "{:?}",
            large.problems
        );
        let foreign = NODE
            .replace("other/x", "flannel.alpha.coreos.com/notes")
            .replace("{\\\"y\\\":1}", &"x".repeat(200_000));
        let with_foreign = lease(&foreign, &[Family::V4]);
        assert!(
            with_foreign.lease.is_some() && with_foreign.problems.is_empty(),
            "{:?}",
            with_foreign.problems
        );
    }

    #[test]
    fn the_fingerprint_covers_exactly_the_parts_of_a_lease() {
        let hasher = RandomState::new();
        let prefix = Prefix::default();
        let print = |text: &str| {
            serde_json::from_str::<Wire<'_>>(text).unwrap().fingerprint(&prefix, &hasher)
        };
        let same = [
            ("\"42\"", "\"43\""),
            ("\"True\"", "\"False\""),
            ("\\\"y\\\":1", "\\\"y\\\":2"),
            ("\"images\":[]", "\"images\":[1]"),
        ];
        for (old, new) in same {
            assert_eq!(print(NODE), print(&NODE.replace(old, new)), "{old}");
        }
        let others = [
            ("192.0.2.1", "192.0.2.2"),
            ("10.1.5.0/24\",", "10.1.6.0/24\","),
            ("5::/64", "6::/64"),
            (":51Z", ":52Z"),
            ("0:01\\", "0:02\\"),
            ("public-ip\"", "public-ipv6\""),
        ];
        for (old, new) in others {
            assert_ne!(print(NODE), print(&NODE.replacen(old, new, 1)), "{old}");
        }
    }

    #[test]
    fn missing_annotations_of_a_peer_are_reported() {
        let both = Family::BOTH;
        assert_eq!(lease(&NODE.replace("\"true\"", "\"yes\""), &both), NodeLease::none(None));
        let says = |text: String, families: &[Family]| lease(&text, families).problems.join("; ");
        let none = NODE.replace("podCIDR", "other");
        assert_eq!(says(none, &both), "it has no PodCIDR for IPv4 or IPv6");
        assert_eq!(
            says(NODE.replace("fd00:0:0:5::/64", "10.9.0.0/24"), &[Family::V6]),
            "it has no PodCIDR for IPv6"
        );
        let bad = says(NODE.replace("10.1.5.0/24", "10.1.5.0"), &both);
        assert!(bad.starts_with("its PodCIDR \"10.1.5.0\" is not"), "{bad}");
        let host = says(NODE.replace("10.1.5.0/24", "10.1.5.1/32"), &both);
        assert_eq!(host, "its PodCIDR 10.1.5.1/32 is not a subnet for pods: expected /1 to /31");
        let wire = NODE.replace("\"192.0.2.1\"", "7");
        let error =
            serde_json::from_str::<Wire<'_>>(&wire).unwrap().node(&Prefix::default()).unwrap_err();
        assert!(error.contains("flannel.alpha.coreos.com/public-ip"), "{error}");
    }

    #[test]
    fn an_empty_node_is_not_an_error() {
        for text in [
            r#"{"metadata":{"name":"n"}}"#,
            r#"{"metadata":{"name":"n","annotations":null},
                "spec":{"podCIDRs":null},"status":null}"#,
        ] {
            assert_eq!(node(text).subnets(&Family::BOTH).unwrap(), None);
            assert_eq!(lease(text, &Family::BOTH), NodeLease::none(None));
        }
    }
}
