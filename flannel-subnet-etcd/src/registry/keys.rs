//! The keys of the registry, and their values.

use std::fmt::Display;

use etcd_client::KeyValue;
use flannel_core::address::ParseError;
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::{Lease, Subnets};

use flannel_subnet::{Entry, HolderId, Now, SkipReason};

/// The keys below one prefix.
#[derive(Debug)]
pub(crate) struct Keys {
    config: String,
    /// Ends with `/`, because `<prefix>/subnetsX` is another key.
    leases: String,
}

impl Keys {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { config: join(prefix, "config"), leases: format!("{}/", join(prefix, "subnets")) }
    }

    pub(crate) fn config(&self) -> &str {
        &self.config
    }

    /// The common prefix of all keys of leases.
    pub(crate) fn leases(&self) -> &str {
        &self.leases
    }

    /// The first key behind all keys of leases.
    pub(crate) fn end_of_leases(&self) -> String {
        // `/` is the last byte of the common prefix, and `0` the next one.
        format!("{}0", self.leases.trim_end_matches('/'))
    }

    pub(crate) fn lease(&self, subnets: &Subnets) -> String {
        format!("{}{subnets}", self.leases)
    }

    /// A key without the common prefix.
    pub(crate) fn name(&self, key: &[u8]) -> String {
        String::from_utf8_lossy(key.strip_prefix(self.leases.as_bytes()).unwrap_or(key))
            .into_owned()
    }
}

/// Joins and cleans paths as text: `//` and `/./` become `/`, and `..` removes the part before it.
///
/// **Source**: Go `path.Join`, with which Go flannel makes its keys.
fn join(prefix: &str, name: &str) -> String {
    let rooted = prefix.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in prefix.split('/').chain([name]).filter(|part| !part.is_empty() && *part != ".") {
        match part {
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            ".." if rooted => (),
            part => parts.push(part),
        }
    }
    format!("{}{}", if rooted { "/" } else { "" }, parts.join("/"))
}

/// The lease of a key (without the common prefix) and its value, or the reason why there is none.
pub(crate) fn read(key: &str, kv: &KeyValue) -> Result<Entry, SkipReason> {
    let unreadable = |reason: &dyn Display| SkipReason::Unreadable(reason.to_string());
    let subnets: Subnets = key.parse().map_err(|error: ParseError| unreadable(&error))?;
    TooLarge::check(kv.value().len())?;
    let value = kv.value_str().map_err(|_| unreadable(&"the value is not UTF-8 text"))?;
    let attrs = LeaseAttrs::from_json(value).map_err(|error| unreadable(&error))?;
    let (since, revision) = (revision(kv.create_revision()), revision(kv.mod_revision()));
    let holder = (kv.lease() != 0).then(|| HolderId(kv.lease().cast_unsigned()));
    Ok(Entry { lease: Lease { subnets, attrs, expires: None, since, revision }.into(), holder })
}

pub(crate) fn revision(revision: i64) -> Revision {
    Revision(revision.unsigned_abs())
}

/// The content of a key after a change.
pub(crate) fn now(key: &str, kv: Option<&KeyValue>) -> Now {
    match kv.map(|kv| read(key, kv)) {
        Some(Ok(entry)) => Now::Held(entry),
        Some(Err(reason)) => Now::Unreadable(reason),
        None => Now::Gone,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_joined_as_in_go() {
        for (prefix, config) in [
            ("/coreos.com/network", "/coreos.com/network/config"),
            ("/coreos.com/network/", "/coreos.com/network/config"),
            ("//a//b/./c/../d", "/a/b/d/config"),
            ("/../a", "/a/config"),
            ("a/b", "a/b/config"),
            ("../a", "../a/config"),
            ("a/../..", "../config"),
            ("", "config"),
            ("/", "/config"),
            (".", "config"),
        ] {
            assert_eq!(Keys::new(prefix).config(), config, "{prefix:?}");
        }
    }

    #[test]
    fn only_keys_below_subnets_are_leases() {
        let keys = Keys::new("/coreos.com/network");
        let subnets: Subnets = "10.5.34.0-24&fd00:0:0:5::-64".parse().unwrap();
        let key = keys.lease(&subnets);
        assert_eq!(key, "/coreos.com/network/subnets/10.5.34.0-24&fd00:0:0:5::-64");
        assert_eq!(keys.name(key.as_bytes()), subnets.to_string());
        assert!(!"/coreos.com/network/subnetsX/10.5.34.0-24".starts_with(keys.leases()));
    }
}
