//! Certificates and users of both sides, and their errors.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use etcd_client::{Permission, PermissionType};
use flannel_core::lease::Revision;
use flannel_core::{Credential, Error};
use flannel_subnet::{HolderId, Registry};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::certificates::{Authority, Certified};
use super::server::Etcd;
use super::{DAY, attrs, grant, key, options, until, within};

/// A member with a certificate, which is ready when a registry reaches it.
fn tls_member(certified: &Certified, clients: Option<&Authority>) -> Etcd {
    let file = |path: &Path| path.to_str().unwrap().to_owned();
    let mut args = vec![
        "--cert-file".to_owned(),
        file(&certified.certificate),
        "--key-file".to_owned(),
        file(&certified.key),
    ];
    if let Some(authority) = clients {
        args.extend([
            "--client-cert-auth".to_owned(),
            "--trusted-ca-file".to_owned(),
            file(&authority.file),
        ]);
    }
    Etcd::spawn("https", &args)
}

fn trusting(etcd: &Etcd, cafile: &Path) -> EtcdOptions {
    EtcdOptions { ca: Some(cafile.to_owned().into()), ..options(&etcd.endpoints()) }
}

fn with_certificate(options: EtcdOptions, certified: &Certified) -> EtcdOptions {
    EtcdOptions {
        certificate: Some(certified.certificate.clone().into()),
        key: Some(certified.key.clone().into()),
        ..options
    }
}

/// The member refuses at once, as soon as it answers.
async fn refused(options: EtcdOptions, says: &[&str]) {
    let registry = EtcdRegistry::new(options).unwrap();
    let error = within(30, "an answer", registry.list()).await.unwrap_err();
    let Error::Refused { .. } = &error else { panic!("not refused: {error}") };
    let begin = Instant::now();
    registry.list().await.unwrap_err();
    assert!(begin.elapsed() < Duration::from_secs(10), "a refusal is not retried: {error}");
    for says in says {
        assert!(error.to_string().contains(says), "{says:?} in {error}");
    }
}

#[tokio::test]
async fn a_ca_file_alone_enables_tls() {
    let dir = tempfile::tempdir().unwrap();
    let ours = Authority::new(dir.path(), "ours");
    let theirs = Authority::new(dir.path(), "theirs");
    let etcd = tls_member(&ours.sign_into(dir.path(), "server", 2090), None);
    let registry = EtcdRegistry::new(trusting(&etcd, &ours.file)).unwrap();
    let mut watch = registry.watch(registry.list().await.unwrap().revision).await.unwrap();
    registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    assert_eq!(within(20, "a change", watch.next()).await.unwrap().unwrap().events.len(), 1);
    refused(trusting(&etcd, &theirs.file), &[&etcd.endpoint, "a CA that this node does not trust"])
        .await;
    // The system's CAs do not include the test's.
    let system = options(&etcd.endpoints());
    if let Ok(registry) = EtcdRegistry::new(system) {
        registry.list().await.unwrap_err();
    }
}

#[tokio::test]
async fn an_expired_certificate_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let etcd = tls_member(&authority.sign_into(dir.path(), "server", 2020), None);
    refused(trusting(&etcd, &authority.file), &[&etcd.endpoint, "has expired"]).await;
}

#[tokio::test]
async fn a_member_that_requires_certificates_accepts_only_valid_ones() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let stranger = Authority::new(dir.path(), "stranger");
    let etcd = tls_member(&authority.sign_into(dir.path(), "server", 2090), Some(&authority));
    let ours = || trusting(&etcd, &authority.file);
    let good = authority.sign_into(dir.path(), "good", 2090);
    EtcdRegistry::new(with_certificate(ours(), &good)).unwrap().list().await.unwrap();
    refused(ours(), &[&etcd.endpoint, "certificate"]).await;
    let expired = authority.sign_into(dir.path(), "expired", 2020);
    let says = [&*etcd.endpoint, "our client certificate", expired.certificate.to_str().unwrap()];
    refused(with_certificate(ours(), &expired), &says).await;
    let strange = stranger.sign_into(dir.path(), "strange", 2090);
    let says = [&*etcd.endpoint, "our client certificate", strange.certificate.to_str().unwrap()];
    refused(with_certificate(ours(), &strange), &says).await;
}

/// Writes a CA's certificate for this machine, which has signed itself, and its key to files.
fn self_signed(dir: &Path, name: &str) -> Certified {
    let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let files = Certified {
        certificate: dir.join(format!("{name}.pem")),
        key: dir.join(format!("{name}-key.pem")),
    };
    fs::write(&files.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
    fs::write(&files.key, key.serialize_pem()).unwrap();
    files
}

/// As `openssl req -x509` makes it, which sets `CA:TRUE`.
#[tokio::test]
async fn a_self_signed_certificate_may_be_its_own_ca_file() {
    let dir = tempfile::tempdir().unwrap();
    let own = self_signed(dir.path(), "own");
    let etcd = tls_member(&own, None);
    let registry = EtcdRegistry::new(trusting(&etcd, &own.certificate)).unwrap();
    within(30, "an answer", registry.list()).await.unwrap();
    let other = self_signed(dir.path(), "other");
    let says = [&etcd.endpoint, "in the CA file", other.certificate.to_str().unwrap()];
    refused(trusting(&etcd, &other.certificate), &says).await;
}

/// etcd is written in Go, and accepts it.
#[tokio::test]
async fn a_client_certificate_may_be_x509_v1() {
    use test_support::v1_certificate::{CA, CLIENT, KEY};
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let server = authority.sign_into(dir.path(), "server", 2090);
    let clients = Authority::new(dir.path(), "clients");
    fs::write(&clients.file, CA).unwrap();
    let etcd = tls_member(&server, Some(&clients));
    let client =
        Certified { certificate: dir.path().join("v1.pem"), key: dir.path().join("v1-key.pem") };
    fs::write(&client.certificate, CLIENT).unwrap();
    fs::write(&client.key, KEY).unwrap();
    let options = with_certificate(trusting(&etcd, &authority.file), &client);
    let registry = EtcdRegistry::new(options.clone()).unwrap();
    within(30, "an answer", registry.list()).await.unwrap();

    // An error is about this file, not about the server.
    fs::write(&client.key, authority.sign("other", 2090).1).unwrap();
    let error = EtcdRegistry::new(options).unwrap_err().to_string();
    let [key, certificate] = [&client.key, &client.certificate].map(|file| file.display());
    let says = format!(
        "the key in keyfile {key} does not belong to the client certificate in certfile \
         {certificate}"
    );
    assert!(error.contains(&says), "{error}");
}

#[tokio::test]
async fn changed_files_are_read_again_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let first = Authority::new(dir.path(), "first");
    let second = Authority::new(dir.path(), "second");
    let server = first.sign_into(dir.path(), "server", 2090);
    let both = Authority::new(dir.path(), "both");
    let bundle = [&first.file, &second.file].map(|file| fs::read_to_string(file).unwrap()).concat();
    fs::write(&both.file, bundle).unwrap();
    let mut etcd = tls_member(&server, Some(&both));
    let cafile = dir.path().join("ca.pem");
    fs::copy(&first.file, &cafile).unwrap();
    let client = first.sign_into(dir.path(), "client", 2020);
    let registry = EtcdRegistry::new(with_certificate(trusting(&etcd, &cafile), &client)).unwrap();
    within(30, "an answer", registry.list()).await.unwrap_err();

    first.sign_into(dir.path(), "client", 2090);
    registry.list().await.unwrap();

    // Only one of the two files is new.
    let (certificate, key) = second.sign("client", 2090);
    fs::write(&client.certificate, certificate).unwrap();
    registry.list().await.unwrap();
    fs::write(&client.key, key).unwrap();
    registry.list().await.unwrap();

    // The server's certificate changes too.
    etcd.kill();
    second.sign_into(dir.path(), "server", 2090);
    etcd.go();
    let error = registry.list().await.unwrap_err();
    assert!(error.to_string().contains("a CA that this node does not trust"), "{error}");
    fs::copy(&second.file, &cafile).unwrap();
    registry.list().await.unwrap();
}

/// A named pipe stands for a file system that does not answer: opening it waits for a writer.
#[tokio::test]
async fn a_request_does_not_wait_for_files_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let etcd = tls_member(&authority.sign_into(dir.path(), "server", 2090), Some(&authority));
    let client = authority.sign_into(dir.path(), "client", 2090);
    let options = with_certificate(trusting(&etcd, &authority.file), &client);
    let registry = EtcdRegistry::new(options).unwrap();
    within(30, "an answer", registry.list()).await.unwrap();
    fs::remove_file(&client.key).unwrap();
    mkfifo(&client.key, Mode::S_IRWXU).unwrap();
    // If a request blocks the only thread of the runtime, this ends it after a time.
    let (release, released) = std::sync::mpsc::channel::<()>();
    let pipe = client.key.clone();
    let writer = std::thread::spawn(move || {
        let _ = released.recv_timeout(Duration::from_secs(30));
        let flags = OFlag::O_NONBLOCK.bits();
        drop(fs::OpenOptions::new().write(true).custom_flags(flags).open(pipe));
    });
    let begin = Instant::now();
    let (one, other) = tokio::join!(registry.list(), registry.config());
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert_eq!(one.unwrap().entries, []);
    assert!(matches!(other, Err(Error::NoConfig { .. })), "{other:?}");
    release.send(()).unwrap();
    writer.join().unwrap();

    // The files are read again.
    fs::remove_file(&client.key).unwrap();
    authority.sign_into(dir.path(), "client", 2020);
    until(20, "the expired certificate is used", || async { registry.list().await.is_err() }).await;
    authority.sign_into(dir.path(), "client", 2090);
    until(20, "the valid certificate is used", || async { registry.list().await.is_ok() }).await;
}

#[tokio::test]
async fn credentials_may_be_values_that_are_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let server = authority.sign_into(dir.path(), "server", 2090);
    let etcd = tls_member(&server, Some(&authority));
    let (certificate, key) = authority.sign("client", 2090);
    let value = |pem: &str| Some(Credential::value(pem.as_bytes()));
    let given = EtcdOptions {
        ca: value(&fs::read_to_string(&authority.file).unwrap()),
        certificate: value(&certificate),
        key: value(&key),
        ..options(&etcd.endpoints())
    };
    let shown = format!("{given:?}");
    assert!(!shown.contains("BEGIN"), "{shown}");
    let registry = EtcdRegistry::new(given.clone()).unwrap();
    within(30, "an answer", registry.list()).await.unwrap();
    for (wrong, says) in [
        (EtcdOptions { ca: value("nonsense"), ..given.clone() }, "no PEM certificate"),
        (EtcdOptions { key: value("nonsense"), ..given }, "no PEM key"),
    ] {
        let error = EtcdRegistry::new(wrong).unwrap_err().to_string();
        assert!(error.contains(says) && !error.contains("nonsense"), "{error}");
    }
}

#[tokio::test]
async fn missing_and_empty_files_are_reported_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), "ca");
    let good = authority.sign_into(dir.path(), "good", 2090);
    let missing = dir.path().join("missing");
    let empty = dir.path().join("empty");
    fs::write(&empty, "").unwrap();
    let base = || EtcdOptions {
        endpoints: vec!["https://127.0.0.1:2379".into()],
        ..EtcdOptions::default()
    };
    for bad in [&missing, &empty] {
        let name = bad.to_str().unwrap();
        for options in [
            EtcdOptions { ca: Some(bad.clone().into()), ..base() },
            EtcdOptions {
                certificate: Some(bad.clone().into()),
                ..with_certificate(base(), &good)
            },
            EtcdOptions { key: Some(bad.clone().into()), ..with_certificate(base(), &good) },
        ] {
            let error = EtcdRegistry::new(options).unwrap_err();
            assert!(
                matches!(error, Error::Refused { .. }) && error.to_string().contains(name),
                "{error}"
            );
        }
    }
}

/// A member with the users `root`, and `flannel` with flannel's permissions. Tokens live for a
/// second.
async fn member_with_users() -> Etcd {
    let etcd = Etcd::spawn("http", &["--auth-token-ttl".into(), "1".into()]);
    etcd.ready().await;
    enable_users(&etcd).await;
    etcd
}

async fn enable_users(etcd: &Etcd) {
    let mut client = etcd.client().await;
    client.user_add("root", "rootpass", None).await.unwrap();
    client.role_add("root").await.unwrap();
    client.user_grant_role("root", "root").await.unwrap();
    client.user_add("flannel", "right", None).await.unwrap();
    client.role_add("network").await.unwrap();
    let permission =
        Permission::new(PermissionType::Readwrite, "/coreos.com/network/").with_prefix();
    client.role_grant_permission("network", permission).await.unwrap();
    client.user_grant_role("flannel", "network").await.unwrap();
    client.auth_enable().await.unwrap();
}

fn user(etcd: &Etcd, name: &str, password: &str) -> EtcdOptions {
    EtcdOptions {
        username: Some(name.into()),
        password: Some(password.into()),
        ..options(&etcd.endpoints())
    }
}

#[tokio::test]
async fn users_need_their_password_and_their_permissions() {
    let etcd = member_with_users().await;
    let registry = EtcdRegistry::new(user(&etcd, "flannel", "right")).unwrap();
    let entry =
        registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await.unwrap(), Some(DAY));
    let mut watch = registry.watch(entry.lease.revision).await.unwrap();
    registry.delete(&key("10.1.5.0-24"), entry.lease.revision).await.unwrap();
    assert_eq!(within(20, "a change", watch.next()).await.unwrap().unwrap().events.len(), 1);

    refused(user(&etcd, "flannel", "sesame"), &[&etcd.endpoint, "\"flannel\"", "password"]).await;
    refused(user(&etcd, "nobody", "sesame"), &[&etcd.endpoint, "\"nobody\"", "password"]).await;
    refused(options(&etcd.endpoints()), &[&etcd.endpoint, "user name"]).await;
    let elsewhere = EtcdOptions { prefix: "/elsewhere".into(), ..user(&etcd, "flannel", "right") };
    refused(
        elsewhere.clone(),
        &[&etcd.endpoint, "\"flannel\"", "permission", "/elsewhere/subnets"],
    )
    .await;
    let elsewhere = EtcdRegistry::new(elsewhere).unwrap();
    for (error, names) in [
        (elsewhere.config().await.map(drop), "/elsewhere/config"),
        (elsewhere.watch(Revision(1)).await.map(drop), "/elsewhere/subnets"),
        (
            elsewhere.create(&key("10.1.5.0-24"), &attrs(&[]), grant(6)).await.map(drop),
            "/elsewhere/subnets/10.1.5.0-24",
        ),
    ] {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(names) && text.contains("permission") && !text.contains("right"),
            "{text}"
        );
    }
}

/// The first connection hangs, as through a firewall that drops its packets. A connect with a user
/// sends a request.
#[tokio::test]
async fn a_connect_that_hangs_delays_no_other_request() {
    let etcd = member_with_users().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let to = etcd.endpoint.trim_start_matches("http://").to_owned();
    let (accept, accepted) = oneshot::channel();
    tokio::spawn(async move {
        let _hanging = listener.accept().await.unwrap();
        accept.send(()).unwrap();
        while let Ok((mut near, _)) = listener.accept().await {
            let mut far = TcpStream::connect(&to).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut near, &mut far).await });
        }
    });
    let registry = EtcdRegistry::new(EtcdOptions {
        endpoints: vec![endpoint],
        request_timeout: Duration::from_secs(60),
        ..user(&etcd, "flannel", "right")
    })
    .unwrap();
    let hanging = tokio::spawn({
        let registry = registry.clone();
        async move { registry.list().await }
    });
    within(20, "the first connection", accepted).await.unwrap();
    within(20, "an answer", registry.list()).await.unwrap();
    assert!(!hanging.is_finished());
    hanging.abort();
}

#[tokio::test]
async fn expired_tokens_are_replaced() {
    let mut etcd = member_with_users().await;
    let registry = EtcdRegistry::new(user(&etcd, "flannel", "right")).unwrap();
    let created =
        registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    // A token ends by time alone. Another client's token shows when.
    let outlived = async || {
        let mut other = etcd.client_as(Some(("flannel", "right"))).await;
        let begin = Instant::now();
        while other.get("/coreos.com/network/config", None).await.is_ok() {
            assert!(begin.elapsed() < Duration::from_secs(30), "tokens do not expire");
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
    };
    outlived().await;
    assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await.unwrap(), Some(DAY));
    outlived().await;
    assert!(registry.watch(created.lease.revision).await.is_ok());
    outlived().await;
    assert_eq!(registry.list().await.unwrap().entries.len(), 1);
    // A restarted member knows no tokens.
    etcd.kill();
    etcd.go();
    assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await.unwrap(), Some(DAY));
    // Users were changed, so the token is too old. Root's token may expire too before its use.
    let another = || async {
        etcd.client_as(Some(("root", "rootpass"))).await.role_add("another").await.is_ok()
    };
    until(60, "another role", another).await;
    let subnets = key("10.1.5.0-24");
    let at = created.lease.revision;
    registry.update(&subnets, at, &attrs(&["192.0.2.6"]), grant(5)).await.unwrap();
}

#[tokio::test]
async fn an_unnecessary_user_is_ignored() {
    let etcd = Etcd::start().await;
    let registry = EtcdRegistry::new(user(&etcd, "flannel", "right")).unwrap();
    registry.list().await.unwrap();
}

#[tokio::test]
async fn authentication_can_be_enabled_while_a_registry_is_in_use() {
    let etcd = Etcd::start().await;
    let registry = EtcdRegistry::new(user(&etcd, "flannel", "right")).unwrap();
    let entry =
        registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    enable_users(&etcd).await;
    assert_eq!(registry.list().await.unwrap().entries, [entry]);
    assert!(registry.watch(Revision(1)).await.is_ok());
}
