//! The program `lab`: its output, its exit status, and that it leaves nothing behind.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use test_support::eventually;

use flannel_lab::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

/// A directory for the program and its files only, open to every user.
struct Place {
    dir: TempDir,
    program: PathBuf,
}

impl Place {
    fn new() -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = TempDir::new().unwrap();
        let program = dir.path().join("lab");
        // Another process writes it, because a program that is open for writing cannot be started.
        assert!(
            Command::new("cp")
                .arg(env!("CARGO_BIN_EXE_lab"))
                .arg(&program)
                .status()
                .unwrap()
                .success()
        );
        let files = dir.path().join("files");
        fs::create_dir(&files).unwrap();
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(&files, PermissionsExt::from_mode(0o777)).unwrap();
        Self { dir, program }
    }

    fn files(&self) -> PathBuf {
        self.dir.path().join("files")
    }

    fn lab(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args).env("TMPDIR", self.files()).current_dir("/");
        command
    }

    /// Runs the lab, as an ordinary user if this test runs as root.
    fn rootless(&self, args: &[&str]) -> Command {
        let mut command = self.lab(args);
        if nix::unistd::geteuid().is_root() {
            command.uid(65_534).gid(65_534);
        }
        command
    }

    fn assert_empty(&self) {
        let left: Vec<_> =
            fs::read_dir(self.files()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "files left behind: {left:?}");
    }
}

fn output(command: &mut Command) -> (Output, String, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let out = text(&output.stdout);
    let err = text(&output.stderr);
    (output, out, err)
}

#[test]
fn wrong_usage_exits_with_status_2() {
    let place = Place::new();
    for args in [
        &["--hosts", "0"][..],
        &["--hosts", "251"],
        &["--hosts", "many"],
        &["--backend", "carrier-pigeon"],
        &["--family", "ipx"],
        &["--unknown"],
        &["word"],
    ] {
        let (status, out, err) = output(&mut place.lab(args));
        assert_eq!(status.status.code(), Some(2), "{args:?}: {out}{err}");
        assert!(out.is_empty() && err.contains(args[args.len() - 1]), "{args:?}: {out}{err}");
        let (status, out, err) = output(place.lab(args).arg("--json"));
        let result: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((status.status.code(), &result["ok"]), (Some(2), &Value::Bool(false)), "{err}");
        assert!(result["error"].to_string().contains(args[args.len() - 1]), "{result}");
    }
    assert_eq!(output(&mut place.lab(&["--help"])).0.status.code(), Some(0));
}

#[test]
fn a_missing_iproute2_is_named_with_the_remedy() {
    let place = Place::new();
    let (status, out, err) = output(place.lab(&["--json"]).env("PATH", "/nowhere"));
    assert_eq!(status.status.code(), Some(1));
    assert!(err.contains("Install iproute2"), "{err}");
    let result: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(result["ok"], false);
    assert!(result["error"].as_str().unwrap().contains("Install iproute2"));
    place.assert_empty();
}

/// The limit is set in a user namespace of this test.
#[test]
fn a_setting_that_forbids_namespaces_is_named_with_the_remedy() {
    let place = Place::new();
    let script = "echo 0 > /proc/sys/user/max_net_namespaces && exec \"$0\"";
    let (status, out, err) =
        output(place.rootless(&["enter", "sh", "-c", script]).arg(&place.program));
    assert_eq!(status.status.code(), Some(1), "{out}{err}");
    assert!(err.contains("(user.max_net_namespaces = 0)"), "{err}");
    assert!(err.contains("sysctl -w user.max_net_namespaces=10000"), "{err}");
    place.assert_empty();
}

#[test]
fn a_daemon_without_a_lab_is_refused() {
    let (status, _, err) = output(&mut Place::new().lab(&["daemon", "--iface", "lo"]));
    assert_eq!(status.status.code(), Some(1));
    assert!(err.contains("not a child of a lab"), "{err}");
}

/// Checks for one JSON object and a newline, which reports that every pod reached every other.
fn check_result(out: &str, hosts: usize, pairs: usize) {
    assert_eq!(out.matches('\n').count(), 1, "{out}");
    let result: Value = serde_json::from_str(out).unwrap();
    assert_eq!(result["ok"], true, "{result:#}");
    assert!(result["seconds_to_ready"].as_f64().unwrap() > 0.0);
    assert_eq!(result["hosts"].as_array().unwrap().len(), hosts);
    assert_eq!(result["pairs"].as_array().unwrap().len(), pairs);
    for host in result["hosts"].as_array().unwrap() {
        assert!(host["vm_rss_kib"].as_u64().unwrap() > 100, "{host}");
    }
    for pair in result["pairs"].as_array().unwrap() {
        assert!(pair["rtt_ms"].as_f64().unwrap() > 0.0, "{pair}");
        assert!(pair["tcp_bytes"].as_u64().unwrap() > 65_536, "{pair}");
        assert_eq!((&pair["ok"], &pair["error"]), (&Value::Bool(true), &Value::Null));
    }
}

#[test]
fn json_is_one_object_on_stdout() {
    let place = Place::new();
    let (status, out, err) = output(&mut place.lab(&["--json", "--family", "dual"]));
    assert_eq!(status.status.code(), Some(0), "{out}{err}");
    check_result(&out, 3, 12);
    place.assert_empty();
}

#[test]
fn an_ordinary_user_can_run_every_backend_and_family() {
    let place = Place::new();
    for backend in ["vxlan", "host-gw", "extension"] {
        for (family, pairs) in [("ipv4", 6), ("ipv6", 6), ("dual", 12)] {
            let args = ["--json", "--backend", backend, "--family", family];
            let (status, out, err) = output(&mut place.rootless(&args));
            assert_eq!(status.status.code(), Some(0), "{backend} {family}: {out}{err}");
            check_result(&out, 3, pairs);
        }
    }
    place.assert_empty();
}

#[test]
fn the_table_fits_80_columns_and_has_no_colours_in_a_file() {
    let place = Place::new();
    let (status, out, err) = output(&mut place.lab(&["--family", "dual"]));
    assert_eq!(status.status.code(), Some(0), "{out}{err}");
    assert!(out.lines().all(|line| line.chars().count() <= 80) && !out.contains('\x1b'), "{out}");
    for word in
        ["host-3", "10.244.", "fd00:10:244:", "MiB", "IPv4", "IPv6", "pod-3", "✓ every pod reached"]
    {
        assert!(out.contains(word), "{word:?} is not in\n{out}");
    }
    place.assert_empty();
}

#[test]
fn files_are_kept_with_the_option_and_after_a_failure() {
    let place = Place::new();
    for (args, code) in [(&["--keep", "--hosts", "2"][..], 0), (&["--timeout", "0"], 1)] {
        let (status, out, err) = output(&mut place.lab(args));
        assert_eq!(status.status.code(), Some(code), "{out}{err}");
        let kept: Vec<_> =
            fs::read_dir(place.files()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let [dir] = &kept[..] else { panic!("{kept:?}") };
        assert!(err.contains(dir.to_str().unwrap()), "{err}");
        assert!(dir.join("registry/config").exists() && dir.join("host-1/flanneld.log").exists());
        fs::remove_dir_all(dir).unwrap();
    }
}

/// A running lab, with everything that could be left of it.
struct Running {
    child: Child,
    /// Its output on stdout until it waits.
    printed: String,
    /// The namespaces of the lab and of its hosts, with their inodes.
    namespaces: Vec<PathBuf>,
    /// These namespaces, open, so that no other namespace gets their inodes.
    _open: Vec<fs::File>,
}

impl Drop for Running {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Running {
    /// Starts a lab with `--hold --json` and waits for its result.
    fn held(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut printed = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut printed).unwrap();
        let result: Value = serde_json::from_str(&printed).unwrap();
        let pid = |host: &Value| host["daemon_pid"].as_u64().unwrap();
        let daemons = result["hosts"].as_array().unwrap().iter().map(pid);
        let files: Vec<_> = daemons
            .chain([u64::from(child.id())])
            .map(|pid| format!("/proc/{pid}/ns/net"))
            .collect();
        let namespaces = files.iter().map(|file| fs::read_link(file).unwrap()).collect();
        let open = files.iter().map(|file| fs::File::open(file).unwrap()).collect();
        Self { child, printed, namespaces, _open: open }
    }

    /// Runs every command that the lab printed, as the lab's user, with `ip` instead of `sh`.
    fn run_printed_commands(&mut self) -> Vec<String> {
        use std::os::unix::fs::MetadataExt;
        let user = fs::metadata(format!("/proc/{}", self.child.id())).unwrap();
        let errors = BufReader::new(self.child.stderr.as_mut().unwrap());
        let lines = errors
            .lines()
            .map(|line| line.unwrap())
            .take_while(|line| !line.starts_with("  files"));
        let commands: Vec<String> = lines.filter(|line| line.contains("nsenter")).collect();
        for line in &commands {
            let (place, command) = line.trim().split_once(' ').unwrap();
            let command = command.strip_suffix(" sh").unwrap();
            let mut shell = Command::new("sh");
            shell.arg("-c").arg(format!("{command} ip -o addr show dev eth0"));
            if nix::unistd::geteuid().is_root() {
                shell.uid(user.uid()).gid(user.gid());
            }
            let (status, out, err) = output(&mut shell);
            let address = if place.starts_with("host") { "192.168.77." } else { "10.244." };
            assert!(status.status.success() && out.contains(address), "{line}: {out}{err}");
        }
        commands
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits until it ends.
    fn end(&mut self) -> std::process::ExitStatus {
        wait_for("the lab's end", || self.child.try_wait().unwrap())
    }

    /// No process is in one of the namespaces, and only this test holds one open.
    fn assert_gone(&self) {
        wait_for("the end of every process in the lab's namespaces", || {
            let inside = |process: &PathBuf| {
                let here = |path: PathBuf| {
                    fs::read_link(path).is_ok_and(|link| self.namespaces.contains(&link))
                };
                let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
                here(process.join("ns/net")) || files.map(|file| file.path()).any(here)
            };
            let own = ["self", "thread-self", &std::process::id().to_string()]
                .map(|name| PathBuf::from("/proc").join(name));
            let processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
            let processes = processes.filter(|path| !own.contains(path));
            let left: Vec<_> =
                processes.filter(|path| path.join("ns").exists()).filter(inside).collect();
            left.is_empty().then_some(())
        });
    }
}

fn wait_for<T>(what: &str, ready: impl FnMut() -> Option<T>) -> T {
    eventually(Duration::from_secs(120), ready, || what)
}

#[test]
fn an_interrupted_lab_leaves_nothing_behind() {
    let place = Place::new();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let commands: [fn(&Place, &[&str]) -> Command; 2] = [Place::lab, Place::rootless];
        for command in commands {
            let mut lab = Running::held(command(&place, &["--hold", "--json", "--hosts", "2"]));
            check_result(&lab.printed, 2, 2);
            assert_eq!(lab.run_printed_commands().len(), 4, "two hosts, two pods");
            lab.signal(signal);
            assert_eq!(lab.end().code(), Some(code));
            lab.assert_gone();
            place.assert_empty();
        }
    }
}

#[test]
fn daemons_of_a_killed_lab_end() {
    let place = Place::new();
    let mut lab = Running::held(place.lab(&["--hold", "--json"]));
    lab.signal(Signal::SIGKILL);
    assert_eq!(lab.end().code(), None);
    lab.assert_gone();
}

/// The end does not depend on the time of the signal.
#[test]
fn a_lab_can_be_interrupted_at_any_moment() {
    let place = Place::new();
    for milliseconds in [0, 15, 30, 60, 90, 120, 180, 240, 300, 400] {
        let mut child = place
            .lab(&["--hold", "--hosts", "6", "--family", "dual"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // It handles signals from its first line on. The signal follows at the chosen moment.
        let mut errors = BufReader::new(child.stderr.take().unwrap());
        let mut stderr = String::new();
        errors.read_line(&mut stderr).unwrap();
        let moment = Instant::now() + Duration::from_millis(milliseconds);
        while let Some(left) = moment.checked_duration_since(Instant::now()) {
            std::thread::park_timeout(left);
        }
        let pid = child.id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGTERM).unwrap();
        let status = wait_for("the lab's end", || child.try_wait().unwrap());
        errors.read_to_string(&mut stderr).unwrap();
        assert_eq!(status.code(), Some(143), "after {milliseconds} ms: {status}: {stderr}");
        place.assert_empty();
        let mine = format!("FLANNEL_LAB_PID={pid}");
        wait_for("the end of every daemon", || {
            let environments =
                fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path().join("environ"));
            let texts = environments.filter_map(|path| fs::read(path).ok());
            let left = texts
                .filter(|text| text.split(|byte| *byte == 0).any(|v| v == mine.as_bytes()))
                .count();
            (left == 0).then_some(())
        });
    }
}
