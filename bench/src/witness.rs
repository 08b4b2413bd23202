//! An independent reader: what iproute2 says is in the kernel, against what should be there.

use std::collections::BTreeSet;

use flannel_core::Family;
use flannel_netlink::testing::{Netns, bridge, ip};
use serde_json::Value;

use crate::cluster::{Families, Peer, device, peers};

/// What is missing (`-`) or too much (`+`), a few lines of it.
pub(crate) fn compare(netns: &Netns, count: u32, families: Families) -> anyhow::Result<Vec<String>> {
    let mut wrong = Vec::new();
    for family in families.iter() {
        let dev = device(family);
        let inet = if family == Family::V4 { "-4" } else { "-6" };
        let texts = netns.run(|| {
            [
                ip(&format!("-j {inet} route show dev {dev}")),
                ip(&format!("-j {inet} neigh show dev {dev} nud permanent")),
                bridge(&format!("-j fdb show dev {dev}")),
                ip(&format!("-j nexthop show dev {dev}")),
            ]
        });
        let [routes, neighs, fdb, nexthops] = texts.map(|text| serde_json::from_str::<Vec<Value>>(&text));
        let kernel_made = |row: &Value| row["protocol"].as_str() == Some("kernel");
        let routes: Vec<Value> = routes?.into_iter().filter(|row| !kernel_made(row)).collect();
        // Each nexthop object serves one route, and each route that names one finds it, with the same gateway.
        let named = |row: &&Value| row.get("nhid").is_some();
        let users: Vec<Value> = routes.iter().filter(named).cloned().collect();
        let tables = [
            (
                "route",
                rows(&routes, ["dst", "gateway"]),
                wanted(count, |p| [p.subnet(family).to_string(), p.subnet(family).base().to_string()]),
            ),
            (
                "neigh",
                rows(&neighs?, ["dst", "lladdr"]),
                wanted(count, |p| [p.subnet(family).base().to_string(), p.mac(family).to_string()]),
            ),
            (
                "fdb",
                rows(&fdb?, ["mac", "dst"]),
                wanted(count, |p| [p.mac(family).to_string(), p.public(family).to_string()]),
            ),
            ("nexthop", rows(&nexthops?, ["id", "gateway"]), rows(&users, ["nhid", "gateway"])),
        ];
        for (kind, found, expected) in &tables {
            let line = |sign: char, [a, b]: &[String; 2]| format!("{sign} {kind} {a} {b} dev {dev}");
            wrong.extend(expected.difference(found).take(3).map(|row| line('-', row)));
            wrong.extend(found.difference(expected).take(3).map(|row| line('+', row)));
        }
    }
    Ok(wrong)
}

fn wanted(count: u32, row: impl Fn(Peer) -> [String; 2]) -> BTreeSet<[String; 2]> {
    peers(count).map(row).collect()
}

fn rows(rows: &[Value], columns: [&'static str; 2]) -> BTreeSet<[String; 2]> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    rows.iter().map(|row| columns.map(|column| text(&row[column]))).collect()
}
