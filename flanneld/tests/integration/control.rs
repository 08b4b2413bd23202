//! Health, metrics, the control socket and flannelctl, in namespaces, with real daemons and a real
//! kernel.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use flannel_netlink::testing::{in_netns, ip};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::programs::flannelctl;
use crate::reader::Reader;
use crate::running::{Daemon, take_the_port, wait_until};

/// The range of this node's subnet, which no test uses for peers or addresses.
const CONFIG: &str = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
    "Backend":{"Type":"vxlan"}}"#;
const PORT: u16 = 8471;

/// A daemon's files, on a host with an uplink, in the namespace of the calling test.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new(config: Option<&str>) -> Self {
        ip("link set lo up");
        ip("link add eth0 type veth peer name wire");
        ip("link set wire up");
        ip("address add 192.0.2.1/24 dev eth0");
        ip("address add 2001:db8::1/64 dev eth0 nodad");
        ip("link set eth0 up");
        let place = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir_all(place.leases()).unwrap();
        if let Some(config) = config {
            fs::write(place.registry().join("config"), config).unwrap();
        }
        place
    }

    fn registry(&self) -> PathBuf {
        self.dir.path().join("network")
    }

    fn leases(&self) -> PathBuf {
        self.registry().join("subnets")
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn peer(&self, n: u8) {
        let value = format!(
            r#"{{"PublicIP":"192.0.2.{n}","BackendType":"vxlan",
                "BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{n:02x}"}}}}"#
        );
        fs::write(self.leases().join(format!("10.1.{n}.0-24")), value).unwrap();
    }

    /// The options of both programs.
    fn common(&self) -> Vec<String> {
        let registry = format!("dir:{}", self.registry().display());
        let env = self.path("run/subnet.env");
        let state = self.path("state");
        ["--registry", &registry, "--subnet-file", &env, "--state-dir", &state]
            .map(str::to_owned)
            .into()
    }

    fn start_with(&self, env: &[(&str, &str)]) -> Daemon {
        let program =
            std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into());
        let mut command = Command::new(program);
        command.args(self.common()).args(["-iface=eth0", "--healthz-ip=127.0.0.1"]);
        command.env("FLANNELD_HEALTHZ_PORT", PORT.to_string()).envs(env.iter().copied());
        Daemon::start(&mut command)
    }

    fn start(&self) -> Daemon {
        self.start_with(&[])
    }

    /// A command of `flannelctl` with the options for paths only.
    fn bare_ctl(&self, args: &[&str]) -> Command {
        let mut command = Command::new(flannelctl());
        command.args(self.common()).args(args).stdin(Stdio::null());
        command
    }

    fn ctl_command(&self, args: &[&str]) -> Command {
        let mut command = self.bare_ctl(&["--control-socket", &self.path("run/flanneld.sock")]);
        command.args(args);
        command
    }

    fn ctl(&self, args: &[&str]) -> Output {
        self.ctl_command(args).output().unwrap()
    }

    /// The output of a verb that succeeds.
    fn ctl_text(&self, args: &[&str]) -> String {
        let output = self.ctl(args);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            output.status.success(),
            "{args:?}: {}{text}",
            String::from_utf8_lossy(&output.stderr)
        );
        text
    }

    fn json(&self, args: &[&str]) -> Value {
        let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let output = self.ctl(&args);
        let text = String::from_utf8(output.stdout).unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| {
            panic!("{args:?}: {error}: {text}{}", String::from_utf8_lossy(&output.stderr))
        })
    }

    /// The output of a verb that fails, and its exit status.
    fn fails(&self, args: &[&str]) -> (i32, String) {
        let output = self.ctl(args);
        assert!(
            !output.status.success(),
            "{args:?} succeeded: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        let text =
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr);
        (output.status.code().unwrap(), text)
    }
}

/// Ends a daemon as systemd does.
fn stop(mut daemon: Daemon) -> ExitStatus {
    daemon.signal(Signal::SIGTERM);
    daemon.ended()
}

/// Status and body of a request over TCP; 0 without an answer.
fn http(target: &str) -> (u16, String) {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", PORT)) else { return (0, String::new()) };
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    let asked = write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
    if asked.and_then(|()| stream.read_to_string(&mut answer)).is_err() {
        // The daemon has ended meanwhile.
        return (0, String::new());
    }
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

fn ready(daemon: &Daemon) {
    wait_until(|| http("/readyz").0 == 200, || format!("{:?}\n{}", http("/readyz"), daemon.log()));
}

fn metric(name: &str) -> f64 {
    labelled(name, &[])
}

/// The first sample of a metric with these labels.
fn labelled(name: &str, labels: &[(&str, &str)]) -> f64 {
    let (status, text) = http("/metrics");
    assert_eq!(status, 200);
    let scrape =
        prometheus_parse::Scrape::parse(text.lines().map(|line| Ok(line.to_owned()))).unwrap();
    let sample = scrape.samples.iter().find(|sample| {
        sample.metric == name
            && labels.iter().all(|(key, value)| sample.labels.get(key) == Some(*value))
    });
    match sample.unwrap_or_else(|| panic!("{name} {labels:?} is not in:\n{text}")).value {
        prometheus_parse::Value::Gauge(value) | prometheus_parse::Value::Counter(value) => value,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn readyz_is_200_only_while_everything_is_in_place() {
    in_netns(|| {
        let place = Place::new(None);
        let value = r#"{"PublicIP":"192.0.2.7","PublicIPv6":"2001:db8::7","BackendType":"vxlan",
            "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:07"},
            "BackendV6Data":{"VNI":1,"VtepMAC":"0a:00:00:00:01:07"}}"#;
        fs::write(place.leases().join("10.1.7.0-24&fd00:1:0:7::-64"), value).unwrap();
        let daemon = place.start();
        wait_until(
            || http("/readyz").1.contains("holds no network config yet"),
            || format!("{:?}", http("/readyz")),
        );
        let waiting = place.json(&["status"])["problems"][0].clone();
        assert_eq!(waiting["hint"], "flannelctl config set FILE", "{waiting}");
        assert_eq!(http("/readyz").0, 503);
        assert_eq!(http("/healthz"), (200, "flanneld is running".to_owned()));
        assert_eq!((metric("flannel_ready"), metric("flannel_lease_held")), (0.0, 0.0));
        let dual = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
            "EnableIPv6":true,"IPv6Network":"fd00:1::/48","Backend":{"Type":"vxlan"}}"#;
        fs::write(place.registry().join("config"), dual).unwrap();
        ready(&daemon);
        assert_eq!(http("/readyz").1, "flanneld is ready");
        for (name, value) in [
            ("flannel_ready", 1.0),
            ("flannel_peers", 1.0),
            ("flannel_leases", 2.0),
            ("flannel_lease_held", 1.0),
            ("flannel_store_up", 1.0),
            ("flannel_in_sync", 1.0),
        ] {
            assert_eq!(metric(name), value, "{name}");
        }
        assert!(metric("flannel_store_requests_total") > 0.0);
        for call in ["config", "create", "list", "watch"] {
            let (_, text) = http("/metrics");
            assert!(
                text.contains(&format!("\nflannel_store_requests_total{{call=\"{call}\"}} ")),
                "{call}: {text}"
            );
            assert!(
                text.contains(&format!(
                    "\nflannel_store_request_failures_total{{call=\"{call}\"}} 0\n"
                )),
                "{call}: {text}"
            );
        }

        take_the_port(&daemon);
        daemon.wait_for_log("not in sync: the kernel refused");
        assert_eq!((http("/readyz").0, metric("flannel_ready")), (503, 0.0));
        let state = |state| labelled("flannel_objects", &[("object", "route"), ("state", state)]);
        wait_until(|| state("failing") == 1.0, || http("/metrics").1);
        assert_eq!(labelled("flannel_failing_objects", &[("object", "route")]), 1.0);
        assert!(metric("flannel_refused_changes_total") >= 1.0);
        let seen = place.json(&["status"]);
        assert_eq!(seen["ready"], false, "{seen}");
        let problem = seen["problems"][0]["text"].as_str().unwrap();
        assert!(
            problem.starts_with("the kernel refuses: put ") && problem.contains("flannel-v6.1"),
            "{problem}"
        );
        assert!(http("/readyz").1.contains("the kernel refuses: put "), "{:?}", http("/readyz"));
        let (code, text) = place.fails(&["status"]);
        assert!(code == 1 && text.contains("NOT READY"), "{text}");
        let (_, why) = place.fails(&["why", "fd00:1:0:7::9"]);
        assert!(why.contains("FAILING"), "{why}");
        ip("link delete other");
        ready(&daemon);
    });
}

#[test]
fn foreign_changes_are_counted_and_a_shadowing_route_is_named() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let daemon = place.start();
        ready(&daemon);
        let good = place.json(&["why", "10.1.7.9"]);
        assert_eq!(
            (&good["ok"], good["lease"].as_str()),
            (&Value::Bool(true), Some("10.1.7.0-24")),
            "{good}"
        );
        assert!(good["objects"].as_array().unwrap().len() >= 3, "{good}");

        ip("route del 10.1.7.0/24");
        wait_until(
            || {
                http("/metrics").1.contains(
                    "flannel_external_mutations_total{object=\"route\",operation=\"delete\"} 1",
                )
            },
            || http("/metrics").1,
        );
        assert_eq!(metric("flannel_repairs_total"), 1.0);
        ready(&daemon);

        ip("route add 10.1.7.0/25 via 192.0.2.99 dev eth0");
        let (code, text) = place.fails(&["why", "10.1.7.9"]);
        assert_eq!(code, 1);
        assert!(text.contains("shadowed: packets go via 192.0.2.99 dev eth0"), "{text}");
        let why = place.ctl_text(&["why", "10.1.7.200"]);
        let words: Vec<&str> = why.split_whitespace().collect();
        assert!(words.join(" ").contains("everything is in place"), "{why}");
        let (_, text) = place.fails(&["why", "10.1.0.9"]);
        assert!(text.contains("no node holds a subnet that contains it"), "{text}");
        assert!(place.ctl_text(&["peers"]).contains("10.1.7.0/24"));
        assert!(place.ctl_text(&["status"]).contains("restored route 10.1.7.0/24"));
    });
}

#[test]
fn metrics_count_objects_and_events() {
    in_netns(|| {
        let place = Place::new(Some(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#));
        place.peer(7);
        place.peer(8);
        let daemon = place.start_with(&[("FLANNELD_NEXTHOP_OBJECTS", "off")]);
        ready(&daemon);
        let objects = |state| {
            let kinds = ["link", "address", "neigh", "fdb", "nexthop", "route"];
            kinds.map(|kind| labelled("flannel_objects", &[("object", kind), ("state", state)]))
        };
        let subnets = || {
            let states = ["total", "used", "free"];
            states.map(|state| labelled("flannel_subnets", &[("family", "IPv4"), ("state", state)]))
        };
        let leases = || ["flannel_leases", "flannel_peers", "flannel_conflicts"].map(metric);
        let rejected = |reason| labelled("flannel_rejected_leases", &[("reason", reason)]);
        assert_eq!(leases(), [3.0, 2.0, 0.0]);
        // The own device and its address, and of each peer a neigh, an fdb entry and a route.
        assert_eq!(objects("in place"), [1.0, 1.0, 2.0, 2.0, 0.0, 2.0]);
        assert_eq!((objects("pending"), objects("failing")), ([0.0; 6], [0.0; 6]));
        assert_eq!(subnets(), [255.0, 3.0, 252.0]);

        // A lease inside another lease's subnet, and one outside the pod network.
        let stranger = |key: &str, n: u8| {
            let value = format!(
                r#"{{"PublicIP":"192.0.2.{n}","BackendType":"vxlan",
                    "BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:{n:02x}"}}}}"#
            );
            fs::write(place.leases().join(key), value).unwrap();
        };
        stranger("10.1.8.128-25", 9);
        stranger("10.9.1.0-24", 10);
        wait_until(|| leases() == [5.0, 2.0, 1.0], || http("/metrics").1);
        assert_eq!(
            (rejected("overlaps"), rejected("outside"), rejected("rejected")),
            (1.0, 1.0, 0.0)
        );
        assert_eq!(objects("in place"), [1.0, 1.0, 2.0, 2.0, 0.0, 2.0]);
        fs::remove_file(place.leases().join("10.1.8.128-25")).unwrap();
        fs::remove_file(place.leases().join("10.1.8.0-24")).unwrap();
        wait_until(|| leases() == [3.0, 1.0, 0.0], || http("/metrics").1);
        wait_until(|| objects("in place") == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0], || http("/metrics").1);
        assert_eq!(
            subnets(),
            [255.0, 2.0, 253.0],
            "a lease outside the pod network takes none of its subnets"
        );

        for (done, object, operation) in [
            ("route del 10.1.7.0/24", "route", "delete"),
            (
                "neigh replace 10.1.7.0 lladdr 0a:00:00:00:00:99 dev flannel.1 nud permanent",
                "neigh",
                "modify",
            ),
            // The first subnet belongs to no node.
            ("route add 10.1.0.0/24 via 10.1.7.0 dev flannel.1 onlink", "route", "add"),
        ] {
            ip(done);
            let text = format!(
                "flannel_external_mutations_total{{object=\"{object}\",\
                 operation=\"{operation}\"}} 1\n"
            );
            wait_until(
                || http("/metrics").1.contains(&text),
                || format!("{text}{}", http("/metrics").1),
            );
        }
        assert_eq!(metric("flannel_repairs_total"), 3.0);
        assert_eq!(ip("route show 10.1.0.0/24"), "");
    });
}

#[test]
fn output_has_colours_only_on_a_terminal() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let daemon = place.start();
        ready(&daemon);
        // `script` runs a program on a new terminal, and copies its output.
        let on_terminal = |args: &[&str], env: &[(&str, &str)]| {
            let command = place.ctl_command(args);
            let words = std::iter::once(command.get_program()).chain(command.get_args());
            let words: Vec<String> =
                words.map(|word| format!("'{}'", word.to_str().unwrap())).collect();
            let mut script = Command::new("script");
            script.args(["-qec", &words.join(" "), "/dev/null"]).stdin(Stdio::null());
            script.env("TERM", "xterm").env_remove("NO_COLOR").envs(env.iter().copied());
            let output =
                script.output().expect("this test needs script (Debian: apt-get install bsdutils)");
            assert!(output.status.success(), "{args:?}: {output:?}");
            String::from_utf8(output.stdout).unwrap().replace('\r', "")
        };
        let coloured = on_terminal(&["status"], &[]);
        assert!(coloured.contains("\x1b[32mREADY\x1b[0m"), "{coloured:?}");
        for (args, env) in [
            (&["status"] as &[&str], &[("NO_COLOR", "1")] as &[(&str, &str)]),
            (&["status"], &[("TERM", "dumb")]),
            (&["status", "--json"], &[]),
            (&["peers", "--json"], &[]),
        ] {
            let plain = on_terminal(args, env);
            assert!(
                !plain.contains('\x1b')
                    && plain.contains(if args.len() > 1 { "10.1." } else { "READY" }),
                "{plain:?}"
            );
        }
        for args in [
            &["status"] as &[&str],
            &["peers"],
            &["why", "10.1.7.9"],
            &["lease", "list"],
            &["config", "check"],
        ] {
            let piped = place.ctl_text(args);
            assert!(!piped.contains('\x1b'), "{args:?}: {piped:?}");
        }
        // Without colours the text is the same.
        let words = |text: &str| -> Vec<String> {
            // The uptime changes.
            text.lines().skip(1).map(str::to_owned).collect()
        };
        let bare = ["\x1b[32m", "\x1b[33m", "\x1b[1;31m", "\x1b[1m", "\x1b[0m"]
            .iter()
            .fold(on_terminal(&["lease", "list"], &[]), |text, code| text.replace(code, ""));
        assert_eq!(words(&bare), words(&place.ctl_text(&["lease", "list"])));
    });
}

#[test]
fn without_the_tunnel_every_peer_fails() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        place.peer(8);
        // A foreign device, which stays.
        ip("link add flannel.1 type bridge");
        let daemon = place.start();
        daemon.wait_for_log("not in sync: the kernel refused");
        let peers = place.json(&["peers"])["peers"].as_array().unwrap().clone();
        assert_eq!(peers.len(), 2);
        for peer in &peers {
            let reason = peer["reason"].as_str().unwrap_or_default();
            assert!(
                peer["state"] == "failing" && reason.starts_with("no device flannel.1: "),
                "{peer}"
            );
        }
        let (code, page) = place.fails(&["peers"]);
        assert!(code == 1 && page.contains("failing") && !page.contains("in place"), "{page}");
        let status = place.json(&["status"]);
        assert_eq!(
            (&status["ready"], &status["network"]["peers"]["listed"][0]["state"]),
            (&false.into(), &"failing".into())
        );
        ip("link del flannel.1");
        ready(&daemon);
        assert!(!place.ctl_text(&["peers"]).contains("failing"));
    });
}

/// Prometheus' promtool, which `test.sh` fetches.
fn promtool(args: &[&str], input: &str) {
    let program = std::env::var_os("PROMTOOL").unwrap_or_else(|| "promtool".into());
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}: ./test.sh fetches it"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .concat();
    assert!(output.status.success(), "{args:?}: {text}\n{input}");
}

#[test]
fn promtool_accepts_metrics_and_rules() {
    in_netns(|| {
        let place = Place::new(None);
        let rules = place.path("rules.yaml");
        fs::write(&rules, include_str!("../../../deploy/prometheus/rules.yaml")).unwrap();
        promtool(&["check", "rules", &rules], "");
        place.peer(7);
        let daemon = place.start();
        wait_until(|| http("/metrics").0 == 200, || daemon.log());
        promtool(&["check", "metrics"], &http("/metrics").1);
        fs::write(place.registry().join("config"), CONFIG).unwrap();
        ready(&daemon);
        ip("route del 10.1.7.0/24");
        wait_until(|| metric("flannel_repairs_total") == 1.0, || daemon.log());
        promtool(&["check", "metrics"], &http("/metrics").1);
    });
}

#[test]
fn each_alert_fires_on_its_condition_and_is_silent_on_a_healthy_node() {
    let rules = include_str!("../../../deploy/prometheus/rules.yaml");
    let tests = include_str!("alerts.yaml");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    file("rules.yaml", rules);
    promtool(&["test", "rules", &file("alerts.yaml", tests)], "");
    let alerts: Vec<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() > 10, "{alerts:?}");
    for alert in alerts {
        for (what, looked) in [
            ("silent", format!("alertname: {alert}, ")),
            ("fires", format!("alertname: {alert}\n")),
        ] {
            assert_eq!(tests.matches(&looked).count(), 1, "{alert} {what}");
        }
    }
}

#[test]
fn systemd_is_notified_of_ready_reloading_alive_and_stopping() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let path = place.path("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        // Read continuously, as systemd does, because the socket has room for a few messages only.
        let (sender, messages) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len) = socket.recv(&mut buffer) {
                if sender.send(String::from_utf8_lossy(&buffer[..len]).into_owned()).is_err() {
                    return;
                }
            }
        });
        let wait_for = |wanted: &str| {
            let mut others = Vec::new();
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let text: String = messages
                    .recv_timeout(left)
                    .unwrap_or_else(|error| panic!("{wanted}: {error}: {others:?}"));
                if text.starts_with(wanted) {
                    return text;
                }
                others.push(text);
            }
        };
        let daemon = place.start_with(&[("NOTIFY_SOCKET", &path), ("WATCHDOG_USEC", "400000")]);
        // Usually with the same text.
        if !wait_for("READY=1\nSTATUS=").contains("STATUS=ready: 10.1.") {
            wait_for("STATUS=ready: 10.1.");
        }
        wait_for("WATCHDOG=1");
        daemon.signal(Signal::SIGHUP);
        assert!(wait_for("RELOADING=1").contains("\nMONOTONIC_USEC="));
        wait_for("READY=1");
        daemon.wait_for_log("SIGHUP: read again result=the network config is unchanged");
        assert_eq!(stop(daemon).code(), Some(0));
        wait_for("STOPPING=1");
    });
}

/// A change of a symbolic link's target causes no event in the watched directory.
#[test]
fn sighup_applies_a_config_whose_change_was_missed() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let config = place.registry().join("config");
        let target = place.path("elsewhere");
        let write = |mtu: u32| {
            let text = format!(
                r#"{{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
                    "Backend":{{"Type":"vxlan","MTU":{mtu}}}}}"#
            );
            fs::write(&target, text).unwrap();
        };
        write(1300);
        fs::remove_file(&config).unwrap();
        std::os::unix::fs::symlink(&target, &config).unwrap();
        let daemon = place.start();
        ready(&daemon);
        // The tunnel's headers take 50 bytes.
        let mtu = |mtu: u32| {
            let wanted = format!("mtu {} ", mtu - 50);
            wait_until(|| ip("link show flannel.1").contains(&wanted), || daemon.log());
        };
        mtu(1300);
        write(1200);
        daemon.signal(Signal::SIGHUP);
        daemon.wait_for_log("SIGHUP: read again result=the network config has changed");
        mtu(1200);
        // A config is refused, and then corrected.
        write(100);
        daemon.signal(Signal::SIGHUP);
        daemon.wait_for_log("cannot be used and is ignored");
        write(1250);
        daemon.signal(Signal::SIGHUP);
        mtu(1250);
    });
}

#[test]
fn the_log_filter_can_be_set_and_sighup_resets_it() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let daemon = place.start();
        ready(&daemon);
        let (code, text) = place.fails(&["log", "warning"]);
        assert!(code == 2 && text.contains("\"warning\" is not valid"), "{text}");
        // The daemon logs the new filter after it has set it, and before it answers. So the filter
        // suppresses that line.
        place.ctl_text(&["log", "error"]);
        place.peer(7);
        wait_until(|| ip("route show 10.1.7.0/24").contains("flannel.1"), || daemon.log());
        daemon.signal(Signal::SIGHUP);
        daemon.wait_for_log("SIGHUP: read again");
        place.peer(8);
        daemon.wait_for_log("in sync peers=2");
        // Not "in sync peers=1": such lines are limited to one a second, so it may be a late one.
        assert!(!daemon.log().contains("the log filter is"), "{}", daemon.log());
        place.ctl_text(&["log", "info"]);
        daemon.wait_for_log("the log filter is set, until SIGHUP or a reload filter=info");
        assert!(place.ctl_text(&["reload"]).contains("unchanged"));
        fs::write(
            place.registry().join("config"),
            r#"{"Network":"10.9.0.0/16","Backend":{"Type":"vxlan"}}"#,
        )
        .unwrap();
        daemon.wait_for_log("used from the next start on");
        assert!(place.ctl_text(&["status"]).contains("other pod networks now (10.9.0.0/16)"));
        assert_eq!(metric("flannel_config_waiting"), 1.0);
    });
}

/// The kernel refuses its devices. The answer comes before the config is written.
#[test]
fn a_config_that_this_node_cannot_use_is_refused_and_the_network_goes_on() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        // As a daemon leaves it that was killed in the midst of a trial.
        ip("link add flannel-trial type vxlan id 9 dstport 4000");
        let daemon = place.start();
        ready(&daemon);
        let trial = || ip("-o link show").contains("flannel-trial");
        assert!(!trial(), "{}", daemon.log());
        let stored = || fs::read_to_string(place.registry().join("config")).unwrap();
        let socket = std::net::UdpSocket::bind(("0.0.0.0", 9472)).unwrap();
        ip("link add stranger type vxlan id 2 dstport 8472");
        ip("link add flannel.3 type veth peer name far3");
        for (patch, part) in [
            (r#"{"Backend":{"Port":9472}}"#, "in use"),
            (r#"{"Backend":{"VNI":2}}"#, "stranger"),
            (r#"{"Backend":{"VNI":3}}"#, "another kind"),
            (r#"{"Backend":{"Type":"wireguard","PSKFile":"/nowhere"}}"#, "wireguard"),
        ] {
            let (code, text) = place.fails(&["config", "patch", patch]);
            let refused = "PATCH: this node cannot build the network: ";
            let is_named = text.contains(part) || patch.contains("wireguard");
            assert!(code == 1 && is_named, "{patch}: {text}");
            assert!(text.contains(refused) || text.contains("this node cannot"), "{text}");
            assert_eq!(stored(), CONFIG, "nothing was written");
            let metrics = metric("flannel_config_refused");
            assert_eq!((metrics, trial()), (0.0, false), "a question changes nothing");
        }
        let good = place.json(&["config", "patch", r#"{"Backend":{"DirectRouting":true}}"#]);
        let this_node = json!({
            "asked": true, "obstacle": null, "not_asked": null, "warnings": [],
        });
        assert_eq!(good["this_node"], this_node);
        // One config serves nodes with other interfaces too.
        let large = place.json(&["config", "patch", r#"{"Backend":{"MTU":9000}}"#]);
        let warning = &large["this_node"]["warnings"][0];
        assert_eq!((&warning["problem"], &warning["used"]), (&json!("mtu_reduced"), &json!(1500)));
        let patch = r#"{"Backend":{"DirectRouting":null,"MTU":null,"Port":9472}}"#;
        let forced = place.json(&["config", "patch", "--force", patch]);
        assert!(forced["this_node"]["obstacle"].as_str().unwrap().contains("in use"), "{forced}");
        wait_until(|| metric("flannel_config_refused") == 1.0, || daemon.log());
        // The patch before has rebuilt the network.
        ready(&daemon);
        assert_eq!(metric("flannel_config_refused"), 1.0);
        let refused = &place.json(&["status"])["network"]["refused_config"];
        assert_eq!(refused["backend"], "vxlan", "{refused}");
        // The device is made again for another port, and is missing for a moment.
        let device = || {
            let mut command = Command::new("ip");
            let output = command.args(["-d", "link", "show", "flannel.1"]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(device().contains("dstport 8472"), "{}", device());
        drop(socket);
        wait_until(|| device().contains("dstport 9472"), || daemon.log());
        wait_until(|| metric("flannel_config_refused") == 0.0, || daemon.log());
        assert!(!trial());
        assert_eq!(stop(daemon).code(), Some(0));
        let this_node = &place.json(&["config", "check"])["this_node"];
        assert_eq!(this_node["asked"], false, "{this_node}");
    });
}

#[test]
fn without_a_daemon_flannelctl_shows_and_removes_the_state_that_is_left() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let (code, text) = place.fails(&["status"]);
        assert!(code == 1 && text.contains("the daemon does not answer"), "{text}");
        let daemon = place.start();
        ready(&daemon);
        let cache = Path::new(&place.path("state")).join("leases");
        wait_until(|| cache.exists(), || daemon.log());
        let (code, text) = place.fails(&["cleanup"]);
        assert!(code == 1 && text.contains("is running"), "{text}");
        assert_eq!(stop(daemon).code(), Some(0));
        assert!(!Path::new(&place.path("run/flanneld.sock")).exists());

        let (_, text) = place.fails(&["status"]);
        assert!(text.contains("FLANNEL_SUBNET") || text.contains("10.1."), "{text}");
        let down = place.json(&["status"]);
        assert_eq!(
            (&down["running"], &down["ready"]),
            (&Value::Bool(false), &Value::Bool(false)),
            "{down}"
        );
        let (_, text) = place.fails(&["why", "10.1.7.9"]);
        assert!(text.contains("10.1.7.0-24") && text.contains("start flanneld"), "{text}");
        assert!(place.ctl_text(&["peers"]).contains("10.1.7.0/24"));

        let absent = place.path("net-conf.json");
        let (_, text) = place.fails(&["cleanup", "--net-config-path", &absent]);
        assert!(text.contains(&absent) && ip("link show").contains("flannel.1"), "{text}");
        let would = place.ctl_text(&["cleanup", "--dry-run", "--iface", "eth0"]);
        assert!(
            would.contains("route 10.1.7.0/24") && ip("route show").contains("10.1.7.0/24"),
            "{would}"
        );
        let plain = place.ctl_text(&["cleanup", "--for-go", "--iface", "eth0"]);
        assert!(
            !ip("route show").contains("nhid") && ip("route show").contains("10.1.7.0/24"),
            "{plain}"
        );
        place.ctl_text(&["cleanup", "--iface", "eth0"]);
        assert!(!ip("link show").contains("flannel.1"), "{}", ip("link show"));
        assert_eq!(
            place.json(&["cleanup", "--iface", "eth0"])["done"].as_array().unwrap().len(),
            0
        );
        // A device of an earlier config stays, because it may belong to another flannel. It is
        // reported.
        ip("link add flannel.7 type vxlan id 7 dev eth0 dstport 8473");
        let text = place.ctl_text(&["cleanup", "--iface", "eth0"]);
        assert!(
            text.contains("ip link delete flannel.7") && text.contains("nothing else"),
            "{text}"
        );
    });
}

#[test]
fn cleanup_for_go_removes_the_blackhole_route() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let daemon = place.start_with(&[("FLANNELD_IP_BLACKHOLE_ROUTE", "true")]);
        ready(&daemon);
        wait_until(|| ip("route show").contains("blackhole"), || daemon.log());
        assert_eq!(stop(daemon).code(), Some(0));
        // A foreign blackhole stays.
        ip("route add blackhole 10.1.77.0/24");
        let would = place.ctl_text(&["cleanup", "--for-go", "--dry-run", "--iface", "eth0"]);
        let made = place.ctl_text(&["cleanup", "--for-go", "--iface", "eth0"]);
        assert!(
            would.contains("delete route blackhole 10.1.")
                && made.contains("delete route blackhole 10.1."),
            "{would}{made}"
        );
        let routes = ip("route show");
        assert_eq!(routes.matches("blackhole").count(), 1, "{routes}");
        assert!(
            routes.contains("blackhole 10.1.77.0/24") && routes.contains("10.1.7.0/24 via"),
            "{routes}"
        );
        assert!(!routes.contains("nhid"), "{routes}");
    });
}

#[test]
fn cleanup_is_refused_while_a_daemon_runs() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        for socket in ["", "off"] {
            let daemon = place.start_with(&[("FLANNELD_CONTROL_SOCKET", socket)]);
            ready(&daemon);
            let elsewhere = place.path("elsewhere.sock");
            for at in [None, Some("off"), Some(elsewhere.as_str())] {
                // As an administrator calls it, with the paths of the daemon's options.
                let mut command = place.bare_ctl(&["cleanup", "--iface", "eth0"]);
                command.envs(at.map(|at| ("FLANNELD_CONTROL_SOCKET", at)));
                let output = command.output().unwrap();
                let text = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(1), "{socket:?} {at:?}: {text}");
                assert!(text.contains("is running"), "{socket:?} {at:?}: {text}");
            }
            assert!(ip("link show").contains("flannel.1"));
            let second = place
                .start_with(&[("FLANNELD_HEALTHZ_PORT", "0"), ("FLANNELD_CONTROL_SOCKET", "off")]);
            second.wait_for_log("state/lock: another flanneld is running");
            assert_eq!(stop(daemon).code(), Some(0));
        }
        // A file in place of the socket's directory: it is not known whether a daemon runs.
        fs::write(place.path("file"), "").unwrap();
        let beyond = place.path("file/flanneld.sock");
        let output = place
            .bare_ctl(&["cleanup", "--iface=eth0", "--control-socket", &beyond])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && text.contains("is not known"), "{text}");
        assert!(ip("link show").contains("flannel.1"));
    });
}

#[test]
fn programs_that_the_daemon_runs_do_not_get_its_password() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let bin = PathBuf::from(place.path("bin"));
        let seen = place.path("seen");
        fs::create_dir(&bin).unwrap();
        for name in ["iptables-save", "iptables-restore"] {
            let real = ["/usr/sbin", "/sbin", "/usr/bin"].map(|dir| format!("{dir}/{name}"));
            let real = real.iter().find(|path| Path::new(path).exists()).unwrap();
            let script = format!("#!/bin/sh\nenv >> {seen}\nexec {real} \"$@\"\n");
            test_support::write_script(&bin.join(name), &script);
        }
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let secret =
            [("FLANNELD_ETCD_USERNAME", "somebody"), ("FLANNELD_ETCD_PASSWORD", "do-not-tell")];
        let daemon = place.start_with(&[("PATH", path.as_str()), secret[0], secret[1]]);
        ready(&daemon);
        let seen = fs::read_to_string(&seen).unwrap();
        assert!(seen.contains("PATH=") && !seen.contains("do-not-tell"), "{seen}");
    });
}

#[test]
fn cleanup_removes_everything() {
    in_netns(|| {
        let place = Place::new(Some(
            r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
                "EnableNFTables":true,"Backend":{"Type":"vxlan"}}"#,
        ));
        place.peer(7);
        let daemon = place
            .start_with(&[("FLANNELD_IP_MASQ", "true"), ("FLANNELD_IP_BLACKHOLE_ROUTE", "true")]);
        ready(&daemon);
        assert_eq!(stop(daemon).code(), Some(0));
        fs::write(place.path("state/backends.damaged"), "{").unwrap();
        // A version with other limits has left it.
        let backend = json!({ "Type": "vxlan", "VNI": 99_999_999 });
        let member = json!({ "lease_type": "vxlan", "offered": false, "backend": backend });
        let backends = json!({ "backends": [member] }).to_string();
        fs::write(place.path("state/backends"), backends).unwrap();
        let rules = || {
            String::from_utf8(Command::new("nft").args(["list", "tables"]).output().unwrap().stdout)
                .unwrap()
        };
        let files = [
            "run/subnet.env",
            "state/leases",
            "state/backends",
            "state/backends.damaged",
            "state/config",
        ];
        let files = files.map(|name| PathBuf::from(place.path(name)));
        let all = |there: bool| {
            assert_eq!(rules().contains("flannel"), there, "{}", rules());
            assert_eq!(ip("route show").contains("blackhole"), there, "{}", ip("route show"));
            assert_eq!(files.each_ref().map(|file| file.exists()), [there; 5]);
        };
        all(true);
        let would = place.json(&["cleanup", "--dry-run", "--iface", "eth0"]);
        all(true);
        let made = place.json(&["cleanup", "--iface", "eth0"]);
        assert_eq!(
            (&would["done"], &would["failed"]),
            (&made["done"], &made["failed"]),
            "{would} {made}"
        );
        all(false);
        assert!(made.to_string().contains("which the cluster has left"), "{made}");
        assert!(Path::new(&place.path("state/mark")).exists(), "the identity of the host stays");
        let text = made["done"].to_string();
        assert!(
            text.contains("subnet.env")
                && text.contains("state/leases")
                && text.contains("flannel"),
            "{text}"
        );
        assert_eq!(
            place.json(&["cleanup", "--iface", "eth0"])["done"].as_array().unwrap().len(),
            0
        );
    });
}

#[test]
fn config_and_leases_are_managed_without_a_daemon() {
    in_netns(|| {
        let place = Place::new(None);
        let file = place.path("config.json");
        // These commands do not create a missing store, which may not be mounted, and write nothing
        // to an empty mount point.
        let reserve = ["lease", "reserve", "10.1.9.0/24", "--public-ip", "192.0.2.9"];
        let look = [
            &["config", "check"][..],
            &["config", "patch", "{}"],
            &["lease", "list"],
            &reserve,
            &["peers"],
        ];
        fs::remove_dir_all(place.registry()).unwrap();
        for why in ["No such file or directory", "neither config nor subnets is in it"] {
            for args in look {
                let (_, text) = place.fails(args);
                assert!(text.contains(&place.registry().display().to_string()), "{text}");
                assert!(text.contains(why), "{text}");
            }
            let (code, text) = place.fails(&["doctor"]);
            assert!(
                code == 1 && text.contains("does not answer") && text.contains("repair: mount "),
                "{text}"
            );
            assert!(!text.contains("config set"), "{text}");
            let made = fs::read_dir(place.registry()).map_or(0, Iterator::count);
            assert_eq!(made, 0);
            if !place.registry().exists() {
                fs::create_dir(place.registry()).unwrap();
            }
        }
        fs::write(&file, r#"{"Network":"10.1.0.0/33"}"#).unwrap();
        let (code, text) = place.fails(&["config", "check", &file]);
        assert!(code == 1 && text.contains("field Network"), "{text}");
        place.fails(&["config", "set", &file]);
        assert!(!place.registry().join("config").exists());
        let wrong = CONFIG.replace(r#""vxlan""#, r#""vxlan","VNI":"x""#);
        fs::write(&file, wrong).unwrap();
        assert!(place.fails(&["config", "check", &file]).1.contains("Backend.VNI"));
        fs::write(&file, CONFIG).unwrap();
        assert!(place.ctl_text(&["config", "check", &file]).contains("10.1.191.0"));
        place.ctl_text(&["config", "set", &file]);
        assert_eq!(fs::read_to_string(place.registry().join("config")).unwrap(), CONFIG);
        assert!(place.ctl_text(&["config", "check"]).contains("vxlan"));

        // The daemon accepts this config, and ignores the field.
        let misspelt = CONFIG.replace(r#""vxlan""#, r#""vxlan","VNY":7"#);
        fs::write(&file, &misspelt).unwrap();
        let patch = r#"{"Backend":{"MUT":1400}}"#;
        for (args, right) in [
            (["config", "check", &file], "expected Backend.VNI"),
            (["config", "set", &file], "expected Backend.VNI"),
            (["config", "patch", patch], "expected Backend.MTU"),
        ] {
            let (code, text) = place.fails(&args);
            assert!(code == 1 && text.contains(right), "{args:?}: {text}");
            let lines = if args[1] == "check" { 1 } else { 2 };
            assert_eq!(text.lines().count(), lines, "{args:?}: {text}");
        }
        let stored = || fs::read_to_string(place.registry().join("config")).unwrap();
        assert_eq!(stored(), CONFIG);
        let output = place.json(&["config", "set", "--force", &file]);
        assert!(output["mistakes"][0].as_str().unwrap().contains("Backend.VNI"), "{output}");
        assert_eq!(stored(), misspelt);
        assert!(place.ctl_text(&["config", "patch", "--force", patch]).contains("mistake"));
        assert!(stored().contains(r#""MUT":1400"#), "{}", stored());
        // A config that daemons refuse, and a text that is not a config.
        fs::write(&file, r#"{"Network":"10.1.0.0/33"}"#).unwrap();
        let output = place.json(&["config", "set", "--force", &file]);
        assert!(output["mistakes"][0].as_str().unwrap().contains("field Network"), "{output}");
        assert!(stored().contains("/33"), "{}", stored());
        fs::write(&file, "[]").unwrap();
        place.fails(&["config", "set", "--force", &file]);
        fs::write(&file, CONFIG).unwrap();
        let mut command = place.ctl_command(&["config", "set", &file]);
        let output = command.env("FLANNELD_REGISTYR", "etcd").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && error.contains("expected FLANNELD_REGISTRY"), "{error}");
        assert_eq!(stored(), CONFIG);

        place.ctl_text(&[
            "lease",
            "reserve",
            "10.1.9.0/24",
            "--public-ip",
            "192.0.2.9",
            "--backend-type",
            "vxlan",
        ]);
        let listed = place.json(&["lease", "list"]);
        let lease = &listed["leases"][0];
        assert_eq!(
            (lease["key"].as_str(), &lease["reserved"]),
            (Some("10.1.9.0-24"), &Value::Bool(true))
        );
        place.ctl_text(&["lease", "reserve", "10.1.8.0/24", "--public-ip", "192.0.2.8"]);
        assert_eq!(
            place.json(&["lease", "list"])["leases"][0]["backend"],
            "vxlan",
            "as the network config says"
        );
        place.ctl_text(&["lease", "release", "10.1.8.0/24"]);
        let again = place.fails(&["lease", "reserve", "10.1.9.0/24", "--public-ip", "192.0.2.9"]);
        assert!(again.1.contains("is reserved already"), "{}", again.1);
        let wrong = place.fails(&["lease", "reserve", "10.2.9.0/24", "--public-ip", "192.0.2.9"]);
        assert!(wrong.1.contains("10.1.0.0/16"), "{}", wrong.1);
        assert_eq!(place.json(&["lease", "list"])["duplicates"], serde_json::json!([]));
        place.ctl_text(&["lease", "reserve", "10.1.10.0/24", "--public-ip", "192.0.2.9"]);
        let listed = place.ctl_text(&["lease", "list"]);
        assert!(
            listed.contains("192.0.2.9 is the public address of 10.1.9.0-24 and 10.1.10.0-24"),
            "{listed}"
        );
        place.ctl_text(&["lease", "release", "10.1.10.0/24"]);
        place.ctl_text(&["lease", "release", "10.1.9.0/24"]);
        assert_eq!(place.json(&["lease", "list"])["leases"].as_array().unwrap().len(), 0);

        let daemon = place.start();
        ready(&daemon);
        let own = place.json(&["status"])["network"]["lease"]["key"].as_str().unwrap().to_owned();
        let listed = place.json(&["lease", "list"])["leases"][0].clone();
        let left = listed["remaining"].as_u64().unwrap();
        assert!(listed["key"] == own.as_str() && (86_000..=86_400).contains(&left), "{listed}");
        let (code, text) = place.fails(&["lease", "release", &own]);
        assert!(
            code == 1 && text.contains("--force"),
            "the lease of a running node is not released by mistake: {text}"
        );
        place.ctl_text(&["lease", "release", &own, "--force"]);
        daemon.wait_for_log("somebody deleted it, which makes flanneld exit");
    });
}

/// Whether there is more than one user id. The user namespace of an ordinary user has one.
fn has_users() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap();
    map.split_whitespace().nth(2).unwrap().parse::<u32>().unwrap() > 60_000
}

#[test]
fn a_group_may_read_and_only_root_may_write() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let group = if has_users() { "54321" } else { "0" };
        let daemon = place.start_with(&[("FLANNELD_CONTROL_GROUP", group)]);
        ready(&daemon);
        let socket = fs::metadata(place.path("run/flanneld.sock")).unwrap();
        assert_eq!((socket.gid().to_string().as_str(), socket.mode() & 0o777), (group, 0o660));
        let status = fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
        let effective = status.lines().find(|line| line.starts_with("CapEff:")).unwrap();
        assert!(
            effective.ends_with("0000000000003000"),
            "the group needs no capability: {effective}"
        );
        assert!(
            place.ctl_text(&["reload"]).contains("unchanged"),
            "root, or the daemon's own user"
        );
        if !has_users() {
            // There is no other user here.
            return;
        }
        // In a directory from which other users may run it.
        let program = place.dir.path().join("flannelctl");
        // Copied by another process, because a program that this one has open for writing cannot be
        // started.
        let copied =
            Command::new("cp").arg(place.bare_ctl(&[]).get_program()).arg(&program).status();
        assert!(copied.unwrap().success());
        fs::set_permissions(place.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let run = |gid: &str, args: &[&str]| {
            let mut command = Command::new("setpriv");
            command
                .args(["--reuid=65533", &format!("--regid={gid}"), "--clear-groups"])
                .arg(&program);
            let output = command.args(place.common()).args(args).arg("--json").output().unwrap();
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
        };
        assert_eq!(run(group, &["status"])["ready"], true);
        assert_eq!(run(group, &["why", "10.1.9.9"])["lease"], Value::Null);
        for verb in [&["reload"] as &[&str], &["log", "debug"]] {
            let error = run(group, verb)["error"].as_str().unwrap().to_owned();
            assert!(error.contains("only root and user 0"), "{verb:?}: {error}");
        }
        assert!(!daemon.log().contains("the log filter is"), "{}", daemon.log());
        let error = run("65533", &["status"])["error"].as_str().unwrap().to_owned();
        assert!(
            error.contains("--control-group"),
            "members of other groups may not open the socket: {error}"
        );
        drop(daemon);
        let daemon = place.start_with(&[("FLANNELD_CONTROL_GROUP", "nosuchgroup")]);
        daemon.wait_for_log("FLANNELD_CONTROL_GROUP");
    });
}

#[test]
fn silent_clients_do_not_block_health_and_status() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let daemon = place.start();
        ready(&daemon);
        let path = place.path("run/flanneld.sock");
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
        for half in ["", "GET /healthz HTTP/1.1\r\n"] {
            let mut held: Vec<Box<dyn ReadWrite>> = Vec::new();
            for _ in 0..1000 {
                let tcp = TcpStream::connect(("127.0.0.1", PORT)).unwrap();
                let unix = UnixStream::connect(&path).unwrap();
                tcp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                unix.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                held.push(Box::new(tcp));
                held.push(Box::new(unix));
            }
            // Writes to connections that the daemon has closed already fail.
            held.iter_mut().for_each(|stream| _ = stream.write_all(half.as_bytes()));
            let begin = Instant::now();
            assert_eq!(http("/healthz"), (200, "flanneld is running".to_owned()));
            // A silent connection is closed after 5 s, and 16 may be open, so waiting for all of
            // them would take minutes. The kernel retries a connection that has no room at first
            // after 1, 3 or 7 s.
            assert!(begin.elapsed() < Duration::from_secs(12), "{half:?}: {:?}", begin.elapsed());
            assert!(place.ctl_text(&["status"]).contains("READY"));
            for mut stream in held {
                let end = stream.read(&mut [0; 64]);
                let closed = end.as_ref().map_or_else(
                    |error| error.kind() == ErrorKind::ConnectionReset,
                    |length| *length == 0,
                );
                assert!(closed, "{half:?}: {end:?}");
            }
            assert!(begin.elapsed() < Duration::from_secs(12), "{half:?}: {:?}", begin.elapsed());
        }
    });
}

/// A connection of either kind.
trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

/// Every node of a cluster writes leases.
#[test]
fn hostile_leases_are_rejected_with_the_reason_and_change_nothing() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let daemon = place.start();
        ready(&daemon);
        let of_kernel = || {
            let fdb = Command::new("bridge").args(["fdb", "show", "dev", "flannel.1"]).output();
            let fdb = String::from_utf8(fdb.unwrap().stdout).unwrap();
            let neighbours = "neigh show dev flannel.1 nud permanent";
            [ip("route show"), ip("-6 route show"), ip(neighbours), fdb]
        };
        let before = of_kernel();
        let own = place.json(&["status"])["network"]["lease"]["key"].as_str().unwrap().to_owned();
        let lease = fs::read_to_string(place.leases().join(&own)).unwrap();
        let lease: Value = serde_json::from_str(&lease).unwrap();
        let own_mac = lease["BackendData"]["VtepMAC"].as_str().unwrap();

        let of = |public: &str, kind: &str, data: &str| {
            format!(r#"{{"PublicIP":"{public}","BackendType":"{kind}","BackendData":{data}}}"#)
        };
        let at = |public: &str| of(public, "vxlan", r#"{"VtepMAC":"0a:00:00:00:00:63"}"#);
        let with = |mac: &str| of("192.0.2.50", "vxlan", &format!(r#"{{"VtepMAC":"{mac}"}}"#));
        let deep = "[".repeat(5_000) + &"]".repeat(5_000);
        let half = own.replace(".0-24", ".128-25");
        let hostile = [
            ("10.2.1.0-24", at("192.0.2.50"), "outside the pod network 10.1.0.0/16"),
            ("10.1.0.0-16", at("192.0.2.50"), "overlaps this node's own lease"),
            (&*half, at("192.0.2.50"), "overlaps this node's own lease"),
            ("10.1.7.128-25", at("192.0.2.50"), "overlaps the earlier lease 10.1.7.0-24"),
            ("10.1.20.0-24", at("127.0.0.1"), "127.0.0.1 is not a unicast host address"),
            ("10.1.21.0-24", at("224.0.0.1"), "224.0.0.1 is not a unicast host address"),
            ("10.1.22.0-24", at("255.255.255.255"), "is not a unicast host address"),
            ("10.1.23.0-24", at("0.0.0.0"), "no public address"),
            ("10.1.24.0-24", at("192.0.2.1"), "192.0.2.1 is this node's own"),
            ("10.1.25.0-24", at("10.1.25.9"), "10.1.25.9 lies inside its own subnet"),
            ("10.1.26.0-24", at("10.1.99.9"), "10.1.99.9 lies inside the pod network"),
            ("10.1.27.0-24", with("ff:ff:ff:ff:ff:ff"), "ff:ff:ff:ff:ff:ff is not valid"),
            ("10.1.28.0-24", with("01:00:5e:00:00:01"), "01:00:5e:00:00:01 is not valid"),
            ("10.1.29.0-24", with(own_mac), "is this node's own"),
            ("10.1.77.0-24", with("0a:00:00:00:00:07"), "defined otherwise by the earlier lease"),
            ("10.1.30.0-24", with(&"x".repeat(10_000)), "VtepMAC: \"xxx"),
            ("10.1.31.0-24", of("192.0.2.50", "vxlan", &deep), "one JSON object"),
            ("10.1.32.0-24", of("192.0.2.50", r"\u001b[31m\u0007", "{}"), "\\u{1b}[31m"),
        ];
        let skipped = [
            ("10.1.33.0-24", with(&"x".repeat(900_000))),
            ("0.0.0.0-0", at("192.0.2.50")),
            ("10.1.40.0-24", "{".repeat(100_000)),
            ("10.1.41.0-24", at(&"9".repeat(2 << 20))),
            ("10.1.42.0-24\u{1b}[2J", at("192.0.2.50")),
        ];
        for (key, value) in &skipped {
            fs::write(place.leases().join(key), value).unwrap();
        }
        let pipe = place.leases().join("10.1.43.0-24");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for (key, value, _) in &hostile {
            fs::write(place.leases().join(key), value).unwrap();
        }
        let peers = || place.json(&["peers"])["peers"].as_array().unwrap().clone();
        // A peer is listed before it is decided.
        let decided = |peers: &[Value]| peers.iter().all(|peer| peer["state"] != "pending");
        let all = || Some(peers()).filter(|all| all.len() == hostile.len() + 1 && decided(all));
        wait_until(|| all().is_some(), || format!("{:#?}", peers()));
        for (key, _, says) in &hostile {
            let peers = peers();
            let peer = peers.iter().find(|peer| peer["key"] == *key);
            let peer = peer.unwrap_or_else(|| panic!("{key} is not in {peers:#?}"));
            let why = peer["reason"].as_str().unwrap_or_default();
            assert!(peer["state"] == "rejected" && why.contains(says), "{key}: {peer}");
        }
        assert_eq!(http("/readyz").0, 200);
        assert_eq!(of_kernel(), before);
        let shown = ["peers", "status"].map(|verb| place.ctl(&[verb]).stdout);
        let shown = shown.map(|bytes| String::from_utf8(bytes).unwrap()).join("") + &daemon.log();
        assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown}");
        let longest = shown.lines().map(str::len).max();
        assert!(longest < Some(2000), "{longest:?}");
        // The lease of the whole network leaves no room. Without it a new node gets a subnet.
        let reserve = ["lease", "reserve", "10.1.60.0/24", "--public-ip=192.0.2.60"];
        let (_, refused) = place.fails(&reserve);
        assert!(refused.contains("overlaps 10.1.0.0-16 of 192.0.2.50"), "{refused}");
        fs::remove_file(place.leases().join("10.1.0.0-16")).unwrap();
        place.ctl_text(&reserve);
    });
}

/// An empty directory would tell all daemons that their leases were deleted.
#[test]
fn a_restart_without_the_directory_of_leases_keeps_routes_and_makes_none() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        place.peer(7);
        let daemon = place.start();
        ready(&daemon);
        let routes = ip("route show dev flannel.1");
        assert!(routes.contains("10.1.7.0/24"), "{routes}");
        // A disk may need a while for it.
        let saved = place.dir.path().join("state/leases");
        wait_until(|| saved.exists(), || daemon.log());
        assert_eq!(stop(daemon).code(), Some(0));
        let away = place.dir.path().join("away");
        fs::rename(place.registry(), &away).unwrap();
        let daemon = place.start();
        let problems = || {
            let output = place.ctl(&["status"]);
            String::from_utf8(output.stdout).unwrap() + &daemon.log()
        };
        wait_until(|| problems().contains("does not answer"), problems);
        assert_eq!(ip("route show dev flannel.1"), routes);
        assert!(!place.registry().exists());
        fs::rename(&away, place.registry()).unwrap();
        ready(&daemon);
        wait_until(|| !problems().contains("does not answer:"), problems);
        assert_eq!(ip("route show dev flannel.1"), routes);
    });
}

#[test]
fn watch_prints_changes_only() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let daemon = place.start();
        ready(&daemon);
        let mut watch = Reader::start(&mut place.ctl_command(&["watch", "--json"]));
        let mut next = || serde_json::from_str::<Value>(&watch.line()).unwrap();
        let first = next();
        assert_eq!(
            (&first["ready"], &first["network"]["peers"]["total"]),
            (&Value::Bool(true), &0.into())
        );
        // A peer may be listed before all its objects are in place, and a finding may appear. Each
        // of these changes has a line.
        let mut before = first;
        let mut until = |what: &dyn Fn(&Value) -> bool| {
            loop {
                let mut line = next();
                // The time always differs.
                line["time"] = before["time"].take();
                assert_ne!(line, before, "a line without a change");
                before = line;
                if what(&before) {
                    return;
                }
            }
        };
        place.peer(7);
        until(&|line| line["network"]["peers"]["total"] == 1);
        assert_eq!(stop(daemon).code(), Some(0));
        until(&|line| line["running"] == false);
    });
}

#[test]
fn without_a_store_no_hint_suggests_to_write_a_config() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let daemon = place.start();
        ready(&daemon);
        fs::rename(place.registry(), place.path("away")).unwrap();
        let problems = || place.json(&["status"])["problems"].to_string();
        wait_until(|| problems().contains("does not answer"), problems);
        place.ctl(&["reload"]);
        assert!(!problems().contains("config set"), "{}", problems());
    });
}

#[test]
fn flannelctl_exits_with_2_on_wrong_usage_and_0_on_help() {
    in_netns(|| {
        let place = Place::new(None);
        for args in
            [vec!["statsu"], vec!["why"], vec!["why", "x"], vec!["lease", "reserve", "10.1.0.0"]]
        {
            assert_eq!(place.fails(&args).0, 2, "{args:?}");
            let error = place.json(&args)["error"].to_string();
            assert!(error.contains(args.last().unwrap()) || error.contains("ADDRESS"), "{error}");
        }
        assert!(place.ctl_text(&["--help"]).contains("Exit status"));
        assert!(place.ctl_text(&["lease", "release", "--help"]).contains("exits with status 1"));
        assert_eq!(place.ctl_text(&["docker-opts", "-?"]), place.ctl_text(&["docker-opts", "-h"]));
    });
}

#[test]
fn a_closed_pipe_does_not_change_the_exit_code() {
    in_netns(|| {
        let place = Place::new(None);
        let flanneld =
            std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into());
        let mut help = Command::new(flanneld);
        help.arg("--help");
        for (mut command, code) in [
            (help, 0),
            (place.bare_ctl(&["--help"]), 0),
            (place.bare_ctl(&["statsu"]), 2),
            (place.bare_ctl(&["reload"]), 1),
            (place.bare_ctl(&["reload", "--json"]), 1),
        ] {
            let [(out_reader, out), (err_reader, err)] = [(); 2].map(|()| std::io::pipe().unwrap());
            drop((out_reader, err_reader));
            let status = command.stdout(out).stderr(err).status().unwrap();
            assert_eq!(status.code(), Some(code), "{command:?}: 101 is a panic");
        }
    });
}

#[test]
fn values_that_the_doctor_cannot_read_are_not_reported_as_ok() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let doctor = ["doctor", "--iface", "eth0"];
        let all = place.ctl(&doctor);
        let text = String::from_utf8_lossy(&all.stdout);
        assert!(
            text.contains(" blocks packets of pods")
                && !text.contains("not known: which rules stop"),
            "{text}"
        );
        // Reading the rules needs a capability.
        let able = place.bare_ctl(&doctor);
        let mut unable = Command::new("setpriv");
        unable
            .args(["--bounding-set=-all", "--inh-caps=-all"])
            .arg(able.get_program())
            .args(able.get_args());
        let unable = unable.output().unwrap();
        let text = String::from_utf8_lossy(&unable.stdout);
        assert!(text.contains("not known: which rules stop packets of pods"), "{text}{unable:?}");
        assert!(!text.contains("nothing blocks packets of pods"), "{text}");
    });
}

#[test]
fn docker_opts_writes_variables_for_docker() {
    in_netns(|| {
        let place = Place::new(None);
        let env = place.path("subnet.env");
        fs::write(&env, "FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n")
            .unwrap();
        let file = place.path("docker_opts.env");
        let written = || fs::read_to_string(&file).unwrap();
        let run = |args: &[&str]| {
            let args: Vec<&str> =
                ["docker-opts", "-f", &env, "-d", &file].iter().chain(args).copied().collect();
            place.ctl_command(&args).env_remove("DOCKER_OPTS").output().unwrap()
        };
        let output = run(&["-c"]);
        assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        assert_eq!(written(), "DOCKER_OPTS=\" --bip=10.1.74.1/24 --ip-masq=false --mtu=1450\"\n");
        let mode = fs::metadata(&file).unwrap().mode() & 0o7777;
        assert_eq!((mode & !0o644, mode & 0o600), (0, 0o600), "only its owner may write to it");
        let output = run(&["-i", "--json"]);
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(value["variables"]["DOCKER_OPT_MTU"], "--mtu=1450");
        // Another host holds the subnet.
        ip("route add 10.1.74.0/24 via 192.0.2.9");
        let output = run(&[]);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            error.contains("already contains the subnet: 10.1.74.0/24 via 192.0.2.9 dev eth0"),
            "{error}"
        );
        assert!(written().contains("DOCKER_OPT_BIP="), "the file is written nevertheless");
    });
}

#[test]
fn findings_on_the_host_have_a_repair_command() {
    in_netns(|| {
        let place = Place::new(Some(CONFIG));
        let set =
            |key: &str, value: &str| fs::write(format!("/proc/sys/net/ipv4/{key}"), value).unwrap();
        set("ip_forward", "1");
        set("conf/all/rp_filter", "0");
        place.peer(7);
        let daemon = place.start();
        ready(&daemon);
        let findings = || -> Vec<(String, String)> {
            let found = place.json(&["status"])["findings"].as_array().unwrap().clone();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            found.iter().map(|f| (text(&f["check"]), text(&f["repair"]))).collect()
        };
        // The finding on bridge-netfilter depends on the machine.
        let host = || {
            findings()
                .into_iter()
                .filter(|(check, _)| check != "bridge-netfilter")
                .collect::<Vec<_>>()
        };
        assert_eq!(host(), []);
        set("ip_forward", "0");
        set("conf/all/rp_filter", "1");
        ip("address add 10.1.200.1/24 dev eth0");
        let found = host();
        let checks: Vec<&str> = found.iter().map(|(check, _)| check.as_str()).collect();
        assert_eq!(checks, ["forwarding", "rp-filter", "clash"], "{}", place.ctl_text(&["status"]));
        let page = place.ctl_text(&["status"]);
        assert!(
            page.contains("READY") && page.contains("repair: sysctl -w net.ipv4.ip_forward=1"),
            "{page}"
        );
        assert_eq!(http("/readyz").0, 200, "findings do not affect readiness");
        for (_, repair) in &found[..2] {
            let done = Command::new("sh").args(["-c", repair]).output().unwrap();
            assert!(done.status.success(), "{repair}: {done:?}");
        }
        ip("address del 10.1.200.1/24 dev eth0");
        assert_eq!(host(), [], "the repair commands help");
        assert_eq!(stop(daemon).code(), Some(0));
        // Without a daemon the findings are those for the network of the last daemon.
        set("ip_forward", "0");
        ip("route add default dev eth0");
        let (status, page) = place.fails(&["status"]);
        assert_eq!(status, 1);
        assert!(
            page.contains("NOT RUNNING")
                && page.contains("repair: sysctl -w net.ipv4.ip_forward=1"),
            "{page}"
        );
        // The next daemon logs it.
        let daemon = place.start();
        daemon.wait_for_log("forwards no IPv4 packets");
        assert_eq!(daemon.log().matches("repair=sysctl -w net.ipv4.ip_forward=1").count(), 1);
        wait_until(
            || http("/metrics").1.contains("flannel_findings{check=\"forwarding\"} 1\n"),
            || http("/metrics").1,
        );
    });
}

#[test]
fn the_doctor_distinguishes_a_missing_config_from_a_failing_store() {
    in_netns(|| {
        let place = Place::new(None);
        let checks = || -> Vec<(String, String)> {
            let found = place.json(&["doctor"])["findings"].as_array().unwrap().clone();
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            found.iter().map(|f| (text(&f["check"]), text(&f["repair"]))).collect()
        };
        let set = "flannelctl config set FILE".to_owned();
        let daemon = ("daemon".to_owned(), "systemctl start flanneld".to_owned());
        assert_eq!(checks(), [daemon.clone(), ("config".to_owned(), set.clone())]);
        fs::write(place.registry().join("config"), r#"{"Network":"10.1.0.0"}"#).unwrap();
        assert_eq!(checks(), [daemon.clone(), ("config".to_owned(), set)]);
        fs::remove_dir_all(place.registry()).unwrap();
        fs::write(place.registry(), "a file").unwrap();
        let found = checks();
        let repair = format!("mount {0} || ls -la {0} # ", place.registry().display());
        assert!(
            found[0].0 == "store" && found[0].1.starts_with(&repair) && found[1..] == [daemon],
            "{found:?}"
        );
        let (status, page) = place.fails(&["doctor"]);
        assert_eq!(status, 1);
        assert!(
            page.contains("peers      not known: neither the daemon nor the store lists them"),
            "{page}"
        );
    });
}
