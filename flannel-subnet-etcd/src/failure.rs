//! Why a request got no answer, and what can be done about it.

use etcd_client::Error;
use tonic::Code;

use crate::options::EtcdOptions;

/// Why one attempt failed.
#[derive(Debug, Clone)]
pub(crate) struct Trouble {
    pub(crate) cure: Cure,
    /// What happened, for people.
    pub(crate) text: String,
}

/// What may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cure {
    /// Another endpoint, or time.
    Time,
    /// A new token, on a new connection.
    Connection,
    /// Another endpoint, but no waiting: this one and we do not accept each other.
    Endpoint,
    /// Nothing but people.
    People,
}

impl Trouble {
    pub(crate) fn passing(text: impl Into<String>) -> Self {
        Self { cure: Cure::Time, text: text.into() }
    }

    pub(crate) fn token(text: impl Into<String>) -> Self {
        Self { cure: Cure::Connection, text: text.into() }
    }

    pub(crate) fn lasting(text: impl Into<String>) -> Self {
        Self { cure: Cure::People, text: text.into() }
    }

    /// The connection was there and was closed.
    pub(crate) fn is_hanging_up(&self) -> bool {
        let signs = ["connection closed", "broken pipe", "reset"];
        self.cure == Cure::Time && signs.iter().any(|sign| self.text.contains(sign))
    }

    /// Names who would be allowed, and to what.
    pub(crate) fn explained(mut self, key: &str, options: &EtcdOptions) -> Self {
        let user = match &options.username {
            Some(user) => format!("the user {user:?}"),
            None => "whoever gives no user name".to_owned(),
        };
        if self.text.contains("permission denied") {
            self.text = format!("{user} has no permission for the key {key}: {}", self.text);
        } else if self.text.contains("authentication failed") {
            self.text = format!("it does not accept {user} with this password: {}", self.text);
        } else if self.text.contains("user name is empty") {
            // With a user name: authentication was enabled after this connection was made.
            if options.username.is_some() {
                self.cure = Cure::Connection;
            }
            self.text = format!("it wants a user name and a password: {}", self.text);
        }
        self
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        match &error {
            Error::GRpcStatus(status) => {
                let (chain, last) = causes(status);
                if let Some(text) = certificates(&chain) {
                    return Self { cure: Cure::Endpoint, text };
                }
                Self { cure: cure(status.code(), status.message()), text: last }
            }
            Error::TransportError(error) => {
                // Nothing was sent: the client does not take our certificate or its key.
                let (chain, last) = causes(error);
                let key =
                    chain.contains("KeyMismatch").then_some("the key is not the certificate's: ");
                Self::lasting(format!("{}{last}", key.unwrap_or_default()))
            }
            Error::InvalidArgs(_) | Error::InvalidUri(_) => Self::lasting(error.to_string()),
            _ => Self::passing(error.to_string()),
        }
    }
}

/// What status is worth another attempt. etcd uses `Unknown` and `Internal` for what its own members say
/// to each other.
fn cure(code: Code, message: &str) -> Cure {
    let says = |texts: &[&str]| texts.iter().any(|text| message.contains(text));
    match code {
        // What one member says of our user, all say.
        _ if says(&[
            "etcdserver: permission denied",
            "authentication failed",
            "user name is empty",
        ]) =>
        {
            Cure::People
        }
        // A member that will be able to later.
        _ if says(&["learner", "not capable"]) => Cure::Time,
        Code::Unauthenticated => Cure::Connection,
        // Users or roles were changed since the token was given.
        Code::InvalidArgument if message.contains("auth store is old") => Cure::Connection,
        Code::InvalidArgument
        | Code::PermissionDenied
        | Code::Unimplemented
        | Code::FailedPrecondition
        | Code::AlreadyExists
        | Code::NotFound => Cure::Endpoint,
        _ => Cure::Time,
    }
}

/// All causes in one text, and the innermost.
fn causes(error: &(dyn std::error::Error + 'static)) -> (String, String) {
    let status = error.downcast_ref::<tonic::Status>();
    let mut last = status.map_or_else(|| error.to_string(), |status| status.message().to_owned());
    let mut chain = last.clone();
    let mut next = error.source();
    while let Some(cause) = next {
        last = cause.to_string();
        chain = format!("{chain}: {last}");
        next = cause.source();
    }
    (chain, last)
}

/// What TLS says, in words that tell whose certificate is meant.
fn certificates(chain: &str) -> Option<String> {
    let after = |what: &str| chain.find(what).map(|at| &chain[at..]);
    if let Some(said) = after("invalid peer certificate") {
        let told = [
            (
                "UnknownIssuer",
                "its certificate was issued by none of those whom we trust (is the cafile right?)",
            ),
            ("xpired", "its certificate has expired, or our clock is wrong"),
            ("not valid yet", "its certificate is not valid yet, or our clock is wrong"),
            ("not valid for name", "its certificate is for another name"),
        ];
        let told = told.iter().find(|(word, _)| said.contains(word)).map(|(_, told)| *told);
        return Some(format!("{}: {said}", told.unwrap_or("its certificate is not acceptable")));
    }
    if let Some(said) = after("received fatal alert") {
        let told = if said.contains("xpired") {
            "it says that our certificate has expired"
        } else if said.contains("ertificateRequired") {
            "it wants a certificate of ours, and we have none (certfile and keyfile)"
        } else {
            "it does not accept our certificate, or our TLS"
        };
        return Some(format!("{told}: {said}"));
    }
    after("InvalidContentType")
        .map(|said| format!("it does not speak TLS; perhaps http:// is right: {said}"))
}

/// etcd answered with an error that contains `text`.
pub(crate) fn says(error: &Error, text: &str) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_time_can_mend_is_told_from_what_it_cannot() {
        for (code, message, expected) in [
            (Code::Unavailable, "etcdserver: leader changed", Cure::Time),
            (Code::Unavailable, "etcdserver: no leader", Cure::Time),
            (Code::DeadlineExceeded, "", Cure::Time),
            (Code::ResourceExhausted, "etcdserver: too many requests", Cure::Time),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Cure::Connection),
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", Cure::Connection),
            (Code::InvalidArgument, "etcdserver: authentication failed", Cure::People),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner", Cure::Time),
            (Code::FailedPrecondition, "etcdserver: not capable", Cure::Time),
            (
                Code::Unimplemented,
                "grpc-status header missing, mapped from HTTP status code 404",
                Cure::Endpoint,
            ),
            (Code::PermissionDenied, "mapped from HTTP status code 403", Cure::Endpoint),
            (Code::PermissionDenied, "etcdserver: permission denied", Cure::People),
        ] {
            let trouble = Trouble::from(Error::GRpcStatus(tonic::Status::new(code, message)));
            assert_eq!((trouble.cure, trouble.text.as_str()), (expected, message));
        }
    }

    #[test]
    fn troubles_with_certificates_say_whose() {
        for (chain, says) in [
            ("tcp: invalid peer certificate: UnknownIssuer", "none of those whom we trust"),
            ("invalid peer certificate: Expired", "has expired"),
            ("invalid peer certificate: certificate not valid for name \"a\"", "another name"),
            (
                "invalid peer certificate: certificate not valid yet: verification time",
                "our clock is wrong",
            ),
            ("received fatal alert: CertificateRequired", "wants a certificate"),
            ("received fatal alert: BadCertificate", "does not accept our certificate"),
            ("received corrupt message of type InvalidContentType", "http://"),
        ] {
            let text = certificates(chain).unwrap();
            assert!(text.contains(says), "{text}");
        }
        assert_eq!(certificates("tcp connect error: Connection refused"), None);
    }
}
