//! A node that writes only its own lease, as hostile as it can.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::address::Family;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_lab::Lab;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use test_support::eventually;

use super::{PATIENCE, Watch, all_log, up};
use crate::traffic::{assert_no_loss, logs};

/// The oldest lease: in a directory, the smallest key wins a clash.
const HOSTILE: &str = "10.244.0.0-24&fd00:10:244::-64";
const CHANGES: usize = 10;

/// Hosts whose subnets leave room for hostile leases.
fn lab(hosts: usize) -> Lab {
    let lab = Lab::builder().hosts(hosts).families(Family::BOTH).backend("vxlan");
    let lab = lab.config_field("SubnetMin", "10.244.10.0").config_field("SubnetMax", "10.244.99.0");
    let lab = lab.config_field("IPv6SubnetMin", "fd00:10:244:a::");
    up(lab.config_field("IPv6SubnetMax", "fd00:10:244:63::"))
}

fn file(lab: &Lab, key: &str) -> PathBuf {
    lab.registry().join("subnets").join(key)
}

/// The leases of the hosts.
fn victims(lab: &Lab) -> Vec<LeaseAttrs> {
    let files = fs::read_dir(lab.registry().join("subnets")).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let leases = names.filter(|name| name.parse::<Subnets>().is_ok() && name != HOSTILE);
    let read = |name: String| fs::read_to_string(file(lab, &name)).unwrap();
    leases.map(|name| LeaseAttrs::from_json(&read(name)).unwrap()).collect()
}

/// The offer of a victim, with its public addresses or with other ones.
fn copied(victim: &LeaseAttrs, with_public: bool) -> Offer {
    let mut offer = victim.preferred.clone();
    if !with_public {
        offer.public = ["198.51.100.9", "2001:db8:66::9"]
            .map(|address| address.parse::<std::net::IpAddr>().unwrap())
            .into_iter()
            .collect();
    }
    offer
}

/// An offer that takes nothing from others.
fn ordinary(victim: &LeaseAttrs) -> Offer {
    let offer = copied(victim, false);
    let data = offer.data.map(|_, _| r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:66"}"#.into());
    offer.with_data(data)
}

#[test]
fn one_hostile_lease_takes_nothing_from_others() {
    as_root(|| {
        let lab = lab(4);
        let victims = victims(&lab);
        assert_eq!(victims.len(), 4);
        let watch = Watch::begin(&lab);
        let traffic = Traffic::start(&lab);
        let write = |attrs: &LeaseAttrs| fs::write(file(&lab, HOSTILE), attrs.to_json()).unwrap();

        // The MAC address of each node, as the offer that counts.
        for change in 0..CHANGES {
            write(&copied(&victims[change % victims.len()], false).into());
            traffic.wait_for_sent(1);
            watch.check_health();
        }
        all_log(&lab, "which proves it");
        // The public addresses of all nodes at once, behind all of one node or behind an ordinary
        // offer.
        for change in 0..CHANGES {
            let copies = (0..30).map(|n| copied(&victims[(n + change) % victims.len()], false));
            let preferred =
                if change % 2 == 0 { copied(&victims[0], true) } else { ordinary(&victims[0]) };
            write(&LeaseAttrs { preferred, others: copies.collect() });
            traffic.wait_for_sent(1);
            watch.check_health();
        }
        all_log(&lab, "30 of its 31 offers are not used");
        watch.check_memory();
        assert_no_loss(traffic, &lab, 4 * 3 * 2 * 20);
        let hosts = lab.wait_until_reachable(PATIENCE).unwrap();
        assert!(hosts.is_complete(), "{}", logs(&lab));
    });
}

#[test]
fn leases_of_a_megabyte_cost_others_nothing_and_delay_no_lease() {
    as_root(|| {
        let lab = lab(3);
        let victims = victims(&lab);
        let watch = Watch::begin(&lab);
        let traffic = Traffic::start(&lab);
        let copies: Box<[Offer]> =
            (0..8000).map(|n| copied(&victims[n % victims.len()], false)).collect();
        let preferred = copied(&victims[0], false);
        let large = LeaseAttrs { preferred, others: copies }.to_json();
        assert!(large.len() > 1 << 20, "{}", large.len());
        let key = |n: usize| format!("10.244.{}.0-24&fd00:10:244:{:x}::-64", 200 + n, 0xc8 + n);
        for n in 0..30 {
            fs::write(file(&lab, &key(n)), &large).unwrap();
            watch.check_health();
        }
        all_log(&lab, "expected at most 16384");
        // An ordinary lease behind them.
        let ordinary = LeaseAttrs::from(ordinary(&victims[0]));
        fs::write(file(&lab, &key(40)), ordinary.to_json()).unwrap();
        for host in lab.hosts() {
            let shown = || host.run("ip", &["-4", "route", "show", "10.244.240.0/24"]).unwrap();
            eventually(
                Duration::from_secs(20),
                || !shown().is_empty(),
                || format!("{}: no route to an ordinary lease: {}", host.name(), logs(&lab)),
            );
        }
        watch.check_health();
        watch.check_memory();
        assert_no_loss(traffic, &lab, 3 * 2 * 2 * 20);
    });
}
