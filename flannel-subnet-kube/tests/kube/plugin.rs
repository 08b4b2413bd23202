//! Users of a kubeconfig whose credentials a plugin prints, or who have a password.

use std::time::Duration;

use flannel_core::SubnetManager;
use flannel_core::subnet::StoreFailure;
use flannel_subnet_kube::KubeManager;
use flannel_subnet_kube::testing::ApiServer;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};
use test_support::{Logged, write_script};

use crate::fixture::{Fixture, V4, blank, until};

/// A plugin, which notes that it ran, saves its `KUBERNETES_EXEC_INFO`, and prints the file
/// `answer`.
struct Plugin<'a>(&'a Fixture);

const VERSION: &str = "client.authentication.k8s.io/v1";

impl<'a> Plugin<'a> {
    fn new(fixture: &'a Fixture) -> Self {
        let script = "#!/bin/sh\ncd \"$(dirname \"$0\")\"\necho >>runs\nenv >environment\n\
                      printf '%s' \"$KUBERNETES_EXEC_INFO\" >info\ncat answer\n";
        write_script(&fixture.dir.path().join("plugin"), script);
        fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
        Self(fixture)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.dir.path().join(name)
    }

    /// What it prints from now on.
    fn prints(&self, status: &Value) {
        let answer = json!({ "apiVersion": VERSION, "kind": "ExecCredential", "status": status });
        self.prints_text(&answer.to_string());
    }

    /// A plugin that runs meanwhile prints the old text or the new one.
    fn prints_text(&self, text: &str) {
        std::fs::write(self.path("new"), text).unwrap();
        std::fs::rename(self.path("new"), self.path("answer")).unwrap();
    }

    fn runs(&self) -> usize {
        std::fs::read_to_string(self.path("runs")).unwrap_or_default().lines().count()
    }

    async fn open(&self, cluster: &str) -> flannel_core::Result<KubeManager> {
        let user = format!(
            "exec: {{apiVersion: {VERSION}, command: ./plugin, interactiveMode: Never, \
             provideClusterInfo: true, args: [get-token], env: [{{name: OF_USER, value: x}}]}}"
        );
        self.0.with_kubeconfig(cluster, &user).await
    }

    async fn manager(&self) -> KubeManager {
        self.open(&format!("server: \"{}\"", self.0.server.url())).await.unwrap()
    }
}

/// A time of RFC 3339 from now on.
fn after(seconds: u64) -> Value {
    let time = std::time::SystemTime::now() + Duration::from_secs(seconds);
    let time = k8s_openapi::jiff::Timestamp::try_from(time).unwrap();
    serde_json::to_value(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(time)).unwrap()
}

/// A client certificate and its key, as a plugin prints them.
fn pair(certificate: &str, key: &str) -> Value {
    json!({ "clientCertificateData": certificate, "clientKeyData": key })
}

#[tokio::test]
async fn a_plugin_prints_the_token_once_until_it_is_refused() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    plugin.prints(&json!({ "token": "first" }));
    fixture.server.expect_token("first");
    let manager = plugin.manager().await;
    manager.hints().await.unwrap();
    manager.hints().await.unwrap();
    assert_eq!(plugin.runs(), 1);
    fixture.server.expect_token("second");
    plugin.prints(&json!({ "token": "second", "expirationTimestamp": after(3600) }));
    manager.hints().await.unwrap();
    manager.hints().await.unwrap();
    assert_eq!(plugin.runs(), 2);
}

#[tokio::test]
async fn a_plugin_runs_again_when_its_credentials_expire() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    // It has expired when it is printed.
    plugin.prints(&json!({ "token": "first", "expirationTimestamp": "2001-02-03T04:05:06Z" }));
    fixture.server.expect_token("second");
    let manager = plugin.manager().await;
    plugin.prints(&json!({ "token": "second", "expirationTimestamp": after(3600) }));
    let requests = fixture.server.count("");
    let (one, other) = tokio::join!(manager.hints(), manager.hints());
    one.unwrap();
    other.unwrap();
    assert_eq!(plugin.runs(), 2, "one run for all requests");
    assert_eq!(fixture.server.count("401"), 0);
    assert!(fixture.server.count("") > requests);
    // A plugin that fails is not the end: it runs again for the next request.
    plugin.prints(&json!({ "token": "third", "expirationTimestamp": "2001-02-03T04:05:06Z" }));
    fixture.server.expect_token("third");
    manager.hints().await.unwrap();
    plugin.prints_text("broken");
    let error = manager.hints().await.unwrap_err().to_string();
    assert!(error.contains("the credentials have expired") && error.contains("plugin"), "{error}");
    plugin.prints(&json!({ "token": "third" }));
    manager.hints().await.unwrap();
}

#[tokio::test]
async fn a_plugin_may_print_a_client_certificate() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let clients = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    server.expect_clients_of(&clients.pem());
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::default().signed_by(&key, &clients).unwrap().pem();
    plugin.prints(&pair(&certificate, &key.serialize_pem()));
    std::fs::write(plugin.path("ca.pem"), signed.cert.pem()).unwrap();
    let cluster = format!("server: \"{}\", certificate-authority: ca.pem", server.url());
    plugin.open(&cluster).await.unwrap().hints().await.unwrap();

    let info: Value =
        serde_json::from_str(&std::fs::read_to_string(plugin.path("info")).unwrap()).unwrap();
    assert_eq!(info["apiVersion"], VERSION);
    assert_eq!(info["kind"], "ExecCredential");
    assert_eq!(info["spec"]["interactive"], false);
    assert_eq!(info["spec"]["cluster"]["server"], *server.url());
    assert!(info["spec"]["cluster"]["certificate-authority-data"].is_string(), "{info}");
    let environment = std::fs::read_to_string(plugin.path("environment")).unwrap();
    assert!(environment.contains("OF_USER=x\n"), "{environment}");
    // As an administrator may set HTTPS_PROXY or AWS_PROFILE. A shell changes the others.
    let changed = ["_", "OLDPWD", "PWD", "SHLVL"];
    for (name, value) in std::env::vars().filter(|(name, _)| !changed.contains(&name.as_str())) {
        let is_given = environment.contains(&format!("{name}={value}\n"));
        assert_eq!(is_given, !name.starts_with("FLANNEL"), "{name}: {environment}");
    }

    let other = KeyPair::generate().unwrap().serialize_pem();
    plugin.prints(&pair(&certificate, &other));
    let error = plugin.open(&cluster).await.unwrap_err().to_string();
    assert!(error.contains("the key in clientKeyData of the plugin does not belong"), "{error}");
}

#[tokio::test]
async fn a_plugin_that_prints_no_credentials_is_named_and_its_output_is_not_shown() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let of = |version: &str, status: Value| {
        json!({ "apiVersion": version, "kind": "ExecCredential", "status": status }).to_string()
    };
    for (answer, says) in [
        ("secret".to_owned(), "does not print an ExecCredential in JSON"),
        (of("v1", json!({ "token": "secret" })), "prints no ExecCredential of the apiVersion"),
        (of(VERSION, json!({})), "prints neither a token nor a client certificate"),
        (of(VERSION, json!({ "token": 7 })), "prints neither a token"),
        (of(VERSION, json!({ "token": "secret\nsecret" })), "a token that cannot be used"),
        (
            of(VERSION, json!({ "token": "secret", "expirationTimestamp": "secret" })),
            "an expirationTimestamp that is not RFC 3339",
        ),
        (of(VERSION, json!({ "clientKeyData": "secret" })), "expected both"),
    ] {
        plugin.prints_text(&answer);
        let cluster = format!("server: \"{}\"", fixture.server.url());
        let error = plugin.open(&cluster).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(says) && text.contains("plugin"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
    plugin.prints(&json!({ "token": "secret" }));
    plugin.manager().await.hints().await.unwrap();
    assert_eq!(logged.count("secret"), 0);
    write_script(&plugin.path("plugin"), "#!/bin/sh\necho secret\necho secret >&2\nexit 3\n");
    let cluster = format!("server: \"{}\"", fixture.server.url());
    let text = plugin.open(&cluster).await.unwrap_err().to_string();
    assert!(text.contains("exit status: 3)") && text.contains("run it by hand"), "{text}");
    assert!(!text.contains("secret"), "{text}");
    let user = format!(
        "exec: {{apiVersion: {VERSION}, command: ./absent, interactiveMode: Never, \
         installHint: {}}}",
        "hint".repeat(1000)
    );
    let text = fixture.with_kubeconfig(&cluster, &user).await.unwrap_err().to_string();
    assert!(text.contains("hinthint") && text.len() < 1000, "{text}");
    assert_eq!(logged.count("secret"), 0);
}

#[tokio::test]
async fn a_plugin_that_is_given_up_leaves_no_process() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    let script = "#!/bin/sh\ncd \"$(dirname \"$0\")\"\nsleep 1000 &\n\
                  echo $! >new\nmv new child\nwait\n";
    write_script(&plugin.path("plugin"), script);
    let cluster = format!("server: \"{}\"", fixture.server.url());
    tokio::select! {
        ended = plugin.open(&cluster) => panic!("{ended:?}"),
        () = until(|| plugin.path("child").exists()) => {}
    }
    let child = std::fs::read_to_string(plugin.path("child")).unwrap();
    let stat = format!("/proc/{}/stat", child.trim());
    let has_ended = || match std::fs::read_to_string(&stat) {
        // Nobody may collect the status of an orphan in a container.
        Ok(stat) => stat.contains(") Z "),
        Err(_) => true,
    };
    until(has_ended).await;
}

/// New credentials cannot make the server's certificate acceptable.
#[tokio::test]
async fn a_plugin_does_not_run_again_for_a_server_that_is_refused() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    let signed = rcgen::generate_simple_self_signed(["other.example".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    std::fs::write(plugin.path("ca.pem"), signed.cert.pem()).unwrap();
    let cluster = format!("server: \"{}\", certificate-authority: ca.pem", server.url());
    for (status, runs) in [
        (json!({ "token": "first" }), 1),
        (json!({ "token": "first", "expirationTimestamp": after(3600) }), 2),
    ] {
        plugin.prints(&status);
        let manager = plugin.open(&cluster).await.unwrap();
        manager.hints().await.unwrap_err();
        manager.hints().await.unwrap_err();
        assert_eq!(plugin.runs(), runs);
    }
}

#[tokio::test]
async fn requests_that_wait_for_a_plugin_share_its_failure() {
    let fixture = Fixture::new(V4);
    let plugin = Plugin::new(&fixture);
    plugin.prints(&json!({ "token": "first", "expirationTimestamp": "2001-02-03T04:05:06Z" }));
    let manager = plugin.manager().await;
    plugin.prints_text("broken");
    let (one, two, three) = tokio::join!(manager.hints(), manager.hints(), manager.hints());
    for error in [one, two, three].map(Result::unwrap_err) {
        assert!(error.to_string().contains("does not print an ExecCredential"), "{error}");
    }
    assert_eq!(plugin.runs(), 2);
}

#[tokio::test]
async fn a_user_may_have_a_password() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    // The base64 form of `admin:sesame`.
    fixture.server.expect_authorization("Basic YWRtaW46c2VzYW1l");
    let cluster = format!("server: \"{}\"", fixture.server.url());
    let open = |password: &str| {
        let user = format!("username: admin, password: '{password}'");
        let (fixture, cluster) = (&fixture, &cluster);
        async move { fixture.with_kubeconfig(cluster, &user).await.unwrap() }
    };
    open("sesame").await.hints().await.unwrap();
    let error = open("wrong").await.hints().await.unwrap_err();
    assert_eq!(error.store_failure(), StoreFailure::Unauthorized);
    assert!(!error.to_string().contains("wrong"), "{error}");
}

#[tokio::test]
async fn a_server_is_trusted_without_verification_only_with_a_warning() {
    let fixture = Fixture::new(V4);
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let signed = rcgen::generate_simple_self_signed(["other.example".to_owned()]).unwrap();
    let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
    server.put_node("me", blank(&["10.1.1.0/24"]));
    server.expect_token("canary");
    let cluster = format!("server: \"{}\", insecure-skip-tls-verify: true", server.url());
    let manager = fixture.with_kubeconfig(&cluster, "token: canary").await.unwrap();
    manager.hints().await.unwrap();
    let warning = "the certificate of the API server is not verified";
    assert_eq!(logged.count(warning), 1);
    // Credentials that are read again cause no second one.
    server.expect_token("other");
    manager.hints().await.unwrap_err();
    until(|| logged.count(warning) == 1).await;
    let verified = format!("server: \"{}\", insecure-skip-tls-verify: false", server.url());
    let manager = fixture.with_kubeconfig(&verified, "").await.unwrap();
    manager.hints().await.unwrap_err();
    // A kubeconfig that becomes insecure causes one more.
    fixture.with_kubeconfig(&cluster, "token: other").await.unwrap();
    assert_eq!(logged.count(warning), 2);
    manager.hints().await.unwrap();
    assert_eq!(logged.count(warning), 3);
}
