//! The guard of a tunnel: only packets of peers with their own sources arrive.

mod table;
mod tunnel;

use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::kernel::{Outcome, RecordKeeper};
use flannel_core::object::{Change, Record};
use flannel_firewall::{Guard, TunnelEnd};

const NAME: &str = "guard-test";
const PORT: u16 = 8472;

/// The address of a host of the underlay.
fn host(family: Family, n: u8) -> IpAddr {
    match family {
        Family::V4 => [192, 0, 2, n].into(),
        Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(n)].into(),
    }
}

/// An address in the pod network, in the subnet of a host.
fn pod(family: Family, subnet: u8, n: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 1, subnet, n].into(),
        Family::V6 => [0xfd00, 1, 0, u16::from(subnet), 0, 0, 0, u16::from(n)].into(),
    }
}

fn subnet_of(family: Family, subnet: u8) -> Subnet {
    let len = if family == Family::V4 { 24 } else { 64 };
    Subnet::new(pod(family, subnet, 0), len).unwrap()
}

fn end(family: Family, device: &str, drops: bool) -> TunnelEnd {
    TunnelEnd {
        drops,
        device: Some(device.parse().unwrap()),
        local: host(family, 7),
        transports: vec![Transport::Udp(PORT)],
    }
}

fn puts(records: impl IntoIterator<Item = Record>) -> Vec<Change> {
    records.into_iter().map(|record| Change::Put(record.into())).collect()
}

fn deletes(records: impl IntoIterator<Item = Record>) -> Vec<Change> {
    records.into_iter().map(|record| Change::Delete(record.into())).collect()
}

fn apply(guard: &Guard, changes: &[Change]) {
    for (outcome, change) in guard.apply(changes).into_iter().zip(changes) {
        assert_eq!(outcome, Outcome::Done, "{change:?}");
    }
}
