//! How the API server is reached: addresses, credentials and certificates, from where Go flannel takes them.
//!
//! Kubeconfigs and service accounts are read by `kube`, connections are made here. A token in a file is
//! read for each request, so that it is always the latest; certificates are read again when they are refused.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Config;
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{AlertDescription, ClientConfig, RootCertStore};
use secrecy::{ExposeSecret, SecretString};

/// A connection that is silent is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// So long may a connection take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// Where the API server is.
///
/// **Source**: client-go `clientcmd.BuildConfigFromFlags`. Different on purpose: proxies are not used, those of the environment
/// neither; programs that make credentials are not run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Source {
    /// Instead of what the kubeconfig says.
    pub(crate) url: Option<String>,
    /// Without it and the URL: what every pod is given.
    pub(crate) kubeconfig: Option<PathBuf>,
}

/// A way to the API server. Clones share their connections.
#[derive(Clone)]
pub(crate) struct Connection {
    base: Uri,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    token: Option<Token>,
}

#[derive(Clone)]
enum Token {
    Fixed(HeaderValue),
    File(PathBuf),
}

impl Source {
    /// Reads everything anew.
    ///
    /// # Errors
    /// What is wrong, and where.
    ///
    /// # Blocking
    /// Reads a few files.
    pub(crate) async fn connection(&self) -> Result<Connection, String> {
        let mut config = match (&self.kubeconfig, &self.url) {
            (Some(path), _) => {
                from_kubeconfig(path).await.map_err(|error| format!("{}: {error}", path.display()))?
            }
            (None, Some(_)) => Config::new(Uri::from_static("http://localhost")),
            (None, None) => Config::incluster().map_err(|error| {
                format!(
                    "where the Kubernetes API is is not known: neither an URL nor a kubeconfig is given, and this is no pod with a \
                     service account: {}",
                    chain(&error)
                )
            })?,
        };
        if let Some(url) = &self.url {
            let right = "right would be an URL such as https://192.0.2.1:6443";
            let parsed: Uri =
                url.parse().map_err(|error| format!("the URL {url:?}: {error}; {right}"))?;
            if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
                return Err(format!("the URL {url:?}: {right}"));
            }
            config.cluster_url = parsed;
        }
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_keepalive(Some(KEEPALIVE));
        http.set_connect_timeout(Some(CONNECT));
        let https = HttpsConnectorBuilder::new().with_tls_config(tls(&config)?).https_or_http();
        let https = match &config.tls_server_name {
            Some(name) => {
                let parsed = name
                    .clone()
                    .try_into()
                    .map_err(|error| format!("tls-server-name {name:?}: {error}"))?;
                https.with_server_name_resolver(FixedServerNameResolver::new(parsed))
            }
            None => https,
        };
        let connector = https.enable_http1().wrap_connector(http);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Connection { base: config.cluster_url, client, token: token(&config.auth_info)? })
    }
}

/// The files that a kubeconfig names: certificates, keys and tokens, of all its clusters and users. None if it cannot be
/// read: the connection reports why.
///
/// # Blocking
/// Reads a file.
pub fn credential_files(kubeconfig: &Path) -> Vec<PathBuf> {
    let Ok(kubeconfig) = read(kubeconfig) else { return Vec::new() };
    let clusters =
        kubeconfig.clusters.into_iter().filter_map(|named| named.cluster?.certificate_authority);
    let users = kubeconfig.auth_infos.into_iter().filter_map(|named| named.auth_info);
    let of_user = |user: AuthInfo| [user.client_certificate, user.client_key, user.token_file];
    clusters.chain(users.flat_map(of_user).flatten()).map(PathBuf::from).collect()
}

/// A kubeconfig, in which what is written down as empty is not there: whoever makes kubeconfigs from a template has such.
///
/// **Source**: client-go, where both are the same.
fn read(path: &Path) -> Result<Kubeconfig, KubeconfigError> {
    let mut kubeconfig = Kubeconfig::read_from(path)?;
    // Which made an empty path absolute, too.
    let nowhere = path.parent().map(|dir| dir.join(""));
    let drop_empty = |fields: &mut [&mut Option<String>]| {
        for field in fields {
            field.take_if(|text| text.is_empty() || Some(Path::new(text)) == nowhere.as_deref());
        }
    };
    for cluster in kubeconfig.clusters.iter_mut().filter_map(|named| named.cluster.as_mut()) {
        drop_empty(&mut [
            &mut cluster.certificate_authority,
            &mut cluster.certificate_authority_data,
            &mut cluster.proxy_url,
            &mut cluster.tls_server_name,
        ]);
    }
    for user in kubeconfig.auth_infos.iter_mut().filter_map(|named| named.auth_info.as_mut()) {
        drop_empty(&mut [
            &mut user.username,
            &mut user.impersonate,
            &mut user.token_file,
            &mut user.client_certificate,
            &mut user.client_certificate_data,
            &mut user.client_key,
        ]);
        let is_empty = |secret: &mut SecretString| secret.expose_secret().is_empty();
        user.token.take_if(is_empty);
        user.client_key_data.take_if(is_empty);
    }
    Ok(kubeconfig)
}

async fn from_kubeconfig(path: &Path) -> Result<Config, String> {
    let kubeconfig = read(path).map_err(|error| chain(&error))?;
    // Of the cluster that is used: the config that is made of all this has those of the environment in it, too.
    let context = kubeconfig
        .contexts
        .iter()
        .find(|named| Some(&named.name) == kubeconfig.current_context.as_ref());
    let cluster = context.and_then(|named| Some(&named.context.as_ref()?.cluster));
    let used = kubeconfig.clusters.iter().find(|named| Some(&named.name) == cluster);
    if used.and_then(|named| named.cluster.as_ref()?.proxy_url.as_ref()).is_some() {
        return Err("its proxy-url cannot be used: give the URL by which the API server is reached directly"
            .to_owned());
    }
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    let config = config.map_err(|error| chain(&error))?;
    let AuthInfo { exec, auth_provider, username, impersonate, .. } = &config.auth_info;
    let others = [
        ("exec", exec.is_some()),
        ("auth-provider", auth_provider.is_some()),
        ("username", username.is_some()),
        ("as", impersonate.is_some()),
    ];
    if let Some((other, _)) = others.iter().find(|(_, given)| *given) {
        return Err(format!(
            "its user has {other:?}, which cannot be used: right would be a token, a tokenFile or a client certificate"
        ));
    }
    if config.accept_invalid_certs {
        return Err(
            "its insecure-skip-tls-verify cannot be used: right would be the certificate-authority"
                .to_owned(),
        );
    }
    Ok(config)
}

fn token(user: &AuthInfo) -> Result<Option<Token>, String> {
    if let Some(path) = &user.token_file {
        return Ok(Some(Token::File(path.into())));
    }
    let fixed = user.token.as_ref();
    let fixed = fixed.map(|token| bearer(token.expose_secret()).map(Token::Fixed)).transpose();
    fixed.map_err(|error| format!("its user's token: {error}"))
}

fn bearer(token: &str) -> Result<HeaderValue, String> {
    let token = token.trim();
    if token.is_empty() {
        return Err("it is empty".to_owned());
    }
    let value = HeaderValue::try_from(format!("Bearer {token}"));
    let mut value = value.map_err(|_| "it holds characters that no token has".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

/// Whom to trust, and who we are.
fn tls(config: &Config) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match &config.root_cert {
        Some(given) => {
            for certificate in given {
                let added = roots.add(CertificateDer::from(certificate.clone()));
                added
                    .map_err(|error| format!("the certificate of a CA cannot be used: {error}"))?;
            }
        }
        // Where there are none, no https server is trusted, which is said then.
        None if config.cluster_url.scheme_str() == Some("https") => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        None => {}
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| chain(&error))?.with_root_certificates(roots);
    let user = &config.auth_info;
    let certificate = material(
        "client-certificate",
        user.client_certificate_data.as_deref(),
        user.client_certificate.as_deref(),
    )?;
    let key_data = user.client_key_data.as_ref().map(ExposeSecret::expose_secret);
    let key = material("client-key", key_data, user.client_key.as_deref())?;
    match (certificate, key) {
        (None, None) => Ok(builder.with_no_client_auth()),
        (Some(certificate), Some(key)) => {
            let chain = CertificateDer::pem_slice_iter(&certificate).collect::<Result<Vec<_>, _>>();
            let chain = chain.map_err(|error| format!("client-certificate: {error}"))?;
            let key = PrivateKeyDer::from_pem_slice(&key)
                .map_err(|error| format!("client-key: {error}"))?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|error| format!("client-certificate and client-key do not fit: {error}"))
        }
        (Some(_), None) => Err("there is a client-certificate, but no client-key".to_owned()),
        (None, Some(_)) => Err("there is a client-key, but no client-certificate".to_owned()),
    }
}

/// What a kubeconfig holds, or the file that it names.
fn material(what: &str, data: Option<&str>, file: Option<&str>) -> Result<Option<Vec<u8>>, String> {
    match (data, file) {
        (Some(data), _) => {
            let decoded = base64::engine::general_purpose::STANDARD.decode(data.trim());
            decoded.map(Some).map_err(|error| format!("{what}-data is not base64: {error}"))
        }
        (None, Some(file)) => {
            std::fs::read(file).map(Some).map_err(|error| format!("{what} {file}: {error}"))
        }
        (None, None) => Ok(None),
    }
}

impl Connection {
    /// The URL, without a slash at its end.
    pub(crate) fn url(&self) -> String {
        self.base.to_string().trim_end_matches('/').to_owned()
    }

    /// Sends a request for a path of the API.
    ///
    /// # Errors
    /// No connection came about, or the token cannot be read.
    pub(crate) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Unsent> {
        let other = |reason| Unsent { reason, cause: Cause::Other };
        let uri = format!("{}{}", self.url(), request.uri()).parse::<Uri>();
        *request.uri_mut() = uri.map_err(|error| other(error.to_string()))?;
        let token = match &self.token {
            None => None,
            Some(Token::Fixed(value)) => Some(value.clone()),
            Some(Token::File(path)) => {
                let text = std::fs::read_to_string(path);
                let bearer = text.map_err(|error| error.to_string()).and_then(|text| bearer(&text));
                Some(
                    bearer
                        .map_err(|error| other(format!("the token {}: {error}", path.display())))?,
                )
            }
        };
        let headers = request.headers_mut();
        token.map(|token| headers.insert(header::AUTHORIZATION, token));
        let agent = concat!("flanneld/", env!("CARGO_PKG_VERSION"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
        let sent = self.client.request(request).await;
        sent.map_err(|error| Unsent { reason: chain(&error), cause: Cause::of(&error) })
    }
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) reason: String,
    pub(crate) cause: Cause,
}

/// Of whose certificate it was, if of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// We do not accept the server's.
    Theirs,
    /// The server, or who stands before it, does not accept ours, or wants one.
    Ours,
    /// It does not speak to us, and blames no certificate.
    Terms,
    Other,
}

impl Cause {
    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let errors = std::iter::successors(Some(error), |error| {
            // What an I/O error holds is not its source.
            let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
            held.map(|held| held as _).or_else(|| error.source())
        });
        let mut of_tls = errors.filter_map(|error| error.downcast_ref::<rustls::Error>());
        match of_tls.next() {
            Some(rustls::Error::InvalidCertificate(_)) => Self::Theirs,
            Some(rustls::Error::AlertReceived(alert)) => Self::blamed_by(*alert),
            _ => Self::Other,
        }
    }

    /// What the other side's alert says, and no more than that.
    fn blamed_by(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRequired
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::NoCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::UnsupportedCertificate => Self::Ours,
            AlertDescription::DecryptError
            | AlertDescription::HandshakeFailure
            | AlertDescription::IllegalParameter
            | AlertDescription::InsufficientSecurity
            | AlertDescription::MissingExtension
            | AlertDescription::NoApplicationProtocol
            | AlertDescription::ProtocolVersion
            | AlertDescription::UnrecognisedName
            | AlertDescription::UnsupportedExtension => Self::Terms,
            _ => Self::Other,
        }
    }
}

/// An error with its causes. Those that only repeat what was said are left out.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blank_token_is_wrong() {
        let read = |user: &str| token(&serde_json::from_str::<AuthInfo>(user).unwrap());
        assert!(read(r#"{"token": " "}"#).is_err_and(|error| error.contains("token: it is empty")));
        assert!(matches!(read(r#"{"token": "a"}"#), Ok(Some(Token::Fixed(_)))));
    }

    #[test]
    fn the_files_of_a_kubeconfig_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let text = "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
                    clusters: [{name: a, cluster: {server: 'https://192.0.2.1', certificate-authority: ca.crt}}]\n\
                    contexts: [{name: a, context: {cluster: a, user: a}}]\n\
                    users:\n- name: a\n  user: {client-certificate: /tls/a.crt, client-key: /tls/a.key}\n\
                    - name: b\n  user: {tokenFile: /tls/token, client-certificate: '', client-key: ''}\n";
        std::fs::write(&path, text).unwrap();
        let expected = [
            dir.path().join("ca.crt"),
            "/tls/a.crt".into(),
            "/tls/a.key".into(),
            "/tls/token".into(),
        ];
        assert_eq!(credential_files(&path), expected);
        assert!(credential_files(&dir.path().join("none")).is_empty());
    }
}
