//! The daemon as a process: its log, its files, and its exit.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use flannel_core::Kernel;
use flannel_core::kernel::Footprint;
use flannel_core::object::{Change, Route, Via};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{Netns, bridge, in_netns, ip};
use nix::sys::signal::Signal;

use crate::calls;
use crate::programs;
use crate::reader::Reader;
use crate::running::{Daemon, wait_until};

/// The range of this node's subnet, which no test uses for peers or addresses.
const CONFIG: &str = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
    "Backend":{"Type":"vxlan"}}"#;

/// A host's uplink, in the namespace of the calling test.
pub(crate) fn uplink() {
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("address add 192.0.2.1/24 dev eth0");
    ip("address add 2001:db8::1/64 dev eth0 nodad");
    ip("link set eth0 up");
}

/// A directory with the registry, the state and the subnet file of one daemon.
pub(crate) struct Place {
    pub(crate) dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new(config: &str) -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(place.leases()).unwrap();
        fs::write(place.registry().join("config"), config).unwrap();
        place
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.dir.path().join("network")
    }

    pub(crate) fn leases(&self) -> PathBuf {
        self.registry().join("subnets")
    }

    pub(crate) fn subnet_file(&self) -> PathBuf {
        self.dir.path().join("run/subnet.env")
    }

    /// The text of the subnet file. Waits for it: it is written when the data path is in place.
    pub(crate) fn subnet_env(&self) -> String {
        let text = || fs::read_to_string(self.subnet_file());
        wait_until(|| text().is_ok(), || format!("{}: no such file", self.subnet_file().display()));
        text().unwrap()
    }

    /// The daemon's answer over its control socket.
    pub(crate) fn request(&self, target: &str) -> String {
        let socket = self.subnet_file().with_file_name("flanneld.sock");
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    fn own_lease(&self) -> PathBuf {
        let text = self.subnet_env();
        let subnet = text.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).unwrap();
        let base = subnet.strip_suffix(".1/24").unwrap();
        self.leases().join(format!("{base}.0-24"))
    }

    pub(crate) fn start(&self, extra: &[&str]) -> Daemon {
        let registry = format!("dir:{}", self.registry().display());
        self.start_on(&registry, extra)
    }

    fn start_on(&self, registry: &str, extra: &[&str]) -> Daemon {
        Daemon::start(&mut self.command(registry, extra))
    }

    pub(crate) fn command(&self, registry: &str, extra: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flanneld"));
        command
            .args(["--registry", registry, "-iface=eth0", "--subnet-file"])
            .arg(self.subnet_file());
        command.arg("--state-dir").arg(self.dir.path().join("state")).args(extra);
        command
    }

    /// A daemon whose `iptables-restore` fails while a file exists.
    fn start_with_fragile_iptables(&self, broken: &Path, extra: &[&str]) -> Daemon {
        let bin = self.dir.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        for name in ["iptables-save", "iptables-restore"] {
            let real = ["/usr/sbin", "/sbin", "/usr/bin"].map(|dir| format!("{dir}/{name}"));
            let real = real.iter().find(|path| Path::new(path).exists()).unwrap();
            let script = format!(
                "#!/bin/sh\nif [ -e {} ]; then echo out of order >&2; exit 3; fi\n\
                 exec {real} \"$@\"\n",
                broken.display()
            );
            test_support::write_script(&bin.join(name), &script);
        }
        let registry = format!("dir:{}", self.registry().display());
        let mut command = self.command(&registry, &[&["--iptables-resync=1"], extra].concat());
        command.env("PATH", format!("{}:{}", bin.display(), std::env::var("PATH").unwrap()));
        Daemon::start(&mut command)
    }
}

fn peer(leases: &Path, key: &str, public: &str, mac: &str) {
    let value = format!(
        r#"{{"PublicIP":"{public}","PublicIPv6":null,"BackendType":"vxlan",
            "BackendData":{{"VNI":1,"VtepMAC":"{mac}"}}}}"#
    );
    fs::write(leases.join(key), value).unwrap();
}

#[test]
fn a_signal_stops_the_daemon_and_leaves_the_data_path() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            let mut daemon = place.start(&[]);
            daemon.wait_for_log("in sync peers=1");
            daemon.wait_for_log("running lease");
            let asked = Instant::now();
            daemon.signal(signal);
            assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
            assert!(asked.elapsed() < Duration::from_secs(10), "{:?}", asked.elapsed());
            daemon.wait_for_log(&format!("stopped; the data path stays in place signal={signal}"));
            let routes = ip("route show 10.1.7.0/24");
            assert!(
                routes.contains("via 10.1.7.0 dev flannel.1") && routes.contains("onlink"),
                "{routes}"
            );
            assert!(place.own_lease().exists(), "the lease stays until it expires");
        }
    });
}

#[test]
fn a_restart_keeps_subnet_mac_and_every_entry() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let see = || {
            [
                "-o link show flannel.1",
                "route show dev flannel.1",
                "neigh show dev flannel.1 nud permanent",
            ]
            .map(ip)
        };
        let mut before = None;
        for kill in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGKILL] {
            let mut daemon = place.start(&[]);
            daemon.wait_for_log("in sync peers=1");
            let now = (see(), place.subnet_env());
            assert_eq!(*before.get_or_insert_with(|| now.clone()), now);
            daemon.signal(kill);
            daemon.ended();
        }
        assert_eq!(
            fs::read_dir(place.leases()).unwrap().count(),
            2,
            "its own lease and the peer's"
        );
    });
}

#[test]
fn ip_blackhole_route_drops_unused_addresses_and_coexists_with_a_bridge() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let blackholes = || ip("route show type blackhole");
        let registry = format!("dir:{}", place.registry().display());
        let mut command =
            place.command(&registry, &["-ip-blackhole-route", "-v=4", "-vmodule=x=1"]);
        command.env("FLANNELD_IFCAE", "eth7").env("FLANNELD_ETCD_PREFIX", "");
        let mut daemon = Daemon::start(&mut command);
        daemon.wait_for_log("running lease");
        daemon.wait_for_log("an option is empty: its default is used");
        daemon.wait_for_log("FLANNELD_ETCD_PREFIX");
        daemon.wait_for_log("options have no effect here options=--vmodule");
        daemon.wait_for_log("FLANNELD_IFCAE in the environment has no effect");
        daemon.wait_for_log("DEBUG");
        let own = place.own_lease().file_name().unwrap().to_str().unwrap().replace('-', "/");
        let base = own.strip_suffix(".0/24").unwrap();
        wait_until(|| blackholes().contains(&own), blackholes);
        assert!(blackholes().contains("proto 241 metric 4294967295"), "{}", blackholes());
        // A bridge with the same route works, and the two routes coexist.
        ip("link add cni0 type bridge");
        ip("link add pod0 type veth peer name pod1");
        ip("link set pod0 master cni0 up");
        ip("link set pod1 up");
        ip(&format!("addr add {base}.1/24 dev cni0"));
        ip("link set cni0 up");
        let pod = || ip(&format!("route get {base}.9"));
        wait_until(|| pod().contains("dev cni0"), pod);
        ip("link del cni0");
        wait_until(|| blackholes().contains(&own), blackholes);
        ip(&format!("route del blackhole {own}"));
        daemon.wait_for_log(&format!("an object was repaired object=route blackhole {own}"));
        assert!(blackholes().contains(&own));
        assert_eq!(daemon.log().matches("an object was repaired").count(), 1, "{}", daemon.log());
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        wait_until(|| blackholes().is_empty(), blackholes);
    });
}

/// Go flannel creates the route after a period, and never removes it.
#[test]
fn the_blackhole_route_is_installed_at_once_and_removed_with_the_subnet() {
    let config = |n: u8| {
        format!(
            r#"{{"Network":"10.1.0.0/16","SubnetMin":"10.1.{n}1.0","SubnetMax":"10.1.{n}9.0",
            "EnableIPv6":true,"IPv6Network":"fd00:1::/48",
            "IPv6SubnetMin":"fd00:1:0:{n}1::","IPv6SubnetMax":"fd00:1:0:{n}9::",
            "Backend":{{"Type":"vxlan"}}}}"#
        )
    };
    in_netns(move || {
        uplink();
        let place = Place::new(&config(1));
        let blackholes = || ip("route show type blackhole") + &ip("-6 route show type blackhole");
        // Both own subnets, as the kernel writes them.
        let own = || {
            let text = place.subnet_env();
            let subnets =
                text.lines().filter_map(|line| line.split_once("SUBNET=")?.1.split_once('/'));
            subnets
                .map(|(address, len)| match address.strip_suffix(".1") {
                    Some(begin) => format!("{begin}.0/{len}"),
                    None => format!("{}/{len}", address.strip_suffix('1').unwrap()),
                })
                .collect::<Vec<_>>()
        };
        let is_there = |own: &[String], seen: &str| {
            assert_eq!(own.len(), 2);
            assert!(
                own.iter().all(|subnet| seen.contains(&format!("blackhole {subnet} "))),
                "{own:?}: {seen}"
            );
            assert_eq!(seen.matches("blackhole").count(), 2, "{own:?}: {seen}");
        };
        // The route is installed without a period, before pods may start.
        let start = || place.start(&["--ip-blackhole-route", "--iptables-resync=86400"]);
        let mut daemon = start();
        let first = own();
        is_there(&first, &blackholes());
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        is_there(&first, &blackholes());
        // The host gets other subnets.
        fs::write(place.registry().join("config"), config(2)).unwrap();
        fs::remove_file(place.subnet_file()).unwrap();
        let daemon = start();
        let second = own();
        assert!(first.iter().all(|subnet| !second.contains(subnet)), "{first:?} {second:?}");
        daemon.wait_for_log("in sync");
        is_there(&second, &blackholes());
    });
}

#[test]
fn the_tunnel_has_its_addresses_before_pods_start() {
    in_netns(|| {
        uplink();
        let config = DUAL.replace("KIND", "vxlan");
        for _ in 0..5 {
            let place = Place::new(&config);
            let daemon = place.start(&[]);
            // The addresses are checked as soon as the file exists.
            let deadline = Instant::now() + Duration::from_secs(60);
            while !place.subnet_file().exists() {
                assert!(
                    Instant::now() < deadline,
                    "{}: no such file",
                    place.subnet_file().display()
                );
                std::thread::yield_now();
            }
            let addresses = ip("-o address show");
            for (family, device) in [("inet 10.1.", "flannel.1"), ("inet6 fd00:1:", "flannel-v6.1")]
            {
                let there =
                    addresses.lines().any(|line| line.contains(device) && line.contains(family));
                assert!(there, "{device}: {addresses}");
            }
            drop(daemon);
            for device in ["flannel.1", "flannel-v6.1"] {
                ip(&format!("link del {device}"));
            }
        }
    });
}

#[test]
fn a_deleted_lease_stops_the_daemon() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let mut daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        fs::remove_file(place.own_lease()).unwrap();
        assert_eq!(daemon.ended().code(), Some(1));
        daemon.wait_for_log("somebody deleted it, which makes flanneld exit");
        daemon.wait_for_log("data path stay in place");
    });
}

#[test]
fn the_exit_code_is_2_on_wrong_usage_and_1_on_other_errors() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        for (args, code, says) in [
            (vec!["--nonsense"], 2, "--nonsense"),
            (vec!["--log", "warning"], 2, "\"warning\" is not valid, expected error, warn"),
            (vec!["--log", "a=b=c"], 2, "--log"),
            (vec!["--iface-regex=("], 2, "'(' for '--iface-regex"),
            #[cfg(feature = "etcd")]
            (
                vec!["--registry=etcd", "--etcd-endpoints=nonsense"],
                2,
                "--etcd-endpoints: the endpoint \"nonsense\"",
            ),
            #[cfg(feature = "etcd")]
            (
                vec!["--registry=etcd", "--etcd-username=u"],
                2,
                "--etcd-username: \"u\" is given without password",
            ),
        ] {
            let mut daemon = place.start(&args);
            assert_eq!(daemon.ended().code(), Some(code), "{args:?}");
            daemon.wait_for_log(says);
        }
        let registry = format!("dir:{}", place.registry().display());
        let state = place.dir.path().join("state");
        for (args, says) in [
            (vec!["--iface", "eth9"], "eth9"),
            (vec!["--iface", "eth0", "--subnet-file", "/proc/nowhere/subnet.env"], "/proc/nowhere"),
            (vec![], "default route"),
        ] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_flanneld"));
            command.args(["--registry", &registry, "--state-dir"]).arg(&state);
            let subnet_file = place.subnet_file();
            if !args.contains(&"--subnet-file") {
                command.arg("--subnet-file").arg(&subnet_file);
            }
            let mut daemon = Daemon::start(command.args(&args));
            assert_eq!(daemon.ended().code(), Some(1), "{args:?}: {}", daemon.log());
            daemon.wait_for_log(says);
        }
    });
}

#[test]
fn log_format_json_writes_a_json_object_per_line() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let mut daemon = place.start(&["--log-format=json"]);
        daemon.wait_for_log("\"message\":\"running\"");
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().code(), Some(0));
        daemon.wait_for_log("\"signal\":\"SIGTERM\"");
        for line in daemon.log().lines() {
            let event: serde_json::Value =
                serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            for field in ["timestamp", "level", "message", "target"] {
                assert!(event[field].is_string(), "{field}: {line}");
            }
        }
        let running =
            daemon.log().lines().find(|line| line.contains("\"running\"")).unwrap().to_owned();
        assert!(
            running.contains("\"backend\":\"vxlan\"") && running.contains("\"mtu\":1450"),
            "{running}"
        );
    });
}

#[test]
fn log_format_journald_sends_events_with_their_fields() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let path = place.dir.path().join("journal");
        let journal = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        journal.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let replace_the_journal = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && \
            ln -s \"$1\" /run/systemd/journal/socket && shift && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", replace_the_journal, "-"]).arg(&path);
        command.arg(env!("CARGO_BIN_EXE_flanneld")).args([
            "--log-format",
            "journald",
            "--iface=eth0",
        ]);
        command.arg(format!("--registry=dir:{}", place.registry().display()));
        command.arg("--subnet-file").arg(place.subnet_file());
        command.arg("--state-dir").arg(place.dir.path().join("state"));
        let mut daemon = Daemon::start(&mut command);
        let mut buffer = [0; 65536];
        loop {
            let len = journal
                .recv(&mut buffer)
                .unwrap_or_else(|error| panic!("{error}: {}", daemon.log()));
            let text = String::from_utf8_lossy(&buffer[..len]).into_owned();
            if text.is_empty() {
                // An empty message checks whether there is a journal.
                continue;
            }
            // A name, the length of the value, the value.
            let field = |name: &str| {
                let (_, rest) = text.split_once(&format!("{name}\n"))?;
                rest.get(8..)?.lines().next().map(str::to_owned)
            };
            assert_eq!(field("SYSLOG_IDENTIFIER").as_deref(), Some("flanneld"), "{text:?}");
            if field("MESSAGE").as_deref() == Some("running") {
                assert_eq!(field("FLANNEL_BACKEND").as_deref(), Some("vxlan"), "{text:?}");
                assert_eq!(field("PRIORITY").as_deref(), Some("6"), "info: {text:?}");
                break;
            }
        }
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
        assert_eq!(daemon.log(), "", "nothing on standard error");
    });
}

/// A line of `/proc/PID/status` of every thread.
fn capabilities(daemon: &Daemon, set: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.child.id())).unwrap();
    let line = |path: PathBuf| {
        // The thread may have ended.
        let text = fs::read_to_string(path.join("status")).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix(set)).map(|value| value.trim().to_owned())
    };
    let mut all: Vec<_> = threads.filter_map(|thread| line(thread.unwrap().path())).collect();
    all.dedup();
    all
}

/// `alloc` runs beside no other backend.
#[test]
fn a_backend_that_is_replaced_at_once_leaves_no_device() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let is_there = || Command::new("ip").args(["link", "show", "flannel.1"]).output().unwrap();
        assert!(is_there().status.success());
        let config = place.registry().join("config");
        let new = place.registry().join("config.new");
        fs::write(&new, CONFIG.replace("vxlan", "alloc")).unwrap();
        fs::rename(&new, &config).unwrap();
        wait_until(|| !is_there().status.success(), || daemon.log());
        daemon.wait_for_log("it is replaced at once");
        daemon.wait_for_log("the earlier backend vxlan");
    });
}

#[test]
fn no_lease_is_taken_by_a_daemon_that_cannot_make_its_network() {
    in_netns(|| {
        uplink();
        let hostgw = CONFIG.replace("vxlan", "host-gw");
        let nftables = CONFIG.replacen('{', r#"{"EnableNFTables":true,"#, 1);
        for (config, extra, says) in [
            (CONFIG, &[] as &[&str], "vxlan device: this process needs CAP_NET_ADMIN"),
            (&hostgw, &[], "routes: this process needs CAP_NET_ADMIN"),
            (&nftables, &["--ip-masq"], "grant CAP_NET_ADMIN"),
        ] {
            let place = Place::new(config);
            let able = place.command(&format!("dir:{}", place.registry().display()), extra);
            let mut command = Command::new("setpriv");
            command.args(["--bounding-set=-net_admin", "--inh-caps=-all"]);
            command.arg(able.get_program()).args(able.get_args());
            let mut daemon = Daemon::start(&mut command);
            assert_eq!(daemon.ended().code(), Some(1), "{}", daemon.log());
            daemon.wait_for_log(says);
            assert_eq!(fs::read_dir(place.leases()).unwrap().count(), 0, "{says}");
        }
    });
}

#[test]
fn the_daemon_keeps_only_the_capabilities_that_it_needs() {
    in_netns(|| {
        uplink();
        // CAP_NET_ADMIN and CAP_NET_RAW.
        const LEAST: &str = "0000000000003000";
        for nftables in [true, false] {
            let mode = format!(r#"{{"EnableNFTables":{nftables},"#);
            let place = Place::new(&CONFIG.replacen('{', &mode, 1));
            peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
            let mut daemon = place.start(&["--ip-masq"]);
            daemon.wait_for_log("in sync peers=1");
            daemon.wait_for_log("running lease");
            for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
                assert_eq!(capabilities(&daemon, set), [LEAST], "{set} {}", daemon.log());
            }
            let rules = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
            let rules = String::from_utf8(rules.stdout).unwrap();
            let ours = if nftables { "postrtg" } else { "FLANNEL-POSTRTG" };
            assert!(
                rules.contains(ours) && rules.contains("masquerade"),
                "{nftables}: {rules}\n{}",
                daemon.log()
            );
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().code(), Some(0));
        }
    });
}

/// With the default capabilities, the daemon may not read the open files of root's processes. Then
/// the name of the process is a guess.
#[test]
fn the_process_that_changed_a_route_is_logged() {
    in_netns(|| {
        for (options, sure) in [(&[][..], "probably "), (&["--capabilities=all"], "")] {
            Netns::new().unwrap().run(move || {
                uplink();
                let place = Place::new(CONFIG);
                peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
                let daemon = place.start(options);
                daemon.wait_for_log("in sync peers=1");
                // The port id of a process's first socket in a namespace is the id of the process.
                let other = NetlinkKernel::open().unwrap();
                let dst = "10.1.7.0/24".parse().unwrap();
                let theirs = Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into());
                assert!(other.apply(&Footprint::default(), &[theirs])[0].is_done());
                let name = fs::read_to_string("/proc/self/comm").unwrap();
                let process = format!("{} (process {})", name.trim_end(), std::process::id());
                daemon.wait_for_log(&format!(
                    "damage=changed by={sure}{process} with route protocol 241"
                ));
            });
        }
    });
}

#[test]
fn capabilities_for_the_options_are_kept_and_logged() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        for dir in [place.registry(), place.leases()] {
            std::os::unix::fs::chown(dir, Some(12_345), Some(12_345)).unwrap();
        }
        ip("link set lo up");
        let mut daemon = place.start(&["--healthz-ip=127.0.0.1", "--healthz-port=80"]);
        daemon.wait_for_log("running lease");
        daemon.wait_for_log("another user owns the path capability=CAP_DAC_OVERRIDE path=");
        // With CAP_DAC_OVERRIDE and CAP_NET_BIND_SERVICE.
        assert_eq!(capabilities(&daemon, "CapEff:"), ["0000000000003402"]);
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        let daemon = place.start(&["--capabilities=all"]);
        daemon.wait_for_log("running lease");
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let own =
            own.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim().to_owned();
        assert_eq!(capabilities(&daemon, "CapEff:"), [own]);
    });
}

#[test]
fn a_failure_to_drop_capabilities_does_not_stop_the_daemon() {
    in_netns(|| {
        uplink();
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let own =
            own.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim().to_owned();
        // An unknown capability, and a capability set that may not be changed.
        for (fault, dropped) in [
            ("inject=prctl:error=EINVAL:when=1", true),
            ("inject=capset:error=EPERM:when=3", false),
        ] {
            let place = Place::new(CONFIG);
            let mut command = Command::new("strace");
            command.args(["-D", "-qq", "-e", fault, "-o"]).arg(place.dir.path().join("trace"));
            command.arg(env!("CARGO_BIN_EXE_flanneld")).arg("--iface=eth0");
            command.arg(format!("--registry=dir:{}", place.registry().display()));
            command.arg("--subnet-file").arg(place.subnet_file());
            command.arg("--state-dir").arg(place.dir.path().join("state"));
            let daemon = Daemon::start(&mut command);
            daemon.wait_for_log("running lease");
            let left = if dropped { "0000000000003000".to_owned() } else { own.clone() };
            assert_eq!(capabilities(&daemon, "CapEff:"), [left], "{fault}: {}", daemon.log());
            let is_logged = daemon.log().contains("capabilities are not");
            assert_eq!(is_logged, !dropped, "{fault}: {}", daemon.log());
        }
    });
}

#[test]
fn the_systemd_unit_is_valid_and_hardened() {
    let dir = tempfile::tempdir().unwrap();
    let unit = include_str!("../../../deploy/systemd/flanneld.service");
    let installed = "ExecStart=/usr/local/bin/flanneld\n";
    assert!(unit.contains(installed));
    let path = dir.path().join("flanneld.service");
    let here = format!("ExecStart={}\n", env!("CARGO_BIN_EXE_flanneld"));
    fs::write(&path, unit.replace(installed, &here)).unwrap();
    let analyze = |args: &[&str]| {
        let output = Command::new("systemd-analyze").args(args).arg(&path).output();
        let output =
            output.expect("this test needs systemd-analyze (Debian: apt-get install systemd)");
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "systemd-analyze {args:?}: {text}");
    };
    // The pages are made by `cargo xtask assets` and need not be installed here.
    analyze(&["verify", "--man=no"]);
    // 0 is best and 100 worst. A unit without hardening has 96.
    analyze(&["security", "--no-pager", "--offline=true", "--threshold=30"]);
    // The needs of the process of udp, which no other test sees: they are not inherited limits.
    for line in ["KillMode=process", "DevicePolicy=closed", "DeviceAllow=/dev/net/tun rw"] {
        assert!(unit.contains(&format!("\n{line}\n")), "{line}");
    }
    assert!(!unit.contains("\nPrivateDevices=yes"), "it would hide /dev/net/tun");
    // The unit allows the capabilities that the daemon keeps.
    assert!(unit.contains("\nCapabilityBoundingSet=CAP_NET_ADMIN CAP_NET_RAW\n"));
}

#[test]
fn the_unit_allows_all_system_calls_of_the_daemon_and_iptables() {
    in_netns(|| {
        uplink();
        for (config, programs) in [
            (CONFIG.to_owned(), true),
            (CONFIG.replacen('{', r#"{"EnableNFTables":true,"#, 1), false),
        ] {
            let place = Place::new(&config);
            peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
            let trace = place.dir.path().join("trace");
            let mut command = calls::traced(&trace);
            command.args([
                "--iface=eth0",
                "--ip-masq",
                "--healthz-port=8471",
                "--ip-blackhole-route",
            ]);
            command.arg(format!("--registry=dir:{}", place.registry().display()));
            command.arg("--subnet-file").arg(place.subnet_file());
            command.arg("--state-dir").arg(place.dir.path().join("state"));
            let mut strace = Daemon::start(&mut command);
            strace.wait_for_log("running lease");
            strace.wait_for_log("in sync peers=1");
            ip("link del flannel.1");
            strace.wait_for_log("an object was repaired object=link flannel.1");
            if !programs {
                let gone = Command::new("nft").args(["flush", "ruleset"]).status().unwrap();
                assert!(gone.success());
                wait_until(
                    || place.request("/metrics").contains("\nflannel_firewall_repairs_total 1\n"),
                    || strace.log(),
                );
            }
            for signal in [Signal::SIGHUP, Signal::SIGTERM] {
                strace.signal(signal);
                strace.wait_for_log(signal.as_str());
            }
            assert_eq!(strace.ended().code(), Some(0), "{}", strace.log());
            assert!(!strace.log().contains("capabilities"), "{}", strace.log());
            let trace = calls::of_ended(&trace, strace.child.id());
            assert!(
                trace.contains("iptables-restore\"") || !programs,
                "the programs are traced too"
            );
            assert_eq!(calls::forbidden(&trace), [""; 0], "{config}");
        }
    });
}

#[test]
fn other_users_may_write_to_nothing_that_a_daemon_creates() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        fs::remove_dir(place.leases()).unwrap();
        let created = ["run", "state"].map(|dir| place.dir.path().join(dir));
        let command = place.command(&format!("dir:{}", place.registry().display()), &[]);
        let mut shell = Command::new("sh");
        shell.args(["-c", "umask 0 && exec \"$0\" \"$@\""]).arg(command.get_program());
        let daemon = Daemon::start(shell.args(command.get_args()));
        daemon.wait_for_log("in sync");
        place.subnet_env();
        let mut files = vec![place.leases()];
        files.extend(created);
        let mut seen = 0;
        while let Some(file) = files.pop() {
            // A temporary file may have been renamed meanwhile.
            let Ok(metadata) = fs::symlink_metadata(&file) else { continue };
            // A group may write to the control socket.
            let others = if metadata.file_type().is_socket() { 0o007 } else { 0o022 };
            let mode = metadata.mode() & 0o7777;
            assert_eq!(mode & others, 0, "{} has the mode {mode:o}", file.display());
            if metadata.is_dir() {
                files.extend(fs::read_dir(&file).unwrap().map(|entry| entry.unwrap().path()));
            }
            seen += 1;
        }
        assert!(seen > 8, "{seen} files, {}", daemon.log());
    });
}

#[test]
fn a_wrong_config_is_logged_once_and_retried() {
    in_netns(|| {
        uplink();
        let place = Place::new(r#"{"Network":"10.1.0.0/33"}"#);
        let daemon = place.start(&[]);
        daemon.wait_for_log("field Network: \"10.1.0.0/33\" is not valid");
        assert!(daemon.log().contains("network/config"), "the file is named: {}", daemon.log());
        fs::remove_file(place.registry().join("config")).unwrap();
        daemon.wait_for_log("holds no network config yet");
        fs::write(place.registry().join("config"), CONFIG).unwrap();
        daemon.wait_for_log("in sync");
        assert_eq!(daemon.log().matches("is not valid").count(), 1, "{}", daemon.log());
    });
}

#[test]
fn an_unknown_backend_and_an_implicit_udp_stop_the_daemon_with_a_hint() {
    in_netns(|| {
        uplink();
        let place = Place::new(
            r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
                "Backend":{"Type":"vlxan"}}"#,
        );
        let mut daemon = place.start(&[]);
        assert_eq!(daemon.ended().code(), Some(1));
        daemon.wait_for_log("\"vlxan\" is not a backend");
        daemon.wait_for_log("vxlan, host-gw, ipip, wireguard, udp, extension, alloc");

        let place = Place::new(
            r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0"}"#,
        );
        fs::write(place.leases().join("10.1.7.0-24"), r#"{"PublicIP":"192.0.2.7"}"#).unwrap();
        let mut daemon = place.start(&[]);
        assert_eq!(daemon.ended().code(), Some(1));
        daemon.wait_for_log("10.1.7.0-24 without a backend type");
        daemon.wait_for_log("write the backend into the config");
    });
}

#[test]
fn a_bad_lease_is_skipped_logged_once_and_used_when_corrected() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        fs::write(place.leases().join("10.1.8.0-24"), r#"{"PublicIP":"192.0.2.8""#).unwrap();
        fs::write(place.leases().join("notes.txt"), "hello").unwrap();
        peer(&place.leases(), "10.2.9.0-24", "192.0.2.9", "0a:00:00:00:00:09");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        daemon.wait_for_log("10.1.8.0-24");
        daemon.wait_for_log("10.2.9.0/24 lies outside the pod network 10.1.0.0/16");
        peer(&place.leases(), "10.1.8.0-24", "192.0.2.8", "0a:00:00:00:00:08");
        wait_until(|| ip("route show 10.1.8.0/24").contains("flannel.1"), || daemon.log());
    });
}

/// The nodes drop each other's packets.
#[test]
fn a_peer_with_another_vni_is_accepted_and_reported() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        peer(&place.leases(), "10.1.8.0-24", "192.0.2.8", "0a:00:00:00:00:08");
        let other = place.leases().join("10.1.8.0-24");
        let text = fs::read_to_string(&other).unwrap();
        fs::write(&other, text.replace(r#""VNI":1"#, r#""VNI":4096"#)).unwrap();
        let daemon = place.start(&[]);
        daemon.wait_for_log("running lease");
        let answer = |target: &str| {
            serde_json::from_str::<serde_json::Value>(&place.request(target)).unwrap()
        };
        let settled = || answer("/v1/peers")["peers"][1]["state"] == "in place";
        wait_until(settled, || daemon.log());
        let says = "it has the VNI 4096, and this node has 1: each drops the other's packets";
        let peers = answer("/v1/peers");
        assert_eq!(
            (&peers["peers"][0]["reason"], &peers["peers"][1]["reason"]),
            (&().into(), &says.into())
        );
        let why = answer("/v1/why?address=10.1.8.5");
        let verdict = why["verdict"].as_str().unwrap();
        assert!(why["ok"] == false && verdict.ends_with(says), "{why}");
        assert_eq!(answer("/v1/why?address=10.1.7.5")["ok"], true);
        let problems = answer("/v1/status")["problems"].to_string();
        assert!(problems.contains(&format!("the lease 10.1.8.0-24: {says}")), "{problems}");
    });
}

#[test]
fn an_assigned_lease_is_used_and_not_written() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.4.0-24", "192.0.2.1", "0a:00:00:00:00:01");
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let before = fs::read_to_string(place.leases().join("10.1.4.0-24")).unwrap();
        let registry = format!("dir:{}?assign=static", place.registry().display());
        let daemon = place.start_on(&registry, &[]);
        daemon.wait_for_log("in sync peers=1");
        assert!(
            ip("link show flannel.1").contains("0a:00:00:00:00:01"),
            "the MAC address is the written one"
        );
        assert_eq!(fs::read_to_string(place.leases().join("10.1.4.0-24")).unwrap(), before);
        let entries: Vec<_> =
            fs::read_dir(place.registry()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(entries.len(), 2, "nothing is written there: {entries:?}");
    });
}

#[test]
fn the_subnet_file_has_lines_for_every_family() {
    in_netns(|| {
        uplink();
        for (config, lines) in [
            (
                CONFIG,
                vec![
                    "FLANNEL_NETWORK=10.1.0.0/16",
                    "FLANNEL_SUBNET=10.1.",
                    "FLANNEL_MTU=1450",
                    "FLANNEL_IPMASQ=false",
                ],
            ),
            (
                r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/48",
                    "Backend":{"Type":"vxlan"}}"#,
                vec![
                    "FLANNEL_IPV6_NETWORK=fd00:1::/48",
                    "FLANNEL_IPV6_SUBNET=fd00:1:0:",
                    "FLANNEL_MTU=1430",
                    "FLANNEL_IPMASQ=false",
                ],
            ),
        ] {
            let place = Place::new(config);
            let daemon = place.start(&[]);
            daemon.wait_for_log("in sync");
            let text = place.subnet_env();
            assert_eq!(text.lines().count(), lines.len(), "{text}");
            for (line, start) in text.lines().zip(lines) {
                assert!(line.starts_with(start), "{text}");
            }
        }
    });
}

/// The route and the neigh of the peer, without values that change with time.
fn peer_objects() -> Vec<String> {
    ["route show 10.1.7.0/24", "neigh show 10.1.7.0 dev flannel.1"].map(ip).into()
}

/// The output of `ip monitor` up to a marker route, which comes after the events of all changes.
fn seen_by(mut monitor: Reader) -> String {
    ip("route add blackhole 198.18.0.1");
    let mut seen = String::new();
    loop {
        let line = monitor.line();
        if line.contains("198.18.0.1") {
            ip("route del blackhole 198.18.0.1");
            return seen;
        }
        seen += &line;
    }
}

/// The deletions of objects of live peers in the output of `ip monitor`: the lines with one of
/// these addresses, and the deletions of nexthop objects, because the kernel deletes their routes
/// without an event.
fn lost<'a>(seen: &'a str, live: &[&str]) -> Vec<&'a str> {
    let deleted = seen.lines().filter_map(|line| line.strip_prefix("Deleted "));
    deleted
        .filter(|line| line.starts_with("id ") || live.iter().any(|live| line.contains(live)))
        .collect()
}

#[test]
fn a_new_address_or_mtu_of_the_interface_is_applied_without_deletions() {
    in_netns(|| {
        uplink();
        ip("address add 192.0.2.8/24 dev eth0");
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let before = peer_objects();
        let lease = place.own_lease();
        let monitor =
            |objects: &[&str]| Reader::start(Command::new("ip").arg("monitor").args(objects));

        // The device gets the MAC address that names the new address, and with another MAC address
        // the kernel deletes its neighbours.
        let seen = monitor(&["route", "nexthop"]);
        ip("address del 192.0.2.1/24 dev eth0");
        // The kernel makes the next address of the subnet the first one, or removes it too.
        ip("address replace 192.0.2.8/24 dev eth0");
        daemon.wait_for_log("eth0 has the IPv4 address 192.0.2.8 now, not 192.0.2.1");
        wait_until(|| fs::read_to_string(&lease).unwrap().contains("192.0.2.8"), || daemon.log());
        wait_until(
            || ip("-d link show flannel.1").contains("local 192.0.2.8"),
            || ip("-d link show flannel.1"),
        );
        wait_until(|| peer_objects() == before, || daemon.log());
        let seen = seen_by(seen);
        assert_eq!(lost(&seen, &["10.1.7.0"]), [""; 0], "{seen}");

        let seen = monitor(&["route", "neigh", "nexthop"]);
        ip("link set eth0 mtu 1400");
        daemon.wait_for_log("eth0 has the MTU 1400 now, not 1500");
        let env = || place.subnet_env();
        wait_until(|| env().contains("FLANNEL_MTU=1350\n"), env);
        wait_until(|| ip("link show flannel.1").contains("mtu 1350"), || ip("link show flannel.1"));
        assert_eq!(place.own_lease(), lease);
        assert_eq!(peer_objects(), before);
        let seen = seen_by(seen);
        assert_eq!(lost(&seen, &["10.1.7.0"]), [""; 0], "{seen}");
    });
}

#[test]
fn firewall_rules_are_in_place_before_the_subnet_file_and_stay_after_a_stop() {
    in_netns(|| {
        uplink();
        let output = |command: &str| {
            let output = Command::new("sh").args(["-c", command]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let mut other_mode = "nft list ruleset";
        for (config, list) in [
            (CONFIG.to_owned(), "iptables-save"),
            (CONFIG.replacen('{', r#"{"EnableNFTables":true,"#, 1), "nft list ruleset"),
        ] {
            let place = Place::new(&config);
            let rules = || output(list);
            let mut daemon = place.start(&["--ip-masq"]);
            daemon.wait_for_log("running lease");
            let log = daemon.log();
            assert!(log.find("rules are in place") < log.find("running lease"), "{log}");
            let subnet = place.subnet_env();
            assert!(subnet.contains("FLANNEL_IPMASQ=true"), "{subnet}");
            assert!(rules().to_lowercase().contains("masquerade"), "{}", rules());
            let metrics = place.request("/metrics");
            assert!(metrics.contains("\nflannel_firewall_in_place 1\n"), "{metrics}");
            // The rules of the other mode are removed when the rules of this mode are in place.
            let left =
                |rules: &str| rules.contains("-A FLANNEL") || rules.contains("table ip flannel");
            wait_until(
                || !left(&output(other_mode)),
                || format!("{}\n{}", output(other_mode), daemon.log()),
            );
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().code(), Some(0));
            assert!(rules().to_lowercase().contains("masquerade"), "the rules stay");
            // Ports are chosen at random by default. A daemon with the option replaces such rules.
            assert!(rules().contains("random"), "{}", rules());
            let mut plain = place.start(&["--ip-masq", "--ip-masq-fully-random-disable"]);
            plain.wait_for_log("running lease");
            assert!(rules().to_lowercase().contains("masquerade"), "{}", rules());
            assert!(!rules().contains("random"), "{}{}", rules(), plain.log());
            plain.signal(Signal::SIGTERM);
            plain.ended();
            other_mode = list;
        }
    });
}

/// A config whose rules cannot be kept here does not fit this node.
#[test]
fn a_config_whose_firewall_rules_cannot_be_made_is_refused() {
    in_netns(|| {
        uplink();
        let nftables = CONFIG.replacen('{', r#"{"EnableNFTables":true,"#, 1);
        let place = Place::new(&nftables);
        let broken = place.dir.path().join("broken");
        fs::write(&broken, "").unwrap();
        let daemon = place.start_with_fragile_iptables(&broken, &["--ip-masq"]);
        daemon.wait_for_log("running lease");
        let status =
            || -> serde_json::Value { serde_json::from_str(&place.request("/v1/status")).unwrap() };
        let has_problem = |text: &str| status()["problems"].to_string().contains(text);
        let say = || format!("{}\n{}", status()["problems"], daemon.log());
        let tables = || Command::new("nft").args(["list", "tables"]).output().unwrap().stdout;
        let rules = || String::from_utf8(tables()).unwrap().contains("flannel-ipv4");
        fs::write(place.registry().join("config"), CONFIG).unwrap();
        wait_until(
            || has_problem("the last good one is still used") && has_problem("out of order"),
            say,
        );
        assert!(status()["ready"] == true && rules(), "{}", say());
        // It is not used either when the network must be rebuilt.
        ip("link set eth0 mtu 1400");
        wait_until(|| place.subnet_env().contains("FLANNEL_MTU=1350\n"), say);
        wait_until(|| has_problem("out of order") && status()["ready"] == true, say);
        assert!(rules(), "{}", say());
        // The node now fits.
        fs::remove_file(&broken).unwrap();
        daemon.signal(Signal::SIGHUP);
        wait_until(|| !has_problem("is still used") && status()["ready"] == true && !rules(), say);

        // A firewall that no longer works is retried by the next network, and the daemon goes on.
        fs::write(&broken, "").unwrap();
        ip("link set eth0 mtu 1380");
        daemon.wait_for_log("the firewall rules cannot be made, retrying");
        wait_until(
            || has_problem("the firewall rules are not in place") && status()["ready"] == false,
            say,
        );
        fs::remove_file(&broken).unwrap();
        wait_until(|| status()["ready"] == true, say);
    });
}

#[test]
fn a_removed_subnet_file_is_written_again() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        // Of a daemon that was killed.
        let left = place.subnet_file().with_file_name(".flannel-tmp-subnet.env-0123456789abcdef");
        fs::create_dir_all(left.parent().unwrap()).unwrap();
        fs::write(&left, "FLANNEL_").unwrap();
        let daemon = place.start(&[]);
        daemon.wait_for_log("running lease");
        let before = place.subnet_env();
        assert!(!left.exists());
        fs::remove_file(place.subnet_file()).unwrap();
        daemon.wait_for_log("another program removed the file, restoring it");
        assert_eq!(place.subnet_env(), before);
    });
}

/// A pod keeps its address for life. The device cannot come up, so the new file comes late.
#[test]
fn a_subnet_file_of_another_subnet_is_removed_before_the_network_is_in_place() {
    in_netns(|| {
        uplink();
        ip("link add other type vxlan id 9 gbp dstport 8472 dev eth0");
        ip("link set other up");
        let place = Place::new(CONFIG);
        let file = place.subnet_file();
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let stale = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.7.1/24\nFLANNEL_MTU=1450\n\
                     FLANNEL_IPMASQ=false\n";
        fs::write(&file, stale).unwrap();
        let text = || fs::read_to_string(&file).unwrap_or_default();
        let removed = "the subnet file has other subnets or networks than this node, it is removed";
        let daemon = place.start(&[]);
        wait_until(|| text() != stale, || daemon.log());
        daemon.wait_for_log(removed);
        assert!(!daemon.log().contains("running lease"), "{}", daemon.log());
        ip("link delete other");
        daemon.wait_for_log("running lease");
        let first = place.subnet_env();
        drop(daemon);
        // A file of the same subnet stays, also if other values have changed.
        fs::write(&file, first.replace("MTU=1450", "MTU=1400")).unwrap();
        let daemon = place.start(&[]);
        daemon.wait_for_log("running lease");
        assert!(!daemon.log().contains(removed), "{}", daemon.log());
        assert_eq!(place.subnet_env(), first);
    });
}

/// The node waits for a free subnet of another pod network.
#[test]
fn a_subnet_file_of_another_network_is_removed_while_no_lease_can_be_had() {
    in_netns(|| {
        uplink();
        let one = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.128.0",
            "Backend":{"Type":"vxlan"}}"#;
        let place = Place::new(one);
        peer(&place.leases(), "10.1.128.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let file = place.subnet_file();
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        let stale = "FLANNEL_NETWORK=10.9.0.0/16\nFLANNEL_SUBNET=10.9.7.1/24\nFLANNEL_MTU=1450\n\
                     FLANNEL_IPMASQ=false\n";
        fs::write(&file, stale).unwrap();
        let daemon = place.start(&[]);
        daemon.wait_for_log("waiting reason");
        wait_until(|| !file.exists(), || daemon.log());
    });
}

#[test]
fn forward_rules_are_made_when_iptables_appears() {
    in_netns(|| {
        uplink();
        for (args, ready) in [(&[] as &[&str], true), (&["--iptables-forward-rules"], false)] {
            let place = Place::new(CONFIG);
            let broken = place.dir.path().join("broken");
            fs::write(&broken, "").unwrap();
            let mut daemon = place.start_with_fragile_iptables(&broken, args);
            daemon.wait_for_log("running lease");
            let status = || -> serde_json::Value {
                serde_json::from_str(&place.request("/v1/status")).unwrap()
            };
            let say = || format!("{}\n{}", status()["problems"], daemon.log());
            let in_place = |word: &str| {
                place.request("/metrics").contains(&format!("firewall_in_place {word}\n"))
            };
            wait_until(|| status()["problems"].to_string().contains("out of order"), say);
            // Default rules are not required.
            wait_until(|| status()["ready"] == ready, say);
            assert!(in_place("0"), "{}", say());
            fs::remove_file(&broken).unwrap();
            wait_until(|| in_place("1") && status()["ready"] == true, say);
            let rules =
                String::from_utf8(Command::new("iptables-save").output().unwrap().stdout).unwrap();
            assert!(rules.contains("-A FORWARD") && rules.contains("-j FLANNEL-FWD"), "{rules}");
            daemon.signal(Signal::SIGTERM);
            daemon.ended();
        }
    });
}

#[test]
fn rules_of_an_earlier_run_are_removed_before_the_subnet_file_if_none_are_requested() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let rules =
            || String::from_utf8(Command::new("iptables-save").output().unwrap().stdout).unwrap();
        let mut daemon = place.start(&["--ip-masq"]);
        daemon.wait_for_log("running lease");
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        assert!(rules().contains("-j MASQUERADE"), "{}", rules());
        let daemon = place.start(&["--ip-masq=false", "--iptables-forward-rules=false"]);
        daemon.wait_for_log("running lease");
        assert!(!rules().contains("FLANNEL"), "{}{}", rules(), daemon.log());
        assert!(daemon.log().contains("removed a rule of an earlier run"), "{}", daemon.log());
        let metrics = place.request("/metrics");
        assert!(metrics.contains("\nflannel_firewall_in_place 1\n"), "{metrics}");
    });
}

const DUAL: &str = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
    "EnableIPv6":true,"IPv6Network":"fd00:1::/48","Backend":{"Type":"KIND"}}"#;

/// A dual-stack peer on the link, for either backend.
fn dual_peer(place: &Place, kind: &str, peer: u8) {
    let key = format!("10.1.{peer}.0-24&fd00:1:0:{peer:x}::-64");
    peer_at(place, kind, peer, &key, ["192.0.2.", "2001:db8::"]);
}

/// A peer in any network, with any key of its lease.
fn peer_at(place: &Place, kind: &str, peer: u8, key: &str, [net, net_v6]: [&str; 2]) {
    let data = |family| format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:{family:02}:{peer:02x}"}}"#);
    let data = if kind == "vxlan" { [data(4), data(6)] } else { ["null".into(), "null".into()] };
    let value = format!(
        r#"{{"PublicIP":"{net}{peer}","PublicIPv6":"{net_v6}{peer:x}","BackendType":"{kind}",
            "BackendData":{},"BackendV6Data":{}}}"#,
        data[0], data[1]
    );
    fs::write(place.leases().join(key), value).unwrap();
}

/// All objects of the peers of both families, and the tunnels, without indexes and values that
/// change with time.
fn data_path() -> Vec<String> {
    let tunnels = ip("-o link show type vxlan");
    let mut seen =
        vec![ip("-4 route show proto 241"), ip("-6 route show proto 241"), ip("nexthop show")];
    for tunnel in ["flannel.1", "flannel-v6.1"].iter().filter(|name| tunnels.contains(*name)) {
        let details = ip(&format!("-d -o link show {tunnel}"));
        seen.push(details.split_once(tunnel).unwrap().1.to_owned());
        seen.push(ip(&format!("neigh show dev {tunnel} nud permanent")));
        seen.push(bridge(&format!("fdb show dev {tunnel}")));
        seen.push(
            ip(&format!("-o address show dev {tunnel} scope global"))
                .split_once(": ")
                .unwrap()
                .1
                .into(),
        );
    }
    // The kernel lists some tables in the order of a hash that depends on the device.
    let mut lines: Vec<_> =
        seen.iter().flat_map(|text| text.lines()).map(|line| line.trim().to_owned()).collect();
    lines.sort();
    lines
}

/// Changes of the interface, in order. The last one leads back to the first state.
fn mishaps() -> [(&'static str, Vec<&'static str>); 3] {
    // With duplicate address detection, as by default.
    let addresses = ["address add 192.0.2.1/24 dev eth0", "address add 2001:db8::1/64 dev eth0"];
    let made = ["link add eth0 type veth peer name wire", "link set wire up"];
    let way_out = "route add default via 192.0.2.254";
    [
        ("down and up", vec!["link set eth0 down", "link set eth0 up", addresses[1], way_out]),
        ("without cable", vec!["link set wire down", "link set wire up"]),
        (
            "another device",
            [&["link del eth0"], &made[..], &addresses[..], &["link set eth0 up", way_out]]
                .concat(),
        ),
    ]
}

/// A backend config.
struct Way {
    backend: &'static str,
    v4: bool,
    args: &'static [&'static str],
}

const WAYS: [Way; 7] = [
    Way { backend: "\"vxlan\"", v4: true, args: &[] },
    Way { backend: "\"vxlan\"", v4: true, args: &["--nexthop-objects=off"] },
    Way { backend: "\"vxlan\"", v4: false, args: &[] },
    // One peer is on the link.
    Way { backend: "\"vxlan\",\"DirectRouting\":true", v4: true, args: &[] },
    Way { backend: "\"host-gw\"", v4: true, args: &[] },
    Way { backend: "\"host-gw\"", v4: true, args: &["--nexthop-objects=off"] },
    Way { backend: "\"host-gw\"", v4: false, args: &[] },
];

#[test]
fn the_data_path_is_restored_after_the_interface_went_down_or_was_recreated() {
    in_netns(|| {
        for Way { backend, v4, args } in WAYS {
            Netns::new().unwrap().run(move || {
                uplink();
                ip("route add default via 192.0.2.254");
                let config = DUAL.replace("\"KIND\"", backend);
                let place = Place::new(&if v4 {
                    config
                } else {
                    config.replacen('{', "{\"EnableIPv4\":false,", 1)
                });
                let kind = backend.split('"').nth(1).unwrap();
                let direct = backend.contains("DirectRouting");
                for (peer, far) in [(7, false), (8, direct)] {
                    let key = format!(
                        "{}&fd00:1:0:{peer}::-64",
                        if v4 { format!("10.1.{peer}.0-24") } else { "0.0.0.0-0".into() }
                    );
                    let nets = if far {
                        ["198.51.100.", "2001:db8:7::"]
                    } else {
                        ["192.0.2.", "2001:db8::"]
                    };
                    peer_at(&place, kind, peer, &key, nets);
                }
                let daemon = place.start(args);
                daemon.wait_for_log("in sync peers=2");
                let before = data_path();
                let env = place.subnet_env();
                let families = if v4 { 2 } else { 1 };
                let routes = |dev: &str| {
                    let there = before
                        .iter()
                        .filter(|line| line.contains(" via ") && !line.starts_with("id "));
                    there.filter(|line| line.contains(dev)).count()
                };
                let tunnelled = match (kind, direct) {
                    ("vxlan", false) => 2,
                    ("vxlan", true) => 1,
                    _ => 0,
                };
                assert_eq!(routes("dev flannel"), families * tunnelled, "{before:#?}");
                assert_eq!(routes("dev eth0"), families * (2 - tunnelled), "{before:#?}");
                let nexthops = before.iter().filter(|line| line.starts_with("id ")).count();
                assert_eq!(nexthops, if v4 && args.is_empty() { 2 } else { 0 }, "{before:#?}");
                for (mishap, commands) in mishaps() {
                    let old = ip("-o link show eth0");
                    commands.iter().for_each(|command| drop(ip(command)));
                    wait_until(
                        || data_path() == before,
                        || {
                            format!(
                                "{backend} {v4} {args:?}, {mishap}: {:#?}, not {before:#?}\n{}",
                                data_path(),
                                daemon.log()
                            )
                        },
                    );
                    let new = ip("-o link show eth0");
                    let number = |line: &str| line.split(':').next().unwrap().to_owned();
                    assert_eq!(
                        number(&old) != number(&new),
                        mishap == "another device",
                        "{old} {new}"
                    );
                }
                assert_eq!(fs::read_to_string(place.subnet_file()).unwrap(), env);
                assert_eq!(
                    fs::read_dir(place.leases()).unwrap().count(),
                    3,
                    "its own and two peers'"
                );
            });
        }
    });
}

/// An IPv6 address is not usable during duplicate address detection, so it must not be published.
#[test]
fn a_new_ipv6_address_is_applied_after_address_detection_without_deletions() {
    in_netns(|| {
        for backend in ["\"vxlan\"", "\"vxlan\",\"DirectRouting\":true", "\"host-gw\""] {
            Netns::new().unwrap().run(move || {
                uplink();
                let config =
                    DUAL.replace("\"KIND\"", backend).replacen('{', "{\"EnableIPv4\":false,", 1);
                let place = Place::new(&config);
                let kind = backend.split('"').nth(1).unwrap();
                let peer = "0.0.0.0-0&fd00:1:0:7::-64";
                peer_at(&place, kind, 7, peer, ["192.0.2.", "2001:db8::"]);
                let daemon = place.start(&[]);
                daemon.wait_for_log("in sync peers=1");
                place.subnet_env();
                let files =
                    || fs::read_dir(place.leases()).unwrap().map(|file| file.unwrap().path());
                let own = files().find(|path| !path.ends_with(peer)).unwrap();
                let lease = || fs::read_to_string(&own).unwrap();
                assert!(lease().contains("\"2001:db8::1\""), "{}", lease());
                let tunnels = || ip("-d link show type vxlan");
                let before = ip("-6 route show fd00:1:0:7::/64");
                let monitor = Reader::start(Command::new("ip").args(["monitor", "route", "neigh"]));

                ip("address add 2001:db8::8/64 dev eth0");
                ip("address del 2001:db8::1/64 dev eth0");
                assert!(
                    ip("-6 address show dev eth0 tentative").contains("2001:db8::8"),
                    "duplicate address detection runs"
                );
                wait_until(|| lease().contains("\"2001:db8::8\""), || lease() + &daemon.log());
                let tentative = ip("-6 address show dev eth0 tentative");
                assert!(!tentative.contains("2001:db8::8"), "{tentative}");
                let tunnelled = kind == "vxlan";
                wait_until(|| !tunnelled || tunnels().contains("local 2001:db8::8 "), tunnels);

                ip("link set eth0 mtu 1400");
                let mtu = if tunnelled { 1330 } else { 1400 };
                let env = || place.subnet_env();
                wait_until(
                    || env().contains(&format!("FLANNEL_MTU={mtu}\n")),
                    || env() + &daemon.log(),
                );
                wait_until(|| !tunnelled || tunnels().contains(&format!("mtu {mtu} ")), tunnels);
                assert_eq!(files().count(), 2, "the lease is the same");
                assert_eq!(ip("-6 route show fd00:1:0:7::/64"), before);
                let seen = seen_by(monitor);
                assert_eq!(lost(&seen, &["fd00:1:0:7:"]), [""; 0], "{seen}");
            });
        }
    });
}

#[test]
fn a_too_small_mtu_is_refused_and_a_larger_one_is_applied() {
    in_netns(|| {
        uplink();
        let place = Place::new(&DUAL.replace("KIND", "vxlan"));
        dual_peer(&place, "vxlan", 7);
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let before = data_path();
        ip("link set eth0 mtu 1300");
        daemon.wait_for_log("the interface's MTU 1300 is too small for IPv6: at least 1350");
        assert_eq!(data_path(), before, "the data path stays");
        ip("link set eth0 mtu 1400");
        let env = || place.subnet_env();
        wait_until(|| env().contains("FLANNEL_MTU=1330\n"), || env() + &daemon.log());
        ip("link set eth0 mtu 1500");
        wait_until(|| data_path() == before, || format!("{:#?}\n{}", data_path(), daemon.log()));
        wait_until(|| env().contains("FLANNEL_MTU=1430\n"), || env() + &daemon.log());
    });
}

/// An obstacle on the interface: its message, the commands that cause it, and those that end it.
struct Unfit {
    backend: &'static str,
    args: &'static [&'static str],
    spoil: &'static [&'static str],
    why: &'static str,
    restore: &'static str,
}

const UNFIT: [Unfit; 4] = [
    Unfit {
        backend: "\"vxlan\"",
        args: &[],
        spoil: &["-6 address del 2001:db8::1/64 dev eth0"],
        why: "eth0 has only the link-local IPv6 address fe80:",
        restore: "-6 address add 2001:db8::1/64 dev eth0 nodad",
    },
    Unfit {
        backend: "\"vxlan\"",
        args: &[],
        spoil: &["link set eth0 mtu 1300"],
        why: "the interface's MTU 1300 is too small for IPv6: at least 1350",
        restore: "link set eth0 mtu 1500",
    },
    Unfit {
        backend: "\"vxlan\"",
        args: &[],
        spoil: &["address add 192.0.2.250/32 dev eth0", "address del 192.0.2.1/24 dev eth0"],
        why: "eth0 has only the IPv4 address 192.0.2.250 now, which may move to another host",
        restore: "address add 192.0.2.1/24 dev eth0",
    },
    Unfit {
        backend: "\"host-gw\"",
        args: &["--public-ip=192.0.2.1"],
        spoil: &["address add 192.0.2.5/25 dev eth0", "address del 192.0.2.1/24 dev eth0"],
        why: "the public address 192.0.2.1 is not the address of eth0 (192.0.2.5)",
        restore: "address add 192.0.2.1/24 dev eth0",
    },
];

/// A network is not stopped for an interface with which none can be built.
#[test]
fn with_an_unfit_interface_leases_are_followed_and_damage_is_repaired() {
    for Unfit { backend, args, spoil, why, restore } in UNFIT {
        in_netns(move || {
            uplink();
            let kind = backend.split('"').nth(1).unwrap();
            let place = Place::new(&DUAL.replace("\"KIND\"", backend));
            dual_peer(&place, kind, 7);
            let daemon = place.start(args);
            daemon.wait_for_log("in sync peers=1");
            let env = place.subnet_env();
            let link_local = || ip("-6 address show dev eth0 scope link -tentative");
            wait_until(|| link_local().contains("fe80:"), link_local);

            spoil.iter().for_each(|command| drop(ip(command)));
            let status = || -> serde_json::Value {
                serde_json::from_str(&place.request("/v1/status")).unwrap()
            };
            let has_problem = |text: &str| status()["problems"].to_string().contains(text);
            let say =
                || format!("{why}: {}\n{:#?}\n{}", status()["problems"], data_path(), daemon.log());
            wait_until(|| has_problem(why), say);
            dual_peer(&place, kind, 8);
            ip("route del 10.1.7.0/24");
            for dst in ["10.1.7.0/24", "10.1.8.0/24", "fd00:1:0:7::/64", "fd00:1:0:8::/64"] {
                let family = if dst.contains(':') { "-6" } else { "-4" };
                wait_until(|| !ip(&format!("{family} route show {dst}")).is_empty(), say);
            }
            assert_eq!(daemon.log().matches(why).count(), 1, "{}", say());

            ip(restore);
            wait_until(|| !has_problem("external interface"), say);
            fs::remove_file(place.leases().join("10.1.8.0-24&fd00:1:0:8::-64")).unwrap();
            wait_until(|| ip("route show 10.1.8.0/24").is_empty(), say);
            assert!(!daemon.log().contains("rebuilding the network"), "{}", say());
            assert_eq!(place.subnet_env(), env);
        });
    }
}

/// Hosts assign themselves such addresses without DHCP.
#[test]
fn an_ipv4_link_local_address_is_published_only_before_any_other_address() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        ip("address add 169.254.3.4/16 dev eth0");
        ip("address del 192.0.2.1/24 dev eth0");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        let lease = place.own_lease();
        let published = || fs::read_to_string(&lease).unwrap();
        assert!(published().contains("169.254.3.4"), "as Go flannel does: {}", published());
        let until = |address: &str| {
            wait_until(|| published().contains(address), || published() + &daemon.log());
        };
        ip("address add 192.0.2.1/24 dev eth0");
        until("192.0.2.1");

        ip("address del 192.0.2.1/24 dev eth0");
        daemon.wait_for_log(
            "the network stays as it is link=eth0 reason=eth0 has only the link-local IPv4 address \
             169.254.3.4 now",
        );
        assert!(published().contains("192.0.2.1"), "{}", published());
        // It is not used either when another change requires a rebuild.
        let other = CONFIG.replace("\"vxlan\"", "\"vxlan\",\"MTU\":1400");
        fs::write(place.registry().join("config"), other).unwrap();
        daemon
            .wait_for_log("cannot be used and is ignored error=external interface eth0: eth0 has");
        assert!(published().contains("192.0.2.1"), "{}", published());
        ip("address add 192.0.2.9/24 dev eth0");
        until("192.0.2.9");
        assert_eq!(daemon.log().matches("rebuilding the network").count(), 2, "{}", daemon.log());
    });
}

#[test]
fn an_unusable_config_does_not_block_a_rebuild_and_is_reported_until_corrected() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        peer(&place.leases(), "10.1.7.0-24", "192.0.2.7", "0a:00:00:00:00:07");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let env = || place.subnet_env();
        let problems = || {
            let status: serde_json::Value =
                serde_json::from_str(&place.request("/v1/status")).unwrap();
            status["problems"].to_string()
        };
        let has_problem = |text: &str| {
            problems().contains("the last good one is still used") && problems().contains(text)
        };
        let unknown = CONFIG.replace("vxlan", "vlxan");
        for (config, why, mtu) in [
            (unknown.as_str(), "is not a backend of this build", 1400),
            (r#"{"Network":"10."#, "network/config", 1420),
        ] {
            fs::write(place.registry().join("config"), config).unwrap();
            wait_until(|| has_problem(why), || problems() + &daemon.log());
            ip(&format!("link set eth0 mtu {mtu}"));
            let written = format!("FLANNEL_MTU={}\n", mtu - 50);
            wait_until(|| env().contains(&written), || env() + &daemon.log());
            wait_until(|| has_problem(why), || problems() + &daemon.log());
        }
        fs::write(place.registry().join("config"), CONFIG).unwrap();
        wait_until(|| !has_problem(""), || problems() + &daemon.log());
    });
}

/// Pods of other nodes send packets to the address in the lease.
#[test]
fn the_address_of_the_last_lease_is_kept_over_a_restart() {
    in_netns(|| {
        uplink();
        let place = Place::new(CONFIG);
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        let lease = place.own_lease();
        let published = || fs::read_to_string(&lease).unwrap();
        assert!(published().contains("192.0.2.1\""), "{}", published());
        daemon.signal(Signal::SIGTERM);
        drop(daemon);
        // After a carrier loss the addresses come back in another order, with a virtual one.
        ip("address flush dev eth0 scope global");
        for address in ["192.0.2.250/32", "10.0.0.9/8", "192.0.2.1/24"] {
            ip(&format!("address add {address} dev eth0"));
        }
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        assert!(published().contains("192.0.2.1\""), "{}", published());
        drop(daemon);
        // Without that address, it takes another one of its own.
        ip("address del 192.0.2.1/24 dev eth0");
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync");
        assert!(published().contains("10.0.0.9"), "{}", published());
    });
}

/// A network is not stopped for a config from which none can be built here.
#[test]
fn a_config_that_does_not_fit_the_node_is_refused_until_either_changes() {
    in_netns(|| {
        uplink();
        let right = DUAL.replace("KIND", "vxlan");
        let with = |mtu: u32| DUAL.replace("\"KIND\"", &format!("\"vxlan\",\"MTU\":{mtu}"));
        let place = Place::new(&right);
        dual_peer(&place, "vxlan", 7);
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let before = data_path();
        let env = place.subnet_env();
        let status =
            || -> serde_json::Value { serde_json::from_str(&place.request("/v1/status")).unwrap() };
        let has_problem = |text: &str| status()["problems"].to_string().contains(text);
        let say = || format!("{}\n{}", status()["problems"], daemon.log());
        let peerless = place.leases().join("10.1.0.0-24");
        for (config, why) in [
            (with(1300), "Backend.MTU 1300 is too small for IPv6: at least 1350"),
            (DUAL.replace(r#","Backend":{"Type":"KIND"}"#, ""), "it names no Backend"),
        ] {
            // Go flannel's udp, for the last config.
            fs::write(
                &peerless,
                r#"{"PublicIP":"192.0.2.66","BackendType":"","BackendData":null}"#,
            )
            .unwrap();
            wait_until(|| has_problem("10.1.0.0-24 is rejected"), say);
            fs::write(place.registry().join("config"), &config).unwrap();
            wait_until(|| has_problem("the last good one is still used") && has_problem(why), say);
            assert_eq!(status()["ready"], true, "{}", say());
            assert_eq!((data_path(), place.subnet_env()), (before.clone(), env.clone()), "{why}");
            fs::write(place.registry().join("config"), &right).unwrap();
            wait_until(|| !has_problem("is still used"), say);
        }
        fs::remove_file(&peerless).unwrap();
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());

        // The obstacle ends, which neither the config nor a link shows.
        fs::write(&peerless, r#"{"PublicIP":"192.0.2.66","BackendType":"","BackendData":null}"#)
            .unwrap();
        wait_until(|| has_problem("10.1.0.0-24 is rejected"), say);
        fs::write(
            place.registry().join("config"),
            DUAL.replace(r#","Backend":{"Type":"KIND"}"#, ""),
        )
        .unwrap();
        wait_until(|| has_problem("it names no Backend"), say);
        fs::remove_file(&peerless).unwrap();
        daemon.wait_for_log("rebuilding the network reason=the network config has changed");
        wait_until(|| !has_problem("is still used"), say);

        // The interface carries less than the config says, and then as much.
        fs::write(place.registry().join("config"), with(8000)).unwrap();
        wait_until(|| has_problem("Backend.MTU 8000, but eth0 carries only 1500"), say);
        wait_until(|| status()["ready"] == true, say);
        assert!(place.subnet_env().contains("FLANNEL_MTU=1430\n"), "{}", say());
        ip("link set wire mtu 9000");
        ip("link set eth0 mtu 9000");
        wait_until(|| place.subnet_env().contains("FLANNEL_MTU=7930\n"), say);
        wait_until(|| !has_problem("Backend.MTU"), say);
    });
}

/// No field of an unusable config is used together with the last one, also with other networks.
#[test]
fn the_last_config_is_used_with_its_own_networks() {
    in_netns(|| {
        uplink();
        let right = CONFIG.replace("vxlan", "host-gw");
        let unknown = right.replace("host-gw", "host-gx");
        let place = Place::new(&right);
        let lease = |key: &str| {
            fs::write(
                place.leases().join(key),
                r#"{"PublicIP":"192.0.2.1","BackendType":"host-gw"}"#,
            )
            .unwrap();
        };
        lease("10.1.5.0-24");
        let registry = format!("dir:{}?assign=static", place.registry().display());
        let daemon = place.start_on(&registry, &[]);
        daemon.wait_for_log("running lease=10.1.5.0-24");
        let config = |text: &str| fs::write(place.registry().join("config"), text).unwrap();
        let wait_for = |env: &str| {
            wait_until(|| place.subnet_env().contains(env), || daemon.log());
        };
        config(&unknown);
        ip("link set eth0 mtu 1400");
        wait_for("FLANNEL_MTU=1400\n");
        config(&unknown.replace("10.1", "10.2"));
        ip("link set eth0 mtu 1420");
        wait_for("FLANNEL_MTU=1420\n");
        assert!(place.subnet_env().contains("FLANNEL_NETWORK=10.1.0.0/16\n"), "{}", daemon.log());
    });
}

#[test]
fn a_deleted_lease_stops_the_daemon_while_the_interface_does_not_fit() {
    in_netns(|| {
        uplink();
        let place = Place::new(&DUAL.replace("KIND", "vxlan"));
        dual_peer(&place, "vxlan", 7);
        let mut daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        place.subnet_env();
        ip("link set eth0 mtu 1300");
        daemon.wait_for_log("the interface's MTU 1300 is too small for IPv6: at least 1350");
        // The holder of a lease learns that it is revoked.
        let mut leases = fs::read_dir(place.leases()).unwrap().map(|entry| entry.unwrap().path());
        fs::remove_file(leases.find(|path| !path.to_str().unwrap().contains("10.1.7.0")).unwrap())
            .unwrap();
        assert_eq!(daemon.ended().code(), Some(1), "{}", daemon.log());
        daemon.wait_for_log("is lost");
    });
}

/// Go flannel's `subnet.env` and routes, with an uplink that has room for peers.
fn after_go_flannel(place: &Place) {
    fs::create_dir_all(place.subnet_file().parent().unwrap()).unwrap();
    fs::write(place.subnet_file(), "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.1.1/24\n")
        .unwrap();
    for (peer, by) in [(7, 7), (8, 99), (66, 66)] {
        ip(&format!("route add 10.1.{peer}.0/24 via 192.0.2.{by} dev eth0"));
        ip(&format!(
            "-6 route add fd00:1:0:{peer:x}::/64 via 2001:db8::{by:x} dev eth0 proto boot"
        ));
    }
    // Go flannel would not have made these routes here.
    for foreign in FOREIGN {
        ip(&format!("route add {foreign}"));
    }
}

const FOREIGN: [&str; 7] = [
    "10.1.70.0/24 via 192.0.2.70 dev eth0 proto static",
    "10.1.71.0/25 via 192.0.2.71 dev eth0 proto boot",
    "10.1.72.0/24 dev eth0 proto boot scope link",
    "10.1.73.0/24 via 192.0.2.73 dev eth0 proto boot metric 7",
    "10.9.74.0/24 via 192.0.2.74 dev eth0 proto boot",
    "10.1.75.0/24 via 192.0.3.75 dev eth1 proto boot",
    "fd00:1:0:4c::/64 via 2001:db8::4c dev eth0 proto static",
];

/// The number of families in which the stale route to `10.1.66.0/24` exists.
fn stale() -> usize {
    ["-4 route show 10.1.66.0/24", "-6 route show fd00:1:0:42::/64"]
        .iter()
        .filter(|show| !ip(show).trim().is_empty())
        .count()
}

fn second_uplink() {
    ip("link add eth1 type veth peer name wire1");
    ip("link set wire1 up");
    ip("address add 192.0.3.1/24 dev eth1");
    ip("link set eth1 up");
}

/// With DirectRouting, the daemon looks up on-link peers again after changes of routes.
#[test]
fn direct_routing_follows_changed_prefixes_without_deletions() {
    in_netns(|| {
        uplink();
        second_uplink();
        let place = Place::new(&DUAL.replace("\"KIND\"", "\"vxlan\",\"DirectRouting\":true"));
        let [data, data_v6] =
            [4, 6].map(|n| format!(r#"{{"VNI":1,"VtepMAC":"0a:00:00:00:0{n}:07"}}"#));
        let value = format!(
            r#"{{"PublicIP":"198.51.100.7","PublicIPv6":"2001:db8:7::7","BackendType":"vxlan",
                "BackendData":{data},"BackendV6Data":{data_v6}}}"#
        );
        fs::write(place.leases().join("10.1.7.0-24&fd00:1:0:7::-64"), value).unwrap();
        let daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        let before = data_path();
        let tunnel = ["via 10.1.7.0 dev flannel.1", "via fd00:1:0:7:: dev flannel-v6.1"];
        let link = ["via 198.51.100.7 dev eth0", "via 2001:db8:7::7 dev eth0"];
        let routes = || ["-4 route show 10.1.7.0/24", "-6 route show fd00:1:0:7::/64"].map(ip);
        let goes =
            |ways: [&str; 2]| routes().iter().zip(ways).all(|(route, way)| route.contains(way));
        assert!(goes(tunnel), "{:?}", routes());

        let monitor = Reader::start(Command::new("ip").args(["monitor", "route", "nexthop"]));
        for (step, commands, ways) in [
            (
                "onto the link",
                [
                    "address add 198.51.100.1/24 dev eth0",
                    "address add 2001:db8:7::1/64 dev eth0 nodad",
                ],
                link,
            ),
            (
                "behind another",
                [
                    "address add 198.51.100.6/31 dev eth1",
                    "address add 2001:db8:7::6/127 dev eth1 nodad",
                ],
                tunnel,
            ),
            (
                "onto the link again",
                ["address del 198.51.100.6/31 dev eth1", "address del 2001:db8:7::6/127 dev eth1"],
                link,
            ),
            (
                "off the link",
                ["address del 198.51.100.1/24 dev eth0", "address del 2001:db8:7::1/64 dev eth0"],
                tunnel,
            ),
            // The next steps do not change the main table.
            (
                "by a rule that leads nowhere yet",
                ["rule add to 198.51.100.0/24 table 70", "-6 rule add to 2001:db8:7::/64 table 70"],
                tunnel,
            ),
            (
                "onto the link by that table",
                [
                    "route add 198.51.100.0/24 dev eth0 table 70",
                    "-6 route add 2001:db8:7::/64 dev eth0 table 70",
                ],
                link,
            ),
            (
                "without the rule",
                ["rule del to 198.51.100.0/24 table 70", "-6 rule del to 2001:db8:7::/64 table 70"],
                tunnel,
            ),
            (
                "with the rule",
                ["rule add to 198.51.100.0/24 table 70", "-6 rule add to 2001:db8:7::/64 table 70"],
                link,
            ),
            (
                "without that table",
                ["route del 198.51.100.0/24 table 70", "-6 route del 2001:db8:7::/64 table 70"],
                tunnel,
            ),
        ] {
            commands.iter().for_each(|command| drop(ip(command)));
            wait_until(|| goes(ways), || format!("{step}: {:?}\n{}", routes(), daemon.log()));
        }
        wait_until(|| data_path() == before, || format!("{:#?}, not {before:#?}", data_path()));
        let seen = seen_by(monitor);
        let ours = ["10.1.7.0/24", "fd00:1:0:7::/64"];
        assert_eq!(lost(&seen, &ours), [""; 0], "{seen}");
        let is_reported = ours.iter().all(|dst| seen.contains(dst)) && seen.contains("\nid ");
        assert!(is_reported, "the monitor shows the changes: {seen}");
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
    });
}

#[test]
fn routes_of_go_flannel_are_removed_once_all_desired_objects_are_in_place() {
    in_netns(|| {
        uplink();
        second_uplink();
        let place = Place::new(&DUAL.replace("KIND", "host-gw"));
        let lease = |peer: u8| {
            let value = format!(
                r#"{{"PublicIP":"192.0.2.{peer}","PublicIPv6":"2001:db8::{peer}",
                    "BackendType":"host-gw"}}"#
            );
            fs::write(place.leases().join(format!("10.1.{peer}.0-24&fd00:1:0:{peer}::-64")), value)
                .unwrap();
        };
        [7, 8].into_iter().for_each(lease);
        after_go_flannel(&place);
        let monitor = Reader::start(Command::new("ip").args(["monitor", "route", "nexthop"]));
        let mut daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=2");
        wait_until(|| stale() == 0, || ip("route show") + &daemon.log());
        for route in
            ["10.1.66.0/24 via 192.0.2.66 dev eth0", "fd00:1:0:42::/64 via 2001:db8::42 dev eth0"]
        {
            daemon.wait_for_log(&format!(
                "removed an object that no lease needs origin=Go flannel object=route {route}"
            ));
        }
        assert_eq!(daemon.log().matches("origin=Go flannel").count(), 2, "{}", daemon.log());
        let all = ip("-N route show") + &ip("-N -6 route show");
        for foreign in FOREIGN {
            let dst = foreign.split(' ').next().unwrap();
            assert!(all.contains(&format!("{dst} ")), "{foreign}: {all}");
        }
        assert!(ip("route show 10.1.8.0/24").contains("192.0.2.8"), "{all}");
        let seen = seen_by(monitor);
        let live = ["10.1.7.0/24", "fd00:1:0:7::/64", "10.1.8.0/24", "fd00:1:0:8::/64"];
        assert_eq!(lost(&seen, &live), [""; 0], "{seen}");

        // The file is ours now, so no routes count as Go flannel's.
        daemon.wait_for_log("running lease");
        wait_until(|| place.dir.path().join("state/subnet-file").exists(), || daemon.log());
        for kill in [Signal::SIGKILL, Signal::SIGTERM] {
            daemon.signal(kill);
            daemon.ended();
            ip("route replace 10.1.66.0/24 via 192.0.2.66 dev eth0");
            daemon = place.start(&[]);
            daemon.wait_for_log("in sync peers=2");
            // All removals happen before the next change is applied.
            lease(9);
            wait_until(|| !ip("route show 10.1.9.0/24").trim().is_empty(), || daemon.log());
            assert_eq!(stale(), 1, "{}", daemon.log());
            fs::remove_file(place.leases().join("10.1.9.0-24&fd00:1:0:9::-64")).unwrap();
            wait_until(|| ip("route show 10.1.9.0/24").trim().is_empty(), || daemon.log());
        }
    });
}

#[test]
fn routes_inside_an_earlier_pod_network_are_removed_once_the_new_one_is_in_sync() {
    in_netns(|| {
        uplink();
        let earlier = CONFIG.replace("vxlan", "host-gw");
        let place = Place::new(&earlier);
        let peer = |network: u8| {
            let value = r#"{"PublicIP":"192.0.2.7","BackendType":"host-gw"}"#;
            fs::write(place.leases().join(format!("10.{network}.0.0-24")), value).unwrap();
        };
        let routes = |network: u8| ip(&format!("route show root 10.{network}.0.0/16"));
        peer(1);
        let mut daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=1");
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        assert!(routes(1).contains("10.1.0.0/24"), "{}", routes(1));
        ip("route add 10.1.80.0/24 via 192.0.2.80 dev eth0 proto static");

        fs::write(place.registry().join("config"), earlier.replace("10.1.", "10.2.")).unwrap();
        let mut cleanup = Command::new(programs::flannelctl());
        cleanup.args(["cleanup", "--dry-run", "--iface=eth0", "--registry"]);
        cleanup
            .arg(format!("dir:{}", place.registry().display()))
            .arg("--subnet-file")
            .arg(place.subnet_file());
        cleanup.arg("--state-dir").arg(place.dir.path().join("state"));
        let would = cleanup.output().unwrap();
        let would = String::from_utf8_lossy(&would.stdout).into_owned()
            + &String::from_utf8_lossy(&would.stderr);
        assert!(
            would.contains("delete route 10.1.0.0/24") && !would.contains("10.1.80.0"),
            "{would}"
        );
        peer(2);
        let daemon = place.start(&[]);
        daemon.wait_for_log("origin=the earlier pod network 10.1.0.0/16 object=route 10.1.0.0/24");
        wait_until(
            || {
                fs::read_to_string(place.dir.path().join("state/networks")).unwrap()
                    == "10.2.0.0/16\n"
            },
            || daemon.log(),
        );
        assert!(routes(2).contains("10.2.0.0/24"), "{}", routes(2));
        let left = routes(1);
        assert!(
            left.contains("10.1.80.0/24") && !left.contains("10.1.0.0/24"),
            "the foreign route stays: {left}"
        );
        assert!(!ip("nexthop show").contains("10.1."), "{}", ip("nexthop show"));
        assert_eq!(ip("nexthop show proto 241").lines().count(), 1, "{}", ip("nexthop show"));
    });
}

#[test]
fn without_go_flannels_subnet_file_its_routes_are_not_removed() {
    in_netns(|| {
        uplink();
        second_uplink();
        let place = Place::new(&CONFIG.replace("vxlan", "host-gw"));
        after_go_flannel(&place);
        fs::remove_file(place.subnet_file()).unwrap();
        let mut daemon = place.start(&[]);
        daemon.wait_for_log("in sync peers=0");
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        assert_eq!(stale(), 2, "{}", daemon.log());
        assert!(!daemon.log().contains("origin=Go flannel"), "{}", daemon.log());
    });
}
