//! Whose certificate a client of the test server shows. The handshake takes any, and requests of
//! those whom nobody knows are refused, which is how a real API server does it, unless the test
//! wants the handshake to fail.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::{Shared, lock};

/// Any client that has the key of its certificate, or has none; only those who are known, if the
/// server refuses by alert.
#[derive(Debug)]
pub(crate) struct Clients(pub(crate) Arc<Shared>);

fn algorithms() -> WebPkiSupportedAlgorithms {
    rustls::crypto::ring::default_provider().signature_verification_algorithms
}

impl ClientCertVerifier for Clients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn client_auth_mandatory(&self) -> bool {
        lock(&self.0.faults).by_alert
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let faults = lock(&self.0.faults);
        match &faults.clients {
            Some(clients) if faults.by_alert => {
                clients.verify_client_cert(certificate, others, now)
            }
            None if faults.by_alert => Err(CertificateError::UnknownIssuer.into()),
            _ => Ok(ClientCertVerified::assertion()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Whether a client is known by its certificates.
pub(crate) fn known(by: &Arc<dyn ClientCertVerifier>, client: &[CertificateDer<'_>]) -> bool {
    client.split_first().is_some_and(|(certificate, others)| {
        by.verify_client_cert(certificate, others, UnixTime::now()).is_ok()
    })
}
