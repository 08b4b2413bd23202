//! Network namespaces. A socket stays in the namespace of the thread that opened it. So a
//! short-lived thread inside a namespace is enough to open a socket for it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use flannel_core::kernel::KernelError;
use nix::sched::{CloneFlags, setns};

/// A network namespace. It exists at least as long as this value.
#[derive(Debug)]
pub(crate) struct Namespace(File);

impl Namespace {
    /// The namespace of the calling thread.
    pub(crate) fn current() -> Result<Self, KernelError> {
        Self::at(Path::new("/proc/thread-self/ns/net"))
    }

    /// The namespace of a file such as `/run/netns/red` or `/proc/1234/ns/net`.
    pub(crate) fn at(path: &Path) -> Result<Self, KernelError> {
        let explain = |error: io::Error| {
            KernelError::from(error).about(format_args!("network namespace {}", path.display()))
        };
        File::open(path).map(Self).map_err(explain)
    }

    /// Runs `work` inside the namespace and waits for its end: on this thread if it is in the
    /// namespace already, else on a new thread. A panic of `work` is passed on.
    ///
    /// # Errors
    /// The process lacks `CAP_SYS_ADMIN`, or the file is not a network namespace. Then `work` does
    /// not run.
    pub(crate) fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, KernelError> {
        // `setns` needs CAP_SYS_ADMIN even for the current namespace.
        if self.is(&Self::current()?)? {
            return Ok(work());
        }
        let inside = || setns(&self.0, CloneFlags::CLONE_NEWNET).map(|()| work());
        std::thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            .map_err(|errno| KernelError::explained(errno as i32, "entering the network namespace"))
    }

    /// Whether both files are the same namespace.
    fn is(&self, other: &Self) -> io::Result<bool> {
        let this = self.0.metadata()?;
        let other = other.0.metadata()?;
        Ok(this.dev() == other.dev() && this.ino() == other.ino())
    }
}
