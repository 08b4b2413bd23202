//! Reads flannel's Kubernetes manifests, and renders its Helm chart as far as the chart goes.
//!
//! The one thing to know: this is **not helm**. It knows the part of the language of templates that `chart/flannel` keeps to,
//! refuses everything else, and is there so that tests can see what a chart makes of its values:
//!
//! - `{{ … }}` with `-` on either side, `.Values.a.b`, `.Release.Namespace`, `.`;
//! - `if` and its `else`, `with`, `end`;
//! - `toYaml`, `quote`, and `nindent` behind a `|`.
//!
//! Besides `.Values`, `if`, `with`, `toYaml` and `quote` these are: `.Release.Namespace`, which the subject of a binding must name;
//! `else`, for what an empty value means; and `nindent`, without which `toYaml` is of use at the left margin only.
//!
//! It is stricter than helm: a value that is printed must be there.

mod chart;
mod template;
mod yaml;

pub use chart::{Chart, merge};
pub use template::{Template, TemplateError};
pub use yaml::{YamlError, documents, to_yaml};
