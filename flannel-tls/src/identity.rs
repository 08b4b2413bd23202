//! The client's certificate and key. The server judges the certificate.

use std::fmt;
use std::sync::Arc;

use rustls::client::ResolvesClientCert;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::sign::{CertifiedKey, SigningKey, SingleCertAndKey};

use crate::certificate::{Certificate, PublicKey};
use crate::{Error, Pem, certificates, provider};

/// A client's certificate, with its chain, and its key. `Debug` shows neither.
#[derive(Clone)]
pub struct Identity(Arc<SingleCertAndKey>);

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

impl Identity {
    /// The first certificate, which may be of any version, with the others as its chain, and the
    /// first key. Both texts may be the same.
    ///
    /// # Errors
    /// A text has no certificate or key, `ring` does not support the key, or the key belongs to
    /// another certificate.
    ///
    /// **Source**: Go `tls.X509KeyPair`.
    pub fn of(certificate: &Pem, key: &Pem) -> Result<Self, Error> {
        let chain = certificates(certificate)?;
        let signing = signing_key(key)?;
        let name = &certificate.name;
        let client = Certificate::read(&chain[0]).ok_or_else(|| Error::Damaged {
            name: name.clone(),
            reason: "its first certificate is not X.509".to_owned(),
        })?;
        let public = signing.public_key();
        let public = public.as_ref().and_then(|public| PublicKey::of_der(public.as_ref()));
        if public.is_some_and(|public| public.bits != client.key.bits) {
            return Err(Error::OtherKey { certificate: name.clone(), key: key.name.clone() });
        }
        let certified = CertifiedKey::new(chain, signing);
        Ok(Self(Arc::new(SingleCertAndKey::from(certified))))
    }

    pub(crate) fn resolver(&self) -> Arc<dyn ResolvesClientCert> {
        self.0.clone()
    }
}

fn signing_key(key: &Pem) -> Result<Arc<dyn SigningKey>, Error> {
    let name = key.name.clone();
    let der = match PrivateKeyDer::from_pem_slice(&key.text) {
        Ok(der) => der,
        Err(_) if String::from_utf8_lossy(&key.text).contains("ENCRYPTED") => {
            return Err(Error::EncryptedKey { name });
        }
        Err(PemError::NoItemsFound) => return Err(Error::NoKey { name }),
        Err(error) => return Err(Error::Damaged { name, reason: error.to_string() }),
    };
    provider()
        .key_provider
        .load_private_key(der)
        .map_err(|error| Error::UnsupportedKey { name, reason: error.to_string() })
}
