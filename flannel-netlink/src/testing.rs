//! Network namespaces for tests, for root and for ordinary users.
//!
//! If no namespace can be created, a test fails. It is never skipped.

mod decode;

use std::any::type_name;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};

pub use self::decode::{decode, decode_wireguard};

/// Set in a process that [`in_netns`] started inside a user namespace.
const INSIDE: &str = "FLANNEL_NETLINK_INSIDE_USER_NAMESPACE";

/// A new network namespace with only `lo`, which is up. It exists as long as this value, or a
/// process or a socket in it.
#[derive(Debug)]
pub struct Netns(File);

impl Netns {
    /// Creates a namespace.
    ///
    /// # Errors
    /// The process lacks `CAP_SYS_ADMIN`, which [`in_netns`] does not need.
    pub fn new() -> io::Result<Self> {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            File::open("/proc/thread-self/ns/net")
        };
        let netns = thread::scope(|scope| scope.spawn(make).join())
            .unwrap_or_else(|panic| resume_unwind(panic))?;
        let netns = Self(netns);
        netns.run(|| ip("link set lo up"));
        Ok(netns)
    }

    /// The file of the namespace, for [`NetlinkKernel::open_in`](crate::NetlinkKernel::open_in)
    /// and for `netns FILE` of [`ip`].
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd()).into()
    }

    /// Runs `work` inside the namespace, on a separate thread, and waits for its end.
    ///
    /// # Panics
    /// `work` panics, or the namespace cannot be entered.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            setns(&self.0, CloneFlags::CLONE_NEWNET)
                .expect("the process that created a namespace may enter it");
            work()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Runs a test in its own network namespace with `lo` up.
///
/// For root, the test runs on another thread of this process. An ordinary user needs a user
/// namespace, which a process with several threads cannot enter. So the test binary runs again, for
/// this test only, under `unshare --user --map-root-user` of util-linux. Therefore the call must be
/// the only statement of the test function.
///
/// ```no_run
/// fn a_test() {
///     flannel_netlink::testing::in_netns(|| {
///         flannel_netlink::testing::ip("link add dummy0 type dummy");
///     });
/// }
/// ```
///
/// # Panics
/// `test` panics, or no namespace can be created.
pub fn in_netns<F: FnOnce() + Send + 'static>(test: F) {
    run_in_netns(&test_name::<F>(), test);
}

/// Runs an asynchronous test in its own network namespace, as [`in_netns`] does. The future that
/// `test` returns runs on a tokio runtime of one thread inside the namespace.
///
/// # Panics
/// As [`in_netns`].
pub fn in_netns_async<F, T>(test: F)
where
    F: FnOnce() -> T + Send + 'static,
    T: Future<Output = ()>,
{
    run_in_netns(&test_name::<F>(), || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test());
    });
}

fn run_in_netns(name: &str, test: impl FnOnce() + Send) {
    match Netns::new() {
        Ok(netns) => netns.run(test),
        Err(error)
            if error.kind() == io::ErrorKind::PermissionDenied
                && std::env::var_os(INSIDE).is_none() =>
        {
            run_again_in_user_namespace(name);
        }
        Err(error) => panic!("no network namespace for this test: {error}"),
    }
}

/// The name of the running test, by which its program runs it. The test harness names its threads
/// after the tests. If it uses only one thread, the name comes from the path of `F`, a closure in
/// the test function.
pub fn test_name<F>() -> String {
    match thread::current().name() {
        Some(name) if name != "main" => name.to_owned(),
        _ => {
            let path = type_name::<F>().trim_end_matches("::{{closure}}");
            path.split_once("::").map_or(path, |(_crate, rest)| rest).to_owned()
        }
    }
}

fn run_again_in_user_namespace(test: &str) {
    let binary = std::env::current_exe().expect("this process has a binary");
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--"]).arg(binary);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
    let out = Printed::new("stdout");
    let err = Printed::new("stderr");
    let status = command
        .stdout(out.writer())
        .stderr(err.writer())
        .status()
        .expect("`unshare` of util-linux is needed to run this test as an ordinary user");
    let stdout = out.text();
    let stderr = err.text();
    let ran = status.success() && stdout.contains("1 passed");
    assert!(ran, "{test} failed in a user namespace ({status}):\n{stdout}\n{stderr}");
}

/// The output of a program, in memory. With a pipe, the wait would last until all processes that a
/// failed test started have ended.
struct Printed(File);

impl Printed {
    fn new(name: &str) -> Self {
        let file = memfd_create(name, MFdFlags::MFD_CLOEXEC);
        Self(file.expect("there is memory for the output").into())
    }

    fn writer(&self) -> File {
        self.0.try_clone().expect("there is a file descriptor")
    }

    fn text(mut self) -> String {
        let mut bytes = Vec::new();
        self.0.rewind().and_then(|()| self.0.read_to_end(&mut bytes)).expect("it is in memory");
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

/// Runs `ip` of iproute2 in the network namespace of the calling thread, and returns its standard
/// output. White space separates the arguments.
///
/// # Panics
/// The program fails, or is not installed.
pub fn ip(args: &str) -> String {
    run("ip", args)
}

/// Runs `bridge` of iproute2, as [`ip`] does.
///
/// # Panics
/// The program fails, or is not installed.
pub fn bridge(args: &str) -> String {
    run("bridge", args)
}

/// Runs a program, as [`ip`] does.
///
/// # Panics
/// It fails.
pub fn run(program: &str, args: &str) -> String {
    let output = Command::new(program)
        .args(args.split_whitespace())
        .output()
        .unwrap_or_else(|error| panic!("`{program}` is needed for this test: {error}"));
    assert!(
        output.status.success(),
        "{program} {args}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("these programs print UTF-8")
}
