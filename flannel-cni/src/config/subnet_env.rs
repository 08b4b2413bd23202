//! The plugin's reader of `subnet.env`. Unlike flanneld it accepts lists of networks.
//!
//! **Source**: cni-plugin `flannel.go: loadFlannelSubnetEnv`.

use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};

use crate::spec::error::{Code, Error, Result};

/// The values for this host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct SubnetEnv {
    /// The pod networks, IPv4 before IPv6, without duplicates.
    pub(crate) networks: Vec<Subnet>,
    /// The subnets of this host's pods.
    pub(crate) subnets: Dual<Subnet>,
    /// The MTU of pods, in bytes.
    pub(crate) mtu: u32,
    /// flanneld masquerades packets that leave the pod networks.
    pub(crate) ip_masq: bool,
}

impl SubnetEnv {
    /// Reads the file.
    ///
    /// # Errors
    /// [`Code::TRY_AGAIN_LATER`] if there is no such file, [`Code::IO`] or [`Code::DECODING`].
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let failed = |code, why: &dyn Display| {
            let path = path.display();
            let advice = "Check the flannel pod log for this node.";
            Error::new(
                code,
                format!("failed to load flannel 'subnet.env' file: {path}: {why}. {advice}"),
            )
        };
        let text = fs::read_to_string(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => failed(
                Code::TRY_AGAIN_LATER,
                &"no such file or directory: flanneld writes it when it has a subnet",
            ),
            ErrorKind::InvalidData => failed(Code::DECODING, &error),
            _ => failed(Code::IO, &error),
        })?;
        Self::parse(&text).map_err(|why| failed(Code::DECODING, &why))
    }

    /// Parses the file. The error names the wrong line or the missing keys.
    fn parse(text: &str) -> Result<Self, String> {
        let mut networks: [Vec<Subnet>; 2] = Default::default();
        let mut subnets = Dual::default();
        let (mut mtu, mut ip_masq) = (None, None);
        for (number, line) in text.lines().enumerate() {
            let (key, value) = line.split_once('=').unwrap_or((line, ""));
            let wrong = |expected: &str| {
                format!("line {}: {key} is {value:?}, expected {expected}", number + 1)
            };
            let subnet = |text: &str, family: Family| {
                let subnet = text.parse().ok().filter(|subnet: &Subnet| subnet.family() == family);
                subnet.ok_or_else(|| wrong(&format!("an {family} subnet")))
            };
            let list = |family: Family| {
                let mut list = Vec::new();
                for item in value.split(',') {
                    let subnet = subnet(item, family)?;
                    if !list.contains(&subnet) {
                        list.push(subnet);
                    }
                }
                Ok::<_, String>(list)
            };
            match key {
                "FLANNEL_NETWORK" => networks[0] = list(Family::V4)?,
                "FLANNEL_IPV6_NETWORK" => networks[1] = list(Family::V6)?,
                "FLANNEL_SUBNET" => subnets.v4 = Some(subnet(value, Family::V4)?),
                "FLANNEL_IPV6_SUBNET" => subnets.v6 = Some(subnet(value, Family::V6)?),
                "FLANNEL_MTU" => {
                    let number = value.parse().ok().filter(|_| !value.starts_with('+'));
                    mtu = Some(number.ok_or_else(|| wrong("a number of bytes"))?);
                }
                "FLANNEL_IPMASQ" => ip_masq = Some(value == "true"),
                _ => {}
            }
        }
        let networks = networks.concat();
        let missing: Vec<&str> = [
            (networks.is_empty(), "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK"),
            (subnets.is_empty(), "FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET"),
            (mtu.is_none(), "FLANNEL_MTU"),
            (ip_masq.is_none(), "FLANNEL_IPMASQ"),
        ]
        .into_iter()
        .filter_map(|(missing, keys)| missing.then_some(keys))
        .collect();
        match (mtu, ip_masq) {
            (Some(mtu), Some(ip_masq)) if missing.is_empty() => {
                Ok(Self { networks, subnets, mtu, ip_masq })
            }
            _ => Err(format!("it is missing {}", missing.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnet_env_of_flanneld_is_parsed() {
        let text = "FLANNEL_NETWORK=10.1.0.0/16,10.2.0.0/16,10.1.7.7/16\n\
            FLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_IPV6_NETWORK=fd00::/48\n\
            FLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\nFLANNEL_MTU=1450\n\
            FLANNEL_IPMASQ=yes\n# a comment\n\nOTHER=x";
        let expected = SubnetEnv {
            networks: ["10.1.0.0/16", "10.2.0.0/16", "fd00::/48"]
                .map(|s| s.parse().unwrap())
                .into(),
            subnets: ["10.1.5.0/24", "fd00:0:0:5::/64"]
                .map(|s| s.parse::<Subnet>().unwrap())
                .into_iter()
                .collect(),
            mtu: 1450,
            ip_masq: false,
        };
        assert_eq!(SubnetEnv::parse(text), Ok(expected));
        assert!(SubnetEnv::parse(&text.replace("yes", "true")).unwrap().ip_masq);
    }

    #[test]
    fn errors_name_the_line_and_missing_keys() {
        for (text, expected) in [
            ("FLANNEL_NETWORK", r#"line 1: FLANNEL_NETWORK is "", expected an IPv4 subnet"#),
            (
                "\nFLANNEL_SUBNET=fd00::1/64",
                r#"line 2: FLANNEL_SUBNET is "fd00::1/64", expected an IPv4 subnet"#,
            ),
            ("FLANNEL_IPV6_NETWORK=fd00::/48,x", r#"is "fd00::/48,x", expected an IPv6 subnet"#),
            ("FLANNEL_MTU=4294967296", "expected a number of bytes"),
            ("FLANNEL_MTU=+5", "expected a number of bytes"),
            (
                "",
                "it is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, \
                 FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ",
            ),
            (
                "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_IPV6_SUBNET=fd00::1/64\nFLANNEL_MTU=0",
                "it is missing FLANNEL_IPMASQ",
            ),
        ] {
            let error = SubnetEnv::parse(text).unwrap_err();
            assert!(error.ends_with(expected), "{text:?}: {error}");
        }
    }

    #[test]
    fn only_a_missing_file_has_the_code_to_try_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        let error = SubnetEnv::read(&path).unwrap_err();
        assert!(
            error.code == Code::TRY_AGAIN_LATER && error.msg.contains(path.to_str().unwrap()),
            "{error}"
        );
        fs::write(&path, b"\xff").unwrap();
        assert_eq!(SubnetEnv::read(&path).unwrap_err().code, Code::DECODING);
        fs::write(&path, "FLANNEL_MTU=x").unwrap();
        assert_eq!(SubnetEnv::read(&path).unwrap_err().code, Code::DECODING);
        assert_eq!(SubnetEnv::read(dir.path()).unwrap_err().code, Code::IO);
    }
}
