//! Outages of etcd and of the path to it: no peer is withdrawn, and afterwards every kernel matches
//! etcd.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use flannel_netlink::testing::in_netns_async;
use nix::sys::signal::Signal;

use super::fixture::{
    Daemon, Host, PREFIX, SWITCH, delete, etcd_with_peers, fill, peer_key, put_peer, switch, until,
};
use super::server::Etcd;
use super::witness::{Monitor, agrees, leases, present};

/// Two hosts whose daemons are in sync, and their monitors.
struct Two {
    hosts: [Host; 2],
    daemons: [Daemon; 2],
    monitors: [Monitor; 2],
}

impl Two {
    async fn start(etcd: &Etcd, endpoints: &str) -> Self {
        let hosts = [Host::new(1), Host::new(2)];
        let daemons = [hosts[0].start(endpoints), hosts[1].start(endpoints)];
        for daemon in &daemons {
            daemon.wait_for_log("in sync peers=4").await;
        }
        let monitors = [Monitor::of(&hosts[0]).await, Monitor::of(&hosts[1]).await];
        let two = Self { hosts, daemons, monitors };
        two.agree(etcd).await;
        two
    }

    async fn agree(&self, etcd: &Etcd) {
        for (host, daemon) in self.hosts.iter().zip(&self.daemons) {
            agrees(etcd, host, daemon).await;
        }
    }

    async fn wait_for_logs(&self, text: &str) {
        for daemon in &self.daemons {
            daemon.wait_for_log(text).await;
        }
    }

    /// Asserts that no object of these peers, or of the other host, was withdrawn.
    fn kept(&mut self, peers: &[u8]) {
        for (n, monitor) in self.monitors.iter().enumerate() {
            monitor.kept(peers);
            let other = &self.hosts[1 - n];
            monitor.kept_all(&[&other.subnet(), &other.public()]);
        }
        for daemon in &mut self.daemons {
            assert!(daemon.is_running(), "{}", daemon.log());
        }
    }
}

/// Deletes peer 102, moves peer 103, adds peer 104.
async fn change(etcd: &Etcd) {
    delete(etcd, &peer_key(102)).await;
    put_peer(etcd, 103, 203).await;
    put_peer(etcd, 104, 104).await;
}

#[test]
fn a_restart_of_etcd_withdraws_no_peer() {
    in_netns_async(|| async {
        switch();
        let mut etcd = etcd_with_peers().await;
        let mut two = Two::start(&etcd, &etcd.endpoint.clone()).await;
        let before = present(&two.hosts[0]);
        etcd.kill();
        two.wait_for_logs("store lost").await;
        assert_eq!(present(&two.hosts[0]), before);
        etcd.go();
        etcd.ready().await;
        two.wait_for_logs("the store answers leases=5").await;
        change(&etcd).await;
        two.agree(&etcd).await;
        two.kept(&[101, 103]);
        for daemon in &two.daemons {
            assert_eq!(daemon.log_count("store lost"), 1, "{}", daemon.log());
            assert_eq!(daemon.log_count("the store answers"), 1, "{}", daemon.log());
        }
    });
}

/// The pause takes `ETCD_PAUSE` seconds; 3 by default.
#[test]
fn a_pause_of_etcd_withdraws_no_peer() {
    in_netns_async(|| async {
        let pause = std::env::var("ETCD_PAUSE")
            .map_or(3, |seconds| seconds.parse().expect("ETCD_PAUSE in seconds"));
        switch();
        let etcd = etcd_with_peers().await;
        let mut two = Two::start(&etcd, &etcd.endpoint.clone()).await;
        let before = present(&two.hosts[0]);
        etcd.pause();
        // A daemon that starts meanwhile waits.
        let third = Host::new(3);
        let late = third.start(&etcd.endpoint);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(pause) {
            assert_eq!(present(&two.hosts[0]), before);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        etcd.resume();
        late.wait_for_log("in sync peers=5").await;
        change(&etcd).await;
        two.agree(&etcd).await;
        agrees(&etcd, &third, &late).await;
        two.kept(&[101, 103]);
    });
}

#[test]
fn a_compaction_of_etcd_withdraws_no_peer() {
    in_netns_async(|| async {
        switch();
        let mut etcd = etcd_with_peers().await;
        let mut two = Two::start(&etcd, &etcd.endpoint.clone()).await;
        let compact = async |etcd: &Etcd| {
            let mut client = etcd.client().await;
            let now = client.get("/", None).await.unwrap().header().unwrap().revision();
            client.compact(now, None).await.unwrap();
        };
        for n in 110..115 {
            put_peer(&etcd, n, n).await;
            compact(&etcd).await;
        }
        two.agree(&etcd).await;
        // Events during the pause are compacted before the watchers get them.
        for daemon in &two.daemons {
            daemon.signal(Signal::SIGSTOP);
        }
        etcd.kill();
        etcd.go();
        etcd.ready().await;
        change(&etcd).await;
        for n in 110..115 {
            delete(&etcd, &peer_key(n)).await;
        }
        compact(&etcd).await;
        for daemon in &two.daemons {
            daemon.signal(Signal::SIGCONT);
        }
        two.agree(&etcd).await;
        two.kept(&[101, 103]);
    });
}

#[test]
fn the_loss_of_a_member_of_three_withdraws_no_peer() {
    in_netns_async(|| async {
        switch();
        let mut members = Etcd::cluster_on("192.0.2.254").await;
        fill(&members[0]).await;
        let endpoints: Vec<_> = members.iter().map(|member| member.endpoint.clone()).collect();
        let mut two = Two::start(&members[0], &endpoints.join(",")).await;
        // Each member once, so also the leader, and the member that a daemon uses.
        for (killed, peer) in [(0, 111), (1, 112), (2, 113)] {
            members[killed].kill();
            let alive = &members[(killed + 1) % 3];
            alive.ready().await;
            put_peer(alive, peer, peer).await;
            two.agree(alive).await;
            members[killed].go();
            members[killed].ready().await;
        }
        change(&members[0]).await;
        two.agree(&members[0]).await;
        two.kept(&[101, 103, 111, 112, 113]);
    });
}

#[test]
fn a_cut_path_to_etcd_withdraws_no_peer() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let mut two = Two::start(&etcd, &etcd.endpoint.clone()).await;
        let lost = |two: &Two| two.daemons.each_ref().map(|daemon| daemon.log_count("store lost"));
        let mut rounds = 0;
        loop {
            let before = present(&two.hosts[0]);
            let known = lost(&two);
            two.hosts[0].cut();
            let begin = Instant::now();
            change(&etcd).await;
            agrees(&etcd, &two.hosts[1], &two.daemons[1]).await;
            // Only missing answers reveal the cut.
            until(60, || lost(&two)[0] > known[0], || two.daemons[0].log()).await;
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            // The cut lasts longer than a connection may be silent.
            while begin.elapsed() < Duration::from_secs(12) {
                assert_eq!(present(&two.hosts[0]), before);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            two.hosts[0].repair();
            two.agree(&etcd).await;
            two.kept(&[101, 103]);
            if lost(&two) == [known[0] + 1, known[1]] {
                break;
            }
            // An etcd that stalls for too long breaks the intact connection too, but not in two
            // rounds.
            rounds += 1;
            assert!(rounds < 2, "{}\n{}", two.daemons[0].log(), two.daemons[1].log());
        }
    });
}

#[test]
fn of_two_daemons_with_a_public_address_the_second_has_the_lease_after_each_restart() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let hosts = [Host::new(1), Host::new(2)];
        let args = ["--etcd-endpoints", &etcd.endpoint, "--public-ip", "192.0.2.50"];
        let mut first = hosts[0].start_with(&args, &[]);
        first.wait_for_log("in sync peers=3").await;
        // With its subnet file, which comes after the firewall's rules.
        first.wait_for_log("running lease").await;
        let mut second = hosts[1].start_with(&args, &[]);
        assert_eq!(first.ended().await.code(), Some(1), "{}", first.log());
        second.wait_for_log("in sync peers=3").await;
        first.wait_for_log(&hosts[1].mark()).await;
        first.wait_for_log("192.0.2.50").await;
        second.wait_for_log(&hosts[0].mark()).await;
        second.wait_for_log("taking over a lease with our public address").await;
        let ours =
            leases(&etcd).await.into_values().filter(|(public, _)| public == "192.0.2.50").count();
        assert_eq!(ours, 1);
        assert_eq!(hosts[0].subnet(), hosts[1].subnet());
        let before = present(&hosts[1]);
        // As a service manager does.
        let mut again = hosts[0].start_with(&args, &[]);
        assert_eq!(again.ended().await.code(), Some(1), "{}", again.log());
        again.wait_for_log("192.0.2.50 (vxlan) under the holder ID").await;
        again.wait_for_log(&hosts[1].mark()).await;
        assert!(second.is_running() && present(&hosts[1]) == before, "{}", second.log());
    });
}

#[test]
fn the_lease_of_an_earlier_flannel_on_the_host_is_taken_over_without_a_warning() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let first = host.start(&etcd.endpoint);
        first.wait_for_log("running lease").await;
        let subnet = host.subnet();
        first.kill();
        // Like Go flannel, it leaves a lease with another holder, and a subnet file.
        fs::remove_dir_all(host.dir.path().join("state")).unwrap();
        let second = host.start(&etcd.endpoint);
        second.wait_for_log("taking over the lease of an earlier flannel on this host").await;
        second.wait_for_log("running lease").await;
        assert_eq!(host.subnet(), subnet);
        assert_eq!(second.log_count("with our public address"), 0, "{}", second.log());
    });
}

#[test]
fn a_deleted_lease_stops_the_daemon() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("in sync peers=3").await;
        let before = present(&host);
        delete(&etcd, &format!("{PREFIX}/subnets/{}-24", host.subnet())).await;
        assert_eq!(daemon.ended().await.code(), Some(1));
        daemon.wait_for_log("somebody deleted it").await;
        until(1, || present(&host) == before, || "the data path has changed".into()).await;
    });
}

#[test]
fn the_repair_command_restarts_etcd() {
    in_netns_async(|| async {
        switch();
        let mut etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let daemon = host.start(&etcd.endpoint.clone());
        daemon.wait_for_log("in sync peers=3").await;
        let hint = || {
            let status: serde_json::Value =
                serde_json::from_str(&host.request("/v1/status").1).unwrap();
            let problems = status["problems"].as_array().unwrap().iter();
            let mut of_store =
                problems.filter(|p| p["text"].as_str().unwrap().starts_with("the store does not"));
            of_store.next().map(|problem| problem["hint"].as_str().unwrap().to_owned())
        };
        assert_eq!(hint(), None);
        etcd.kill();
        until(60, || hint().is_some(), || daemon.log()).await;
        let command = hint().unwrap();
        assert!(command.contains(&format!(" # on {SWITCH};")), "{command}");
        // A service manager that forwards the command to another host.
        let order = host.dir.path().join("order");
        let shim = host.dir.path().join("systemctl");
        test_support::write_script(
            &shim,
            &format!("#!/bin/sh\necho \"$@\" >{}\n", order.display()),
        );
        let path = format!("{}:{}", host.dir.path().display(), std::env::var("PATH").unwrap());
        let done = Command::new("sh").args(["-ec", &command]).env("PATH", path).status().unwrap();
        assert!(done.success(), "{command}");
        assert_eq!(fs::read_to_string(order).unwrap(), "restart etcd\n");
        etcd.go();
        until(60, || hint().is_none(), || daemon.log()).await;
    });
}
