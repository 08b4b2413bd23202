//! The record keepers of a backend.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use flannel_core::runtime::lock;

use crate::commands::keeper::Commands;
use crate::commands::task::Names;

/// The record keepers that a backend has made. A backend keeps one such value.
/// `Backend::record_keepers` must return handles of the same record keepers for the same directory,
/// and this value finds them again.
#[derive(Debug, Default)]
pub struct Keepers(Mutex<BTreeMap<(&'static str, Option<PathBuf>), Commands>>);

impl Keepers {
    /// No record keepers.
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The keeper with this name and directory. The first call makes it, as [`Commands::new`] does.
    /// Later calls return handles of it, and the other names have no effect. After its
    /// [stop](flannel_core::kernel::RecordKeeper::stop), the next call makes a new one.
    pub fn keeper(&self, names: Names, dir: Option<PathBuf>) -> Commands {
        let mut record_keepers = lock(&self.0);
        let key = (names.keeper, dir);
        if let Some(keeper) = record_keepers.get(&key).filter(|keeper| !keeper.has_ended()) {
            return keeper.clone();
        }
        let keeper = Commands::new(names, key.1.clone());
        record_keepers.insert(key, keeper.clone());
        keeper
    }
}
