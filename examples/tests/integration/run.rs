//! Every example succeeds, and is short.

use std::fs;
use std::path::Path;
use std::process::Command;

/// The maximum number of lines of an example.
const LINES: usize = 60;

/// Runs an example. Its output must contain `expected`.
fn runs(program: &str, expected: &str) {
    let output = Command::new(program).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains(expected), "{text}{errors}");
}

macro_rules! runs {
    ($($name:ident: $expected:literal;)*) => {
        const ALL: &[&str] = &[$(stringify!($name)),*];
        $(
            #[test]
            fn $name() {
                runs(env!(concat!("CARGO_BIN_EXE_", stringify!($name))), $expected);
            }
        )*
    };
}

runs! {
    custom_backend: "reached through the hub: 1 peer";
    custom_registry: "ready, with 1 lease in memory";
    daemon: "FLANNEL_SUBNET=10.1.";
    engines: "1 peer in the kernel";
    lease_engine: " sees [";
    route_engine: "in sync with 1 peer";
}

#[test]
fn every_example_is_tested_and_short() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names = Vec::new();
    for file in fs::read_dir(source.join("bin")).unwrap() {
        names.push(file.unwrap().path());
    }
    names.sort();
    let stems: Vec<_> = names.iter().map(|path| path.file_stem().unwrap()).collect();
    assert_eq!(stems, ALL);
    names.extend(["hub.rs", "printing.rs"].map(|name| source.join(name)));
    for path in names {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= LINES, "{}: {lines} lines", path.display());
    }
}
