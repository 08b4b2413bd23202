//! Reads flannel's Kubernetes manifests, and renders its Helm chart as far as the chart goes.
//!
//! The one thing to know: this is **not helm**. It knows the part of the language of templates that `chart/flannel` keeps to,
//! refuses everything else, and is there so that tests can see what a chart makes of its values:
//!
//! - `{{ … }}` with `-` on either side, comments, `.Values.a.b`, `.Release.Namespace`, `.`, texts in double quotes;
//! - `if`, `else if`, `else`, `with`, `end`;
//! - the functions `eq`, `not`, `print`, `quote`, `toYaml`, `toJson`, `nindent`, and pipelines of them.
//!
//! It is stricter than helm: a value that is printed must be there.

mod chart;
mod template;
mod yaml;

pub use chart::{Chart, merge};
pub use template::{Template, TemplateError};
pub use yaml::{YamlError, documents, to_yaml};
