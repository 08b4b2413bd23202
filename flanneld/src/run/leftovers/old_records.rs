//! Removes the records that another backend left in its annex, such as commands for peers.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use flannel_annex::WithAnnexes;
use flannel_backends::Backends;
use flannel_core::kernel::{Annex, Footprint};
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Backend, Kernel};
use flannel_route::cleanup;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{is_settled, log_removal};

/// The attempts to remove all records, and the pause between two. Then the next start tries again.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_secs(5);

/// Removes the records of all backends but `used` once the network is settled, then never returns.
pub(crate) async fn clear(
    kernel: Arc<dyn Kernel>,
    (backends, used): (&Backends, &dyn Backend),
    state_dir: &Path,
    mut status: watch::Receiver<Arc<Status>>,
) -> Infallible {
    let others = backends.iter().filter(|backend| backend.kind() != used.kind());
    let annexes: Vec<(String, Arc<dyn Annex>)> = others
        .filter_map(|other| Some((other.kind().to_owned(), other.annex(Some(state_dir))?)))
        .collect();
    if status.wait_for(is_settled).await.is_ok() {
        for (backend, annex) in annexes {
            for attempt in 1..=ATTEMPTS {
                let (kernel, annex, backend) =
                    (Arc::clone(&kernel), Arc::clone(&annex), backend.clone());
                let removal = move || {
                    let annexes = [annex.name()].into();
                    let footprint = Footprint { annexes, ..Footprint::default() };
                    let kernel = WithAnnexes::new(kernel, [annex]).waiting();
                    let removed = cleanup(&kernel, &footprint, false);
                    log_removal(&format!("the earlier backend {backend}"), removed)
                };
                if blocking(removal).await || attempt == ATTEMPTS {
                    break;
                }
                sleep(PAUSE).await;
            }
        }
    }
    std::future::pending().await
}
