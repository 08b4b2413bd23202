//! The store of leases on the command line.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use flannel_subnet::{DirLocation, DirRegistry, Registry};
#[cfg(feature = "etcd")]
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

use crate::Error;

/// A store of leases, as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RegistryUrl {
    /// `dir:PATH`, `dir:PATH?assign=static`: a directory.
    Dir(DirLocation),
    /// `etcd`: etcd at the endpoints of its options. Parsed only with the feature `etcd`.
    Etcd,
}

impl FromStr for RegistryUrl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        #[cfg(feature = "etcd")]
        if text == "etcd" {
            return Ok(Self::Etcd);
        }
        if !text.starts_with("dir:") {
            return Err(format!(
                "{text:?} is not a registry; expected {}dir:PATH, such as dir:/etc/flannel/network",
                if cfg!(feature = "etcd") { "etcd or " } else { "" }
            ));
        }
        text.parse()
            .map(Self::Dir)
            .map_err(|error: flannel_subnet::LocationError| error.to_string())
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(location) => location.fmt(f),
            Self::Etcd => f.write_str("etcd"),
        }
    }
}

/// Opens the registry in a directory. A missing directory is created, unless it `existed` before.
///
/// # Errors
/// It cannot be created or read.
pub async fn open_directory(
    location: &DirLocation,
    existed: bool,
) -> Result<Arc<dyn Registry>, Error> {
    let path = location.path.clone();
    let options = location.options;
    let opened = if existed {
        DirRegistry::reopen(path, options).await
    } else {
        DirRegistry::open(path, options).await
    };
    match opened {
        Ok(registry) => Ok(Arc::new(registry)),
        Err(source) => Err(Error::Registry { url: location.to_string(), source: source.into() }),
    }
}

/// Opens the registry in etcd. Connects later.
///
/// # Errors
/// The options are wrong.
#[cfg(feature = "etcd")]
pub fn open_etcd(options: EtcdOptions) -> Result<Arc<dyn Registry>, Error> {
    match EtcdRegistry::new(options) {
        Ok(registry) => Ok(Arc::new(registry)),
        Err(source) => Err(Error::Registry { url: "etcd".to_owned(), source: source.into() }),
    }
}
