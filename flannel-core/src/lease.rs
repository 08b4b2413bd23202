//! Leases: the subnets of each node, and how peers reach the node.
//!
//! Leases are a set and not a stream of events. [`LeaseSet`] is cheap to clone and returns the
//! changes since an older one.

mod set;
mod subnets;

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::SystemTime;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::address::{Dual, Subnet};
use crate::json::{FieldError, Fields, compact};
pub use set::{LeaseSet, Origin, View};
pub use subnets::{KeyError, Subnets};

/// The data that a node publishes for its peers: how to reach it.
///
/// [`LeaseAttrs::to_json`] and [`LeaseAttrs::from_json`] are the value of the store's key, byte for
/// byte.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LeaseAttrs {
    /// The address to which peers send traffic, per family. The store writes an absent IPv4 address
    /// as `0.0.0.0`.
    pub public: Dual<IpAddr>,
    /// The type of the backend: `vxlan`, `host-gw`, …; empty for `udp` and `alloc`.
    pub backend_type: Cow<'static, str>,
    /// The backend's own data per family, as compact JSON text.
    pub backend_data: Dual<Box<str>>,
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
}

impl LeaseAttrs {
    /// The store's value: compact JSON, fields in Go's order, absent ones left out as Go leaves
    /// them out.
    ///
    /// **Source**: flannel `pkg/lease/lease.go: LeaseAttrs`; Go `encoding/json`.
    pub fn to_json(&self) -> String {
        // Data that are no JSON are written as a string.
        let raw = |data: &str| {
            let text = || RawValue::from_string(serde_json::Value::from(data).to_string()).ok();
            RawValue::from_string(compact(data)).ok().or_else(text)
        };
        let wire = Wire {
            public_ip: match self.public.v4 {
                Some(IpAddr::V4(address)) => address,
                _ => Ipv4Addr::UNSPECIFIED,
            },
            public_ipv6: match self.public.v6 {
                Some(IpAddr::V6(address)) => Some(address),
                _ => None,
            },
            backend_type: &self.backend_type,
            backend_data: self.backend_data.v4.as_deref().and_then(raw),
            backend_v6_data: self.backend_data.v6.as_deref().and_then(raw),
        };
        // Only maps with keys that are no strings, and I/O, can fail.
        let text =
            serde_json::to_string(&wire).expect("a struct of strings and addresses serializes");
        compact(&text)
    }

    /// Reads the store's value: names in any case, unknown ones ignored, IPv4 as v4-mapped IPv6
    /// accepted.
    ///
    /// # Errors
    /// The text is no JSON object, or a field has a wrong value. A `PublicIP` of `null` is wrong,
    /// as in Go.
    pub fn from_json(text: &str) -> Result<Self, FieldError> {
        let fields = Fields::parse(text, "")?;
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
            backend_type: backend_type(fields.take("BackendType", "a string")?.unwrap_or_default()),
            backend_data: Dual { v4: data("BackendData"), v6: data("BackendV6Data") },
        })
    }
}

/// Borrows the usual names, which thousands of leases share.
fn backend_type(name: String) -> Cow<'static, str> {
    let usual = ["vxlan", "host-gw", "wireguard", "extension", "ipsec", "ipip"];
    let usual = usual.into_iter().find(|usual| *usual == name);
    usual.map_or(Cow::Owned(name), Cow::Borrowed)
}

/// A version of a key or of a store. It grows with each change if the store orders changes (etcd).
/// Otherwise (a directory) it only differs between versions. 0: not known.
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
    /// When the store deletes it, by the store's clock. `None`: never (a reservation), or not
    /// known, as for the lease of every peer.
    pub expires: Option<SystemTime>,
    /// When it was created. Of two leases that conflict, the one with the smaller `since` is
    /// accepted.
    pub since: Revision,
    /// When it was last written, for a compare-and-swap.
    pub revision: Revision,
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

impl Lease {
    /// One endpoint per family that the lease has: no backend needs a second code path for IPv6.
    pub fn endpoints(&self) -> impl Iterator<Item = Endpoint<'_>> {
        self.subnets.iter().map(|subnet| Endpoint {
            subnet,
            public: self.attrs.public[subnet.family()],
            data: self.attrs.backend_data[subnet.family()].as_deref(),
        })
    }

    /// The key of the order by which all nodes accept one of two conflicting leases: the earlier
    /// created one first, then the one with the smaller key text.
    pub fn precedence(&self) -> (Revision, String) {
        (self.since, self.subnets.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_the_stores() {
        let golden = r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#;
        let attrs = LeaseAttrs::from_json(golden).unwrap();
        assert_eq!(attrs.backend_type, "vxlan");
        assert_eq!(attrs.to_json(), golden);

        let dual = r#"{"PublicIP":"1.2.3.4","PublicIPv6":"2001:db8::1","BackendType":"vxlan","BackendData":{"VNI":1},"BackendV6Data":{"VNI":1}}"#;
        assert_eq!(LeaseAttrs::from_json(dual).unwrap().to_json(), dual);
        assert_eq!(LeaseAttrs::default().to_json(), r#"{"PublicIP":"0.0.0.0","PublicIPv6":null}"#);
        let mut odd = LeaseAttrs::default();
        odd.backend_data.v4 = Some("not \"JSON\"".into());
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
    fn values_are_read_as_go_reads_them() {
        let attrs =
            LeaseAttrs::from_json(r#"{"publicip":"::ffff:1.2.3.4","PublicIPv6":null,"Extra":[1]}"#)
                .unwrap();
        assert_eq!(attrs.public.v4, Some("1.2.3.4".parse().unwrap()));
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
