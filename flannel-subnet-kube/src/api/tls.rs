//! TLS with the certificates of a kubeconfig or of the system.

use base64::Engine;
use flannel_tls::{Identity, Pem, Trust, client_config};
use kube::Config;
use rustls::ClientConfig;
use secrecy::ExposeSecret;

/// A client's certificate, and how messages call it.
#[derive(Clone)]
pub(super) struct Client {
    pub(super) identity: Identity,
    pub(super) name: String,
}

impl Client {
    pub(super) fn of(certificate: &Pem, key: &Pem) -> Result<Self, String> {
        let identity = Identity::of(certificate, key).map_err(|error| error.to_string())?;
        Ok(Self { identity, name: certificate.name.clone() })
    }

    /// The client certificate of the user in a kubeconfig.
    pub(super) fn of_user(config: &Config) -> Result<Option<Self>, String> {
        let user = &config.auth_info;
        let certificate = data_or_file(
            "client-certificate",
            user.client_certificate_data.as_deref(),
            user.client_certificate.as_deref(),
        )?;
        let key_data = user.client_key_data.as_ref().map(ExposeSecret::expose_secret);
        let key = data_or_file("client-key", key_data, user.client_key.as_deref())?;
        match (certificate, key) {
            (None, None) => Ok(None),
            (Some(certificate), Some(key)) => Self::of(&certificate, &key).map(Some),
            (Some(_), None) => Err("there is a client-certificate, but no client-key".to_owned()),
            (None, Some(_)) => Err("there is a client-key, but no client-certificate".to_owned()),
        }
    }
}

/// The configuration with the trusted CAs and the client certificate.
pub(super) fn tls(config: &Config, client: Option<&Client>) -> Result<ClientConfig, String> {
    let trust = match &config.root_cert {
        _ if config.accept_invalid_certs => Trust::Anyone,
        Some(given) if given.is_empty() => {
            return Err("the certificate-authority contains no PEM certificate".to_owned());
        }
        Some(given) => Trust::Certificates(given.clone()),
        None if config.cluster_url.scheme_str() == Some("https") => Trust::System,
        // Without TLS nothing is trusted.
        None => Trust::Certificates(Vec::new()),
    };
    client_config(trust, client.map(|client| &client.identity)).map_err(|error| error.to_string())
}

/// The data in a kubeconfig, or in the file that it references.
fn data_or_file(what: &str, data: Option<&str>, file: Option<&str>) -> Result<Option<Pem>, String> {
    match (data, file) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD
            .decode(data.trim())
            .map(|text| Some(Pem { name: format!("{what}-data"), text }))
            .map_err(|error| format!("{what}-data is not base64: {error}")),
        (None, Some(file)) => {
            let name = format!("{what} {file}");
            match std::fs::read(file) {
                Ok(text) => Ok(Some(Pem { name, text })),
                Err(error) => Err(format!("{name}: {error}")),
            }
        }
        (None, None) => Ok(None),
    }
}
