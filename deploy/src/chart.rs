//! A chart on the disk. The one thing to know: every template is rendered, and what it yields is read as YAML, as helm does.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use serde_json::{Value, json};

use crate::schema;
use crate::template::Template;
use crate::yaml::documents;

/// A chart: its default values, and its templates by their file names.
#[derive(Debug, Clone)]
pub struct Chart {
    /// `values.yaml`.
    pub values: Value,
    /// `values.schema.json`: what kinds of values it takes.
    pub schema: Value,
    /// What is in `templates/`.
    pub templates: BTreeMap<String, Template>,
}

impl Chart {
    /// Reads the chart in a directory.
    ///
    /// # Errors
    /// A file cannot be read, is no YAML, or no template of the language that this crate knows; the message names the file.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let wrong = |path: &Path, error: &dyn std::fmt::Display| {
            io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
        };
        let path = dir.join("values.yaml");
        let mut values =
            documents(&fs::read_to_string(&path)?).map_err(|error| wrong(&path, &error))?;
        let values = values
            .pop()
            .filter(|_| values.is_empty())
            .ok_or_else(|| wrong(&path, &"expected one document"))?;
        let path = dir.join("values.schema.json");
        let schema = serde_json::from_str(&fs::read_to_string(&path)?)
            .map_err(|error| wrong(&path, &error))?;
        let mut templates = BTreeMap::new();
        for entry in fs::read_dir(dir.join("templates"))? {
            let path = entry?.path();
            let template = Template::parse(&fs::read_to_string(&path)?)
                .map_err(|error| wrong(&path, &error))?;
            templates.insert(
                path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
                template,
            );
        }
        Ok(Self { values, schema, templates })
    }

    /// The objects that the chart yields for `values` over its defaults, in a namespace.
    ///
    /// # Errors
    /// A value is not of the type that the schema wants; a template cannot be rendered, or yields no YAML; the message names the template and shows what it yields.
    pub fn render(&self, namespace: &str, values: &Value) -> Result<Vec<Value>, String> {
        let mut all = self.values.clone();
        merge(&mut all, values);
        schema::judge(&self.schema, &all, "")?;
        let root = json!({ "Values": all, "Release": { "Namespace": namespace } });
        let mut objects = Vec::new();
        for (name, template) in &self.templates {
            let text = template.render(&root).map_err(|error| format!("{name}: {error}"))?;
            objects.extend(documents(&text).map_err(|error| format!("{name}: {error}\n{text}"))?);
        }
        Ok(objects)
    }
}

/// Puts values over others, as helm does: maps are merged, everything else is replaced, and `null` removes.
pub fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                if value.is_null() {
                    base.remove(key);
                } else {
                    merge(base.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_put_over_others_as_helm_does() {
        let mut base = json!({ "a": { "b": 1, "c": [1, 2] }, "d": "x", "e": { "f": 1 } });
        merge(&mut base, &json!({ "a": { "c": [3], "new": {} }, "d": null, "e": 7 }));
        assert_eq!(base, json!({ "a": { "b": 1, "c": [3], "new": {} }, "e": 7 }));
    }

    #[test]
    fn what_a_template_yields_must_be_yaml() {
        let template = Template::parse("a: {{ .Values.a }}").unwrap();
        let (values, schema) = (json!({ "a": 1 }), json!({}));
        let chart = Chart { values, schema, templates: [("a.yaml".to_owned(), template)].into() };
        assert_eq!(chart.render("x", &json!({})).unwrap(), [json!({ "a": 1 })]);
        let error = chart.render("x", &json!({ "a": "[1" })).unwrap_err();
        assert!(error.starts_with("a.yaml: not YAML: ") && error.ends_with("\na: [1"), "{error}");
    }
}
