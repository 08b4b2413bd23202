#![doc = include_str!("../README.md")]

mod certificate;
mod identity;
mod refusal;
mod verifier;

use std::fmt;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

pub use identity::Identity;
pub use refusal::Refusal;
pub use verifier::Trust;

/// The kinds of keys that `ring` supports, for messages.
const KEYS: &str = "RSA with 2048 bits or more, ECDSA with P-256 or P-384, or Ed25519";

/// PEM text, and the name by which messages call it, such as the path of its file. `Debug` does not
/// show the text, which may be a key.
#[derive(Clone)]
pub struct Pem {
    /// The name, such as `/etc/ssl/etcd/ca.pem`.
    pub name: String,
    /// The text. It may have several sections, and other text between them.
    pub text: Vec<u8>,
}

impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pem").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Why certificates or a key cannot be used. Each text begins with the name of the PEM text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no certificate.
    #[error("{name} contains no PEM certificate")]
    NoCertificate {
        /// The name of the PEM text.
        name: String,
    },
    /// There is no key.
    #[error("{name} contains no PEM key")]
    NoKey {
        /// The name of the PEM text.
        name: String,
    },
    /// The key is encrypted.
    #[error("{name} contains an encrypted key: expected one without a passphrase")]
    EncryptedKey {
        /// The name of the PEM text.
        name: String,
    },
    /// The text is not PEM, or its content is not a certificate or a key.
    #[error("{name} is damaged: {reason}")]
    Damaged {
        /// The name of the PEM text.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The key is of a kind that is not supported.
    #[error("the key in {name} cannot be used ({reason}): expected {KEYS}")]
    UnsupportedKey {
        /// The name of the PEM text.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// Certificate and key do not belong together.
    #[error("the key in {key} does not belong to the client certificate in {certificate}")]
    OtherKey {
        /// The name of the certificate's PEM text.
        certificate: String,
        /// The name of the key's PEM text.
        key: String,
    },
    /// Neither a CA nor a CA of the system is known.
    #[error("this system has no CA certificates: expected the CA of the server")]
    NoSystemCas,
    /// `rustls` cannot be set up.
    #[error("TLS cannot be used: {0}")]
    Setup(String),
}

/// The configuration of a client that accepts servers as `trust` says. It presents `identity` to
/// servers that ask for a certificate. It supports TLS 1.2 and 1.3.
///
/// # Errors
/// The CAs of the system are needed, and there are none.
///
/// # Blocking
/// [`Trust::System`] reads the files of the system.
pub fn client_config(trust: Trust, identity: Option<&Identity>) -> Result<ClientConfig, Error> {
    let provider = Arc::new(ring::default_provider());
    let verifier = verifier::verifier(trust, &provider)?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Setup(error.to_string()))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match identity {
        Some(identity) => builder.with_client_cert_resolver(identity.resolver()),
        None => builder.with_no_client_auth(),
    };
    // A resumed session would not verify the certificate again, which may have expired.
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// All certificates of a PEM text, at least one.
fn certificates(pem: &Pem) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(&pem.text)
        .collect::<Result<_, _>>()
        .map_err(|error| Error::Damaged { name: pem.name.clone(), reason: error.to_string() })?;
    if all.is_empty() {
        return Err(Error::NoCertificate { name: pem.name.clone() });
    }
    Ok(all)
}

/// The algorithms of this crate.
fn provider() -> CryptoProvider {
    ring::default_provider()
}
