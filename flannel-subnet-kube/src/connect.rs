//! How the API server is reached: addresses, credentials and certificates, from where Go flannel takes them.
//!
//! The one thing to know: requests are repeated, timed and told about in [`api`](crate::api) alone, so that the client here does
//! none of it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http::HeaderValue;
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::ConfigExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tower::{BoxError, ServiceBuilder};

/// A connection that is silent is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// So long may a connection take to come about.
const CONNECT: Duration = Duration::from_secs(5);

/// Where the API server is.
///
/// **Source**: client-go `clientcmd.BuildConfigFromFlags`. Different on purpose: proxies are not used, those of the environment
/// neither.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Source {
    /// Instead of what the kubeconfig says.
    pub(crate) url: Option<String>,
    /// Without it and the URL: what every pod is given.
    pub(crate) kubeconfig: Option<PathBuf>,
}

impl Source {
    /// Reads the configuration anew.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub(crate) async fn config(&self) -> Result<Config, String> {
        let mut config = match (&self.kubeconfig, &self.url) {
            (Some(path), _) => from_kubeconfig(path).await.map_err(|error| format!("{}: {error}", path.display()))?,
            (None, Some(_)) => Config::new(http::Uri::from_static("http://localhost")),
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
            let parsed: http::Uri =
                url.parse().map_err(|error| format!("the URL {url:?}: {error}; {right}"))?;
            if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
                return Err(format!("the URL {url:?}: {right}"));
            }
            config.cluster_url = parsed;
        }
        let agent = concat!("flanneld/", env!("CARGO_PKG_VERSION"));
        config.headers.push((http::header::USER_AGENT, HeaderValue::from_static(agent)));
        Ok(config)
    }
}

async fn from_kubeconfig(path: &Path) -> Result<Config, String> {
    let kubeconfig = Kubeconfig::read_from(path).map_err(|error| chain(&error))?;
    if kubeconfig
        .clusters
        .iter()
        .filter_map(|named| named.cluster.as_ref())
        .any(|cluster| cluster.proxy_url.is_some())
    {
        return Err("its proxy-url cannot be used: give the URL by which the API server is reached directly"
            .to_owned());
    }
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    config.map_err(|error| chain(&error))
}

/// A client as this configuration asks for.
///
/// # Errors
/// The configuration's credentials or certificates cannot be used.
///
/// # Blocking
/// Reads files, and may run the program that a kubeconfig names.
pub(crate) fn client(config: &Config) -> Result<Client, String> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(KEEPALIVE));
    http.set_connect_timeout(Some(CONNECT));
    let https = config.rustls_https_connector_with_connector(http).map_err(|error| chain(&error))?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(|error| chain(&error))?)
        .layer(config.extra_headers_layer().map_err(|error| chain(&error))?)
        .map_err(BoxError::from)
        .service(HyperClient::builder(TokioExecutor::new()).build(https));
    Ok(Client::new(service, config.default_namespace.clone()))
}

/// An error with its causes. Those that only repeat what was said are left out.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
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
