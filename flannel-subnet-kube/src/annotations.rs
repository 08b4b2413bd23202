//! The names of flannel's annotations, and what a lease's attributes look like in them.
//!
//! Values are compared as text, by Go flannel too, so that one thing is always written in one way, or in two where it
//! is to be noticed.
//!
//! **Source**: flannel `pkg/subnet/kube/annotations.go: newAnnotations`, `kube.go: AcquireLease`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, Offer};

/// A node with exactly this value is flannel's.
pub(crate) const MANAGED: &str = "kube-subnet-manager";
pub(crate) const BACKEND_TYPE: &str = "backend-type";

/// The names of one family, without the prefix.
pub(crate) struct Names {
    /// The backend's data.
    pub(crate) data: &'static str,
    /// Where peers send traffic.
    pub(crate) public: &'static str,
    /// If it is set, what is published instead of the node's own address.
    pub(crate) overwrite: &'static str,
    /// If it is set, the same as `--public-ip`.
    pub(crate) node: &'static str,
    /// What stands for no address.
    none: &'static str,
    /// What would be right, with its article.
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

/// What the names of all annotations begin with: `flannel.alpha.coreos.com/`, `example.com/net-`.
///
/// A domain name with at least one dot; behind a slash, lower-case letters, digits, `-` and `_`. A slash, and a `-`
/// behind what follows it, are added where they are missing.
///
/// ```
/// use flannel_subnet_kube::Prefix;
///
/// assert_eq!("example.com".parse::<Prefix>()?.to_string(), "example.com/");
/// assert_eq!("example.com/net".parse::<Prefix>()?.to_string(), "example.com/net-");
/// # Ok::<(), flannel_subnet_kube::PrefixError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(Box<str>);

/// Why a text is not what the names of annotations can begin with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no prefix of annotations: right would be a domain name in lower case with a dot in it, perhaps with a slash and a word \
     behind it, such as flannel.alpha.coreos.com or example.com/net"
)]
pub struct PrefixError {
    /// The text.
    pub text: String,
}

impl FromStr for Prefix {
    type Err = PrefixError;
    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let error = || PrefixError { text: text.to_owned() };
        let (domain, word) = text.split_once('/').unwrap_or((text, ""));
        let plain = |text: &str| {
            text.bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
        };
        let labels: Vec<&str> = domain.split('.').collect();
        if labels.len() < 2
            || labels.iter().any(|label| label.is_empty() || !plain(label))
            || !plain(word)
        {
            return Err(error());
        }
        // A dash alone is no word.
        if word == "-" {
            return Err(error());
        }
        let dash = if word.is_empty() || word.ends_with('-') { "" } else { "-" };
        Ok(Self(format!("{domain}/{word}{dash}").into()))
    }
}

/// Go flannel's.
impl Default for Prefix {
    fn default() -> Self {
        Self("flannel.alpha.coreos.com/".into())
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Prefix {
    /// What follows it in an annotation's name.
    pub(crate) fn strip<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_prefix(&*self.0)
    }
}

/// The values of flannel's annotations, by their names without the prefix.
pub(crate) type Values = BTreeMap<Box<str>, Box<str>>;

/// What is to be written for these attributes on a node that has `there`: all that Go flannel writes, and nothing else.
///
/// The pair of IPv4 is always written, except by `vxlan` without IPv4; that of IPv6 by `vxlan` and `wireguard` if they have
/// data for it, and by `host-gw` and `extension` if they have an address.
pub(crate) fn wanted(attrs: &LeaseAttrs, there: &Values) -> Values {
    let mut values = Values::new();
    let mut put = |name: &str, value: &str| values.insert(name.into(), value.into());
    put(MANAGED, "true");
    put(BACKEND_TYPE, &attrs.preferred.kind);
    for family in Family::BOTH {
        let (data, public) =
            (attrs.preferred.data[family].as_deref(), attrs.preferred.public[family]);
        let written = match (family, &*attrs.preferred.kind) {
            (_, "vxlan") => data.is_some(),
            (Family::V4, _) => true,
            (Family::V6, "wireguard") => data.is_some() && public.is_some(),
            (Family::V6, "host-gw" | "extension") => public.is_some(),
            (Family::V6, _) => false,
        };
        if written {
            let names = names(family);
            let own = public.map_or_else(|| names.none.to_owned(), |address| address.to_string());
            // One that is no address is no order.
            let overwrite = there.get(names.overwrite).filter(|text| parse(text, family).is_some());
            put(names.data, data.unwrap_or("null"));
            put(names.public, overwrite.map_or(&own, |text| text));
        }
    }
    values
}

/// Whether an annotation that is there says this, in either of the two ways in which data is written; see [`reworded`].
pub(crate) fn says(there: &Values, name: &str, wanted: &str) -> bool {
    let is_data = Family::BOTH.iter().any(|family| names(*family).data == name);
    there.get(name).is_some_and(|text| match text.strip_prefix(' ') {
        Some(text) if is_data => text == wanted,
        _ => **text == *wanted,
    })
}

/// What else must be written so that Go flannel's nodes take notice: in dual stack they do only if texts of both families are others. If one
/// has no news, its data is written in the other way, which for whoever reads it is the same: with or without a space before it.
///
/// Behind the brace a space would be as good, but not within: Go flannel cuts its own MAC address out of this text.
pub(crate) fn reworded(
    wanted: &Values,
    missing: &Values,
    there: &Values,
) -> Option<(Box<str>, Box<str>)> {
    if missing.contains_key(BACKEND_TYPE) {
        // It counts for both.
        return None;
    }
    let news = |family| {
        let names = names(family);
        missing.contains_key(names.data) || missing.contains_key(names.public)
    };
    let quiet = match (news(Family::V4), news(Family::V6)) {
        (true, false) => Family::V6,
        (false, true) => Family::V4,
        _ => return None,
    };
    let name = names(quiet).data;
    let (data, text) = (wanted.get(name)?, there.get(name)?);
    Some((name.into(), if text == data { format!(" {data}").into() } else { data.clone() }))
}

/// The attributes that the annotations hold, for these families, and what is wrong with them.
///
/// What one family lacks is no reason to lose the other.
pub(crate) fn read(
    values: &Values,
    families: &[Family],
    prefix: &Prefix,
) -> (LeaseAttrs, Vec<String>) {
    let mut wrong = Vec::new();
    let text = |name: &str| values.get(name).map(|text| &**text).unwrap_or_default();
    let enabled = |family| families.contains(&family);
    let mut public = Dual::default();
    for family in families {
        match address(values, names(*family).public, *family, prefix) {
            Ok(address) => public[*family] = address,
            Err(reason) => wrong.push(reason),
        }
    }
    let mut data = |family: Family| {
        let name = names(family).data;
        let text = Some(text(name).trim_ascii())
            .filter(|text| enabled(family) && !["", "null"].contains(text))?;
        if serde_json::from_str::<serde::de::IgnoredAny>(text).is_err() {
            wrong.push(format!("annotation {prefix}{name}: {} is no JSON", shorten(text)));
            return None;
        }
        Some(flannel_core::json::compact(text).into_boxed_str())
    };
    let backend_data = Dual { v4: data(Family::V4), v6: data(Family::V6) };
    let backend_type = usual(text(BACKEND_TYPE));
    (LeaseAttrs::from(Offer { public, kind: backend_type, data: backend_data }), wrong)
}

/// One annotation that holds an address; `None` if it is absent, empty or the address that means none.
pub(crate) fn address(
    values: &Values,
    name: &str,
    family: Family,
    prefix: &Prefix,
) -> Result<Option<std::net::IpAddr>, String> {
    let Some(text) = values.get(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    let address = parse(text, family).ok_or_else(|| {
        let expected = names(family).expected;
        format!("annotation {prefix}{name}: {} is not valid, expected {expected}", shorten(text))
    })?;
    Ok(Some(address).filter(|address| !address.is_unspecified()))
}

fn parse(text: &str, family: Family) -> Option<std::net::IpAddr> {
    text.parse().ok().filter(|address| Family::of(*address) == family)
}

/// What is wrong with the addresses of these families that are to be published instead of the node's own.
pub(crate) fn wrong_overwrites(
    values: &Values,
    families: &[Family],
    prefix: &Prefix,
) -> impl Iterator<Item = String> {
    families
        .iter()
        .filter_map(|family| address(values, names(*family).overwrite, *family, prefix).err())
}

/// For an error message.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Thousands of leases share a few names, which take no memory of their own.
fn usual(name: &str) -> std::borrow::Cow<'static, str> {
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
        LeaseAttrs::from(Offer {
            public: public.iter().map(|a| a.parse::<std::net::IpAddr>().unwrap()).collect(),
            kind: kind.into(),
            data: Dual { v4: data[0].map(Into::into), v6: data[1].map(Into::into) },
        })
    }

    #[test]
    fn prefixes_are_gos() {
        for (text, prefix) in [
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/"),
            ("flannel.alpha.coreos.com/", "flannel.alpha.coreos.com/"),
            ("a.b/net", "a.b/net-"),
            ("a.b/net-", "a.b/net-"),
            ("a_1.b-2/x_y", "a_1.b-2/x_y-"),
        ] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), prefix);
        }
        for bad in [
            "", "/", "coreos", "coreos/x", "a.b/c/d", "a.b/c/", "A.b", "a.b/C", "a..b", ".b",
            "a.b/-", "a b.c",
        ] {
            assert!(
                bad.parse::<Prefix>().unwrap_err().to_string().contains("example.com/net"),
                "{bad}"
            );
        }
        assert_eq!(Prefix::default(), "flannel.alpha.coreos.com".parse().unwrap());
    }

    #[test]
    fn every_backend_writes_what_go_writes() {
        const V4: &str = "192.0.2.1";
        const V6: &str = "2001:db8::1";
        let (mac4, mac6) = (
            r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#,
            r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:02"}"#,
        );
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
            assert_eq!(wanted(&attrs, &Values::new()), values(&expected), "{attrs:?}");
        }
        let there =
            values(&[("public-ip-overwrite", "198.51.100.7"), ("public-ipv6-overwrite", "")]);
        let overwritten = wanted(&attrs("host-gw", &[V4, V6], [None, None]), &there);
        assert_eq!(
            (&*overwritten["public-ip"], &*overwritten["public-ipv6"]),
            ("198.51.100.7", V6)
        );
    }

    #[test]
    fn what_is_written_is_read_again_and_what_is_wrong_is_named() {
        let all = attrs("vxlan", &["192.0.2.1", "2001:db8::1"], [Some("{\"a\":1}"), Some("{}")]);
        let prefix = Prefix::default();
        let written = wanted(&all, &Values::new());
        assert_eq!(read(&written, &Family::BOTH, &prefix), (all.clone(), Vec::new()));
        let v4 = attrs("vxlan", &["192.0.2.1"], [Some("{\"a\":1}"), None]);
        assert_eq!(read(&written, &[Family::V4], &prefix), (v4, Vec::new()));
        let mut bad = written;
        bad.insert("public-ip".into(), "2001:db8::7".into());
        bad.insert("backend-v6-data".into(), "{\"VNI".into());
        let (attrs, wrong) = read(&bad, &Family::BOTH, &prefix);
        assert_eq!(
            (attrs.preferred.public.v4, attrs.preferred.public.v6),
            (None, all.preferred.public.v6)
        );
        assert_eq!(
            (attrs.preferred.data.v4, attrs.preferred.data.v6),
            (all.preferred.data.v4, None)
        );
        let expected = [
            r#"annotation flannel.alpha.coreos.com/public-ip: "2001:db8::7" is not valid, expected an IPv4 address such as 192.0.2.1"#,
            r#"annotation flannel.alpha.coreos.com/backend-v6-data: "{\"VNI" is no JSON"#,
        ];
        assert_eq!(wrong, expected);
    }
}
