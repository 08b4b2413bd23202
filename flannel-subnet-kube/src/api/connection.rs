//! Connections to the API server, with the credentials of this node.
//!
//! A token in a file is read for each request, so that the latest one is used.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use flannel_core::Credential;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Config;
use kube::config::AuthInfo;
use rustls::AlertDescription;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use secrecy::ExposeSecret;

use super::chain;
use super::kubeconfig::from_kubeconfig;
use super::tls::tls;

/// The time without data after which TCP checks the connection.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// The time limit of the connection setup.
const CONNECT: Duration = Duration::from_secs(5);

/// The configuration of connections.
///
/// **Source**: client-go `clientcmd.BuildConfigFromFlags`. Unlike client-go, it uses no proxy, not
/// even a proxy of the environment, and runs no credential program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Source {
    /// The URL of the API server, instead of the URL in the kubeconfig.
    pub(crate) url: Option<String>,
    /// The kubeconfig. Without it and the URL, the service account of this pod is used.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The CAs, instead of those of the kubeconfig or the service account.
    pub(crate) ca: Option<Credential>,
    /// The token, instead of the one of the kubeconfig or the service account.
    pub(crate) token: Option<Credential>,
}

/// A client of the API server. Clones share their connections.
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
    /// Makes a client. All files are read again.
    ///
    /// # Errors
    /// The file or option, and the reason.
    ///
    /// # Blocking
    /// Reads a few files.
    pub(crate) async fn connection(&self) -> Result<Connection, String> {
        let config = self.config().await?;
        let token = match &self.token {
            Some(given) => Some(Token::of(given)?),
            None => token(&config.auth_info)?,
        };
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
        Ok(Connection { base: config.cluster_url, client, token })
    }

    /// The address of the API server and the credentials.
    async fn config(&self) -> Result<Config, String> {
        let mut config = match (&self.kubeconfig, &self.url) {
            (Some(path), _) => from_kubeconfig(path)
                .await
                .map_err(|error| format!("{}: {error}", path.display()))?,
            // The URL is replaced below.
            (None, Some(_)) => Config::new(Uri::from_static("http://localhost")),
            (None, None) => Config::incluster().map_err(|error| {
                format!(
                    "the address of the Kubernetes API is not known: neither a URL nor a \
                     kubeconfig is given, and there is no service account of a pod: {}",
                    chain(&error)
                )
            })?,
        };
        if let Some(url) = &self.url {
            let expected = "expected a URL such as https://192.0.2.1:6443";
            let parsed: Uri =
                url.parse().map_err(|error| format!("the URL {url:?}: {error}; {expected}"))?;
            if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
                return Err(format!("the URL {url:?}: {expected}"));
            }
            config.cluster_url = parsed;
        }
        if let Some(ca) = &self.ca {
            config.root_cert = Some(certificates(ca)?);
        }
        Ok(config)
    }
}

impl Token {
    fn of(given: &Credential) -> Result<Self, String> {
        match given {
            Credential::File(path) => Ok(Self::File(path.clone())),
            Credential::Value(token) => {
                let token = String::from_utf8_lossy(token.expose());
                authorization(&token)
                    .map(Self::Fixed)
                    .map_err(|error| format!("the token: {error}"))
            }
        }
    }
}

/// The certificates of CAs in DER.
fn certificates(ca: &Credential) -> Result<Vec<Vec<u8>>, String> {
    let pem = ca.read().map_err(|error| format!("the CA {ca}: {error}"))?;
    let all = CertificateDer::pem_slice_iter(&pem)
        .map(|certificate| certificate.map(|certificate| certificate.to_vec()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| format!("the CA {ca}: {error}"))?;
    if all.is_empty() {
        return Err(format!("the CA {ca} contains no PEM certificate"));
    }
    Ok(all)
}

fn token(user: &AuthInfo) -> Result<Option<Token>, String> {
    if let Some(path) = &user.token_file {
        return Ok(Some(Token::File(path.into())));
    }
    let Some(token) = &user.token else { return Ok(None) };
    match authorization(token.expose_secret()) {
        Ok(value) => Ok(Some(Token::Fixed(value))),
        Err(error) => Err(format!("its user's token: {error}")),
    }
}

/// The value of the header `Authorization`.
fn authorization(token: &str) -> Result<HeaderValue, String> {
    let token = token.trim();
    if token.is_empty() {
        return Err("it is empty".to_owned());
    }
    let mut value = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| "it contains characters that a token cannot have".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

impl Token {
    fn authorization(&self) -> Result<HeaderValue, Unsent> {
        match self {
            Self::Fixed(value) => Ok(value.clone()),
            Self::File(path) => std::fs::read_to_string(path)
                .map_err(|error| error.to_string())
                .and_then(|text| authorization(&text))
                .map_err(|error| {
                    let path = path.display().to_string();
                    Unsent {
                        reason: format!("the token {path}: {error}"),
                        cause: Cause::Token(path),
                    }
                }),
        }
    }
}

impl Connection {
    /// The URL, without a trailing slash.
    pub(crate) fn url(&self) -> String {
        self.base.to_string().trim_end_matches('/').to_owned()
    }

    /// Sends a request for a path of the API.
    ///
    /// # Errors
    /// The server cannot be reached, or the token cannot be read.
    pub(crate) async fn send(
        &self,
        mut request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, Unsent> {
        let other = |reason| Unsent { reason, cause: Cause::Other };
        *request.uri_mut() = format!("{}{}", self.url(), request.uri())
            .parse::<Uri>()
            .map_err(|error| other(error.to_string()))?;
        if let Some(token) = &self.token {
            let value = token.authorization()?;
            request.headers_mut().insert(header::AUTHORIZATION, value);
        }
        let agent = HeaderValue::from_static(concat!("flanneld/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(header::USER_AGENT, agent);
        self.client
            .request(request)
            .await
            .map_err(|error| Unsent { reason: chain(&error), cause: Cause::of(&error) })
    }
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) reason: String,
    pub(crate) cause: Cause,
}

/// The certificate or handshake that caused the failure, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The token in this file cannot be read.
    Token(String),
    /// This node does not accept the server's certificate.
    ServerCertificate,
    /// The server, or a proxy, does not accept this node's certificate, or requires one.
    ClientCertificate,
    /// The TLS handshake failed for another reason.
    Handshake,
    Other,
}

impl Cause {
    fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let errors = std::iter::successors(Some(error), |error| {
            // The error inside an I/O error is not its source.
            let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
            inner.map(|inner| inner as _).or_else(|| error.source())
        });
        let mut tls_errors = errors.filter_map(|error| error.downcast_ref::<rustls::Error>());
        match tls_errors.next() {
            Some(rustls::Error::InvalidCertificate(_)) => Self::ServerCertificate,
            Some(rustls::Error::AlertReceived(alert)) => Self::of_alert(*alert),
            _ => Self::Other,
        }
    }

    /// The cause that the server's alert reports.
    fn of_alert(alert: AlertDescription) -> Self {
        match alert {
            AlertDescription::AccessDenied
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateRequired
            | AlertDescription::CertificateRevoked
            | AlertDescription::CertificateUnknown
            | AlertDescription::NoCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::UnsupportedCertificate => Self::ClientCertificate,
            AlertDescription::DecryptError
            | AlertDescription::HandshakeFailure
            | AlertDescription::IllegalParameter
            | AlertDescription::InsufficientSecurity
            | AlertDescription::MissingExtension
            | AlertDescription::NoApplicationProtocol
            | AlertDescription::ProtocolVersion
            | AlertDescription::UnrecognisedName
            | AlertDescription::UnsupportedExtension => Self::Handshake,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_token_is_refused() {
        let read = |user: &str| token(&serde_json::from_str::<AuthInfo>(user).unwrap());
        assert!(read(r#"{"token": " "}"#).is_err_and(|error| error.contains("token: it is empty")));
        assert!(matches!(read(r#"{"token": "a"}"#), Ok(Some(Token::Fixed(_)))));
    }
}
