//! The prefix of the names of flannel's annotations.

use std::fmt;
use std::str::FromStr;

/// The prefix of the names of all annotations: `flannel.alpha.coreos.com/`, `example.com/net-`.
///
/// It is a domain name with at least one dot, a slash, and optionally a word of lower-case letters,
/// digits, `-` and `_`. A missing slash, or `-` at the end of the word, is added.
///
/// ```
/// use flannel_subnet_kube::Prefix;
///
/// assert_eq!("example.com".parse::<Prefix>()?.to_string(), "example.com/");
/// assert_eq!("example.com/net".parse::<Prefix>()?.to_string(), "example.com/net-");
/// # Ok::<(), flannel_subnet_kube::PrefixError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix(Box<str>);

/// The error of a text that cannot be a prefix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a prefix of annotations: expected a domain name in lower case with a dot, \
     optionally followed by a slash and a word, such as flannel.alpha.coreos.com or \
     example.com/net"
)]
pub struct PrefixError {
    /// The text.
    pub text: String,
}

impl FromStr for Prefix {
    type Err = PrefixError;
    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let error = || PrefixError { text: text.to_owned() };
        let (domain, word) = text.split_once('/').unwrap_or((text, ""));
        let labels: Vec<&str> = domain.split('.').collect();
        let is_domain = labels.len() >= 2
            && labels.iter().all(|label| !label.is_empty() && has_valid_characters(label));
        // A dash alone is not a word.
        if !is_domain || !has_valid_characters(word) || word == "-" {
            return Err(error());
        }
        let dash = if word.is_empty() || word.ends_with('-') { "" } else { "-" };
        Ok(Self(format!("{domain}/{word}{dash}").into()))
    }
}

fn has_valid_characters(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
}

/// The prefix of Go flannel.
impl Default for Prefix {
    fn default() -> Self {
        Self("flannel.alpha.coreos.com/".into())
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Prefix {
    /// The name of an annotation without the prefix, or `None` if it has another prefix.
    pub(crate) fn strip<'a>(&self, name: &'a str) -> Option<&'a str> {
        name.strip_prefix(&*self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_follow_the_rules_of_go_flannel() {
        for (text, prefix) in [
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/"),
            ("flannel.alpha.coreos.com/", "flannel.alpha.coreos.com/"),
            ("a.b/net", "a.b/net-"),
            ("a.b/net-", "a.b/net-"),
            ("a_1.b-2/x_y", "a_1.b-2/x_y-"),
        ] {
            assert_eq!(text.parse::<Prefix>().unwrap().to_string(), prefix);
        }
        for bad in [
            "", "/", "coreos", "coreos/x", "a.b/c/d", "a.b/c/", "A.b", "a.b/C", "a..b", ".b",
            "a.b/-", "a b.c",
        ] {
            assert!(
                bad.parse::<Prefix>().unwrap_err().to_string().contains("example.com/net"),
                "{bad}"
            );
        }
        assert_eq!(Prefix::default(), "flannel.alpha.coreos.com".parse().unwrap());
    }
}
