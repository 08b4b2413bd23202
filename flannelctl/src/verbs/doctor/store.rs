//! How long the store takes to answer.

use std::time::{Duration, Instant};

use flannel_api::Finding;
use flannel_doctor::commands::slow_store;
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
    slow_store(&offline::store_url(global)?, took, || lock_holder(global))
}

/// The process that holds the lock of the store's directory; `None`: no process, or the store is
/// another one.
pub(super) fn lock_holder(global: &Global) -> Option<String> {
    let Some(RegistryUrl::Dir(location)) = &global.registry else { return None };
    let lock = location.path.join(".lock");
    // `take` would create a missing file, perhaps in a directory that is not mounted.
    let is_held = lock.exists() && matches!(FileLock::take(&lock), Ok(None));
    is_held.then(|| FileLock::holder(&lock))
}
