//! Decodes the corpus of the fuzz target: messages as Linux 6 sent them, some of them damaged.

use std::fs;
use std::path::Path;

use flannel_netlink::testing::decode;

#[test]
fn netlink_message() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/netlink_message");
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
            read += &format!("{name}: {}\n", lines.join(", "));
        }
    }
    assert_eq!(read, include_str!("corpus.txt"));
}
