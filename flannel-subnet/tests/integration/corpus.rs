//! Replays the corpora of the fuzz targets.

#[path = "../../../dev/fuzz/properties.rs"]
mod properties;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Checks the property on every file, and that only these files are accepted.
fn replay(target: &str, property: fn(&str) -> bool, accepted: &[&str]) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/corpus").join(target);
    let mut good = BTreeSet::new();
    for file in fs::read_dir(&dir).expect("the corpus is there") {
        let path = file.expect("a file").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let text = String::from_utf8_lossy(&fs::read(&path).expect("readable")).into_owned();
        // Files that a fuzzer added have hexadecimal names. They are checked, but not compared with
        // the list of accepted files.
        if property(&text) && !name.bytes().all(|b| b.is_ascii_hexdigit()) {
            good.insert(name);
        }
    }
    assert_eq!(good, accepted.iter().map(ToString::to_string).collect(), "{target}");
}

#[test]
fn lease_key_corpus_is_accepted_as_expected() {
    let accepted = ["dual", "last", "longest", "mapped", "v4", "v6-longest", "v6-only"];
    replay("lease_key", properties::lease_key, &accepted);
}

#[test]
fn lease_value_corpus_is_accepted_as_expected() {
    let accepted = [
        "big-numbers",
        "data-is-no-object",
        "data-null",
        "deep",
        "dual",
        "duplicates",
        "empty-object",
        "escapes",
        "html",
        "kelvin",
        "key-escaped",
        "mapped-v4",
        "names-in-any-case",
        "spaces",
        "type-null",
        "udp",
        "unknown",
        "v4-in-v6",
        "v6-only",
        "vxlan",
    ];
    replay("lease_value", properties::lease_value, &accepted);
}

#[test]
fn subnet_env_corpus_is_accepted_as_expected() {
    let accepted = [
        "capital",
        "crlf",
        "dual",
        "host",
        "last-host",
        "only-masq-and-mtu",
        "shell",
        "twice",
        "v4",
        "v6",
    ];
    replay("subnet_env", properties::subnet_env, &accepted);
}

#[test]
fn network_config_corpus_is_accepted_as_expected() {
    let accepted = [
        "backend-unicode",
        "bounds",
        "dual",
        "duplicates",
        "end-of-the-space",
        "half",
        "host-bits",
        "host-gw",
        "len-30",
        "len-zero",
        "nftables",
        "null-v6",
        "smallest",
        "unspecified-bounds",
        "v4",
        "v6-half",
        "v6-only",
    ];
    replay("network_config", properties::network_config, &accepted);
}
