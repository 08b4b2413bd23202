//! The values that a CNI plugin reads from flannel's `subnet.env`. This reader shares no code with
//! the daemon, so that the lab tests the daemon's text.

use std::net::IpAddr;
use std::path::Path;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};

use crate::error::{Error, Result};

/// A host's pod subnet, as its daemon published it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The subnet of each family.
    pub subnets: Dual<Subnet>,
    /// The address of the bridge, the gateway of pods: the first after the base.
    pub gateways: Dual<IpAddr>,
    /// The MTU of pods, in bytes.
    pub mtu: u32,
}

impl SubnetEnv {
    /// The values that a daemon publishes for these subnets.
    ///
    /// # Panics
    /// A subnet has only one address.
    pub fn new(subnets: Dual<Subnet>, mtu: u32) -> Self {
        let gateways =
            subnets.map(|_, subnet| subnet.nth(1).expect("a pod subnet has more than one address"));
        Self { subnets, gateways, mtu }
    }

    /// Reads the text of a `subnet.env`. `path` is for the message.
    ///
    /// # Errors
    /// [`Error::SubnetEnv`]: a key is missing or its value is wrong.
    ///
    /// **Source**: flannel `pkg/subnet/subnet.go: WriteSubnetFile`, cni-plugin `flannel.go:
    /// loadFlannelSubnetEnv`.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let wrong = |reason: String| Error::SubnetEnv { path: path.to_owned(), reason };
        let value = |key: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
                .filter(|v| !v.is_empty())
        };
        let mut subnets = Dual::default();
        let mut gateways = Dual::default();
        for (family, key) in [(Family::V4, "FLANNEL_SUBNET"), (Family::V6, "FLANNEL_IPV6_SUBNET")] {
            let Some(text) = value(key) else { continue };
            let expected = || {
                wrong(format!("{key} holds {text:?}, expected an {family} address with a length"))
            };
            let subnet: Subnet = text.parse().map_err(|_| expected())?;
            let gateway = text.split('/').next().and_then(|address| address.parse().ok());
            let gateway: IpAddr =
                gateway.filter(|_| subnet.family() == family).ok_or_else(expected)?;
            subnets[family] = Some(subnet);
            gateways[family] = Some(gateway);
        }
        if subnets.is_empty() {
            return Err(wrong("neither FLANNEL_SUBNET nor FLANNEL_IPV6_SUBNET is there".into()));
        }
        let mtu = value("FLANNEL_MTU").unwrap_or_default();
        let mtu = mtu.parse().ok().filter(|mtu| (576..=65_535).contains(mtu)).ok_or_else(|| {
            wrong(format!(
                "FLANNEL_MTU holds {mtu:?}, expected a number of bytes from 576 to 65535"
            ))
        })?;
        Ok(Self { subnets, gateways, mtu })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SubnetEnv> {
        SubnetEnv::parse(text, Path::new("/run/flannel/subnet.env"))
    }

    #[test]
    fn subnet_env_of_flannel_is_parsed() {
        let text = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
            FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\n\
            FLANNEL_MTU=1430\nFLANNEL_IPMASQ=true\n";
        let subnets = ["10.1.5.0/24", "fd00:0:0:5::/64"].map(|s| s.parse::<Subnet>().unwrap());
        assert_eq!(parse(text).unwrap(), SubnetEnv::new(subnets.into_iter().collect(), 1430));
    }

    #[test]
    fn an_error_names_the_wrong_key() {
        for (text, word) in [
            ("FLANNEL_MTU=1450\n", "neither FLANNEL_SUBNET"),
            ("FLANNEL_SUBNET=10.1.5.1\nFLANNEL_MTU=1450\n", "FLANNEL_SUBNET holds \"10.1.5.1\""),
            ("FLANNEL_SUBNET=fd00::1/64\nFLANNEL_MTU=1450\n", "an IPv4 address"),
            ("FLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_MTU=0\n", "FLANNEL_MTU holds \"0\""),
            ("FLANNEL_SUBNET=10.1.5.1/24\n", "FLANNEL_MTU holds \"\""),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("subnet.env"), "{text:?}: {error}");
        }
    }
}
