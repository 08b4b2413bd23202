//! A program outside the workspace, which embeds parts of flannel: it builds with its own lock
//! file, it runs, and it needs nothing that the guide for embedding does not show.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use flannel_netlink::testing::{in_netns, ip};

const GUIDE: &str = include_str!("../../../docs/embedding.md");

fn package() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("embed")
}

/// The program. It shares the target directory, so that few dependencies are compiled again.
fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = Path::new(env!("CARGO_BIN_EXE_lane-node")).ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--locked", "--manifest-path"]).arg(package().join("Cargo.toml"));
        let built = build.env("CARGO_TARGET_DIR", target).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        target.join("debug/embed")
    })
}

/// A host with an uplink.
fn uplink() {
    ip("link set lo up");
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("link set eth0 up");
    ip("address add 192.0.2.1/24 dev eth0");
}

/// What the program prints with these arguments.
fn run(args: &[&str]) -> String {
    let Output { status, stdout, stderr } = Command::new(program()).args(args).output().unwrap();
    assert!(status.success(), "{args:?}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// An etcd with TLS. It ends when this value is dropped.
struct Etcd(Child);

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn it_takes_a_lease_from_an_etcd_with_tls() {
    in_netns(|| {
        uplink();
        let dir = tempfile::tempdir().unwrap();
        let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let certificate = dir.path().join("certificate.pem");
        let key = dir.path().join("key.pem");
        std::fs::write(&certificate, signed.cert.pem()).unwrap();
        std::fs::write(&key, signed.signing_key.serialize_pem()).unwrap();
        let endpoint = "https://127.0.0.1:2379";
        let etcd = std::env::var_os("ETCD").unwrap_or_else(|| "etcd".into());
        let mut command = Command::new(etcd);
        command.arg("--data-dir").arg(dir.path().join("data"));
        command.args(["--listen-client-urls", endpoint, "--advertise-client-urls", endpoint]);
        command.arg("--cert-file").arg(&certificate).arg("--key-file").arg(&key);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let _etcd = Etcd(command.spawn().unwrap());
        // It waits until etcd answers.
        let printed = run(&["leases", endpoint, certificate.to_str().unwrap()]);
        assert!(printed.starts_with("this node has 10.1."), "{printed}");
    });
}

#[test]
fn it_runs_a_network_with_a_backend_of_its_own() {
    in_netns(|| {
        uplink();
        assert_eq!(run(&["routes"]), "routes to 1 peer\n");
        let route = ip("route show 10.1.7.0/24");
        assert!(route.contains("via 192.0.2.254 dev eth0"), "{route}");
    });
}

#[test]
fn it_runs_a_network_that_runs_itself() {
    in_netns(|| {
        uplink();
        assert_eq!(run(&["itself"]), "peer 10.1.7.0-24\n1 peer\n");
    });
}

#[test]
fn it_runs_two_daemons() {
    in_netns(|| {
        uplink();
        let dir = tempfile::tempdir().unwrap();
        let printed = run(&["daemons", dir.path().to_str().unwrap()]);
        assert_eq!(printed.matches("ready: Some(").count(), 2, "{printed}");
        assert!(printed.ends_with("ended\n"), "{printed}");
        for n in [1, 2] {
            let device = ip(&format!("address show flannel.{n}"));
            assert!(device.contains(&format!("inet 10.{n}.")), "the data path stays: {device}");
        }
    });
}

/// The names that a source file imports from the crates of this project.
fn imports(source: &str) -> BTreeSet<String> {
    let statements = source.split(';').filter_map(|text| text.rsplit_once("use ")).map(|it| it.1);
    let of_flannel = statements.filter(|path| path.starts_with("flannel"));
    let names =
        of_flannel.flat_map(|path| path.split(|c: char| !(c.is_alphanumeric() || c == '_')));
    names.filter(|name| name.starts_with(char::is_uppercase)).map(str::to_owned).collect()
}

#[test]
fn it_uses_only_what_the_guide_shows() {
    let mut used = BTreeSet::new();
    for file in std::fs::read_dir(package().join("src")).unwrap() {
        used.extend(imports(&std::fs::read_to_string(file.unwrap().path()).unwrap()));
    }
    assert!(used.len() > 20, "{used:?}");
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let shown: BTreeSet<&str> = GUIDE.split(|c| !is_word(c)).collect();
    let hidden: Vec<&String> = used.iter().filter(|name| !shown.contains(name.as_str())).collect();
    assert!(hidden.is_empty(), "docs/embedding.md does not show {hidden:?}");
}
