//! The backend `extension`: real daemons whose commands make routes.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Signal};
use serde_json::{Value, json};
use test_support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);
/// A move to another backend keeps the old one for more than a minute.
const MOVED: Duration = Duration::from_secs(150);

fn up() -> Lab {
    let add = "ip route replace $SUBNET via $PUBLIC_IP && \
               ip -6 route replace $IPV6SUBNET via $PUBLIC_IPV6";
    // A flush without routes is not an error, and the routes of the daemon stay.
    let remove = "ip route flush $SUBNET proto boot && ip -6 route flush $IPV6SUBNET proto boot";
    let lab = Lab::builder().hosts(3).families(Family::BOTH).config_field("EnableNFTables", true);
    let lab = lab.program(env!("CARGO_BIN_EXE_lab")).backend(json!({
        "Type": "extension",
        "PreStartupCommand": "echo node",
        "PostStartupCommand": ["sh", "-c", "echo $SUBNET >>$POST"],
        "SubnetAddCommand": ["sh", "-c", add],
        "SubnetRemoveCommand": ["sh", "-c", remove],
        "ShutdownCommand": "rm $POST",
    }));
    let lab = lab.start().unwrap();
    let program = lab.dir().join("daemon");
    let script = format!(
        "#!/bin/sh\nfor file; do case $file in */subnet.env) POST=$file.post; esac; done\n\
         export POST\nexec {} \"$@\"\n",
        env!("CARGO_BIN_EXE_lab")
    );
    test_support::write_script(&program, &script);
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
        start(&lab, host);
    }
    lab.add_pods(PATIENCE).unwrap();
    lab
}

fn start(lab: &Lab, host: &Host) {
    host.start_daemon_of(&lab.dir().join("daemon"), &["--ip-masq", "--allow-commands"]).unwrap();
}

/// The file that exists between `PostStartupCommand` and `ShutdownCommand`.
fn post(host: &Host) -> PathBuf {
    host.subnet_file().with_extension("env.post")
}

fn pass(lab: &Lab) {
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
}

fn ctl(lab: &Lab, host: &Host, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    // The commands of a cleanup have the variables of the cleanup.
    command.env("POST", post(host)).arg("ctl").args(args);
    command.arg("--registry").arg(format!("dir:{}", lab.registry().display()));
    command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
    command.arg("--subnet-file").arg(host.subnet_file());
    command.arg("--state-dir").arg(host.dir().join("state"));
    host.namespace().output(&mut command).unwrap()
}

/// The routes by the public addresses of another host.
fn routes(host: &Host, to: &Host) -> usize {
    let routes = host.run("ip", &["route"]).unwrap() + &host.run("ip", &["-6", "route"]).unwrap();
    to.addresses().values().map(|via| routes.matches(&format!("via {via} ")).count()).sum()
}

#[test]
fn commands_connect_the_pods_of_hosts() {
    as_root(|| {
        let lab = up();
        pass(&lab);
        let [host, other, third] = lab.hosts() else { panic!("three hosts") };
        // The config alone runs no commands.
        third.stop_daemon(Signal::SIGTERM).unwrap();
        third.start_daemon_of(&lab.dir().join("daemon"), &["--ip-masq"]).unwrap();
        eventually(
            PATIENCE,
            || third.log().unwrap().contains("start the daemon with --allow-commands"),
            || third.log().unwrap(),
        );
        assert!(!post(third).exists());
        third.stop_daemon(Signal::SIGTERM).unwrap();
        start(&lab, third);
        pass(&lab);
        let found = ctl(&lab, host, &["doctor", "--json", "--iface", "eth0"]);
        let found: Value = serde_json::from_slice(&found.stdout).unwrap();
        let findings = found["findings"].as_array().unwrap();
        let of_lab = findings.iter().filter(|finding| finding["check"] != "bridge-netfilter");
        assert_eq!(of_lab.collect::<Vec<_>>(), Vec::<&Value>::new());
        let pod = other.pod().unwrap().addresses().v4.unwrap().to_string();
        let why = ctl(&lab, host, &["why", &pod]);
        let why = String::from_utf8(why.stdout).unwrap();
        assert!(why.contains("record extension") && why.contains("in place"), "{why}");

        // A node leaves while no daemon runs here. Packets pass meanwhile.
        let lease = other.subnet_env().unwrap().unwrap().subnets;
        for stopped in [other, host] {
            assert!(post(stopped).exists());
            stopped.stop_daemon(Signal::SIGTERM).unwrap();
            assert!(!post(stopped).exists(), "{}", stopped.log().unwrap());
        }
        pass(&lab);
        let file = format!("{}-24&", lease.v4.unwrap().base());
        let entries = std::fs::read_dir(lab.registry().join("subnets")).unwrap();
        let mut entries = entries.map(|entry| entry.unwrap());
        let file = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(&file));
        std::fs::remove_file(file.unwrap().path()).unwrap();
        assert_eq!((routes(host, other), routes(host, third)), (2, 2));
        start(&lab, host);
        let in_sync = || {
            let status = ctl(&lab, host, &["status", "--json"]).stdout;
            serde_json::from_slice::<Value>(&status).is_ok_and(|s| s["network"]["in_sync"] == true)
        };
        eventually(PATIENCE, in_sync, || host.log().unwrap());
        assert!(post(host).exists());
        assert_eq!((routes(host, other), routes(host, third)), (0, 2));

        // Another backend takes over. The commands for its predecessor are run.
        let config = lab.registry().join("config");
        let text = std::fs::read_to_string(&config).unwrap();
        let mut other_backend: Value = serde_json::from_str(&text).unwrap();
        other_backend["Backend"] = json!({ "Type": "host-gw" });
        third.stop_daemon(Signal::SIGTERM).unwrap();
        std::fs::write(&config, other_backend.to_string()).unwrap();
        let log = || host.log().unwrap() + &third.log().unwrap();
        let commands = |host: &Host| {
            let files = std::fs::read_dir(host.dir().join("state/extension")).unwrap();
            files.filter(|file| file.as_ref().unwrap().file_name() != ".new").count()
        };
        // Without the option, the commands for peers stay in effect until it is there again.
        let before = commands(third);
        third.start_daemon_of(&lab.dir().join("daemon"), &["--ip-masq"]).unwrap();
        let reports =
            || third.log().unwrap().matches("those that undo them are not allowed").count();
        eventually(PATIENCE, || reports() == 1, log);
        assert!(before > 0 && commands(third) == before, "{before}: {}", log());
        assert!(log().contains("it is replaced at once"), "{}", log());
        third.stop_daemon(Signal::SIGTERM).unwrap();
        start(&lab, third);
        eventually(MOVED, || !post(host).exists() && !post(third).exists(), log);
        eventually(PATIENCE, || commands(host) == 0 && commands(third) == 0, log);
        let gone = other.pod().unwrap().name().to_owned();
        eventually(
            PATIENCE,
            || {
                let matrix = lab.matrix(Duration::from_secs(1)).unwrap();
                matrix.failures().all(|pair| pair.from == gone || pair.to == gone)
            },
            log,
        );
        std::fs::write(&config, text).unwrap();
        eventually(PATIENCE, || post(host).exists() && commands(host) == 2, log);
        eventually(PATIENCE, in_sync, log);

        // A cleanup runs the commands for those that are left.
        host.stop_daemon(Signal::SIGKILL).unwrap();
        let cleaned = ctl(&lab, host, &["cleanup", "--iface", "eth0"]);
        assert!(cleaned.status.success(), "{cleaned:?}");
        assert_eq!((routes(host, third), post(host).exists()), (0, false));
    });
}

#[test]
fn daemons_that_are_killed_lose_no_packet() {
    as_root(|| {
        let lab = up();
        pass(&lab);
        let in_sync = |host: &Host| host.log().unwrap().matches("in sync peers=2").count();
        let traffic = Traffic::start(&lab);
        for host in lab.hosts() {
            let before = in_sync(host);
            host.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
            traffic.wait_for_arrivals();
            start(&lab, host);
            eventually(PATIENCE, || in_sync(host) > before, || host.log().unwrap());
            traffic.wait_for_arrivals();
        }
        let (sent, lost) = traffic.end();
        assert!(lost.is_empty(), "{} of {sent} packets were lost: {lost:#?}", lost.len());
        // Twelve streams, and twice 25 packets in each for a restart at least.
        assert!(sent >= 12 * 3 * 50, "{sent} packets are too few for the test");
    });
}
