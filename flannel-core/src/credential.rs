//! Credentials for a store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::object::Secret;

/// A certificate, a key or a token for a store. It is in a file, or given as a value.
///
/// `Debug` and `Display` do not show the value.
///
/// ```
/// use flannel_core::Credential;
///
/// assert_eq!(format!("{:?}", Credential::value(*b"token")), "Value((secret))");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// The path of a file that contains the credential. The file is read again when it changes.
    File(PathBuf),
    /// The credential itself. To use another value, open the store again.
    Value(Secret),
}

impl Credential {
    /// A credential with these bytes.
    pub fn value(bytes: impl Into<Box<[u8]>>) -> Self {
        Self::Value(Secret::new(bytes))
    }

    /// The path of the file, or `None` if the credential is given as a value.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            Self::Value(_) => None,
        }
    }

    /// The value, or the present content of the file.
    ///
    /// # Errors
    /// The file cannot be read.
    ///
    /// # Blocking
    /// Reads a file.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        match self {
            Self::File(path) => fs::read(path),
            Self::Value(value) => Ok(value.expose().to_vec()),
        }
    }
}

impl From<PathBuf> for Credential {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

/// The path, or a placeholder for a value.
impl fmt::Display for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Value(_) => f.write_str("(a given value)"),
        }
    }
}
