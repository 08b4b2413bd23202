//! The programs that tests start.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// The path of `flannelctl`: the variable `FLANNELCTL`, or a build in the directory of `flanneld`.
/// It is a program of another crate, so cargo does not build it for these tests.
pub(crate) fn flannelctl() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        std::env::var_os("FLANNELCTL").map_or_else(build_flannelctl, PathBuf::from)
    });
    &PROGRAM
}

/// Builds it as `flanneld` was built. Cargo does nothing if it is up to date.
fn build_flannelctl() -> PathBuf {
    let flanneld = Path::new(env!("CARGO_BIN_EXE_flanneld"));
    let directory = flanneld.parent().unwrap();
    let profile = match directory.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        profile => profile,
    };
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", "flannelctl", "--profile", profile]);
    if !cfg!(feature = "etcd") {
        cargo.arg("--no-default-features");
    }
    cargo.arg("--manifest-path").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    cargo.arg("--target-dir").arg(directory.parent().unwrap());
    let status = cargo.status().unwrap();
    assert!(status.success(), "flannelctl does not build: {status}");
    directory.join("flannelctl")
}
