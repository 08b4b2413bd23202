//! What kinds of values a chart takes, before its templates see them. The one thing to know: like templates, a schema that says more than this
//! knows is an error.
//!
//! **Source**: JSON Schema, draft 7, as helm applies it to `values.schema.json`.

use serde_json::Value;

/// Judges `value`, which is called `path`, by a schema.
///
/// # Errors
/// It is of another type, or the schema is none that is understood; the message names the value.
pub(crate) fn judge(schema: &Value, value: &Value, path: &str) -> Result<(), String> {
    let at = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    for (keyword, rule) in
        schema.as_object().ok_or_else(|| format!("the schema of {path:?} is no object"))?
    {
        match keyword.as_str() {
            "$schema" | "description" => {}
            "type" => {
                let types: Vec<&str> = match rule {
                    Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
                    one => one.as_str().into_iter().collect(),
                };
                if !types.iter().any(|known| is(known, value)) {
                    return Err(format!("{path}: {value} is not of type {}", types.join(" or ")));
                }
            }
            "properties" => {
                for (name, schema) in rule.as_object().into_iter().flatten() {
                    let value = value.get(name);
                    value.map_or(Ok(()), |value| judge(schema, value, &at(name)))?;
                }
            }
            other => {
                return Err(format!(
                    "the schema of {path:?}: {other:?} is outside of what is known here"
                ));
            }
        }
    }
    Ok(())
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        // All numbers of a file are floats to helm.
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_of_another_type_is_named() {
        let schema = json!({ "type": "object", "properties": { "a": { "properties": {
            "on": { "type": "boolean", "description": "x" }, "port": { "type": ["integer", "string"] } } } } });
        let judged = |values: Value| judge(&schema, &values, "");
        for right in [
            json!({}),
            json!({ "a": { "on": false, "port": 0 }, "b": "anything" }),
            json!({ "a": { "on": true, "port": "0" } }),
            json!({ "a": { "port": 7.0 } }),
        ] {
            assert_eq!(judged(right), Ok(()));
        }
        for (wrong, says) in [
            (json!([]), ": [] is not of type object"),
            (json!({ "a": { "on": "false" } }), "a.on: \"false\" is not of type boolean"),
            (json!({ "a": { "on": 0 } }), "a.on: 0 is not of type boolean"),
            (json!({ "a": { "port": 1.5 } }), "a.port: 1.5 is not of type integer or string"),
        ] {
            assert_eq!(judged(wrong), Err(says.to_owned()));
        }
        let error = judge(&json!({ "minimum": 1 }), &json!(1), "a").unwrap_err();
        assert!(error.contains("\"minimum\" is outside"), "{error}");
    }
}
