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
    /// Whether flanneld masquerades packets that leave the pod networks.
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
        let mut found = Found::default();
        for (number, line) in text.lines().enumerate() {
            found.take(Line { number: number + 1, text: line })?;
        }
        found.complete()
    }
}

/// A line of the file.
#[derive(Clone, Copy)]
struct Line<'a> {
    /// Counted from 1.
    number: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn key_and_value(self) -> (&'a str, &'a str) {
        self.text.split_once('=').unwrap_or((self.text, ""))
    }

    fn wrong(self, expected: &str) -> String {
        let (key, value) = self.key_and_value();
        format!("line {}: {key} is {value:?}, expected {expected}", self.number)
    }

    /// The subnet in a part of the value.
    fn subnet(self, part: &str, family: Family) -> Result<Subnet, String> {
        part.parse()
            .ok()
            .filter(|subnet: &Subnet| subnet.family() == family)
            .ok_or_else(|| self.wrong(&format!("an {family} subnet")))
    }

    /// The subnets in a value with commas, without duplicates.
    fn subnets(self, value: &str, family: Family) -> Result<Vec<Subnet>, String> {
        let mut list = Vec::new();
        for part in value.split(',') {
            let subnet = self.subnet(part, family)?;
            if !list.contains(&subnet) {
                list.push(subnet);
            }
        }
        Ok(list)
    }
}

/// The values that the file has so far.
#[derive(Default)]
struct Found {
    networks_v4: Vec<Subnet>,
    networks_v6: Vec<Subnet>,
    subnets: Dual<Subnet>,
    mtu: Option<u32>,
    ip_masq: Option<bool>,
}

impl Found {
    /// Takes the value of a line. Lines with other keys are ignored.
    fn take(&mut self, line: Line<'_>) -> Result<(), String> {
        let (key, value) = line.key_and_value();
        match key {
            "FLANNEL_NETWORK" => self.networks_v4 = line.subnets(value, Family::V4)?,
            "FLANNEL_IPV6_NETWORK" => self.networks_v6 = line.subnets(value, Family::V6)?,
            "FLANNEL_SUBNET" => self.subnets.v4 = Some(line.subnet(value, Family::V4)?),
            "FLANNEL_IPV6_SUBNET" => self.subnets.v6 = Some(line.subnet(value, Family::V6)?),
            "FLANNEL_MTU" => {
                // Rust's parser accepts a sign.
                let number = value.parse().ok().filter(|_| !value.starts_with('+'));
                self.mtu = Some(number.ok_or_else(|| line.wrong("a number of bytes"))?);
            }
            "FLANNEL_IPMASQ" => self.ip_masq = Some(value == "true"),
            _ => {}
        }
        Ok(())
    }

    /// The values, if all are there. The error names the missing keys.
    fn complete(self) -> Result<SubnetEnv, String> {
        let networks = [self.networks_v4, self.networks_v6].concat();
        let mut missing = Vec::new();
        if networks.is_empty() {
            missing.push("FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK");
        }
        if self.subnets.is_empty() {
            missing.push("FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET");
        }
        if self.mtu.is_none() {
            missing.push("FLANNEL_MTU");
        }
        if self.ip_masq.is_none() {
            missing.push("FLANNEL_IPMASQ");
        }
        match (self.mtu, self.ip_masq) {
            (Some(mtu), Some(ip_masq)) if missing.is_empty() => {
                Ok(SubnetEnv { networks, subnets: self.subnets, mtu, ip_masq })
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
