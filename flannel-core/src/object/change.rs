//! Steps from one state of the kernel to another.

use std::fmt;

use super::Object;

/// One step towards the desired state. Both are idempotent: an object that is there already stays,
/// one that is absent stays absent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Create the object or change it in place.
    Put(Object),
    /// Delete the object.
    Delete(Object),
}

impl Change {
    /// The object concerned.
    pub fn object(&self) -> &Object {
        match self {
            Self::Put(object) | Self::Delete(object) => object,
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put(object) => write!(f, "put {object}"),
            Self::Delete(object) => write!(f, "delete {object}"),
        }
    }
}
