//! The waits of a start, and their log lines.

use flannel_netlink::testing::{in_netns_async, ip};

use super::fixture::{
    CONFIG, Host, PREFIX, SWITCH, delete, etcd_with_peers, fill, peer_key, start_on_switch, switch,
};
use super::server::Etcd;
use super::witness::{agrees, present};

#[test]
fn each_wait_of_a_start_is_logged_once() {
    in_netns_async(|| async {
        switch();
        let mut etcd = Etcd::spawn_on(SWITCH, "http", &[]);
        etcd.kill();
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("waiting for the store").await;
        daemon.wait_for_log(&etcd.endpoint).await;
        daemon.wait_for_log("refused").await;
        etcd.go();
        daemon.wait_for_log(&format!("{PREFIX}/config holds no network config yet")).await;
        for (config, says) in [
            (r#"{"Network":"10.1.0.0/16""#, "EOF while parsing"),
            (r#"{"Network":"10.1.0.0/33"}"#, "10.1.0.0/33"),
        ] {
            etcd.put(&format!("{PREFIX}/config"), config).await;
            daemon.wait_for_log(says).await;
        }
        assert_eq!(daemon.log_count("waiting"), 4, "{}", daemon.log());
        assert!(daemon.is_running());
        fill(&etcd).await;
        daemon.wait_for_log("the wait is over").await;
        agrees(&etcd, &host, &daemon).await;
        assert_eq!(daemon.log_count("waiting"), 4, "{}", daemon.log());
    });
}

#[test]
fn a_start_waits_for_a_majority_of_etcd() {
    in_netns_async(|| async {
        switch();
        let mut members = Etcd::cluster_on(SWITCH).await;
        fill(&members[0]).await;
        members[1].kill();
        members[2].kill();
        let host = Host::new(1);
        let endpoints: Vec<_> = members.iter().map(|member| member.endpoint.clone()).collect();
        let mut daemon = host.start(&endpoints.join(","));
        daemon.wait_for_log("waiting for the store").await;
        assert!(daemon.is_running());
        members[1].go();
        daemon.wait_for_log("running").await;
        agrees(&members[0], &host, &daemon).await;
        assert_eq!(daemon.log_count("waiting"), 1, "{}", daemon.log());
    });
}

#[test]
fn a_start_waits_for_a_free_subnet() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let config = CONFIG.replace("10.1.1.0", "10.1.101.0").replace("10.1.99.0", "10.1.103.0");
        etcd.put(&format!("{PREFIX}/config"), &config).await;
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("out of IPv4 subnets: all 3").await;
        assert!(daemon.is_running());
        assert!(present(&host).is_empty());
        delete(&etcd, &peer_key(102)).await;
        daemon.wait_for_log("running").await;
        assert_eq!(host.subnet(), "10.1.102.0");
        assert_eq!(daemon.log_count("out of IPv4"), 1, "{}", daemon.log());
    });
}

#[test]
fn the_default_registry_is_etcd_at_its_default_address() {
    in_netns_async(|| async {
        switch();
        let place = "http://127.0.0.1:2379".to_owned();
        let flags = ["--listen-client-urls", "--advertise-client-urls"];
        let args: Vec<String> =
            flags.iter().flat_map(|flag| [(*flag).to_owned(), place.clone()]).collect();
        let mut etcd = Etcd::spawn("http", &args);
        etcd.endpoint = place;
        etcd.ready().await;
        fill(&etcd).await;
        let dir = tempfile::tempdir().unwrap();
        let daemon = start_on_switch(dir.path(), &[]);
        daemon.wait_for_log("in sync peers=3").await;
        daemon.wait_for_log("store=etcd:http://127.0.0.1:4001,http://127.0.0.1:2379").await;
    });
}

#[test]
fn a_changed_config_is_applied_unless_it_changes_the_pod_network() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_peers().await;
        let host = Host::new(1);
        let mut daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("in sync").await;
        let config = format!("{PREFIX}/config");
        etcd.put(&config, &CONFIG.replace(r#""vxlan""#, r#""vxlan","MTU":1400"#)).await;
        daemon.wait_for_log("rebuilding the network reason=the network config has changed").await;
        until_mtu(&host, 1350).await;
        agrees(&etcd, &host, &daemon).await;
        etcd.put(&config, &CONFIG.replace("10.1.0.0/16", "10.0.0.0/8")).await;
        daemon.wait_for_log("other networks now").await;
        etcd.put(&config, &CONFIG.replace(r#""vxlan""#, r#""vlxan""#)).await;
        daemon.wait_for_log("vlxan").await;
        assert!(daemon.is_running());
        assert_eq!(daemon.log_count("rebuilding the network"), 1, "{}", daemon.log());
        // A rebuild for another reason keeps the networks of its pods.
        etcd.put(&config, &CONFIG.replace("10.1.", "10.2.")).await;
        let before = host.subnet();
        host.netns.run(|| ip("link set eth0 mtu 1300"));
        until_mtu(&host, 1250).await;
        assert_eq!(host.subnet(), before);
    });
}

async fn until_mtu(host: &Host, mtu: u32) {
    let env = host.dir.path().join("run/subnet.env");
    let begin = std::time::Instant::now();
    while !std::fs::read_to_string(&env)
        .unwrap_or_default()
        .contains(&format!("FLANNEL_MTU={mtu}\n"))
    {
        assert!(begin.elapsed().as_secs() < 20, "{}", std::fs::read_to_string(&env).unwrap());
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}
