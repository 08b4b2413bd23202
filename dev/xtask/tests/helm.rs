//! Helm's output for the chart with other values than its defaults. `HELM` is the path of the
//! program if it is not in the `PATH`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsString;
use std::io::Write;
use std::process::{Command, Output};

use clap::CommandFactory;
use flannel_core::Config;
use flannel_core::address::Family;
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "integration/objects.rs"]
mod objects;
use objects::{container, file, known_to_the_api, of_kind};

/// Runs helm.
fn helm(args: &[&str]) -> Output {
    let program = std::env::var_os("HELM").unwrap_or_else(|| OsString::from("helm"));
    Command::new(&program).args(args).output().unwrap_or_else(|error| {
        panic!("{program:?}: {error}: name helm in HELM, or add it to PATH")
    })
}

/// The output of `helm template` for the chart with these values over its defaults.
///
/// # Errors
/// Helm's error.
fn render(values: &Value) -> Result<Vec<Value>, String> {
    let mut given = tempfile::NamedTempFile::new().unwrap();
    // JSON is YAML.
    given.write_all(values.to_string().as_bytes()).unwrap();
    let chart = file("chart/flannel");
    let given = given.path();
    let chart = chart.to_str().unwrap();
    let given = given.to_str().unwrap();
    let namespace = ["--namespace", "kube-flannel"];
    let output =
        helm(&[&["template", "flannel", chart, "--values", given], &namespace[..]].concat());
    if output.status.success() {
        Ok(objects::documents(&String::from_utf8(output.stdout).unwrap()).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// The objects for these values. The API knows each field, and flanneld each option.
fn rendered(values: &Value) -> Vec<Value> {
    let objects = render(values).unwrap_or_else(|error| panic!("{values}: {error}"));
    objects.iter().for_each(|object| known_to_the_api(object).unwrap());
    let args = container(&objects, "kube-flannel")["args"].clone();
    let args = args.as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
    flanneld::Options::command()
        .try_get_matches_from(std::iter::once("flanneld").chain(args))
        .unwrap();
    objects
}

fn pod(objects: &[Value]) -> &Value {
    &of_kind(objects, "DaemonSet")["spec"]["template"]["spec"]
}

/// The network config, as text.
fn net_conf(objects: &[Value]) -> &str {
    of_kind(objects, "ConfigMap")["data"]["net-conf.json"].as_str().unwrap()
}

/// The network config that these values make.
fn config(values: &Value) -> Config {
    let objects = rendered(values);
    let text = net_conf(&objects);
    Config::parse(text).unwrap_or_else(|error| panic!("{values}: {error}: {text}"))
}

/// `Backend` that these values make.
fn backend(values: &Value) -> Value {
    serde_json::from_str(&config(values).backend.options).unwrap()
}

#[test]
fn the_manifests_are_up_to_date() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(file("render-manifests.sh")).arg(dir.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for name in ["kube-flannel.yml", "rendered/dual-stack.yml", "rendered/udp.yml"] {
        let [there, expected] =
            [file(name), dir.path().join(name)].map(|path| std::fs::read_to_string(path).unwrap());
        assert!(there == expected, "deploy/{name} is out of date: run deploy/render-manifests.sh");
    }
}

#[test]
fn helm_lint_has_no_findings() {
    let output = helm(&["lint", "--strict", file("chart/flannel").to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_family_without_a_network_is_disabled() {
    for (v4, v6) in [(true, false), (false, true), (true, true)] {
        let networks = json!({
            "podCidr": if v4 { "10.42.0.0/16" } else { "" },
            "podCidrv6": if v6 { "fd00:42::/56" } else { "" },
        });
        let config = config(&networks);
        let network = |family| config.networks[family].map(|of| of.network.to_string());
        assert_eq!(network(Family::V4), v4.then(|| "10.42.0.0/16".to_owned()));
        assert_eq!(network(Family::V6), v6.then(|| "fd00:42::/56".to_owned()));
    }
    assert!(config(&json!({ "flannel": { "enableNFTables": true } })).nftables);
}

/// The chart writes each option under the names that backends have for it. A backend ignores fields
/// of `Backend` that it does not know, here and in Go flannel.
#[test]
fn every_field_of_a_backend_reaches_it() {
    let fields = json!({
        "backendPort": 4789, "backendPortv6": 51999, "mtu": 1400, "vni": 16777215,
        "GBP": true, "directRouting": true, "macPrefix": "0E-2A",
        "psk": "a \"secret\"\nin \\ lines", "tunnelMode": "separate", "keepaliveInterval": 25,
    });
    let expected = json!({
        "Port": 4789, "ListenPort": 4789, "ListenPortV6": 51999, "MTU": 1400, "VNI": 16777215,
        "GBP": true, "DirectRouting": true, "MacPrefix": "0E-2A",
        "PSK": "a \"secret\"\nin \\ lines", "Mode": "separate", "PersistentKeepaliveInterval": 25,
    });
    for kind in ["vxlan", "wireguard", "udp", "host-gw", "ipip", "alloc"] {
        let mut all = fields.clone();
        all["backend"] = kind.into();
        let mut everything = expected.clone();
        everything["Type"] = kind.into();
        assert_eq!(backend(&json!({ "flannel": all })), everything);
        let nothing = backend(&json!({ "flannel": { "backend": kind } }));
        assert_eq!(nothing, json!({ "Type": kind }), "nothing is set");
    }
    // One by one, because the position of a field must not matter.
    for (name, value) in fields.as_object().unwrap() {
        let one = backend(&json!({ "flannel": { name: value } }));
        let set: Vec<_> =
            one.as_object().unwrap().iter().filter(|(field, _)| *field != "Type").collect();
        let right = set.iter().all(|(field, value)| expected[field.as_str()] == **value);
        assert!(set.len() == if name == "backendPort" { 2 } else { 1 } && right, "{one}");
    }
    let config = config(&json!({ "flannel": {
            "backendPort": 4789, "vni": 7, "directRouting": true, "mtu": 1400
        } }));
    let options = flannel_backend_vxlan::Options::parse(&config.backend).unwrap();
    assert_eq!(
        (options.port, options.vni, options.direct_routing, options.mtu),
        (4789, 7, true, Some(1400))
    );
}

/// A port in quotes is a string, which no backend accepts, neither here nor in Go flannel. The
/// error names the field.
#[test]
fn a_number_in_quotes_is_refused_with_its_field() {
    for (value, field) in [("backendPort", "Port"), ("vni", "VNI"), ("mtu", "MTU")] {
        let config = config(&json!({ "flannel": { value: "4789" } }));
        let error = flannel_backend_vxlan::Options::parse(&config.backend).unwrap_err().to_string();
        assert!(
            error.contains(&format!("Backend.{field}")) && error.contains("\"4789\""),
            "{error}"
        );
    }
}

/// `--set-string`, or quotes in a file of values. helm prints a port the same in both.
#[test]
fn a_port_in_quotes_is_that_port() {
    for port in [json!(9000), json!("9000")] {
        let objects = rendered(&json!({ "flannel": { "healthz": { "port": port }, "args": [] } }));
        let main = container(&objects, "kube-flannel");
        assert_eq!(main["args"], json!(["--healthz-port=9000"]));
        assert_eq!(main["ports"][0]["containerPort"], 9000);
    }
    for off in [json!(0), json!("0")] {
        let objects = rendered(&json!({ "flannel": { "healthz": { "port": off }, "args": [] } }));
        let main = container(&objects, "kube-flannel");
        assert_eq!(main["args"], json!(["--healthz-port=0"]));
        for absent in ["ports", "livenessProbe", "readinessProbe"] {
            assert!(main[absent].is_null(), "{off}: {absent}");
        }
    }
}

/// Any string is true in a template, so `--set-string netpol.enabled=false` would start a
/// privileged container.
#[test]
fn a_text_for_a_boolean_is_refused() {
    for (path, kind) in [
        ("netpol.enabled", "netpol"),
        ("flannel.skipCNIConfigInstallation", "flannel"),
        ("flannel.enableNFTables", "flannel"),
        ("flannel.directRouting", "flannel"),
        ("flannel.GBP", "flannel"),
    ] {
        let name = path.split_once('.').unwrap().1;
        for text in ["false", "true", "0", ""] {
            let error = render(&json!({ kind: { name: text } })).unwrap_err();
            let expected = format!("'/{kind}/{name}': got string, want boolean");
            assert!(error.contains(&expected), "{error}");
        }
        rendered(&json!({ kind: { name: false } }));
        rendered(&json!({ kind: { name: true } }));
    }
}

/// helm would render the image `flannel:2.0261121e+07`.
#[test]
fn a_tag_that_is_a_number_must_be_in_quotes() {
    for (path, values) in [
        ("flannel/image/tag", json!({ "flannel": { "image": { "tag": 20_261_121 } } })),
        (
            "flannel/flannel_cni/image/tag",
            json!({ "flannel": { "flannel_cni": { "image": { "tag": 1.10 } } } }),
        ),
        ("netpol/image/tag", json!({ "netpol": { "image": { "tag": 1 } } })),
    ] {
        let error = render(&values).unwrap_err();
        assert!(error.contains(&format!("'/{path}': got number, want string")), "{error}");
    }
    let objects = rendered(&json!({ "flannel": { "image": { "tag": "20261121" } } }));
    assert_eq!(container(&objects, "kube-flannel")["image"], "localhost/flannel:20261121");
}

#[test]
fn values_of_the_pod_are_in_the_right_fields() {
    let objects = rendered(&json!({
        "global": { "imagePullSecrets": [{ "name": "a-secret" }] },
        "flannel": {
            "image": { "repository": "registry.example/flannel", "tag": "v9" },
            "flannel_cni": { "image": { "repository": "registry.example/cni", "tag": "1.10" } },
            "cniBinDir": "/var/lib/cni \"bin\"", "cniConfDir": "/etc/other\nnet.d",
            "args": ["--ip-masq", "--iface-regex=^eth[0-9]+: \"x\"$", "--iface=#1"],
            "resources": { "limits": { "memory": "128Mi" } },
            "healthz": {
                "port": 9000,
                "livenessProbe": { "timeoutSeconds": 3 },
                "readinessProbe": { "failureThreshold": 9 },
            },
            "tolerations": [{ "key": "on", "operator": "Equal", "value": "yes" }],
            "nodeSelector": { "eks.amazonaws.com/compute-type": "hybrid", "on": "true" },
        },
    }));
    let spec = pod(&objects);
    let main = container(&objects, "kube-flannel");
    assert_eq!(spec["imagePullSecrets"], json!([{ "name": "a-secret" }]));
    assert_eq!(main["image"], "registry.example/flannel:v9");
    assert_eq!(container(&objects, "install-cni")["image"], main["image"]);
    assert_eq!(container(&objects, "install-cni-plugin")["image"], "registry.example/cni:1.10");
    let path = |name: &str| {
        let volumes = spec["volumes"].as_array().unwrap();
        volumes.iter().find(|volume| volume["name"] == name).unwrap()["hostPath"]["path"].clone()
    };
    assert_eq!(
        (path("cni-plugin"), path("cni")),
        (json!("/var/lib/cni \"bin\""), json!("/etc/other\nnet.d"))
    );
    assert_eq!(
        main["args"],
        json!([
            "--ip-masq",
            "--iface-regex=^eth[0-9]+: \"x\"$",
            "--iface=#1",
            "--healthz-port=9000"
        ])
    );
    assert_eq!(
        main["resources"],
        json!({ "limits": { "memory": "128Mi" }, "requests": { "cpu": "100m", "memory": "50Mi" } })
    );
    assert_eq!(main["ports"][0]["containerPort"], 9000);
    let probe = json!({
        "httpGet": { "path": "/healthz", "port": "healthz" },
        "initialDelaySeconds": 10, "periodSeconds": 30, "timeoutSeconds": 3,
    });
    assert_eq!(main["livenessProbe"], probe);
    assert_eq!(main["readinessProbe"]["failureThreshold"], 9);
    assert_eq!(spec["tolerations"], json!([{ "key": "on", "operator": "Equal", "value": "yes" }]));
    assert_eq!(
        spec["nodeSelector"],
        json!({ "eks.amazonaws.com/compute-type": "hybrid", "on": "true" })
    );
    assert_eq!(of_kind(&objects, "ConfigMap")["metadata"]["namespace"], "kube-flannel");
}

#[test]
fn disabled_parts_are_absent() {
    let objects = rendered(&json!({ "flannel": {
        "skipCNIConfigInstallation": true, "args": [], "tolerations": [], "resources": null,
        "healthz": { "port": 0 },
    } }));
    let spec = pod(&objects);
    assert_eq!(spec["initContainers"].as_array().unwrap().len(), 1);
    assert!(
        spec["tolerations"].is_null()
            && spec["imagePullSecrets"].is_null()
            && spec["nodeSelector"].is_null()
    );
    let main = container(&objects, "kube-flannel");
    assert_eq!(main["args"], json!(["--healthz-port=0"]));
    for absent in ["ports", "livenessProbe", "readinessProbe", "resources"] {
        assert!(main[absent].is_null(), "{absent}");
    }
    let probes =
        json!({ "flannel": { "healthz": { "livenessProbe": null, "readinessProbe": {} } } });
    let main = container(&rendered(&probes), "kube-flannel").clone();
    assert_eq!(
        main["livenessProbe"],
        json!({ "httpGet": { "path": "/healthz", "port": "healthz" } })
    );
    assert_eq!(main["readinessProbe"]["periodSeconds"], 10);
}

#[test]
fn network_policies_have_their_container_rules_and_volume() {
    let without = rendered(&json!({}));
    let objects = rendered(
        &json!({ "netpol": { "enabled": true, "args": ["--v=4: x"], "image": { "tag": "v2" } } }),
    );
    let netpol = container(&objects, "kube-network-policies");
    assert_eq!(netpol["image"], "registry.k8s.io/networking/kube-network-policies:v2");
    assert_eq!(netpol["args"], json!(["--v=4: x"]));
    let rules =
        |objects: &[Value]| of_kind(objects, "ClusterRole")["rules"].as_array().unwrap().len();
    assert_eq!((rules(&without), rules(&objects)), (2, 5));
    let volumes = |objects: &[Value]| pod(objects)["volumes"].as_array().unwrap().len();
    assert_eq!((volumes(&without), volumes(&objects)), (6, 7));
    // flannel's own permissions do not change.
    assert_eq!(container(&without, "kube-flannel"), container(&objects, "kube-flannel"));
}

#[test]
fn the_preshared_key_comes_from_a_secret() {
    let values = json!({ "flannel": { "backend": "wireguard", "pskSecret": "wireguard-psk" } });
    let without = rendered(&json!({}));
    let objects = rendered(&values);
    let path = "/etc/kube-flannel-psk/psk";
    assert_eq!(backend(&values), json!({ "Type": "wireguard", "PSKFile": path }));
    let backends = flannel_backends::all();
    let kind = backends.find("wireguard").unwrap();
    kind.validate(&config(&values), None).unwrap();
    let added = |objects: &[Value], of: fn(&[Value]) -> Vec<Value>| {
        let before = of(&without);
        let mut all = of(objects);
        all.retain(|one| !before.contains(one));
        Value::from(all)
    };
    let mounts: fn(&[Value]) -> Vec<Value> =
        |objects| container(objects, "kube-flannel")["volumeMounts"].as_array().unwrap().clone();
    let volumes: fn(&[Value]) -> Vec<Value> =
        |objects| pod(objects)["volumes"].as_array().unwrap().clone();
    let mount = json!([{ "name": "psk", "mountPath": "/etc/kube-flannel-psk", "readOnly": true }]);
    assert_eq!(added(&objects, mounts), mount);
    let secret = json!({
        "secretName": "wireguard-psk",
        "items": [{ "key": "psk", "path": "psk" }],
        "defaultMode": 0o400,
    });
    assert_eq!(added(&objects, volumes), json!([{ "name": "psk", "secret": secret }]));
    let both = json!({ "flannel": { "psk": "a", "pskSecret": "wireguard-psk" } });
    let error = render(&both).unwrap_err();
    assert!(error.contains("flannel.psk and flannel.pskSecret are both set"), "{error}");
    let number = json!({ "flannel": { "pskSecret": 20261121 } });
    assert!(render(&number).unwrap_err().contains("pskSecret"));
}

/// Only with udp the container is privileged, and has the device.
#[test]
fn udp_has_the_device_in_any_case_of_its_name() {
    let device = json!({ "name": "tun", "mountPath": "/dev/net/tun" });
    for (backend, is_udp) in [("vxlan", false), ("udp", true), ("UDP", true), ("udpx", false)] {
        let objects = rendered(&json!({ "flannel": { "backend": backend } }));
        let main = container(&objects, "kube-flannel");
        let has = |list: &Value, name: &str| {
            list.as_array().unwrap().iter().any(|item| item["name"] == name)
        };
        assert_eq!(main["volumeMounts"].as_array().unwrap().contains(&device), is_udp);
        assert_eq!(has(&pod(&objects)["volumes"], "tun"), is_udp, "{backend}");
        assert_eq!(main["securityContext"]["privileged"] == true, is_udp, "{backend}");
    }
}

#[test]
fn the_cni_config_arrives_unchanged() {
    let conf = "{\n  \"name\": \"it's: \\\"x\\\" # {{ .Values }}\"\n}\n\n";
    let objects = rendered(&json!({ "flannel": { "cniConf": conf } }));
    assert_eq!(of_kind(&objects, "ConfigMap")["data"]["cni-conf.json"], conf);
}

/// A text without line breaks.
fn line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any text of a value arrives unchanged. (Control characters are excluded, because `quote`
    /// escapes them in a form that JSON does not know, and an image's name is one line.)
    #[test]
    fn any_text_arrives_unchanged(
        text in "[^\\p{C}\\p{Z}\u{10000}-\u{10ffff}]{0,24}",
        quotes in "[\"'\\\\\n\t\r{}:#&*!|>%@` -]{1,12}",
    ) {
        for text in [text, quotes] {
            let objects = render(&json!({
                "podCidr": format!("x{text}"),
                "flannel": {
                    "backend": "wireguard", "psk": text, "tunnelMode": text,
                    "cniBinDir": text, "cniConf": text, "image": { "tag": line(&text) },
                    "nodeSelector": { "key": text }, "args": [text],
                },
            })).unwrap();
            let net_conf: Value = serde_json::from_str(net_conf(&objects)).unwrap();
            prop_assert_eq!(&net_conf["Network"], &json!(format!("x{text}")));
            for field in ["PSK", "Mode"] {
                let expected = if text.is_empty() { Value::Null } else { text.clone().into() };
                prop_assert_eq!(&net_conf["Backend"][field], &expected);
            }
            prop_assert_eq!(&net_conf["Backend"]["Type"], "wireguard");
            prop_assert_eq!(&of_kind(&objects, "ConfigMap")["data"]["cni-conf.json"], &json!(text));
            let main = container(&objects, "kube-flannel");
            prop_assert_eq!(&main["image"], &json!(format!("localhost/flannel:{}", line(&text))));
            prop_assert_eq!(&main["args"], &json!([text, "--healthz-port=8081"]));
            prop_assert_eq!(&pod(&objects)["nodeSelector"]["key"], &json!(text));
        }
    }
}
