//! A daemon that runs as long as a test holds it, and its log.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flannel_netlink::testing::ip;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Dropping it kills the process.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    log: Arc<Mutex<String>>,
}

impl Daemon {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = child.stderr.take().unwrap();
        let log = Arc::<Mutex<String>>::default();
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = stderr.read(&mut buffer) {
                sink.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..len]));
            }
        });
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn wait_for_log(&self, text: &str) {
        wait_until(
            || self.log().contains(text),
            || format!("{text:?} was never logged:\n{}", self.log()),
        );
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// Waits until it has ended.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut status = None;
        let log = Arc::clone(&self.log);
        let mut over = || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        };
        wait_until(&mut over, || format!("the daemon still runs:\n{}", log.lock().unwrap()));
        status.unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `condition` is true. Fails with the text of `otherwise`.
pub(crate) fn wait_until(condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    test_support::eventually(Duration::from_secs(60), condition, otherwise);
}

/// Makes a foreign vxlan device that takes the UDP port of `flannel-v6.1`, which then cannot be set
/// up again. The daemon stands still meanwhile.
pub(crate) fn take_the_port(daemon: &Daemon) {
    ip("link add other type vxlan id 9 gbp dstport 8472 local 2001:db8::1 dev eth0");
    daemon.signal(Signal::SIGSTOP);
    ip("link set flannel-v6.1 down");
    ip("link set other up");
    daemon.signal(Signal::SIGCONT);
}
