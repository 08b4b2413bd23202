//! The options of the connection to etcd.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use flannel_core::Credential;

/// How to reach etcd. `Debug` does not show the password, and no credential that is given as a
/// value.
///
/// ```
/// use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};
///
/// let endpoints = vec!["http://192.0.2.1:2379".into()];
/// let options = EtcdOptions { endpoints, ..EtcdOptions::default() };
/// let registry = EtcdRegistry::new(options)?;
/// assert_eq!(registry.to_string(), "etcd:http://192.0.2.1:2379");
/// # Ok::<(), flannel_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdOptions {
    /// At least one URL, such as `http://192.0.2.1:2379` or `https://etcd.example:2379`. If the
    /// scheme is missing, it is `https://` if a credential is set, else `http://`. Empty texts are
    /// ignored.
    pub endpoints: Vec<String>,
    /// The prefix of all keys, without `/config` and `/subnets`. The default is
    /// `/coreos.com/network`.
    pub prefix: String,
    /// The CAs for `https://` endpoints, as PEM certificates. If it is `None`, the CAs of the
    /// system are trusted.
    pub ca: Option<Credential>,
    /// This node's PEM certificate for `https://` endpoints that require one, or `None`.
    pub certificate: Option<Credential>,
    /// The PEM key of `certificate`. Set both, or neither.
    pub key: Option<Credential>,
    /// An etcd user with a `password`, or `None` for no user. Both are ignored if etcd has no
    /// authentication enabled.
    pub username: Option<String>,
    /// The user's password. Set user and password, or neither.
    pub password: Option<String>,
    /// The time limit of one request at one endpoint. It must not be 0.
    pub request_timeout: Duration,
    /// The time for which a request is repeated. The last attempt may end later. With 0, each
    /// endpoint is asked once.
    pub patience: Duration,
}

impl Default for EtcdOptions {
    /// Go flannel's endpoints and prefix, no TLS files, no user. A request has 5 s, and is repeated
    /// for 20 s.
    fn default() -> Self {
        Self {
            endpoints: vec!["http://127.0.0.1:4001".into(), "http://127.0.0.1:2379".into()],
            prefix: "/coreos.com/network".into(),
            ca: None,
            certificate: None,
            key: None,
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
            .field("ca", &self.ca)
            .field("certificate", &self.certificate)
            .field("key", &self.key)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "(not shown)"))
            .field("request_timeout", &self.request_timeout)
            .field("patience", &self.patience)
            .finish()
    }
}

/// An error of the options alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EtcdOptionsError {
    /// There is no endpoint, or one is not a URL.
    #[error("{0}")]
    Endpoints(String),
    /// One of two options that belong together is missing.
    #[error("{has}: {value}is given without {lacks}; expected both or neither")]
    MissingPartner {
        /// The option that is set, as Go flannel calls it.
        has: &'static str,
        /// The value of the option that is set, as the message shows it: a file or a quoted user
        /// name, followed by a space. Empty for a password, and for a credential that is not a
        /// file, because these are secret.
        value: String,
        /// The option that is missing.
        lacks: &'static str,
    },
}

impl EtcdOptions {
    /// Checks the options, without a connection and without reading a file.
    ///
    /// # Errors
    /// An endpoint is not a URL, or one of two options that belong together is missing.
    pub fn check(&self) -> Result<(), EtcdOptionsError> {
        self.clone().checked().map(drop)
    }

    /// The checked options, with complete endpoints.
    pub(crate) fn checked(mut self) -> Result<Self, EtcdOptionsError> {
        let has_credentials = self.has_credentials();
        self.endpoints = self
            .endpoints
            .iter()
            .map(|endpoint| endpoint.trim())
            .filter(|endpoint| !endpoint.is_empty())
            .map(|endpoint| url(endpoint, has_credentials))
            .collect::<Result<_, _>>()
            .map_err(EtcdOptionsError::Endpoints)?;
        if self.endpoints.is_empty() {
            let reason =
                "there is no endpoint; expected at least one, such as http://127.0.0.1:2379";
            return Err(EtcdOptionsError::Endpoints(reason.to_owned()));
        }
        let file = |credential: &Option<Credential>| {
            let shown = |path: &Path| format!("{} ", path.display());
            credential.as_ref().map(|it| it.file().map(shown).unwrap_or_default())
        };
        let certfile = Given { field: "certfile", value: file(&self.certificate) };
        let keyfile = Given { field: "keyfile", value: file(&self.key) };
        check_both(certfile, keyfile)?;
        let name = self.username.as_ref().map(|name| format!("{name:?} "));
        let username = Given { field: "username", value: name };
        let password =
            Given { field: "password", value: self.password.as_ref().map(|_| String::new()) };
        check_both(username, password)?;
        Ok(self)
    }

    fn has_credentials(&self) -> bool {
        [&self.ca, &self.certificate, &self.key].into_iter().any(Option::is_some)
    }

    /// Warns about endpoints without TLS if credentials for TLS are set.
    pub(crate) fn warn_of_plain(&self) {
        if !self.has_credentials() {
            return;
        }
        for endpoint in self.endpoints.iter().filter(|endpoint| endpoint.starts_with("http://")) {
            tracing::warn!(
                %endpoint,
                "TLS files are given, but this endpoint does not use TLS: expected https://"
            );
        }
    }
}

/// An option as it was given.
struct Given {
    field: &'static str,
    /// The value for a message, or `None` if the option is not set.
    value: Option<String>,
}

/// Checks that both options are set, or neither.
fn check_both(one: Given, other: Given) -> Result<(), EtcdOptionsError> {
    match (one.value, other.value) {
        (Some(value), None) => {
            Err(EtcdOptionsError::MissingPartner { has: one.field, value, lacks: other.field })
        }
        (None, Some(value)) => {
            Err(EtcdOptionsError::MissingPartner { has: other.field, value, lacks: one.field })
        }
        (Some(_), Some(_)) | (None, None) => Ok(()),
    }
}

/// An endpoint as a URL with scheme, host and port only.
fn url(endpoint: &str, has_credentials: bool) -> Result<String, String> {
    if let Some((_, host)) = endpoint.rsplit_once('@') {
        return Err(format!(
            "the endpoint at {host} contains a user name or password: set them with their own \
             options"
        ));
    }
    let refuse = |why: &str| {
        Err(format!(
            "the endpoint {endpoint:?} {why}; expected a URL such as http://127.0.0.1:2379"
        ))
    };
    let (scheme, rest) = match endpoint.split_once("://") {
        Some((scheme, rest)) => (scheme.to_ascii_lowercase(), rest),
        None => (if has_credentials { "https" } else { "http" }.to_owned(), endpoint),
    };
    if scheme == "unix" || scheme == "unixs" {
        return refuse("is a Unix socket, which is not supported");
    }
    if scheme != "http" && scheme != "https" {
        return refuse("has an unknown scheme");
    }
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let Some((host, port)) = rest.rsplit_once(':').filter(|(_, port)| !port.contains(']')) else {
        return refuse("has no port");
    };
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_host = match bracketed {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([' ', '/', ':', '[', ']', '?', '#']),
    };
    if !is_host {
        return refuse("has no host");
    }
    if port.parse::<u16>().ok().filter(|port| *port > 0).is_none() {
        return refuse("has a port that is not a number from 1 to 65535");
    }
    Ok(format!("{scheme}://{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str) -> Credential {
        Credential::File(path.into())
    }

    #[test]
    fn secrets_are_not_shown() {
        let options = EtcdOptions {
            key: Some(Credential::value(*b"hunter2")),
            username: Some("root".into()),
            password: Some("hunter2".into()),
            ..EtcdOptions::default()
        };
        let shown = format!("{options:?} {options:#?}");
        assert!(shown.contains("root") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn wrong_options_are_reported() {
        let defaults = EtcdOptions::default;
        assert_eq!(defaults().checked(), Ok(defaults()));
        for (options, says) in [
            (EtcdOptions { endpoints: vec![], ..defaults() }, "at least one"),
            (EtcdOptions { endpoints: vec![" ".into()], ..defaults() }, "at least one"),
            (
                EtcdOptions { certificate: Some(file("/x")), ..defaults() },
                "certfile: /x is given without keyfile",
            ),
            (
                EtcdOptions { key: Some(file("/x")), ..defaults() },
                "keyfile: /x is given without certfile",
            ),
            (
                EtcdOptions { key: Some(Credential::value(*b"secret")), ..defaults() },
                "keyfile: is given without certfile",
            ),
            (
                EtcdOptions { username: Some("x".into()), ..defaults() },
                "username: \"x\" is given without password",
            ),
            (
                EtcdOptions { password: Some("secret".into()), ..defaults() },
                "password: is given without username",
            ),
        ] {
            let error = options.check().unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn tls_files_that_have_no_effect_are_logged() {
        let logged = test_support::Logged::default();
        let _guard = tracing::subscriber::set_default(logged.clone());
        let endpoints: Vec<String> = ["http://a:2379", "https://b:2379"].map(Into::into).into();
        EtcdOptions { endpoints: endpoints.clone(), ..EtcdOptions::default() }.warn_of_plain();
        assert_eq!(logged.count("does not use TLS"), 0);
        let ca = Some(file("/ca"));
        EtcdOptions { endpoints, ca, ..EtcdOptions::default() }.warn_of_plain();
        assert_eq!(logged.count("does not use TLS"), 1);
        assert_eq!(logged.count("http://a:2379"), 1);
    }

    #[test]
    fn endpoints_are_urls() {
        for (given, tls, full) in [
            ("etcd1:2379", false, "http://etcd1:2379"),
            ("etcd1:2379", true, "https://etcd1:2379"),
            ("HTTP://h:2379/", true, "http://h:2379"),
            ("https://[2001:db8::1]:2379", false, "https://[2001:db8::1]:2379"),
            ("[::1]:2379", false, "http://[::1]:2379"),
        ] {
            assert_eq!(url(given, tls).as_deref(), Ok(full), "{given}");
        }
        for (given, says) in [
            ("ftp://x:1", "scheme"),
            ("unix:///run/etcd", "Unix socket"),
            ("http://h", "port"),
            ("http://[::1]", "port"),
            ("http://h:99999", "65535"),
            ("http://h:0", "65535"),
            ("http://:2379", "host"),
            ("http://2001:db8::1:2379", "host"),
            ("http://h:2379/path", "port"),
            ("http://us:secret@h:2379", "h:2379"),
        ] {
            let error = url(given, false).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{given}: {error}");
        }
    }
}
