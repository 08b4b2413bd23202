//! Wrong configurations, and their errors.

use flannel_core::subnet::{StoreFailure, StoreKind};
use flannel_core::{Error, SubnetManager};
use flannel_subnet_kube::testing::ApiServer;
use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity};
use serde_json::json;
use tokio::net::TcpSocket;

use crate::fixture::{DUAL, Fixture, PREFIX, V4, blank, until, vxlan};

fn assert_contains(error: &Error, parts: &[&str]) {
    let text = error.to_string();
    parts.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
}

#[tokio::test]
async fn an_unreachable_api_server_is_reported() {
    let fixture = Fixture::new(V4);
    // No other process gets the port while it is bound, and nothing listens.
    let nobody = TcpSocket::new_v4().unwrap();
    nobody.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let closed = nobody.local_addr().unwrap();
    let mut options = fixture.options("me");
    options.api_url = Some(format!("http://{closed}"));
    let manager = KubeManager::open(options).await.unwrap();
    let error = manager.hints().await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "waiting helps: {error:?}");
    assert_contains(&error, &[&format!("kube:http://{closed}: get nodes: "), "Connection refused"]);
    assert!(matches!(manager.watch_leases().await, Err(Error::Store { .. })));
    assert!(
        manager
            .store_status()
            .last_error
            .is_some_and(|error| error.text.contains("Connection refused"))
    );
    assert_eq!(manager.store_status().confirmed, None);
    assert_eq!(error.store_failure(), StoreFailure::Other);
    let url = format!("http://{closed}");
    assert_eq!(manager.store_status().kind, StoreKind::Kubernetes { url });
}

#[tokio::test]
async fn wrong_options_for_the_server_are_reported() {
    let fixture = Fixture::new(V4);
    let open = async |change: &dyn Fn(&mut KubeOptions)| {
        let mut options = fixture.options("me");
        change(&mut options);
        let error = KubeManager::open(options).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        error
    };
    let error = open(&|options| options.api_url = Some("kube.example".into())).await;
    assert_contains(&error, &["\"kube.example\"", "https://192.0.2.1:6443"]);
    let error = open(&|options| {
        options.api_url = None;
        options.kubeconfig = None;
    })
    .await;
    assert_contains(&error, &["neither a URL nor a kubeconfig", "service account"]);
    let missing = fixture.dir.path().join("kubeconfig");
    let error = open(&|options| options.kubeconfig = Some(missing.clone())).await;
    assert_contains(&error, &[&missing.display().to_string(), "No such file"]);
    std::fs::write(&missing, "clusters: 7").unwrap();
    let error = open(&|options| options.kubeconfig = Some(missing.clone())).await;
    assert_contains(&error, &[&missing.display().to_string()]);
    let with = |cluster: &str, user: &str| {
        let text = format!(
            "current-context: c\n\
             clusters: [{{name: c, cluster: {{server: \"https://h\"{cluster}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        );
        std::fs::write(&missing, text).unwrap();
    };
    // A section whose content does not matter.
    const CA: &str =
        "LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCkFBQUEKLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=";
    for (cluster, user, parts) in [
        ("", "auth-provider: {name: gcp}", ["\"auth-provider\"", "a token, a tokenFile"]),
        ("", "as: admin", ["\"as\"", "client certificate or exec"]),
        ("", "username: x, token: y", ["a username and a token", "expected only one"]),
        (
            ", insecure-skip-tls-verify: true, certificate-authority-data: ''",
            "exec: {apiVersion: client.authentication.k8s.io/v1alpha1, command: aws}",
            ["(exec): its apiVersion is \"client.authentication.k8s.io/v1alpha1\"", "k8s.io/v1\""],
        ),
        (
            "",
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: aws, \
             interactiveMode: Always}",
            ["interactiveMode is \"Always\"", "\"IfAvailable\""],
        ),
        (
            "",
            "exec: {apiVersion: client.authentication.k8s.io/v1, command: /nowhere/aws, \
             installHint: install it}",
            ["/nowhere/aws: No such file", "install it"],
        ),
        (", proxy-url: 'https://u:secret@p'", "", ["proxy-url", "expected a URL such as http://"]),
        (
            &format!(", insecure-skip-tls-verify: true, certificate-authority-data: {CA}"),
            "",
            ["insecure-skip-tls-verify", "a certificate-authority: expected only one"],
        ),
        ("", "client-certificate-data: eA==", ["client-certificate", "no client-key"]),
        (
            "",
            "client-certificate: /nowhere, client-key: /nowhere",
            ["client-certificate /nowhere", "No such file"],
        ),
        (
            "",
            "client-certificate-data: '!', client-key-data: eA==",
            ["client-certificate-data", "base64"],
        ),
        ("", "token: ' '", ["its user's token", "it is empty"]),
    ] {
        with(cluster, user);
        let error = open(&|options| {
            options.api_url = None;
            options.kubeconfig = Some(missing.clone());
        })
        .await;
        assert_contains(&error, &parts);
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn a_server_certificate_of_another_ca_is_refused() {
    let fixture = Fixture::new(V4);
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    for (ca, good) in [(other.cert.pem(), false), (signed.cert.pem(), true)] {
        let ca_file = fixture.dir.path().join("ca");
        let kubeconfig = fixture.dir.path().join("kubeconfig");
        std::fs::write(&ca_file, ca).unwrap();
        let text = format!(
            "current-context: c\nclusters: [{{name: c, cluster: \
             {{server: \"{}\", certificate-authority: {}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c}}}}]\n",
            server.url(),
            ca_file.display()
        );
        std::fs::write(&kubeconfig, text).unwrap();
        let mut options = fixture.options("me");
        options.kubeconfig = Some(kubeconfig);
        options.api_url = None;
        let manager = KubeManager::open(options).await.unwrap();
        match manager.hints().await {
            Ok(_) => assert!(good),
            Err(error) => {
                assert!(!good && matches!(error, Error::Refused { .. }), "{error:?}");
                assert_contains(
                    &error,
                    &[
                        "certificate is not accepted",
                        "invalid peer certificate",
                        "expected one that the CA",
                    ],
                );
                assert_eq!(error.store_failure(), StoreFailure::ServerCertificate);
                let last_error = manager.store_status().last_error.unwrap();
                assert_eq!(last_error.failure, StoreFailure::ServerCertificate);
            }
        }
    }
}

#[tokio::test]
async fn a_forbidden_request_is_reported_with_verb_and_resource() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let manager = fixture.manager("me").await;
    for (verb, resource) in [("get", "nodes"), ("patch", "nodes/status")] {
        fixture.server.forbid(verb, resource);
        let error = manager.acquire_lease(&vxlan()).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert_contains(
            &error,
            &[&format!("the verb {verb:?} on the resource {resource:?}"), "system:serviceaccount"],
        );
        fixture.server.permit_all();
    }
    // The pod names the node.
    fixture.server.put_pod("kube-flannel", "flannel-x", "me");
    fixture.server.forbid("get", "pods");
    let pod = NodeIdentity::Pod { namespace: "kube-flannel".into(), name: "flannel-x".into() };
    let in_pod =
        KubeManager::open(KubeOptions { identity: pod, ..fixture.options("") }).await.unwrap();
    for error in [in_pod.hints().await.unwrap_err(), in_pod.watch_leases().await.unwrap_err()] {
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert_contains(
            &error,
            &["the verb \"get\" on the resource \"pods\"", "system:serviceaccount"],
        );
        assert_eq!(error.store_failure(), StoreFailure::Forbidden);
    }
    fixture.server.permit_all();
    in_pod.hints().await.unwrap();
    fixture.server.forbid("list", "nodes");
    let views = manager.watch_leases().await.unwrap();
    let reported = |text: &str| {
        manager.store_status().last_error.is_some_and(|error| error.text.contains(text))
    };
    until(|| reported("the verb \"list\" on the resource \"nodes\"")).await;
    fixture.server.permit_all();
    fixture.server.forbid("watch", "nodes");
    until(|| reported("the verb \"watch\" on the resource \"nodes\"")).await;
    fixture.server.permit_all();
    until(|| manager.store_status().last_error.is_none() && views.borrow().leases.is_empty()).await;
}

#[tokio::test]
async fn an_incomplete_node_is_waited_for() {
    let fixture = Fixture::new(V4);
    let manager = fixture.manager("me").await;
    let refused = async |parts: &[&str]| {
        let error = manager.acquire_lease(&vxlan()).await.unwrap_err();
        assert!(matches!(error, Error::NotReady { .. }), "{error:?}");
        assert_contains(&error, parts);
        assert_eq!(fixture.server.count("PATCH"), 0, "nothing is published for it");
    };
    refused(&["there is no node \"me\"", "NODE_NAME"]).await;
    fixture.server.put_node("me", blank(&[]));
    refused(&["node me: it has no IPv4 PodCIDR yet", "--allocate-node-cidrs"]).await;
    fixture.server.put_node("me", blank(&["fd00:0:0:5::/64"]));
    refused(&["node me: it has no IPv4 PodCIDR yet"]).await;
    fixture.server.put_node("me", blank(&["10.9.0.0/24"]));
    refused(&[
        "its PodCIDR 10.9.0.0/24 lies outside the pod network 10.1.0.0/16",
        "net-conf.json",
        "--cluster-cidr",
    ])
    .await;
    fixture.server.put_node("me", blank(&["10.1.0.0/8"]));
    refused(&["its PodCIDR 10.0.0.0/8 lies outside"]).await;
    let mut node = blank(&["10.1.1.0/24"]);
    node["metadata"]["annotations"] = json!({ format!("{PREFIX}public-ip-overwrite"): "nowhere" });
    fixture.server.put_node("me", node);
    refused(&["annotation flannel.alpha.coreos.com/public-ip-overwrite: \"nowhere\"", "192.0.2.1"])
        .await;
    let mut node = blank(&["10.1.1.0/24"]);
    node["metadata"]["annotations"] = json!({ format!("{PREFIX}node-public-ip"): "2001:db8::1" });
    fixture.server.put_node("me", node);
    assert_contains(
        &manager.hints().await.unwrap_err(),
        &["node-public-ip: \"2001:db8::1\" is not valid, expected an IPv4 address"],
    );
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    manager.acquire_lease(&vxlan()).await.unwrap();
}

#[tokio::test]
async fn in_dual_stack_both_families_need_a_pod_cidr() {
    let fixture = Fixture::new(DUAL);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let error = fixture.manager("me").await.acquire_lease(&vxlan()).await.unwrap_err();
    assert_contains(&error, &["node me: it has no IPv6 PodCIDR yet"]);
}

#[tokio::test]
async fn network_config_errors_are_reported_and_networks_do_not_change() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let manager = fixture.manager("me").await;
    std::fs::remove_file(fixture.net_config()).unwrap();
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, Error::NoConfig { .. }));
    assert_contains(&error, &["net-conf.json"]);
    fixture.write_config(r#"{"Network":"10.1.0.0/16","Backend":{"Type":7}}"#);
    let error = manager.network_config().await.unwrap_err();
    assert!(matches!(error, Error::Config { .. }));
    assert_contains(&error, &["net-conf.json", "field Backend.Type"]);
    assert!(manager.store_status().wrong_config.is_some());
    fixture.write_config(V4);
    let config = manager.network_config().await.unwrap();
    assert_eq!(manager.store_status().wrong_config, None);
    manager.acquire_lease(&vxlan()).await.unwrap();
    // Pods do not survive other networks. Another backend is a change.
    fixture.write_config(r#"{"Network":"10.2.0.0/16","Backend":{"Type":"host-gw"}}"#);
    let changed = crate::fixture::wait(manager.config_changed(&config)).await.unwrap();
    assert_eq!(changed.backend.kind, "host-gw");
    assert_ne!(changed.networks, config.networks);
    assert_eq!(manager.network_config().await.unwrap().networks, config.networks);
}

/// Go flannel ignores them in Kubernetes.
#[tokio::test]
async fn fields_of_the_division_and_small_networks_do_not_stop_a_node() {
    for (config, cidr) in [
        (r#"{"Network":"10.1.0.0/16","SubnetLen":30,"SubnetMin":"192.0.2.1"}"#, "10.1.7.0/24"),
        (r#"{"Network":"10.1.0.0/24","SubnetLen":24}"#, "10.1.0.0/24"),
        (r#"{"Network":"10.1.0.0/30"}"#, "10.1.0.0/30"),
    ] {
        let fixture = Fixture::new(config);
        fixture.server.put_node("me", blank(&[cidr]));
        let lease = fixture.manager("me").await.acquire_lease(&vxlan()).await.unwrap();
        assert_eq!(lease.subnets.to_string(), cidr.replace('/', "-"));
    }
}

#[tokio::test]
async fn a_missing_pod_is_reported() {
    let fixture = Fixture::new(V4);
    let pod = NodeIdentity::Pod { namespace: "a".into(), name: "b".into() };
    let manager =
        KubeManager::open(KubeOptions { identity: pod, ..fixture.options("") }).await.unwrap();
    assert_contains(&manager.hints().await.unwrap_err(), &["pods \"b\" not found"]);
}
