//! Which servers are trusted.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, SignatureVerificationAlgorithm, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, ExtendedKeyPurpose, RootCertStore, SignatureScheme,
};

use crate::certificate::{Certificate, PublicKey};
use crate::refusal::Unusable;
use crate::{Error, Pem, certificates};

/// The servers that a client accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Trust {
    /// Servers with a certificate of a CA that the system trusts.
    System,
    /// Servers with one of these certificates, in DER, or with one that these have signed.
    Certificates(Vec<Vec<u8>>),
    /// All servers. The connection is encrypted, but the server that answers can be any.
    Anyone,
}

impl Trust {
    /// Trusts the certificates of a CA file.
    ///
    /// # Errors
    /// The text is not PEM, has no certificate, or has none that can be read.
    pub fn of(ca: &Pem) -> Result<Self, Error> {
        let all = certificates(ca)?;
        // As in Go, certificates that cannot be read are skipped.
        let usable: Vec<_> = all
            .iter()
            .filter(|certificate| Certificate::read(certificate).is_some())
            .map(|certificate| certificate.to_vec())
            .collect();
        if usable.is_empty() {
            let reason = "it has no X.509 certificate".to_owned();
            return Err(Error::Damaged { name: ca.name.clone(), reason });
        }
        Ok(Self::Certificates(usable))
    }
}

/// The verifier of servers' certificates.
pub(crate) fn verifier(
    trust: Trust,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ServerCertVerifier>, Error> {
    let algorithms = provider.signature_verification_algorithms;
    let trusted: Vec<CertificateDer<'static>> = match trust {
        Trust::Anyone => return Ok(Arc::new(AcceptsAnyone(algorithms))),
        Trust::System => match rustls_native_certs::load_native_certs().certs {
            none if none.is_empty() => return Err(Error::NoSystemCas),
            certificates => certificates,
        },
        Trust::Certificates(certificates) => {
            certificates.into_iter().map(CertificateDer::from).collect()
        }
    };
    let mut roots = RootCertStore::empty();
    // The certificate of a server is trusted for this server only.
    let may_sign = |certificate: &&CertificateDer<'_>| {
        Certificate::read(certificate).is_some_and(|read| read.version < 3 || read.is_ca)
    };
    roots.add_parsable_certificates(trusted.iter().filter(may_sign).cloned());
    let roots = Arc::new(roots);
    let chains = if roots.is_empty() {
        None
    } else {
        let builder =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(provider));
        Some(builder.build().map_err(|error| Error::Setup(error.to_string()))?)
    };
    Ok(Arc::new(Verifier { trusted, roots, chains, algorithms }))
}

/// Accepts certificates that are trusted themselves, and chains to those.
///
/// **Source**: Go `x509.Certificate.Verify`, where `Roots.contains` precedes `buildChains`.
#[derive(Debug)]
struct Verifier {
    trusted: Vec<CertificateDer<'static>>,
    /// Those that can sign others.
    roots: Arc<RootCertStore>,
    /// `None` if no trusted certificate can sign others.
    chains: Option<Arc<WebPkiServerVerifier>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified = if self.trusted.contains(end_entity) {
            verify_itself(end_entity, server_name, now)
        } else if let Some(chains) = &self.chains {
            chains.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
        } else {
            Err(CertificateError::UnknownIssuer.into())
        };
        verified
            .or_else(|error| match &error {
                // Go does not mind whether a server's certificate is a CA, and takes any purpose.
                rustls::Error::InvalidCertificate(
                    CertificateError::Other(_) | CertificateError::InvalidPurposeContext { .. },
                ) if self.is_issued_directly(end_entity) => {
                    verify_itself(end_entity, server_name, now)
                }
                _ => Err(error),
            })
            .map_err(|error| Unusable::explain(error, end_entity, &self.trusted))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.algorithms)
            .map_err(|error| Unusable::explain(error, cert, &[]))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
            .map_err(|error| Unusable::explain(error, cert, &[]))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

impl Verifier {
    /// Whether a trusted CA has signed this certificate, without an intermediate. Constraints of
    /// names are not verified, so such a CA does not count.
    fn is_issued_directly(&self, certificate: &CertificateDer<'_>) -> bool {
        let Some(read) = Certificate::read(certificate) else { return false };
        let has_signed = |key: PublicKey<'_>| {
            let fits = |algorithm: &&&dyn SignatureVerificationAlgorithm| {
                algorithm.signature_alg_id().as_ref() == read.signature_algorithm
                    && algorithm.public_key_alg_id().as_ref() == key.algorithm
            };
            let verifies = |algorithm: &&dyn SignatureVerificationAlgorithm| {
                algorithm.verify_signature(key.bits, read.signed, read.signature).is_ok()
            };
            self.algorithms.all.iter().filter(fits).any(verifies)
        };
        self.roots.roots.iter().any(|root| {
            root.name_constraints.is_none()
                && root.subject.as_ref() == read.issuer
                && PublicKey::of_content(&root.subject_public_key_info).is_some_and(has_signed)
        })
    }
}

/// Verifies a certificate that is trusted, or issued by a trusted CA: its period, its purpose and
/// its names. It may be a CA.
fn verify_itself(
    end_entity: &CertificateDer<'_>,
    server_name: &ServerName<'_>,
    now: UnixTime,
) -> Result<ServerCertVerified, rustls::Error> {
    let parsed = ParsedCertificate::try_from(end_entity)?;
    let certificate = Certificate::read(end_entity).ok_or(CertificateError::BadEncoding)?;
    let Certificate { not_before, not_after, .. } = certificate;
    if now < not_before {
        return Err(CertificateError::NotValidYetContext { time: now, not_before }.into());
    }
    if now > not_after {
        return Err(CertificateError::ExpiredContext { time: now, not_after }.into());
    }
    if !certificate.is_for_servers {
        return Err(CertificateError::InvalidPurposeContext {
            required: ExtendedKeyPurpose::ServerAuth,
            presented: Vec::new(),
        }
        .into());
    }
    verify_server_name(&parsed, server_name)?;
    Ok(ServerCertVerified::assertion())
}

/// Accepts every server. Signatures prove nothing here, because a server can make the certificate
/// that fits. So certificates of any form are accepted, as in Go.
#[derive(Debug)]
struct AcceptsAnyone(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AcceptsAnyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
