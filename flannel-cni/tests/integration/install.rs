//! `install-conf` as init containers run it, on disks that are full and in containers that are
//! killed.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};
use test_support::eventually;

use crate::runtime::{install_conf, names};
use flannel_lab::testing::as_root;

const PATIENCE: Duration = Duration::from_secs(30);

/// The exit status and the message.
fn run(args: &[&Path]) -> (Option<i32>, String) {
    let output = Command::new(install_conf()).args(args).output().unwrap();
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_copy_succeeds_or_reports_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("cni-conf.json"), "{}").unwrap();
    let from = &*path("cni-conf.json");
    let to = &*path("10-flannel.conflist");
    assert_eq!(run(&[from, to]), (Some(0), String::new()));
    assert_eq!(fs::read_to_string(to).unwrap(), "{}");
    let more = Path::new("more");
    let option = Path::new("--force");
    for (wrong, says) in [
        (&[][..], "SOURCE and DESTINATION are missing"),
        (&[from], "DESTINATION is missing"),
        (&[from, to, more], "unexpected argument \"more\""),
        (&[option, from, to], "unknown option \"--force\""),
        (&[from, option], "unknown option \"--force\""),
    ] {
        let expected = format!("install-conf: {says}\nusage: install-conf SOURCE DESTINATION\n");
        assert_eq!(run(wrong), (Some(2), expected));
    }
    let (status, message) = run(&[&path("absent"), to]);
    let expected = format!(
        "install-conf: cannot read {}: No such file or directory (os error 2)\n",
        path("absent").display()
    );
    assert_eq!((status, message), (Some(1), expected));
    assert_eq!(names(dir.path()), ["10-flannel.conflist", "cni-conf.json"]);
}

/// The source is a pipe that never ends, so that the copy is incomplete when it is killed.
#[test]
fn a_killed_copy_leaves_the_old_file_and_the_next_one_cleans_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let pipe = path("pipe");
    let bin = path("bin");
    fs::create_dir(&bin).unwrap();
    let flannel = bin.join("flannel");
    fs::write(&flannel, "old").unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());

    let mut child =
        Command::new(install_conf()).args([&pipe, &flannel]).stderr(Stdio::null()).spawn().unwrap();
    // For reading and writing, so that opening does not wait for a reader.
    let mut writer = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
    writer.write_all(b"half of the ").unwrap();
    let half = || -> Option<PathBuf> {
        let name = names(&bin).into_iter().find(|name| name.starts_with(".flannel.tmp"))?;
        Some(bin.join(name)).filter(|path| fs::metadata(path).is_ok_and(|file| file.len() == 12))
    };
    let half = eventually(PATIENCE, half, || format!("{:?}", names(&bin)));
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    assert_eq!(fs::read_to_string(&flannel).unwrap(), "old");

    fs::write(path("plugin"), "new").unwrap();
    assert_eq!(run(&[&path("plugin"), &flannel]).0, Some(0));
    assert_eq!(fs::read_to_string(&flannel).unwrap(), "new");
    assert!(half.exists(), "another copy may still use it");
    File::open(&half).unwrap().set_modified(SystemTime::now() - Duration::from_secs(600)).unwrap();
    assert_eq!(run(&[&path("plugin"), &flannel]).0, Some(0));
    assert_eq!(names(&bin), ["flannel"]);
}

/// Many copies at once, as in a rollout of a DaemonSet. A reader always has a whole file.
#[test]
fn concurrent_copies_do_not_disturb_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("to");
    let sources = ["a", "b"].map(|letter| {
        let source = dir.path().join(letter);
        fs::write(&source, letter.repeat(100_000)).unwrap();
        source
    });
    assert_eq!(run(&[&sources[0], &to]).0, Some(0));
    std::thread::scope(|scope| {
        let copiers = sources.each_ref().map(|source| {
            let to = &to;
            scope.spawn(move || {
                (0..20).for_each(|_| assert_eq!(run(&[source, to]), (Some(0), String::new())));
            })
        });
        while copiers.iter().any(|copier| !copier.is_finished()) {
            let text = fs::read_to_string(&to).unwrap();
            assert!(text.len() == 100_000 && text.chars().all(|c| text.starts_with(c)));
        }
    });
    assert_eq!(names(dir.path()), ["a", "b", "to"]);
}

/// A full tmpfs of 64 KiB in a mount namespace.
#[test]
fn a_full_disk_keeps_the_old_file() {
    as_root(|| {
        let dir = tempfile::tempdir().unwrap();
        let script = r#"
            mount -t tmpfs -o size=64k tmpfs "$1"
            cd "$1"
            echo old >flannel
            "$2" "$3" flannel && exit 99
            ls -A
            cat flannel
        "#;
        let big = dir.path().join("big");
        fs::write(&big, vec![b'x'; 100_000]).unwrap();
        let full = dir.path().join("full");
        fs::create_dir(&full).unwrap();
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "--", "sh", "-ec", script, "sh"]).args([
            &full,
            &install_conf(),
            &big,
        ]);
        let output = shell.output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "flannel\nold\n", "{stderr}");
        assert!(stderr.starts_with("install-conf: cannot write ./.flannel.tmp"), "{stderr}");
        assert!(stderr.ends_with("No space left on device (os error 28)\n"), "{stderr}");
    });
}
