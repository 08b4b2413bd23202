//! TLS with the certificates of a kubeconfig or of the system.

use std::sync::Arc;

use base64::Engine;
use kube::Config;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use secrecy::ExposeSecret;

use super::chain;

/// The trusted CAs, and the client certificate.
pub(super) fn tls(config: &Config) -> Result<ClientConfig, String> {
    let mut roots = RootCertStore::empty();
    match &config.root_cert {
        Some(given) => {
            for certificate in given {
                roots
                    .add(CertificateDer::from(certificate.clone()))
                    .map_err(|error| format!("the certificate of a CA cannot be used: {error}"))?;
            }
        }
        // Without CAs, the error of the first request says that no CA is trusted.
        None if config.cluster_url.scheme_str() == Some("https") => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        None => {}
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| chain(&error))?
        .with_root_certificates(roots);
    let user = &config.auth_info;
    let certificate = data_or_file(
        "client-certificate",
        user.client_certificate_data.as_deref(),
        user.client_certificate.as_deref(),
    )?;
    let key_data = user.client_key_data.as_ref().map(ExposeSecret::expose_secret);
    let key = data_or_file("client-key", key_data, user.client_key.as_deref())?;
    match (certificate, key) {
        (None, None) => Ok(builder.with_no_client_auth()),
        (Some(certificate), Some(key)) => {
            let certificates = CertificateDer::pem_slice_iter(&certificate)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| format!("client-certificate: {error}"))?;
            let key = PrivateKeyDer::from_pem_slice(&key)
                .map_err(|error| format!("client-key: {error}"))?;
            builder
                .with_client_auth_cert(certificates, key)
                .map_err(|error| format!("client-certificate and client-key do not fit: {error}"))
        }
        (Some(_), None) => Err("there is a client-certificate, but no client-key".to_owned()),
        (None, Some(_)) => Err("there is a client-key, but no client-certificate".to_owned()),
    }
}

/// The data in a kubeconfig, or in the file that it references.
fn data_or_file(
    what: &str,
    data: Option<&str>,
    file: Option<&str>,
) -> Result<Option<Vec<u8>>, String> {
    match (data, file) {
        (Some(data), _) => base64::engine::general_purpose::STANDARD
            .decode(data.trim())
            .map(Some)
            .map_err(|error| format!("{what}-data is not base64: {error}")),
        (None, Some(file)) => {
            std::fs::read(file).map(Some).map_err(|error| format!("{what} {file}: {error}"))
        }
        (None, None) => Ok(None),
    }
}
