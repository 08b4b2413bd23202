//! The plain manifest and its kustomization, as the API reads them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use clap::CommandFactory;
use flannel_core::Config;
use flannel_core::address::Family;
use serde_json::{Value, json};

use crate::objects::{cleanup, file, key, known_to_the_api, manifest, of_kind, sorted};

/// The output of `kubectl kustomize` for a directory.
fn kustomized(dir: &Path) -> Vec<Value> {
    let output = Command::new("kubectl").arg("kustomize").arg(dir).output();
    let output = output
        .unwrap_or_else(|error| panic!("`kubectl` is needed (Debian: kubernetes-client): {error}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    crate::objects::documents(&String::from_utf8(output.stdout).unwrap()).unwrap()
}

#[test]
fn every_field_is_known_to_the_api() {
    let objects = manifest();
    let kinds: Vec<String> = objects.iter().map(|object| key(object).0).collect();
    let order = [
        "Namespace",
        "ServiceAccount",
        "ConfigMap",
        "ClusterRole",
        "ClusterRoleBinding",
        "DaemonSet",
    ];
    assert_eq!(kinds, order, "an object follows the objects that it needs");
    for object in &objects {
        known_to_the_api(object).unwrap();
    }
}

/// Tests the check itself.
#[test]
fn an_unknown_field_is_refused() {
    let set = of_kind(&manifest(), "DaemonSet").clone();
    for (path, wrong, expected) in [
        (
            "/spec/template/spec",
            json!({ "hostNetwrok": true }),
            ".spec.template.spec.hostNetwrok: true became null",
        ),
        (
            "/spec/template/spec/containers/0",
            json!({ "livenessprobe": {} }),
            ".containers[0].livenessprobe: {} became null",
        ),
        ("/metadata", json!({ "label": "x" }), ".metadata.label: \"x\" became null"),
    ] {
        let mut set = set.clone();
        set.pointer_mut(path)
            .unwrap()
            .as_object_mut()
            .unwrap()
            .extend(wrong.as_object().unwrap().clone());
        let error = known_to_the_api(&set).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let mut set = set;
    *set.pointer_mut("/spec/template/spec/hostNetwork").unwrap() = json!("true");
    known_to_the_api(&set).unwrap_err();
}

#[test]
fn the_kustomization_renders_the_manifest() {
    assert_eq!(sorted(kustomized(&file(""))), sorted(manifest()));
}

/// As an overlay in a user's directory.
#[test]
fn an_overlay_changes_image_and_network() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base");
    let overlay = dir.path().join("overlay");
    fs::create_dir(&base).unwrap();
    fs::create_dir(&overlay).unwrap();
    for name in ["kustomization.yaml", "kube-flannel.yml"] {
        fs::copy(file(name), base.join(name)).unwrap();
    }
    // JSON is YAML. Older names of `resources` and `patches`, because of Debian's kubectl 1.20.
    let kustomization = json!({
        "bases": ["../base"],
        "images": [{
            "name": "localhost/flannel",
            "newName": "registry.example/flannel",
            "newTag": "v9",
        }],
        "patchesStrategicMerge": ["net-conf.yaml"],
    });
    let net_conf = r#"{"Network": "10.42.0.0/16", "Backend": {"Type": "host-gw"}}"#;
    let patch = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "kube-flannel-cfg", "namespace": "kube-flannel" },
        "data": { "net-conf.json": net_conf },
    });
    fs::write(overlay.join("kustomization.yaml"), kustomization.to_string()).unwrap();
    fs::write(overlay.join("net-conf.yaml"), patch.to_string()).unwrap();

    let objects = kustomized(&overlay);
    objects.iter().for_each(|object| known_to_the_api(object).unwrap());
    assert_eq!(of_kind(&objects, "ConfigMap")["data"]["net-conf.json"], net_conf);
    let text = of_kind(&objects, "DaemonSet").to_string();
    assert_eq!(text.matches("\"image\":\"registry.example/flannel:v9\"").count(), 3, "{text}");
}

/// The overlay that the documentation shows, with its own texts.
#[test]
fn the_documented_overlay_renders_valid_objects() {
    let document = fs::read_to_string(file("../docs/kubernetes.md")).unwrap();
    let block = |name: &str| {
        let begin = format!("```yaml\n# {name}\n");
        let (_, rest) =
            document.split_once(&begin).unwrap_or_else(|| panic!("{begin} is not in the document"));
        rest.split_once("```").unwrap().0.to_owned()
    };
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("flannel/deploy");
    let overlay = dir.path().join("overlay");
    fs::create_dir_all(&base).unwrap();
    fs::create_dir(&overlay).unwrap();
    for name in ["kustomization.yaml", "kube-flannel.yml"] {
        fs::copy(file(name), base.join(name)).unwrap();
    }
    for name in ["kustomization.yaml", "net-conf.yaml"] {
        fs::write(overlay.join(name), block(name)).unwrap();
    }
    let objects = kustomized(&overlay);
    objects.iter().for_each(|object| known_to_the_api(object).unwrap());
    let kinds = |objects: &[Value]| objects.iter().map(key).collect::<BTreeSet<_>>();
    assert_eq!(kinds(&objects), kinds(&manifest()));
    let data = &of_kind(&objects, "ConfigMap")["data"];
    let config = Config::parse(data["net-conf.json"].as_str().unwrap()).unwrap();
    assert_eq!(config.networks[Family::V4].unwrap().network.to_string(), "10.42.0.0/16");
    assert!(config.networks[Family::V6].is_some());
    assert_eq!(data["cni-conf.json"], of_kind(&manifest(), "ConfigMap")["data"]["cni-conf.json"]);
    let text = of_kind(&objects, "DaemonSet").to_string();
    assert_eq!(text.matches("\"image\":\"registry.example/flannel:v0.1.0\"").count(), 3, "{text}");
}

#[test]
fn the_network_config_and_the_options_are_valid() {
    let objects = manifest();
    let data = &of_kind(&objects, "ConfigMap")["data"];
    let config = Config::parse(data["net-conf.json"].as_str().unwrap()).unwrap();
    assert_eq!(config.networks[Family::V4].unwrap().network.to_string(), "10.244.0.0/16");
    assert_eq!(
        (config.backend.kind.as_str(), config.nftables, config.networks.families().count()),
        ("vxlan", false, 1)
    );
    let cni: Value = serde_json::from_str(data["cni-conf.json"].as_str().unwrap()).unwrap();
    assert_eq!(
        (&cni["plugins"][0]["type"], &cni["plugins"][1]["type"]),
        (&json!("flannel"), &json!("portmap"))
    );
    let container = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"]["containers"][0];
    let args = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
    flanneld::Options::command()
        .try_get_matches_from(std::iter::once("flanneld").chain(args))
        .unwrap();
}

/// The init containers have one capability, flanneld two.
#[test]
fn containers_have_only_needed_capabilities() {
    let objects = manifest();
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let all = |name: &str| pod[name].as_array().unwrap().clone();
    let init = all("initContainers");
    let main = all("containers");
    for container in init.iter().chain(&main) {
        let context = &container["securityContext"];
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]), "{}", container["name"]);
        assert_eq!(
            (&context["allowPrivilegeEscalation"], &context["readOnlyRootFilesystem"]),
            (&json!(false), &json!(true))
        );
        assert!(context["privileged"].is_null());
    }
    // The host's directories of the CNI may belong to another user than root.
    assert!(
        init.iter().all(|container| container["securityContext"]["capabilities"]["add"]
            == json!(["DAC_OVERRIDE"]))
    );
    assert_eq!(main[0]["securityContext"]["capabilities"]["add"], json!(["NET_ADMIN", "NET_RAW"]));
    let rules = of_kind(&objects, "ClusterRole")["rules"].clone();
    assert_eq!(
        rules,
        json!([
            { "apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"] },
            { "apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"] },
        ])
    );
}

/// Without `NODE_NAME` flanneld would have to read its pod, which the role does not allow.
#[test]
fn references_between_objects_resolve() {
    let objects = manifest();
    let set = &of_kind(&objects, "DaemonSet")["spec"];
    let pod = &set["template"]["spec"];
    for (name, value) in set["selector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(&set["template"]["metadata"]["labels"][name], value);
    }
    assert_eq!(pod["serviceAccountName"], of_kind(&objects, "ServiceAccount")["metadata"]["name"]);
    let binding = of_kind(&objects, "ClusterRoleBinding");
    assert_eq!(binding["roleRef"]["name"], of_kind(&objects, "ClusterRole")["metadata"]["name"]);
    assert_eq!(binding["subjects"][0]["name"], pod["serviceAccountName"]);
    let env = &pod["containers"][0]["env"][0];
    assert_eq!(
        (&env["name"], &env["valueFrom"]["fieldRef"]["fieldPath"]),
        (&json!("NODE_NAME"), &json!("spec.nodeName"))
    );

    let names = |list: &Value| -> BTreeSet<String> {
        list.as_array()
            .unwrap()
            .iter()
            .map(|item| item["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let containers =
        ["initContainers", "containers"].map(|kind| pod[kind].as_array().unwrap().clone()).concat();
    let mounted: BTreeSet<String> =
        containers.iter().flat_map(|container| names(&container["volumeMounts"])).collect();
    assert_eq!(mounted, names(&pod["volumes"]));
    let namespace = &of_kind(&objects, "Namespace")["metadata"]["name"];
    for object in &objects {
        let of = &object["metadata"]["namespace"];
        assert!(of.is_null() || of == namespace, "{of}");
    }
    let version = format!("localhost/flannel:v{}", env!("CARGO_PKG_VERSION"));
    assert!(
        containers.iter().all(|container| container["image"] == *version),
        "expected {version}"
    );
}

/// It must not have flanneld's labels, and must run on the same nodes.
#[test]
fn the_cleanup_runs_on_the_nodes_of_flannel_with_other_labels() {
    let flannel = manifest();
    let cleanup = cleanup();
    cleanup.iter().for_each(|object| known_to_the_api(object).unwrap());
    let [flannel, cleanup] = [&flannel, &cleanup].map(|objects| of_kind(objects, "DaemonSet"));
    assert_eq!(cleanup["metadata"]["namespace"], flannel["metadata"]["namespace"]);
    let [old, new] = [flannel, cleanup].map(|set| &set["spec"]["template"]);
    assert_eq!(cleanup["spec"]["selector"]["matchLabels"], new["metadata"]["labels"]);
    assert_ne!(flannel["spec"]["selector"]["matchLabels"]["app"], new["metadata"]["labels"]["app"]);
    for field in ["affinity", "hostNetwork", "securityContext", "tolerations"] {
        assert_eq!(new["spec"][field], old["spec"][field], "{field}");
    }
    let of_host = |pod: &Value| -> Vec<Value> {
        let volumes = pod["spec"]["volumes"].as_array().unwrap().iter();
        volumes.map(|volume| volume["hostPath"].clone()).filter(|path| !path.is_null()).collect()
    };
    assert_eq!(of_host(new), of_host(old));
    for container in ["initContainers", "containers"].map(|kind| &new["spec"][kind][0]) {
        assert_eq!(container["image"], old["spec"]["containers"][0]["image"]);
        let context = &container["securityContext"];
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
        assert!(context["privileged"].is_null() && context["allowPrivilegeEscalation"] == false);
        assert_eq!(context["readOnlyRootFilesystem"], true);
    }
    // The container that only waits needs no privilege.
    let done = &new["spec"]["containers"][0]["securityContext"];
    assert!(done["capabilities"]["add"].is_null() && done["runAsNonRoot"] == true);
    assert!(
        done["runAsUser"].as_u64().is_some_and(|user| user > 0)
            && done["runAsUser"] == done["runAsGroup"]
    );
}
