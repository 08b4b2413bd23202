//! TLS and users: accepted values, and errors that end the daemon or not.

use std::time::{Duration, Instant};

use etcd_client::{Client, ConnectOptions, Permission, PermissionType};
use flannel_netlink::testing::in_netns_async;
use nix::sys::signal::Signal;

use super::certificates::Authority;
use super::fixture::{Host, PREFIX, SWITCH, fill, start_on_switch, switch};
use super::server::Etcd;
use super::witness::{Monitor, present};

const PASSWORD: &str = "correct-horse-battery-staple";

fn network() -> Permission {
    Permission::new(PermissionType::Readwrite, format!("{PREFIX}/")).with_prefix()
}

/// An etcd with a network and users: `root`, and `flannel` with the permissions of flannel.
async fn etcd_with_users() -> Etcd {
    let etcd = Etcd::spawn_on(SWITCH, "http", &[]);
    etcd.ready().await;
    fill(&etcd).await;
    let mut client = etcd.client().await;
    client.user_add("root", "root", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.user_add("flannel", PASSWORD, None).await.unwrap();
    client.role_add("network").await.unwrap();
    client.role_grant_permission("network", network()).await.unwrap();
    client.user_grant_role("flannel", "network").await.unwrap();
    client.auth_enable().await.unwrap();
    etcd
}

/// A client with the user `root`, as soon as etcd answers.
async fn root(etcd: &Etcd) -> Client {
    let begin = Instant::now();
    loop {
        let options = ConnectOptions::new().with_user("root", "root");
        match Client::connect([&etcd.endpoint], Some(options)).await {
            Ok(client) => return client,
            Err(error) => assert!(begin.elapsed() < Duration::from_secs(30), "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn the_password_is_accepted_and_never_logged() {
    in_netns_async(|| async {
        switch();
        let etcd = etcd_with_users().await;
        let host = Host::new(1);
        let args = ["--etcd-endpoints", &etcd.endpoint, "--log", "trace"];
        let env = [("FLANNELD_ETCD_USERNAME", "flannel"), ("FLANNELD_ETCD_PASSWORD", PASSWORD)];
        let daemon = host.start_with(&args, &env);
        daemon.wait_for_log("in sync peers=3").await;
        daemon.wait_for_log("TRACE").await;
        assert_eq!(daemon.log_count(PASSWORD), 0, "{}", daemon.log());
        daemon.kill();

        let mut wrong =
            host.start_with(&args, &[env[0], ("FLANNELD_ETCD_PASSWORD", "sesame-street")]);
        assert_eq!(wrong.ended().await.code(), Some(1));
        for says in [&etcd.endpoint, "\"flannel\"", "password"] {
            wrong.wait_for_log(says).await;
        }
        assert_eq!(wrong.log_count("sesame-street"), 0, "{}", wrong.log());

        let mut elsewhere = host
            .start_with(&[args[0], args[1], "--etcd-prefix", "/elsewhere", "--log", "trace"], &env);
        assert_eq!(elsewhere.ended().await.code(), Some(1));
        for says in [&etcd.endpoint, "permission", "/elsewhere/config"] {
            elsewhere.wait_for_log(says).await;
        }
        assert_eq!(elsewhere.log_count(PASSWORD), 0, "{}", elsewhere.log());

        let mut nobody = host.start(&etcd.endpoint);
        assert_eq!(nobody.ended().await.code(), Some(1));
        nobody.wait_for_log("user name").await;
    });
}

#[test]
fn a_revoked_permission_does_not_stop_a_running_daemon() {
    in_netns_async(|| async {
        switch();
        let mut etcd = etcd_with_users().await;
        let host = Host::new(1);
        let env = [("FLANNELD_ETCD_USERNAME", "flannel"), ("FLANNELD_ETCD_PASSWORD", PASSWORD)];
        let mut daemon = host.start_with(&["--etcd-endpoints", &etcd.endpoint], &env);
        daemon.wait_for_log("in sync peers=3").await;
        let before = present(&host);
        let monitor = Monitor::of(&host).await;
        root(&etcd).await.user_revoke_role("flannel", "network").await.unwrap();
        etcd.kill();
        etcd.go();
        daemon.wait_for_log("has no permission").await;
        assert!(daemon.is_running());
        assert_eq!(present(&host), before);
        root(&etcd).await.user_grant_role("flannel", "network").await.unwrap();
        daemon.wait_for_log("the store answers").await;
        monitor.kept(&[101, 102, 103]);
        assert!(daemon.is_running());
        assert_eq!(daemon.log_count("has no permission"), 1, "{}", daemon.log());
    });
}

#[test]
fn a_ca_file_alone_enables_tls_and_a_wrong_one_stops_the_daemon() {
    in_netns_async(|| async {
        switch();
        let dir = tempfile::tempdir().unwrap();
        let ours = Authority::new(dir.path(), "ours");
        let theirs = Authority::new(dir.path(), "theirs");
        let server = ours.sign_into(dir.path(), "server", 2090);
        let file = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let args = [
            "--cert-file".into(),
            file(&server.certificate),
            "--key-file".into(),
            file(&server.key),
        ];
        let etcd = Etcd::spawn("https", &args);
        let start = |authority: &Authority| {
            let cafile = file(&authority.file);
            start_on_switch(
                dir.path(),
                &["--etcd-endpoints", &etcd.endpoint, "--etcd-cafile", &cafile],
            )
        };
        let mut daemon = start(&ours);
        daemon.wait_for_log("holds no network config yet").await;
        etcd.etcdctl(&[
            "--cacert",
            &file(&ours.file),
            "put",
            &format!("{PREFIX}/config"),
            super::fixture::CONFIG,
        ]);
        daemon.wait_for_log("running").await;
        assert!(daemon.is_running());
        daemon.kill();
        let mut wrong = start(&theirs);
        assert_eq!(wrong.ended().await.code(), Some(1));
        wrong.wait_for_log(&etcd.endpoint).await;
        wrong.wait_for_log("a CA that this node does not trust").await;
    });
}

/// The CA, etcd's certificate and the daemon's certificate change at once. After SIGHUP the daemon
/// uses the new ones.
#[test]
fn sighup_makes_the_daemon_read_rotated_certificates() {
    in_netns_async(|| async {
        switch();
        let dir = tempfile::tempdir().unwrap();
        let file = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let first = Authority::new(dir.path(), "first");
        let [cafile, etcd_cafile] =
            ["ca.pem", "etcd-ca.pem"].map(|name| file(&dir.path().join(name)));
        for trusted in [&cafile, &etcd_cafile] {
            std::fs::copy(&first.file, trusted).unwrap();
        }
        let server = first.sign_into(dir.path(), "server", 2090);
        let client = first.sign_into(dir.path(), "client", 2090);
        let args = [
            "--cert-file",
            &file(&server.certificate),
            "--key-file",
            &file(&server.key),
            "--client-cert-auth",
        ];
        let args = args.into_iter().chain(["--trusted-ca-file", &etcd_cafile]).map(str::to_owned);
        let mut etcd = Etcd::spawn("https", &args.collect::<Vec<_>>());
        let own = [
            "--cacert",
            &cafile,
            "--cert",
            &file(&client.certificate),
            "--key",
            &file(&client.key),
        ];
        let put = |etcd: &Etcd, key: &str, value: &str| {
            etcd.etcdctl(
                &own.into_iter()
                    .chain(["put", &format!("{PREFIX}/{key}"), value])
                    .collect::<Vec<_>>(),
            );
        };
        let options = ["--etcd-endpoints", &etcd.endpoint, "--etcd-cafile", &cafile];
        let pair =
            ["--etcd-certfile", &file(&client.certificate), "--etcd-keyfile", &file(&client.key)];
        let mut daemon = start_on_switch(dir.path(), &[options, pair].concat());
        daemon.wait_for_log("holds no network config yet").await;
        put(&etcd, "config", super::fixture::CONFIG);
        daemon.wait_for_log("running").await;
        daemon.signal(Signal::SIGHUP);
        daemon.wait_for_log("SIGHUP: read again result=the network config is unchanged").await;

        // etcd changes first: neither accepts the other's certificate.
        let second = Authority::new(dir.path(), "second");
        std::fs::copy(&second.file, &etcd_cafile).unwrap();
        second.sign_into(dir.path(), "server", 2090);
        etcd.kill();
        etcd.go();
        daemon.wait_for_log("a CA that this node does not trust").await;
        assert!(daemon.is_running(), "a certificate does not stop a daemon that has run");
        assert_eq!(daemon.log_count("the network config is unchanged"), 1, "{}", daemon.log());

        // Then this host's files.
        std::fs::copy(&second.file, &cafile).unwrap();
        second.sign_into(dir.path(), "client", 2090);
        daemon.signal(Signal::SIGHUP);
        super::fixture::until(
            60,
            || daemon.log_count("SIGHUP: read again result=the network config is unchanged") == 2,
            || daemon.log(),
        )
        .await;
        // The watch uses them too.
        let value = r#"{"PublicIP":"192.0.2.107","BackendType":"vxlan",
            "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:6b"}}"#;
        put(&etcd, "subnets/10.1.107.0-24", value);
        daemon.wait_for_log("in sync peers=1").await;
    });
}
