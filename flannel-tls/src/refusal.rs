//! Why a handshake failed, and which side refused the other.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{AlertDescription, CertificateError, Error, OtherError};

use crate::KEYS;
use crate::certificate::Certificate;

/// Why a handshake failed. `Display` says what is wrong and what is expected.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Refusal {
    /// This node does not accept the server's certificate.
    Server(CertificateError),
    /// The server, or a proxy before it, does not accept this node's certificate, or requires one.
    Client(AlertDescription),
    /// The server aborts the handshake for another reason.
    Handshake(AlertDescription),
    /// The server does not use TLS.
    NotTls,
}

impl Refusal {
    /// Looks for an error of TLS in an error and its sources. `None` if there is none, or if it
    /// refuses neither side.
    pub fn find(error: &(dyn StdError + 'static)) -> Option<Self> {
        let mut errors = std::iter::successors(Some(error), |&error| {
            // The error inside an I/O error is not its source.
            let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
            inner.map(|inner| inner as _).or_else(|| error.source())
        });
        match errors.find_map(|error| error.downcast_ref::<Error>())? {
            Error::InvalidCertificate(error) => Some(Self::Server(error.clone())),
            Error::AlertReceived(alert) => Self::of_alert(*alert),
            Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType) => Some(Self::NotTls),
            _ => None,
        }
    }

    /// Looks for an alert of the server in the text of an error. HTTP/2 keeps only the text of an
    /// alert that comes after the handshake, as alerts about certificates do in TLS 1.3.
    pub fn find_in_text(text: &str) -> Option<Self> {
        let is_in =
            |alert: &&AlertDescription| text.contains(&Error::AlertReceived(**alert).to_string());
        let alert = ABOUT_CLIENTS.iter().chain(&ABOUT_HANDSHAKES).find(is_in)?;
        Self::of_alert(*alert)
    }

    fn of_alert(alert: AlertDescription) -> Option<Self> {
        if ABOUT_CLIENTS.contains(&alert) {
            Some(Self::Client(alert))
        } else if ABOUT_HANDSHAKES.contains(&alert) {
            Some(Self::Handshake(alert))
        } else {
            None
        }
    }
}

/// The alerts about the client's certificate.
const ABOUT_CLIENTS: [AlertDescription; 9] = [
    AlertDescription::AccessDenied,
    AlertDescription::BadCertificate,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateRequired,
    AlertDescription::CertificateRevoked,
    AlertDescription::CertificateUnknown,
    AlertDescription::NoCertificate,
    AlertDescription::UnknownCA,
    AlertDescription::UnsupportedCertificate,
];

/// The alerts about other terms of the handshake.
const ABOUT_HANDSHAKES: [AlertDescription; 9] = [
    AlertDescription::DecryptError,
    AlertDescription::HandshakeFailure,
    AlertDescription::IllegalParameter,
    AlertDescription::InsufficientSecurity,
    AlertDescription::MissingExtension,
    AlertDescription::NoApplicationProtocol,
    AlertDescription::ProtocolVersion,
    AlertDescription::UnrecognisedName,
    AlertDescription::UnsupportedExtension,
];

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Server(error) => f.write_str(&of_server(error)),
            Self::Client(AlertDescription::CertificateExpired) => {
                f.write_str("it reports that our client certificate has expired")
            }
            Self::Client(AlertDescription::CertificateRequired) => {
                f.write_str("it requires a client certificate, and none is set")
            }
            Self::Client(_) => f.write_str("it does not accept our client certificate"),
            Self::Handshake(_) => write!(
                f,
                "it aborts the TLS handshake for a reason other than a certificate: expected a \
                 server with TLS 1.3, or 1.2 with ECDHE, under this name, whose key is {KEYS}; in \
                 TLS 1.2 a missing client certificate has the same effect"
            ),
            Self::NotTls => f.write_str("it does not use TLS: http:// may be the right scheme"),
        }
    }
}

/// What is wrong with a server's certificate.
fn of_server(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer => {
            "it has a certificate of a CA that this node does not trust: expected that CA, or this \
             certificate itself, in the CA file"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired, or the clock of this node is wrong"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet, or the clock of this node is wrong"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "its certificate is for another name: expected this name or address among its \
             subjectAltNames"
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its certificate is not for servers: expected serverAuth in its extendedKeyUsage"
        }
        CertificateError::BadSignature => {
            "another CA of the same name has signed its certificate: expected that CA in the CA \
             file, perhaps because it was made again"
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            return format!(
                "the key of its certificate, or of its CA, cannot be used: expected {KEYS}"
            );
        }
        CertificateError::Other(other) => match other.0.downcast_ref::<Unusable>() {
            Some(unusable) => return unusable.to_string(),
            None => match other.0.downcast_ref::<Unsuitable>() {
                Some(unsuitable) => return unsuitable.to_string(),
                None => "its certificate is not accepted",
            },
        },
        _ => "its certificate is not accepted",
    }
    .to_owned()
}

/// A server's certificate that `webpki` does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unusable {
    #[error(
        "its certificate is a CA itself: expected this certificate in the CA file, or one with \
         CA:FALSE"
    )]
    Authority,
    #[error(
        "its certificate is X.509 v1, which has no names: expected X.509 v3 with subjectAltName"
    )]
    Version1,
    #[error("the key of its certificate, or of its CA, has too few bits: expected {KEYS}")]
    SmallKey,
}

impl Unusable {
    /// The error, with the fact about the server's certificate or about a `trusted` one that causes
    /// it, if the error does not say it.
    pub(crate) fn explain(
        error: Error,
        certificate: &CertificateDer<'_>,
        trusted: &[CertificateDer<'_>],
    ) -> Error {
        let Error::InvalidCertificate(reason) = &error else { return error };
        let read = Certificate::read(certificate);
        let is_small = |read: &Certificate<'_>| read.key.is_small_rsa();
        let unusable = match (reason, &read) {
            (CertificateError::Other(_), Some(read)) if read.version < 3 => Self::Version1,
            // Without a root that may sign, `webpki` does not run.
            (CertificateError::Other(_) | CertificateError::UnknownIssuer, Some(read))
                if read.is_ca =>
            {
                Self::Authority
            }
            (CertificateError::BadSignature, read)
                if read.as_ref().is_some_and(is_small)
                    || trusted
                        .iter()
                        .any(|other| Certificate::read(other).as_ref().is_some_and(is_small)) =>
            {
                Self::SmallKey
            }
            _ => return error,
        };
        CertificateError::Other(OtherError(Arc::new(unusable))).into()
    }
}

/// Why the CA file has the CA of a server's certificate, and that CA does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unsuitable {
    #[error(
        "the certificate of its CA in the CA file has expired, or the clock of this node is wrong"
    )]
    Expired,
    #[error(
        "the certificate of its CA in the CA file is not valid yet, or the clock of this node is \
         wrong"
    )]
    NotValidYet,
    #[error(
        "the certificate of its CA in the CA file may not sign others: expected keyCertSign in its \
         keyUsage"
    )]
    KeyUsage,
    #[error(
        "the certificate of its CA in the CA file is not for servers: expected serverAuth in its \
         extendedKeyUsage, or none"
    )]
    Purpose,
    #[error(
        "the certificate of its CA in the CA file allows at most {most} intermediates (pathlen)"
    )]
    PathLength { most: usize },
}

impl Unsuitable {
    /// The error with the reason why the trusted certificate that has the name of an issuer does
    /// not count. `None` if there is no such certificate, or if `error` says what is wrong.
    pub(crate) fn find(
        error: &Error,
        presented: &[&CertificateDer<'_>],
        trusted: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Option<Error> {
        let Error::InvalidCertificate(reason) = error else { return None };
        if !matches!(reason, CertificateError::UnknownIssuer | CertificateError::Other(_)) {
            return None;
        }
        let issuers: Vec<_> =
            presented.iter().filter_map(|der| Some(Certificate::read(der)?.issuer)).collect();
        let unsuitable = trusted
            .iter()
            .filter_map(|der| Certificate::read(der))
            .filter(|root| (root.version < 3 || root.is_ca) && issuers.contains(&root.subject))
            .find_map(|root| Self::of(&root, presented.len() - 1, now))?;
        Some(CertificateError::Other(OtherError(Arc::new(unsuitable))).into())
    }

    fn of(root: &Certificate<'_>, intermediates: usize, now: UnixTime) -> Option<Self> {
        if now > root.not_after {
            Some(Self::Expired)
        } else if now < root.not_before {
            Some(Self::NotValidYet)
        } else if !root.key_may_sign {
            Some(Self::KeyUsage)
        } else if !root.is_for_servers {
            Some(Self::Purpose)
        } else {
            let most = root.path_length.filter(|most| *most < intermediates)?;
            Some(Self::PathLength { most })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alert_is_found_in_a_text() {
        for alert in ABOUT_CLIENTS {
            let text = format!("connection error: {}", Error::AlertReceived(alert));
            assert_eq!(Refusal::find_in_text(&text), Some(Refusal::Client(alert)));
        }
        for alert in ABOUT_HANDSHAKES {
            let text = format!("connection error: {}", Error::AlertReceived(alert));
            assert_eq!(Refusal::find_in_text(&text), Some(Refusal::Handshake(alert)));
        }
        let other = Error::AlertReceived(AlertDescription::InternalError).to_string();
        for text in [&*other, "BadCertificate", ""] {
            assert_eq!(Refusal::find_in_text(text), None);
        }
    }
}
