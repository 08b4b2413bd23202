//! An independent reader: compares the kernel, as iproute2 shows it, with the expected objects.

use std::collections::BTreeSet;

use flannel_core::address::Family;
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_netlink::testing::{Netns, bridge, ip};
use serde_json::{Value, json};

use crate::parts::cluster::{Families, Peer, device, peers};

/// The first missing (`-`) and unexpected (`+`) objects of each kind.
pub(crate) fn compare(
    netns: &Netns,
    count: u32,
    families: Families,
) -> anyhow::Result<Vec<String>> {
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
                ip(&format!("-j -d link show {dev}")),
                ip(&format!("-j {inet} address show dev {dev} scope global")),
            ]
        });
        let [routes, neighs, fdb, nexthops, links, addresses] =
            texts.map(|text| serde_json::from_str::<Vec<Value>>(&text));
        // The kernel's own routes, and the default route.
        let others = |row: &Value| row["protocol"] == "kernel" || row["dst"] == "default";
        let routes: Vec<Value> = routes?.into_iter().filter(|row| !others(row)).collect();
        // Each nexthop object serves one route, and each route that names one finds it, with the
        // same gateway.
        let users: Vec<Value> =
            routes.iter().filter(|row| row.get("nhid").is_some()).cloned().collect();
        let ours = || [dev.to_owned(), ROUTE_PROTOCOL.to_string()];
        let links: Vec<Value> = links?.iter().map(link_of).collect();
        // iproute2 prints an empty object for each other link.
        let addresses = addresses?;
        let addresses = addresses.iter().filter_map(|link| link["addr_info"].as_array()).flatten();
        let addresses: Vec<Value> =
            addresses.filter(|address| address["local"].is_string()).cloned().collect();
        let tables = [
            ("link", rows(&links, &LINK), vec![own_device(family)]),
            (
                // The lease decides the address. Its prefix always covers one host.
                "address",
                rows(&addresses, &["prefixlen", "address", "label"]),
                vec![own_address(family)],
            ),
            (
                "route",
                rows(
                    &routes,
                    &["dst", "gateway", "dev", "protocol", "type", "metrics", "prefsrc", "scope"],
                ),
                wanted(count, |p| {
                    let way = [p.subnet(family).to_string(), p.subnet(family).base().to_string()];
                    [&way[..], &ours(), &absent::<4>()].concat()
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
                    let entry = [
                        p.mac(family).to_string(),
                        p.public(family).to_string(),
                        "permanent".into(),
                    ];
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
                wrong.push(format!(
                    "{} {kind} entries are duplicates",
                    found.len() - found_once.len()
                ));
            }
        }
    }
    Ok(wrong)
}

/// The compared fields of a tunnel device.
const LINK: [&str; 9] = ["ifname", "link", "up", "mtu", "id", "port", "local", "learning", "kind"];

/// The fields of a link from iproute2, without nesting.
fn link_of(link: &Value) -> Value {
    let kind = &link["linkinfo"]["info_kind"];
    let data = &link["linkinfo"]["info_data"];
    let flags = link["flags"].as_array();
    let local = if data["local"].is_null() { &data["local6"] } else { &data["local"] };
    json!({
        "ifname": link["ifname"], "link": data["link"], "mtu": link["mtu"], "kind": kind,
        "up": flags.is_some_and(|flags| flags.contains(&"UP".into())),
        "id": data["id"], "port": data["port"], "local": local, "learning": data["learning"],
    })
}

/// The expected tunnel device: its MTU leaves room for the outer header.
fn own_device(family: Family) -> Vec<String> {
    let (local, mtu) = match family {
        Family::V4 => ("192.0.2.1", "1450"),
        Family::V6 => ("2001:db8::1", "1430"),
    };
    [device(family), "eth0", "true", mtu, "1", "8472", local, "false", "vxlan"]
        .map(str::to_owned)
        .to_vec()
}

/// The expected single address of the device, without a peer address.
fn own_address(family: Family) -> Vec<String> {
    match family {
        Family::V4 => ["32", "null", device(family)],
        Family::V6 => ["128", "null", "null"],
    }
    .map(str::to_owned)
    .to_vec()
}

fn wanted(count: u32, row: impl Fn(Peer) -> Vec<String>) -> Vec<Vec<String>> {
    peers(count).map(row).collect()
}

/// The values of absent columns.
fn absent<const COLUMNS: usize>() -> [String; COLUMNS] {
    std::array::from_fn(|_| Value::Null.to_string())
}

fn rows(rows: &[Value], columns: &[&'static str]) -> Vec<Vec<String>> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    rows.iter().map(|row| columns.iter().map(|column| text(&row[*column])).collect()).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails that way")]
mod tests {
    use super::*;
    use crate::parts::fixture::Fixture;
    use crate::parts::floor::fill;

    #[test]
    fn missing_unexpected_and_changed_objects_are_found() {
        let fixture = Fixture::new().unwrap();
        let look = || compare(&fixture.netns, 3, Families::Dual).unwrap();
        fill(&fixture, 3, Families::Dual).unwrap();
        assert_eq!(look(), [""; 0]);
        let [v4, v6] = Family::BOTH.map(|family| Peer(3).mac(family));
        let other = Peer(4).mac(Family::V6);
        // A change, and its reversal.
        for (done, undone) in [
            ("link set flannel.1 mtu 1400", "link set flannel.1 mtu 1450"),
            (
                "link set flannel-v6.1 type vxlan id 1 learning",
                "link set flannel-v6.1 type vxlan id 1 nolearning",
            ),
            ("address add 10.0.1.1/32 dev flannel.1", "address del 10.0.1.1/32 dev flannel.1"),
            (
                "address add fd00::7/128 dev flannel-v6.1",
                "address del fd00::7/128 dev flannel-v6.1",
            ),
            ("route add 10.0.99.0/24 nhid 3", "route del 10.0.99.0/24"),
            (
                "route replace 10.0.3.0/24 nhid 2 proto 241",
                "route replace 10.0.3.0/24 nhid 3 proto 241",
            ),
            (
                "route replace 10.0.3.0/24 nhid 3 proto 4",
                "route replace 10.0.3.0/24 nhid 3 proto 241",
            ),
            (
                "route replace 10.0.3.0/24 nhid 3 proto 241 scope site",
                "route replace 10.0.3.0/24 nhid 3 proto 241",
            ),
            (
                "-6 route del fd00:0:0:3::/64",
                "-6 route add fd00:0:0:3::/64 via fd00:0:0:3:: dev flannel-v6.1 onlink proto 241",
            ),
            (
                "neigh del 10.0.3.0 dev flannel.1",
                &format!("neigh add 10.0.3.0 lladdr {v4} dev flannel.1 nud permanent"),
            ),
            (
                &format!(
                    "neigh replace fd00:0:0:3:: dev flannel-v6.1 lladdr {other} nud permanent"
                ),
                &format!("neigh replace fd00:0:0:3:: dev flannel-v6.1 lladdr {v6} nud permanent"),
            ),
            ("nexthop add id 9 via 10.0.9.0 dev flannel.1 onlink protocol 241", "nexthop del id 9"),
        ] {
            fixture.netns.run(|| ip(done));
            assert_ne!(look(), [""; 0], "{done}");
            fixture.netns.run(|| ip(undone));
            assert_eq!(look(), [""; 0], "{undone}");
        }
        for done in [
            format!("fdb del {v4} dev flannel.1"),
            format!("fdb add {v4} dev flannel.1 dst 172.16.0.9 self permanent"),
        ] {
            fixture.netns.run(|| bridge(&done));
            assert_ne!(look(), [""; 0], "{done}");
        }
    }
}
