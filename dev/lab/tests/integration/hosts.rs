//! Hosts on which other programs change addresses, routes and rules.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab, Signal};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use test_support::eventually;

/// A keepalived that ends with the test.
struct Keepalived(Child);

impl Drop for Keepalived {
    fn drop(&mut self) {
        // Its child processes end with it. It removes the address that it moves.
        let _ = kill(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGTERM);
        let _ = self.0.wait();
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
    eventually(Duration::from_secs(20), has, || addresses(host));
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
            Duration::from_secs(20),
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
