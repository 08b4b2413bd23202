//! Client certificates, in files and in the kubeconfig, and their replacement when they are no
//! longer accepted.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flannel_core::{Credential, Error, SubnetManager};
use flannel_subnet_kube::KubeManager;
use flannel_subnet_kube::testing::ApiServer;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::fixture::{Fixture, V4, blank, until, vxlan, wait};

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

/// A server with this node, a certificate, and known clients.
fn server(clients: &Authority) -> (ApiServer, String) {
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    server.expect_clients_of(&clients.0.pem());
    (server, signed.cert.pem())
}

/// A manager with a kubeconfig for this user.
async fn manager(fixture: &Fixture, server: &ApiServer, ca: &str, user: &str) -> KubeManager {
    manager_at(fixture, &server.url(), ca, user).await
}

async fn manager_at(fixture: &Fixture, url: &str, ca: &str, user: &str) -> KubeManager {
    let cluster = format!(
        "server: \"{url}\", certificate-authority-data: {}, certificate-authority: '', \
         proxy-url: '', tls-server-name: ''",
        STANDARD.encode(ca)
    );
    fixture.with_kubeconfig(&cluster, user).await.unwrap()
}

/// One file has both certificate and key, like the kubelet's.
const OF_ONE_FILE: &str = "client-certificate: client.pem, client-key: client.pem";

/// Writes a certificate of this CA, and its key, to that file.
fn write(fixture: &Fixture, of: &Authority) {
    let (certificate, key) = of.sign();
    std::fs::write(fixture.dir.path().join("client.pem"), certificate + &key).unwrap();
}

#[tokio::test]
async fn a_ca_may_be_a_value() {
    let fixture = Fixture::new(V4);
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    server.expect_token("canary");
    let open = async |ca: &str| {
        let mut options = fixture.options("me");
        options.api_url = Some(server.url());
        options.ca = Some(Credential::value(ca.as_bytes()));
        options.token = Some(Credential::value(*b"canary"));
        KubeManager::open(options).await
    };
    open(&signed.cert.pem()).await.unwrap().hints().await.unwrap();
    open(&other.cert.pem()).await.unwrap().hints().await.unwrap_err();
    let error = open("nonsense").await.unwrap_err().to_string();
    assert!(error.contains("contains no PEM certificate"), "{error}");
}

/// Go accepts a server whose certificate is in the CA file: self-signed, as a CA or not, or issued.
#[tokio::test]
async fn the_servers_own_certificate_may_be_the_ca() {
    let fixture = Fixture::new(V4);
    let mut of_ca = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let of_server = of_ca.clone();
    of_ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let [key, other_key] = [KeyPair::generate().unwrap(), KeyPair::generate().unwrap()];
    let self_signed = of_ca.self_signed(&key).unwrap().pem();
    let issued = of_server.signed_by(&key, &Authority::new().0).unwrap().pem();
    let other = of_ca.self_signed(&other_key).unwrap().pem();
    for certificate in [self_signed, issued] {
        let server = ApiServer::with_tls(&certificate, &key.serialize_pem());
        server.put_node("me", blank(&["10.1.1.0/24"]));
        manager(&fixture, &server, &certificate, "").await.hints().await.unwrap();
        let refused = manager(&fixture, &server, &other, "").await.hints().await.unwrap_err();
        assert!(refused.to_string().contains("certificate is not accepted"), "{refused}");
    }
    // The name is verified all the same.
    let elsewhere = CertificateParams::new(vec!["192.0.2.9".to_owned()]).unwrap();
    let elsewhere = elsewhere.self_signed(&key).unwrap().pem();
    let server = ApiServer::with_tls(&elsewhere, &key.serialize_pem());
    let refused = manager(&fixture, &server, &elsewhere, "").await.hints().await.unwrap_err();
    assert!(refused.to_string().contains("its certificate is for another name"), "{refused}");
}

/// Stock MicroK8s has such certificates. The server judges them.
#[tokio::test]
async fn a_client_certificate_may_be_x509_v1() {
    use test_support::v1_certificate::{CLIENT, KEY};
    let fixture = Fixture::new(V4);
    let cluster = format!("server: \"{}\"", fixture.server.url());
    let with_key = |key: &str| {
        format!(
            "client-certificate-data: {}, client-key-data: {}",
            STANDARD.encode(CLIENT),
            STANDARD.encode(key)
        )
    };
    fixture.with_kubeconfig(&cluster, &with_key(KEY)).await.unwrap();
    let other = KeyPair::generate().unwrap().serialize_pem();
    let error = fixture.with_kubeconfig(&cluster, &with_key(&other)).await.unwrap_err();
    let says = "the key in client-key-data does not belong to the client certificate in \
                client-certificate-data";
    assert!(error.to_string().contains(says), "{error}");
}

#[tokio::test]
async fn a_client_certificate_identifies_the_node() {
    let fixture = Fixture::new(V4);
    let clients = Authority::new();
    let (server, ca) = server(&clients);
    let (certificate, key) = clients.sign();
    let file = |name: &str, text: &str| {
        let path = fixture.dir.path().join(name);
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
        let manager = manager(&fixture, &server, &ca, &user).await;
        let lease =
            manager.acquire_lease(&vxlan()).await.unwrap_or_else(|error| panic!("{user}: {error}"));
        assert_eq!(lease.subnets.to_string(), "10.1.1.0-24");
    }
    let (certificate, key) = Authority::new().sign();
    let foreign = format!(
        "client-certificate: {}, client-key: {}",
        file("foreign.crt", &certificate),
        file("foreign.key", &key)
    );
    for user in ["", &foreign] {
        let error = manager(&fixture, &server, &ca, user).await.hints().await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("(401, ") && text.contains("client certificate"), "{text}");
    }
}

/// As for the kubelet's files, which flanneld may use.
#[tokio::test]
async fn a_replaced_certificate_is_read_again() {
    let fixture = Fixture::new(V4);
    let first = Authority::new();
    let (server, ca) = server(&first);
    write(&fixture, &first);
    let manager = manager(&fixture, &server, &ca, OF_ONE_FILE).await;
    let views = manager.watch_leases().await.unwrap();
    until(|| server.count("watch=") == 1).await;
    let second = Authority::new();
    write(&fixture, &second);
    server.expect_clients_of(&second.0.pem());
    until(|| server.count("watch=") >= 3).await;
    wait(manager.acquire_lease(&vxlan())).await.unwrap();
    until(|| views.borrow().leases.len() == 1).await;
    assert_eq!(manager.store_status().last_error, None);
}

/// A proxy in front of the API server requires a certificate in the handshake.
#[tokio::test]
async fn a_certificate_that_the_handshake_refuses_is_read_again() {
    let fixture = Fixture::new(V4);
    let clients = Authority::new();
    let (server, ca) = server(&clients);
    server.refuse_by_alert();
    write(&fixture, &Authority::new());
    let manager = manager(&fixture, &server, &ca, OF_ONE_FILE).await;
    let error = manager.hints().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("alert") && text.contains("expected ") && text.contains("client certificate"),
        "{text}"
    );
    let file = fixture.dir.path().join("client.pem");
    assert!(text.contains(file.to_str().unwrap()), "{text}");
    assert_eq!(server.count(""), 0, "an unknown client sends no request");
    write(&fixture, &clients);
    wait(manager.acquire_lease(&vxlan())).await.unwrap();
    assert_eq!(manager.store_status().last_error, None);
}

#[tokio::test]
async fn a_missing_client_certificate_in_the_handshake_is_refused() {
    let fixture = Fixture::new(V4);
    let clients = Authority::new();
    let (server, ca) = server(&clients);
    server.refuse_by_alert();
    let error = manager(&fixture, &server, &ca, "").await.hints().await.unwrap_err();
    assert!(
        matches!(&error, Error::Refused { .. }) && error.to_string().contains("client certificate"),
        "{error:?}"
    );
}

/// A TLS alert has its reason in one byte. A certificate is reported only for the reasons that mean
/// one.
#[tokio::test]
async fn a_tls_alert_is_reported_with_its_meaning() {
    let fixture = Fixture::new(V4);
    let ca = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let ours = "not accepted as a client";
    let terms = "aborts the TLS handshake for a reason other than a certificate";
    for (code, alert, says) in [
        (42, "BadCertificate", ours),
        (43, "UnsupportedCertificate", ours),
        (44, "CertificateRevoked", ours),
        (45, "CertificateExpired", ours),
        (46, "CertificateUnknown", ours),
        (48, "UnknownCA", ours),
        (49, "AccessDenied", ours),
        (116, "CertificateRequired", ours),
        (40, "HandshakeFailure", terms),
        (47, "IllegalParameter", terms),
        (51, "DecryptError", terms),
        (70, "ProtocolVersion", terms),
        (71, "InsufficientSecurity", terms),
        (112, "UnrecognisedName", terms),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let server = async {
            loop {
                let (mut connection, _) = listener.accept().await.unwrap();
                // The greeting is read to the end, because unread data would cause a reset, which
                // may overtake the alert.
                let mut head = [0; 5];
                connection.read_exact(&mut head).await.unwrap();
                let mut greeting = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
                connection.read_exact(&mut greeting).await.unwrap();
                // A TLS 1.2 record of type alert with two bytes: fatal, and the reason.
                connection.write_all(&[21, 3, 3, 0, 2, 2, code]).await.unwrap();
            }
        };
        let manager = manager_at(&fixture, &url, &ca.cert.pem(), "").await;
        let error = tokio::select! {
            hints = wait(manager.hints()) => hints.unwrap_err(),
            () = server => unreachable!(),
        };
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains(says) && text.contains(alert) && text.contains("expected "),
            "{text}"
        );
    }
}

/// The `tls-server-name` belongs to the `server` of the kubeconfig, as in client-go.
#[tokio::test]
async fn another_url_has_its_own_name() {
    let fixture = Fixture::new(V4);
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    let ca = STANDARD.encode(signed.cert.pem());
    let cluster = format!(
        "server: 'https://192.0.2.1', tls-server-name: api.example, \
         certificate-authority-data: {ca}"
    );
    fixture.with_kubeconfig(&cluster, "").await.unwrap();
    let mut options = fixture.options("me");
    options.kubeconfig = Some(fixture.dir.path().join("kubeconfig"));
    options.api_url = Some(server.url());
    KubeManager::open(options).await.unwrap().hints().await.unwrap();
}

/// Templates leave such fields, and client-go treats them as absent.
#[tokio::test]
async fn empty_fields_of_a_kubeconfig_count_as_absent() {
    let fixture = Fixture::new(V4);
    let clients = Authority::new();
    let (server, ca) = server(&clients);
    write(&fixture, &clients);
    let empty = "username: '', as: '', token: '', tokenFile: '', \
                 client-certificate-data: '', client-key-data: ''";
    manager(&fixture, &server, &ca, &format!("{OF_ONE_FILE}, {empty}"))
        .await
        .hints()
        .await
        .unwrap();
    let (certificate, key) = clients.sign();
    let data = format!(
        "client-certificate-data: {}, client-key-data: {}, client-certificate: '', client-key: ''",
        STANDARD.encode(certificate),
        STANDARD.encode(key)
    );
    manager(&fixture, &server, &ca, &data).await.hints().await.unwrap();
    let none = "client-certificate: '', client-key: '', tokenFile: ''";
    let text = manager(&fixture, &server, &ca, none).await.hints().await.unwrap_err().to_string();
    assert!(text.contains("(401, "), "{text}");
}
