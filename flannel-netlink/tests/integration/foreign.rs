//! A snapshot takes no memory for foreign routes, on a host with very many of them.
//!
//! The test measures the memory of the whole process.

use std::net::IpAddr;

use flannel_core::kernel::{Footprint, Outcome};
use flannel_core::object::{Change, Object, Route, Via};
use flannel_core::{Kernel, Subnet};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::in_netns;

const ROUTES: u32 = 200_000;

fn route(n: u32) -> Object {
    let dst = Subnet::host(IpAddr::from((0x1400_0000 + n).to_be_bytes()));
    Route { dst, via: Via::Blackhole, mtu: None }.into()
}

/// Current or peak memory of this process in KiB (`VmRSS`, `VmHWM`).
fn memory(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse().unwrap()
}

#[test]
fn foreign_routes_take_no_memory() {
    in_netns(|| {
        let kernel = NetlinkKernel::open().unwrap();
        let footprint = Footprint {
            networks: vec!["10.1.0.0/16".parse().unwrap()],
            routes_on: ["lo".parse().unwrap()].into(),
            blackholes: true,
            ..Footprint::default()
        };
        for from in (0..ROUTES).step_by(100) {
            let changes: Vec<_> = (from..from + 100).map(|n| Change::Put(route(n))).collect();
            assert!(kernel.apply(&footprint, &changes).iter().all(Outcome::is_done));
        }
        let ours = Route { dst: "10.1.7.0/24".parse().unwrap(), via: Via::Blackhole, mtu: None };
        assert!(kernel.apply(&footprint, &[Change::Put(ours.into())])[0].is_done());
        // Sets the peak to the current value.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = memory("VmRSS:");
        let state = kernel.snapshot(&footprint).unwrap();
        let took = memory("VmHWM:").saturating_sub(before);
        assert_eq!(state.iter().collect::<Vec<_>>(), [&Object::from(ours)]);
        assert!(took < u64::from(ROUTES) * 8 / 1024, "{took} KiB for {ROUTES} foreign routes");
    });
}
