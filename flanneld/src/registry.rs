//! Which store leases are kept in, as the command line names it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{Assign, AssignedManager, DirLocation, DirRegistry, Identity, LocalManager, Mark};

use crate::error::Error;

/// A store of leases, as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegistryUrl {
    /// `dir:PATH`, `dir:PATH?assign=static`: a directory.
    Dir(DirLocation),
}

impl FromStr for RegistryUrl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if !text.starts_with("dir:") {
            return Err(format!(
                "{text:?} names no kind of registry; this build has dir:PATH, for example dir:/etc/flannel/network"
            ));
        }
        text.parse().map(Self::Dir).map_err(|error: flannel_subnet::LocationError| error.to_string())
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(location) => location.fmt(f),
        }
    }
}

/// How this node is told from others.
pub(crate) struct Node {
    pub(crate) mark: Mark,
    pub(crate) previous: Option<Subnets>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) renew_margin: Duration,
}

impl RegistryUrl {
    /// Opens the store.
    pub(crate) async fn open(&self, node: Node) -> Result<Arc<dyn SubnetManager>, Error> {
        let Self::Dir(location) = self;
        let opened = DirRegistry::open(location.path.clone(), location.options).await;
        let registry = Arc::new(
            opened.map_err(|source| Error::Registry { url: self.to_string(), source: source.into() })?,
        );
        Ok(match location.options.assign {
            Assign::Static => Arc::new(AssignedManager::new(registry, node.addresses)),
            _ => {
                let identity =
                    Identity { mark: node.mark, previous: node.previous, local_addresses: node.addresses };
                Arc::new(LocalManager::new(registry, identity).with_renew_margin(node.renew_margin))
            }
        })
    }
}
