//! What a process of the systemd unit reaches on its host. systemd itself starts the unit, as the
//! first process of namespaces of its own.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use flannel_netlink::testing::in_netns;

use crate::running::wait_until;

const UNIT: &str = include_str!("../../../deploy/systemd/flanneld.service");
const LOCK: &str = include_str!("../../../deploy/systemd/flannel.tmpfiles");
const SYSTEMD: &str = "/lib/systemd/systemd";
/// The variable by which this test knows that it is the process of the unit.
const INSIDE: &str = "FLANNEL_DOORS";
const TEST: &str = "doors::a_process_of_the_unit_reaches_nothing_that_obeys_root";

/// Sockets whose owners obey the user id 0. systemd makes the first one.
const SOCKETS: [&str; 10] = [
    "/run/systemd/private",
    "/run/dbus/system_bus_socket",
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/podman/podman.sock",
    "/run/libvirt/libvirt-sock",
    "/run/of-a-program-that-nobody-knows",
    "/var/lib/lxd/unix.socket",
];
/// Files by which a process becomes more than the unit allows.
const FILES: [&str; 7] = [
    "/run/door",
    "/run/systemd/system/door.service",
    "/etc/door",
    "/etc/flannel/flanneld.env",
    "/usr/local/bin/door",
    "/var/lib/door",
    "/proc/sys/kernel/core_pattern",
];
/// What the daemon needs.
const NEEDED: [&str; 6] = [
    "/run/flannel/door",
    "/run/xtables.lock",
    "/var/lib/flannel/door",
    "/etc/flannel/network/door",
    "/proc/sys/net/ipv4/ip_forward",
    "/dev/net/tun",
];

/// Tries every door, without doing harm: nothing is written to a file.
fn look() {
    for path in SOCKETS {
        println!("door {path} {}", UnixStream::connect(path).is_ok());
    }
    for path in FILES.into_iter().chain(NEEDED) {
        let opened = OpenOptions::new().write(true).create(!Path::new(path).exists()).open(path);
        println!("door {path} {}", opened.is_ok());
    }
    println!("door last true");
}

/// Ends systemd and all that it has started, with its namespaces.
struct Systemd(Child);

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The unit of the daemon, without the units of the host.
fn of_daemon(log: &Path) -> String {
    let unit = UNIT.replace("[Unit]\n", "[Unit]\nDefaultDependencies=no\n");
    let unit = unit.replace("Wants=network-online.target\n", "");
    let log = format!("[Service]\nStandardError=append:{}\n", log.display());
    unit.replace("[Service]\n", &log)
}

/// The unit, with this test in place of the daemon.
fn of_probe(log: &Path) -> String {
    let unit = of_daemon(log).replace("Type=notify", "Type=oneshot");
    let environment = format!("[Service]\nStandardOutput=append:{}\n", log.display());
    let unit = unit.replace("[Service]\n", &format!("{environment}Environment={INSIDE}=1\n"));
    let start = format!("ExecStart=/usr/local/bin/probe {TEST} --exact --nocapture");
    unit.replace("ExecStart=/usr/local/bin/flanneld", &start)
}

fn without_restrictions(log: &Path) -> String {
    format!(
        "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nEnvironment={INSIDE}=1\n\
         StandardOutput=append:{}\n\
         ExecStart=/usr/local/bin/probe {TEST} --exact --nocapture\n",
        log.display()
    )
}

/// Starts systemd in its own namespaces. The directory has the units, and `etc` for `/etc`.
fn start(dir: &Path) -> Systemd {
    let script = format!(
        "set -e; dir={}
        mount --make-rprivate /
        cp -a /etc/. $dir/etc; mount --bind $dir/etc /etc
        for place in /run /var/lib /usr/local/bin; do mount -t tmpfs none $place; done
        mount -t cgroup2 none /sys/fs/cgroup
        mkdir -p /run/systemd/system /etc/flannel
        cp $dir/units/* /run/systemd/system
        systemd-tmpfiles --create $dir/tmpfiles.conf
        cp {} /usr/local/bin/flanneld; cp {} /usr/local/bin/probe
        cp $dir/config /etc/flannel/network; cp $dir/env /etc/flannel/flanneld.env
        ip link set lo up; ip link add eth0 type veth peer name wire; ip link set wire up
        ip addr add 192.0.2.1/24 dev eth0; ip link set eth0 up
        exec env -i container=lxc PATH=$PATH {SYSTEMD} --system --unit=all.target \\
            --log-target=console --show-status=no",
        dir.display(),
        env!("CARGO_BIN_EXE_flanneld"),
        std::env::current_exe().unwrap().display(),
    );
    let log = fs::File::create(dir.join("systemd")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--pid", "--mount", "--cgroup", "--ipc", "--uts", "--mount-proc", "--fork"]);
    command.args(["--kill-child", "sh", "-c", &script]).stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log);
    Systemd(command.spawn().expect("this test needs systemd (Debian: apt-get install systemd)"))
}

/// What a probe could open.
fn doors(log: &Path) -> Option<BTreeMap<String, bool>> {
    let text = fs::read_to_string(log).unwrap_or_default();
    let doors: BTreeMap<String, bool> = text
        .lines()
        .filter_map(|line| {
            let (path, opened) = line.strip_prefix("door ")?.split_once(' ')?;
            Some((path.to_owned(), opened == "true"))
        })
        .collect();
    doors.contains_key("last").then_some(doors)
}

#[test]
fn a_process_of_the_unit_reaches_nothing_that_obeys_root() {
    if std::env::var_os(INSIDE).is_some() {
        return look();
    }
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        for name in ["etc", "units"] {
            fs::create_dir(file(name)).unwrap();
        }
        let listens = SOCKETS[1..].iter().map(|path| format!("ListenStream={path}\n"));
        let unit = |name: &str, text: &str| fs::write(file("units").join(name), text).unwrap();
        let socket: String = listens.collect();
        unit("doors.socket", &format!("[Unit]\nDefaultDependencies=no\n[Socket]\n{socket}"));
        unit("doors.service", "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=sleep 999\n");
        unit("flanneld.service", &of_daemon(&file("daemon")));
        unit("inside.service", &of_probe(&file("inside")));
        unit("outside.service", &without_restrictions(&file("outside")));
        let units = "doors.socket flanneld.service inside.service outside.service";
        let all = format!("[Unit]\nDefaultDependencies=no\nWants={units}\nAfter={units}\n");
        unit("all.target", &all);
        let config = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"udp","Path":"process"}}"#;
        fs::write(file("config"), config).unwrap();
        let options = "FLANNELD_REGISTRY=dir:/etc/flannel/network\nFLANNELD_IFACE=eth0\n\
                       FLANNELD_IP_MASQ=true\n";
        fs::write(file("env"), options).unwrap();
        fs::write(file("tmpfiles.conf"), LOCK).unwrap();
        let _systemd = start(dir.path());
        let told = || {
            ["systemd", "daemon", "inside", "outside"]
                .map(|name| fs::read_to_string(file(name)).unwrap_or_default())
                .join("\n")
        };
        wait_until(|| doors(&file("inside")).is_some() && doors(&file("outside")).is_some(), told);
        let inside = doors(&file("inside")).unwrap();
        let outside = doors(&file("outside")).unwrap();
        let closed = |path: &&&str| !outside[**path];
        let missing: Vec<&&str> = SOCKETS.iter().chain(&FILES).filter(closed).collect();
        assert!(missing.is_empty(), "without the unit they are closed too: {missing:?}");
        let open = |path: &&&str| inside[**path];
        let open: Vec<&&str> = SOCKETS.iter().chain(&FILES).filter(open).collect();
        assert!(open.is_empty(), "{open:?}");
        let shut: Vec<&&str> = NEEDED.iter().filter(|path| !inside[**path]).collect();
        assert!(shut.is_empty(), "the daemon needs {shut:?}\n{}", told());
        // The daemon does all its work.
        let log = || fs::read_to_string(file("daemon")).unwrap_or_default();
        wait_until(|| log().contains("in sync"), told);
        for problem in ["not permitted", "denied", "Read-only", "No such file"] {
            assert!(!log().contains(problem), "{problem}: {}", told());
        }
    });
}
