#![doc = include_str!("../README.md")]

mod address;
mod admit;
mod alloc;
mod cleanup;
mod config;
mod driver;
mod error;
mod facts;
mod heard;
mod histogram;
mod json;
mod kernel;
mod kernel_network;
mod lease;
mod ledger;
mod listing;
mod name;
mod network;
mod nexthops;
mod pace;
mod packed;
mod plan;
mod reconcile;
mod remarks;
mod roster;
mod state;
mod status;
mod subnet;
mod tally;
#[cfg(feature = "testing")]
pub mod testing;

pub use address::{Dual, Family, ParseError, Subnet};
pub use alloc::Alloc;
pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use config::{BackendConfig, Config, PodNetwork};
pub use error::{Error, Result, holder};
pub use histogram::Histogram;
pub use json::{FieldError, Fields, compact};
pub use kernel::{
    Changes, Culprit, Doubts, GO_ROUTE_PROTOCOL, Kernel, KernelError, Owned, Process,
    ROUTE_PROTOCOL, Report, RouteAnswer,
};
pub use kernel_network::{Blueprint, KernelNetwork};
pub use lease::{Endpoint, KeyError, Lease, LeaseAttrs, LeaseSet, Origin, Revision, Subnets, View};
pub use listing::Listing;
pub use name::{LinkName, MacAddr};
pub use network::{Backend, Disbelief, Ended, ExternalInterface, Host, Network, NetworkHandle};
pub use nexthops::{NexthopBlock, NexthopIds};
pub use plan::{Env, Plan, Rejected};
pub use state::{
    Addr, Change, Fdb, Key, Link, LinkKind, Neigh, Nexthop, Object, ObjectKind, Route, State, Via,
    Vxlan,
};
pub use status::{Damage, Explanation, Failure, Repair, Standing, Status, Wait, Waiting};
pub use subnet::{
    Calls, Hints, LeaseEnd, Loss, Ownership, Readiness, StoreStatus, SubnetManager, live_view,
};
