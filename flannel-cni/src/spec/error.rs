//! Errors as the CNI specification defines them. A runtime acts on the code. The message appears in
//! the events of a pod, often without any context.

use serde_json::{Map, Value};

use crate::spec::version::SpecVersion;

/// An error code. Codes below 100 are defined by the specification, others by a plugin.
///
/// **Source**: CNI specification 1.1.0, section 5, "Error".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u64);

impl Code {
    /// The plugin does not support the config's version, or that version lacks the operation.
    pub const INCOMPATIBLE_VERSION: Self = Self(1);
    /// The container is unknown, so there is nothing to clean up.
    pub const UNKNOWN_CONTAINER: Self = Self(3);
    /// A `CNI_` variable is missing or wrong.
    pub const ENVIRONMENT: Self = Self(4);
    /// A file could not be read or written.
    pub const IO: Self = Self(5);
    /// A text could not be decoded.
    pub const DECODING: Self = Self(6);
    /// The network config is wrong.
    pub const NETWORK_CONFIG: Self = Self(7);
    /// `CNI_NETNS` is the plugin's own network namespace.
    pub const NETNS: Self = Self(8);
    /// A transient condition. The runtime should call again later.
    pub const TRY_AGAIN_LATER: Self = Self(11);
    /// An answer to STATUS: pods cannot be added now.
    pub const NOT_AVAILABLE: Self = Self(50);
    /// Anything else.
    pub const INTERNAL: Self = Self(999);
}

/// An error of the plugin.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{msg}{separator}{details}", separator = if details.is_empty() { "" } else { "; " })]
#[non_exhaustive]
pub struct Error {
    /// The code.
    pub code: Code,
    /// The error, with the object and the expected value.
    pub msg: String,
    /// More about the error, or nothing.
    pub details: String,
    /// The version of the error object. It is the version of the config, or the latest version if
    /// the config could not be parsed.
    pub version: SpecVersion,
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error without details.
    pub fn new(code: Code, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new(), version: SpecVersion::LATEST }
    }

    /// Appends details.
    #[must_use]
    pub fn with_details(mut self, details: &str) -> Self {
        if !self.details.is_empty() {
            self.details += "; ";
        }
        self.details += details;
        self
    }

    /// Sets the version of the error object.
    #[must_use]
    pub fn with_version(self, version: SpecVersion) -> Self {
        Self { version, ..self }
    }

    /// The error object of the specification, with the required `cniVersion`.
    ///
    /// **Source**: cni `pkg/types: Error.Print` for the form; it writes no `cniVersion`.
    pub fn to_json(&self) -> String {
        let text = |text: &str| Value::from(text).to_string();
        let mut out = format!(
            "{{\n    \"cniVersion\": {},\n    \"code\": {},\n    \"msg\": {}",
            text(self.version.as_str()),
            self.code.0,
            text(&self.msg)
        );
        if !self.details.is_empty() {
            out += &format!(",\n    \"details\": {}", text(&self.details));
        }
        out + "\n}\n"
    }

    /// Parses a delegate's error object. Returns `None` if the text is not an error object.
    pub(crate) fn from_json(bytes: &[u8]) -> Option<Self> {
        let object: Map<String, Value> = serde_json::from_slice(bytes).ok()?;
        let code = object.get("code").and_then(Value::as_u64)?;
        let text = |name: &str| object.get(name).and_then(Value::as_str).unwrap_or_default();
        Some(Self::new(Code(code), text("msg")).with_details(text("details")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_object_has_the_form_of_the_specification() {
        let error =
            Error::new(Code::NETWORK_CONFIG, "a \"b\"\n").with_version("0.4.0".parse().unwrap());
        assert_eq!(
            error.to_json(),
            "{\n    \"cniVersion\": \"0.4.0\",\n    \"code\": 7,\n    \"msg\": \"a \\\"b\\\"\\n\"\n\
             }\n"
        );
        let error = error.with_details("c").with_details("d");
        assert!(error.to_json().ends_with(",\n    \"details\": \"c; d\"\n}\n"));
        assert_eq!(
            Error::from_json(error.to_json().as_bytes()).unwrap().to_string(),
            "a \"b\"\n; c; d"
        );
    }

    #[test]
    fn a_text_without_a_numeric_code_is_not_an_error_object() {
        for other in
            ["", "null", "[]", "{}", r#"{"msg":"x"}"#, r#"{"code":"7","msg":"x"}"#, "panic: x"]
        {
            assert_eq!(Error::from_json(other.as_bytes()), None, "{other}");
        }
    }
}
