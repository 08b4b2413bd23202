//! The backend with real commands, on the fake kernel.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use flannel_backend_extension::Extension;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::RecordKeeper;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::network::NetworkHandle;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{Backend, SubnetManager};
use flannel_route::{Host, JoinOptions};
use serde_json::{Value, json};
use test_support::eventually_async;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(60);

fn dual(addresses: &[&str]) -> Dual<IpAddr> {
    addresses.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect()
}

/// A directory with a script that writes what it gets to a file, and then runs a hook.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().unwrap() };
        let script = format!(
            "what=$1; shift\n\
             args=$(printf ' [%s]' \"$@\")\n\
             variables=$SUBNET,$IPV6SUBNET,$PUBLIC_IP,$PUBLIC_IPV6,$NETWORK\n\
             printf '%s\\n' \"$what$args <$(cat)> $variables\" >>{log}\n\
             [ ! -e {hook} ] || . {hook}\n",
            log = place.path("log").display(),
            hook = place.path("hook").display(),
        );
        fs::write(place.path("script"), script).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A command that notes its name and these arguments.
    fn note(&self, name: &str, args: &[&str]) -> Value {
        let script = self.path("script");
        let words = ["sh", script.to_str().unwrap(), name].into_iter().chain(args.iter().copied());
        words.collect()
    }

    fn log(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// The first words of the log.
    fn ran(&self) -> Vec<String> {
        self.log().iter().map(|line| line.split(" [").next().unwrap().to_owned()).collect()
    }

    fn hook(&self, script: &str) {
        fs::write(self.path("hook"), script).unwrap();
    }

    /// A config with all commands, and these options.
    fn config(&self, options: &Value) -> String {
        let mut backend = json!({
            "Type": "extension",
            "PreStartupCommand": self.note("pre", &["$SUBNET"]),
            "PostStartupCommand": self.note("post", &["$SUBNET,$IPV6SUBNET", "$NETWORK"]),
            "SubnetAddCommand": self.note("add", &["$SUBNET", "--", "$PUBLIC_IP"]),
            "SubnetRemoveCommand": self.note("remove", &["$SUBNET"]),
            "ShutdownCommand": self.note("shutdown", &["$SUBNET"]),
        });
        for (name, value) in options.as_object().unwrap() {
            backend[name] = value.clone();
        }
        json!({
            "Network": "10.1.0.0/16", "EnableIPv6": true, "IPv6Network": "fd00:1::/48",
            "Backend": backend,
        })
        .to_string()
    }

    /// Waits until these commands have run, in any order.
    async fn ran_in_the_end(&self, expected: &[&str]) {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        let is_right = async || {
            let mut ran = self.ran();
            ran.sort_unstable();
            ran == expected
        };
        eventually_async(PATIENCE, is_right, || format!("{:#?}, {expected:?}", self.log())).await;
    }
}

fn uplink() -> ExternalInterface {
    ExternalInterface::new("eth0".parse().unwrap(), 1400, dual(&["192.0.2.1", "2001:db8::1"]))
        .with_public(dual(&["198.51.100.1", "2001:db8::1"]))
        .with_reason("the test says so")
}

/// A daemon's network, until it is dropped.
struct Running {
    handle: NetworkHandle,
    keeper: Arc<dyn RecordKeeper>,
    task: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a network, as a new process does.
async fn start(state: &Path, subnets: &FakeSubnets) -> Running {
    let kernel = FakeKernel::with_uplink("eth0");
    let backend = Extension::new();
    let host = Host::new(uplink(), Arc::new(kernel), Arc::new(subnets.clone()));
    let host = host.with_state_dir(state);
    let config = subnets.network_config().await.unwrap();
    let network = host.join(&backend, &config, JoinOptions::default()).await.unwrap().network;
    let handle = network.handle();
    let keeper = backend.record_keepers(Some(state)).remove(0);
    let views = subnets.watch_leases().await.unwrap();
    let task = tokio::spawn(async move { drop(network.run(views).await) });
    Running { handle, keeper, task }
}

async fn in_sync(running: &Running) {
    let mut status = running.handle.status.clone();
    let settled = tokio::time::timeout(PATIENCE, status.wait_for(|status| status.in_sync)).await;
    let is_in_sync = settled.is_ok();
    drop(settled);
    assert!(is_in_sync, "{:#?}", status.borrow());
}

fn peer(data: Option<&str>) -> LeaseAttrs {
    LeaseAttrs::from(
        Offer::new(dual(&["192.0.2.7", "2001:db8::7"]))
            .with_kind("extension")
            .with_data(Dual { v4: data.map(|data| json!(data).to_string().into()), v6: None }),
    )
}

const SEVEN: &str = "10.1.7.0-24&fd00:1:0:7::-64";
const EIGHT: &str = "10.1.8.0-24&fd00:1:0:8::-64";

#[tokio::test]
async fn commands_get_arguments_variables_and_input() {
    let place = Place::new();
    place.hook("[ $what != pre ] || echo ' data of <this> node '");
    let subnets = FakeSubnets::with_config(&place.config(&json!({})));
    // Data that a shell would run, and that looks like an option.
    subnets.put_attrs(SEVEN, peer(Some("--help; $(touch x) \u{1b}[31m")));
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    let own = running.handle.lease.subnets.to_string();
    let (v4, v6) = own.split_once('&').unwrap();
    let v4 = v4.replace('-', "/");
    let v6 = v6.replace("-64", "/64");
    assert_eq!(
        place.log(),
        [
            "pre [] <> ,,,,".to_owned(),
            format!(
                "post [{v4},{v6}] [10.1.0.0/16] <> {v4},{v6},192.0.2.1,2001:db8::1,10.1.0.0/16"
            ),
            "add [10.1.7.0/24] [--] [192.0.2.7] <--help; $(touch x) \u{1b}[31m> \
         10.1.7.0/24,fd00:1:0:7::/64,192.0.2.7,2001:db8::7,"
                .to_owned(),
        ]
    );
    // The address of the interface, as in Go flannel.
    let offer = &running.handle.lease.attrs.preferred;
    assert_eq!(offer.data.v4.as_deref(), Some("\"data of <this> node\""));
    assert_eq!(offer.public, uplink().address);
    assert_eq!(running.handle.mtu, 1400);
}

/// Every node of a cluster writes leases. No command runs for one that is not accepted.
#[tokio::test]
async fn hostile_leases_are_rejected_with_the_reason_and_run_nothing() {
    let place = Place::new();
    let subnets = FakeSubnets::with_config(&place.config(&json!({})));
    subnets.put_attrs(SEVEN, peer(None));
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    let before = place.log();
    let of = |kind: &'static str, public: &[&str]| {
        let public = dual(public);
        LeaseAttrs::from(Offer::new(public).with_kind(kind))
    };
    let at = |public: &str| of("extension", &[public, "2001:db8::50"]);
    let own = running.handle.lease.subnets.to_string();
    let half = own.split_once('&').unwrap().0.replace(".0-24", ".128-25");
    let hostile = [
        ("10.2.1.0-24", at("192.0.2.50"), "outside the pod network 10.1.0.0/16"),
        (&*half, at("192.0.2.50"), "overlaps this node's own lease"),
        ("10.1.7.128-25", at("192.0.2.50"), "overlaps the earlier lease"),
        ("10.1.20.0-24", at("127.0.0.1"), "127.0.0.1 is not a unicast host address"),
        ("10.1.21.0-24", at("224.0.0.1"), "224.0.0.1 is not a unicast host address"),
        ("10.1.23.0-24", at("10.1.23.9"), "10.1.23.9 lies inside its own subnet"),
        ("10.1.24.0-24", of("vxlan", &["192.0.2.50"]), "\"vxlan\", this node's is \"extension\""),
        ("10.1.25.0-24", of("extension; reboot", &["192.0.2.50"]), "extension; reboot"),
    ];
    for (key, attrs, _) in &hostile {
        subnets.put_attrs(key, attrs.clone());
    }
    let status = running.handle.status.clone();
    let all = async || {
        let status = status.borrow();
        (status.in_sync && status.rejected.len() == hostile.len()).then(|| status.rejected.clone())
    };
    let rejected = eventually_async(PATIENCE, all, || format!("{:#?}", status.borrow())).await;
    for (key, _, says) in &hostile {
        let why = rejected.get(&key.parse().unwrap()).unwrap().to_string();
        assert!(why.contains(says), "{key}: {why}");
    }
    assert_eq!(place.log(), before);
}

#[tokio::test]
async fn a_restart_removes_peers_that_left_and_repeats_nothing_for_those_that_stay() {
    let place = Place::new();
    let subnets = FakeSubnets::with_config(&place.config(&json!({ "PreStartupCommand": "" })));
    for key in [SEVEN, EIGHT] {
        subnets.put_attrs(key, peer(None));
    }
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    assert_eq!(place.ran(), ["post", "add", "add"]);
    drop(running);
    fs::remove_file(place.path("log")).unwrap();

    // Another config removes with another command. The one of the time of the add is run.
    let other = place.note("other remove", &[]);
    let config = json!({ "PreStartupCommand": "", "SubnetRemoveCommand": other });
    let subnets = FakeSubnets::with_config(&place.config(&config));
    subnets.put_attrs(EIGHT, peer(None));
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    place.ran_in_the_end(&["post", "remove"]).await;
    assert!(place.log().concat().contains("remove [10.1.7.0/24]"), "{:?}", place.log());

    // A changed peer is removed and added.
    subnets.put_attrs(EIGHT, peer(Some("new")));
    place.ran_in_the_end(&["post", "remove", "other remove", "add"]).await;
    assert!(place.log()[2].starts_with("other remove"), "{:?}", place.log());
    assert!(place.log()[3].contains("<new>"));
    in_sync(&running).await;

    // The node stops, and starts again.
    running.keeper.stop();
    place.ran_in_the_end(&["post", "remove", "other remove", "add", "shutdown"]).await;
    drop(running);
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    let all = ["post", "remove", "other remove", "add", "shutdown", "post"];
    place.ran_in_the_end(&all).await;
}

#[tokio::test]
async fn a_failure_is_in_the_status_and_tried_again() {
    let place = Place::new();
    place.hook("if [ $what = add ]; then echo no route >&2; exit 7; fi");
    let config = place.config(&json!({ "PreStartupCommand": "", "ShutdownCommand": null }));
    let subnets = FakeSubnets::with_config(&config);
    subnets.put_attrs(SEVEN, peer(None));
    let running = start(&place.path(""), &subnets).await;
    let mut status = running.handle.status.clone();
    let failing = status.wait_for(|status| status.failing.values().any(|f| f.tries > 1));
    let failing = tokio::time::timeout(PATIENCE, failing).await.unwrap().unwrap().failing.clone();
    let failure = failing.values().next().unwrap();
    let error = failure.error.to_string();
    assert!(error.starts_with("SubnetAddCommand: exit status: 7: no route"), "{error}");
    assert_eq!(failure.peer.unwrap().to_string(), SEVEN);
    place.hook("");
    in_sync(&running).await;

    // The words of commands and the data of peers may be secrets.
    let change = failure.change.to_string();
    assert!(!change.contains("script"), "{change}");
    assert!(change.contains("commands for the node at 192.0.2.7, 2001:db8::7"));

    // A command for a peer that left cannot fail for ever.
    place.hook("[ $what != remove ]");
    subnets.delete(SEVEN);
    let tried = async || place.ran().iter().filter(|name| *name == "remove").count() >= 5;
    eventually_async(PATIENCE, tried, || format!("{:?}", place.log())).await;
    in_sync(&running).await;
    assert_eq!(running.keeper.records().unwrap().len(), 1, "the record of the node itself");
}

/// A peer that comes with a wrong address, and corrects it.
#[tokio::test]
async fn a_failed_add_does_not_prevent_a_later_one() {
    let place = Place::new();
    // As `ip route del` of a route that was never added.
    place.hook("case $what in add) [ $PUBLIC_IP = 192.0.2.7 ];; remove) exit 2;; esac");
    let config = place.config(&json!({ "PreStartupCommand": "", "PostStartupCommand": "" }));
    let subnets = FakeSubnets::with_config(&config);
    let mut wrong = peer(None);
    wrong.preferred.public = dual(&["192.0.2.99", "2001:db8::7"]);
    subnets.put_attrs(SEVEN, wrong);
    let running = start(&place.path(""), &subnets).await;
    let tried = async || place.ran().contains(&"add".to_owned());
    eventually_async(PATIENCE, tried, || format!("{:?}", place.log())).await;
    subnets.put_attrs(SEVEN, peer(None));
    let is_right = async || running.handle.status.borrow().in_sync;
    eventually_async(PATIENCE, is_right, || format!("{:?}", place.log())).await;
    assert!(place.log().last().unwrap().starts_with("add [10.1.7.0/24] [--] [192.0.2.7]"));
}

/// A removal fails half way, and the same peer returns.
#[tokio::test]
async fn a_peer_that_returns_during_its_removal_is_added_again() {
    let place = Place::new();
    place.hook("[ $what != remove ]");
    let config =
        json!({ "PreStartupCommand": "", "PostStartupCommand": "", "ShutdownCommand": "" });
    let subnets = FakeSubnets::with_config(&place.config(&config));
    subnets.put_attrs(SEVEN, peer(None));
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    subnets.delete(SEVEN);
    let removes = async || place.ran().contains(&"remove".to_owned());
    eventually_async(PATIENCE, removes, || format!("{:?}", place.log())).await;
    subnets.put_attrs(SEVEN, peer(None));
    let is_added = async || place.ran().last().unwrap() == "add" && place.ran().len() > 2;
    eventually_async(PATIENCE, is_added, || format!("{:?}", place.log())).await;
    in_sync(&running).await;
}

/// A stop ends a command that runs. The next start repeats it.
#[tokio::test]
async fn a_stop_ends_commands_and_nothing_begins_any_more() {
    let place = Place::new();
    place.hook("[ $what != add ] || exec sleep 1000");
    let subnets = FakeSubnets::with_config(&place.config(&json!({ "PreStartupCommand": "" })));
    subnets.put_attrs(SEVEN, peer(None));
    let running = start(&place.path(""), &subnets).await;
    let adds = async || place.ran() == ["post", "add"];
    eventually_async(PATIENCE, adds, || format!("{:?}", place.log())).await;
    // It would not return before the command ends.
    running.keeper.stop();
    assert_eq!(place.ran(), ["post", "add", "shutdown"]);
    subnets.put_attrs(EIGHT, peer(None));
    let mut status = running.handle.status.clone();
    let refused = status.wait_for(|status| {
        status.failing.values().any(|failure| failure.error.to_string() == "this node stops")
    });
    drop(tokio::time::timeout(PATIENCE, refused).await.unwrap().unwrap());
    drop(running);
    assert_eq!(place.ran(), ["post", "add", "shutdown"]);
    place.hook("");
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    place.ran_in_the_end(&["post", "add", "shutdown", "post", "add", "add"]).await;
}

/// This node got another lease while no daemon ran.
#[tokio::test]
async fn commands_for_an_earlier_lease_of_this_node_end_first() {
    let place = Place::new();
    let subnets = FakeSubnets::with_config(&place.config(&json!({ "PreStartupCommand": "" })));
    subnets.put_attrs(SEVEN, peer(None));
    drop(start(&place.path(""), &subnets).await);
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    drop(running);
    // Its file, under another name.
    let dir = place.path("extension");
    fs::rename(dir.join("10.1.1.0-24"), dir.join("10.1.200.0-24")).unwrap();
    fs::remove_file(place.path("log")).unwrap();
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    assert_eq!(place.ran(), ["shutdown", "post"], "{:?}", place.log());
    assert!(!dir.join("10.1.200.0-24").exists());
    drop(running);

    // A peer has the earlier lease now.
    fs::rename(dir.join("10.1.1.0-24"), dir.join("10.1.8.0-24")).unwrap();
    fs::remove_file(place.path("log")).unwrap();
    subnets.put_attrs(EIGHT, peer(None));
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    assert_eq!(place.ran(), ["shutdown", "post", "add"], "{:?}", place.log());
}

#[tokio::test]
async fn peers_wait_for_the_commands_of_this_node() {
    let place = Place::new();
    place.hook("[ $what != post ] || [ -e /nonexistent ]");
    let subnets = FakeSubnets::with_config(&place.config(&json!({ "PreStartupCommand": "" })));
    subnets.put_attrs(SEVEN, peer(None));
    let running = start(&place.path(""), &subnets).await;
    let tried = async || place.ran().len() >= 2;
    eventually_async(PATIENCE, tried, || format!("{:?}", place.log())).await;
    assert!(place.ran().iter().all(|name| name == "post"), "{:?}", place.log());
    place.hook("");
    in_sync(&running).await;
    assert_eq!(place.ran().last().unwrap(), "add");
}

#[tokio::test]
async fn many_peers_are_added_some_at_a_time() {
    const PEERS: usize = 60;
    let place = Place::new();
    // Each command notes how many run with it, and the first eight wait for each other.
    let running_dir = place.path("running");
    fs::create_dir(&running_dir).unwrap();
    let script = "mkdir running/$$ && ls running | wc -l >>most\n\
                  while [ $(wc -l <most) -lt 8 ]; do sleep 0.01; done\n\
                  rmdir running/$$";
    let script = format!("cd {}\n{script}\n", place.path("").display());
    fs::write(place.path("add"), script).unwrap();
    let config = place.config(&json!({
        "PreStartupCommand": "", "PostStartupCommand": "", "ShutdownCommand": "",
        "SubnetAddCommand": ["sh", "-e", place.path("add")],
    }));
    let subnets = FakeSubnets::with_config(&config);
    for n in 10..10 + PEERS {
        subnets.put_attrs(&format!("10.1.{n}.0-24&fd00:1:0:{n}::-64"), peer(None));
    }
    let running = start(&place.path(""), &subnets).await;
    in_sync(&running).await;
    let most = fs::read_to_string(place.path("most")).unwrap();
    let counts: Vec<usize> = most.lines().map(|line| line.trim().parse().unwrap()).collect();
    assert_eq!(counts.len(), running.handle.status.borrow().peers);
    assert_eq!(counts.iter().max(), Some(&8));
}

#[tokio::test]
async fn a_config_or_host_that_cannot_work_is_refused() {
    let place = Place::new();
    for (options, parts) in [
        (json!({ "SubnetAddCommand": "no-such-program" }), ["SubnetAddCommand", "no-such-program"]),
        (
            json!({ "PreStartupCommand": ["sh", "-c", "echo why; exit 3"] }),
            ["PreStartup", "3: why"],
        ),
    ] {
        let subnets = FakeSubnets::with_config(&place.config(&options));
        let kernel = Arc::new(FakeKernel::with_uplink("eth0"));
        let host = Host::new(uplink(), kernel, Arc::new(subnets.clone()));
        let config = subnets.network_config().await.unwrap();
        let joined = host.join(&Extension::new(), &config, JoinOptions::default()).await;
        let error = joined.map(drop).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}
