//! The system calls that the systemd unit allows, on etcd.

use flannel_netlink::testing::in_netns_async;
use nix::sys::signal::Signal;

use super::certificates::Authority;
use super::fixture::{CONFIG, Daemon, PREFIX, switch, until};
use super::server::Etcd;
use crate::calls::{forbidden, of_ended, traced};

/// The daemon uses a host name and TLS, and survives an outage.
#[test]
fn the_unit_allows_all_system_calls_of_the_daemon() {
    in_netns_async(|| async {
        switch();
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let ours = Authority::new(dir.path(), "ours");
        let server = ours.sign_into(dir.path(), "server", 2090);
        let client = ours.sign_into(dir.path(), "client", 2090);
        let args = [
            "--cert-file".into(),
            file(&server.certificate),
            "--key-file".into(),
            file(&server.key),
        ];
        let mut etcd = Etcd::spawn("https", &args);
        let endpoint = etcd.endpoint.replace("127.0.0.1", "localhost");
        let trace = dir.path().join("trace");
        let mut command = traced(&trace);
        command.args([
            "-iface=br0",
            "--etcd-endpoints",
            &endpoint,
            "--etcd-cafile",
            &file(&ours.file),
        ]);
        command.args([
            "--etcd-certfile",
            &file(&client.certificate),
            "--etcd-keyfile",
            &file(&client.key),
        ]);
        command.arg("--subnet-file").arg(dir.path().join("run/subnet.env"));
        command.arg("--state-dir").arg(dir.path().join("state"));
        let mut daemon = Daemon::start(&mut command);
        daemon.wait_for_log("holds no network config yet").await;
        let put = |etcd: &Etcd, key: &str, value: &str| {
            etcd.etcdctl(&[
                "--cacert",
                &file(&ours.file),
                "put",
                &format!("{PREFIX}/{key}"),
                value,
            ]);
        };
        put(&etcd, "config", CONFIG);
        daemon.wait_for_log("running lease").await;
        let leases = dir.path().join("state/leases");
        until(60, || leases.exists(), || daemon.log()).await;
        etcd.kill();
        daemon.wait_for_log("store lost").await;
        etcd.go();
        daemon.wait_for_log("the store answers").await;
        let value = r#"{"PublicIP":"192.0.2.107","BackendType":"vxlan",
            "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:6b"}}"#;
        put(&etcd, "subnets/10.1.107.0-24", value);
        daemon.wait_for_log("in sync peers=1").await;
        for signal in [Signal::SIGHUP, Signal::SIGTERM] {
            daemon.signal(signal);
            daemon.wait_for_log(signal.as_str()).await;
        }
        assert_eq!(daemon.ended().await.code(), Some(0), "{}", daemon.log());
        assert_eq!(forbidden(&of_ended(&trace, daemon.pid())), [""; 0]);
    });
}
