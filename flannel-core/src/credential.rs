//! Credentials for a store.

use std::fmt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::object::Secret;

/// A certificate, a key or a token for a store: a file, or the value itself.
///
/// `Debug` and `Display` do not show a value.
///
/// ```
/// use flannel_core::Credential;
///
/// assert_eq!(format!("{:?}", Credential::value(*b"token")), "Value((secret))");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// The file that has it. It is read again when it changes.
    File(PathBuf),
    /// The value. A store that has to use another one must be opened again.
    Value(Secret),
}

impl Credential {
    /// A credential with these bytes.
    pub fn value(bytes: impl Into<Box<[u8]>>) -> Self {
        Self::Value(Secret::new(bytes))
    }

    /// The file, or `None` for a value.
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
