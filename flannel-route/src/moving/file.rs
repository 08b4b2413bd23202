//! The backends as text, so that a restarted node runs all backends that it has offered.

use flannel_core::config::BackendConfig;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{BackendUse, NodeBackends};

/// The text does not have the form of [`NodeBackends::to_json`]. The error does not show the text,
/// which may have secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {expected}")]
pub struct Damaged {
    line: usize,
    column: usize,
    expected: &'static str,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    backends: Vec<WireBackend>,
}

#[derive(Serialize, Deserialize)]
struct WireBackend {
    lease_type: String,
    offered: bool,
    backend: Box<RawValue>,
}

impl NodeBackends {
    /// The backends as JSON text. It has the options of all backends, secrets included.
    pub fn to_json(&self) -> String {
        let backends = self.iter().map(|usage| WireBackend {
            lease_type: usage.lease_type.clone(),
            offered: usage.offered,
            backend: with_type(&usage.backend),
        });
        let wire = Wire { backends: backends.collect() };
        serde_json::to_string(&wire).expect("texts and JSON values serialize")
    }

    /// Reads the text of [`Self::to_json`].
    ///
    /// # Errors
    /// The text has another form.
    pub fn parse(text: &str) -> Result<Self, Damaged> {
        let wire: Wire = serde_json::from_str(text).map_err(|error| Damaged {
            line: error.line(),
            column: error.column(),
            expected: "expected {\"backends\": [...]}, each with lease_type, offered and backend",
        })?;
        let mut all = Self::default();
        for WireBackend { lease_type, offered, backend } in wire.backends {
            let backend = BackendConfig::parse(backend.get()).map_err(|_| Damaged {
                line: 1,
                column: 1,
                expected: "expected a Type in each backend, such as {\"Type\": \"vxlan\"}",
            })?;
            all.0.push(BackendUse { lease_type, backend, offered });
        }
        all.sort();
        Ok(all)
    }
}

/// The options of a backend. If the network config has no `Backend`, they are only its type.
fn with_type(backend: &BackendConfig) -> Box<RawValue> {
    let text = if backend.explicit {
        backend.options.clone()
    } else {
        serde_json::json!({ "Type": backend.kind }).to_string()
    };
    RawValue::from_string(text).expect("a config has valid JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_read_as_they_were_written() {
        let mut all = NodeBackends::default();
        let unnamed = BackendConfig { kind: "vxlan".into(), options: "{}".into(), explicit: false };
        all.aim_at("vxlan", &unnamed);
        let text = r#"{"Type":"Host-GW","Secret":"x\n"}"#;
        all.aim_at("host-gw", &BackendConfig::parse(text).unwrap());
        let read = NodeBackends::parse(&all.to_json()).unwrap();
        let kinds: Vec<_> = read.iter().map(|it| (&*it.backend.kind, it.offered)).collect();
        assert_eq!(kinds, [("vxlan", true), ("host-gw", false)]);
        assert_eq!(read.iter().nth(1), all.iter().nth(1));
        assert_eq!(read.to_json(), all.to_json());
    }

    #[test]
    fn an_error_shows_the_place_and_nothing_of_the_text() {
        for (text, expected) in [
            ("", "line 1, column 0: expected {\"backends\""),
            (r#"{"backends": "psk-4711"}"#, "line 1, column 23: expected {\"backends\""),
            (
                r#"{"backends":[{"lease_type":"x","offered":true,"backend":{"PSK":"psk-4711"}}]}"#,
                "a Type in each",
            ),
        ] {
            let error = NodeBackends::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("4711"), "{error}");
        }
    }
}
