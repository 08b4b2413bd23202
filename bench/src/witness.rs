//! An independent reader: what iproute2 says is in the kernel, against what should be there.

use std::collections::BTreeSet;

use flannel_core::{Family, ROUTE_PROTOCOL};
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
                ip(&format!("-j {inet} route show table main")),
                ip(&format!("-j {inet} neigh show dev {dev} nud permanent")),
                bridge(&format!("-j fdb show dev {dev}")),
                ip(&format!("-j nexthop show dev {dev}")),
            ]
        });
        let [routes, neighs, fdb, nexthops] = texts.map(|text| serde_json::from_str::<Vec<Value>>(&text));
        // The kernel's own, and the way out of this host.
        let others = |row: &Value| row["protocol"] == "kernel" || row["dst"] == "default";
        let routes: Vec<Value> = routes?.into_iter().filter(|row| !others(row)).collect();
        // Each nexthop object serves one route, and each route that names one finds it, with the same gateway.
        let named = |row: &&Value| row.get("nhid").is_some();
        let users: Vec<Value> = routes.iter().filter(named).cloned().collect();
        let ours = || [dev.to_owned(), ROUTE_PROTOCOL.to_string()];
        let tables = [
            (
                "route",
                rows(&routes, &["dst", "gateway", "dev", "protocol", "type", "metrics", "prefsrc"]),
                wanted(count, |p| {
                    let way = [p.subnet(family).to_string(), p.subnet(family).base().to_string()];
                    [&way[..], &ours(), &absent::<3>()].concat()
                }),
            ),
            (
                "neigh",
                rows(&neighs?, &["dst", "lladdr", "router", "extern_learn"]),
                wanted(count, |p| {
                    let entry = [p.subnet(family).base().to_string(), p.mac(family).to_string()];
                    [entry, absent()].concat()
                }),
            ),
            (
                "fdb",
                rows(&fdb?, &["mac", "dst", "state", "port", "vni", "via", "nhid"]),
                wanted(count, |p| {
                    let entry = [p.mac(family).to_string(), p.public(family).to_string(), "permanent".into()];
                    [&entry[..], &absent::<4>()].concat()
                }),
            ),
            (
                "nexthop",
                rows(&nexthops?, &["id", "gateway", "dev", "protocol"]),
                rows(&users, &["nhid", "gateway", "dev", "protocol"]),
            ),
        ];
        for (kind, found, expected) in &tables {
            let found_once: BTreeSet<_> = found.iter().collect();
            let expected: BTreeSet<_> = expected.iter().collect();
            let line = |sign: char, row: &[String]| format!("{sign} {kind} {}", row.join(" "));
            wrong.extend(expected.difference(&found_once).take(3).map(|row| line('-', row)));
            wrong.extend(found_once.difference(&expected).take(3).map(|row| line('+', row)));
            if found.len() > found_once.len() {
                wrong.push(format!("{} {kind} entries are there twice", found.len() - found_once.len()));
            }
        }
    }
    Ok(wrong)
}

fn wanted(count: u32, row: impl Fn(Peer) -> Vec<String>) -> Vec<Vec<String>> {
    peers(count).map(row).collect()
}

/// Of columns that are not there.
fn absent<const COLUMNS: usize>() -> [String; COLUMNS] {
    std::array::from_fn(|_| Value::Null.to_string())
}

fn rows(rows: &[Value], columns: &[&'static str]) -> Vec<Vec<String>> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    rows.iter().map(|row| columns.iter().map(|column| text(&row[*column])).collect()).collect()
}
