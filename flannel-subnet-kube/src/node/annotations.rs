//! The names of flannel's annotations, and the attributes of a lease in them.
//!
//! Go flannel compares values as text. So each value has one form here. Only backend data has a
//! second form, which makes Go flannel notice a change.
//!
//! **Source**: flannel `pkg/subnet/kube/annotations.go: newAnnotations`, `kube.go: AcquireLease`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::text::{MAX_VALUE_CHARS, shorten};

use super::prefix::Prefix;

/// A node runs flannel if this annotation is "true".
pub(crate) const MANAGED: &str = "kube-subnet-manager";
pub(crate) const BACKEND_TYPE: &str = "backend-type";
/// The further offers of the lease as JSON. Go flannel ignores it. A node with one offer does not
/// have this annotation.
pub(crate) const OTHER_OFFERS: &str = "other-offers";
/// An operator selects the external interface of the node: names, addresses or networks, separated
/// by commas. Go flannel ignores it.
pub(crate) const IFACE: &str = "iface";

/// The names of one family, without the prefix.
pub(crate) struct Names {
    /// The backend's data.
    pub(crate) data: &'static str,
    /// The address to which peers send packets.
    pub(crate) public: &'static str,
    /// An operator sets the address to publish instead of the node's own address.
    pub(crate) overwrite: &'static str,
    /// An operator sets the node's own address, as with `--public-ip`.
    pub(crate) node: &'static str,
    /// The text for "no address".
    none: &'static str,
    /// The expected value, with its article.
    pub(crate) expected: &'static str,
}

pub(crate) const fn names(family: Family) -> Names {
    match family {
        Family::V4 => Names {
            data: "backend-data",
            public: "public-ip",
            overwrite: "public-ip-overwrite",
            node: "node-public-ip",
            none: "0.0.0.0",
            expected: "an IPv4 address such as 192.0.2.1",
        },
        Family::V6 => Names {
            data: "backend-v6-data",
            public: "public-ipv6",
            overwrite: "public-ipv6-overwrite",
            node: "node-public-ipv6",
            none: "::",
            expected: "an IPv6 address such as 2001:db8::1",
        },
    }
}

/// The values of flannel's annotations, by their names without the prefix.
pub(crate) type Values = BTreeMap<Box<str>, Box<str>>;

/// Whether flannel reads an annotation. Other annotations with the prefix are not even kept.
pub(crate) fn is_read(name: &str) -> bool {
    [MANAGED, BACKEND_TYPE, OTHER_OFFERS, IFACE].contains(&name)
        || Family::BOTH.into_iter().any(|family| {
            let names = names(family);
            [names.data, names.public, names.overwrite, names.node].contains(&name)
        })
}

/// The number of bytes of the annotations that make the lease of a node, for these families. Other
/// annotations of the node do not count.
pub(crate) fn size(values: &Values, families: &[Family]) -> usize {
    let of_families = families.iter().flat_map(|family| {
        let names = names(*family);
        [names.data, names.public]
    });
    [BACKEND_TYPE, OTHER_OFFERS]
        .into_iter()
        .chain(of_families)
        .filter_map(|name| values.get(name))
        .map(|value| value.len())
        .sum()
}

/// The annotations for these attributes on a node that has `present`. They are the annotations that
/// Go flannel writes.
///
/// The IPv4 pair is always written, except by `vxlan` without IPv4. The IPv6 pair is written by
/// `vxlan` and `wireguard` if they have data for it, and by `host-gw` and `extension` if they have
/// an address. An empty text is an annotation that must not be there.
pub(crate) fn desired(attrs: &LeaseAttrs, present: &Values) -> Values {
    let mut values = Values::new();
    let mut put = |name: &str, value: &str| values.insert(name.into(), value.into());
    put(MANAGED, "true");
    put(BACKEND_TYPE, &attrs.preferred.kind);
    let others: Vec<Offer> =
        attrs.others.iter().map(|offer| with_overwrites(offer, present)).collect();
    if !others.is_empty() {
        put(OTHER_OFFERS, &Offer::list_to_json(&others));
    } else if present.contains_key(OTHER_OFFERS) {
        put(OTHER_OFFERS, "");
    }
    for family in Family::BOTH {
        let data = attrs.preferred.data[family].as_deref();
        let public = attrs.preferred.public[family];
        let is_written = match (family, &*attrs.preferred.kind) {
            (_, "vxlan") => data.is_some(),
            (Family::V4, _) => true,
            (Family::V6, "wireguard") => data.is_some() && public.is_some(),
            (Family::V6, "host-gw" | "extension") => public.is_some(),
            (Family::V6, _) => false,
        };
        if is_written {
            let names = names(family);
            put(names.data, data.unwrap_or("null"));
            let own = public.map_or_else(|| names.none.to_owned(), |address| address.to_string());
            // The text of the operator is copied, because Go flannel does so.
            put(names.public, overwrite(present, family).map_or(&own, |given| given.text));
        }
    }
    values
}

/// An address that an operator set, to be published instead of the node's own address.
struct Overwrite<'a> {
    text: &'a str,
    address: IpAddr,
}

/// The address that an operator set. A text that is not an address is ignored.
fn overwrite(present: &Values, family: Family) -> Option<Overwrite<'_>> {
    let text: &str = present.get(names(family).overwrite)?;
    Some(Overwrite { text, address: parse(text, family)? })
}

/// An offer with the addresses that an operator set.
fn with_overwrites(offer: &Offer, present: &Values) -> Offer {
    let public = offer
        .public
        .map(|family, own: &IpAddr| overwrite(present, family).map_or(*own, |given| given.address));
    offer.clone().with_public(public)
}

/// Whether an annotation has this value, in either of the two forms of data; see [`reworded`].
pub(crate) fn has(present: &Values, name: &str, desired: &str) -> bool {
    let is_data = Family::BOTH.iter().any(|family| names(*family).data == name);
    present.get(name).is_some_and(|text| match text.strip_prefix(' ') {
        Some(text) if is_data => text == desired,
        _ => **text == *desired,
    })
}

/// The name and the value of an annotation that must be written in addition, so that Go flannel's
/// nodes notice the change.
///
/// In dual stack Go flannel notices a change only if texts of both families change. If one family
/// has no change, its data gets its other form, with or without a leading space. The space must not
/// be after the brace, because Go flannel cuts its own MAC address out of the text.
pub(crate) fn reworded(
    desired: &Values,
    missing: &Values,
    present: &Values,
) -> Option<(Box<str>, Box<str>)> {
    if missing.contains_key(BACKEND_TYPE) {
        // It is relevant for both families.
        return None;
    }
    let changes = |family| {
        let names = names(family);
        missing.contains_key(names.data) || missing.contains_key(names.public)
    };
    let unchanged = match (changes(Family::V4), changes(Family::V6)) {
        (true, false) => Family::V6,
        (false, true) => Family::V4,
        _ => return None,
    };
    let name = names(unchanged).data;
    let data = desired.get(name)?;
    let other_form =
        if present.get(name)? == data { format!(" {data}").into() } else { data.clone() };
    Some((name.into(), other_form))
}

/// The attributes that were read from annotations.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReadAttrs {
    pub(crate) attrs: LeaseAttrs,
    /// What is wrong with the annotations.
    pub(crate) problems: Vec<String>,
}

/// The attributes in the annotations, for these families. An error of one family does not affect
/// the other family.
pub(crate) fn read(values: &Values, families: &[Family], prefix: &Prefix) -> ReadAttrs {
    let mut problems = Vec::new();
    let mut preferred = Offer::default().with_kind(shared_name(text(values, BACKEND_TYPE)));
    for family in families {
        match address(values, names(*family).public, *family, prefix) {
            Ok(address) => preferred.public[*family] = address,
            Err(problem) => problems.push(problem),
        }
    }
    for family in Family::BOTH.into_iter().filter(|family| families.contains(family)) {
        match backend_data(values, family, prefix) {
            Ok(data) => preferred.data[family] = data,
            Err(problem) => problems.push(problem),
        }
    }
    let others = match other_offers(values, families, prefix) {
        Ok(others) => others,
        Err(problem) => {
            problems.push(problem);
            Box::default()
        }
    };
    ReadAttrs { attrs: LeaseAttrs { preferred, others }, problems }
}

/// The value of an annotation. A missing annotation is empty.
fn text<'a>(values: &'a Values, name: &str) -> &'a str {
    values.get(name).map(|text| &**text).unwrap_or_default()
}

/// The data of the backend for one family, or `None` if it has no data.
fn backend_data(
    values: &Values,
    family: Family,
    prefix: &Prefix,
) -> Result<Option<Box<str>>, String> {
    let name = names(family).data;
    let text = text(values, name).trim_ascii();
    if ["", "null"].contains(&text) {
        return Ok(None);
    }
    if serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
        return Err(format!("annotation {prefix}{name}: {} is not JSON", quote(text)));
    }
    Ok(Some(flannel_core::json::compact(text).into_boxed_str()))
}

/// The further offers, with the values of these families only.
fn other_offers(
    values: &Values,
    families: &[Family],
    prefix: &Prefix,
) -> Result<Box<[Offer]>, String> {
    let text = text(values, OTHER_OFFERS);
    if text.is_empty() {
        return Ok(Box::default());
    }
    let mut offers = Offer::list_from_json(text)
        .map_err(|error| format!("annotation {prefix}{OTHER_OFFERS}: {error}"))?;
    for offer in &mut offers {
        for family in Family::BOTH.into_iter().filter(|family| !families.contains(family)) {
            offer.public[family] = None;
            offer.data[family] = None;
        }
    }
    Ok(offers)
}

/// The address in an annotation, or `None` if it is absent, empty or unspecified.
pub(crate) fn address(
    values: &Values,
    name: &str,
    family: Family,
    prefix: &Prefix,
) -> Result<Option<IpAddr>, String> {
    let Some(text) = values.get(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let address = parse(text, family).ok_or_else(|| {
        let expected = names(family).expected;
        format!("annotation {prefix}{name}: {} is not valid, expected {expected}", quote(text))
    })?;
    Ok(Some(address).filter(|address| !address.is_unspecified()))
}

fn parse(text: &str, family: Family) -> Option<IpAddr> {
    text.parse().ok().filter(|address| Family::of(*address) == family)
}

/// The interfaces that an operator prescribes.
pub(crate) fn interfaces(values: &Values) -> Vec<String> {
    let text = values.get(IFACE).map_or("", |text| text);
    text.split(',').map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect()
}

/// The addresses that an operator set, to be published instead of the node's own addresses. A wrong
/// address is left out.
pub(crate) fn overwrites(values: &Values, families: &[Family], prefix: &Prefix) -> Dual<IpAddr> {
    Dual::from_fn(|family| {
        if !families.contains(&family) {
            return None;
        }
        address(values, names(family).overwrite, family, prefix).ok().flatten()
    })
}

/// The errors of the addresses that an operator set, to be published instead of the node's own
/// addresses.
pub(crate) fn wrong_overwrites(
    values: &Values,
    families: &[Family],
    prefix: &Prefix,
) -> impl Iterator<Item = String> {
    families
        .iter()
        .filter_map(|family| address(values, names(*family).overwrite, *family, prefix).err())
}

/// Quotes a text for an error message.
fn quote(text: &str) -> String {
    format!("{:?}", shorten(text, MAX_VALUE_CHARS))
}

/// Borrows the common names, which thousands of leases share.
fn shared_name(name: &str) -> std::borrow::Cow<'static, str> {
    let usual = ["", "vxlan", "host-gw", "wireguard", "extension", "ipsec", "ipip"];
    match usual.into_iter().find(|usual| *usual == name) {
        Some(usual) => usual.into(),
        None => name.to_owned().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(list: &[(&str, &str)]) -> Values {
        list.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    fn attrs(kind: &'static str, public: &[&str], data: [Option<&str>; 2]) -> LeaseAttrs {
        LeaseAttrs::from(
            Offer::new(public.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
                .with_kind(kind)
                .with_data(Dual { v4: data[0].map(Into::into), v6: data[1].map(Into::into) }),
        )
    }

    #[test]
    fn every_backend_writes_the_annotations_of_go_flannel() {
        const V4: &str = "192.0.2.1";
        const V6: &str = "2001:db8::1";
        let mac4 = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#;
        let mac6 = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:02"}"#;
        let head = |kind| vec![(MANAGED, "true"), (BACKEND_TYPE, kind)];
        let v4 = |data| [("backend-data", data), ("public-ip", V4)];
        let v6 = |data| [("backend-v6-data", data), ("public-ipv6", V6)];
        let with =
            |kind, rest: &[(&'static str, &'static str)]| [head(kind), rest.to_vec()].concat();
        for (attrs, expected) in [
            (attrs("vxlan", &[V4], [Some(mac4), None]), with("vxlan", &v4(mac4))),
            (
                attrs("vxlan", &[V4, V6], [Some(mac4), Some(mac6)]),
                with("vxlan", &[v4(mac4), v6(mac6)].concat()),
            ),
            (attrs("vxlan", &[V6], [None, Some(mac6)]), with("vxlan", &v6(mac6))),
            (attrs("host-gw", &[V4], [None, None]), with("host-gw", &v4("null"))),
            (
                attrs("host-gw", &[V4, V6], [None, None]),
                with("host-gw", &[v4("null"), v6("null")].concat()),
            ),
            (
                attrs("host-gw", &[V6], [None, None]),
                with(
                    "host-gw",
                    &[[("backend-data", "null"), ("public-ip", "0.0.0.0")], v6("null")].concat(),
                ),
            ),
            (attrs("wireguard", &[V4, V6], [Some("{}"), None]), with("wireguard", &v4("{}"))),
            (attrs("", &[V4, V6], [None, None]), with("", &v4("null"))),
        ] {
            assert_eq!(desired(&attrs, &Values::new()), values(&expected), "{attrs:?}");
        }
        let there =
            values(&[("public-ip-overwrite", "198.51.100.7"), ("public-ipv6-overwrite", "")]);
        let overwritten = desired(&attrs("host-gw", &[V4, V6], [None, None]), &there);
        assert_eq!(&*overwritten["public-ip"], "198.51.100.7");
        assert_eq!(&*overwritten["public-ipv6"], V6);
    }

    #[test]
    fn only_the_annotations_of_a_lease_count_for_its_size() {
        let mut node = values(&[
            ("backend-type", "vxlan"),
            ("public-ip", "192.0.2.1"),
            ("backend-data", "null"),
            ("backend-v6-data", "{}"),
            ("public-ip-overwrite", "198.51.100.7"),
            ("anything", "else"),
        ]);
        assert_eq!(size(&node, &[Family::V4]), 18);
        assert_eq!(size(&node, &Family::BOTH), 20);
        node.insert(OTHER_OFFERS.into(), "[]".into());
        assert_eq!(size(&node, &[Family::V4]), 20);
        assert!(is_read("public-ipv6-overwrite") && is_read(MANAGED) && !is_read("anything"));
    }

    #[test]
    fn written_annotations_are_read_and_an_error_names_the_annotation() {
        let all = attrs("vxlan", &["192.0.2.1", "2001:db8::1"], [Some("{\"a\":1}"), Some("{}")]);
        let prefix = Prefix::default();
        let written = desired(&all, &Values::new());
        let without_problems =
            |attrs: &LeaseAttrs| ReadAttrs { attrs: attrs.clone(), problems: Vec::new() };
        assert_eq!(read(&written, &Family::BOTH, &prefix), without_problems(&all));
        let v4 = attrs("vxlan", &["192.0.2.1"], [Some("{\"a\":1}"), None]);
        assert_eq!(read(&written, &[Family::V4], &prefix), without_problems(&v4));
        let offer = |attrs: LeaseAttrs| attrs.preferred;
        let two = LeaseAttrs {
            others: [offer(attrs("host-gw", &["192.0.2.1", "2001:db8::1"], [None, None]))].into(),
            ..all.clone()
        };
        let both = desired(&two, &Values::new());
        assert_eq!(read(&both, &Family::BOTH, &prefix), without_problems(&two));
        let narrow = read(&both, &[Family::V4], &prefix).attrs;
        assert_eq!(*narrow.others, [offer(attrs("host-gw", &["192.0.2.1"], [None, None]))]);
        // The annotation is removed with the last further offer.
        assert_eq!(&*desired(&all, &both)[OTHER_OFFERS], "");
        let overwrite = values(&[("public-ip-overwrite", "198.51.100.7")]);
        assert!(desired(&two, &overwrite)[OTHER_OFFERS].contains("198.51.100.7"));
        let mut odd = both;
        odd.insert(OTHER_OFFERS.into(), "[7]".into());
        let from_odd = read(&odd, &Family::BOTH, &prefix);
        assert_eq!(from_odd.attrs, all);
        assert!(
            from_odd.problems[0].starts_with("annotation flannel.alpha.coreos.com/other-offers")
        );
        let mut bad = written;
        bad.insert("public-ip".into(), "2001:db8::7".into());
        bad.insert("backend-v6-data".into(), "{\"VNI".into());
        let ReadAttrs { attrs, problems } = read(&bad, &Family::BOTH, &prefix);
        assert_eq!(attrs.preferred.public.v4, None);
        assert_eq!(attrs.preferred.public.v6, all.preferred.public.v6);
        assert_eq!(attrs.preferred.data.v4, all.preferred.data.v4);
        assert_eq!(attrs.preferred.data.v6, None);
        let expected = [
            "annotation flannel.alpha.coreos.com/public-ip: \"2001:db8::7\" is not valid, \
             expected an IPv4 address such as 192.0.2.1",
            r#"annotation flannel.alpha.coreos.com/backend-v6-data: "{\"VNI" is not JSON"#,
        ];
        assert_eq!(problems, expected);
    }
}
