//! Decodes the corpora of the fuzz targets: messages as Linux 6 and the Go library wgctrl sent
//! them, some of them damaged.

use std::fs;
use std::path::Path;

use flannel_netlink::testing::{decode, decode_wireguard};

/// A line for each file of a corpus.
fn read(corpus: &str, decode: impl Fn(&[u8]) -> Vec<String>) -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dev/fuzz/corpus").join(corpus);
    let mut read = String::new();
    let mut files: Vec<_> = fs::read_dir(&dir)
        .expect("the corpus is there")
        .map(|file| file.expect("a file").path())
        .collect();
    files.sort();
    for path in files {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let lines = decode(&fs::read(&path).expect("readable"));
        // Files that a fuzzer added have hexadecimal names. They are checked, but not listed.
        if !name.bytes().all(|b| b.is_ascii_hexdigit()) {
            read += &format!("{name}: {}\n", lines.join("; "));
        }
    }
    read
}

#[test]
fn netlink_message() {
    let joined = |datagram: &[u8]| vec![decode(datagram).join(", ")];
    assert_eq!(read("netlink_message", joined), include_str!("corpus.txt"));
}

#[test]
fn wireguard_message() {
    assert_eq!(read("wireguard_message", decode_wireguard), include_str!("wireguard_corpus.txt"));
}
