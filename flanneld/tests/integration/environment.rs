//! The environment of the processes that the daemon starts.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use flannel_netlink::testing::{in_netns, ip};
use flannel_udp::Client;
use serde_json::{Value, json};

use crate::running::{Daemon, wait_until};

const SECRET: &str = "correct-horse";

/// A daemon whose environment has a secret, the socket of a service manager, and more.
fn start(dir: &Path, backend: &Value, args: &[&str]) -> Daemon {
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("address add 192.0.2.1/24 dev eth0");
    ip("link set eth0 up");
    fs::create_dir_all(dir.join("network/subnets")).unwrap();
    let config = json!({ "Network": "10.1.0.0/16", "Backend": backend });
    fs::write(dir.join("network/config"), config.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_flanneld"));
    command.arg("--registry").arg(format!("dir:{}", dir.join("network").display()));
    command.arg("--subnet-file").arg(dir.join("run/subnet.env"));
    command.arg("--state-dir").arg(dir.join("state")).arg("--iface=eth0").args(args);
    command.env("FLANNELD_ETCD_PASSWORD", SECRET).env("FLANNELD_ETCD_USERNAME", "flannel");
    command.env("NOTIFY_SOCKET", dir.join("notify")).env("WATCHDOG_USEC", "60000000");
    command.env("CREDENTIALS_DIRECTORY", dir).env("OTHER_SECRET", SECRET);
    let path = std::env::var("PATH").unwrap();
    command.env("PATH", format!("{}:{path}", dir.join("bin").display()));
    Daemon::start(&mut command)
}

/// The names of variables. `separator`: between them.
fn names(text: &str, separator: char) -> BTreeSet<&str> {
    assert!(!text.contains(SECRET), "{text}");
    text.split(separator).filter_map(|line| line.split_once('=')).map(|(name, _)| name).collect()
}

/// The variables that are expected, and those that the test itself may have.
fn assert_names(found: &BTreeSet<&str>, expected: &[&str]) {
    let mut rest = found.clone();
    for name in expected {
        assert!(rest.remove(name), "{name} is not in {found:?}");
    }
    // A shell adds the last three by itself.
    for name in ["LD_LIBRARY_PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ"] {
        rest.remove(name);
    }
    for name in ["PWD", "SHLVL", "_"] {
        rest.remove(name);
    }
    assert!(rest.is_empty(), "{rest:?}");
}

/// It outlives the daemon, and reads packets of strangers.
#[test]
fn the_data_plane_and_programs_of_iptables_get_no_secrets() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        for name in ["iptables-save", "iptables-restore"] {
            let places = ["/usr/sbin", "/sbin", "/usr/bin"].map(|dir| format!("{dir}/{name}"));
            let real = places.iter().find(|path| Path::new(path).exists()).unwrap();
            let variables = dir.path().join(name);
            let script = format!("#!/bin/sh\nenv >{}\nexec {real} \"$@\"\n", variables.display());
            test_support::write_script(&dir.path().join("bin").join(name), &script);
        }
        let backend = json!({ "Type": "udp", "Path": "process" });
        let daemon = start(dir.path(), &backend, &["--ip-masq"]);
        daemon.wait_for_log("running lease");
        let socket = dir.path().join("state/udp/socket");
        wait_until(|| Client::connect(&socket).is_ok(), || daemon.log());
        let pid = Client::connect(&socket).unwrap().process().unwrap().pid;
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        assert_names(&names(&read("environ"), '\0'), &["PATH", "MALLOC_ARENA_MAX"]);
        assert_eq!(read("comm"), "flannel-udp\n");
        let command = read("cmdline");
        assert!(command.starts_with("flannel-udp\0udp-data-plane\0"), "{command:?}");
        for name in ["iptables-save", "iptables-restore"] {
            let variables = dir.path().join(name);
            wait_until(|| variables.exists(), || daemon.log());
            let text = fs::read_to_string(&variables).unwrap();
            assert_names(&names(&text, '\n'), &["PATH", "LC_ALL"]);
        }
        drop(daemon);
        Client::connect(&socket).unwrap().end().unwrap();
    });
}

#[test]
fn commands_of_the_network_config_get_what_is_documented() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("variables");
        let script = format!("env >{0}.new; mv {0}.new {0}", file.display());
        let backend = json!({ "Type": "extension", "PostStartupCommand": ["sh", "-c", script] });
        let daemon = start(dir.path(), &backend, &["--allow-commands"]);
        wait_until(|| file.exists(), || daemon.log());
        let text = fs::read_to_string(&file).unwrap();
        let expected = ["PATH", "NETWORK", "SUBNET", "PUBLIC_IP"];
        let mut found = names(&text, '\n');
        for name in ["IPV6NETWORK", "IPV6SUBNET", "PUBLIC_IPV6"] {
            found.remove(name);
        }
        assert_names(&found, &expected);
    });
}
