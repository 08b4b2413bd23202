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
    let holder = || {
        let Some(RegistryUrl::Dir(location)) = &global.registry else { return None };
        let lock = location.path.join(".lock");
        matches!(FileLock::take(&lock), Ok(None)).then(|| FileLock::holder(&lock))
    };
    slow_store(&offline::store_url(global)?, took, holder)
}
