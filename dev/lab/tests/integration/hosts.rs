//! Hosts on which other programs change addresses, routes and rules.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab, Signal};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use test_support::eventually;

use super::doctor::findings;

const PATIENCE: Duration = Duration::from_secs(20);

/// Ends a program in order, with the processes that it started.
fn end(program: &mut Child) {
    let _ = kill(Pid::from_raw(program.id().cast_signed()), Signal::SIGTERM);
    let _ = program.wait();
}

/// A keepalived that ends with the test. Then it removes the address that it moves.
struct Keepalived(Child);

impl Drop for Keepalived {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

/// The address that moves between the hosts.
const MOVABLE: &str = "192.168.77.250";

impl Keepalived {
    fn start(host: &Host, priority: u8) -> Self {
        let file = |name: &str| host.dir().join(name).display().to_string();
        let config = format!(
            "global_defs {{\n vrrp_version 3\n vrrp_garp_master_repeat 1\n}}\n\
             vrrp_instance lab {{\n interface eth0\n virtual_router_id 7\n priority {priority}\n \
             advert_int 0.1\n virtual_ipaddress {{\n  {MOVABLE}/32 dev eth0\n }}\n}}\n"
        );
        fs::write(file("keepalived.conf"), config).unwrap();
        let mut command = Command::new("keepalived");
        command.args(["--vrrp", "--dont-fork", "--log-console"]);
        command.args(["--use-file", &file("keepalived.conf"), "--pid", &file("keepalived.pid")]);
        command.args(["--vrrp_pid", &file("vrrp.pid")]);
        command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(host.namespace().spawn(&mut command).unwrap())
    }
}

/// The addresses of `eth0`.
fn addresses(host: &Host) -> String {
    host.run("ip", &["-4", "-o", "address", "show", "dev", "eth0"]).unwrap()
}

fn wait_for_movable(host: &Host) {
    let has = || addresses(host).contains(MOVABLE);
    eventually(PATIENCE, has, || addresses(host));
}

/// The public addresses in the leases, sorted.
fn published(lab: &Lab) -> Vec<String> {
    let files = fs::read_dir(lab.registry().join("subnets")).unwrap();
    let text = |file: fs::DirEntry| fs::read_to_string(file.path()).unwrap();
    let address = |lease: String| {
        let lease: serde_json::Value = serde_json::from_str(&lease).unwrap();
        lease["PublicIP"].as_str().unwrap().to_owned()
    };
    let mut all: Vec<_> = files.map(|file| address(text(file.unwrap()))).collect();
    all.sort();
    all
}

/// The address moves to a host before its daemon starts. Later the host loses its own address for
/// a while, and then the other host gets the address that moves.
#[test]
fn an_address_that_keepalived_moves_is_never_published() {
    as_root(|| {
        let lab = Lab::builder().hosts(2).program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
        let [first, second] = lab.hosts() else { unreachable!("the lab has two hosts") };
        let own = [first, second].map(|host| host.addresses().v4.unwrap().to_string());
        let [address, ..] = &own;
        // The lifetimes are those of an address from DHCP.
        let from_dhcp = format!("{address}/24 dev eth0 valid_lft 3600 preferred_lft 3600");
        first.namespace().ip(&format!("address change {from_dhcp}")).unwrap();
        let leader = Keepalived::start(first, 100);
        let _follower = Keepalived::start(second, 50);
        wait_for_movable(first);
        lab.start_daemons().unwrap();
        let reach = || {
            let matrix = lab.wait_until_reachable(Duration::from_secs(30)).unwrap();
            assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
        };
        reach();
        assert_eq!(published(&lab), own);

        first.run("ip", &["address", "del", &format!("{address}/24"), "dev", "eth0"]).unwrap();
        eventually(
            PATIENCE,
            || first.log().unwrap().contains("the network stays as it is"),
            || first.log().unwrap(),
        );
        first.namespace().ip(&format!("address add {from_dhcp}")).unwrap();
        reach();
        assert_eq!(published(&lab), own);
        // It lets go of its address while the host has no other.
        wait_for_movable(first);

        first.stop_daemon(Signal::SIGTERM).unwrap();
        first.start_daemon().unwrap();
        reach();
        assert_eq!(published(&lab), own);

        drop(leader);
        wait_for_movable(second);
        reach();
        assert_eq!(published(&lab), own);
    });
}

/// A program of a host that ends with the test, and the place of its files.
struct Firewall {
    /// A shell command that runs `$0` where the program finds its files.
    shell: String,
    programs: Vec<Child>,
}

impl Drop for Firewall {
    fn drop(&mut self) {
        self.programs.iter_mut().for_each(end);
    }
}

impl Firewall {
    /// The real firewalld, with a D-Bus and a config of its own.
    fn firewalld(host: &Host) -> Self {
        let dir = host.dir().join("firewalld");
        let place = dir.display();
        fs::create_dir(&dir).unwrap();
        copy("/etc/firewalld", &dir.join("config"));
        let allow = ["user", "own", "send_type", "receive_type"];
        let allow: String = allow.iter().map(|what| format!("<allow {what}=\"*\"/>")).collect();
        let bus = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\" \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\
             <busconfig><listen>unix:path={place}/bus</listen><auth>EXTERNAL</auth>\
             <policy context=\"default\">{allow}</policy></busconfig>"
        );
        fs::write(dir.join("bus.conf"), bus).unwrap();
        let shell = format!("DBUS_SYSTEM_BUS_ADDRESS=unix:path={place}/bus sh -c \"$0\"");
        let mut firewall = Self { shell, programs: Vec::new() };
        firewall.start(host, &format!("exec dbus-daemon --nofork --config-file={place}/bus.conf"));
        let has_bus = || dir.join("bus").exists();
        eventually(PATIENCE, has_bus, || "no bus");
        firewall.start(
            host,
            &format!("exec firewalld --nofork --nopid --system-config {place}/config"),
        );
        let state = || firewall.run(host, "firewall-cmd --state");
        eventually(PATIENCE, || state() == "running\n", state);
        firewall
    }

    /// The real ufw, with a config of its own.
    fn ufw(host: &Host) -> Self {
        let config = host.dir().join("ufw");
        copy("/etc/ufw", &config);
        let mount = format!("mount --bind {} /etc/ufw", config.display());
        let shell = format!("exec unshare --mount sh -c '{mount} && exec sh -c \"$0\"' \"$0\"");
        let firewall = Self { shell, programs: Vec::new() };
        let enabled = firewall.run(host, "ufw --force enable");
        assert!(enabled.contains("Firewall is active"), "{enabled}");
        firewall
    }

    fn command(&self, command: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin").stdin(Stdio::null());
        shell.args(["-c", &self.shell, command]);
        shell
    }

    fn start(&mut self, host: &Host, command: &str) {
        let mut command = self.command(command);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.programs.push(host.namespace().spawn(&mut command).unwrap());
    }

    /// Runs a command on the host. Returns its output.
    fn run(&self, host: &Host, command: &str) -> String {
        let output = host.namespace().output(&mut self.command(command)).unwrap();
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }
}

/// Copies a directory.
fn copy(from: &str, to: &Path) {
    assert!(Command::new("cp").args(["-r", from]).arg(to).status().unwrap().success());
}

/// With the firewall on, pods do not reach each other. The doctor's repairs cure that.
fn is_cured_by_the_doctor(start: fn(&Host) -> Firewall, names: &str) {
    as_root(|| {
        let lab = Lab::builder().hosts(2).program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
        let [_, host] = lab.hosts() else { unreachable!("the lab has two hosts") };
        lab.start_daemons().unwrap();
        let reach = || lab.wait_until_reachable(Duration::from_secs(30)).unwrap();
        assert!(reach().is_complete());
        let firewall = start(host);
        assert!(!lab.matrix(Duration::from_secs(2)).unwrap().is_complete());
        let found = || findings(&lab, host, None);
        let is_named = || found().iter().any(|line| line.contains(names));
        eventually(Duration::from_secs(10), is_named, || format!("{:#?}", found()));
        // A repair may uncover the next finding.
        for _ in 0..5 {
            for line in found() {
                let (_, repair) = line.split_once(" | ").unwrap();
                let output = firewall.run(host, repair);
                println!("{line}\n{output}");
            }
        }
        assert_eq!(found(), [""; 0]);
        assert!(reach().is_complete());
    });
}

#[test]
fn the_doctor_cures_a_host_with_firewalld() {
    is_cured_by_the_doctor(Firewall::firewalld, "inet firewalld");
}

#[test]
fn the_doctor_cures_a_host_with_ufw() {
    is_cured_by_the_doctor(Firewall::ufw, "ufw");
}
