//! Who we are by a client certificate, in files and in the kubeconfig itself; and another one when that is known no more.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flannel_core::{Error, SubnetManager};
use flannel_subnet_kube::KubeManager;
use flannel_subnet_kube::testing::ApiServer;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};

use crate::ground::{Ground, V4, blank, until, vxlan, wait};

/// A CA for clients.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// A client's certificate and key.
    fn sign(&self) -> (String, String) {
        let mut params = CertificateParams::default();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.0).unwrap().pem(), key.serialize_pem())
    }
}

/// A server with this node, its certificate, and who is known there.
fn server(clients: &Authority) -> (ApiServer, String) {
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    server.expect_clients_of(&clients.0.pem());
    (server, signed.cert.pem())
}

/// A manager by a kubeconfig with this user.
async fn manager(ground: &Ground, server: &ApiServer, ca: &str, user: &str) -> KubeManager {
    let text = format!(
        "current-context: c\nclusters: [{{name: c, cluster: {{server: \"{}\", certificate-authority-data: {}}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n",
        server.url(),
        STANDARD.encode(ca)
    );
    let kubeconfig = ground.dir.path().join("kubeconfig");
    std::fs::write(&kubeconfig, text).unwrap();
    let mut options = ground.options("me");
    (options.kubeconfig, options.api_url) = (Some(kubeconfig), None);
    KubeManager::open(options).await.unwrap()
}

#[tokio::test]
async fn a_client_certificate_says_who_we_are() {
    let (ground, clients) = (Ground::new(V4), Authority::new());
    let (server, ca) = server(&clients);
    let (certificate, key) = clients.sign();
    let file = |name: &str, text: &str| {
        let path = ground.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let data = format!(
        "client-certificate-data: {}, client-key-data: {}",
        STANDARD.encode(&certificate),
        STANDARD.encode(&key)
    );
    let absolute = format!(
        "client-certificate: {}, client-key: {}",
        file("client.crt", &certificate),
        file("client.key", &key)
    );
    let relative = "client-certificate: client.crt, client-key: ./client.key".to_owned();
    for user in [data, absolute, relative] {
        let manager = manager(&ground, &server, &ca, &user).await;
        let lease = manager.acquire_lease(&vxlan()).await.unwrap_or_else(|error| panic!("{user}: {error}"));
        assert_eq!(lease.subnets.to_string(), "10.1.1.0-24");
    }
    let (certificate, key) = Authority::new().sign();
    let foreign = format!(
        "client-certificate: {}, client-key: {}",
        file("foreign.crt", &certificate),
        file("foreign.key", &key)
    );
    for user in ["", &foreign] {
        let error = manager(&ground, &server, &ca, user).await.hints().await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("(401, ") && text.contains("client certificate"), "{text}");
    }
}

/// As the kubelet's do, which flanneld may be given.
#[tokio::test]
async fn a_certificate_that_was_replaced_is_read_again() {
    let (ground, first) = (Ground::new(V4), Authority::new());
    let (server, ca) = server(&first);
    let write = |of: &Authority| {
        let (certificate, key) = of.sign();
        std::fs::write(ground.dir.path().join("client.pem"), certificate + &key).unwrap();
    };
    write(&first);
    // One file has both, as the kubelet's has.
    let user = "client-certificate: client.pem, client-key: client.pem";
    let manager = manager(&ground, &server, &ca, user).await;
    let views = manager.watch_leases().await.unwrap();
    until(|| server.count("watch=") == 1).await;
    let second = Authority::new();
    write(&second);
    server.expect_clients_of(&second.0.pem());
    until(|| server.count("watch=") >= 3).await;
    wait(manager.acquire_lease(&vxlan())).await.unwrap();
    until(|| views.borrow().leases.len() == 1).await;
    assert_eq!(manager.store_status().last_error, None);
}
