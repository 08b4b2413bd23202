//! The choice of the interface that connects this host with its peers.
//!
//! [`choose`](fn@choose) is a pure function of [`Facts`];
//! [`NetlinkKernel::facts`](crate::NetlinkKernel::facts) reads them.
//!
//! **Source**: flannel `pkg/ipmatch/match.go: LookupExtIface`, without its panics.

mod choose;
mod facts;
mod follow;

pub use choose::{Attempt, SelectError, Selectors, choose};
pub use facts::{Address, DefaultRoute, Facts, Interface};
pub use follow::{InterfaceState, worse};
