#![doc = include_str!("../README.md")]

mod acquire;
mod allocate;
mod assigned;
mod async_fd;
mod atomic_file;
mod backoff;
mod cache;
mod clock;
mod dir;
mod entries;
mod fallback;
mod hold;
mod holding;
mod manager;
mod memory;
mod metered;
mod reconfigure;
mod reflect;
mod registry;
mod subnet_env;
mod task;
#[cfg(feature = "testing")]
pub mod testing;

pub use allocate::allocate;
pub use assigned::AssignedManager;
pub use backoff::Backoff;
pub use cache::{Cache, CacheError, Saved};
pub use clock::{Clock, SystemClock};
pub use dir::{Assign, DirLocation, DirOptions, DirRegistry, LocationError};
pub use manager::{Identity, LocalManager};
pub use memory::MemoryRegistry;
pub use reflect::Reflector;
pub use registry::{
    Batch, ConfigText, Entry, Event, HolderId, HolderIdError, LeaseGrant, Listing, Now, Registry,
    Skipped, Watch, config_conflict,
};
pub use subnet_env::{SubnetEnv, SubnetEnvError};
