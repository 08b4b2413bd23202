//! Compares `docs/` and `deploy/` with the program: options, fields, metrics and alerts.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use clap::CommandFactory;
use flanneld::Options;
use serde_json::Value;

/// A file of the repository.
fn read(path: &str) -> String {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words in a text with this prefix.
fn words(text: &str, prefix: &str) -> BTreeSet<String> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_word(c)).filter(|word| word.starts_with(prefix)).map(str::to_owned).collect()
}

/// The row of a table that begins with this flag.
fn row<'a>(text: &'a str, flag: &str) -> Option<&'a str> {
    let named = format!("`--{flag}`");
    text.lines().find(|line| {
        line.starts_with("| `--") && line.split('|').nth(1).unwrap_or("").contains(&named)
    })
}

#[test]
fn every_option_of_the_daemon_has_its_row_with_its_default() {
    let text = read("docs/configuration.md");
    for arg in Options::command().get_arguments() {
        let Some(flag) = arg.get_long().filter(|flag| !["help", "version"].contains(flag)) else {
            continue;
        };
        let row = row(&text, flag)
            .unwrap_or_else(|| panic!("docs/configuration.md has no row for --{flag}"));
        for default in arg.get_default_values().iter().filter_map(|value| value.to_str()) {
            assert!(
                default.is_empty() || row.contains(&format!("`{default}`")),
                "--{flag}: {default}: {row}"
            );
        }
    }
    for line in text.lines().filter(|line| line.starts_with("| `--")) {
        for word in line
            .split('|')
            .nth(1)
            .unwrap_or("")
            .split('`')
            .filter_map(|word| word.strip_prefix("--"))
        {
            if cfg!(not(feature = "etcd")) && word.starts_with("etcd-") {
                continue;
            }
            let command = Options::command();
            assert!(
                command.get_arguments().any(|arg| arg.get_long() == Some(word)),
                "there is no --{word}: {line}"
            );
        }
    }
}

#[test]
fn every_field_of_the_network_config_is_documented() {
    let text = read("docs/configuration.md");
    // The names in the calls that read the config.
    let sources =
        ["flannel-core/src/config.rs", "flannel-backend-vxlan/src/options.rs"].map(read).concat();
    let code = sources.split("#[cfg(test)]").next().unwrap().to_owned() + &sources;
    let mut fields = BTreeSet::new();
    let named = |call: &str| -> Vec<String> {
        let names = code.split(call).skip(1).filter_map(|rest| rest.split('"').next());
        names.map(str::to_owned).collect()
    };
    for call in ["flag(\"", "number(\"", "take(\"", "parsed(\""] {
        fields.extend(named(call));
    }
    // The fields that exist for each family.
    for call in ["name(\"", "bound(\""] {
        for field in named(call) {
            fields.insert(format!("IPv6{field}"));
            fields.insert(field);
        }
    }
    fields.retain(|field| field.chars().all(|c| c.is_ascii_alphanumeric()));
    for field in ["EnableNFTables", "VNI", "Network", "SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax"]
    {
        assert!(fields.contains(field), "{field}: {fields:?}");
    }
    for field in fields {
        assert!(
            text.contains(&format!("`{field}`")),
            "docs/configuration.md does not name {field}"
        );
    }
    for backend in flannel_backends::all().iter() {
        assert!(text.contains(&format!("**`{}`**", backend.kind())), "{}", backend.kind());
    }
}

/// The names of all metrics. A test of the metrics themselves holds the list.
fn exported() -> BTreeSet<String> {
    let names = include_str!("../src/metrics/names.golden").lines();
    names.filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
}

#[test]
fn dashboard_and_alerts_use_existing_metrics() {
    let exported = exported();
    let is_there = |name: &str| {
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        exported.contains(name) || family.is_some_and(|family| exported.contains(family))
    };
    let rules = read("deploy/prometheus/rules.yaml");
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana/flannel.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut asked = words(&rules, "flannel_");
    for panel in panels {
        let queries: Vec<&str> = panel["targets"]
            .as_array()
            .unwrap()
            .iter()
            .map(|target| target["expr"].as_str().unwrap())
            .collect();
        let names = words(&queries.join(" "), "flannel_");
        assert!(!names.is_empty(), "{}", panel["title"]);
        asked.extend(names);
    }
    assert!(asked.len() > 15, "{asked:?}");
    for name in asked {
        assert!(is_there(&name), "{name} is not exported");
    }
}

#[test]
fn every_metric_and_every_alert_is_documented() {
    let text = read("docs/operations.md");
    let told = words(&text, "flannel_");
    let exported = exported();
    assert_eq!(
        exported.difference(&told).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not in docs/operations.md"
    );
    assert_eq!(
        told.difference(&exported).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not exported"
    );
    let alerts = words(&read("deploy/prometheus/rules.yaml"), "Flannel");
    assert_eq!(words(&text, "Flannel"), alerts);
}

/// Links to files of the repository are valid.
#[test]
fn links_between_documents_are_valid() {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut documents = Vec::new();
    for directory in ["", "docs", "docs/decisions"] {
        let directory = root.join(directory);
        let files = fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path());
        documents.extend(files.filter(|path| path.extension().is_some_and(|end| end == "md")));
    }
    assert!(documents.len() > 30, "{documents:?}");
    for document in documents {
        let (text, directory) =
            (fs::read_to_string(&document).unwrap(), document.parent().unwrap());
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap();
            if !target.contains("://") && !target.is_empty() {
                assert!(directory.join(target).exists(), "{}: {target}", document.display());
            }
        }
    }
}
