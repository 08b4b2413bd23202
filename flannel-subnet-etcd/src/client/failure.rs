//! The reason for a missing answer, and when the request can be repeated.

use etcd_client::Error;
use flannel_core::subnet::StoreFailure;
use flannel_tls::Refusal;
use tonic::Code;

use crate::options::EtcdOptions;

/// The failure of one attempt.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) retry: Retry,
    /// The reason, for a message.
    pub(crate) text: String,
    /// The cause, as far as an operator can remove it.
    pub(crate) cause: StoreFailure,
    meaning: Option<Meaning>,
    /// The refused side of TLS.
    refusal: Option<Box<Refusal>>,
}

/// When another attempt may succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Later, or at another endpoint.
    Later,
    /// With a new token, on a new connection.
    NewConnection,
    /// At another endpoint only: this one and the node do not accept each other.
    OtherEndpoint,
    /// Not before an operator changes the configuration.
    Never,
}

/// What a text of etcd or of its connection means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meaning {
    NoPermission,
    WrongPassword,
    /// etcd requires a user, and the request has none.
    UserRequired,
    InvalidToken,
    /// Users or roles were changed after the token was issued.
    OldToken,
    /// A member that will be able to answer later.
    NotYetAble,
    NoSpace,
    ConnectionClosed,
}

impl Meaning {
    /// The meaning of a text. This is the only function that reads the texts of etcd's failures.
    ///
    /// No type has these facts. etcd uses one gRPC code for several errors, such as
    /// `InvalidArgument` for a wrong password and for a request without a user. tonic gives the
    /// failure of a connection as a boxed error of hyper or h2, which are not part of its API, and
    /// h2 does not expose the I/O error in it.
    fn of(text: &str) -> Option<Self> {
        let texts = [
            ("etcdserver: permission denied", Self::NoPermission),
            ("authentication failed", Self::WrongPassword),
            ("user name is empty", Self::UserRequired),
            ("auth token", Self::InvalidToken),
            ("auth store is old", Self::OldToken),
            ("learner", Self::NotYetAble),
            ("not capable", Self::NotYetAble),
            ("database space exceeded", Self::NoSpace),
            ("connection closed", Self::ConnectionClosed),
            ("broken pipe", Self::ConnectionClosed),
            ("reset", Self::ConnectionClosed),
        ];
        texts.into_iter().find(|(part, _)| text.contains(part)).map(|(_, meaning)| meaning)
    }
}

impl Failure {
    pub(crate) fn later(text: impl Into<String>) -> Self {
        Self::new(Retry::Later, text)
    }

    pub(crate) fn new_connection(text: impl Into<String>) -> Self {
        Self::new(Retry::NewConnection, text)
    }

    pub(crate) fn never(text: impl Into<String>) -> Self {
        Self::new(Retry::Never, text)
    }

    fn new(retry: Retry, text: impl Into<String>) -> Self {
        let text = text.into();
        let meaning = Meaning::of(&text);
        let cause = match meaning {
            Some(Meaning::NoSpace) => StoreFailure::QuotaExceeded,
            _ => StoreFailure::of_tls(&text),
        };
        Self { retry, text, cause, meaning, refusal: None }
    }

    /// etcd canceled a watch. It wraps the status of a refusal into the reason.
    pub(crate) fn canceled_watch(reason: &str) -> Self {
        match Meaning::of(reason) {
            Some(Meaning::NoPermission | Meaning::UserRequired) => Self::never(reason),
            Some(Meaning::InvalidToken | Meaning::OldToken) => Self::new_connection(reason),
            _ => Self::later(format!("it canceled the watch: {reason}")),
        }
    }

    /// Whether an existing connection was closed.
    pub(crate) fn is_hanging_up(&self) -> bool {
        self.retry == Retry::Later && self.meaning == Some(Meaning::ConnectionClosed)
    }

    /// Endpoint and node do not accept each other. `text` is the text of the error.
    fn of_tls(refusal: Refusal, text: impl Into<String>) -> Self {
        Self { refusal: Some(Box::new(refusal)), ..Self::new(Retry::OtherEndpoint, text) }
    }

    /// Adds the user and the required permission, or the TLS file to look at.
    pub(crate) fn explained(mut self, key: &str, options: &EtcdOptions) -> Self {
        let user = match &options.username {
            Some(user) => format!("the user {user:?}"),
            None => "a client without a user name".to_owned(),
        };
        match self.meaning {
            Some(Meaning::NoPermission) => {
                self.text = format!("{user} has no permission for the key {key}: {}", self.text);
            }
            Some(Meaning::WrongPassword) => {
                self.text = format!("it does not accept {user} with this password: {}", self.text);
            }
            Some(Meaning::UserRequired) => {
                // With a user name, authentication was enabled after this connection was made.
                if options.username.is_some() {
                    self.retry = Retry::NewConnection;
                }
                self.text = format!("it requires a user name and a password: {}", self.text);
            }
            _ => {}
        }
        let file = match self.refusal.as_deref() {
            Some(Refusal::Server(_)) => options.ca.as_ref().map(|ca| format!("the cafile is {ca}")),
            Some(Refusal::Client(_)) => {
                options.certificate.as_ref().map(|file| format!("the certfile is {file}"))
            }
            _ => None,
        };
        if let Some(refusal) = &self.refusal {
            let file = file.map(|file| format!("; {file}")).unwrap_or_default();
            self.text = format!("{refusal}{file}: {}", self.text);
        }
        self
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match &error {
            Error::GRpcStatus(status) => {
                let innermost = innermost(status);
                match Refusal::find(status).or_else(|| Refusal::find_in_text(&innermost)) {
                    Some(refusal) => Self::of_tls(refusal, innermost),
                    None => Self::new(retry(status.code(), status.message()), innermost),
                }
            }
            Error::InvalidArgs(_) | Error::InvalidUri(_) => Self::never(error.to_string()),
            _ => Self::later(error.to_string()),
        }
    }
}

/// When to retry after a status. etcd uses `Unknown` and `Internal` for failures between its
/// members.
fn retry(code: Code, message: &str) -> Retry {
    match (Meaning::of(message), code) {
        // All members give the same answer about our user.
        (Some(Meaning::NoPermission | Meaning::WrongPassword | Meaning::UserRequired), _) => {
            Retry::Never
        }
        (Some(Meaning::NotYetAble), _) => Retry::Later,
        (_, Code::Unauthenticated) | (Some(Meaning::OldToken), Code::InvalidArgument) => {
            Retry::NewConnection
        }
        (
            _,
            Code::InvalidArgument
            | Code::PermissionDenied
            | Code::Unimplemented
            | Code::FailedPrecondition
            | Code::AlreadyExists
            | Code::NotFound,
        ) => Retry::OtherEndpoint,
        _ => Retry::Later,
    }
}

/// The innermost cause of an error.
fn innermost(status: &tonic::Status) -> String {
    let mut innermost = status.message().to_owned();
    let mut next = std::error::Error::source(status);
    while let Some(cause) = next {
        innermost = cause.to_string();
        next = cause.source();
    }
    innermost
}

/// Whether etcd answered with an error that contains `text`. etcd uses the gRPC code of such an
/// error for others too.
pub(crate) fn says(error: &Error, text: &str) -> bool {
    matches!(error, Error::GRpcStatus(status) if status.message().contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_failures_are_retried_and_others_are_not() {
        for (code, message, expected) in [
            (Code::Unavailable, "etcdserver: leader changed", Retry::Later),
            (Code::Unavailable, "etcdserver: no leader", Retry::Later),
            (Code::DeadlineExceeded, "", Retry::Later),
            (Code::ResourceExhausted, "etcdserver: too many requests", Retry::Later),
            (Code::Unauthenticated, "etcdserver: invalid auth token", Retry::NewConnection),
            (
                Code::InvalidArgument,
                "etcdserver: revision of auth store is old",
                Retry::NewConnection,
            ),
            (Code::InvalidArgument, "etcdserver: authentication failed", Retry::Never),
            (Code::FailedPrecondition, "etcdserver: rpc not supported for learner", Retry::Later),
            (Code::FailedPrecondition, "etcdserver: not capable", Retry::Later),
            (
                Code::Unimplemented,
                "grpc-status header missing, mapped from HTTP status code 404",
                Retry::OtherEndpoint,
            ),
            (Code::PermissionDenied, "mapped from HTTP status code 403", Retry::OtherEndpoint),
            (Code::PermissionDenied, "etcdserver: permission denied", Retry::Never),
        ] {
            let failure = Failure::from(Error::GRpcStatus(tonic::Status::new(code, message)));
            assert_eq!(failure.retry, expected, "{message}");
            assert_eq!(failure.text, message);
        }
    }

    #[test]
    fn a_closed_connection_is_told_from_other_failures() {
        for (text, expected) in [
            ("connection closed", true),
            ("stream closed because of a broken pipe", true),
            ("Connection reset by peer (os error 104)", true),
            ("etcdserver: leader changed", false),
            ("no answer within 2s", false),
        ] {
            assert_eq!(Failure::later(text).is_hanging_up(), expected, "{text}");
            assert!(!Failure::never(text).is_hanging_up(), "{text}");
        }
    }

    #[test]
    fn a_canceled_watch_is_retried_unless_the_user_is_refused() {
        for (reason, retry) in [
            (
                "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
                Retry::Never,
            ),
            ("etcdserver: user name is empty", Retry::Never),
            ("etcdserver: invalid auth token", Retry::NewConnection),
            ("etcdserver: revision of auth store is old", Retry::NewConnection),
            ("", Retry::Later),
        ] {
            assert_eq!(Failure::canceled_watch(reason).retry, retry, "{reason}");
        }
    }

    #[test]
    fn the_cause_is_known_if_an_operator_can_remove_it() {
        for (text, cause) in [
            ("etcdserver: mvcc: database space exceeded", StoreFailure::QuotaExceeded),
            (
                "its certificate has expired, or the clock of this node is wrong: invalid peer \
                 certificate: certificate expired: verification time 17 (UNIX)",
                StoreFailure::CertificateTime,
            ),
            ("invalid peer certificate: certificate not valid yet", StoreFailure::CertificateTime),
            ("tcp connect error: Connection refused", StoreFailure::Other),
        ] {
            assert_eq!(Failure::later(text).cause, cause, "{text}");
        }
    }
}
