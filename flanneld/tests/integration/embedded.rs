//! Daemons in this process, from typed values.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::testing::FakeSubnets;
use flannel_netlink::testing::{in_netns_async, ip};
use flannel_subnet::{DirLocation, DirOptions, MemoryRegistry};
use flanneld::{ControlSocket, Daemon, DaemonConfig, StoreConfig};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// A host with an uplink.
fn uplink() {
    ip("link set lo up");
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("address add 192.0.2.1/24 dev eth0");
    ip("link set eth0 up");
}

/// A daemon with all its files in `dir`, and no firewall rules.
fn on(store: StoreConfig, dir: &Path) -> DaemonConfig {
    let mut config = DaemonConfig::new(store);
    config.interface.iface = vec!["eth0".into()];
    config.subnet_file = dir.join("run/subnet.env");
    config.state_dir = dir.join("state");
    config.firewall.forward = false;
    config
}

/// A daemon on a directory with this network config.
fn on_directory(dir: &TempDir, network: &str) -> DaemonConfig {
    let path = dir.path().join("network");
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("config"), network).unwrap();
    let location = DirLocation { path, options: DirOptions::default() };
    on(StoreConfig::Directory(location), dir.path())
}

/// Runs a daemon until it is ready and `work` is done. Then its future is dropped.
async fn while_ready(daemon: &Daemon, work: impl Future<Output = ()>) {
    let ready = async {
        timeout(PATIENCE, daemon.ready()).await.unwrap();
        work.await;
    };
    tokio::select! {
        ended = daemon.run() => panic!("{ended:?}"),
        () = ready => {}
    }
}

/// The sockets of this network namespace to which somebody may connect or send.
fn open_sockets() -> BTreeSet<String> {
    let table = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap();
        let rows = text
            .lines()
            .skip(1)
            .map(|row| row.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        rows.collect::<Vec<_>>()
    };
    let mut open = BTreeSet::new();
    for name in ["tcp", "tcp6"] {
        // State 0A is LISTEN.
        let listens = table(name).into_iter().filter(|row| row[3] == "0A");
        open.extend(listens.map(|row| format!("{name} {}", row[1])));
    }
    for name in ["udp", "udp6"] {
        open.extend(table(name).into_iter().map(|row| format!("{name} {}", row[1])));
    }
    open.extend(table("unix").into_iter().filter_map(|row| Some(format!("unix {}", row.get(7)?))));
    // The lock of the name of the trial device, and the claims. Nothing reads from them.
    let locks = ["unix @flanneld/flannel-trial", "unix @flanneld/claim/"];
    open.retain(|name| !locks.iter().any(|lock| name.starts_with(lock)));
    open
}

/// A program that embeds the daemon opens only what it asks for.
#[test]
fn the_daemon_opens_no_socket_that_its_config_does_not_have() {
    in_netns_async(|| async {
        uplink();
        let network = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#;
        let dir = tempfile::tempdir().unwrap();
        let config = on_directory(&dir, network);
        let before = open_sockets();
        let daemon = Daemon::new(config.clone());
        while_ready(&daemon, async { assert_eq!(open_sockets(), before) }).await;

        let mut config = config;
        config.control.socket = ControlSocket::BesideSubnetFile;
        config.control.doctor_port = 8473;
        config.control.health = Some("127.0.0.1:8472".parse().unwrap());
        let daemon = Daemon::new(config);
        let is_open = async {
            let open = open_sockets();
            // It is bound under another name.
            let socket = format!("unix {}/run/.flanneld.sock", dir.path().display());
            assert!(open.iter().any(|name| name.starts_with(&socket)), "{open:?}");
            for expected in [
                // 192.0.2.1:8473 and 127.0.0.1:8472, each with the bytes of the address reversed.
                "tcp 010200C0:2119".to_owned(),
                "tcp 0100007F:2118".to_owned(),
            ] {
                assert!(open.contains(&expected), "{expected}: {open:?}");
            }
        };
        while_ready(&daemon, is_open).await;
        assert_eq!(open_sockets(), before, "the sockets end with the daemon");
    });
}

/// A stop runs the command for the end of the node, and dropping the future does not.
#[test]
fn a_stop_ends_in_order_and_the_daemon_may_run_again() {
    in_netns_async(|| async {
        uplink();
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let command = |word: &str| format!("echo {word} >> {}", log.display());
        let network = serde_json::json!({
            "Network": "10.1.0.0/16",
            "Backend": {
                "Type": "extension",
                "PostStartupCommand": ["sh", "-c", command("start")],
                "ShutdownCommand": ["sh", "-c", command("stop")],
            },
        });
        let mut config = on_directory(&dir, &network.to_string());
        config.allow_commands = true;
        let ran = || std::fs::read_to_string(&log).unwrap().replace('\n', " ");
        let daemon = Daemon::new(config);
        let stop_when_ready = async || {
            let stop = async {
                timeout(PATIENCE, daemon.ready()).await.unwrap();
                "asked"
            };
            assert_eq!(daemon.run_until(stop).await.unwrap(), "asked");
        };

        stop_when_ready().await;
        assert_eq!(ran(), "start stop ");
        assert!(daemon.status().network.is_none(), "the network has ended");
        assert!(dir.path().join("run/subnet.env").exists());

        while_ready(&daemon, async {}).await;
        assert_eq!(ran(), "start stop start ");

        // The daemon adopts what the dropped one left.
        stop_when_ready().await;
        assert_eq!(ran(), "start stop start stop ");
    });
}

/// A daemon that waits for the lock of another one does not run the commands of that one's node.
#[test]
fn a_stop_before_the_lock_leaves_the_other_daemon_alone() {
    in_netns_async(|| async {
        uplink();
        let dir = tempfile::tempdir().unwrap();
        let config =
            on_directory(&dir, r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#);
        let second = Daemon::new(config.clone());
        let daemon = Daemon::new(config);
        let others = async {
            second.run_until(async {}).await.unwrap();
            let error = second.run().await.unwrap_err().to_string();
            assert!(error.contains("another flanneld is running"), "{error}");
        };
        while_ready(&daemon, others).await;
        while_ready(&second, async {}).await;
    });
}

/// A store may be given as a ready manager of leases.
#[test]
fn a_daemon_runs_on_a_manager_that_is_given() {
    in_netns_async(|| async {
        uplink();
        let dir = tempfile::tempdir().unwrap();
        let subnets =
            FakeSubnets::with_config(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#);
        subnets.put("10.1.7.0-24", "192.0.2.7");
        let store = StoreConfig::Manager(Arc::new(subnets.clone()));
        let daemon = Daemon::new(on(store, dir.path()));
        let uses_it = async {
            let lease = daemon.status().network.unwrap().lease;
            assert!(format!("{lease:?}").contains("10.1.1.0/24"), "{lease:?}");
        };
        while_ready(&daemon, uses_it).await;
    });
}

/// The number of the peer in both networks.
const PEER: u8 = 7;

/// A vxlan network, with one peer: `10.N.7.0/24` by the device `flannel.N`.
fn vxlan(n: u8) -> Arc<MemoryRegistry> {
    let registry = MemoryRegistry::with_config(&format!(
        r#"{{"Network":"10.{n}.0.0/16","Backend":{{"Type":"vxlan","VNI":{n}}}}}"#
    ));
    let peer = format!(
        r#"{{"PublicIP":"192.0.2.{PEER}","BackendType":"vxlan",
            "BackendData":{{"VNI":{n},"VtepMAC":"02:00:00:00:00:{PEER:02x}"}}}}"#
    );
    registry.put_raw(&format!("10.{n}.{PEER}.0-24"), &peer, None);
    Arc::new(registry)
}

fn route(n: u8) -> String {
    ip(&format!("route show 10.{n}.{PEER}.0/24 dev flannel.{n}"))
}

/// Two networks of one host, each with a daemon: neither removes anything of the other, and the end
/// of one is not the end of the other.
#[test]
fn two_daemons_with_two_networks_run_in_one_process() {
    in_netns_async(|| async {
        uplink();
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let daemon =
            |n: u8, dir: &TempDir| Daemon::new(on(StoreConfig::Registry(vxlan(n)), dir.path()));
        let first = daemon(1, &dirs[0]);
        let second = daemon(2, &dirs[1]);
        let (stop, stopped) = oneshot::channel::<()>();
        let of_first = async {
            first.run_until(async { drop(stopped.await) }).await.unwrap();
            // The second daemon goes on to the end of the test.
            std::future::pending::<()>().await;
        };
        let scenario = async {
            timeout(PATIENCE, first.ready()).await.unwrap();
            timeout(PATIENCE, second.ready()).await.unwrap();
            let both = || !route(1).is_empty() && !route(2).is_empty();
            assert!(both(), "{} {}", route(1), route(2));
            let shared = |daemon: &Daemon| daemon.status().network.unwrap().lease;
            assert_ne!(shared(&first), shared(&second));

            stop.send(()).unwrap();
            while first.status().network.is_some() {
                tokio::task::yield_now().await;
            }
            assert!(both(), "the data path stays in place");
            ip(&format!("route delete 10.1.{PEER}.0/24"));
            ip(&format!("route delete 10.2.{PEER}.0/24"));
            let repaired = async {
                while route(2).is_empty() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(PATIENCE, repaired).await.expect("the second daemon repairs its route");
            assert_eq!(route(1), "", "nobody repairs the route of a daemon that has ended");
        };
        tokio::select! {
            () = of_first => {}
            ended = second.run() => panic!("{ended:?}"),
            () = scenario => {}
        }
    });
}
