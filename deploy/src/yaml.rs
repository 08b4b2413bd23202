//! YAML as JSON values, and back. The one thing to know: what is written is YAML in blocks whose scalars are JSON's, so that no
//! text can be taken for anything else.

use serde_json::Value;

/// A text is no YAML.
#[derive(Debug, thiserror::Error)]
#[error("not YAML: {0}")]
pub struct YamlError(#[from] Box<serde_saphyr::Error>);

/// The documents of a file; empty ones are left out.
///
/// # Errors
/// One of them is no YAML.
pub fn documents(text: &str) -> Result<Vec<Value>, YamlError> {
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(text).map_err(Box::new)?;
    documents.retain(|document| !document.is_null());
    Ok(documents)
}

/// A value as YAML, without a line break at its end.
pub fn to_yaml(value: &Value) -> String {
    let mut lines = Vec::new();
    write(value, "", &mut lines);
    lines.join("\n")
}

fn write(value: &Value, indent: &str, lines: &mut Vec<String>) {
    let mut entry = |head: String, value: &Value| match value {
        Value::Object(fields) if !fields.is_empty() => {
            lines.push(format!("{indent}{head}"));
            write(value, &format!("{indent}  "), lines);
        }
        Value::Array(items) if !items.is_empty() => {
            lines.push(format!("{indent}{head}"));
            write(value, &format!("{indent}  "), lines);
        }
        scalar => lines.push(format!("{indent}{head} {scalar}")),
    };
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            fields
                .iter()
                .for_each(|(name, value)| entry(format!("{}:", Value::from(name.as_str())), value));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|item| entry("-".into(), item))
        }
        scalar => lines.push(format!("{indent}{scalar}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_written_is_read_again() {
        for value in [
            json!({ "a": [{ "b": "on", "c": [] }, [1, [true, null]], "x: y\n\"#"], "no": {}, "1": "2" }),
            json!([{ "effect": "NoSchedule", "operator": "Exists" }]),
            json!({ "requests": { "cpu": "100m", "memory": "50Mi" }, "é": "\u{1}\t" }),
            json!("text"),
            json!(7),
        ] {
            let text = to_yaml(&value);
            assert_eq!(documents(&text).unwrap(), [value], "{text}");
        }
        assert_eq!(to_yaml(&json!({ "a": [{ "b": 1 }] })), "\"a\":\n  -\n    \"b\": 1");
    }

    #[test]
    fn documents_are_told_apart_and_mistakes_are_told() {
        assert_eq!(
            documents("---\n# nothing\n---\na: 1\n---\nb: [x]\n").unwrap(),
            [json!({ "a": 1 }), json!({ "b": ["x"] })]
        );
        assert!(documents("a: [1").unwrap_err().to_string().starts_with("not YAML: "));
        documents("a: 1\na: 2").unwrap_err();
    }
}
