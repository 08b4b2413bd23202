//! The client certificates of the test server. Like a real API server, it accepts any certificate
//! in the handshake and refuses the requests of unknown clients. A test can make the handshake fail
//! instead.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};

use super::{Shared, lock};

/// Accepts clients with the key of their certificate, or without a certificate. If the server
/// refuses by alert, it accepts only known clients.
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

/// Whether a client with these certificates is known.
pub(crate) fn is_known(
    verifier: &Arc<dyn ClientCertVerifier>,
    client: &[CertificateDer<'_>],
) -> bool {
    client.split_first().is_some_and(|(certificate, others)| {
        verifier.verify_client_cert(certificate, others, UnixTime::now()).is_ok()
    })
}
