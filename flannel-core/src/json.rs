//! JSON objects, read and written as Go does.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::text::{MAX_VALUE_CHARS, shorten};

/// A field of a JSON object is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("field {field}: {value} is not valid, expected {expected}")]
pub struct FieldError {
    /// The field with its path, such as `Backend.VNI`. It is `(document)` if the text is not a JSON
    /// object.
    pub field: String,
    /// The first 120 characters of the value as JSON text, or `nothing`.
    pub value: String,
    /// A description of a valid value.
    pub expected: String,
}

impl FieldError {
    fn new(field: String, value: &dyn fmt::Display, expected: String) -> Self {
        let value = shorten(&value.to_string(), MAX_VALUE_CHARS).into_owned();
        Self { field, value, expected }
    }
}

/// The fields of a JSON object. Names match in any case. If an object has several fields with one
/// name, the last one counts. Existing clusters rely on these rules.
///
/// **Source**: Go `encoding/json: Unmarshal`.
///
/// ```
/// let text = r#"{"network": "10.1.0.0/16", "Other": 1}"#;
/// let fields = flannel_core::json::Fields::parse(text, "").unwrap();
/// assert_eq!(fields.take::<String>("Network", "a subnet").unwrap().unwrap(), "10.1.0.0/16");
/// ```
#[derive(Clone, Default)]
pub struct Fields {
    path: String,
    by_name: BTreeMap<String, Box<RawValue>>,
}

/// Leaves out the values, which may contain a secret.
impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.by_name.keys().collect();
        f.debug_struct("Fields").field("path", &self.path).field("names", &names).finish()
    }
}

/// Whether a text that cannot be parsed may contain a preshared key.
fn may_hold_secret(text: &str) -> bool {
    text.to_ascii_lowercase().contains("psk")
}

impl Fields {
    /// Reads the object in `text`. `path`, such as `Backend`, precedes the field names in errors.
    ///
    /// # Errors
    /// `text` is not exactly one JSON object.
    pub fn parse(text: &str, path: &str) -> Result<Self, FieldError> {
        let Members(members) = serde_json::from_str(text).map_err(|error| {
            let field = if path.is_empty() { "(document)" } else { path };
            if may_hold_secret(text) {
                let place = format!("line {} column {}", error.line(), error.column());
                let expected = format!("one JSON object (wrong at {place})");
                return FieldError::new(field.into(), &"(not shown)", expected);
            }
            FieldError::new(field.into(), &text.trim(), format!("one JSON object ({error})"))
        })?;
        // Of several members with the same name, the map keeps the last one.
        let lower = members.into_iter().map(|(name, value)| (name.to_ascii_lowercase(), value));
        Ok(Self { path: path.to_owned(), by_name: lower.collect() })
    }

    /// The value of the field as JSON text, or `None` if the field is absent or `null`.
    pub fn raw(&self, name: &str) -> Option<&RawValue> {
        let raw = self.by_name.get(&name.to_ascii_lowercase())?;
        (raw.get() != "null").then_some(raw)
    }

    /// Whether the object has such a field, even if it is `null`.
    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(&name.to_ascii_lowercase())
    }

    /// The value of the field, or `None` if the field is absent or `null`. `expected` describes a
    /// valid value, for the error.
    ///
    /// # Errors
    /// The value is not a `T`.
    pub fn take<T: DeserializeOwned>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, FieldError> {
        let Some(raw) = self.raw(name) else { return Ok(None) };
        let value = serde_json::from_str(raw.get());
        value.map(Some).map_err(|_| self.error(name, &raw.get(), expected))
    }

    /// The value of the field, parsed from a JSON string, or `None` if the field is absent or
    /// `null`. `expected` describes a valid value, for the error.
    ///
    /// # Errors
    /// The value is not a string, or its text cannot be parsed as a `T`.
    pub fn parsed<T: std::str::FromStr>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, FieldError> {
        let Some(text) = self.take::<String>(name, expected)? else { return Ok(None) };
        text.parse().map(Some).map_err(|_| self.error(name, &format!("{text:?}"), expected))
    }

    /// An error about one of these fields: its name, its value, and the expected value.
    pub fn error(
        &self,
        name: &str,
        value: &dyn fmt::Display,
        expected: impl Into<String>,
    ) -> FieldError {
        let dot = if self.path.is_empty() { "" } else { "." };
        FieldError::new(format!("{}{dot}{name}", self.path), value, expected.into())
    }
}

/// The members of a JSON object in their order, with duplicates.
#[derive(Default)]
pub struct Members(pub Vec<(String, Box<RawValue>)>);

impl Serialize for Members {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Members;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Read)
    }
}

/// Writes valid JSON as Go does: no white space, and `<`, `>`, `&`, U+2028 and U+2029 escaped.
///
/// **Source**: Go `encoding/json: compact` with `escape` set.
pub fn compact(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_string = false;
    let mut escaped = false;
    for c in text.chars() {
        if !in_string && matches!(c, ' ' | '\t' | '\r' | '\n') {
            continue;
        }
        if c == '"' && !escaped {
            in_string = !in_string;
        }
        escaped = in_string && c == '\\' && !escaped;
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_with_a_preshared_key_is_not_shown() {
        for text in [
            r#"{"Backend":{"PSK":"hunter2"},}"#,
            r#"[{"psk":"hunter2"}]"#,
            r#"{"PSK":"hunter2" "A":1}"#,
        ] {
            let error = Fields::parse(text, "").unwrap_err().to_string();
            assert!(error.contains("(not shown)") && error.contains("line 1"), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
        }
        let fields = Fields::parse(r#"{"PSK":"hunter2"}"#, "").unwrap();
        assert!(!format!("{fields:?}").contains("hunter2"));
    }

    #[test]
    fn reads_objects_as_go_does() {
        let fields = Fields::parse(r#" {"A":1,"a":2,"B":null,"x":[]} "#, "").unwrap();
        assert_eq!(fields.take::<u8>("A", "").unwrap(), Some(2));
        assert_eq!(fields.take::<u8>("b", "").unwrap(), None);
        assert!(fields.has("B") && !fields.has("C"));
        for bad in ["", "[]", "{} x", "{", "null", "\"{}\""] {
            assert_eq!(Fields::parse(bad, "").unwrap_err().field, "(document)", "{bad}");
        }
    }

    #[test]
    fn errors_name_the_field_the_value_and_the_right_value() {
        let fields = Fields::parse(r#"{"VNI":"one"}"#, "Backend").unwrap();
        let error = fields.take::<u32>("VNI", "a number from 1 to 16777215").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"field Backend.VNI: "one" is not valid, expected a number from 1 to 16777215"#
        );
    }

    #[test]
    fn compacts_as_go_does() {
        assert_eq!(compact("{ \"a\" : [ 1,\n2 ] }"), r#"{"a":[1,2]}"#);
        assert_eq!(compact(r#""a \" b <&> c""#), r#""a \" b \u003c\u0026\u003e c""#);
        assert_eq!(compact(r#"["\\", " x "]"#), r#"["\\"," x "]"#);
    }
}
