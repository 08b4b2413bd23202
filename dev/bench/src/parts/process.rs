//! The process of a long check: its namespace, its limits, and the signals that end it.

use flannel_lab::Interrupter;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};

/// Prepares the process, before other threads start. Its handle is interrupted at the first SIGINT,
/// SIGTERM or SIGHUP, so that the check ends with its ordinary cleanup.
pub(crate) fn prepare() -> anyhow::Result<Interrupter> {
    flannel_lab::enter()?;
    // Each host needs three files, and many shells allow 1,024.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    drop(guard);
    let interrupter = Interrupter::default();
    let here = interrupter.clone();
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hangup.recv() => {}
            }
        });
        here.interrupt();
    });
    Ok(interrupter)
}
