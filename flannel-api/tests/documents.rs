//! docs/api.md names every field of the API.

use std::collections::BTreeSet;

use serde_json::Value;

/// The names of all fields in a value.
fn fields(value: &Value, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                // The names of families are not fields.
                if !name.starts_with("IP") {
                    into.insert(name.clone());
                }
                fields(value, into);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| fields(item, into)),
        _ => {}
    }
}

#[test]
fn every_field_of_the_control_api_is_documented() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut all = BTreeSet::new();
    fields(&serde_json::json!(flannel_api::testing::status_report()), &mut all);
    fields(&serde_json::json!(flannel_api::testing::why_report()), &mut all);
    assert!(all.len() > 60, "{all:?}");
    let missing: Vec<_> =
        all.iter().filter(|field| !text.contains(&format!("`{field}`"))).collect();
    assert_eq!(missing, Vec::<&String>::new(), "not in docs/api.md");
}
