//! The tests of the manifests, the chart and the image, in one program. Tests that need helm are in
//! `helm.rs`.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod chart;
mod container;
mod containers;
mod image;
mod manifest;
mod objects;
