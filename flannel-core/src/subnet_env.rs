//! The content of `subnet.env`, which publishes this host's subnet to container runtimes and CNI
//! plugins.
//!
//! Other programs parse the file, so its text has the same bytes as Go flannel's file.
//!
//! **Source**: flannel `pkg/subnet/subnet.go: WriteSubnetFile, ReadCIDRFromSubnetFile`, cni-plugin
//! `flannel.go: loadFlannelSubnetEnv`.

use std::fmt;

use crate::address::{Dual, Family, Subnet};
use crate::lease::Subnets;

/// The content of `subnet.env`. `Display` is the text of the file.
///
/// ```
/// use flannel_core::SubnetEnv;
///
/// let env = SubnetEnv {
///     networks: vec!["10.1.0.0/16".parse().unwrap()],
///     subnets: ["10.1.5.0/24".parse().unwrap()].into_iter().collect(),
///     mtu: 1450,
///     ip_masq: true,
/// };
/// assert!(env.to_string().contains("FLANNEL_SUBNET=10.1.5.1/24\n"));
/// assert_eq!(SubnetEnv::parse(&env.to_string()), Ok(env));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The pod networks, IPv4 before IPv6, without duplicates.
    pub networks: Vec<Subnet>,
    /// This host's subnets. The file has their second address, which is the address of the bridge.
    pub subnets: Dual<Subnet>,
    /// The MTU of pods, in bytes.
    pub mtu: u32,
    /// Whether flannel masquerades traffic that leaves the pod networks.
    pub ip_masq: bool,
}

/// The reason why the text of a `subnet.env` is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubnetEnvError {
    /// A value is wrong.
    #[error("line {line}: {key} is {value:?}, expected {expected}")]
    Value {
        /// The line number, from 1.
        line: usize,
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// The expected kind of value.
        expected: String,
    },
    /// These keys are missing.
    #[error("it is missing {}", .0.join(", "))]
    Missing(Vec<&'static str>),
}

const MTU: &str = "FLANNEL_MTU";
const IP_MASQ: &str = "FLANNEL_IPMASQ";

const fn network_key(family: Family) -> &'static str {
    match family {
        Family::V4 => "FLANNEL_NETWORK",
        Family::V6 => "FLANNEL_IPV6_NETWORK",
    }
}

const fn subnet_key(family: Family) -> &'static str {
    match family {
        Family::V4 => "FLANNEL_SUBNET",
        Family::V6 => "FLANNEL_IPV6_SUBNET",
    }
}

impl fmt::Display for SubnetEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for family in Family::BOTH {
            let networks = self.networks.iter().filter(|network| network.family() == family);
            let networks: Vec<String> = networks.map(Subnet::to_string).collect();
            if !networks.is_empty() {
                writeln!(f, "{}={}", network_key(family), networks.join(","))?;
            }
            if let Some(subnet) = self.subnets[family] {
                let host = subnet.nth(1).unwrap_or_else(|| subnet.base());
                writeln!(f, "{}={host}/{}", subnet_key(family), subnet.len())?;
            }
        }
        writeln!(f, "{MTU}={}", self.mtu)?;
        writeln!(f, "{IP_MASQ}={}", self.ip_masq)
    }
}

impl SubnetEnv {
    /// Parses the text of a file like a shell or dotenv: quotes, `export`, comments and
    /// `KEY: value` are accepted, other lines are ignored, host bits are cleared, and the last line
    /// of a key counts. The networks of a family are a list with commas. `FLANNEL_IPMASQ` is true
    /// only if it is `true`.
    ///
    /// # Errors
    /// A value is wrong, or the MTU or `FLANNEL_IPMASQ` is missing. A file without networks or
    /// subnets is accepted.
    pub fn parse(text: &str) -> Result<Self, SubnetEnvError> {
        let mut networks: Dual<Vec<Subnet>> = Dual::default();
        let mut subnets = Dual::default();
        let mut mtu = None;
        let mut ip_masq = None;
        for (number, text) in text.lines().enumerate() {
            let line = Line::new(number + 1, text);
            for family in Family::BOTH {
                if line.key == network_key(family) {
                    networks[family] = Some(line.subnets(family)?);
                } else if line.key == subnet_key(family) {
                    subnets[family] = Some(line.own_subnet(line.value, family)?);
                }
            }
            match line.key {
                MTU => mtu = Some(line.mtu()?),
                IP_MASQ => ip_masq = Some(line.value == "true"),
                _ => {}
            }
        }
        let env = Self {
            networks: networks.values().flatten().copied().collect(),
            subnets,
            mtu: mtu.unwrap_or_default(),
            ip_masq: ip_masq.unwrap_or_default(),
        };
        if mtu.is_some() && ip_masq.is_some() {
            return Ok(env);
        }
        let mut missing = env.missing();
        missing.extend(mtu.is_none().then_some(MTU));
        missing.extend(ip_masq.is_none().then_some(IP_MASQ));
        Err(SubnetEnvError::Missing(missing))
    }

    /// The keys of the networks if the file has no network, and the keys of the subnets if it has
    /// no subnet.
    pub fn missing(&self) -> Vec<&'static str> {
        let networks = self.networks.is_empty().then_some(Family::BOTH.map(network_key));
        let subnets = self.subnets.is_empty().then_some(Family::BOTH.map(subnet_key));
        networks.into_iter().chain(subnets).flatten().collect()
    }

    /// This host's subnets as the identity of a lease, to get the same lease after a restart.
    /// `None` if the file has no subnet.
    pub fn previous(&self) -> Option<Subnets> {
        Subnets::new(self.subnets.values().copied())
    }

    /// This host's subnets in the text of a file, whatever else is wrong in it, as
    /// [`Self::previous`] returns them. A wrong item in a list of subnets is left out. A family
    /// with several subnets has none.
    pub fn previous_in(text: &str) -> Option<Subnets> {
        let mut subnets = Dual::default();
        for (number, text) in text.lines().enumerate() {
            let line = Line::new(number + 1, text);
            for family in Family::BOTH.into_iter().filter(|f| line.key == subnet_key(*f)) {
                let parts = line.value.split(',');
                let mut valid = parts.filter_map(|part| line.own_subnet(part, family).ok());
                subnets[family] = valid.next().filter(|_| valid.next().is_none());
            }
        }
        Subnets::new(subnets.values().copied())
    }
}

/// A line of the file.
struct Line<'a> {
    /// Counted from 1.
    number: usize,
    key: &'a str,
    value: &'a str,
}

impl<'a> Line<'a> {
    fn new(number: usize, text: &'a str) -> Self {
        let text = text.trim();
        let exported = text.strip_prefix("export").filter(|rest| rest.starts_with([' ', '\t']));
        let text = exported.unwrap_or(text);
        let (key, value) = text.split_once(['=', ':']).unwrap_or((text, ""));
        let value = value.trim();
        let in_quotes = |quote: char| Some(value.strip_prefix(quote)?.split_once(quote)?.0);
        let without_comment = || value.split(" #").next().unwrap_or_default().trim_end();
        let value = in_quotes('"').or_else(|| in_quotes('\'')).unwrap_or_else(without_comment);
        Self { number, key: key.trim(), value }
    }

    fn wrong(&self, expected: impl Into<String>) -> SubnetEnvError {
        SubnetEnvError::Value {
            line: self.number,
            key: self.key.to_owned(),
            value: self.value.to_owned(),
            expected: expected.into(),
        }
    }

    /// The MTU. Unlike Rust's parser, it has no sign.
    fn mtu(&self) -> Result<u32, SubnetEnvError> {
        let number = self.value.parse().ok().filter(|_| !self.value.starts_with('+'));
        number.ok_or_else(|| self.wrong("a number of bytes"))
    }

    /// The subnet in a part of the value.
    fn subnet(&self, part: &str, family: Family) -> Result<Subnet, SubnetEnvError> {
        let subnet = part.trim().parse().ok();
        subnet
            .filter(|subnet: &Subnet| subnet.family() == family)
            .ok_or_else(|| self.wrong(format!("an {family} subnet")))
    }

    /// The subnet of a host in a part of the value. It is not the whole address space.
    fn own_subnet(&self, part: &str, family: Family) -> Result<Subnet, SubnetEnvError> {
        let subnet = self.subnet(part, family)?;
        if subnet.is_everything() {
            return Err(self.wrong(format!("an {family} subnet")));
        }
        Ok(subnet)
    }

    /// The subnets in a value with commas, without duplicates.
    fn subnets(&self, family: Family) -> Result<Vec<Subnet>, SubnetEnvError> {
        let mut list = Vec::new();
        for part in self.value.split(',') {
            let subnet = self.subnet(part, family)?;
            if !list.contains(&subnet) {
                list.push(subnet);
            }
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(subnets: &[(&str, &str)]) -> SubnetEnv {
        SubnetEnv {
            networks: subnets.iter().map(|(network, _)| network.parse().unwrap()).collect(),
            subnets: subnets.iter().map(|(_, subnet)| subnet.parse::<Subnet>().unwrap()).collect(),
            mtu: 1450,
            ip_masq: true,
        }
    }

    #[test]
    fn subnet_env_has_the_bytes_of_go_flannel() {
        let v4 = ("10.1.0.0/16", "10.1.5.0/24");
        let v6 = ("fd00::/48", "fd00:0:0:5::/64");
        let golden = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
                      FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\n\
                      FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        assert_eq!(env(&[v4, v6]).to_string(), golden);
        assert_eq!(SubnetEnv::parse(golden), Ok(env(&[v4, v6])));
        let lines: Vec<&str> = golden.lines().collect();
        let v4_only = [lines[0], lines[1], lines[4], "FLANNEL_IPMASQ=false", ""].join("\n");
        assert_eq!(SubnetEnv { ip_masq: false, ..env(&[v4]) }.to_string(), v4_only);
        assert_eq!(env(&[v6]).to_string(), [lines[2], lines[3], lines[4], lines[5], ""].join("\n"));
    }

    #[test]
    fn networks_are_lists_and_only_true_is_true() {
        let text = "FLANNEL_NETWORK=10.1.0.0/16,10.2.0.0/16,10.1.7.7/16\n\
            FLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_IPV6_NETWORK=fd00::/48\n\
            FLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\nFLANNEL_MTU=1450\n\
            FLANNEL_IPMASQ=yes\n# a comment\n\nOTHER=x";
        let expected = SubnetEnv {
            networks: ["10.1.0.0/16", "10.2.0.0/16", "fd00::/48"]
                .map(|s| s.parse().unwrap())
                .into(),
            ip_masq: false,
            ..env(&[("10.1.0.0/16", "10.1.5.0/24"), ("fd00::/48", "fd00:0:0:5::/64")])
        };
        assert_eq!(SubnetEnv::parse(text), Ok(expected));
        assert!(SubnetEnv::parse(&text.replace("yes", "true")).unwrap().ip_masq);
    }

    #[test]
    fn shell_and_dotenv_syntax_is_accepted() {
        let text = "# flannel\n\nexport FLANNEL_NETWORK=\"10.1.0.0/16\"\n\
                    FLANNEL_SUBNET: 10.1.5.77/24 # ours\nFLANNEL_MTU='1450'\n\
                    FLANNEL_IPMASQ = true\nOTHER=x=y\nFLANNEL_SUBNET=10.1.6.1/24\nnonsense\n\
                    # FLANNEL_MTU=1\n";
        assert_eq!(SubnetEnv::parse(text), Ok(env(&[("10.1.0.0/16", "10.1.6.0/24")])));
    }

    #[test]
    fn errors_name_the_line_and_missing_keys() {
        for (text, expected) in [
            ("FLANNEL_NETWORK", r#"line 1: FLANNEL_NETWORK is "", expected an IPv4 subnet"#),
            (
                "FLANNEL_SUBNET=10.1.5.1",
                r#"line 1: FLANNEL_SUBNET is "10.1.5.1", expected an IPv4 subnet"#,
            ),
            (
                "\nFLANNEL_SUBNET=fd00::1/64",
                r#"line 2: FLANNEL_SUBNET is "fd00::1/64", expected an IPv4 subnet"#,
            ),
            ("FLANNEL_IPV6_SUBNET=10.1.5.1/24", r#"is "10.1.5.1/24", expected an IPv6 subnet"#),
            (
                "FLANNEL_IPV6_SUBNET=fd00::1/64,fd01::1/64",
                r#"is "fd00::1/64,fd01::1/64", expected an IPv6 subnet"#,
            ),
            ("FLANNEL_SUBNET=0.0.0.0/0", r#"is "0.0.0.0/0", expected an IPv4 subnet"#),
            ("FLANNEL_IPV6_NETWORK=fd00::/48,x", r#"is "fd00::/48,x", expected an IPv6 subnet"#),
            ("FLANNEL_MTU=big", r#"FLANNEL_MTU is "big", expected a number of bytes"#),
            ("FLANNEL_MTU=4294967296", "expected a number of bytes"),
            ("FLANNEL_MTU=+5", "expected a number of bytes"),
            ("FLANNEL_MTU=\"1450", r#"FLANNEL_MTU is "\"1450", expected a number of bytes"#),
            (
                "nonsense",
                "it is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, \
                 FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ",
            ),
            (
                "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_IPV6_SUBNET=fd00::1/64\nFLANNEL_MTU=0",
                "it is missing FLANNEL_IPMASQ",
            ),
        ] {
            let error = SubnetEnv::parse(text).unwrap_err().to_string();
            assert!(error.ends_with(expected), "{text:?}: {error}");
        }
        let without_subnets = SubnetEnv::parse("FLANNEL_MTU=0\nFLANNEL_IPMASQ=true").unwrap();
        let keys = without_subnets.missing().join(" ");
        assert_eq!(keys, "FLANNEL_NETWORK FLANNEL_IPV6_NETWORK FLANNEL_SUBNET FLANNEL_IPV6_SUBNET");
        assert_eq!(without_subnets.previous(), None);
        let both = [("10.1.0.0/16", "10.1.5.0/24"), ("fd00::/48", "fd00:0:0:5::/64")];
        assert_eq!(env(&both).previous().unwrap().to_string(), "10.1.5.0-24&fd00:0:0:5::-64");
    }

    #[test]
    fn the_previous_subnets_are_known_although_other_values_are_wrong() {
        for (text, expected) in [
            ("FLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_IPV6_NETWORK=fd00::/48,x", Some("10.1.5.0-24")),
            ("export\t FLANNEL_SUBNET=x, 10.1.5.1/24\nFLANNEL_MTU=x", Some("10.1.5.0-24")),
            ("FLANNEL_SUBNET=10.1.5.1/24,10.1.6.1/24", None),
            ("FLANNEL_SUBNET=0.0.0.0/0", None),
            ("", None),
        ] {
            let previous = SubnetEnv::previous_in(text).map(|subnets| subnets.to_string());
            assert_eq!(previous.as_deref(), expected, "{text}");
        }
    }
}
