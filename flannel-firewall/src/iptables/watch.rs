//! Waits for changes of the rules of iptables, so that no process is run while nothing changes.
//!
//! `iptables-nft` has its rules in nf_tables, and the kernel reports each change of them. The
//! kernel reports no changes of the legacy tables. But `iptables-legacy` takes a lock for each
//! change, and inotify reports the end of its use.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{NetfilterEvents, NetfilterMessage};
use flannel_netlink::nftables::{ChainChange, GROUP, TableFamily};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::program::Variant;
use super::script;

/// No socket has this port, so changes by all programs are reported.
const NO_PORT: u32 = 0;

/// The variants that are watched. The default watches none.
#[derive(Default)]
pub(crate) struct Watch {
    nft: Option<NetfilterEvents>,
    /// Reports each use of the lock of `iptables-legacy`.
    lock: Option<Inotify>,
}

impl Watch {
    /// Begins to watch the rules of a variant, in the network namespace of the calling thread, if
    /// they are not watched yet. `lock` is the lock file of `iptables-legacy`. Returns false if
    /// they cannot be watched.
    pub(crate) fn cover(&mut self, variant: Variant, lock: &Path) -> bool {
        let begun = match variant {
            Variant::Nft if self.nft.is_none() => {
                NetfilterEvents::listen(GROUP, NO_PORT).map(|events| self.nft = Some(events))
            }
            Variant::Legacy if self.lock.is_none() => {
                watch_lock(lock).map(|inotify| self.lock = Some(inotify)).map_err(KernelError::from)
            }
            _ => Ok(()),
        };
        if let Err(error) = &begun {
            tracing::debug!(%error, ?variant, "changes of iptables rules are found by reading");
        }
        begun.is_ok()
    }

    /// Whether no change of a watched variant can go unseen. A program may change the legacy tables
    /// with another lock file, for example in a container.
    pub(crate) fn is_exact(&self) -> bool {
        self.lock.is_none()
    }

    /// Waits for a change of the watched variants that may concern flannel's rules.
    ///
    /// # Cancel safety
    /// No change is lost.
    pub(crate) async fn changed(&mut self) {
        let Self { nft, lock } = self;
        let ruleset = async {
            match nft {
                Some(events) => events.changed(concerns).await,
                None => std::future::pending().await,
            }
        };
        let used = async {
            match lock {
                Some(inotify) => readable(inotify).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = ruleset => if let Err(error) = changed {
                tracing::debug!(%error, "the rules of iptables-nft are watched again");
                *nft = None;
            },
            // The next check watches the file anew. So the events need not be read, and another
            // program may replace the file.
            _ = used => *lock = None,
        }
    }
}

fn watch_lock(path: &Path) -> io::Result<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let events = AddWatchFlags::IN_CLOSE | AddWatchFlags::IN_DELETE_SELF;
    inotify.add_watch(path, events | AddWatchFlags::IN_MOVE_SELF)?;
    Ok(inotify)
}

// The function that replaces `with_interest` is `unsafe`, because a type may not own its
// descriptor.
#[expect(deprecated, reason = "sound: the descriptor is borrowed for the whole wait")]
async fn readable(inotify: &Inotify) -> io::Result<()> {
    let waiting = AsyncFd::with_interest(inotify.as_fd(), Interest::READABLE)?;
    waiting.readable().await?.retain_ready();
    Ok(())
}

/// Whether a change of nf_tables concerns a chain of flannel, or one that jumps to it.
fn concerns(message: &NetfilterMessage<'_>) -> bool {
    ChainChange::read(message)
        .filter(|change| matches!(change.family, Some(TableFamily::Ip | TableFamily::Ip6)))
        .is_some_and(|change| script::concerns(&change.table, change.chain.as_deref()))
}
