//! The parts of a node that flannel reads: a few hundred of its twenty thousand bytes.
//!
//! Decoding has two stages. The first ([`Wire`]) scans the bytes once and borrows the relevant
//! parts. The second ([`Node`]) decodes them, and only if they have changed.

pub(crate) mod annotations;
pub(crate) mod prefix;

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher};

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LARGEST_VALUE, Revision, TooLarge};
use flannel_core::{Lease, Subnet, Subnets};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use annotations::{MANAGED, Values, is_read, read, size};
use prefix::Prefix;

/// The condition for a node's network.
pub(crate) const CONDITION: &str = "NetworkUnavailable";

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
    /// Of the status of an error event.
    pub(crate) code: u16,
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
        let raw = [self.metadata.creation_timestamp, self.spec.pod_cidr, self.spec.pod_cidrs];
        raw.into_iter().for_each(|raw| add(raw.map_or("", RawValue::get)));
        // The second stage finds errors.
        let _ = self.each_annotation(prefix, |name, value| {
            add(name);
            add(value.get());
        });
        hasher.finish()
    }

    /// Flannel's annotations, by their names without the prefix.
    fn each_annotation(
        &self,
        prefix: &Prefix,
        mut each: impl FnMut(&str, &RawValue),
    ) -> Result<(), serde_json::Error> {
        struct Own<'p, F>(&'p Prefix, F);
        impl<'de, F: FnMut(&str, &RawValue)> Visitor<'de> for Own<'_, F> {
            type Value = ();
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
                while let Some(Name(name)) = map.next_key()? {
                    match self.0.strip(&name) {
                        Some(name) => (self.1)(name, map.next_value()?),
                        None => drop(map.next_value::<serde::de::IgnoredAny>()?),
                    }
                }
                Ok(())
            }
        }
        let Some(raw) = self.metadata.annotations.filter(|raw| raw.get() != "null") else {
            return Ok(());
        };
        serde_json::Deserializer::from_str(raw.get()).deserialize_map(Own(prefix, &mut each))
    }

    /// Decodes the node.
    ///
    /// # Errors
    /// The part that cannot be decoded.
    pub(crate) fn node(&self, prefix: &Prefix) -> Result<Node, String> {
        fn text<'a, T: Deserialize<'a> + Default>(
            raw: Option<&'a RawValue>,
            what: &str,
        ) -> Result<T, String> {
            let Some(raw) = raw.filter(|raw| raw.get() != "null") else { return Ok(T::default()) };
            serde_json::from_str(raw.get())
                .map_err(|error| format!("{what}: {} ({error})", raw.get()))
        }
        let mut values = Values::new();
        let mut wrong = None;
        let each = |name: &str, raw: &RawValue| {
            if !is_read(name) {
                return;
            }
            match serde_json::from_str::<Cow<'_, str>>(raw.get()) {
                Ok(value) => drop(values.insert(name.into(), value.into())),
                Err(error) => wrong = Some(format!("annotation {prefix}{name}: {error}")),
            }
        };
        self.each_annotation(prefix, each).map_err(|error| format!("annotations: {error}"))?;
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        let mut pod_cidrs: Vec<String> = text(self.spec.pod_cidrs, "spec.podCIDRs")?;
        if pod_cidrs.is_empty() {
            let one: String = text(self.spec.pod_cidr, "spec.podCIDR")?;
            pod_cidrs.extend(Some(one).filter(|one| !one.is_empty()));
        }
        let created: String = text(self.metadata.creation_timestamp, "metadata.creationTimestamp")?;
        let status: Status = text(self.status, "status")?;
        let condition = status.conditions.into_iter().find(|condition| condition.kind == CONDITION);
        Ok(Node {
            name: self.metadata.name.as_ref().into(),
            created: moment(&created),
            pod_cidrs,
            values,
            condition,
        })
    }

    /// The version of the node as a number.
    pub(crate) fn revision(&self) -> Revision {
        Revision(self.metadata.resource_version.parse().unwrap_or_default())
    }
}

/// A key that is borrowed if possible.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// `2026-11-21T20:19:51Z` as 20261121201951, which has the same order.
fn moment(text: &str) -> u64 {
    text.bytes()
        .filter(u8::is_ascii_digit)
        .take(14)
        .fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0'))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Status {
    conditions: Vec<Condition>,
}

/// One of a node's conditions, without its heartbeat.
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
    /// [`CONDITION`].
    pub(crate) condition: Option<Condition>,
}

impl Node {
    /// The PodCIDRs of these families; `None` if it has none of them.
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

    /// The node runs flannel.
    pub(crate) fn is_managed(&self) -> bool {
        self.values.get(MANAGED).is_some_and(|value| &**value == "true")
    }

    /// Its lease, if it runs flannel and has subnets, and its problems.
    pub(crate) fn lease(
        &self,
        revision: Revision,
        families: &[Family],
        prefix: &Prefix,
    ) -> (Option<Lease>, Vec<String>) {
        if !self.is_managed() {
            return (None, Vec::new());
        }
        let subnets = match self.subnets(families) {
            Ok(Some(subnets)) => subnets,
            Ok(None) => {
                let families: Vec<String> = families.iter().map(ToString::to_string).collect();
                return (None, vec![format!("it has no PodCIDR for {}", families.join(" or "))]);
            }
            Err(wrong) => return (None, vec![wrong]),
        };
        if let Err(TooLarge { size }) = TooLarge::check(size(&self.values, families)) {
            let wrong = format!(
                "its annotations {prefix}* for its lease have {size} bytes, expected at most \
                 {LARGEST_VALUE}: its lease is not used"
            );
            return (None, vec![wrong]);
        }
        let (attrs, wrong) = read(&self.values, families, prefix);
        (
            Some(Lease { subnets, attrs, expires: None, since: Revision(self.created), revision }),
            wrong,
        )
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

    fn lease(text: &str, families: &[Family]) -> (Option<Lease>, Vec<String>) {
        node(text).lease(Revision(42), families, &Prefix::default())
    }

    #[test]
    fn a_node_is_decoded_into_a_lease() {
        let (lease, wrong) = lease(NODE, &[Family::V4]);
        let lease = lease.unwrap();
        assert_eq!((lease.subnets.to_string().as_str(), wrong.len()), ("10.1.5.0-24", 0));
        assert_eq!(
            lease.attrs.preferred.data.v4.as_deref(),
            Some(r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#)
        );
        assert_eq!((lease.since, lease.revision), (Revision(20_261_121_201_951), Revision(42)));
        let condition = node(NODE).condition.unwrap();
        assert_eq!(
            (condition.status.as_str(), condition.reason.as_str()),
            ("False", "FlannelIsUp")
        );
    }

    #[test]
    fn annotations_that_are_too_large_make_no_lease_and_others_do_not_count() {
        let data = |size: usize| {
            let text = format!("{{\\\"a\\\":\\\"{}\\\"}}", "x".repeat(size));
            NODE.replace(r#"{\"VNI\":1,\"VtepMAC\":\"0a:00:00:00:00:01\"}"#, &text)
        };
        let (small, wrong) = lease(&data(16_000), &[Family::V4]);
        assert!(small.is_some() && wrong.is_empty(), "{wrong:?}");
        let (large, wrong) = lease(&data(20_000), &[Family::V4]);
        assert_eq!(large, None);
        assert!(
            wrong[0]
                .starts_with("its annotations flannel.alpha.coreos.com/* for its lease have 20")
                && wrong[0].contains("expected at most 16384"),
            "{wrong:?}"
        );
        let foreign = NODE.replace("other/x", "flannel.alpha.coreos.com/notes");
        let foreign = foreign.replace("{\\\"y\\\":1}", &"x".repeat(200_000));
        let (lease, wrong) = lease(&foreign, &[Family::V4]);
        assert!(lease.is_some() && wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn the_fingerprint_covers_exactly_the_parts_of_a_lease() {
        let (hasher, prefix) = (RandomState::new(), Prefix::default());
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
        assert_eq!(lease(&NODE.replace("\"true\"", "\"yes\""), &both), (None, Vec::new()));
        let says = |text: String, families: &[Family]| lease(&text, families).1.join("; ");
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
            assert_eq!(lease(text, &Family::BOTH), (None, Vec::new()));
        }
    }
}
