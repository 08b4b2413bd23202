//! The instructions of a rule.

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_netlink::nftables::{Expr, address_of, is_device, meta, octets, verdict};

use crate::rules::{Nat, Rule, Side, Verdict};

/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`.
const FULLY_RANDOM: u32 = 1 << 4;

/// The instructions of a rule.
pub(crate) fn of(rule: &Rule) -> Vec<Expr> {
    let mut exprs = Vec::new();
    if let Some(mark) = rule.mark {
        // A mark is in the machine's byte order.
        let bits = mark.to_ne_bytes().to_vec();
        exprs.extend([
            Expr::Meta(meta::MARK),
            Expr::Mask(bits.clone()),
            Expr::Compare { equal: true, value: bits },
        ]);
    }
    for (side, is_source) in [(rule.source, true), (rule.destination, false)] {
        let (subnet, equal) = match side {
            None => continue,
            Some(Side::In(subnet)) => (subnet, true),
            Some(Side::NotIn(subnet)) => (subnet, false),
        };
        exprs.push(address_of(subnet.family(), is_source));
        if subnet.len() < subnet.family().bits() {
            exprs.push(Expr::Mask(mask(subnet)));
        }
        exprs.push(Expr::Compare { equal, value: octets(subnet.base()) });
    }
    if let Some(device) = rule.device {
        exprs.extend([Expr::Meta(meta::OIFNAME), is_device(device)]);
    }
    if let Some(protocol) = rule.protocol {
        let value = vec![protocol.number()];
        exprs.extend([Expr::Meta(meta::L4PROTO), Expr::Compare { equal: true, value }]);
    }
    if rule.unrouted {
        let value = 0_u32.to_ne_bytes().to_vec();
        exprs.extend([Expr::OutDevice, Expr::Compare { equal: true, value }]);
    }
    if matches!(rule.verdict, Verdict::Drop | Verdict::Count) {
        exprs.push(Expr::Counter);
    }
    let verdict = match rule.verdict {
        Verdict::Count => return exprs,
        Verdict::Return => Expr::Verdict(verdict::RETURN),
        Verdict::Accept => Expr::Verdict(verdict::ACCEPT),
        Verdict::Drop => Expr::Verdict(verdict::DROP),
        Verdict::Masquerade(nat) => source_nat(nat, &mut exprs),
    };
    exprs.push(verdict);
    exprs
}

/// The instruction that replaces the source. Adds the loads that it needs to `exprs`.
fn source_nat(nat: Nat, exprs: &mut Vec<Expr>) -> Expr {
    let Nat { source, ports, fully_random } = nat;
    let flags = if fully_random { FULLY_RANDOM } else { 0 };
    if source.is_none() && ports.is_none() {
        return Expr::Masquerade { flags };
    }
    exprs.extend(source.map(|source| Expr::Value(octets(source))));
    if let Some(ports) = ports {
        exprs.extend([Expr::FirstPort(ports.first()), Expr::LastPort(ports.last())]);
    }
    Expr::SourceNat { address: source.map(Family::of), ports: ports.is_some(), flags }
}

/// The network that a rule of flannel is for: its source, or its destination if it has no source.
/// Go flannel's rules have the same order.
pub(crate) fn network_of(rule: &[Expr], family: Family) -> Option<Subnet> {
    [true, false].into_iter().find_map(|is_source| side_of(rule, family, is_source))
}

/// The subnet with which a rule compares an address. `nft` loads only the bytes that it compares,
/// if the prefix ends with a byte.
fn side_of(rule: &[Expr], family: Family, is_source: bool) -> Option<Subnet> {
    let Expr::Header { offset: start, .. } = address_of(family, is_source) else { return None };
    let is_load = |expr: &Expr| matches!(expr, Expr::Header { offset, .. } if *offset == start);
    let at = rule.iter().position(is_load)?;
    let (len, value) = match rule.get(at + 1..)? {
        [Expr::Mask(mask), Expr::Compare { value, .. }, ..] => {
            (mask.iter().map(|byte| byte.count_ones()).sum(), value)
        }
        [Expr::Compare { value, .. }, ..] => (8 * u32::try_from(value.len()).ok()?, value),
        _ => return None,
    };
    let mut bytes = value.clone();
    bytes.resize(usize::from(family.bits() / 8), 0);
    let address = match family {
        Family::V4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        Family::V6 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    Subnet::new(address, u8::try_from(len).ok()?)
}

fn mask(subnet: Subnet) -> Vec<u8> {
    let bits = u32::from(subnet.family().bits() - subnet.len());
    let mask = u128::MAX.checked_shl(bits).unwrap_or(0).to_be_bytes();
    mask[16 - usize::from(subnet.family().bits() / 8)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_mask_of_its_familys_length() {
        for (subnet, want) in [
            ("10.1.0.0/16", vec![255, 255, 0, 0]),
            ("10.1.64.0/19", vec![255, 255, 0xe0, 0]),
            ("10.1.2.3/32", vec![255; 4]),
            ("fd00::/8", [vec![255], vec![0; 15]].concat()),
            ("fd00::/127", [vec![255; 15], vec![254]].concat()),
        ] {
            assert_eq!(mask(subnet.parse().unwrap()), want, "{subnet}");
        }
    }

    #[test]
    fn a_rule_is_for_the_network_of_its_first_address() {
        let network = |rule: &Rule, family| network_of(&of(rule), family);
        let subnet = |text: &str| -> Subnet { text.parse().unwrap() };
        for (family, own, other) in [
            (Family::V4, "10.1.64.0/19", "10.2.0.9/32"),
            (Family::V6, "fd00:1::/48", "fd00:2::/64"),
        ] {
            let own = subnet(own);
            let other = subnet(other);
            for side in [Side::In, Side::NotIn] {
                let rule = Rule::new(Some(side(own)), Some(Side::In(other)), Verdict::Return);
                assert_eq!(network(&rule, family), Some(own));
                let rule = Rule::new(None, Some(side(own)), Verdict::Accept);
                assert_eq!(network(&rule, family), Some(own));
            }
            assert_eq!(network(&Rule::new(None, None, Verdict::Return), family), None);
        }
        // As `nft` writes 10.1.0.0/16.
        let short = [
            Expr::Header { offset: 12, len: 2 },
            Expr::Compare { equal: true, value: vec![10, 1] },
        ];
        assert_eq!(network_of(&short, Family::V4), Some(subnet("10.1.0.0/16")));
    }

    #[test]
    fn a_rule_is_loads_comparisons_and_a_verdict() {
        let side = |text: &str| Side::In(text.parse().unwrap());
        let nat = Nat { source: None, ports: None, fully_random: true };
        let to = Side::NotIn("10.2.0.9/32".parse().unwrap());
        let rule = Rule::new(Some(side("10.1.0.0/16")), Some(to), Verdict::Masquerade(nat));
        assert_eq!(
            of(&rule),
            [
                Expr::Header { offset: 12, len: 4 },
                Expr::Mask(vec![255, 255, 0, 0]),
                Expr::Compare { equal: true, value: vec![10, 1, 0, 0] },
                Expr::Header { offset: 16, len: 4 },
                Expr::Compare { equal: false, value: vec![10, 2, 0, 9] },
                Expr::Masquerade { flags: 16 },
            ]
        );
    }
}
