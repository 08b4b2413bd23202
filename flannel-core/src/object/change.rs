//! Changes of kernel objects.

use std::fmt;

use super::Object;

/// A change of one object. [`Kernel::apply`](crate::Kernel::apply) has the details.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Creates the object, or changes it in place.
    Put(Object),
    /// Deletes the object.
    Delete(Object),
}

impl Change {
    /// The object that is put or deleted.
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
