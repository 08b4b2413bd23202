//! Reads flannel's Kubernetes manifests, and renders its Helm chart as far as the chart goes.
//!
//! The one thing to know: this is **not helm**. It knows the part of the language of templates that `chart/flannel` keeps to,
//! refuses everything else, and is there so that tests can see what a chart makes of its values:
//!
//! - `{{ … }}` with `-` on either side, `.Values.a.b`, `.Release.Namespace`, `.`;
//! - `if` and its `else`, `with`, `end`;
//! - `toYaml`, `quote`, `int`, and `nindent` behind a `|`.
//!
//! Four of these are more than `.Values`, `if`, `with`, `toYaml` and `quote`, since without them the chart would be a worse one:
//!
//! - `else`: an empty `podCidr` must become `"EnableIPv4": false`, and `skipCNIConfigInstallation` leaves a container out. Both are values of Go
//!   flannel's chart that turn something off, and `if` alone asks only for what is on. Another value for the opposite would have to be
//!   set together with each, which files of values that people have do not do;
//! - `nindent`: `toYaml` writes a list or a map at the left margin, and all that is handed over so (tolerations, resources, probes, arguments) stands deep
//!   in the DaemonSet, where that is no YAML;
//! - `.Release.Namespace`: the subject of the ClusterRoleBinding must name the namespace that `helm install -n` says. A value of the chart would have
//!   to be given as well, and wherever it is forgotten flannel has no rights;
//! - `int`: of a port in quotes (`--set-string`) `if` only knows that it is a text with something in it, and `"0"` would be a port.
//!
//! It is stricter than helm: a value that is printed must be there. As helm it judges values by `values.schema.json` first, of whose language
//! it knows `type` and `properties`; that is where a `"false"` is refused, which `if` takes for true.

mod chart;
mod schema;
mod template;
mod yaml;

pub use chart::{Chart, merge};
pub use template::{Template, TemplateError};
pub use yaml::{YamlError, documents, to_yaml};
