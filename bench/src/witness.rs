//! An independent reader: what iproute2 says is in the kernel, against what should be there.

use std::collections::BTreeSet;

use flannel_core::Family;
use flannel_netlink::testing::{Netns, bridge, ip};
use serde_json::Value;

use crate::cluster::{Families, device, peers};

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
            ]
        });
        let [routes, neighs, fdb] = texts.map(|text| serde_json::from_str::<Vec<Value>>(&text));
        let rows = |rows: Vec<Value>, columns: [&'static str; 2]| {
            let text = move |row: &Value, column| row[column].as_str().unwrap_or_default().to_owned();
            rows.into_iter().map(move |row| columns.map(|column| text(&row, column))).collect::<BTreeSet<_>>()
        };
        let kernel_made = |row: &Value| row["protocol"].as_str() == Some("kernel");
        let routes = routes?.into_iter().filter(|row| !kernel_made(row)).collect();
        let found =
            [rows(routes, ["dst", "gateway"]), rows(neighs?, ["dst", "lladdr"]), rows(fdb?, ["mac", "dst"])];
        let subnet = |p: crate::cluster::Peer| p.subnet(family);
        let expected = [
            peers(count).map(|p| [subnet(p).to_string(), subnet(p).base().to_string()]).collect(),
            peers(count).map(|p| [subnet(p).base().to_string(), p.mac(family).to_string()]).collect(),
            peers(count).map(|p| [p.mac(family).to_string(), p.public(family).to_string()]).collect(),
        ];
        for (kind, (found, expected)) in
            ["route", "neigh", "fdb"].into_iter().zip(found.into_iter().zip(expected))
        {
            let expected: BTreeSet<[String; 2]> = expected;
            let line = |sign: char, [a, b]: &[String; 2]| format!("{sign} {kind} {a} {b} dev {dev}");
            wrong.extend(expected.difference(&found).take(3).map(|row| line('-', row)));
            wrong.extend(found.difference(&expected).take(3).map(|row| line('+', row)));
        }
    }
    Ok(wrong)
}
