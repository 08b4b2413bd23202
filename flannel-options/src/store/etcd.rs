//! The options of etcd.
//!
//! **Source**: flannel `main.go`, for names and defaults.

use std::fmt;
use std::path::PathBuf;

use flannel_core::Credential;
use flannel_subnet_etcd::{EtcdOptions, EtcdOptionsError};

/// The connection to etcd. `Debug` does not show the password.
#[derive(Clone, clap::Args)]
#[non_exhaustive]
pub struct EtcdFlags {
    /// etcd's URLs, separated by commas
    #[arg(
        long = "etcd-endpoints",
        value_name = "URLS",
        value_delimiter = ',',
        action = clap::ArgAction::Set,
        default_value = "http://127.0.0.1:4001,http://127.0.0.1:2379"
    )]
    pub endpoints: Vec<String>,

    /// The prefix of flannel's keys in etcd
    #[arg(long = "etcd-prefix", value_name = "KEY", default_value = "/coreos.com/network")]
    pub prefix: String,

    /// The CA certificates for etcd; by default those of this system
    #[arg(long = "etcd-cafile", value_name = "FILE")]
    pub cafile: Option<PathBuf>,

    /// This host's certificate for etcd; read again when it changes
    #[arg(long = "etcd-certfile", value_name = "FILE")]
    pub certfile: Option<PathBuf>,

    /// The key of that certificate
    #[arg(long = "etcd-keyfile", value_name = "FILE")]
    pub keyfile: Option<PathBuf>,

    /// A user of etcd
    #[arg(long = "etcd-username", value_name = "NAME")]
    pub username: Option<String>,

    /// The user's password; better given as FLANNELD_ETCD_PASSWORD, which other users cannot see
    #[arg(long = "etcd-password", value_name = "PASSWORD")]
    pub password: Option<String>,
}

impl EtcdFlags {
    /// Checks the values, without a connection.
    ///
    /// # Errors
    /// A value is wrong. The text names the flag and the right form.
    pub fn check(&self) -> Result<(), String> {
        self.options().check().map_err(|error| match error {
            EtcdOptionsError::MissingPartner { .. } => format!("--etcd-{error}"),
            _ => format!("--etcd-endpoints: {error}"),
        })
    }

    /// The options of the registry. An empty value counts as not given.
    pub fn options(&self) -> EtcdOptions {
        let file = |path: &Option<PathBuf>| {
            path.clone().filter(|path| !path.as_os_str().is_empty()).map(Credential::File)
        };
        let text = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        EtcdOptions {
            endpoints: self.endpoints.iter().map(|endpoint| endpoint.trim().to_owned()).collect(),
            prefix: self.prefix.clone(),
            ca: file(&self.cafile),
            certificate: file(&self.certfile),
            key: file(&self.keyfile),
            username: text(&self.username),
            password: text(&self.password),
            ..EtcdOptions::default()
        }
    }
}

impl fmt::Debug for EtcdFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.options().fmt(f)
    }
}
