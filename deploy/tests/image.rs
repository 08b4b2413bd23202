//! The image's files, built by the script that builds them for the image, and the manifest's containers, run with them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use flannel_core::Subnet;
use flannel_lab::Namespace;
use serde_json::Value;
use tempfile::TempDir;

mod as_root;
mod container;
mod objects;
use as_root::as_root;
use container::Node;
use objects::{file, manifest, of_kind};

const PATIENCE: Duration = Duration::from_secs(60);

/// The image's files, unoptimized: `FLANNEL_IMAGE` names a directory that has them, for users who cannot build them.
fn image() -> &'static Path {
    static IMAGE: OnceLock<(PathBuf, Option<TempDir>)> = OnceLock::new();
    let build = || {
        if let Some(dir) = std::env::var_os("FLANNEL_IMAGE") {
            return (dir.into(), None);
        }
        let dir = tempfile::tempdir().unwrap();
        let mut script = Command::new(file("build-image-root.sh"));
        script.arg(dir.path()).envs([
            ("PROFILE", "dev"),
            ("CNI_PROFILE", "dev"),
            ("FLANNEL_COMMIT", "of-a-test"),
        ]);
        let output = script.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (dir.path().to_owned(), Some(dir))
    };
    &IMAGE.get_or_init(build).0
}

/// What a command says, which must succeed.
fn said(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(status.success(), "{command:?}: {status}: {stdout}{stderr}");
    stdout + &stderr
}

/// All files below a directory, with their modes.
fn files(dir: &Path, below: &str) -> Vec<(String, u32)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir.join(below)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{below}/{}", entry.file_name().into_string().unwrap())
            .trim_start_matches('/')
            .to_owned();
        match entry.metadata().unwrap() {
            meta if meta.is_dir() => all.extend(files(dir, &name)),
            meta => all.push((name, meta.permissions().mode() & 0o7777)),
        }
    }
    all.sort();
    all
}

#[test]
fn the_image_has_every_program_where_manifests_look_for_it() {
    let names = [
        "flannel",
        "opt/bin/flannelctl",
        "opt/bin/flanneld",
        "opt/bin/install-conf",
        "opt/bin/mk-docker-opts.sh",
    ];
    assert_eq!(files(image(), ""), names.map(|name| (name.to_owned(), 0o755)));
    for program in ["flanneld", "flannelctl"] {
        let version = said(Command::new(image().join("opt/bin").join(program)).arg("--version"));
        assert_eq!(version.trim(), format!("{program} {}", env!("CARGO_PKG_VERSION")));
    }
    assert!(said(Command::new(image().join("flannel")).env_clear()).contains(env!("CARGO_PKG_VERSION")));

    let objects = manifest();
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    for container in ["initContainers", "containers"].iter().flat_map(|kind| pod[kind].as_array().unwrap()) {
        let program = container["command"][0].as_str().unwrap().trim_start_matches('/');
        assert!(names.contains(&program), "{program}");
    }
    // docker cannot be run here; what it is told must name what is tested here.
    let dockerfile = include_str!("../../Dockerfile");
    for line in [
        "    deploy/build-image-root.sh /image",
        "COPY --from=build /image/ /",
        "ENTRYPOINT [\"/opt/bin/flanneld\"]",
    ] {
        assert!(dockerfile.lines().any(|known| known == line), "{line}");
    }
}

#[test]
fn docker_gets_its_options_by_the_old_name() {
    let dir = tempfile::tempdir().unwrap();
    let (env, options) = (dir.path().join("subnet.env"), dir.path().join("docker.env"));
    fs::write(
        &env,
        "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
    )
    .unwrap();
    said(
        Command::new(image().join("opt/bin/mk-docker-opts.sh"))
            .arg("-c")
            .arg("-f")
            .arg(&env)
            .arg("-d")
            .arg(&options),
    );
    let expected = "DOCKER_OPTS=\" --bip=10.1.5.1/24 --ip-masq=false --mtu=1450\"\n";
    assert_eq!(fs::read_to_string(options).unwrap(), expected);
}

/// In a root directory with nothing else in it: no loader, no library.
#[test]
fn what_is_copied_onto_hosts_is_static() {
    as_root("what_is_copied_onto_hosts_is_static", || {
        let dir = tempfile::tempdir().unwrap();
        for name in ["flannel", "opt/bin/install-conf"] {
            fs::copy(image().join(name), dir.path().join(Path::new(name).file_name().unwrap())).unwrap();
        }
        let inside = |args: &[&str]| said(Command::new("chroot").arg(dir.path()).args(args));
        inside(&["/install-conf", "/flannel", "/copy"]);
        assert!(inside(&["/copy"]).starts_with("CNI Plugin flannel version "));
    });
}

/// Status and body of a request to the node's own address.
fn ask(node: &Node, path: &str) -> Option<String> {
    let ask = || {
        let mut stream = TcpStream::connect("127.0.0.1:8081").ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    node.net.run(ask).unwrap()
}

/// What a runtime does next: it finds plugin and config where the init containers put them, and calls the plugin.
fn a_pod_gets_an_address(node: &Node, conflist: &str, env: &str) {
    let plugins = std::env::var("CNI_PLUGINS").unwrap_or_else(|_| "/usr/lib/cni".into());
    assert!(
        Path::new(&plugins).join("bridge").exists(),
        "{plugins}/bridge is needed: containernetworking-plugins"
    );
    let list: Value = serde_json::from_str(conflist).unwrap();
    let mut conf = list["plugins"][0].clone();
    conf["name"] = list["name"].clone();
    conf["cniVersion"] = list["cniVersion"].clone();
    let pod = Namespace::new("pod").unwrap();
    let state = node.host("/var/lib/cni");
    fs::create_dir_all(&state).unwrap();
    let mounts =
        ["/opt/cni/bin", "/run/flannel", "/var/lib/cni"].map(|path| (node.host(path), path.to_owned()));
    let runtime = ["sys_admin", "sys_ptrace", "net_admin", "net_raw", "dac_override"].map(str::to_owned);
    let mut command = node.inside("runtime", &runtime, &mounts);
    command.args(["env", "CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0"]);
    command
        .arg(format!("CNI_PATH=/opt/cni/bin:{plugins}"))
        .arg(format!("CNI_NETNS={}", pod.path().display()));
    command.arg("/opt/cni/bin/flannel").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut plugin = node.net.spawn(&mut command).unwrap();
    plugin.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let output = plugin.wait_with_output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_str(&said).unwrap();
    let address: IpAddr =
        result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap();
    let subnet = env.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).unwrap();
    assert!(subnet.parse::<Subnet>().unwrap().contains(address), "{address} in {subnet}");
    let links = pod.output(Command::new("ip").args(["addr", "show", "dev", "eth0"])).unwrap();
    assert!(String::from_utf8_lossy(&links.stdout).contains(&address.to_string()));
}

/// All containers of the manifest, one after the other as a kubelet runs them: with a read-only root, a read-only /proc/sys, the
/// mounts and the capabilities that it names and no others.
#[test]
fn the_manifests_containers_do_what_they_are_for() {
    as_root("the_manifests_containers_do_what_they_are_for", || {
        let objects = manifest();
        let config = of_kind(&objects, "ConfigMap");
        let node = Node::new(of_kind(&objects, "DaemonSet"), config, image());
        for name in ["install-cni-plugin", "install-cni"] {
            assert_eq!(said(&mut node.container(name, |args| args)), "");
        }
        let plugin = node.host("/opt/cni/bin/flannel");
        assert_eq!(fs::read(&plugin).unwrap(), fs::read(image().join("flannel")).unwrap());
        assert_eq!(fs::metadata(&plugin).unwrap().permissions().mode() & 0o7777, 0o755);
        let conflist = fs::read_to_string(node.host("/etc/cni/net.d/10-flannel.conflist")).unwrap();
        assert_eq!(conflist, config["data"]["cni-conf.json"].as_str().unwrap());

        // Of the arguments, only the store is another one.
        let registry = node.host("/var/lib/flannel/network");
        fs::create_dir_all(&registry).unwrap();
        fs::write(registry.join("config"), config["data"]["net-conf.json"].as_str().unwrap()).unwrap();
        let store = |arg: String| match arg.as_str() {
            "--kube-subnet-mgr" => "--registry=dir:/var/lib/flannel/network".to_owned(),
            _ => arg,
        };
        let mut command = node.container("kube-flannel", |args| args.into_iter().map(store).collect());
        let log = node.host("/log");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
        let mut daemon = node.net.spawn(&mut command).unwrap();
        let log = || fs::read_to_string(&log).unwrap();
        let deadline = Instant::now() + PATIENCE;
        while !ask(&node, "/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200 ")) {
            assert_eq!(daemon.try_wait().unwrap(), None, "{}", log());
            assert!(Instant::now() < deadline, "{:?}\n{}", ask(&node, "/readyz"), log());
            std::thread::park_timeout(Duration::from_millis(20));
        }
        assert!(ask(&node, "/healthz").unwrap().starts_with("HTTP/1.1 200 "));
        let env = fs::read_to_string(node.host("/run/flannel/subnet.env")).unwrap();
        assert!(
            env.starts_with("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.")
                && env.contains("\nFLANNEL_IPMASQ=true\n")
        );
        let inside = |program: &str, args: &[&str]| {
            let output = node.net.output(Command::new(program).args(args)).unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(inside("ip", &["link", "show", "flannel.1"]).contains("mtu 1450"));
        assert!(inside("iptables-save", &["-t", "nat"]).contains("-A FLANNEL-POSTRTG -s 10.244.0.0/16"));
        let capabilities = fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            // CAP_NET_ADMIN is 12, CAP_NET_RAW is 13.
            assert!(capabilities.contains(&format!("{set}:\t0000000000003000\n")), "{capabilities}");
        }
        assert!(capabilities.contains("NoNewPrivs:\t1\n"));
        assert!(!log().contains("WARN") && !log().contains("ERROR"), "{}", log());

        a_pod_gets_an_address(&node, &conflist, &env);

        let kill = Command::new("kill").arg(daemon.id().to_string()).status().unwrap();
        assert!(kill.success() && daemon.wait().unwrap().success(), "{}", log());
        assert!(node.host("/var/lib/flannel/mark").exists(), "what it remembers is on the host");

        // As the documentation tells how to uninstall.
        let mut ctl = Command::new(image().join("opt/bin/flannelctl"));
        ctl.arg(format!("--registry=dir:{}", registry.display()));
        for (flag, path) in
            [("--state-dir", "/var/lib/flannel"), ("--subnet-file", "/run/flannel/subnet.env")]
        {
            ctl.arg(flag).arg(node.host(path));
        }
        let cleanup = node.net.output(ctl.arg("cleanup")).unwrap();
        assert!(cleanup.status.success(), "{}", String::from_utf8_lossy(&cleanup.stderr));
        assert!(
            !inside("ip", &["link"]).contains("flannel.1")
                && !inside("iptables-save", &[]).contains("FLANNEL")
        );
    });
}
