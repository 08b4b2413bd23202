//! Compares `docs/` and `deploy/` with the program: config fields, metrics and alerts.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

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

#[test]
fn every_field_of_the_network_config_is_documented() {
    let text = read("docs/configuration.md");
    let mut fields = flannel_core::Config::fields();
    for backend in flannel_backends::all().iter() {
        assert!(text.contains(&format!("**`{}`**", backend.kind())), "{}", backend.kind());
        fields.extend(backend.option_names().unwrap_or_default());
    }
    for field in fields {
        assert!(
            text.contains(&format!("`{field}`")),
            "docs/configuration.md does not name {field}"
        );
    }
}

/// The names of all metrics. A test of the metrics themselves holds the list.
fn exported() -> BTreeSet<String> {
    let names = include_str!("../../src/metrics/names.golden").lines();
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
fn the_tests_in_the_table_of_created_files_exist() {
    let text = read(".github/SECURITY.md");
    let mut source = String::new();
    let mut tests = 0;
    for row in text.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        for word in cell.split('`').skip(1).step_by(2) {
            if word.ends_with(".rs") {
                source = read(word);
            } else {
                assert!(source.contains(&format!("fn {word}(")), "{row}");
                tests += 1;
            }
        }
    }
    assert!(tests > 10, "{tests}");
}

#[test]
fn every_metric_and_every_alert_is_documented() {
    let text = read("docs/operations.md");
    let documented = words(&text, "flannel_");
    let exported = exported();
    assert_eq!(
        exported.difference(&documented).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not in docs/operations.md"
    );
    assert_eq!(
        documented.difference(&exported).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "not exported"
    );
    let alerts = words(&read("deploy/prometheus/rules.yaml"), "Flannel");
    assert_eq!(words(&text, "Flannel"), alerts);
}
