//! How long the store takes to answer.

use std::time::{Duration, Instant};

use flannel_doctor::Finding;
use flannel_doctor::store::{Lock, slow_store};
use flannel_options::RegistryUrl;
use flannel_subnet::FileLock;

use crate::offline;
use crate::options::Global;

/// The time limit of the question to the daemon's store. A longer wait shows nothing more.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

/// The finding that the store of this name is slow. Asks the store only if the options of this
/// command name the same one.
pub(super) async fn ask_for_time(global: &Global, name: &str) -> Option<Finding> {
    offline::store_url(global).filter(|url| url == name)?;
    let start = Instant::now();
    let asked = async { global.open_registry().await.ok()?.config().await.ok() };
    // The daemon reports an error.
    let _ = tokio::time::timeout(PATIENCE, asked).await;
    slow(global, start.elapsed())
}

/// The finding on a store that answered after a time, if that is long.
pub(super) fn slow(global: &Global, took: Duration) -> Option<Finding> {
    let name = offline::store_url(global)?;
    slow_store(&name, &offline::store_kind(global)?, took, || lock(global))
}

/// The lock of the store's directory.
pub(super) fn lock(global: &Global) -> Lock {
    let Some(RegistryUrl::Dir(location)) = &global.registry else { return Lock::Free };
    let path = location.path.join(".lock");
    // `take` would create a missing file, perhaps in a directory that is not mounted.
    let is_held = path.exists() && matches!(FileLock::take(&path), Ok(None));
    if is_held { Lock::Held(FileLock::holding_process(&path)) } else { Lock::Free }
}
