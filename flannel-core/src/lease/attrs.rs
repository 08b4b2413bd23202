//! The attributes of a lease, and their form in a store.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::Serialize;
use serde_json::value::RawValue;

use super::Subnets;
use crate::address::{Dual, Family, Subnet};
use crate::json::{FieldError, Fields, compact};

/// The field of a lease with its further offers.
const OTHERS: &str = "OtherOffers";

/// One way to reach a node: a backend type, with the addresses and the data that peers need.
///
/// ```
/// use flannel_core::address::Dual;
/// use flannel_core::lease::{LeaseAttrs, Offer};
/// use std::net::{IpAddr, Ipv4Addr};
///
/// let public = Dual { v4: Some(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7))), v6: None };
/// let attrs = LeaseAttrs::from(Offer::new(public).with_kind("host-gw"));
/// let json = r#"{"PublicIP":"192.0.2.7","PublicIPv6":null,"BackendType":"host-gw"}"#;
/// assert_eq!(attrs.to_json(), json);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Offer {
    /// The backend type, as [`Backend::lease_type`](crate::Backend::lease_type) returns it, such
    /// as `vxlan`. It is empty for `udp` and `alloc`.
    pub kind: Cow<'static, str>,
    /// The addresses to which peers send packets. `None` if the node does not publish an address
    /// of this family. The store then has `0.0.0.0` for IPv4, and `null` for IPv6.
    pub public: Dual<IpAddr>,
    /// The backend's data as [compact] JSON text, or `None` if the backend does not publish data
    /// for this family. Text that is not JSON is published as a JSON string.
    pub data: Dual<Box<str>>,
}

/// The values of a lease and of one of its offers for one address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint<'a> {
    /// The pod addresses.
    pub subnet: Subnet,
    /// See [`Offer::public`].
    pub public: Option<IpAddr>,
    /// See [`Offer::data`].
    pub data: Option<&'a str>,
}

impl Offer {
    /// An offer with these public addresses. Its backend type is empty, and it has no data.
    pub fn new(public: Dual<IpAddr>) -> Self {
        Self { public, ..Self::default() }
    }

    /// Sets [`Offer::kind`].
    #[must_use]
    pub fn with_kind(self, kind: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: kind.into(), ..self }
    }

    /// Sets [`Offer::public`].
    #[must_use]
    pub fn with_public(self, public: Dual<IpAddr>) -> Self {
        Self { public, ..self }
    }

    /// Sets [`Offer::data`].
    #[must_use]
    pub fn with_data(self, data: Dual<Box<str>>) -> Self {
        Self { data, ..self }
    }

    /// One endpoint for each family of `subnets`, IPv4 first.
    pub fn endpoints<'a>(&'a self, subnets: &'a Subnets) -> impl Iterator<Item = Endpoint<'a>> {
        subnets.iter().map(|subnet| Endpoint {
            subnet,
            public: self.public[subnet.family()],
            data: self.data[subnet.family()].as_deref(),
        })
    }

    /// Writes offers as the JSON text of the field `OtherOffers` in the store.
    pub fn list_to_json(offers: &[Self]) -> String {
        let wire: Vec<_> = offers.iter().map(Self::wire).collect();
        compact(&serde_json::to_string(&wire).expect("strings and addresses serialize"))
    }

    /// Reads the text of [`Offer::list_to_json`].
    ///
    /// # Errors
    /// The text is not a list of JSON objects, or a field is invalid.
    pub fn list_from_json(text: &str) -> Result<Box<[Self]>, FieldError> {
        Self::list(&Fields::parse(&format!("{{\"{OTHERS}\":{text}}}"), "")?)
    }

    fn list(fields: &Fields) -> Result<Box<[Self]>, FieldError> {
        let raw: Vec<Box<RawValue>> = fields.take(OTHERS, "a list of objects")?.unwrap_or_default();
        raw.iter().map(|raw| Self::from_fields(&Fields::parse(raw.get(), OTHERS)?)).collect()
    }

    /// The fields of this offer, as the store has them.
    fn wire(&self) -> Wire<'_> {
        Wire {
            public_ip: self.public.v4.unwrap_or(Family::V4.unspecified()),
            public_ipv6: self.public.v6,
            backend_type: &self.kind,
            backend_data: self.data.v4.as_deref().and_then(raw_data),
            backend_v6_data: self.data.v6.as_deref().and_then(raw_data),
            other_offers: Vec::new(),
        }
    }

    fn from_fields(fields: &Fields) -> Result<Self, FieldError> {
        let expected = "an IPv4 address such as \"192.0.2.1\"";
        if fields.has("PublicIP") && fields.raw("PublicIP").is_none() {
            return Err(fields.error("PublicIP", &"null", expected));
        }
        let v4 = fields.parsed("PublicIP", expected)?.map(|address: IpAddr| address.to_canonical());
        if let Some(address) = v4.filter(IpAddr::is_ipv6) {
            return Err(fields.error("PublicIP", &address, expected));
        }
        let v6: Option<IpAddr> =
            fields.parsed("PublicIPv6", "an IPv6 address such as \"2001:db8::1\", or null")?;
        let data = |name: &str| fields.raw(name).map(|raw| compact(raw.get()).into_boxed_str());
        Ok(Self {
            public: Dual {
                v4: v4.filter(|a| !a.is_unspecified()),
                v6: v6.filter(|a| a.is_ipv6() && !a.is_unspecified()),
            },
            kind: backend_type(fields.take("BackendType", "a string")?.unwrap_or_default()),
            data: Dual { v4: data("BackendData"), v6: data("BackendV6Data") },
        })
    }
}

/// The attributes of a lease: how peers reach its node.
///
/// A node publishes one offer, or two while the cluster moves from one backend to another. If a
/// lease has more offers, every node uses the same [`MOST_OFFERS`] of them; see
/// [`offers`](Self::offers).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseAttrs {
    /// The offer that Go flannel reads.
    pub preferred: Offer,
    /// Further offers, in the order of preference. Go flannel ignores them. There may be more
    /// offers than a node uses, so that a lease that is read and written again loses nothing.
    pub others: Box<[Offer]>,
}

/// The size of the largest lease value that nodes read from a store, in bytes. The value is the
/// text of a key or of a file, or of all annotations that make the lease of a Kubernetes node. The
/// value of a node with two backends and both families has less than 1 KiB.
pub const LARGEST_VALUE: usize = 16 << 10;

/// The value of a lease is larger than [`LARGEST_VALUE`]. No node uses such a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the value of the lease has {size} bytes, expected at most {LARGEST_VALUE}")]
pub struct TooLarge {
    /// The size of the value, in bytes.
    pub size: usize,
}

impl TooLarge {
    /// Checks the size of a value, in bytes.
    ///
    /// # Errors
    /// It is larger than [`LARGEST_VALUE`].
    pub const fn check(size: usize) -> Result<(), Self> {
        if size > LARGEST_VALUE { Err(Self { size }) } else { Ok(()) }
    }
}

/// The largest number of offers of one lease that nodes use.
pub const MOST_OFFERS: usize = 4;

/// A lease has offers that no node uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{unused} of its {all} offers are not used: expected at most {MOST_OFFERS} offers, one for \
     each backend type"
)]
pub struct UnusedOffers {
    /// The number of offers that no node uses.
    pub unused: usize,
    /// The number of all offers of the lease.
    pub all: usize,
}

/// Attributes with one offer.
impl From<Offer> for LeaseAttrs {
    fn from(preferred: Offer) -> Self {
        Self { preferred, others: Box::default() }
    }
}

/// The data of an offer as JSON. Data that is not JSON is still published, as a string.
fn raw_data(data: &str) -> Option<Box<RawValue>> {
    match RawValue::from_string(compact(data)) {
        Ok(raw) => Some(raw),
        Err(_) => RawValue::from_string(serde_json::Value::from(data).to_string()).ok(),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Wire<'a> {
    #[serde(rename = "PublicIP")]
    public_ip: IpAddr,
    #[serde(rename = "PublicIPv6")]
    public_ipv6: Option<IpAddr>,
    #[serde(skip_serializing_if = "str::is_empty")]
    backend_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_data: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<Box<RawValue>>,
    /// Go flannel ignores it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_offers: Vec<Self>,
}

impl LeaseAttrs {
    /// The value in the store, byte for byte as Go writes it.
    ///
    /// **Source**: flannel `pkg/lease/lease.go: LeaseAttrs`; Go `encoding/json`.
    pub fn to_json(&self) -> String {
        let mut wire = self.preferred.wire();
        wire.other_offers = self.others.iter().map(Offer::wire).collect();
        compact(&serde_json::to_string(&wire).expect("strings and addresses serialize"))
    }

    /// Reads the value in the store. `PublicIP` may be a v4-mapped IPv6 address.
    ///
    /// # Errors
    /// The text is not a JSON object, or a field is invalid. As in Go, `PublicIP` must not be
    /// `null`.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let fields = Fields::parse(text, "")?;
        Ok(Self { preferred: Offer::from_fields(&fields)?, others: Offer::list(&fields)? })
    }

    /// The offers that nodes use, in the order of preference: the first of each backend type, at
    /// most [`MOST_OFFERS`]. Each offer claims kernel objects on all nodes. Without a limit, one
    /// lease could claim the objects of all other leases.
    pub fn offers(&self) -> impl Iterator<Item = &Offer> {
        let all = std::iter::once(&self.preferred).chain(&self.others);
        let mut kinds: [Option<&str>; MOST_OFFERS] = [None; MOST_OFFERS];
        all.filter_map(move |offer| {
            // The place of its type, or the first free place.
            let place = kinds.iter_mut().find(|kind| kind.is_none_or(|kind| kind == offer.kind))?;
            place.replace(&offer.kind).is_none().then_some(offer)
        })
    }

    /// The number of offers that no node uses, as a problem to report. `None` if all offers are
    /// used.
    pub fn unused_offers(&self) -> Option<UnusedOffers> {
        let all = self.others.len() + 1;
        let unused = all - self.offers().count();
        (unused > 0).then_some(UnusedOffers { unused, all })
    }
}

/// The backend type of an offer. The names of flannel's own types need no allocation.
fn backend_type(name: String) -> Cow<'static, str> {
    let usual = ["vxlan", "host-gw", "wireguard", "extension", "ipsec", "ipip"];
    let usual = usual.into_iter().find(|usual| *usual == name);
    usual.map_or(Cow::Owned(name), Cow::Borrowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_store() {
        let golden = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","#,
            r#""BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#
        );
        let attrs = LeaseAttrs::from_json(golden).unwrap();
        assert_eq!(attrs.preferred.kind, "vxlan");
        assert_eq!(attrs.to_json(), golden);

        let dual = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":"2001:db8::1","BackendType":"vxlan","#,
            r#""BackendData":{"VNI":1},"BackendV6Data":{"VNI":1}}"#
        );
        assert_eq!(LeaseAttrs::from_json(dual).unwrap().to_json(), dual);
        assert_eq!(LeaseAttrs::default().to_json(), r#"{"PublicIP":"0.0.0.0","PublicIPv6":null}"#);
        let mut odd = LeaseAttrs::default();
        odd.preferred.data.v4 = Some("not \"JSON\"".into());
        assert_eq!(
            odd.to_json(),
            r#"{"PublicIP":"0.0.0.0","PublicIPv6":null,"BackendData":"not \"JSON\""}"#
        );
        let raw = LeaseAttrs::from_json(
            r#"{"PublicIP":"1.2.3.4","BackendType":"extension","BackendData":" a <b> & c "}"#,
        );
        assert_eq!(
            raw.unwrap().to_json(),
            concat!(
                r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"extension","#,
                r#""BackendData":" a \u003cb\u003e \u0026 c "}"#
            )
        );
    }

    #[test]
    fn further_offers_follow_the_fields_of_go() {
        let text = concat!(
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","OtherOffers":"#,
            r#"[{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"host-gw"}]}"#
        );
        let attrs = LeaseAttrs::from_json(text).unwrap();
        let kinds: Vec<_> = attrs.offers().map(|offer| &*offer.kind).collect();
        assert_eq!((kinds, attrs.to_json()), (vec!["vxlan", "host-gw"], text.to_owned()));
        let only = LeaseAttrs::from(attrs.preferred);
        assert!(!only.to_json().contains("OtherOffers"));
        for (bad, field) in [
            (r#"{"OtherOffers":{}}"#, "OtherOffers"),
            (r#"{"OtherOffers":[7]}"#, "OtherOffers"),
            (r#"{"OtherOffers":[{"PublicIP":7}]}"#, "OtherOffers.PublicIP"),
        ] {
            assert_eq!(LeaseAttrs::from_json(bad).unwrap_err().field, field, "{bad}");
        }
    }

    #[test]
    fn the_first_offer_of_each_type_is_used_and_at_most_four_in_all() {
        let used = |kinds: &[&'static str]| {
            let offer = |(n, kind): (usize, &&'static str)| {
                Offer::default()
                    .with_kind(*kind)
                    .with_data(Dual { v4: Some(n.to_string().into()), v6: None })
            };
            let mut offers = kinds.iter().enumerate().map(offer);
            let preferred = offers.next().unwrap();
            let attrs = LeaseAttrs { preferred, others: offers.collect() };
            let read = LeaseAttrs::from_json(&attrs.to_json()).unwrap();
            assert_eq!(
                read.to_json(),
                attrs.to_json(),
                "a lease that is written again is complete"
            );
            let places = read.offers().map(|offer| offer.data.v4.as_deref().unwrap().to_owned());
            let problem = read.unused_offers().map(|unused| (unused.unused, unused.all));
            (places.collect::<Vec<_>>().join(" "), problem)
        };
        assert_eq!(used(&["vxlan"]), ("0".into(), None));
        assert_eq!(used(&["vxlan", "wireguard"]), ("0 1".into(), None));
        assert_eq!(used(&["vxlan", "vxlan", "ipip", "vxlan"]), ("0 2".into(), Some((2, 4))));
        let types = ["vxlan", "", "ipip", "host-gw", "wireguard", "a", "vxlan", ""];
        assert_eq!(used(&types[..4]), ("0 1 2 3".into(), None));
        assert_eq!(used(&types), ("0 1 2 3".into(), Some((4, 8))));
        assert_eq!(used(&["vxlan"; 50]), ("0".into(), Some((49, 50))));
        let unused = UnusedOffers { unused: 49, all: 50 };
        assert_eq!(
            unused.to_string(),
            "49 of its 50 offers are not used: expected at most 4 offers, one for each backend type"
        );
    }

    #[test]
    fn values_are_read_as_go_reads_them() {
        let attrs =
            LeaseAttrs::from_json(r#"{"publicip":"::ffff:1.2.3.4","PublicIPv6":null,"Extra":[1]}"#)
                .unwrap();
        assert_eq!(attrs.preferred.public.v4, Some("1.2.3.4".parse().unwrap()));
        assert_eq!(LeaseAttrs::from_json("{}").unwrap(), LeaseAttrs::default());
        for (bad, field) in [
            (r#"{"PublicIP":null}"#, "PublicIP"),
            (r#"{"PublicIP":"2001:db8::1"}"#, "PublicIP"),
            (r#"{"PublicIP":7}"#, "PublicIP"),
            (r#"{"PublicIPv6":"x"}"#, "PublicIPv6"),
            (r#"{"BackendType":1}"#, "BackendType"),
            ("nonsense", "(document)"),
        ] {
            assert_eq!(LeaseAttrs::from_json(bad).unwrap_err().field, field, "{bad}");
        }
    }
}
