//! The image's files, built by the script that builds them for the image.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::container::{image, output_of};
use crate::objects::{file, manifest, of_kind};
use flannel_lab::testing::as_root;

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
fn the_image_has_every_program_at_the_path_in_the_manifest() {
    let names = [
        "flannel",
        "opt/bin/flannelctl",
        "opt/bin/flanneld",
        "opt/bin/install-conf",
        "opt/bin/mk-docker-opts.sh",
    ];
    assert_eq!(files(image(), ""), names.map(|name| (name.to_owned(), 0o755)));
    for program in ["flanneld", "flannelctl"] {
        let version =
            output_of(Command::new(image().join("opt/bin").join(program)).arg("--version"));
        assert_eq!(version.trim(), format!("{program} {}", env!("CARGO_PKG_VERSION")));
    }
    assert!(
        output_of(Command::new(image().join("flannel")).env_clear())
            .contains(env!("CARGO_PKG_VERSION"))
    );

    let objects = manifest();
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    for container in
        ["initContainers", "containers"].iter().flat_map(|kind| pod[kind].as_array().unwrap())
    {
        let program = container["command"][0].as_str().unwrap().trim_start_matches('/');
        assert!(names.contains(&program), "{program}");
    }
}

/// A stage of the Dockerfile: its instructions from `FROM` on, each on one line.
type Stage = Vec<(String, String)>;

fn stages() -> Vec<Stage> {
    let text = include_str!("../../../../deploy/Dockerfile");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let mut stages: Vec<Stage> = Vec::new();
    for line in lines.join("\n").replace("\\\n", " ").lines().filter(|line| !line.is_empty()) {
        let (instruction, rest) = line.split_once(' ').unwrap();
        if instruction == "FROM" {
            stages.push(Vec::new());
        }
        let words: Vec<&str> = rest.split_whitespace().collect();
        stages.last_mut().unwrap().push((instruction.to_owned(), words.join(" ")));
    }
    stages
}

/// The arguments of the instructions of one kind.
fn of<'a>(stage: &'a Stage, instruction: &str) -> Vec<&'a str> {
    stage.iter().filter(|(known, _)| known == instruction).map(|(_, rest)| rest.as_str()).collect()
}

/// The commands that a stage runs, without docker's own options.
fn commands(stage: &Stage) -> Vec<String> {
    let plain = |run: &str| {
        run.split(' ')
            .skip_while(|word| word.starts_with("--mount=type=cache,"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    of(stage, "RUN")
        .into_iter()
        .flat_map(|run| plain(run).split(" && ").map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

/// Checks the Dockerfile without Docker: besides Debian's packages the image has only the script's
/// output, and this test runs the script.
#[test]
fn the_dockerfile_has_only_commands_that_this_test_knows() {
    let stages = stages();
    let [build, last] = &stages[..] else { panic!("expected two stages: {stages:?}") };

    let needs = include_str!("../../../../deploy/build-image-root.sh")
        .split_once("(Debian: ")
        .unwrap()
        .1
        .split_once(')')
        .unwrap()
        .0;
    let mut packages: Vec<&str> = needs.split_whitespace().filter(|word| *word != "#").collect();
    packages.sort_unstable();
    let install = format!("apt-get install -y --no-install-recommends {}", packages.join(" "));
    let script = "deploy/build-image-root.sh";
    assert_eq!(commands(build), ["apt-get update".to_owned(), install, format!("{script} /image")]);
    assert_eq!(
        (of(build, "WORKDIR"), of(build, "COPY"), of(build, "ARG")),
        (vec!["/src"], vec![". ."], vec!["FLANNEL_COMMIT="])
    );
    assert_eq!(
        fs::metadata(file("build-image-root.sh")).unwrap().permissions().mode() & 0o111,
        0o111
    );
    // Dockerfile.dockerignore excludes no file that cargo needs.
    let ignored = include_str!("../../../../deploy/Dockerfile.dockerignore");
    let cargo = include_str!("../../../../Cargo.toml");
    let members = cargo
        .split_once("members = [")
        .unwrap()
        .1
        .split_once(']')
        .unwrap()
        .0
        .split('"')
        .skip(1)
        .step_by(2);
    for needed in members.chain([
        ".cargo",
        "Cargo.toml",
        "Cargo.lock",
        "deploy/build-image-root.sh",
        "README.md",
        "docs",
    ]) {
        assert!(
            !ignored.lines().any(|pattern| {
                let pattern = pattern.trim_matches('/').trim_end_matches('*');
                needed == pattern || needed.starts_with(&format!("{pattern}/"))
            }),
            "{needed}"
        );
    }
    // Both stages have one version of the C library, and the compiler is new enough.
    let rust = of(build, "FROM")[0];
    let debian = of(last, "FROM")[0];
    let (version, release) = rust
        .strip_prefix("rust:")
        .unwrap()
        .strip_suffix(" AS build")
        .unwrap()
        .split_once("-slim-")
        .unwrap();
    assert_eq!(debian, format!("debian:{release}-slim"));
    let minor = |version: &str| version.split('.').nth(1).unwrap().parse::<u32>().unwrap();
    assert!(minor(version) >= minor(env!("CARGO_PKG_RUST_VERSION")), "{version}");

    let iptables = |v: &str| {
        format!("update-alternatives --set ip{v}tables \"/usr/sbin/ip{v}tables-$IPTABLES\"")
    };
    let debians = [
        "apt-get update",
        "apt-get install -y --no-install-recommends ca-certificates iptables",
        "rm -rf /var/lib/apt/lists/*",
    ];
    let expected = [&debians.map(str::to_owned)[..], &[iptables(""), iptables("6")]].concat();
    assert_eq!((commands(last), of(last, "ARG")), (expected, vec!["IPTABLES=nft"]));
    assert_eq!(of(last, "COPY"), ["--from=build /image/ /"]);
    // As root (docs/kubernetes.md has the reason), with the manifest's capabilities only.
    assert!(
        of(last, "USER").is_empty()
            && !stages.iter().flatten().any(|(_, rest)| rest.contains("setcap"))
    );
    let entry: Vec<String> = serde_json::from_str(of(last, "ENTRYPOINT")[0]).unwrap();
    assert_eq!(entry, ["/opt/bin/flanneld"]);
    let path = of(last, "ENV")[0].strip_prefix("PATH=").unwrap();
    assert!(
        path.starts_with("/opt/bin:") && path.split(':').any(|dir| dir == "/usr/sbin"),
        "{path}"
    );
    let objects = manifest();
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let docs = include_str!("../../../../docs/kubernetes.md");
    for container in
        ["initContainers", "containers"].iter().flat_map(|kind| pod[kind].as_array().unwrap())
    {
        assert!(container["securityContext"]["runAsNonRoot"].is_null(), "the image is root's");
        for capability in container["securityContext"]["capabilities"]["add"].as_array().unwrap() {
            let why = format!("- **{}**, of ", capability.as_str().unwrap());
            assert!(docs.contains(&why), "docs/kubernetes.md does not explain {capability}");
        }
    }
}

#[test]
fn mk_docker_opts_writes_options_for_docker() {
    let dir = tempfile::tempdir().unwrap();
    let env = dir.path().join("subnet.env");
    let options = dir.path().join("docker.env");
    fs::write(
        &env,
        "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
         FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
    )
    .unwrap();
    output_of(
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

/// Runs them in a root directory without a loader and libraries.
#[test]
fn programs_for_hosts_are_static() {
    as_root(|| {
        let dir = tempfile::tempdir().unwrap();
        // By a process of its own: a child that another test starts would have the copy open for
        // writing, and the kernel would not run it.
        for name in ["flannel", "opt/bin/install-conf"] {
            output_of(Command::new("cp").arg(image().join(name)).arg(dir.path()));
        }
        let inside = |args: &[&str]| output_of(Command::new("chroot").arg(dir.path()).args(args));
        inside(&["/install-conf", "/flannel", "/copy"]);
        assert!(inside(&["/copy"]).starts_with("CNI Plugin flannel version "));
    });
}

/// With a compiler of such a host, and none of its targets.
#[test]
fn static_programs_are_for_the_machine_and_abi_of_the_host() {
    for (host, target) in [
        ("x86_64-unknown-linux-gnu", "x86_64-unknown-linux-musl"),
        ("aarch64-unknown-linux-gnu", "aarch64-unknown-linux-musl"),
        ("armv7-unknown-linux-gnueabihf", "armv7-unknown-linux-musleabihf"),
        ("x86_64-unknown-linux-musl", "x86_64-unknown-linux-musl"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        for (name, does) in [
            (
                "rustc",
                format!(
                    "if [ \"$1\" = -vV ]; then echo 'host: {host}'; else echo /nonexistent; fi"
                ),
            ),
            ("rustup", format!("echo \"$*\" >{}; exit 1", text.display())),
        ] {
            let program = dir.path().join(name);
            test_support::write_script(&program, &format!("#!/bin/sh\n{does}\n"));
        }
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let script = file("build-image-root.sh");
        let output =
            Command::new(script).arg(dir.path().join("image")).env("PATH", path).output().unwrap();
        assert!(!output.status.success(), "the compiler for {target} cannot be had");
        let arguments =
            fs::read_to_string(text).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        assert_eq!(arguments.trim(), format!("target add {target}"), "on {host}");
    }
}

/// `load-image.sh` with programs that only write how they are called.
#[test]
fn one_command_builds_the_image_and_loads_it_into_the_nodes() {
    let image = format!("localhost/flannel:v{}", env!("CARGO_PKG_VERSION"));
    let import = |ctr: &str| format!("if [ $(id -u) = 0 ]; then {ctr}; else sudo {ctr}; fi");
    let k3s = import("k3s ctr images import -");
    let containerd = import("ctr -n k8s.io images import -");
    let to = |node: &str, import: &str| format!("ssh {node} {import}");
    for (nodes, args, loads) in [
        (
            "kind://docker/two/two-worker,containerd://2.0.3,172.18.0.2\n\
             kind://docker/two/two-control-plane,containerd://2.0.3,172.18.0.3",
            &[] as &[&str],
            Some(vec!["kind load image-archive --name two".to_owned()]),
        ),
        (
            "k3s://a,containerd://2.0.4-k3s2,10.0.0.1 fd00::1\n\
             k3s://b,containerd://2.0.4-k3s2,10.0.0.2",
            &[],
            Some(vec![to("10.0.0.1", &k3s), to("10.0.0.2", &k3s)]),
        ),
        (",containerd://1.7.1,10.0.0.1", &[], Some(vec![to("10.0.0.1", &containerd)])),
        (
            ",containerd://1.7.1,10.0.0.1",
            &["a", "b"],
            Some(vec![to("a", &containerd), to("b", &containerd)]),
        ),
        ("rke2://a,containerd://2.0.5-k3s1,10.0.0.1", &[], None),
        (",cri-o://1.34.0,10.0.0.1", &[], None),
        ("", &[], None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let notes = |name: &str| format!("echo \"{name} $*\" >>{}", log.display());
        for (name, does) in [
            ("kubectl", format!("printf '%b\\n' '{}'", nodes.replace('\n', "\\n"))),
            ("docker", format!("{}; [ \"$1\" != save ] || echo image", notes("docker"))),
            // The third argument is a temporary file.
            (
                "kind",
                format!(
                    "echo \"kind $1 $2 $4 $5\" >>{}; [ \"$(cat \"$3\")\" = image ]",
                    log.display()
                ),
            ),
            ("ssh", format!("cat >/dev/null; {}", notes("ssh"))),
        ] {
            test_support::write_script(&dir.path().join(name), &format!("#!/bin/sh\n{does}\n"));
        }
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let output =
            Command::new(file("load-image.sh")).args(args).env("PATH", path).output().unwrap();
        let called = fs::read_to_string(&log).unwrap_or_default();
        let called: Vec<&str> = called.lines().collect();
        let Some(loads) = loads else {
            assert!(!output.status.success() && called.is_empty(), "{nodes}: {called:?}");
            continue;
        };
        assert!(output.status.success(), "{nodes}: {output:?}");
        assert!(called[0].starts_with("docker build --file "), "{called:?}");
        let build = format!("/Dockerfile --build-arg IPTABLES=nft --tag {image} ");
        assert!(called[0].contains(&build), "{called:?}");
        let rest = called[1..].iter().filter(|call| !call.starts_with("docker save "));
        assert!(rest.eq(loads.iter().map(String::as_str).collect::<Vec<_>>().iter()), "{called:?}");
    }
}

#[test]
fn the_image_and_the_unit_give_the_daemon_the_same_environment() {
    let unit = include_str!("../../../../deploy/systemd/flanneld.service");
    let image = include_str!("../../../../deploy/Dockerfile");
    let lines = unit.lines().filter_map(|line| line.strip_prefix("Environment="));
    let variables = lines.collect::<Vec<_>>().join(" \\\n    ");
    assert!(!variables.is_empty() && image.contains(&format!("ENV {variables}\n")), "{variables}");
}
