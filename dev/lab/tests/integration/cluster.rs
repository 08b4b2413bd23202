//! Real daemons: every backend and family, from an empty registry to pods that reach each other.

use std::path::Path;
use std::time::Duration;
use test_support::eventually;

use flannel_core::address::Family;
use flannel_lab::{Builder, Error, Lab, Signal};

use flannel_lab::testing::as_root;

const PATIENCE: Duration = Duration::from_secs(120);

fn builder() -> Builder {
    Lab::builder().program(env!("CARGO_BIN_EXE_lab"))
}

/// Starts the daemons and waits. Fails with the logs.
fn up(builder: Builder) -> Lab {
    let lab = builder.start().unwrap();
    lab.start_daemons().unwrap();
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|e| panic!("{e}"));
    assert!(matrix.is_complete(), "{:#?}\n{}", matrix.failures().collect::<Vec<_>>(), logs(&lab));
    lab
}

fn logs(lab: &Lab) -> String {
    lab.hosts().iter().map(|host| format!("--- {}\n{}", host.name(), host.log().unwrap())).collect()
}

fn reaches(backend: &str, families: &[Family], mtu: u32) {
    let lab = up(builder().backend(backend).families(families.iter().copied()));
    let mut seen = Vec::new();
    for host in lab.hosts() {
        let env = host.subnet_env().unwrap().unwrap();
        assert_eq!(env.mtu, mtu, "{}", host.name());
        assert!(env.subnets.families().eq(families.iter().copied()), "{env:?}");
        seen.extend(env.subnets.values().copied());
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), 3 * families.len(), "every host has subnets of its own: {seen:?}");
}

macro_rules! reaches {
    ($($name:ident: $backend:literal, $families:expr, $mtu:literal;)*) => {$(
        #[test]
        fn $name() {
            as_root(|| reaches($backend, &$families, $mtu));
        }
    )*};
}

reaches! {
    vxlan_connects_pods_over_ipv4: "vxlan", [Family::V4], 1450;
    vxlan_connects_pods_over_ipv6: "vxlan", [Family::V6], 1430;
    vxlan_connects_pods_over_both_families: "vxlan", Family::BOTH, 1430;
    host_gw_connects_pods_over_ipv4: "host-gw", [Family::V4], 1500;
    host_gw_connects_pods_over_ipv6: "host-gw", [Family::V6], 1500;
    host_gw_connects_pods_over_both_families: "host-gw", Family::BOTH, 1500;
}

/// A stop leaves the data path in place. The next start takes the same subnet and loses no packet.
#[test]
fn a_restart_keeps_subnet_and_data_path() {
    as_root(|| {
        let lab = up(builder().families(Family::BOTH));
        let host = &lab.hosts()[0];
        let before = host.subnet_env().unwrap();
        let status = host.stop_daemon(Signal::SIGTERM).unwrap().unwrap();
        assert!(status.success(), "{status}\n{}", logs(&lab));
        assert!(lab.matrix(PATIENCE).unwrap().is_complete(), "{}", logs(&lab));
        std::fs::remove_file(host.subnet_file()).unwrap();
        host.start_daemon().unwrap();
        let subnet_env = || {
            host.check_daemon().unwrap();
            host.subnet_env().unwrap()
        };
        assert_eq!(Some(eventually(PATIENCE, subnet_env, || logs(&lab))), before);
        assert!(lab.matrix(PATIENCE).unwrap().is_complete(), "{}", logs(&lab));
    });
}

#[test]
fn a_daemon_that_ends_by_itself_is_reported_with_its_log() {
    as_root(|| {
        let lab = up(builder().hosts(2));
        let host = &lab.hosts()[1];
        assert!(
            matches!(host.start_daemon(), Err(Error::Unsuitable(_))),
            "a second daemon is refused"
        );
        host.signal_daemon(Signal::SIGKILL).unwrap();
        // The kernel needs a moment to end it.
        let error = eventually(PATIENCE, || host.check_daemon().err(), || "the daemon still runs");
        let Error::DaemonEnded { host, status, log } = error else { panic!("{error}") };
        assert!(
            host == "host-2" && status.contains("SIGKILL") && log.lines().count() > 1,
            "{status}\n{log}"
        );
    });
}

/// Reads `subnet.env` with the lab's own reader, at the configured path.
#[test]
fn daemons_write_only_to_configured_paths() {
    as_root(|| {
        let lab = up(builder().hosts(2));
        let names = |dir: &Path| {
            let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        };
        for host in lab.hosts() {
            let mut names = names(host.dir());
            names.retain(|name| name != "state");
            assert_eq!(names, ["flanneld.log", "flanneld.sock", "subnet.env"]);
        }
        assert_eq!(names(&lab.registry().join("subnets")).len(), 2);
    });
}
