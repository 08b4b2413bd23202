//! Which servers are trusted.

use std::iter;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{
    CryptoProvider, WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{
    CertificateDer, ServerName, SignatureVerificationAlgorithm, TrustAnchor, UnixTime,
};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, DigitallySignedStruct, ExtendedKeyPurpose, RootCertStore, SignatureScheme,
};

use crate::certificate::{Certificate, PublicKey};
use crate::refusal::{Unsuitable, Unusable};
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
    let roots = trusted.iter().filter_map(Root::of).collect();
    Ok(Arc::new(Verifier { trusted, roots, provider: Arc::clone(provider), algorithms }))
}

/// A trusted certificate that can sign others, in its period.
#[derive(Debug)]
struct Root {
    anchor: TrustAnchor<'static>,
    not_before: UnixTime,
    not_after: UnixTime,
    /// The largest number of intermediates, or `None` if there is no limit.
    path_length: Option<usize>,
}

impl Root {
    /// `None` if it cannot sign others. The certificate of a server is trusted for this server
    /// only.
    fn of(certificate: &CertificateDer<'static>) -> Option<Self> {
        let read = Certificate::read(certificate).filter(Certificate::may_sign)?;
        let mut store = RootCertStore::empty();
        store.add(certificate.clone()).ok()?;
        Some(Self {
            anchor: store.roots.pop()?,
            not_before: read.not_before,
            not_after: read.not_after,
            path_length: read.path_length,
        })
    }

    fn is_valid(&self, now: UnixTime) -> bool {
        (self.not_before..=self.not_after).contains(&now)
    }

    fn allows(&self, intermediates: usize) -> bool {
        self.path_length.is_none_or(|most| intermediates <= most)
    }
}

/// Accepts certificates that are trusted themselves, and chains to those.
///
/// **Source**: Go `x509.Certificate.Verify`, where `Roots.contains` precedes `buildChains`.
#[derive(Debug)]
struct Verifier {
    trusted: Vec<CertificateDer<'static>>,
    /// Those that can sign others.
    roots: Vec<Root>,
    provider: Arc<CryptoProvider>,
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
        } else {
            self.verify_chain(end_entity, intermediates, server_name, ocsp_response, now)
        };
        verified
            .or_else(|error| match &error {
                // Go does not mind whether a server's certificate is a CA, and takes any purpose.
                rustls::Error::InvalidCertificate(
                    CertificateError::Other(_) | CertificateError::InvalidPurposeContext { .. },
                ) if self.is_issued_directly(end_entity, now) => {
                    verify_itself(end_entity, server_name, now)
                }
                _ => Err(error),
            })
            .map_err(|error| {
                let presented: Vec<_> = iter::once(end_entity).chain(intermediates).collect();
                Unsuitable::find(&error, &presented, &self.trusted, now)
                    .unwrap_or_else(|| Unusable::explain(error, end_entity, &self.trusted))
            })
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
    /// Verifies a chain to a root that is valid now. `webpki` does not verify the period and the
    /// length of the path of a root, and no usage of keys.
    fn verify_chain(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // Servers may send their root too, which is no intermediate.
        let signs = |der: &&CertificateDer<'_>| {
            Certificate::read(der).is_some_and(|read| read.key_may_sign)
                && !self.trusted.contains(der)
        };
        let intermediates: Vec<_> = intermediates.iter().filter(signs).cloned().collect();
        // A root with a limit can only have the first ones below it.
        let mut lengths: Vec<_> = self.roots.iter().filter_map(|root| root.path_length).collect();
        lengths.retain(|length| *length < intermediates.len());
        lengths.push(intermediates.len());
        lengths.sort_unstable();
        lengths.dedup();
        let mut outcome = Err(CertificateError::UnknownIssuer.into());
        for length in lengths.into_iter().rev() {
            let fits = |root: &&Root| root.is_valid(now) && root.allows(length);
            let roots: RootCertStore =
                self.roots.iter().filter(fits).map(|root| root.anchor.clone()).collect();
            if roots.is_empty() {
                continue;
            }
            let chains = WebPkiServerVerifier::builder_with_provider(
                Arc::new(roots),
                Arc::clone(&self.provider),
            )
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?;
            let below = &intermediates[..length];
            outcome = chains.verify_server_cert(end_entity, below, server_name, ocsp_response, now);
            if !is_of_unknown_issuer(&outcome) {
                break;
            }
        }
        outcome
    }

    /// Whether a trusted CA has signed this certificate, without an intermediate. Constraints of
    /// names are not verified, so such a CA does not count.
    fn is_issued_directly(&self, certificate: &CertificateDer<'_>, now: UnixTime) -> bool {
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
        let valid = self.roots.iter().filter(|root| root.is_valid(now));
        valid.map(|root| &root.anchor).any(|root| {
            root.name_constraints.is_none()
                && root.subject.as_ref() == read.issuer
                && PublicKey::of_content(&root.subject_public_key_info).is_some_and(has_signed)
        })
    }
}

fn is_of_unknown_issuer(outcome: &Result<ServerCertVerified, rustls::Error>) -> bool {
    let unknown = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
    outcome.as_ref().is_err_and(|error| *error == unknown)
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
