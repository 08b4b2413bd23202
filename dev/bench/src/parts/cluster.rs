//! The peers of a cluster of any size.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use clap::ValueEnum;
use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Revision};
use flannel_core::object::MacAddr;
use flannel_core::{Lease, Subnet, Subnets};

/// Which address families the pods have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Families {
    #[value(name = "v4", alias = "ipv4")]
    Ipv4,
    #[value(name = "v6", alias = "ipv6")]
    Ipv6,
    Dual,
}

impl Families {
    pub(crate) fn iter(self) -> impl Iterator<Item = Family> + Clone {
        Family::BOTH.into_iter().filter(move |family| match self {
            Self::Ipv4 => *family == Family::V4,
            Self::Ipv6 => *family == Family::V6,
            Self::Dual => true,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ipv4 => "v4",
            Self::Ipv6 => "v6",
            Self::Dual => "dual",
        }
    }

    /// The network config of the cluster.
    pub(crate) fn config(self) -> String {
        let has = |family| self.iter().any(|f| f == family);
        serde_json::json!({
            "EnableIPv4": has(Family::V4),
            "EnableIPv6": has(Family::V6),
            "Network": "10.0.0.0/8",
            "SubnetLen": 24,
            "IPv6Network": "fd00::/40",
            "IPv6SubnetLen": 64,
            "Backend": { "Type": "vxlan" },
        })
        .to_string()
    }
}

/// One peer, by its number. 0 is not used, 1 is this host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) u32);

impl Peer {
    pub(crate) fn subnet(self, family: Family) -> Subnet {
        let (base, len) = match family {
            Family::V4 => (IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + (self.0 << 8))), 24),
            Family::V6 => {
                (IpAddr::V6(Ipv6Addr::from_bits((0xfd00 << 112) + (u128::from(self.0) << 64))), 64)
            }
        };
        Subnet::new(base, len).expect("the length fits the family")
    }

    pub(crate) fn public(self, family: Family) -> IpAddr {
        match family {
            Family::V4 => IpAddr::V4(Ipv4Addr::from_bits(0xac10_0000 + self.0)),
            Family::V6 => {
                IpAddr::V6(Ipv6Addr::from_bits((0x2001_0db8_0007 << 80) + u128::from(self.0)))
            }
        }
    }

    pub(crate) fn mac(self, family: Family) -> MacAddr {
        MacAddr::derived_from(self.public(family))
    }

    pub(crate) fn lease(self, families: Families) -> Lease {
        let data = |family| format!(r#"{{"VNI":1,"VtepMAC":"{}"}}"#, self.mac(family)).into();
        let enabled = |family| families.iter().any(|f| f == family);
        Lease {
            subnets: Subnets::new(families.iter().map(|family| self.subnet(family)))
                .expect("a family"),
            attrs: LeaseAttrs::from(
                Offer::new(Dual::from_fn(|family| {
                    Some(self.public(family)).filter(|_| enabled(family))
                }))
                .with_kind("vxlan")
                .with_data(Dual::from_fn(|family| enabled(family).then(|| data(family)))),
            ),
            expires: None,
            since: Revision(u64::from(self.0)),
            revision: Revision(u64::from(self.0)),
        }
    }
}

/// `count` peers.
pub(crate) fn peers(count: u32) -> impl Iterator<Item = Peer> {
    (2..count + 2).map(Peer)
}

pub(crate) fn leases(count: u32, families: Families) -> LeaseSet {
    peers(count).map(|peer| peer.lease(families)).collect()
}

/// The tunnel device of a family.
pub(crate) fn device(family: Family) -> &'static str {
    match family {
        Family::V4 => "flannel.1",
        Family::V6 => "flannel-v6.1",
    }
}
