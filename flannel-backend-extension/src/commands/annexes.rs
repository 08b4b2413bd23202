//! The annexes of a backend.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use flannel_core::runtime::lock;

use crate::commands::annex::Commands;
use crate::commands::task::Names;

/// The annexes that a backend has made. A backend keeps one such value, because
/// `Backend::annex` must return a handle of the same annex for the same directory.
#[derive(Debug, Default)]
pub struct Annexes(Mutex<BTreeMap<(&'static str, Option<PathBuf>), Commands>>);

impl Annexes {
    /// No annexes.
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The annex with this name and directory. The first call makes it, as [`Commands::new`] does.
    /// Later calls return handles of it, and the other names have no effect. After its
    /// [stop](flannel_core::kernel::Annex::stop), the next call makes a new one.
    pub fn annex(&self, names: Names, dir: Option<PathBuf>) -> Commands {
        let mut annexes = lock(&self.0);
        let key = (names.annex, dir);
        if let Some(annex) = annexes.get(&key).filter(|annex| !annex.has_ended()) {
            return annex.clone();
        }
        let annex = Commands::new(names, key.1.clone());
        annexes.insert(key, annex.clone());
        annex
    }
}
