//! The actual, the desired and the withdrawn objects of a host's kernel, read with iproute2 and
//! etcd only.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use etcd_client::GetOptions;
use flannel_netlink::testing::{bridge, ip};
use serde_json::Value;

use super::fixture::{Daemon, Host, PREFIX, collect, mac, until};
use super::server::Etcd;

/// The objects of a peer: a route, a neighbour, a forwarding entry.
fn objects(subnet: &str, public: &str, mac: &str) -> [String; 3] {
    [
        format!("route {subnet}/24 via {subnet}"),
        format!("neigh {subnet} {mac}"),
        format!("fdb {mac} {public}"),
    ]
}

/// Public address and MAC address of every lease, by the subnet's address.
pub(crate) async fn leases(etcd: &Etcd) -> BTreeMap<String, (String, String)> {
    let prefix = format!("{PREFIX}/subnets/");
    let options = GetOptions::new().with_prefix();
    let got = etcd.client().await.get(prefix.as_str(), Some(options)).await.unwrap();
    got.kvs()
        .iter()
        .map(|kv| {
            let subnet =
                kv.key_str().unwrap().strip_prefix(&prefix).unwrap().strip_suffix("-24").unwrap();
            let value: Value = serde_json::from_slice(kv.value()).unwrap();
            let text = |pointer| value.pointer(pointer).unwrap().as_str().unwrap().to_owned();
            (subnet.to_owned(), (text("/PublicIP"), text("/BackendData/VtepMAC")))
        })
        .collect()
}

/// The objects that the host's kernel should have.
pub(crate) async fn wanted(etcd: &Etcd, host: &Host) -> BTreeSet<String> {
    let others = leases(etcd).await.into_iter().filter(|(_, (public, _))| *public != host.public());
    others.flat_map(|(subnet, (public, mac))| objects(&subnet, &public, &mac)).collect()
}

/// The objects that the host's kernel has; none without the device.
pub(crate) fn present(host: &Host) -> BTreeSet<String> {
    host.netns.run(|| {
        if !ip("-br link").contains("flannel.1") {
            return BTreeSet::new();
        }
        let rows = |text: String| -> Vec<Value> {
            if text.trim().is_empty() { Vec::new() } else { serde_json::from_str(&text).unwrap() }
        };
        let text = |row: &Value, field: &str| row[field].as_str().unwrap_or("nothing").to_owned();
        let mut seen = BTreeSet::new();
        for row in rows(ip("-j -4 route show dev flannel.1")) {
            seen.insert(format!("route {} via {}", text(&row, "dst"), text(&row, "gateway")));
        }
        for row in rows(ip("-j neigh show dev flannel.1 nud permanent")) {
            seen.insert(format!("neigh {} {}", text(&row, "dst"), text(&row, "lladdr")));
        }
        for row in rows(bridge("-j fdb show dev flannel.1")) {
            seen.insert(format!("fdb {} {}", text(&row, "mac"), text(&row, "dst")));
        }
        seen
    })
}

/// Waits until the host's kernel matches etcd. Returns the time.
pub(crate) async fn agrees(etcd: &Etcd, host: &Host, daemon: &Daemon) -> Duration {
    let begin = Instant::now();
    // The own lease may be written last.
    loop {
        let wanted = wanted(etcd, host).await;
        let present = present(host);
        if wanted == present && !wanted.is_empty() {
            return begin.elapsed();
        }
        let missing = wanted.difference(&present);
        let more = present.difference(&wanted);
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{}: missing {:?}, too much {:?}\n{}",
            host.public(),
            missing.collect::<Vec<_>>(),
            more.collect::<Vec<_>>(),
            daemon.log()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Records every object that is withdrawn in a host's kernel.
pub(crate) struct Monitor {
    children: Vec<Child>,
    seen: Arc<Mutex<String>>,
}

impl Monitor {
    /// Watches from when it returns; a daemon that is in sync must run on the host.
    pub(crate) async fn of(host: &Host) -> Self {
        let seen = Arc::<Mutex<String>>::default();
        let commands = [
            ("ip", vec!["monitor", "nexthop", "route", "neigh"]),
            ("bridge", vec!["monitor", "fdb"]),
        ];
        let children = commands.map(|(program, args)| {
            let mut command = Command::new(program);
            command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut child = host.netns.run(|| command.spawn()).unwrap();
            collect(child.stdout.take().unwrap(), &seen);
            child
        });
        let monitor = Self { children: children.into(), seen };
        // A withdrawal must be recorded, or the test would prove nothing.
        until(
            30,
            || {
                host.ip("route replace blackhole 198.51.100.0/24");
                host.ip("route del blackhole 198.51.100.0/24");
                host.netns.run(|| {
                    bridge("fdb replace 0a:00:00:00:00:ff dev eth0 self permanent");
                    bridge("fdb del 0a:00:00:00:00:ff dev eth0 self");
                });
                let deleted = monitor.deleted();
                ["198.51.100.0/24", "0a:00:00:00:00:ff"]
                    .iter()
                    .all(|what| deleted.iter().any(|line| line.contains(what)))
            },
            || format!("the monitors see nothing: {:?}", monitor.seen.lock().unwrap()),
        )
        .await;
        monitor
    }

    fn deleted(&self) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        seen.lines().filter(|line| line.starts_with("Deleted")).map(str::to_owned).collect()
    }

    /// Nothing of these peers (`10.1.<n>.0`) was withdrawn at any moment.
    pub(crate) fn kept(&self, peers: &[u8]) {
        for peer in peers {
            self.kept_all(&[&format!("10.1.{peer}.0"), &mac(*peer)]);
        }
    }

    /// No line about a withdrawal has any of these addresses. (Neighbours on the uplink come and
    /// go.)
    pub(crate) fn kept_all(&self, addresses: &[&str]) {
        for line in self.deleted().iter().filter(|line| !line.contains("dev eth0")) {
            let mut words = line.split_whitespace().map(|word| word.trim_end_matches("/24"));
            assert!(!words.any(|word| addresses.contains(&word)), "withdrawn: {line}");
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
