//! The image's files, built by the script that builds them for the image.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

mod container;
mod objects;
use container::{image, said};
use flannel_lab::testing::as_root;
use objects::{file, manifest, of_kind};

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
        let said = dir.path().join("said");
        for (name, does) in [
            ("rustc", format!("if [ \"$1\" = -vV ]; then echo 'host: {host}'; else echo /nonexistent; fi")),
            ("rustup", format!("echo \"$*\" >{}; exit 1", said.display())),
        ] {
            let program = dir.path().join(name);
            fs::write(&program, format!("#!/bin/sh\n{does}\n")).unwrap();
            fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let script = file("build-image-root.sh");
        let output = Command::new(script).arg(dir.path().join("image")).env("PATH", path).output().unwrap();
        assert!(!output.status.success(), "the compiler for {target} cannot be had");
        let asked = fs::read_to_string(said).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        assert_eq!(asked.trim(), format!("target add {target}"), "on {host}");
    }
}
