//! The choice of the external interface, which connects this host with its peers.
//!
//! [`choose`](fn@choose) is a pure function of [`Selectors`] and [`Facts`].
//! [`NetlinkKernel::facts`](crate::NetlinkKernel::facts) reads the facts.
//! [`NetlinkKernel::follow_interface`](crate::NetlinkKernel::follow_interface) reports when the
//! chosen interface changes.
//!
//! **Source**: flannel `pkg/ipmatch/match.go: LookupExtIface`. Where that function panics, this one
//! returns an error.

mod choose;
mod facts;
mod follow;
mod selectors;

pub use choose::{Attempt, SelectError, choose};
pub use facts::{Address, DefaultRoute, Facts, Interface, NextHop};
pub use follow::{InterfaceState, worse};
pub use selectors::Selectors;
