//! Connections to the API server, with the credentials of this node.
//!
//! A token in a file is read for each request, so that the latest one is used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use bytes::Bytes;
use flannel_core::Credential;
use flannel_tls::Refusal;
use http::{HeaderValue, Request, Response, Uri, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::Config;
use kube::config::AuthInfo;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use secrecy::ExposeSecret;

use super::chain;
use super::exec::{self, Credentials};
use super::kubeconfig::from_kubeconfig;
use super::proxy::Route;
use super::tls::{Client as ClientCertificate, tls};

/// The time without data after which TCP checks the connection.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// The time limit of the connection setup.
const CONNECT: Duration = Duration::from_secs(5);

/// The configuration of connections.
///
/// **Source**: client-go `clientcmd.BuildConfigFromFlags`, `mergeConfig` (`TLSServerName`).
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
    client: Client<HttpsConnector<Route>, Full<Bytes>>,
    authorization: Option<Authorization>,
    /// How messages call the client certificate, or `None` if there is none.
    certificate: Option<String>,
    /// What a plugin printed.
    printed: Option<Arc<Credentials>>,
    /// The server's certificate is not verified.
    is_insecure: bool,
}

/// The value of the header `Authorization`, or the file with its token.
#[derive(Clone)]
enum Authorization {
    Fixed(HeaderValue),
    File(PathBuf),
}

impl Source {
    /// Makes a client. All files are read again, and a credential plugin runs, unless the
    /// credentials in `printed` have not expired.
    ///
    /// # Errors
    /// The file or option, and the reason.
    ///
    /// # Blocking
    /// Reads a few files.
    pub(crate) async fn connection(
        &self,
        printed: Option<Arc<Credentials>>,
    ) -> Result<Connection, String> {
        let config = self.config().await?;
        let mut certificate = ClientCertificate::of_user(&config)?;
        let mut printed = printed.filter(|printed| !printed.have_expired());
        let mut authorization = match &self.token {
            Some(given) => Some(Authorization::of(given)?),
            None => authorization(&config.auth_info)?,
        };
        if let Some(exec) = &config.auth_info.exec
            && authorization.is_none()
        {
            let credentials = match printed.take() {
                Some(printed) => printed,
                None => exec::credentials(exec)
                    .await
                    .map(Arc::new)
                    .map_err(|error| format!("its user's credential plugin (exec): {error}"))?,
            };
            authorization = credentials.authorization.clone().map(Authorization::Fixed);
            certificate = credentials.client.clone().or(certificate);
            printed = Some(credentials);
        } else {
            printed = None;
        }
        let tls = tls(&config, certificate.as_ref())?;
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
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
        let variable = |name: &str| std::env::var(name).ok();
        let given = config.proxy_url.as_ref();
        let route = Route::new(tcp(), &config.cluster_url, given, variable)?;
        let connector = https.enable_http1().wrap_connector(route);
        Ok(Connection {
            base: config.cluster_url,
            client: Client::builder(TokioExecutor::new()).build(connector),
            authorization,
            certificate: certificate.map(|client| client.name),
            printed,
            is_insecure: config.accept_invalid_certs,
        })
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
            // It is the name of the server in the kubeconfig.
            config.tls_server_name = None;
            let exec = config.auth_info.exec.as_mut();
            if let Some(cluster) = exec.and_then(|exec| exec.cluster.as_mut()) {
                cluster.server = Some(url.clone());
                cluster.tls_server_name = None;
            }
        }
        if let Some(ca) = &self.ca {
            config.root_cert = Some(certificates(ca)?);
            config.accept_invalid_certs = false;
        }
        Ok(config)
    }
}

/// A connector for TCP.
fn tcp() -> HttpConnector {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_connect_timeout(Some(CONNECT));
    tcp
}

impl Authorization {
    fn of(given: &Credential) -> Result<Self, String> {
        match given {
            Credential::File(path) => Ok(Self::File(path.clone())),
            Credential::Value(token) => {
                let token = String::from_utf8_lossy(token.expose());
                bearer(&token).map(Self::Fixed).map_err(|error| format!("the token: {error}"))
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

/// The token or the password of a user.
fn authorization(user: &AuthInfo) -> Result<Option<Authorization>, String> {
    let token_file = user.token_file.as_ref().map(|path| Authorization::File(path.into()));
    let token = match (&user.token, token_file) {
        (_, Some(file)) => Some(file),
        (Some(token), None) => match bearer(token.expose_secret()) {
            Ok(value) => Some(Authorization::Fixed(value)),
            Err(error) => return Err(format!("its user's token: {error}")),
        },
        (None, None) => None,
    };
    let Some(name) = &user.username else { return Ok(token) };
    if token.is_some() {
        return Err("its user has a username and a token: expected only one of them".to_owned());
    }
    let password = user.password.as_ref().map(ExposeSecret::expose_secret).unwrap_or_default();
    let encoded = base64::engine::general_purpose::STANDARD.encode(format!("{name}:{password}"));
    Ok(Some(Authorization::Fixed(header_value(format!("Basic {encoded}"))?)))
}

/// The value of the header `Authorization` for a token.
pub(super) fn bearer(token: &str) -> Result<HeaderValue, String> {
    let token = token.trim();
    if token.is_empty() {
        return Err("it is empty".to_owned());
    }
    header_value(format!("Bearer {token}"))
}

fn header_value(text: String) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::try_from(text)
        .map_err(|_| "it contains characters that a token cannot have".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

impl Authorization {
    fn value(&self) -> Result<HeaderValue, Unsent> {
        match self {
            Self::Fixed(value) => Ok(value.clone()),
            Self::File(path) => std::fs::read_to_string(path)
                .map_err(|error| error.to_string())
                .and_then(|text| bearer(&text))
                .map_err(|error| {
                    let path = path.display().to_string();
                    let reason = format!("the token {path}: {error}");
                    Unsent { reason, cause: Cause::Token(path) }
                }),
        }
    }
}

impl Connection {
    /// The URL, without a trailing slash.
    pub(crate) fn url(&self) -> String {
        self.base.to_string().trim_end_matches('/').to_owned()
    }

    /// Whether the credentials have expired.
    pub(crate) fn has_expired(&self) -> bool {
        self.printed.as_ref().is_some_and(|printed| printed.have_expired())
    }

    /// What a plugin printed for this connection.
    pub(crate) fn printed(&self) -> Option<Arc<Credentials>> {
        self.printed.clone()
    }

    /// Whether the server's certificate is not verified.
    pub(crate) fn is_insecure(&self) -> bool {
        self.is_insecure
    }

    /// Warns if the server's certificate is not verified.
    pub(crate) fn warn_if_insecure(&self) {
        if self.is_insecure {
            tracing::warn!(
                server = self.url(),
                "insecure-skip-tls-verify: the certificate of the API server is not verified, so \
                 any server that answers in its place gets the credentials of this node"
            );
        }
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
        if let Some(authorization) = &self.authorization {
            request.headers_mut().insert(header::AUTHORIZATION, authorization.value()?);
        }
        let agent = HeaderValue::from_static(concat!("flanneld/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().insert(header::USER_AGENT, agent);
        self.client.request(request).await.map_err(|error| {
            let mut reason = chain(&error);
            let refusal = Refusal::find(&error);
            let may_be_ours = matches!(refusal, Some(Refusal::Client(_) | Refusal::Handshake(_)));
            if let Some(certificate) = self.certificate.as_ref().filter(|_| may_be_ours) {
                reason = format!("{reason}; this node has {certificate}");
            }
            Unsent { reason, cause: refusal.map_or(Cause::Other, Cause::Tls) }
        })
    }
}

/// Why a request has no answer.
#[derive(Debug)]
pub(crate) struct Unsent {
    pub(crate) reason: String,
    pub(crate) cause: Cause,
}

/// What caused the failure, as far as it is known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cause {
    /// The token in this file cannot be read.
    Token(String),
    /// This node and the server, or a proxy before it, do not accept each other.
    Tls(Refusal),
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_token_is_refused() {
        let read = |user: &str| authorization(&serde_json::from_str::<AuthInfo>(user).unwrap());
        assert!(read(r#"{"token": " "}"#).is_err_and(|error| error.contains("token: it is empty")));
        assert!(matches!(read(r#"{"token": "a"}"#), Ok(Some(Authorization::Fixed(_)))));
    }
}
