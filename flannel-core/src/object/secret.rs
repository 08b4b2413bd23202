//! Secret bytes.

use std::fmt;

use serde::{Serialize, Serializer};

/// A key or password, such as the private key of a tunnel device.
///
/// `Debug`, `Display` and JSON show a placeholder instead of the bytes, also if the secret is a
/// part of another value.
#[doc = include_str!("../../docs/secret.md")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Secret(Box<[u8]>);

/// The output in place of any secret.
const PLACEHOLDER: &str = "(secret)";

impl Secret {
    /// A secret of these bytes.
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Self {
        Self(bytes.into())
    }

    /// The bytes. Do not format them.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PLACEHOLDER)
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PLACEHOLDER)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(PLACEHOLDER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize)]
    struct Device {
        key: Secret,
    }

    #[test]
    fn no_output_shows_the_bytes_or_their_number() {
        for bytes in [&b""[..], b"hunter2", &[0xff; 32]] {
            let device = Device { key: Secret::new(bytes) };
            let json = serde_json::to_string(&device).unwrap();
            assert_eq!(format!("{device:?}"), "Device { key: (secret) }");
            assert_eq!(format!("{:#?}", device.key), "(secret)");
            assert_eq!(format!("{:>5}", device.key), "(secret)");
            assert_eq!(json, r#"{"key":"(secret)"}"#);
            assert_eq!(device.key.expose(), bytes);
        }
    }

    #[test]
    fn secrets_are_compared_by_their_bytes() {
        let secret = |bytes: &[u8]| Secret::new(bytes);
        assert_eq!(secret(b"one"), secret(b"one").clone());
        assert_ne!(secret(b"one"), secret(b"two"));
        assert_ne!(secret(b"one"), secret(b"one1"));
    }
}
