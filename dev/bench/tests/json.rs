//! With `--json` standard output has one object and nothing else, also if a bench fails.

#![allow(clippy::unwrap_used, reason = "a test fails that way")]

use std::process::{Command, Stdio};

use flannel_netlink::testing::in_netns;
use serde_json::Value;

/// The output of a bench, and whether it succeeded.
fn bench(args: &str) -> (Value, bool) {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(args.split(' '))
        .arg("--json")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        printed.lines().count(),
        1,
        "{args}: {printed:?} {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let object: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(object["ok"], output.status.success(), "{args}: {printed}");
    assert_eq!(object["bench"], args.split(' ').next().unwrap());
    (object, output.status.success())
}

#[test]
fn a_failed_bench_prints_the_reason() {
    in_netns(|| {
        for (args, why) in [
            ("plot --out /dev/null", "two are needed"),
            ("one-more --peers 65000", "65484 together"),
            ("memory --peers 1 --flanneld /nowhere/flanneld", "/nowhere/flanneld"),
        ] {
            let (object, ok) = bench(args);
            assert!(!ok && object["wrong"][0].as_str().unwrap().contains(why), "{object}");
        }
    });
}

/// Without optimization a bench may exceed its threshold, but all objects must be correct.
#[test]
fn the_smallest_clusters_have_figures() {
    in_netns(|| {
        for (args, figure) in [
            ("one-more --peers 1 --samples 3", "p99_ms"),
            ("resync --peers 2", "ratio"),
            ("cold-start --peers 2", "in_sync_seconds"),
        ] {
            let (object, _) = bench(args);
            assert!(object[figure].as_f64().unwrap() > 0.0, "{object}");
            let wrong = object["wrong"].as_array().into_iter().flatten();
            let wrong: Vec<_> =
                wrong.filter(|line| !line.as_str().unwrap().contains(", expected at ")).collect();
            assert!(wrong.is_empty(), "{wrong:?}");
        }
    });
}
