//! Runs a test in a kernel of its own, for devices that the kernel of the host may lack.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

/// In the guest, the directory of its modules.
const MODULES: &str = "FLANNEL_GUEST_MODULES";
/// The last line of a test that passed.
const PASSED: &str = "the test passed in the guest";
/// Variables that programs in the guest get, if they are set.
const PASSED_ON: [&str; 4] = ["FLANNELCTL", "FLANNEL_LAB", "RUST_BACKTRACE", "RUST_LOG"];
/// The search path in the guest.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// The time after which a guest is ended.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs `work` in user-mode Linux with these kernel modules. The guest has the files of this host,
/// read-only, and writes to `/run` only. The test program runs the test again in the guest, as its
/// first process. So the call must be the only statement of the test, and `work` a closure.
///
/// User-mode Linux exists for x86-64 only. On other machines `work` runs on the host, whose kernel
/// needs the modules. On a processor with AMX it is [`in_qemu`], because user-mode Linux 6.1 ends
/// there: the registers of AMX do not fit into its buffer.
///
/// # Panics
/// There is no user-mode Linux, or `work` panics in the guest.
pub fn in_uml<F: FnOnce()>(modules: &[&str], work: F) {
    let machine = if has_amx() { &QEMU } else { &UML };
    in_guest(machine, LIMIT, modules, work);
}

/// Whether the processor has the registers of AMX.
fn has_amx() -> bool {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut flags = info.lines().filter(|line| line.starts_with("flags"));
    flags.any(|line| line.split_whitespace().any(|flag| flag == "amx_tile"))
}

/// [`in_uml`] for a kernel of Debian in QEMU. This kernel has modules that user-mode Linux lacks,
/// such as `wireguard`. The guest also has `wg` and `wireguard-go`. It starts in three seconds.
/// Programs in it take 10 to 20 times as long as on the host: QEMU translates their instructions.
///
/// # Panics
/// `FLANNEL_QEMU` does not name a directory of `get-guest.sh`, or `work` panics in the guest.
pub fn in_qemu<F: FnOnce()>(modules: &[&str], work: F) {
    in_guest(&QEMU, LIMIT, modules, work);
}

/// [`in_qemu`] for a test that takes long. The guest is ended after `limit`.
///
/// # Panics
/// As [`in_qemu`].
pub fn in_qemu_for<F: FnOnce()>(limit: Duration, modules: &[&str], work: F) {
    in_guest(&QEMU, limit, modules, work);
}

/// Runs `work` in a guest as [`in_qemu`] does, but in any program: the guest starts this program
/// with `arguments`, which have to lead to the same call. Returns what `work` printed.
///
/// # Panics
/// As [`in_qemu`].
pub fn run_in_qemu(arguments: &[String], modules: &[&str], work: impl FnOnce()) -> String {
    run_in(&QEMU, arguments, modules, work)
}

/// [`run_in_qemu`], where each instruction takes 4 ns of the guest's time. So rates in the guest do
/// not depend on other programs of this machine. The guest takes two to three times as long.
///
/// # Panics
/// As [`in_qemu`].
pub fn run_by_instructions(arguments: &[String], modules: &[&str], work: impl FnOnce()) -> String {
    run_in(&COUNTING, arguments, modules, work)
}

fn run_in(
    machine: &Machine,
    arguments: &[String],
    modules: &[&str],
    work: impl FnOnce(),
) -> String {
    match std::env::var_os(MODULES) {
        Some(dir) => inside(Path::new(&dir), modules, work),
        None => outside(machine, 3 * LIMIT, arguments.to_vec()),
    }
}

fn in_guest<F: FnOnce()>(machine: &Machine, limit: Duration, modules: &[&str], work: F) {
    let path = std::any::type_name::<F>();
    let test = path.strip_suffix("::{{closure}}").expect("a guest gets a closure of the test");
    let test = test.split_once("::").map_or(test, |(_crate, rest)| rest);
    match std::env::var_os(MODULES) {
        Some(dir) => inside(Path::new(&dir), modules, work),
        None if cfg!(target_arch = "x86_64") => {
            outside(machine, limit, ["--exact", test, "--nocapture"].map(String::from).into());
        }
        None => work(),
    }
}

/// A program that runs a kernel.
struct Machine {
    /// The variable that names its directory.
    variable: &'static str,
    /// The directory without that variable, if there is a usual one.
    default: Option<&'static str>,
    /// How to get the directory.
    source: &'static str,
    /// In the directory, the one with the modules of its only kernel.
    modules: &'static str,
    /// Appends the start to a command. Gets the directory, and one for files of this start.
    append: fn(&mut Command, &Path, &Path, &Start),
}

/// The first program in the guest. No text has spaces.
struct Start {
    program: String,
    arguments: Vec<String>,
    /// Each is `NAME=value`. `PATH` is not among them.
    variables: Vec<String>,
}

const UML: Machine = Machine {
    variable: "FLANNEL_UML",
    default: Some("/usr"),
    source: "install user-mode-linux, or run `dev/test-support/get-guest.sh uml DIR` and name \
             DIR/usr",
    modules: "lib/uml/modules",
    append: |command, dir, place, start| {
        command.arg(dir.join("bin/linux.uml"));
        command.args(["mem=512M", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"]);
        command.args(["con=null", "con0=fd:0,fd:1", &format!("uml_dir={}/", place.display())]);
        command.arg(format!("PATH={PATH}")).args(&start.variables);
        command.arg(format!("init={}", start.program)).arg("--").args(&start.arguments);
        command.env("TMPDIR", place);
    },
};

const QEMU: Machine = Machine {
    variable: "FLANNEL_QEMU",
    default: None,
    source: "run `dev/test-support/get-guest.sh qemu DIR` and name DIR",
    modules: "lib/modules",
    append: |command, dir, _, start| {
        let Start { program, arguments, variables } = start;
        let arguments = arguments.join(" ");
        let variables = variables.join(" ");
        command.arg(dir.join("qemu"));
        // With two processors, tests take longer.
        command.args(["-accel", "tcg", "-cpu", "max", "-m", "1024", "-nodefaults", "-no-reboot"]);
        command.args(["-display", "none", "-serial", "stdio", "-virtfs"]);
        command.arg("local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap");
        command.arg("-kernel").arg(dir.join("vmlinux"));
        command.arg("-initrd").arg(dir.join("initrd.img"));
        // The first program of initrd.img mounts the files of the host and becomes `program`.
        command.arg("-append").arg(format!(
            "console=ttyS0 quiet panic=-1 oops=panic no_timer_check PATH={}/usr/bin:{PATH} \
             {variables} -- {program} {arguments}",
            dir.display()
        ));
    },
};

const COUNTING: Machine = Machine {
    append: |command, dir, place, start| {
        (QEMU.append)(command, dir, place, start);
        command.args(["-icount", "shift=2"]);
    },
    ..QEMU
};

/// Starts this program in a guest. Returns what it printed.
fn outside(machine: &Machine, limit: Duration, arguments: Vec<String>) -> String {
    let Machine { variable, default, source, .. } = machine;
    let dir = std::env::var_os(variable).or_else(|| default.map(Into::into));
    let dir = PathBuf::from(dir.unwrap_or_else(|| panic!("{source} in {variable}")));
    let modules = dir.join(machine.modules);
    let release =
        fs::read_dir(&modules).and_then(|mut all| all.next().ok_or(ErrorKind::NotFound)?);
    let release = release
        .unwrap_or_else(|error| panic!("{}: {error}; {source} in {variable}", modules.display()));
    let place = tempfile::tempdir().expect("a temporary directory");
    let program = std::env::current_exe().expect("the test program").display().to_string();
    let what = arguments.join(" ");
    let mut variables = vec!["TMPDIR=/run".to_owned()];
    variables.push(format!("{MODULES}={}", release.path().display()));
    for name in PASSED_ON {
        if let Ok(value) = std::env::var(name) {
            variables.push(format!("{name}={value}"));
        }
    }
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", &limit.as_secs().to_string()]).stdin(Stdio::null());
    (machine.append)(&mut command, &dir, place.path(), &Start { program, arguments, variables });
    let output = command.output().expect("timeout runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    let status = output.status;
    assert!(text.contains(PASSED), "{what} failed in the guest: {status}\n{text}{errors}");
    text.into_owned()
}

/// Never returns: the end of the first process is a panic of the kernel.
fn inside(dir: &Path, modules: &[&str], work: impl FnOnce()) -> ! {
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
    let file = format!("/{module}.ko");
    if fs::read_to_string(dir.join("modules.builtin"))?.lines().any(|path| path.ends_with(&file)) {
        return Ok(());
    }
    let table = fs::read_to_string(dir.join("modules.dep"))?;
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

// On another machine, the host would panic.
#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a failure on purpose")]
    fn a_failure_in_qemu_fails_the_test() {
        in_qemu(&[], || panic!("a failure on purpose"));
    }

    #[test]
    #[should_panic(expected = "Kernel panic - not syncing: sysrq triggered crash")]
    fn a_panic_of_the_kernel_ends_qemu() {
        in_qemu(&[], || fs::write("/proc/sysrq-trigger", "c").unwrap());
    }
}
