//! Runs a test in a kernel of its own, for devices that the kernel of the host may lack.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

/// The prefix of user-mode Linux: `/usr`, or where its package was unpacked.
const PREFIX: &str = "FLANNEL_UML";
/// In the guest, the directory of its modules.
const MODULES: &str = "FLANNEL_UML_MODULES";
/// The last line of a test that passed.
const PASSED: &str = "the test passed in the guest";
/// Variables that programs in the guest get, if they are set.
const PASSED_ON: [&str; 4] = ["FLANNELCTL", "FLANNEL_LAB", "RUST_BACKTRACE", "RUST_LOG"];

/// Runs `work` in user-mode Linux with these kernel modules. The guest has the files of this host,
/// read-only, and writes to `/run` only. The test program runs the test again in the guest, as its
/// first process. So the call must be the only statement of the test, and `work` a closure.
///
/// User-mode Linux exists for x86-64 only. On other machines `work` runs on the host, whose kernel
/// needs the modules.
///
/// # Panics
/// There is no user-mode Linux, or `work` panics in the guest.
pub fn in_uml<F: FnOnce()>(modules: &[&str], work: F) {
    let path = std::any::type_name::<F>();
    let test = path.strip_suffix("::{{closure}}").expect("in_uml gets a closure of the test");
    let test = test.split_once("::").map_or(test, |(_crate, rest)| rest);
    match std::env::var_os(MODULES) {
        Some(dir) => inside(Path::new(&dir), modules, work),
        None if cfg!(target_arch = "x86_64") => outside(test),
        None => work(),
    }
}

fn outside(test: &str) {
    let prefix = std::env::var_os(PREFIX).map_or_else(|| PathBuf::from("/usr"), PathBuf::from);
    let (kernel, modules) = (prefix.join("bin/linux.uml"), prefix.join("lib/uml/modules"));
    let release =
        fs::read_dir(&modules).and_then(|mut all| all.next().ok_or(ErrorKind::NotFound)?);
    let release = release.unwrap_or_else(|error| {
        panic!(
            "{}: {error}; install user-mode-linux, or name in {PREFIX} the directory usr of its \
             unpacked package",
            modules.display()
        )
    });
    let place = tempfile::tempdir().expect("a temporary directory");
    let program = std::env::current_exe().expect("the test program");
    let variables = PASSED_ON
        .into_iter()
        .filter_map(|name| Some(format!("{name}={}", std::env::var(name).ok()?)));
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "300"]).arg(kernel);
    command.args(["mem=512M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]);
    command.args(["con=null", "con0=fd:0,fd:1", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]);
    command.args(["TMPDIR=/run".to_owned(), format!("uml_dir={}/", place.path().display())]);
    command.arg(format!("{MODULES}={}", release.path().display())).args(variables);
    command.arg(format!("init={}", program.display()));
    command.args(["--", "--exact", test, "--nocapture"]);
    command.env("TMPDIR", place.path()).stdin(Stdio::null());
    let output = command.output().expect("timeout runs");
    let [text, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let status = output.status;
    assert!(text.contains(PASSED), "{test} failed in the guest: {status}\n{text}{errors}");
}

/// Never returns: the end of the first process is a panic of the kernel.
fn inside(dir: &Path, modules: &[&str], work: impl FnOnce()) {
    let done = catch_unwind(AssertUnwindSafe(|| {
        for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run")] {
            mount(Some(kind), at, Some(kind), MsFlags::empty(), None::<&str>)
                .unwrap_or_else(|error| panic!("{at}: {error}"));
        }
        for module in modules {
            load(dir, module).unwrap_or_else(|error| panic!("module {module}: {error}"));
        }
        work();
    }));
    // A panic has printed its message.
    println!("{}", if done.is_ok() { PASSED } else { "the test failed in the guest" });
    let _ = io::stdout().flush();
    let error = reboot(RebootMode::RB_POWER_OFF).unwrap_err();
    panic!("power off: {error}");
}

/// Loads a module after those that it needs.
fn load(dir: &Path, module: &str) -> io::Result<()> {
    let table = fs::read_to_string(dir.join("modules.dep"))?;
    let file = format!("/{module}.ko");
    let line = table.lines().find_map(|line| {
        let (path, needs) = line.split_once(':')?;
        path.ends_with(&file).then_some((path, needs))
    });
    let (path, needs) = line.ok_or(ErrorKind::NotFound)?;
    for path in needs.split_whitespace().rev().chain([path]) {
        match finit_module(&File::open(dir.join(path))?, c"", ModuleInitFlags::empty()) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(error) => return Err(io::Error::other(format!("{path}: {error}"))),
        }
    }
    Ok(())
}
