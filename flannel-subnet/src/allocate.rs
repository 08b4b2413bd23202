//! Picks the subnet of a new lease at random among the free subnets.
//!
//! The occupied subnets are a sorted list of ranges of subnet numbers, so the cost does not depend
//! on the size of the network.
//!
//! **Source**: flannel `pkg/subnet/etcd/local_manager.go: allocateSubnet`. It chooses among the
//! first 100 free subnets, so nodes that start together often collide. Its loop wraps around at the
//! end of the address space.

use flannel_core::Subnet;
use flannel_core::config::PodNetwork;

/// Picks a subnet from `network.min` to `network.max` uniformly at random that overlaps nothing in
/// `occupied`. Subnets that overlap `avoid` are picked only if no other subnet is free. Returns
/// `None` if no subnet is free.
///
/// `below(n)` returns a uniform random number less than `n`, which is at least 1. Subnets of the
/// other family are ignored.
///
/// ```
/// let config = flannel_core::Config::parse(r#"{"Network": "10.3.0.0/28"}"#)?;
/// let network = config.networks.v4.unwrap();
/// let taken = ["10.3.0.4/30".parse().unwrap(), "10.3.0.12/30".parse().unwrap()];
/// let subnet = flannel_subnet::allocate(&network, &taken, &[], |n| n - 1);
/// assert_eq!(subnet.unwrap().to_string(), "10.3.0.8/30");
/// # Ok::<(), flannel_core::json::FieldError>(())
/// ```
pub fn allocate(
    network: &PodNetwork,
    occupied: &[Subnet],
    avoid: &[Subnet],
    mut below: impl FnMut(u128) -> u128,
) -> Option<Subnet> {
    let both = [occupied, avoid].concat();
    let number =
        pick(network, &both, &mut below).or_else(|| pick(network, occupied, &mut below))?;
    network.min.step(number)
}

/// The number of a free subnet, counted from `network.min`.
fn pick(
    network: &PodNetwork,
    occupied: &[Subnet],
    below: &mut dyn FnMut(u128) -> u128,
) -> Option<u128> {
    let total = network.subnets();
    let ranges = occupied_ranges(network, occupied);
    let used: u128 = ranges.iter().map(Range::len).sum();
    let free = total.checked_sub(used).filter(|free| *free > 0)?;
    let mut number = below(free);
    for range in ranges {
        if number < range.first {
            break;
        }
        number += range.len();
    }
    Some(number)
}

/// A range of subnet numbers. It contains `last`.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Range {
    first: u128,
    last: u128,
}

impl Range {
    fn len(&self) -> u128 {
        self.last - self.first + 1
    }
}

/// The numbers of the occupied subnets, as sorted ranges without overlaps.
fn occupied_ranges(network: &PodNetwork, occupied: &[Subnet]) -> Vec<Range> {
    let highest = network.subnets() - 1;
    let mut ranges: Vec<_> =
        occupied.iter().filter_map(|subnet| range(network, highest, subnet)).collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, kept| {
        let overlap = next.first <= kept.last;
        if overlap {
            kept.last = kept.last.max(next.last);
        }
        overlap
    });
    ranges
}

/// The numbers of the subnets that `subnet` overlaps, or `None` if it does not overlap any from min
/// to max.
fn range(network: &PodNetwork, highest: u128, subnet: &Subnet) -> Option<Range> {
    if subnet.family() != network.min.family() {
        return None;
    }
    let number = |address| Subnet::new(address, network.subnet_len)?.steps_from(&network.min);
    // A subnet that ends before min overlaps none, and one that begins there overlaps the first.
    let last = number(subnet.last())?;
    let first = number(subnet.base()).unwrap_or(0);
    (first <= highest).then(|| Range { first, last: last.min(highest) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::net::IpAddr;
    use std::time::Duration;

    use flannel_core::address::Family;
    use nix::time::ClockId;

    /// A network as a config has it, but at any address, including the end of the address space.
    fn network(network: &str, subnet_len: u8) -> PodNetwork {
        let network: Subnet = network.parse().unwrap();
        let first = Subnet::new(network.base(), subnet_len).unwrap();
        let min = first.step(1).unwrap();
        let max = Subnet::new(network.last(), subnet_len).unwrap();
        PodNetwork { network, subnet_len, min, max }
    }

    #[test]
    fn the_last_subnet_of_the_address_space_is_found_without_overflow() {
        for (text, len, last) in [
            ("255.255.255.0/24", 26, "255.255.255.192/26"),
            ("ffff:ffff:ffff:ff00::/56", 58, "ffff:ffff:ffff:ffc0::/58"),
        ] {
            let network = network(text, len);
            let mut taken = Vec::new();
            while let Some(subnet) = allocate(&network, &taken, &[], |_| 0) {
                taken.push(subnet);
            }
            assert_eq!(taken.len(), 3, "{taken:?}");
            assert_eq!(taken[2].to_string(), last);
        }
    }

    #[test]
    fn freed_subnets_are_picked_last() {
        let network = network("10.0.0.0/24", 26);
        let all = ["10.0.0.64/26", "10.0.0.128/26", "10.0.0.192/26"]
            .map(|s| s.parse::<Subnet>().unwrap());
        for highest in [false, true] {
            let below = |n| if highest { n - 1 } else { 0 };
            assert_eq!(allocate(&network, &all[..1], &all[1..2], below), Some(all[2]));
            assert_eq!(allocate(&network, &all[..2], &all[2..], below), Some(all[2]));
            assert_eq!(allocate(&network, &all, &all, below), None);
        }
    }

    #[test]
    fn every_free_subnet_has_the_same_probability() {
        let network = network("10.0.0.0/16", 24);
        let taken: Vec<Subnet> = (1..=255)
            .filter(|n| n % 3 == 0)
            .map(|n| format!("10.0.{n}.0/24").parse().unwrap())
            .collect();
        let places = (0..170).map(|k| {
            allocate(&network, &taken, &[], |n| {
                assert_eq!(n, 170);
                k
            })
        });
        let found: BTreeSet<Subnet> = places.map(Option::unwrap).collect();
        assert_eq!(found.len(), 170);
        assert!(found.iter().all(|s| !taken.contains(s)));
    }

    #[test]
    fn the_cost_depends_on_the_occupied_subnets_only() {
        for (text, len) in [("10.0.0.0/8", 24), ("fd00::/48", 64)] {
            let network = network(text, len);
            let total = network.subnets();
            let taken: Vec<Subnet> =
                (0..20_000).map(|n| network.min.step(n * (total / 20_000)).unwrap()).collect();
            // The time of this thread, because other processes may delay it.
            let computed = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
            let begin = computed();
            let subnet = allocate(&network, &taken, &[], |n| n / 2).unwrap();
            let took = computed() - begin;
            assert!(took < Duration::from_secs(1), "{took:?}");
            assert!(!taken.contains(&subnet));
        }
    }

    fn address(family: Family, bits: u128) -> IpAddr {
        match family {
            Family::V4 => IpAddr::from((bits as u32).to_be_bytes()),
            Family::V6 => IpAddr::from(bits.to_be_bytes()),
        }
    }

    fn bits(address: IpAddr) -> u128 {
        match address {
            IpAddr::V4(address) => u128::from(address.to_bits()),
            IpAddr::V6(address) => address.to_bits(),
        }
    }

    /// A network of 4 to 32 subnets anywhere, the ends of the address space included, with any min
    /// and max.
    fn small_network() -> impl Strategy<Value = PodNetwork> {
        let place = prop_oneof![Just(0), Just(u128::MAX), any::<u128>()];
        let family = prop_oneof![Just(Family::V4), Just(Family::V6)];
        (family, place, 2..=5u8, 0..20u8, 0..32u128, 0..32u128).prop_map(
            |(family, place, cut, host, a, b)| {
                let subnet_len = family.bits() - 2 - host;
                let network = Subnet::new(address(family, place), subnet_len - cut).unwrap();
                let first = Subnet::new(network.base(), subnet_len).unwrap();
                let a = a % (1 << cut);
                let b = b % (1 << cut);
                let min = first.step(a.min(b)).unwrap();
                let max = first.step(a.max(b)).unwrap();
                PodNetwork { network, subnet_len, min, max }
            },
        )
    }

    /// Subnets up to 4 times larger and 256 times smaller, in and around the network.
    fn occupied_subnets(network: PodNetwork) -> impl Strategy<Value = Vec<Subnet>> {
        let family = network.network.family();
        let one = (0..40u128, any::<u128>(), 0..=10u8).prop_map(move |(place, offset, longer)| {
            let size = 1u128 << (family.bits() - network.subnet_len);
            let bits = bits(network.network.base()).wrapping_add(place * size + offset % size);
            let len = (network.subnet_len - 2 + longer).min(family.bits());
            Subnet::new(address(family, bits), len).unwrap()
        });
        prop::collection::vec(one, 0..24)
    }

    proptest! {
        #[test]
        fn a_free_subnet_is_found_if_and_only_if_one_exists(
            (network, taken) in small_network()
                .prop_flat_map(|network| (Just(network), occupied_subnets(network))),
            seed in any::<u64>(),
        ) {
            let free: Vec<Subnet> = (0..network.subnets())
                .map(|n| network.min.step(n).unwrap())
                .filter(|s| !taken.iter().any(|t| t.overlaps(s)))
                .collect();
            let mut asked = None;
            let found = allocate(&network, &taken, &[], |n| {
                asked = Some(n);
                u128::from(seed) % n
            });
            match found {
                Some(subnet) => {
                    prop_assert!(free.contains(&subnet), "{subnet} of {free:?}");
                    prop_assert_eq!(asked, Some(free.len() as u128));
                    prop_assert!(network.min <= subnet && subnet <= network.max);
                }
                None => prop_assert!(free.is_empty(), "{free:?}"),
            }
        }
    }
}
