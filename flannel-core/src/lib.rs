#![doc = include_str!("../README.md")]

mod address;
mod alloc;
mod backend;
mod config;
mod error;
mod histogram;
mod json;
mod kernel;
mod lease;
mod listing;
mod name;
mod network;
mod nexthops;
mod plan;
mod state;
mod status;
mod subnet;
#[cfg(feature = "testing")]
pub mod testing;

pub use address::{Dual, Family, ParseError, Subnet};
pub use alloc::Alloc;
pub use backend::{
    Backend, Blueprint, Build, Built, Datapath, ExternalInterface, Inlet, Node, NodeLease, Prepared,
};
pub use config::{BackendConfig, Config, PodNetwork};
pub use error::{Error, Result, holder};
pub use histogram::Histogram;
pub use json::{FieldError, Fields, compact};
pub use kernel::{
    ChangedBy, Changes, Footprint, GO_ROUTE_PROTOCOL, Invalidation, Kernel, KernelError,
    KernelEvent, Process, ROUTE_PROTOCOL, RouteAnswer,
};
pub use lease::{Endpoint, KeyError, Lease, LeaseAttrs, LeaseSet, Origin, Revision, Subnets, View};
pub use listing::Listing;
pub use name::{LinkName, MacAddr};
pub use network::{Ended, Network, NetworkHandle, Question, Rejection};
pub use nexthops::{NexthopBlock, NexthopIds};
pub use plan::{Answer, Env, Plan, Rejected};
pub use state::{
    Addr, Change, Fdb, Finder, Key, Link, LinkKind, Neigh, Nexthop, Object, ObjectKind, Route,
    State, Via, Vxlan,
};
pub use status::{Damage, Explanation, Failure, ObjectState, Repair, Status, Wait, Waiting};
pub use subnet::{
    Calls, Hints, LeaseEnd, Loss, Ownership, Readiness, StoreStatus, SubnetManager, live_view,
};
