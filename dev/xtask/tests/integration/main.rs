//! The commands of `xtask`, and the manifests, the chart and the image, which have its output.
//!
//! Only Helm renders the chart. `deploy/render-manifests.sh` writes `deploy/kube-flannel.yml` and
//! `deploy/rendered/` from it. `chart.rs` checks these files and the chart as far as it can without
//! helm. `../helm.rs` needs helm and is not part of `cargo test`:
//!
//! ```sh
//! HELM=/path/to/helm cargo test -p xtask --test helm
//! ```

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod chart;
mod commands;
mod container;
mod containers;
mod image;
mod manifest;
mod objects;
