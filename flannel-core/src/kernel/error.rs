//! The errors of a kernel and of a record keeper, by cause.

use std::{fmt, io};

use libc::{EADDRNOTAVAIL, EBADMSG, EIO, ENODEV, ENOENT, ENXIO, EPERM, ESRCH};

/// Why a request to a kernel or to a [`RecordKeeper`](super::RecordKeeper) failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelError {
    /// The request was refused with an error number.
    Errno {
        /// The error number, positive.
        errno: i32,
        /// The explanation of the kernel (netlink "extended ack") or of the implementation, if any.
        detail: Option<String>,
    },
    /// The kernel did not answer, or its answer cannot be read. `Display` shows `EBADMSG`.
    Unreadable {
        /// What is wrong with the answer, or `None` if that is not known.
        detail: Option<String>,
    },
    /// A change was started, and has not ended within the time for which the caller waited
    /// ([`Outcome::Started`](super::Outcome::Started)).
    NotEnded,
    /// The route engine did not put the object, because the network's
    /// [footprint](super::Footprint) does not own it. The value is the object as text.
    NotOwned(String),
    /// Another cause without an error number. The value is the whole message.
    Other(String),
}

impl KernelError {
    /// A refusal with an error number, without explanation.
    pub const fn new(errno: i32) -> Self {
        Self::Errno { errno, detail: None }
    }

    /// A refusal with an error number and an explanation.
    pub fn explained(errno: i32, detail: impl Into<String>) -> Self {
        Self::Errno { errno, detail: Some(detail.into()) }
    }

    /// An answer that is missing or cannot be read, with an explanation.
    pub fn unreadable(detail: impl Into<String>) -> Self {
        Self::Unreadable { detail: Some(detail.into()) }
    }

    /// Puts `what`, such as the name of a table or a file, before the explanation of the error.
    #[must_use]
    pub fn about(self, what: impl fmt::Display) -> Self {
        let explained = |detail: Option<String>| match detail {
            Some(detail) => format!("{what}: {detail}"),
            None => what.to_string(),
        };
        match self {
            Self::Errno { errno, detail } => Self::explained(errno, explained(detail)),
            Self::Unreadable { detail } => Self::unreadable(explained(detail)),
            Self::NotEnded | Self::NotOwned(_) | Self::Other(_) => {
                Self::Other(explained(Some(self.to_string())))
            }
        }
    }

    /// The error number, which is positive, or `None` for a cause without an error number.
    pub const fn errno(&self) -> Option<i32> {
        match self {
            Self::Errno { errno, .. } => Some(*errno),
            Self::Unreadable { .. } => Some(EBADMSG),
            Self::NotEnded | Self::NotOwned(_) | Self::Other(_) => None,
        }
    }

    /// The explanation of a refusal or of an unreadable answer, without the error number, or `None`
    /// if there is only the number.
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::Errno { detail, .. } | Self::Unreadable { detail } => detail.as_deref(),
            Self::NotEnded | Self::NotOwned(_) | Self::Other(_) => None,
        }
    }

    /// Whether the request was refused with this error number.
    pub fn is(&self, errno: i32) -> bool {
        matches!(self, Self::Errno { errno: of_error, .. } if *of_error == errno)
    }

    /// Whether no such object exists: `ENOENT`, `ESRCH`, `ENXIO`, `ENODEV` or `EADDRNOTAVAIL`.
    pub fn is_absent(&self) -> bool {
        [ENOENT, ESRCH, ENXIO, ENODEV, EADDRNOTAVAIL].into_iter().any(|errno| self.is(errno))
    }

    /// Whether this process lacks a privilege: `EPERM`.
    pub fn is_denied(&self) -> bool {
        self.is(EPERM)
    }

    /// Whether an answer of the kernel is missing, or cannot be read.
    pub const fn is_unreadable(&self) -> bool {
        matches!(self, Self::Unreadable { .. })
    }

    /// Writes the explanation and the text of an error number.
    fn fmt_errno(&self, errno: i32, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.detail().map_or(Ok(()), |detail| write!(f, "{detail}: "))?;
        write!(f, "{}", io::Error::from_raw_os_error(errno))
    }
}

/// `Nexthop has invalid gateway: Invalid argument (os error 22)`, or only one of the two parts.
impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOwned(object) => write!(f, "the network's footprint does not own {object}"),
            Self::NotEnded => f.write_str("the change has not ended yet"),
            Self::Other(text) => f.write_str(text),
            Self::Errno { errno, .. } => self.fmt_errno(*errno, f),
            Self::Unreadable { .. } => self.fmt_errno(EBADMSG, f),
        }
    }
}

impl std::error::Error for KernelError {}

/// An error without errno becomes `EIO` with its text as the detail.
impl From<io::Error> for KernelError {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::new(errno),
            None => Self::explained(EIO, error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_shown_with_its_explanation_and_its_number() {
        for (error, text, errno) in [
            (KernelError::new(17), "File exists (os error 17)", Some(17)),
            (KernelError::explained(17, "eth0"), "eth0: File exists (os error 17)", Some(17)),
            (KernelError::NotEnded, "the change has not ended yet", None),
            (KernelError::unreadable("cut"), "cut: Bad message (os error 74)", Some(74)),
            (KernelError::Other("exit status 1".into()), "exit status 1", None),
            (io::Error::other("x").into(), "x: Input/output error (os error 5)", Some(5)),
        ] {
            assert_eq!(error.to_string(), text);
            assert_eq!(error.errno(), errno);
        }
    }

    #[test]
    fn an_error_about_something_begins_with_it() {
        let about = |error: KernelError| error.about("eth0").to_string();
        assert_eq!(about(KernelError::explained(17, "x")), "eth0: x: File exists (os error 17)");
        assert_eq!(about(KernelError::new(17)), "eth0: File exists (os error 17)");
        assert_eq!(about(KernelError::NotEnded), "eth0: the change has not ended yet");
        assert_eq!(about(KernelError::Other("x".into())), "eth0: x");
    }
}
