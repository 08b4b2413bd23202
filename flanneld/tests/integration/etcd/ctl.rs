//! `flannelctl` on etcd: with a daemon, without a daemon, and without both.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use flannel_netlink::testing::in_netns_async;
use flannel_subnet::Cache;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::fixture::{CONFIG, Host, PREFIX, SWITCH, etcd_with_peers, peer_key, switch, until};
use super::server::Etcd;
use crate::programs::flannelctl;

/// The exit status and the output of a verb on a host.
fn ctl(host: &Host, etcd: &Etcd, args: &[&str]) -> (i32, String) {
    let mut command = Command::new(flannelctl());
    command.args(args).stdin(Stdio::null()).env("FLANNELD_ETCD_ENDPOINTS", &etcd.endpoint);
    command
        .env("FLANNELD_SUBNET_FILE", host.subnet_file())
        .env("FLANNELD_STATE_DIR", host.dir.path().join("state"));
    let output = host.netns.run(|| command.output().unwrap());
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr);
    // Without the line wraps of the terminal's width.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (output.status.code().unwrap(), text)
}

fn ctl_output(host: &Host, etcd: &Etcd, args: &[&str]) -> String {
    let (code, text) = ctl(host, etcd, args);
    assert_eq!(code, 0, "{args:?}: {text}");
    text
}

fn refuses(host: &Host, etcd: &Etcd, args: &[&str], why: &str) -> String {
    let (code, text) = ctl(host, etcd, args);
    assert!(code == 1 && text.contains(why), "{args:?}: {code}: {text}");
    text
}

fn value(host: &Host, etcd: &Etcd, args: &[&str]) -> Value {
    let text = ctl(host, etcd, &[args, &["--json"]].concat()).1;
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{args:?}: {error}: {text}"))
}

/// The keys of all peers, and the reason that they may be old.
fn listed_peers(host: &Host, etcd: &Etcd) -> (Vec<Value>, Value) {
    let output = value(host, etcd, &["peers"]);
    (
        output["peers"].as_array().unwrap().iter().map(|peer| peer["key"].clone()).collect(),
        output["stale"].clone(),
    )
}

/// The value of a key, and its etcd lease or 0.
async fn at(etcd: &Etcd, key: &str) -> Option<(String, i64)> {
    let found = etcd.client().await.get(key, None).await.unwrap();
    let kv = found.kvs().first()?;
    Some((kv.value_str().unwrap().to_owned(), kv.lease()))
}

#[test]
fn config_and_leases_are_managed_without_a_daemon() {
    in_netns_async(|| async {
        switch();
        let etcd = Etcd::spawn_on(SWITCH, "http", &[]);
        etcd.ready().await;
        let host = Host::new(1);
        let config = format!("{PREFIX}/config");
        let file = host.dir.path().join("config.json");
        let path = file.to_str().unwrap();
        refuses(&host, &etcd, &["config", "check"], &config);
        fs::write(&file, r#"{"Network":"10.1.0.0/33"}"#).unwrap();
        refuses(&host, &etcd, &["config", "set", path], "field Network");
        assert_eq!(at(&etcd, &config).await, None);
        fs::write(&file, CONFIG).unwrap();
        ctl_output(&host, &etcd, &["config", "check", path]);
        assert_eq!(at(&etcd, &config).await, None, "check does not write");
        ctl_output(&host, &etcd, &["config", "set", path]);
        assert_eq!(at(&etcd, &config).await, Some((CONFIG.to_owned(), 0)));
        assert!(ctl_output(&host, &etcd, &["config", "check"]).contains("10.1.99.0"));
        ctl_output(&host, &etcd, &["config", "patch", r#"{"Backend":{"MTU":1400}}"#]);
        let text = at(&etcd, &config).await.unwrap().0;
        let patched: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            (&patched["Backend"]["MTU"], &patched["SubnetMax"]),
            (&json!(1400), &json!("10.1.99.0"))
        );

        let reserve = ["lease", "reserve", "10.1.50.0/24", "--public-ip", "192.0.2.50"];
        ctl_output(&host, &etcd, &reserve);
        let (reserved, lease) = at(&etcd, &peer_key(50)).await.unwrap();
        let reserved: Value = serde_json::from_str(&reserved).unwrap();
        assert_eq!(
            (&reserved["PublicIP"], &reserved["BackendType"], lease),
            (&json!("192.0.2.50"), &json!("vxlan"), 0)
        );
        refuses(&host, &etcd, &reserve, "is reserved already");
        refuses(
            &host,
            &etcd,
            &["lease", "reserve", "10.2.9.0/24", "--public-ip", "192.0.2.9"],
            "10.1.0.0/16",
        );
        let listed = value(&host, &etcd, &["lease", "list"]);
        assert_eq!(
            (&listed["leases"][0]["key"], &listed["leases"][0]["reserved"]),
            (&json!("10.1.50.0-24"), &json!(true))
        );
        ctl_output(&host, &etcd, &["lease", "release", "10.1.50.0/24"]);
        assert_eq!(at(&etcd, &peer_key(50)).await, None);
        assert_eq!(value(&host, &etcd, &["lease", "list"])["leases"], json!([]));
    });
}

#[test]
fn verbs_query_a_daemon_and_change_its_lease() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("in sync peers=3").await;
        daemon.wait_for_log("running lease").await;
        let own = format!("{}-24", host.subnet());
        let page = ctl_output(&host, &etcd, &["status"]);
        for part in ["READY", &etcd.endpoint, &host.subnet(), "10.1.101.0/24", "eth0"] {
            assert!(page.contains(part), "{part}: {page}");
        }
        let status = value(&host, &etcd, &["status"]);
        let network = &status["network"];
        assert_eq!((&status["ready"], &network["lease"]["key"]), (&json!(true), &json!(own)));
        assert_eq!(
            (&network["lease"]["ownership"], &network["peers"]["total"]),
            (&json!("held"), &json!(3))
        );
        let peers = value(&host, &etcd, &["peers"]);
        let keys: Vec<_> = peers["peers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|peer| (&peer["key"], &peer["state"]))
            .collect();
        assert_eq!(
            json!(keys),
            json!([101, 102, 103].map(|n| (format!("10.1.{n}.0-24"), "in place")))
        );
        let why = ctl_output(&host, &etcd, &["why", "10.1.102.9"]);
        assert!(why.contains("everything is in place"), "{why}");
        refuses(&host, &etcd, &["why", "10.1.0.9"], "no node holds a subnet that contains it");

        // A lease expires until it is reserved.
        let lease = async || at(&etcd, &format!("{PREFIX}/subnets/{own}")).await.unwrap().1;
        assert_ne!(lease().await, 0);
        ctl_output(&host, &etcd, &["lease", "reserve", &own, "--public-ip", "192.0.2.1"]);
        assert_eq!(lease().await, 0);
        let reserved =
            || value(&host, &etcd, &["status"])["network"]["lease"]["ownership"] == "reserved";
        until(30, reserved, || daemon.log()).await;
        assert!(daemon.is_running());
        ctl_output(&host, &etcd, &["lease", "release", &own, "--force"]);
        daemon.wait_for_log("somebody deleted it, which makes flanneld exit").await;
        assert_eq!(daemon.ended().await.code(), Some(1));
    });
}

#[test]
fn the_cache_of_the_last_daemon_is_shown_if_neither_it_nor_etcd_answers() {
    in_netns_async(|| async {
        switch();
        let mut etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("in sync peers=3").await;
        daemon.wait_for_log("running lease").await;
        let cache = Cache::open(host.cache());
        let kept =
            || cache.load().is_ok_and(|saved| saved.config.is_some() && saved.leases.len() == 4);
        until(30, kept, || daemon.log()).await;
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().await.code(), Some(0));
        let all = [101, 102, 103].map(|n| json!(format!("10.1.{n}.0-24"))).to_vec();
        assert_eq!(
            listed_peers(&host, &etcd),
            (all.clone(), Value::Null),
            "the peers come from etcd"
        );
        ctl_output(&host, &etcd, &["peers"]);
        let why = value(&host, &etcd, &["why", "10.1.102.9"]);
        assert_eq!((&why["lease"], &why["stale"]), (&json!("10.1.102.0-24"), &Value::Null));

        etcd.kill();
        let begin = Instant::now();
        let why = value(&host, &etcd, &["why", "10.1.102.9"]);
        let taken = begin.elapsed();
        assert_eq!(
            (&why["lease"], &why["network"]),
            (&json!("10.1.102.0-24"), &json!("10.1.0.0/16")),
            "{why}"
        );
        let stale = why["stale"].as_str().unwrap_or_default();
        assert!(stale.starts_with("etcd does not answer: "), "{why}");
        assert!(stale.contains("the leases are those that the last daemon kept"), "{why}");
        // It takes 6 s. With the 20 s of a daemon it would take longer than this.
        assert!(taken < Duration::from_secs(18), "{taken:?}");
        let (keys, stale) = listed_peers(&host, &etcd);
        assert_eq!(keys, all);
        assert!(stale.is_string(), "{stale}");
        let page = refuses(&host, &etcd, &["peers"], "10.1.103.0/24");
        assert!(page.contains("does not answer"), "{page}");
        let page = refuses(&host, &etcd, &["why", "10.1.102.9"], "does not answer");
        assert!(page.contains("start flanneld"), "{page}");

        // Nothing is known.
        fs::remove_file(host.cache()).unwrap();
        refuses(&host, &etcd, &["peers"], "no daemon has kept leases here");
        let page = refuses(&host, &etcd, &["why", "10.1.102.9"], "nothing is known about it");
        assert!(page.contains("no daemon has kept leases here"), "{page}");
    });
}
