//! The network config.
//!
//! **Source**: flannel `pkg/subnet/config.go: ParseConfig, CheckNetworkConfig`. Different on
//! purpose:
//! - The checks run for every store (Go: etcd only). A store that assigns subnets itself ignores
//!   the fields of the division, as Go does in Kubernetes.
//! - A missing `Backend` means `vxlan`, as flannel documents (Go: `udp`).
//! - Further errors are a `SubnetMin` above `SubnetMax`, an IPv4 subnet in `IPv6Network`, and a
//!   config that enables no family.

use std::fmt;
use std::net::IpAddr;

use crate::address::{Dual, Family, Subnet};
use crate::json::{FieldError, Fields};

/// A valid network config with every default filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The pod network of each enabled family. At least one family is enabled.
    pub networks: Dual<PodNetwork>,
    /// `EnableNFTables`: whether the firewall uses nftables instead of iptables.
    pub nftables: bool,
    /// `RequireEncryption`: whether packets to pods of other nodes may leave only by an encrypted
    /// [`Datapath`](crate::backend::Datapath). Go flannel ignores this field.
    pub require_encryption: bool,
    /// `IPMasqExclude`: networks to which packets of pods are not masqueraded, if the node
    /// masquerades. Go flannel ignores this field.
    pub masquerade_exclude: Vec<Subnet>,
    /// How pods of different nodes reach each other.
    pub backend: BackendConfig,
}

/// The pod addresses of one family, and their division into subnets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodNetwork {
    /// All pod addresses of the cluster.
    pub network: Subnet,
    /// The prefix length of a node's subnet, in bits.
    pub subnet_len: u8,
    /// The first subnet for a node.
    pub min: Subnet,
    /// The last subnet for a node.
    pub max: Subnet,
}

impl PodNetwork {
    /// The number of subnets for nodes, at least 1. It saturates at `u128::MAX`.
    pub fn subnets(&self) -> u128 {
        self.max.steps_from(&self.min).unwrap_or(0).saturating_add(1)
    }
}

/// The `Backend` object of the config.
#[derive(Clone, PartialEq, Eq)]
pub struct BackendConfig {
    /// `Type`, in lower case.
    pub kind: String,
    /// The whole object as JSON text.
    pub options: String,
    /// Whether the config has a `Backend`. If not, `kind` is `vxlan`, flannel's documented default.
    /// Go flannel runs `udp` in this case, and its leases have an empty backend type.
    pub explicit: bool,
}

/// Leaves out the options, which may contain a secret.
impl fmt::Debug for BackendConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BackendConfig").field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl BackendConfig {
    const EXPECTED: &str = "an object with the backend's Type, for example {\"Type\": \"vxlan\"}";

    /// Reads a `Backend` object.
    ///
    /// # Errors
    /// The text is not a JSON object, or it does not have a valid `Type`.
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        let kind = Fields::parse(text, "Backend")?
            .take("Type", "the name of a backend, for example \"vxlan\"")?
            .filter(|kind: &String| !kind.is_empty());
        let kind = kind.ok_or_else(|| FieldError {
            field: "Backend".into(),
            value: "an object without a Type".into(),
            expected: Self::EXPECTED.into(),
        })?;
        Ok(Self { kind: kind.to_lowercase(), options: text.to_owned(), explicit: true })
    }

    /// The fields of `options`.
    ///
    /// # Errors
    /// `options` is not a JSON object. This cannot happen after [`Config::parse`].
    pub fn fields(&self) -> Result<Fields, FieldError> {
        Fields::parse(&self.options, "Backend")
    }
}

impl Config {
    /// The names of the fields for IPv4, and of the fields for IPv6.
    pub const FAMILY_FIELDS: [[&str; 4]; 2] = [
        ["Network", "SubnetLen", "SubnetMin", "SubnetMax"],
        ["IPv6Network", "IPv6SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax"],
    ];
    /// The names of all other fields.
    pub const COMMON_FIELDS: [&str; 6] = [
        "EnableIPv4",
        "EnableIPv6",
        "EnableNFTables",
        "RequireEncryption",
        "IPMasqExclude",
        "Backend",
    ];

    /// The names of all fields.
    pub fn fields() -> Vec<&'static str> {
        [Self::FAMILY_FIELDS.as_flattened(), &Self::COMMON_FIELDS].concat()
    }

    /// Reads and checks a network config, and fills in defaults.
    ///
    /// # Errors
    /// The first wrong field.
    ///
    /// ```
    /// let text = r#"{"Network": "10.3.0.0/16", "Backend": {"Type": "host-gw"}}"#;
    /// let config = flannel_core::Config::parse(text)?;
    /// assert_eq!(config.networks.v4.unwrap().min.to_string(), "10.3.1.0/24");
    /// # Ok::<(), flannel_core::json::FieldError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        Self::read(text, pod_network)
    }

    /// Reads a network config for a store that assigns the subnets itself, as Kubernetes does.
    /// [`Self::division_fields`] are checked for their form only. The division of a network is the
    /// automatic one. A network without room for it is not divided: it is its only subnet.
    ///
    /// # Errors
    /// The first wrong field.
    ///
    /// ```
    /// let text = r#"{"Network": "10.3.0.0/24", "SubnetLen": 24}"#;
    /// assert_eq!(flannel_core::Config::parse(text).unwrap_err().field, "SubnetLen");
    /// let config = flannel_core::Config::parse_undivided(text)?;
    /// assert_eq!(config.networks.v4.unwrap().network.to_string(), "10.3.0.0/24");
    /// # Ok::<(), flannel_core::json::FieldError>(())
    /// ```
    pub fn parse_undivided(text: &str) -> Result<Self, FieldError> {
        Self::read(text, undivided)
    }

    /// The names of the fields that divide the pod networks into subnets.
    pub fn division_fields() -> impl Iterator<Item = &'static str> {
        Self::FAMILY_FIELDS.into_iter().flat_map(|[_, division @ ..]| division)
    }

    fn read(text: &str, pod_network: ReadNetwork) -> Result<Self, FieldError> {
        let fields = Fields::parse(text, "")?;
        let [v4, v6] = Self::FAMILY_FIELDS;
        let [enable_v4, enable_v6, nftables, encryption, exclude, backend_name] =
            Self::COMMON_FIELDS;
        let flag = |name, default| Ok(fields.take(name, "true or false")?.unwrap_or(default));
        let nftables = flag(nftables, false)?;
        let require_encryption = flag(encryption, false)?;
        let masquerade_exclude = subnets(&fields, exclude)?;
        // The fields of a disabled family are checked too.
        let networks = Dual {
            v4: pod_network(&fields, Family::V4, v4, flag(enable_v4, true)?)?,
            v6: pod_network(&fields, Family::V6, v6, flag(enable_v6, false)?)?,
        };
        if networks.is_empty() {
            let expected = "at least one of EnableIPv4 and EnableIPv6 is true";
            return Err(fields.error(enable_v4, &"false", expected));
        }
        let backend = backend(&fields, backend_name)?;
        Ok(Self { networks, nftables, require_encryption, masquerade_exclude, backend })
    }

    /// The config as JSON text, with every default filled in. [`Self::parse`] reads an equal config
    /// from it. The text has the options of the backend, which may contain a secret.
    pub fn to_json(&self) -> String {
        let [enable_v4, enable_v6, nftables, encryption, exclude, backend] = Self::COMMON_FIELDS;
        let mut fields = vec![
            (enable_v4, self.networks.v4.is_some().to_string()),
            (enable_v6, self.networks.v6.is_some().to_string()),
            (nftables, self.nftables.to_string()),
            (encryption, self.require_encryption.to_string()),
        ];
        for (names, family) in Self::FAMILY_FIELDS.into_iter().zip(Family::BOTH) {
            let Some(pods) = &self.networks[family] else { continue };
            let [network, len, first, last] = names;
            fields.extend([
                (network, format!("\"{}\"", pods.network)),
                (len, pods.subnet_len.to_string()),
                (first, format!("\"{}\"", pods.min.base())),
                (last, format!("\"{}\"", pods.max.base())),
            ]);
        }
        if !self.masquerade_exclude.is_empty() {
            let list = self.masquerade_exclude.iter().map(|subnet| format!("\"{subnet}\""));
            fields.push((exclude, format!("[{}]", list.collect::<Vec<_>>().join(","))));
        }
        if self.backend.explicit {
            fields.push((backend, self.backend.options.clone()));
        }
        let fields: Vec<_> =
            fields.into_iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
        format!("{{{}}}", fields.join(","))
    }

    /// The enabled pod networks, IPv4 first.
    pub fn pod_networks(&self) -> impl Iterator<Item = Subnet> {
        self.networks.values().map(|network| network.network)
    }
}

/// Reads the fields of a family with these names. The last argument says whether it is enabled.
type ReadNetwork =
    fn(&Fields, Family, [&'static str; 4], bool) -> Result<Option<PodNetwork>, FieldError>;

/// The form of the fields of a family.
struct FamilyFields {
    /// `None` if the family is disabled.
    network: Option<Subnet>,
    len: u64,
    min: Option<IpAddr>,
    max: Option<IpAddr>,
}

fn family_fields(
    fields: &Fields,
    family: Family,
    [net, len, first, last]: [&'static str; 4],
    enabled: bool,
) -> Result<FamilyFields, FieldError> {
    let example = match family {
        Family::V4 => "an IPv4 subnet such as \"10.1.0.0/16\"",
        Family::V6 => "an IPv6 subnet such as \"fd00:10::/48\"",
    };
    let bad_network = |value: &dyn fmt::Display, expected: &str| fields.error(net, value, expected);
    // Go refuses a null Network, and takes a null IPv6Network for an empty one.
    if family == Family::V4 && fields.has(net) && fields.raw(net).is_none() {
        return Err(bad_network(&"null", example));
    }
    let network: Option<Subnet> = fields.parsed(net, example)?;
    let expected_len = "a prefix length in bits, 0 for automatic";
    let len: u64 = fields.take(len, expected_len)?.unwrap_or(0);
    let min = bound(fields, [net, first], family)?;
    let max = bound(fields, [net, last], family)?;
    if let Some(other) = network.filter(|n| n.family() != family) {
        return Err(bad_network(&other, example));
    }
    if !enabled {
        return Ok(FamilyFields { network: None, len, min, max });
    }
    let Some(network) = network.filter(|n| !n.is_everything()) else {
        let value = network.map_or_else(|| "nothing".to_owned(), |n| n.to_string());
        return Err(bad_network(&value, &format!("{example}, since {family} is enabled")));
    };
    if network.base().is_loopback() || network.base().is_multicast() {
        return Err(bad_network(&network, &format!("{example}, which hosts may use")));
    }
    Ok(FamilyFields { network: Some(network), len, min, max })
}

/// A network with its division, as the fields say.
fn pod_network(
    fields: &Fields,
    family: Family,
    names: [&'static str; 4],
    enabled: bool,
) -> Result<Option<PodNetwork>, FieldError> {
    let [net, len, first, last] = names;
    let given = family_fields(fields, family, names, enabled)?;
    let Some(network) = given.network else { return Ok(None) };
    let subnet_len = subnet_len(fields, [net, len], network, given.len)?;
    let edge = |field: &str, given: Option<IpAddr>, auto: Option<Subnet>| {
        let Some(address) = given else {
            let expected = "a network with room for 4 subnets";
            return auto.ok_or_else(|| fields.error(net, &network, expected));
        };
        let bad = |expected| Err(fields.error(field, &address, expected));
        match Subnet::new(address, subnet_len).filter(|_| network.contains(address)) {
            None => bad(format!("an address inside {network}")),
            Some(subnet) if subnet.base() != address => bad(format!(
                "the first address of a /{subnet_len} subnet, for example {}",
                subnet.base()
            )),
            Some(subnet) => Ok(subnet),
        }
    };
    let second = Subnet::new(network.base(), subnet_len).and_then(|first| first.step(1));
    let min = edge(first, given.min, second)?;
    let max = edge(last, given.max, Subnet::new(network.last(), subnet_len))?;
    if max < min {
        let expected = format!("at least {first} ({})", min.base());
        return Err(fields.error(last, &max.base(), expected));
    }
    Ok(Some(PodNetwork { network, subnet_len, min, max }))
}

/// A network with the automatic division, or without one.
fn undivided(
    fields: &Fields,
    family: Family,
    names: [&'static str; 4],
    enabled: bool,
) -> Result<Option<PodNetwork>, FieldError> {
    let given = family_fields(fields, family, names, enabled)?;
    Ok(given.network.map(|network| automatic(network).unwrap_or_else(|| whole(network))))
}

/// The automatic division of a network, or `None` if there is no room for it.
fn automatic(network: Subnet) -> Option<PodNetwork> {
    let subnet_len = automatic_len(network)?;
    let min = Subnet::new(network.base(), subnet_len)?.step(1)?;
    let max = Subnet::new(network.last(), subnet_len)?;
    Some(PodNetwork { network, subnet_len, min, max })
}

/// A network that is its only subnet.
fn whole(network: Subnet) -> PodNetwork {
    PodNetwork { network, subnet_len: network.len(), min: network, max: network }
}

/// The first or last subnet in the config. `None` if the field is absent or `0.0.0.0`, as in Go.
fn bound(
    fields: &Fields,
    [net, field]: [&str; 2],
    family: Family,
) -> Result<Option<IpAddr>, FieldError> {
    let expected = format!("an {family} address inside {net}");
    let address: Option<IpAddr> = fields.parsed(field, &expected)?;
    match address.filter(|a| !a.is_unspecified()) {
        Some(a) if Family::of(a) != family => Err(fields.error(field, &a, expected)),
        address => Ok(address),
    }
}

/// The prefix length of a node's subnet. At least 4 subnets must fit, because the first is skipped.
fn subnet_len(
    fields: &Fields,
    [net, len]: [&str; 2],
    network: Subnet,
    given: u64,
) -> Result<u8, FieldError> {
    let least = network.len() + 2;
    let longest = longest_len(network.family());
    match u8::try_from(given) {
        Ok(0) => automatic_len(network).ok_or_else(|| {
            fields.error(net, &network, format!("at most a /{} network", longest - 2))
        }),
        Ok(given) if (least..=longest).contains(&given) => Ok(given),
        _ => {
            let expected = format!("from {least} to {longest} (room for 4 subnets in {network})");
            Err(fields.error(len, &given, expected))
        }
    }
}

/// The longest prefix length of a node's subnet.
fn longest_len(family: Family) -> u8 {
    match family {
        Family::V4 => 30,
        Family::V6 => 126,
    }
}

/// The prefix length of a node's subnet if the config gives none. `None` if the network is too
/// small.
fn automatic_len(network: Subnet) -> Option<u8> {
    let usual = match network.family() {
        Family::V4 => 24,
        Family::V6 => 64,
    };
    let least = network.len() + 2;
    (least <= longest_len(network.family())).then(|| least.max(usual))
}

/// A list of subnets. None of them is the whole address space. An absent list is empty.
fn subnets(fields: &Fields, name: &str) -> Result<Vec<Subnet>, FieldError> {
    let expected = "a list of subnets, for example [\"10.0.0.0/8\"]";
    let list: Vec<String> = fields.take(name, expected)?.unwrap_or_default();
    let parse = |text: &String| {
        let subnet = text.parse().ok().filter(|subnet: &Subnet| !subnet.is_everything());
        subnet.ok_or_else(|| fields.error(name, text, expected))
    };
    list.iter().map(parse).collect()
}

fn backend(fields: &Fields, name: &str) -> Result<BackendConfig, FieldError> {
    if !fields.has(name) {
        return Ok(BackendConfig { kind: "vxlan".into(), options: "{}".into(), explicit: false });
    }
    let raw =
        fields.raw(name).ok_or_else(|| fields.error(name, &"null", BackendConfig::EXPECTED))?;
    BackendConfig::parse(raw.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(text: &str) -> PodNetwork {
        Config::parse(text).unwrap().networks.v4.unwrap()
    }

    fn cut(n: PodNetwork) -> (u8, String, String) {
        (n.subnet_len, n.min.base().to_string(), n.max.base().to_string())
    }

    /// The examples of flannel's own behaviour, checked against the Go code.
    /// Go runs no checks in Kubernetes.
    #[test]
    fn a_store_that_assigns_subnets_ignores_the_division() {
        let automatic = Config::parse(r#"{"Network":"10.3.0.0/16"}"#).unwrap();
        for division in [
            r#""SubnetLen":24"#,
            r#""SubnetLen":17"#,
            r#""SubnetLen":31"#,
            r#""SubnetMin":"192.0.2.1""#,
            r#""SubnetMin":"10.3.9.0","SubnetMax":"10.3.1.0""#,
        ] {
            let text = format!(r#"{{"Network":"10.3.0.0/16",{division}}}"#);
            assert_eq!(Config::parse_undivided(&text), Ok(automatic.clone()), "{text}");
        }
        for (network, more) in [
            ("10.3.0.0/24", r#","SubnetLen":24"#),
            ("10.3.0.0/29", ""),
            ("10.3.0.0/30", ""),
            ("10.3.0.0/32", ""),
        ] {
            let text = format!(r#"{{"Network":"{network}"{more}}}"#);
            Config::parse(&text).unwrap_err();
            let config = Config::parse_undivided(&text).unwrap();
            let pods = config.networks.v4.unwrap();
            assert_eq!(pods.network.to_string(), network);
            assert!(pods.subnets() > 0 && pods.network.covers(&pods.min), "{text}");
            assert_eq!(Config::parse_undivided(&config.to_json()), Ok(config), "{text}");
        }
        for (text, field) in [
            (r#"{"Network":"10.3.0.0/16","SubnetLen":"24"}"#, "SubnetLen"),
            (r#"{"Network":"10.3.0.0/16","SubnetMin":"fd00::"}"#, "SubnetMin"),
            (r#"{"SubnetLen":24}"#, "Network"),
            (r#"{"Network":"127.0.0.0/8"}"#, "Network"),
        ] {
            assert_eq!(Config::parse_undivided(text).unwrap_err().field, field, "{text}");
        }
        let v6 = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/64",
            "IPv6SubnetLen":64}"#;
        Config::parse(v6).unwrap_err();
        Config::parse_undivided(v6).unwrap();
        let names: Vec<&str> = Config::division_fields().collect();
        assert_eq!(names[..3], ["SubnetLen", "SubnetMin", "SubnetMax"]);
        assert_eq!(names[3..], ["IPv6SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax"]);
    }

    #[test]
    fn defaults_are_those_of_go_flannel() {
        for (network, extra, len, min, max) in [
            ("10.3.0.0/16", "", 24, "10.3.1.0", "10.3.255.0"),
            ("10.3.0.0/23", "", 25, "10.3.0.128", "10.3.1.128"),
            ("10.3.0.0/28", "", 30, "10.3.0.4", "10.3.0.12"),
            ("10.3.0.0/16", r#","SubnetLen":18"#, 18, "10.3.64.0", "10.3.192.0"),
            (
                "10.3.7.9/16",
                r#","SubnetMin":"10.3.5.0","SubnetMax":"0.0.0.0""#,
                24,
                "10.3.5.0",
                "10.3.255.0",
            ),
        ] {
            let config = format!(r#"{{"network":"{network}"{extra}}}"#);
            assert_eq!(cut(v4(&config)), (len, min.into(), max.into()), "{config}");
        }
        for (network, len, min, max) in [
            ("fd00::/48", 64, "fd00:0:0:1::", "fd00:0:0:ffff::"),
            ("fd00::/120", 122, "fd00::40", "fd00::c0"),
        ] {
            let config =
                format!(r#"{{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"{network}"}}"#);
            let config = Config::parse(&config).unwrap();
            assert_eq!(config.networks.v4, None);
            assert_eq!(cut(config.networks.v6.unwrap()), (len, min.into(), max.into()));
        }
    }

    #[test]
    fn the_backend_defaults_to_the_documented_one() {
        let config = Config::parse(r#"{"Network":"10.3.0.0/16"}"#).unwrap();
        assert_eq!((config.backend.kind.as_str(), config.backend.explicit), ("vxlan", false));
        let config =
            Config::parse(r#"{"NETWORK":"10.3.0.0/16","backend":{"type":"Host-GW"}}"#).unwrap();
        assert_eq!((config.backend.kind.as_str(), config.backend.explicit), ("host-gw", true));
    }

    #[test]
    fn a_written_config_is_read_as_an_equal_one() {
        for text in [
            r#"{"Network":"10.3.0.0/16"}"#,
            r#"{"Network":"10.3.7.9/16","SubnetLen":26,"SubnetMin":"10.3.5.0",
                "SubnetMax":"10.3.9.64",
                "EnableNFTables":true,"RequireEncryption":true,
                "IPMasqExclude":["192.0.2.9/24","fd00::/8"],
                "backend":{"type":"Host-GW", "Secret":"\"x\n\u00e4"}}"#,
            r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00::/48"}"#,
            r#"{"Network":"10.3.0.0/28","EnableIPv6":true,"IPv6Network":"fd00::/120",
                "IPv6SubnetMin":"fd00::80","Backend":{"Type":"vxlan","VNI":7}}"#,
        ] {
            let config = Config::parse(text).unwrap();
            assert_eq!(Config::parse(&config.to_json()), Ok(config), "{text}");
        }
    }

    #[test]
    fn errors_name_the_field_and_the_right_value() {
        for (bad, field, says) in [
            ("", "(document)", "JSON object"),
            (r#"{"Network":"10.3.0.0/16"} x"#, "(document)", "JSON object"),
            ("{}", "Network", "since IPv4 is enabled"),
            (r#"{"Network":"0.0.0.0/0"}"#, "Network", "10.1.0.0/16"),
            (r#"{"Network":"fd00::/48"}"#, "Network", "IPv4"),
            (r#"{"Network":null}"#, "Network", "IPv4"),
            (r#"{"Network":"127.0.0.0/8"}"#, "Network", "hosts may use"),
            (r#"{"Network":"224.0.0.0/8"}"#, "Network", "hosts may use"),
            (r#"{"Network":"10.3.0.0"}"#, "Network", "10.1.0.0/16"),
            (r#"{"Network":"10.3.0.0/29"}"#, "Network", "/28"),
            (r#"{"Network":"10.3.0.0/16","SubnetLen":31}"#, "SubnetLen", "from 18 to 30"),
            (r#"{"Network":"10.3.0.0/16","SubnetLen":17}"#, "SubnetLen", "from 18 to 30"),
            (r#"{"Network":"10.3.0.0/16","SubnetLen":"24"}"#, "SubnetLen", "bits"),
            (r#"{"Network":"10.3.0.0/16","SubnetLen":-1}"#, "SubnetLen", "bits"),
            (r#"{"Network":"10.3.0.0/16","SubnetMin":"10.4.0.0"}"#, "SubnetMin", "10.3.0.0/16"),
            (r#"{"Network":"10.3.0.0/16","SubnetMax":"10.4.0.0"}"#, "SubnetMax", "10.3.0.0/16"),
            (r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.1.1"}"#, "SubnetMin", "10.3.1.0"),
            (r#"{"Network":"10.3.0.0/16","SubnetMin":"::1"}"#, "SubnetMin", "IPv4"),
            (
                r#"{"Network":"10.3.0.0/16","SubnetMin":"10.3.9.0","SubnetMax":"10.3.8.0"}"#,
                "SubnetMax",
                "at least",
            ),
            (
                r#"{"Network":"10.3.0.0/16","EnableIPv6":true}"#,
                "IPv6Network",
                "since IPv6 is enabled",
            ),
            (
                r#"{"Network":"10.3.0.0/16","EnableIPv6":true,"IPv6Network":"10.4.0.0/16"}"#,
                "IPv6Network",
                "IPv6",
            ),
            (
                r#"{"EnableIPv6":true,"EnableIPv4":false,"IPv6Network":"fd00::/125"}"#,
                "IPv6Network",
                "/124",
            ),
            (r#"{"EnableIPv4":false}"#, "EnableIPv4", "at least one"),
            (r#"{"EnableIPv4":"no"}"#, "EnableIPv4", "true or false"),
            (
                r#"{"Network":"10.3.0.0/16","RequireEncryption":"true"}"#,
                "RequireEncryption",
                "true or false",
            ),
            (r#"{"Network":"10.3.0.0/16","RequireEncryption":1}"#, "RequireEncryption", "true or"),
            (r#"{"Network":"10.3.0.0/16","IPMasqExclude":["0.0.0.0/0"]}"#, "IPMasqExclude", "10."),
            (r#"{"Network":"10.3.0.0/16","IPMasqExclude":["x"]}"#, "IPMasqExclude", "10.0.0.0/8"),
            (r#"{"Network":"10.3.0.0/16","IPMasqExclude":"10.0.0.0/8"}"#, "IPMasqExclude", "list"),
            (r#"{"Network":"10.3.0.0/16","Backend":null}"#, "Backend", "Type"),
            (r#"{"Network":"10.3.0.0/16","Backend":{}}"#, "Backend", "Type"),
            (r#"{"Network":"10.3.0.0/16","Backend":{"Type":3}}"#, "Backend.Type", "vxlan"),
            (r#"{"Network":"10.3.0.0/16","Backend":[]}"#, "Backend", "object"),
        ] {
            let error = Config::parse(bad).unwrap_err();
            assert_eq!(error.field, field, "{bad}: {error}");
            assert!(error.to_string().contains(says), "{bad}: {error}");
        }
    }

    #[test]
    fn encryption_is_required_only_if_the_config_says_so() {
        let required = |more: &str| {
            let text = format!(r#"{{"Network":"10.3.0.0/16"{more}}}"#);
            Config::parse(&text).unwrap().require_encryption
        };
        assert!(!required("") && !required(r#","RequireEncryption":false"#));
        assert!(required(r#","requireencryption":true"#));
    }

    #[test]
    fn every_field_is_read() {
        for name in Config::fields() {
            let text = format!(r#"{{"Network":"10.3.0.0/16","{name}":[0]}}"#);
            assert_eq!(Config::parse(&text).unwrap_err().field, name);
        }
    }

    #[test]
    fn a_network_at_the_end_of_the_address_space_has_a_last_subnet() {
        assert_eq!(cut(v4(r#"{"Network":"255.255.0.0/16"}"#)).2, "255.255.255.0");
    }
}
