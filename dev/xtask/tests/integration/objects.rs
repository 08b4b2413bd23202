//! Kubernetes objects, checked against the API's types.

#![allow(dead_code, reason = "not every test needs everything")]

use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A file in `deploy/`. `FLANNEL_DEPLOY` is a copy of it for users who cannot read it.
pub(crate) fn file(name: &str) -> PathBuf {
    let dir = std::env::var_os("FLANNEL_DEPLOY")
        .unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy").into());
    Path::new(&dir).join(name)
}

/// The documents of a YAML file. Empty documents are left out.
///
/// # Errors
/// A document is not YAML.
pub(crate) fn documents(text: &str) -> Result<Vec<Value>, Box<serde_saphyr::Error>> {
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(text)?;
    documents.retain(|document| !document.is_null());
    Ok(documents)
}

/// The objects of the plain manifest.
pub(crate) fn manifest() -> Vec<Value> {
    documents(include_str!("../../../../deploy/kube-flannel.yml")).unwrap()
}

/// The objects of the chart for both families, with rules in nftables.
pub(crate) fn dual_stack() -> Vec<Value> {
    documents(include_str!("../../../../deploy/rendered/dual-stack.yml")).unwrap()
}

/// The objects of the chart for the backend udp.
pub(crate) fn udp() -> Vec<Value> {
    documents(include_str!("../../../../deploy/rendered/udp.yml")).unwrap()
}

/// A container of the DaemonSet.
pub(crate) fn container<'a>(objects: &'a [Value], name: &str) -> &'a Value {
    let pod = &of_kind(objects, "DaemonSet")["spec"]["template"]["spec"];
    let all = ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap());
    let mut found = all.into_iter().flatten().filter(|container| container["name"] == name);
    found.next().unwrap_or_else(|| panic!("no container {name}"))
}

/// The objects that clean nodes up.
pub(crate) fn cleanup() -> Vec<Value> {
    documents(include_str!("../../../../deploy/cleanup.yml")).unwrap()
}

/// Kind and name, which identify and order objects.
pub(crate) fn key(object: &Value) -> (String, String) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&object["kind"]), text(&object["metadata"]["name"]))
}

pub(crate) fn sorted(mut objects: Vec<Value>) -> Vec<Value> {
    objects.sort_by_key(key);
    objects
}

/// The object of a kind, of which there is one.
pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let mut found = objects.iter().filter(|object| object["kind"] == kind);
    let object = found.next().unwrap_or_else(|| panic!("no {kind}"));
    assert!(found.next().is_none(), "more than one {kind}");
    object
}

/// Decodes an object into the API's type and encodes it again. A field that the API does not know
/// is lost, which is an error that names its path.
pub(crate) fn known_to_the_api(object: &Value) -> Result<(), String> {
    fn through<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, String> {
        let typed: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
        serde_json::to_value(&typed).map_err(|error| error.to_string())
    }
    let kind = (object["apiVersion"].as_str(), object["kind"].as_str());
    let again = match kind {
        (Some("v1"), Some("Namespace")) => through::<Namespace>(object),
        (Some("v1"), Some("ServiceAccount")) => through::<ServiceAccount>(object),
        (Some("v1"), Some("ConfigMap")) => through::<ConfigMap>(object),
        (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRole")) => {
            through::<ClusterRole>(object)
        }
        (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRoleBinding")) => {
            through::<ClusterRoleBinding>(object)
        }
        (Some("apps/v1"), Some("DaemonSet")) => through::<DaemonSet>(object),
        _ => Err(format!("no kind of object that flannel has: {kind:?}")),
    };
    let lost = lost(object, &again?, "");
    if lost.is_empty() { Ok(()) } else { Err(format!("{:?}: {}", key(object), lost.join(", "))) }
}

/// The first path at which `after` differs from `before`.
fn lost(before: &Value, after: &Value, path: &str) -> Vec<String> {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            let names =
                before.keys().chain(after.keys().filter(|name| !before.contains_key(*name)));
            names
                .flat_map(|name| {
                    let value = |fields: &serde_json::Map<String, Value>| {
                        fields.get(name).cloned().unwrap_or_default()
                    };
                    lost(&value(before), &value(after), &format!("{path}.{name}"))
                })
                .collect()
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            let pairs = before.iter().zip(after).enumerate();
            pairs
                .flat_map(|(n, (before, after))| lost(before, after, &format!("{path}[{n}]")))
                .collect()
        }
        (before, after) if before == after => Vec::new(),
        (before, after) => vec![format!("{path}: {before} became {after}")],
    }
}

#[test]
fn documents_are_split_and_errors_are_reported() {
    let read = documents("---\n# nothing\n---\na: 1\n---\nb: [x]\n").unwrap();
    assert_eq!(read, [serde_json::json!({ "a": 1 }), serde_json::json!({ "b": ["x"] })]);
    documents("a: [1").unwrap_err();
    documents("a: 1\na: 2").unwrap_err();
}
