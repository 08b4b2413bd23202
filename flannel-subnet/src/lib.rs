#![doc = include_str!("../README.md")]

mod allocate;
mod clock;
/// The files of a node: the cache of leases and `subnet.env`.
mod files {
    pub(crate) mod atomic;
    pub(crate) mod cache;
    pub(crate) mod lock;
    pub(crate) mod own;
    pub mod subnet_file;
}
mod manager;
mod reflect;
mod registry;
mod runtime;
#[cfg(feature = "testing")]
pub mod testing;

pub use allocate::allocate;
pub use clock::{Clock, SystemClock};
pub use files::atomic::{remove_temporary_files, replace_file};
pub use files::cache::{BootTime, Cache, CacheError, Saved};
pub use files::lock::FileLock;
pub use files::own::read_own_file;
pub use files::subnet_file::{self, SubnetFileError};
pub use flannel_core::backoff::Backoff;
pub use manager::{AssignedManager, Identity, LocalManager};
pub use reflect::Reflector;
pub use registry::{
    Assign, Batch, ConfigText, DirLocation, DirOptions, DirRegistry, Entry, Event, HolderId,
    HolderIdError, LeaseGrant, LeaseList, LocationError, MOST_SKIPPED, MemoryRegistry, Now,
    Registry, SkipReason, Skipped, Watch, config_conflict, value_to_write,
};
