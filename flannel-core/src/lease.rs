//! Leases: which node owns which subnets, and how peers reach it.
//!
//! The one thing to know: leases are a *set*. [`LeaseSet`] is cheap to clone and says what changed since an
//! older one, so that nobody has to remember events.

use std::borrow::{Borrow, Cow};
use std::cmp::Ordering;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::address::{Dual, Family, Subnet, parse_len};
use crate::json::{FieldError, Fields, compact};

/// The subnets of one lease, at most one per family and at least one: the identity of the lease.
///
/// `Display` and `FromStr` are the text of the store's key: `10.5.34.0-24`, `10.5.34.0-24&fd00:0:0:5::-64`,
/// and for IPv6 alone `0.0.0.0-0&fd00:0:0:5::-64`. Prefix lengths are at most 31 and 127.
///
/// **Source**: flannel `pkg/subnet/subnet.go: MakeSubnetKey, ParseSubnetKey`. Stricter when reading: nothing
/// may stand before the key, host bits must be zero, and `0.0.0.0-0` alone (which Go reads as a lease of
/// every address) is no lease. It means "no IPv4" in front of an IPv6 subnet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subnets(Dual<Subnet>);

impl Subnets {
    /// The identity made of these subnets; `None` if there is none, or one that no key can express
    /// (longer than /31 or /127, or of length 0).
    pub fn new(subnets: impl IntoIterator<Item = Subnet>) -> Option<Self> {
        let subnets: Dual<Subnet> = subnets.into_iter().collect();
        let fits = |s: &Subnet| s.len() > 0 && s.len() < s.family().bits();
        (!subnets.is_empty() && subnets.values().all(fits)).then_some(Self(subnets))
    }

    /// What lies in [`Self`], IPv4 first.
    pub fn iter(&self) -> impl Iterator<Item = Subnet> {
        self.0.values().copied()
    }

    /// The subnet of one family.
    pub fn family(&self, family: Family) -> Option<Subnet> {
        self.0[family]
    }

    /// Some subnet of `self` shares an address with one of `other`.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.iter().any(|a| other.iter().any(|b| a.overlaps(&b)))
    }
}

impl fmt::Display for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.v4 {
            Some(v4) => write!(f, "{}-{}", v4.base(), v4.len())?,
            None => f.write_str("0.0.0.0-0")?,
        }
        match self.0.v6 {
            Some(v6) => write!(f, "&{}-{}", v6.base(), v6.len()),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Subnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Why a text is not the key of a lease.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{key:?} is not a lease key such as 10.5.34.0-24 or 10.5.34.0-24&fd00:0:0:5::-64: {reason}"
)]
pub struct KeyError {
    /// The text.
    pub key: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

impl FromStr for Subnets {
    type Err = KeyError;
    fn from_str(key: &str) -> Result<Self, KeyError> {
        let error = |reason| KeyError { key: key.to_owned(), reason };
        let part = |text: &str| -> Result<(IpAddr, u8), KeyError> {
            let (address, len) =
                text.rsplit_once('-').ok_or_else(|| error("a subnet is ADDRESS-LENGTH"))?;
            let len = parse_len(len).ok_or_else(|| error("the length is not a plain number"))?;
            if address.contains(|c: char| c.is_ascii_uppercase()) {
                return Err(error("IPv6 addresses are written in lower case"));
            }
            let address = address.parse().map_err(|_| error("the address is not an IP address"))?;
            Ok((address, len))
        };
        let subnet = |(address, len): (IpAddr, u8), family: Family| -> Result<Subnet, KeyError> {
            if Family::of(address) != family {
                return Err(error("IPv4 stands first, IPv6 behind '&'"));
            }
            if len >= family.bits() {
                return Err(error("the length is at most 31, or 127 for IPv6"));
            }
            Subnet::new(address, len)
                .filter(|s| s.base() == address)
                .ok_or_else(|| error("bits behind the prefix are set"))
        };
        let (v4, v6) = match key.split_once('&') {
            Some((v4, v6)) => (v4, Some(subnet(part(v6)?, Family::V6)?)),
            None => (key, None),
        };
        let v4 = Some(subnet(part(v4)?, Family::V4)?).filter(|v4| !v4.is_everything());
        let subnets =
            Self::new([v4, v6].into_iter().flatten()).ok_or_else(|| error("it names no subnet"))?;
        // One identity, one key: a delete of another spelling must not look like a delete of this lease.
        if subnets.to_string() == key {
            Ok(subnets)
        } else {
            Err(error("the address is not in its shortest form"))
        }
    }
}

/// One way to reach a node: the backend that it offers, with the addresses and the data that the
/// backend of a peer needs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Offer {
    /// The backend type, exactly: `vxlan`, `host-gw`, …; empty for `udp` and `alloc`.
    pub kind: Cow<'static, str>,
    /// The addresses that peers send traffic to, per family. The store writes an absent IPv4 address
    /// as `0.0.0.0`.
    pub public: Dual<IpAddr>,
    /// The backend's own data per family, as compact JSON text.
    pub data: Dual<Box<str>>,
}

/// One family of a lease: the destination of packets for `subnet`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoint<'a> {
    /// The pod addresses.
    pub subnet: Subnet,
    /// The node's public address of the subnet's family, if it published one.
    pub public: Option<IpAddr>,
    /// The backend's data for this family (compact JSON), if any.
    pub data: Option<&'a str>,
}

impl Offer {
    /// One endpoint per family of `subnets`: no backend needs a second code path for IPv6.
    pub fn endpoints<'a>(&'a self, subnets: &'a Subnets) -> impl Iterator<Item = Endpoint<'a>> {
        subnets.iter().map(|subnet| Endpoint {
            subnet,
            public: self.public[subnet.family()],
            data: self.data[subnet.family()].as_deref(),
        })
    }

    /// The fields of this offer in a store's value.
    fn wire(&self) -> Wire<'_> {
        // Data that is not JSON is still published, as a string.
        let raw = |data: &str| {
            let text = || RawValue::from_string(serde_json::Value::from(data).to_string()).ok();
            RawValue::from_string(compact(data)).ok().or_else(text)
        };
        Wire {
            public_ip: match self.public.v4 {
                Some(IpAddr::V4(address)) => address,
                _ => Ipv4Addr::UNSPECIFIED,
            },
            public_ipv6: match self.public.v6 {
                Some(IpAddr::V6(address)) => Some(address),
                _ => None,
            },
            backend_type: &self.kind,
            backend_data: self.data.v4.as_deref().and_then(raw),
            backend_v6_data: self.data.v6.as_deref().and_then(raw),
            other_offers: Vec::new(),
        }
    }

    fn from_fields(fields: &Fields) -> Result<Self, FieldError> {
        let expected = "an IPv4 address such as \"192.0.2.1\"";
        if fields.has("PublicIP") && fields.raw("PublicIP").is_none() {
            return Err(fields.error("PublicIP", &"null", expected));
        }
        let v4 = match fields.parsed("PublicIP", expected)? {
            Some(IpAddr::V4(address)) => Some(address),
            Some(IpAddr::V6(address)) => match address.to_ipv4_mapped() {
                Some(address) => Some(address),
                None => return Err(fields.error("PublicIP", &address, expected)),
            },
            None => None,
        };
        let v6: Option<IpAddr> =
            fields.parsed("PublicIPv6", "an IPv6 address such as \"2001:db8::1\", or null")?;
        let data = |name: &str| fields.raw(name).map(|raw| compact(raw.get()).into_boxed_str());
        Ok(Self {
            public: Dual {
                v4: v4.filter(|a| !a.is_unspecified()).map(IpAddr::V4),
                v6: v6.filter(|a| a.is_ipv6() && !a.is_unspecified()),
            },
            kind: backend_type(fields.take("BackendType", "a string")?.unwrap_or_default()),
            data: Dual { v4: data("BackendData"), v6: data("BackendV6Data") },
        })
    }
}

/// The attributes of a lease: how peers reach its node. Equal only if every attribute is: any change
/// is a change.
///
/// A node that is reached in one way publishes one offer. While a cluster moves from one backend to
/// another, a node offers both. Go flannel reads only the preferred offer.
///
/// [`LeaseAttrs::to_json`] and [`LeaseAttrs::from_json`] are the value under the store's key, byte for byte.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseAttrs {
    /// The offer in the fields that Go flannel knows.
    pub preferred: Offer,
    /// Further offers, in the order of preference. None: the value in the store is exactly Go
    /// flannel's.
    pub others: Box<[Offer]>,
}

/// Attributes with one offer.
impl From<Offer> for LeaseAttrs {
    fn from(preferred: Offer) -> Self {
        Self { preferred, others: Box::default() }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Wire<'a> {
    #[serde(rename = "PublicIP")]
    public_ip: Ipv4Addr,
    #[serde(rename = "PublicIPv6")]
    public_ipv6: Option<Ipv6Addr>,
    #[serde(skip_serializing_if = "str::is_empty")]
    backend_type: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_data: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<Box<RawValue>>,
    /// Not of Go flannel, which ignores fields that it does not know.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_offers: Vec<Self>,
}

impl LeaseAttrs {
    /// The store's value: compact JSON, fields in Go's order, absent ones left out as Go leaves them out.
    ///
    /// **Source**: flannel `pkg/lease/lease.go: LeaseAttrs`; Go `encoding/json`.
    pub fn to_json(&self) -> String {
        let mut wire = self.preferred.wire();
        wire.other_offers = self.others.iter().map(Offer::wire).collect();
        // Only maps with keys that are no strings, and I/O, can fail.
        let text =
            serde_json::to_string(&wire).expect("a struct of strings and addresses serializes");
        compact(&text)
    }

    /// Reads the store's value: names in any case, unknown ones ignored, IPv4 as v4-mapped IPv6 accepted.
    ///
    /// # Errors
    /// The text is no JSON object, or a field holds something else than it should (a `PublicIP` of `null`
    /// included, as in Go).
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let fields = Fields::parse(text, "")?;
        let others = |raw: Vec<Box<RawValue>>| {
            let offers = raw.iter().map(|raw| Fields::parse(raw.get(), "OtherOffers"));
            offers.map(|fields| Offer::from_fields(&fields?)).collect()
        };
        let others = fields.take("OtherOffers", "a list of objects")?.map(others).transpose()?;
        Ok(Self { preferred: Offer::from_fields(&fields)?, others: others.unwrap_or_default() })
    }

    /// All offers, in the order of preference.
    pub fn offers(&self) -> impl Iterator<Item = &Offer> {
        std::iter::once(&self.preferred).chain(&self.others)
    }
}

/// Thousands of leases share a few names, which take no memory of their own.
fn backend_type(name: String) -> Cow<'static, str> {
    let usual = ["vxlan", "host-gw", "wireguard", "extension", "ipsec", "ipip"];
    let usual = usual.into_iter().find(|usual| *usual == name);
    usual.map_or(Cow::Owned(name), Cow::Borrowed)
}

/// A store's count of changes. Grows with each change where the store orders changes (etcd); merely tells
/// versions apart where it does not (a directory). 0 where nothing is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One node's lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Its identity.
    pub subnets: Subnets,
    /// How to reach the node.
    pub attrs: LeaseAttrs,
    /// When the store forgets it, by the store's clock; `None`: never (a reservation), or not known, as for
    /// every peer's lease: other nodes' time to live is not our business.
    pub expires: Option<SystemTime>,
    /// When it was created: of two leases that clash, the one with the smaller `since` is believed.
    pub since: Revision,
    /// When it was last written: what a compare-and-swap compares.
    pub revision: Revision,
}

impl Lease {
    /// The endpoints of the preferred offer.
    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint<'_>> {
        self.attrs.preferred.endpoints(&self.subnets)
    }

    /// The place in the order by which all nodes decide which of two clashing leases to believe: the
    /// earlier created first, ties by key text.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}

/// A set of leases, one per [`Subnets`].
///
/// Cloning is O(1); [`LeaseSet::changes_since`] costs what changed, not what there is. Iteration is in the
/// order of the subnets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LeaseSet(imbl::OrdMap<BySubnets, Arc<Lease>>);

/// A lease in the place of its subnets: a pointer more instead of a copy.
#[derive(Clone)]
struct BySubnets(Arc<Lease>);

impl fmt::Debug for BySubnets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0.subnets, f)
    }
}

impl Borrow<Subnets> for BySubnets {
    fn borrow(&self) -> &Subnets {
        &self.0.subnets
    }
}

impl PartialEq for BySubnets {
    fn eq(&self, other: &Self) -> bool {
        self.0.subnets == other.0.subnets
    }
}

impl Eq for BySubnets {}

impl PartialOrd for BySubnets {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for BySubnets {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.subnets.cmp(&other.0.subnets)
    }
}

impl LeaseSet {
    /// Puts `lease` in, replacing the one with the same subnets.
    pub fn insert(&mut self, lease: impl Into<Arc<Lease>>) {
        let lease = lease.into();
        self.0.insert(BySubnets(Arc::clone(&lease)), lease);
    }

    /// Takes a lease out and returns it.
    pub fn remove(&mut self, subnets: &Subnets) -> Option<Arc<Lease>> {
        self.0.remove(subnets)
    }

    /// The lease with exactly these subnets.
    pub fn get(&self, subnets: &Subnets) -> Option<&Arc<Lease>> {
        self.0.get(subnets)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All leases, in the order of their subnets.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.values()
    }

    /// What is different from `older`: `(subnets, lease now)`, with `None` for a lease that is gone.
    ///
    /// Costs what is not shared between the two: O(changes) when one was made from a clone of the other.
    pub fn changes_since<'a>(
        &'a self,
        older: &'a Self,
    ) -> impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)> {
        use imbl::ordmap::DiffItem;
        older.0.diff(&self.0).map(|item| match item {
            DiffItem::Add(_, lease) => (lease.subnets, Some(lease)),
            DiffItem::Update { new: (_, lease), .. } => (lease.subnets, Some(lease)),
            DiffItem::Remove(_, lease) => (lease.subnets, None),
        })
    }
}

impl<L: Into<Arc<Lease>>> FromIterator<L> for LeaseSet {
    fn from_iter<I: IntoIterator<Item = L>>(leases: I) -> Self {
        let mut set = Self::default();
        leases.into_iter().for_each(|lease| set.insert(lease));
        set
    }
}

/// Where a lease set comes from, and so what may be concluded from a lease that is not in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// From an earlier run's disk cache, or not from the store at all yet: entries may be created and
    /// replaced, but nothing may be deleted on its word.
    Cached {
        /// When it was written; `None` before anything was read.
        written: Option<SystemTime>,
    },
    /// A complete set, as the store held it at `revision`.
    Live {
        /// The store's revision.
        revision: Revision,
    },
}

/// A lease set and how far to trust it: what a subnet manager publishes and a network follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// All leases, our own included.
    pub leases: LeaseSet,
    /// Where they come from.
    pub origin: Origin,
}

impl View {
    /// Nothing is known yet.
    pub fn unknown() -> Self {
        Self { leases: LeaseSet::default(), origin: Origin::Cached { written: None } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn lease(key: &str, since: u64) -> Lease {
        Lease {
            subnets: key.parse().unwrap(),
            attrs: LeaseAttrs::default(),
            expires: None,
            since: Revision(since),
            revision: Revision(since),
        }
    }

    #[test]
    fn keys_are_the_stores() {
        for key in [
            "10.5.34.0-24",
            "10.5.34.0-24&fd00:0:0:5::-64",
            "0.0.0.0-0&fd00:0:0:5::-64",
            "10.0.0.0-8",
        ] {
            assert_eq!(key.parse::<Subnets>().unwrap().to_string(), key);
        }
        for (bad, why) in [
            ("10.5.34.0", "ADDRESS-LENGTH"),
            ("10.5.34.0-32", "at most 31"),
            ("10.5.34.0-024", "plain number"),
            ("10.5.34.1-24", "bits behind"),
            ("10.5.034.0-24", "not an IP"),
            ("x10.5.34.0-24", "not an IP"),
            ("0.0.0.0-0", "names no subnet"),
            ("fd00::-64", "IPv4 stands first"),
            ("10.5.34.0-24&FD00::-64", "lower case"),
            ("10.5.34.0-24&fd00::-128", "at most 31, or 127"),
            ("10.5.34.0-24&10.6.0.0-24", "IPv4 stands first"),
            ("", "ADDRESS-LENGTH"),
            ("10.5.34.0-24&fd00:0:0:5:0::-64", "shortest form"),
        ] {
            let error = bad.parse::<Subnets>().unwrap_err().to_string();
            assert!(error.contains(why) && error.contains(&format!("{bad:?}")), "{bad}: {error}");
        }
    }

    #[test]
    fn values_are_the_stores() {
        let golden = r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#;
        let attrs = LeaseAttrs::from_json(golden).unwrap();
        assert_eq!(attrs.preferred.kind, "vxlan");
        assert_eq!(attrs.to_json(), golden);

        let dual = r#"{"PublicIP":"1.2.3.4","PublicIPv6":"2001:db8::1","BackendType":"vxlan","BackendData":{"VNI":1},"BackendV6Data":{"VNI":1}}"#;
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
            r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"extension","BackendData":" a \u003cb\u003e \u0026 c "}"#
        );
    }

    #[test]
    fn further_offers_follow_the_fields_of_go() {
        let text = r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","OtherOffers":[{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"host-gw"}]}"#;
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

    proptest! {
        #[test]
        fn changes_since_says_exactly_what_changed(
            before in prop::collection::btree_map(0..60u8, 0..3u64, 0..60),
            steps in prop::collection::vec((0..60u8, prop::option::of(0..3u64)), 0..40),
        ) {
            let key = |n: u8| format!("10.0.{n}.0-24");
            let old: LeaseSet = before.iter().map(|(n, since)| lease(&key(*n), *since)).collect();
            let (mut new, mut model) = (old.clone(), before.clone());
            for (n, to) in steps {
                match to {
                    Some(since) => { new.insert(lease(&key(n), since)); model.insert(n, since); }
                    None => { new.remove(&key(n).parse().unwrap()); model.remove(&n); }
                }
            }
            let told: BTreeMap<String, Option<u64>> =
                new.changes_since(&old).map(|(s, l)| (s.to_string(), l.map(|l| l.since.0))).collect();
            let expected: BTreeMap<String, Option<u64>> = (0..60u8)
                .filter(|n| before.get(n) != model.get(n))
                .map(|n| (key(n), model.get(&n).copied()))
                .collect();
            prop_assert_eq!(told, expected);
        }
    }
}
