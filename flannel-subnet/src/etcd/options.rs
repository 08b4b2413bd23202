//! Where etcd is and how to speak to it.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How to reach etcd. `Debug` does not show the password.
///
/// ```
/// use flannel_subnet::{EtcdOptions, EtcdRegistry};
///
/// let options = EtcdOptions { endpoints: vec!["http://192.0.2.1:2379".into()], ..EtcdOptions::default() };
/// let registry = EtcdRegistry::new(options)?;
/// assert_eq!(registry.to_string(), "etcd:http://192.0.2.1:2379");
/// # Ok::<(), flannel_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdOptions {
    /// URLs that begin with `http://` or `https://`; at least one.
    pub endpoints: Vec<String>,
    /// What all keys begin with, without `/config` and `/subnets`.
    pub prefix: String,
    /// PEM certificates of those who may vouch for an `https://` endpoint; `None`: whom this system trusts.
    pub cafile: Option<PathBuf>,
    /// This node's PEM certificate for `https://` endpoints that ask for one; goes with `keyfile`.
    pub certfile: Option<PathBuf>,
    /// The PEM key of `certfile`.
    pub keyfile: Option<PathBuf>,
    /// An etcd user; goes with `password`. Where etcd has no authentication enabled, they are not needed.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<String>,
    /// How long one endpoint may take for one request until the next one is asked.
    pub request_timeout: Duration,
    /// For how long a request is repeated until it counts as failed. The last attempt may end later.
    pub patience: Duration,
}

impl Default for EtcdOptions {
    /// Go flannel's endpoints and prefix, no TLS files, no user; 5 s for a request, 20 s of patience.
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:4001".into(), "http://127.0.0.1:2379".into()],
            prefix: "/coreos.com/network".into(),
            cafile: None,
            certfile: None,
            keyfile: None,
            username: None,
            password: None,
            request_timeout: Duration::from_secs(5),
            patience: Duration::from_secs(20),
        }
    }
}

impl fmt::Debug for EtcdOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdOptions")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("cafile", &self.cafile)
            .field("certfile", &self.certfile)
            .field("keyfile", &self.keyfile)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "(not shown)"))
            .field("request_timeout", &self.request_timeout)
            .field("patience", &self.patience)
            .finish()
    }
}

impl EtcdOptions {
    /// What cannot work, whatever etcd says.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.endpoints.is_empty() {
            return Err("no endpoint; name at least one, such as http://127.0.0.1:2379".into());
        }
        for endpoint in &self.endpoints {
            let rest = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
            if rest.is_none_or(|rest| rest.is_empty() || rest.contains([' ', '@'])) {
                return Err(format!("the endpoint {endpoint:?} is not a URL such as http://127.0.0.1:2379"));
            }
        }
        let pairs = [
            ("a certificate", self.certfile.is_some(), "its key", self.keyfile.is_some()),
            ("a user name", self.username.is_some(), "its password", self.password.is_some()),
        ];
        for (one, has_one, other, has_other) in pairs {
            if has_one != has_other {
                let (has, lacks) = if has_one { (one, other) } else { (other, one) };
                return Err(format!("{has} is given, but not {lacks}; give both or neither"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_not_shown() {
        let options = EtcdOptions {
            username: Some("root".into()),
            password: Some("hunter2".into()),
            ..EtcdOptions::default()
        };
        let shown = format!("{options:?} {options:#?}");
        assert!(shown.contains("root") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn what_cannot_work_is_told() {
        let defaults = EtcdOptions::default;
        assert_eq!(defaults().check(), Ok(()));
        for (options, says) in [
            (EtcdOptions { endpoints: vec![], ..defaults() }, "at least one"),
            (EtcdOptions { endpoints: vec!["127.0.0.1:2379".into()], ..defaults() }, "127.0.0.1:2379"),
            (EtcdOptions { endpoints: vec!["ftp://x".into()], ..defaults() }, "ftp://x"),
            (EtcdOptions { certfile: Some("/x".into()), ..defaults() }, "not its key"),
            (EtcdOptions { keyfile: Some("/x".into()), ..defaults() }, "not a certificate"),
            (EtcdOptions { username: Some("x".into()), ..defaults() }, "not its password"),
            (EtcdOptions { password: Some("secret".into()), ..defaults() }, "not a user name"),
        ] {
            let error = options.check().unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
        }
    }
}
