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
        let objects = Objects::read(netns, family)?;
        for table in objects.tables(&Expected { count, family }) {
            wrong.extend(table.differences());
        }
    }
    Ok(wrong)
}

/// A row of a table: the texts of its columns.
type Row = Vec<String>;

/// The objects of one kind.
struct Table {
    kind: &'static str,
    found: Vec<Row>,
    expected: Vec<Row>,
}

impl Table {
    fn differences(&self) -> Vec<String> {
        let found: BTreeSet<&Row> = self.found.iter().collect();
        let expected: BTreeSet<&Row> = self.expected.iter().collect();
        let kind = self.kind;
        let mut wrong = Vec::new();
        for row in expected.difference(&found).take(3) {
            wrong.push(format!("- {kind} {}", row.join(" ")));
        }
        for row in found.difference(&expected).take(3) {
            wrong.push(format!("+ {kind} {}", row.join(" ")));
        }
        let duplicates = self.found.len() - found.len();
        if duplicates > 0 {
            wrong.push(format!("{duplicates} {kind} entries are duplicates"));
        }
        wrong
    }
}

/// The objects of one family in the kernel, as iproute2 prints them.
struct Objects {
    links: Vec<Value>,
    addresses: Vec<Value>,
    /// Without the routes of the kernel, and without the default route.
    routes: Vec<Value>,
    neighs: Vec<Value>,
    fdb: Vec<Value>,
    nexthops: Vec<Value>,
}

impl Objects {
    fn read(netns: &Netns, family: Family) -> anyhow::Result<Self> {
        let dev = device(family);
        let inet = if family == Family::V4 { "-4" } else { "-6" };
        let ip = |command: String| netns.run(|| ip(&command));
        let links = values(&ip(format!("-j -d link show {dev}")))?;
        let addresses = values(&ip(format!("-j {inet} address show dev {dev} scope global")))?;
        let mut routes = values(&ip(format!("-j {inet} route show table main")))?;
        routes.retain(|row| row["protocol"] != "kernel" && row["dst"] != "default");
        let neighs = values(&ip(format!("-j {inet} neigh show dev {dev} nud permanent")))?;
        let fdb = values(&netns.run(|| bridge(&format!("-j fdb show dev {dev}"))))?;
        let nexthops = values(&ip(format!("-j nexthop show dev {dev}")))?;
        Ok(Self { links, addresses, routes, neighs, fdb, nexthops })
    }

    /// The found and the expected objects.
    fn tables(&self, expected: &Expected) -> [Table; 6] {
        let links: Vec<Value> = self.links.iter().map(link_of).collect();
        // iproute2 prints an empty object for each other link.
        let addresses = self.addresses.iter().filter_map(|link| link["addr_info"].as_array());
        let addresses = addresses.flatten().filter(|address| address["local"].is_string());
        // Each nexthop object serves one route, and each route that names one finds it, with the
        // same gateway.
        let users = || self.routes.iter().filter(|row| row.get("nhid").is_some());
        [
            Table {
                kind: "link",
                found: rows(&links, LINK),
                expected: vec![own_device(expected.family)],
            },
            Table {
                kind: "address",
                // The lease decides the address. Its prefix always covers one host.
                found: rows(addresses, ["prefixlen", "address", "label"]),
                expected: vec![own_address(expected.family)],
            },
            Table {
                kind: "route",
                found: rows(
                    &self.routes,
                    ["dst", "gateway", "dev", "protocol", "type", "metrics", "prefsrc", "scope"],
                ),
                expected: expected.routes(),
            },
            Table {
                kind: "neigh",
                found: rows(&self.neighs, ["dst", "lladdr", "router", "extern_learn"]),
                expected: expected.neighs(),
            },
            Table {
                kind: "fdb",
                found: rows(&self.fdb, ["mac", "dst", "state", "port", "vni", "via", "nhid"]),
                expected: expected.fdb(),
            },
            Table {
                kind: "nexthop",
                found: rows(&self.nexthops, ["id", "gateway", "dev", "protocol"]),
                expected: rows(users(), ["nhid", "gateway", "dev", "protocol"]),
            },
        ]
    }
}

/// The objects that the peers of a cluster need.
struct Expected {
    count: u32,
    family: Family,
}

impl Expected {
    fn routes(&self) -> Vec<Row> {
        let dev = device(self.family);
        let protocol = ROUTE_PROTOCOL.to_string();
        self.rows(|peer| {
            let subnet = peer.subnet(self.family);
            let gateway = subnet.base().to_string();
            let way = [subnet.to_string(), gateway, dev.to_owned(), protocol.clone()];
            [&way[..], &absent::<4>()].concat()
        })
    }

    fn neighs(&self) -> Vec<Row> {
        self.rows(|peer| {
            let gateway = peer.subnet(self.family).base().to_string();
            [[gateway, peer.mac(self.family).to_string()], absent()].concat()
        })
    }

    fn fdb(&self) -> Vec<Row> {
        self.rows(|peer| {
            let mac = peer.mac(self.family).to_string();
            let entry = [mac, peer.public(self.family).to_string(), "permanent".into()];
            [&entry[..], &absent::<4>()].concat()
        })
    }

    fn rows(&self, row: impl Fn(Peer) -> Row) -> Vec<Row> {
        peers(self.count).map(row).collect()
    }
}

/// The list that iproute2 printed.
fn values(text: &str) -> anyhow::Result<Vec<Value>> {
    Ok(serde_json::from_str(text)?)
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

/// The values of absent columns.
fn absent<const COLUMNS: usize>() -> [String; COLUMNS] {
    std::array::from_fn(|_| Value::Null.to_string())
}

/// The texts of these columns of objects.
fn rows<'a, const COLUMNS: usize>(
    objects: impl IntoIterator<Item = &'a Value>,
    columns: [&str; COLUMNS],
) -> Vec<Row> {
    let mut rows = Vec::new();
    for object in objects {
        rows.push(columns.iter().map(|column| text(&object[*column])).collect());
    }
    rows
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
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
