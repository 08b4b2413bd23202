//! How TCP connections reach the API server: directly, or through a proxy.
//!
//! **Source**: client-go `rest.Config.Proxy`, Go `http.ProxyFromEnvironment`.

use std::error::Error;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::proxy::{SocksV5, Tunnel};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

type BoxError = Box<dyn Error + Send + Sync>;

/// A connector that uses the proxy, if there is one.
#[derive(Clone)]
pub(super) enum Route {
    Direct(HttpConnector),
    /// HTTP CONNECT.
    Tunnel {
        proxy: Uri,
        connector: Tunnel<HttpConnector>,
    },
    Socks {
        proxy: Uri,
        connector: SocksV5<HttpConnector>,
    },
}

/// The proxy that fails.
#[derive(Debug, thiserror::Error)]
#[error("the proxy {proxy} does not connect to the API server")]
struct ProxyError {
    proxy: Uri,
    source: BoxError,
}

impl Route {
    /// The route to `server`. `given` is the `proxy-url` of a kubeconfig, which takes precedence
    /// over the variables of the environment.
    ///
    /// # Errors
    /// The proxy is not a URL, or has a scheme that is not supported. The error does not show the
    /// URL, which may have a password.
    pub(super) fn new(
        http: HttpConnector,
        server: &Uri,
        given: Option<&Uri>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let expected = "expected a URL such as http://192.0.2.1:3128 or socks5://192.0.2.1:1080";
        let (name, proxy) = match given {
            Some(url) => ("proxy-url", url.to_string()),
            None => match of_environment(server, variable) {
                Some(Variable { name, value }) => (name, value),
                None => return Ok(Self::Direct(http)),
            },
        };
        let proxy = Matcher::builder().all(proxy).build().intercept(server);
        let Some(proxy) = proxy else { return Err(format!("{name} is not usable: {expected}")) };
        Self::through(&proxy, http)
            .map_err(|scheme| format!("{name} is not usable: its scheme is {scheme:?}; {expected}"))
    }

    fn through(proxy: &Intercept, http: HttpConnector) -> Result<Self, String> {
        match proxy.uri().scheme_str() {
            Some("http") => {
                let proxy_url = with_port(proxy.uri(), 80);
                let mut connector = Tunnel::new(proxy_url.clone(), http);
                if let Some(user) = proxy.basic_auth() {
                    connector = connector.with_auth(user.clone());
                }
                Ok(Self::Tunnel { proxy: proxy_url, connector })
            }
            Some("socks5" | "socks5h") => {
                let proxy_url = with_port(proxy.uri(), 1080);
                let mut connector = SocksV5::new(proxy_url.clone(), http);
                if let Some((user, password)) = proxy.raw_auth() {
                    connector = connector.with_auth(user.to_owned(), password.to_owned());
                }
                Ok(Self::Socks { proxy: proxy_url, connector })
            }
            scheme => Err(scheme.unwrap_or_default().to_owned()),
        }
    }
}

/// A variable of the environment.
struct Variable {
    name: &'static str,
    value: String,
}

/// The variable with the proxy to `server`, or `None` if no proxy is to be used. As in Go, this
/// machine itself is reached directly.
fn of_environment(server: &Uri, variable: impl Fn(&str) -> Option<String>) -> Option<Variable> {
    let first = |names: [&'static str; 2]| {
        names.into_iter().find_map(|name| {
            let value = variable(name).filter(|value| !value.is_empty())?;
            Some(Variable { name, value })
        })
    };
    let host = server.host()?.trim_matches(['[', ']']);
    if host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback()) {
        return None;
    }
    let is_https = server.scheme_str() == Some("https");
    let proxy = first(if is_https {
        ["HTTPS_PROXY", "https_proxy"]
    } else {
        ["HTTP_PROXY", "http_proxy"]
    })?;
    let port = server.port_u16().unwrap_or(if is_https { 443 } else { 80 });
    let excluded = first(["NO_PROXY", "no_proxy"]);
    let excludes = |list: Variable| list.value.split(',').any(|entry| matches(entry, host, port));
    (!excluded.is_some_and(excludes)).then_some(proxy)
}

/// Whether an entry of `NO_PROXY` has this server.
///
/// **Source**: Go `golang.org/x/net/http/httpproxy`.
fn matches(entry: &str, host: &str, port: u16) -> bool {
    let (entry, host) = (entry.trim().to_lowercase(), host.to_lowercase());
    let address = host.parse::<IpAddr>().ok().map(|address| address.to_canonical());
    if entry == "*" {
        return true;
    }
    if let Some((net, length)) = entry.split_once('/')
        && let (Ok(net), Ok(length)) = (net.parse(), length.parse())
    {
        return address.is_some_and(|address| is_in(address, net, length));
    }
    let with_port = entry.rsplit_once(':').filter(|(host, _)| {
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        inner.is_some() || !host.contains(':')
    });
    let (domain, given) = match with_port {
        Some((host, port)) => (host.trim_matches(['[', ']']), port),
        None => (&*entry, ""),
    };
    if domain.is_empty() || !(given.is_empty() || given == port.to_string()) {
        return false;
    }
    if let Ok(of_entry) = domain.parse::<IpAddr>() {
        return address == Some(of_entry.to_canonical());
    }
    let domain = if domain.starts_with("*.") { &domain[1..] } else { domain };
    match domain.strip_prefix('.') {
        // Hosts below the domain, without the domain.
        Some(_) => host.ends_with(domain),
        None => host == domain || host.ends_with(&format!(".{domain}")),
    }
}

/// Whether a network has this address.
fn is_in(address: IpAddr, net: IpAddr, length: u32) -> bool {
    let (differing, bits) = match (address, net) {
        (IpAddr::V4(address), IpAddr::V4(net)) => {
            (u128::from(u32::from(address) ^ u32::from(net)), 32)
        }
        (IpAddr::V6(address), IpAddr::V6(net)) => (u128::from(address) ^ u128::from(net), 128),
        _ => return false,
    };
    length <= bits && differing.checked_shr(bits - length).unwrap_or(0) == 0
}

/// A URL with its port, or else with this one.
fn with_port(url: &Uri, port: u16) -> Uri {
    if url.port().is_some() {
        return url.clone();
    }
    let mut parts = url.clone().into_parts();
    let authority = format!("{}:{port}", url.host().unwrap_or_default());
    parts.authority = authority.parse().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| url.clone())
}

impl Service<Uri> for Route {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Direct(http) => http.poll_ready(cx).map_err(Into::into),
            Self::Tunnel { connector, .. } => connector.poll_ready(cx).map_err(Into::into),
            Self::Socks { connector, .. } => connector.poll_ready(cx).map_err(Into::into),
        }
    }

    fn call(&mut self, server: Uri) -> Self::Future {
        // Proxies would get port 443 in each case.
        let port = if server.scheme_str() == Some("http") { 80 } else { 443 };
        let server = with_port(&server, port);
        let failed = |proxy: &Uri| {
            let proxy = proxy.clone();
            move |source: BoxError| Box::new(ProxyError { proxy, source }) as BoxError
        };
        match self {
            Self::Direct(http) => {
                let connecting = http.call(server);
                Box::pin(async move { connecting.await.map_err(Into::into) })
            }
            Self::Tunnel { proxy, connector } => {
                let (connecting, failed) = (connector.call(server), failed(proxy));
                Box::pin(async move { connecting.await.map_err(|error| failed(error.into())) })
            }
            Self::Socks { proxy, connector } => {
                let (connecting, failed) = (connector.call(server), failed(proxy));
                Box::pin(async move { connecting.await.map_err(|error| failed(error.into())) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxy_of(server: &str, given: Option<&str>, env: &[(&str, &str)]) -> Result<String, String> {
        let variable = |name: &str| {
            env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let given = given.map(|url| url.parse().unwrap());
        let server = server.parse().unwrap();
        Ok(match Route::new(HttpConnector::new(), &server, given.as_ref(), variable)? {
            Route::Direct(_) => "direct".to_owned(),
            Route::Tunnel { proxy, .. } | Route::Socks { proxy, .. } => proxy.to_string(),
        })
    }

    #[test]
    fn the_environment_chooses_the_proxy_as_in_go() {
        let https = ("HTTPS_PROXY", "http://user:secret@proxy:3128");
        let lower = ("https_proxy", "lower");
        let no = |list| ("NO_PROXY", list);
        for (server, env, expected) in [
            ("https://api.example:6443", vec![], "direct"),
            ("https://api.example:6443", vec![https], "http://proxy:3128/"),
            ("https://api.example:6443", vec![https, lower], "http://proxy:3128/"),
            ("https://api.example:6443", vec![("HTTPS_PROXY", ""), lower], "http://lower:80/"),
            ("http://api.example:8080", vec![https], "direct"),
            ("http://api.example:8080", vec![("http_proxy", "proxy:1")], "http://proxy:1/"),
            ("https://127.0.0.1:6443", vec![https], "direct"),
            ("https://[::1]:6443", vec![https], "direct"),
            ("https://localhost:6443", vec![https], "direct"),
            ("https://api.example:6443", vec![https, no("example")], "direct"),
            ("https://api.example:6443", vec![https, no("*.example")], "direct"),
            ("https://api.example:6443", vec![https, no(".example")], "direct"),
            ("https://API.example:6443", vec![https, no("Api.Example")], "direct"),
            ("https://example:6443", vec![https, no("*.example")], "http://proxy:3128/"),
            ("https://example:6443", vec![https, no(".example")], "http://proxy:3128/"),
            ("https://10.96.0.1:443", vec![https, no("*")], "direct"),
            ("https://[fd00::1]:443", vec![https, no("*")], "direct"),
            ("https://10.96.0.1:443", vec![https, no("10.97.0.0/16")], "http://proxy:3128/"),
            ("https://10.96.0.1:443", vec![https, no("0.0.0.0/0")], "direct"),
            ("https://10.96.0.1:443", vec![https, no("10.96.0.1:6443")], "http://proxy:3128/"),
            ("https://api.example:6443", vec![https, no("x, api.example:6443")], "direct"),
            ("https://api.example:6443", vec![https, no("api.example:443")], "http://proxy:3128/"),
            ("https://api.example", vec![https, no("api.example:443")], "direct"),
            ("https://api.example:6443", vec![https, no("ample")], "http://proxy:3128/"),
            ("https://api.example:6443", vec![https, no("*")], "direct"),
            ("https://10.96.0.1:443", vec![https, no("10.96.0.0/12")], "direct"),
            ("https://10.96.0.1:443", vec![https, ("no_proxy", "10.96.0.1")], "direct"),
            ("https://[fd00::1]:443", vec![https, no("[fd00::1]:443")], "direct"),
            ("https://[fd00::1]:443", vec![https, no("fd00::/16")], "direct"),
            ("https://[fd00::1]:443", vec![https, no("fd00::2")], "http://proxy:3128/"),
        ] {
            assert_eq!(proxy_of(server, None, &env).as_deref(), Ok(expected), "{server} {env:?}");
        }
    }

    #[test]
    fn the_proxy_of_a_kubeconfig_takes_precedence() {
        let env = [("HTTPS_PROXY", "http://other:1"), ("NO_PROXY", "*")];
        for (given, expected) in [
            ("http://proxy", "http://proxy:80/"),
            ("socks5://proxy", "socks5://proxy:1080/"),
            ("socks5://[2001:db8::1]", "socks5://[2001:db8::1]:1080/"),
        ] {
            for server in ["https://api.example:6443", "https://127.0.0.1:6443"] {
                assert_eq!(proxy_of(server, Some(given), &env).as_deref(), Ok(expected));
            }
        }
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_named_without_its_password() {
        let server = "https://api.example:6443";
        for (given, env, says) in [
            (Some("https://user:secret@proxy"), vec![], ["proxy-url", "its scheme is \"https\""]),
            (Some("ftp://user:secret@proxy"), vec![], ["proxy-url", "expected a URL such as"]),
            (None, vec![("https_proxy", "user:secret@ :")], ["https_proxy", "socks5://"]),
        ] {
            let error = proxy_of(server, given, &env).unwrap_err();
            assert!(says.iter().all(|says| error.contains(says)), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
