//! The chart, and the files that helm makes of it, as far as they can be checked without helm.
//! `tests/helm.rs` checks the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use flannel_core::Config;
use flannel_core::address::Family;
use serde_json::{Value, json};

use crate::objects::{container, dual_stack, file, known_to_the_api, manifest, of_kind, udp};

/// A file of the chart.
fn read(name: &str) -> String {
    fs::read_to_string(file("chart/flannel").join(name)).unwrap()
}

/// The one document of a YAML file of the chart.
fn yaml(name: &str) -> Value {
    let mut documents = crate::objects::documents(&read(name)).unwrap();
    assert_eq!(documents.len(), 1, "{name}");
    documents.remove(0)
}

/// The templates by their names.
fn templates() -> BTreeMap<String, String> {
    let names = fs::read_dir(file("chart/flannel/templates")).unwrap();
    names
        .map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let text = read(&format!("templates/{name}"));
            (name, text)
        })
        .collect()
}

/// The paths of the values with a default. What goes to Kubernetes unchanged is one value.
fn defaults() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut open = vec![(String::new(), yaml("values.yaml"))];
    while let Some((path, value)) = open.pop() {
        let unchanged = path.ends_with("Probe") || path.ends_with("resources");
        match value {
            Value::Object(fields) if !unchanged && !fields.is_empty() => {
                let join = |name: &String| {
                    if path.is_empty() { name.clone() } else { format!("{path}.{name}") }
                };
                open.extend(fields.iter().map(|(name, value)| (join(name), value.clone())));
            }
            _ => _ = names.insert(path),
        }
    }
    names
}

/// The paths of the values that `values.yaml` names in comments.
fn optional() -> BTreeSet<String> {
    let text = read("values.yaml");
    let named = text
        .lines()
        .filter_map(|line| line.strip_prefix("  # ")?.split_once(": ").map(|(name, _)| name));
    named
        .filter(|name| name.chars().all(char::is_alphanumeric) && *name != "wireguard")
        .map(|name| format!("flannel.{name}"))
        .collect()
}

/// The name of the image has one place, the chart's values. A test of the manifest has its version.
#[test]
fn all_files_name_the_image_of_the_chart() {
    let image = &yaml("values.yaml")["flannel"]["image"];
    let text = |field: &str| image[field].as_str().unwrap().to_owned();
    let repository = text("repository");
    let tag = text("tag");
    let mut named = 0;
    for dir in ["../docs", ".", ".."] {
        for entry in fs::read_dir(file(dir)).unwrap() {
            let path = entry.unwrap().path();
            let extension = path.extension().and_then(|extension| extension.to_str());
            let is_docker = path.ends_with("Dockerfile");
            if !is_docker && !matches!(extension, Some("md" | "yml" | "yaml" | "sh")) {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            for (at, _) in text.match_indices("localhost/") {
                let name = &text[at..];
                assert!(name.starts_with(&repository), "{}: {name:.40}", path.display());
                if let Some(rest) = name[repository.len()..].strip_prefix(':') {
                    assert!(rest.starts_with(&tag), "{}: {name:.40}", path.display());
                    named += 1;
                }
            }
        }
    }
    assert!(named > 5, "{named}");
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart = yaml("Chart.yaml");
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(
        (&chart["version"], &chart["appVersion"]),
        (&json!(version), &json!(format!("v{version}")))
    );
}

#[test]
fn every_value_is_in_the_documentation() {
    let docs = fs::read_to_string(file("../docs/kubernetes.md")).unwrap();
    assert!(optional().contains("flannel.psk") && defaults().contains("netpol.image.tag"));
    for name in optional().union(&defaults()) {
        assert!(docs.contains(&format!("`{name}`")), "docs/kubernetes.md does not name {name}");
    }
}

#[test]
fn templates_use_exactly_the_documented_values() {
    let all = templates().into_values().collect::<String>();
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let used: BTreeSet<String> = all
        .split(".Values.")
        .skip(1)
        .map(|rest| rest.chars().take_while(|c| is_path(*c)).collect())
        .collect();
    assert_eq!(used, optional().union(&defaults()).cloned().collect());
}

#[test]
fn the_schema_names_only_known_values() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    let known: BTreeSet<String> = optional().union(&defaults()).cloned().collect();
    let mut open = vec![(String::new(), &schema)];
    let mut typed = 0;
    while let Some((path, schema)) = open.pop() {
        match schema["properties"].as_object() {
            Some(fields) => open.extend(fields.iter().map(|(name, schema)| {
                (format!("{path}.{name}").trim_start_matches('.').to_owned(), schema)
            })),
            None => {
                assert!(known.contains(&path), "the schema names {path}");
                typed += 1;
            }
        }
    }
    assert_eq!(typed, 10);
}

/// Each line of a template that does not depend on a value is in the rendered file, in the same
/// order.
#[test]
fn the_manifests_follow_the_templates() {
    for (rendered, text) in [
        ("kube-flannel.yml", include_str!("../../../../deploy/kube-flannel.yml")),
        ("rendered/dual-stack.yml", include_str!("../../../../deploy/rendered/dual-stack.yml")),
        ("rendered/udp.yml", include_str!("../../../../deploy/rendered/udp.yml")),
    ] {
        for (name, template) in templates() {
            let source = format!("# Source: flannel/templates/{name}");
            let documents = text.split("---\n").filter(|part| part.starts_with(&source));
            let mut lines = documents.flat_map(|document| document.lines().skip(1));
            let mut depth = 0;
            let mut compared = 0;
            // Comments are actions too.
            let template = template.split_once("*/ -}}\n").map_or(&*template, |(_, rest)| rest);
            for line in template.lines() {
                match line.strip_prefix("{{- ").and_then(|action| action.split(' ').next()) {
                    Some("if" | "with") => depth += 1,
                    Some("end") => depth -= 1,
                    _ => {}
                }
                if depth == 0 && !line.contains("{{") && line != "---" {
                    assert!(
                        lines.any(|rendered| rendered == line),
                        "deploy/{rendered} lacks the line {line:?} of {name}: run \
                         deploy/render-manifests.sh"
                    );
                    compared += 1;
                }
            }
            assert!(depth == 0 && compared >= 5, "{name}: {compared} lines");
        }
    }
}

#[test]
fn the_default_values_are_in_the_manifest() {
    let values = yaml("values.yaml");
    let objects = manifest();
    let flannel = &values["flannel"];
    let image = |values: &Value| {
        let [repository, tag] = ["repository", "tag"].map(|name| values[name].as_str().unwrap());
        format!("{repository}:{tag}")
    };
    let pod = &of_kind(&objects, "DaemonSet")["spec"]["template"]["spec"];
    let main = container(&objects, "kube-flannel");
    for (name, from) in [
        ("kube-flannel", &flannel["image"]),
        ("install-cni", &flannel["image"]),
        ("install-cni-plugin", &flannel["flannel_cni"]["image"]),
    ] {
        assert_eq!(container(&objects, name)["image"], image(from), "{name}");
    }
    let port = &flannel["healthz"]["port"];
    let mut args = flannel["args"].as_array().unwrap().clone();
    args.push(format!("--healthz-port={port}").into());
    assert_eq!((&main["args"], &main["ports"][0]["containerPort"]), (&args.into(), port));
    for probe in ["livenessProbe", "readinessProbe"] {
        for (name, value) in flannel["healthz"][probe].as_object().unwrap() {
            assert_eq!(&main[probe][name], value, "{probe}.{name}");
        }
    }
    assert_eq!(main["resources"], flannel["resources"]);
    assert_eq!(pod["tolerations"], flannel["tolerations"]);
    assert!(pod["nodeSelector"].is_null() && pod["imagePullSecrets"].is_null());
    assert_eq!(pod["containers"].as_array().unwrap().len(), 1, "without network policies");
    for (volume, value) in [("cni-plugin", "cniBinDir"), ("cni", "cniConfDir")] {
        let volumes = pod["volumes"].as_array().unwrap();
        let volume = volumes.iter().find(|known| known["name"] == volume).unwrap();
        assert_eq!(volume["hostPath"]["path"], flannel[value]);
    }
    let data = &of_kind(&objects, "ConfigMap")["data"];
    assert_eq!(data["cni-conf.json"], flannel["cniConf"]);
    let net_conf: Value = serde_json::from_str(data["net-conf.json"].as_str().unwrap()).unwrap();
    let expected = json!({
        "Network": values["podCidr"],
        "EnableNFTables": flannel["enableNFTables"],
        "Backend": { "Type": flannel["backend"] },
    });
    assert_eq!(net_conf, expected);
}

#[test]
fn the_dual_stack_chart_is_valid_for_the_api_and_flanneld() {
    let values = include_str!("../../../../deploy/rendered/dual-stack.values.yaml");
    let objects = dual_stack();
    let values = crate::objects::documents(values).unwrap().remove(0);
    objects.iter().for_each(|object| known_to_the_api(object).unwrap());
    let data = &of_kind(&objects, "ConfigMap")["data"];
    let config = Config::parse(data["net-conf.json"].as_str().unwrap()).unwrap();
    assert_eq!(config.networks[Family::V6].unwrap().network.to_string(), values["podCidrv6"]);
    assert_eq!(config.networks.families().count(), 2);
    assert_eq!(config.nftables, values["flannel"]["enableNFTables"]);
    let options = flannel_backend_vxlan::Options::parse(&config.backend).unwrap();
    assert_eq!(options.direct_routing, values["flannel"]["directRouting"]);
}

/// The only differences that the backend makes. The API refuses a privileged container that forbids
/// new privileges.
#[test]
fn a_container_of_udp_is_privileged_and_has_the_device() {
    let objects = udp();
    let without = manifest();
    objects.iter().for_each(|object| known_to_the_api(object).unwrap());
    let data = &of_kind(&objects, "ConfigMap")["data"];
    let config = Config::parse(data["net-conf.json"].as_str().unwrap()).unwrap();
    flannel_backends::all().find("udp").unwrap().validate(&config, None).unwrap();
    let mut main = container(&objects, "kube-flannel").clone();
    assert_eq!(
        main["securityContext"].take(),
        json!({
            "privileged": true,
            "capabilities": { "drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"] },
            "readOnlyRootFilesystem": true,
        })
    );
    let last = main["volumeMounts"].as_array_mut().unwrap().pop();
    assert_eq!(last, Some(json!({ "name": "tun", "mountPath": "/dev/net/tun" })));
    let mut expected = container(&without, "kube-flannel").clone();
    expected["securityContext"].take();
    assert_eq!(main, expected);
    let pod = |objects: &[Value]| of_kind(objects, "DaemonSet")["spec"]["template"]["spec"].clone();
    let mut volumes = pod(&objects)["volumes"].take();
    let before = pod(&without)["volumes"].take();
    let device = json!({ "path": "/dev/net/tun", "type": "CharDevice" });
    let last = volumes.as_array_mut().unwrap().pop();
    assert_eq!(last, Some(json!({ "name": "tun", "hostPath": device })));
    assert_eq!(volumes, before);
    for name in ["install-cni-plugin", "install-cni"] {
        assert_eq!(container(&objects, name), container(&without, name));
    }
}
