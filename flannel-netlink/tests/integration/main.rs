//! The tests of flannel-netlink, in one program, because a program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod changes;
mod corpus;
mod foreign;
mod fou;
mod iface;
mod ipip;
mod netfilter;
mod nftables;
mod objects;
mod qemu;
mod routes;
mod suite;
mod wireguard;
