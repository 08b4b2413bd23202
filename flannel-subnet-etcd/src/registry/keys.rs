//! The keys of the registry, and their values.

use etcd_client::KeyValue;
use flannel_core::address::ParseError;
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::{Lease, Subnets};

use flannel_subnet::{Entry, HolderId, Now, SkipReason};

/// The largest number of bytes of a key of a lease, without the prefix. Two subnets have 62.
pub(crate) const LARGEST_NAME: usize = 120;

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

    /// The name of a key of a lease.
    pub(crate) fn name(&self, key: &[u8]) -> String {
        name(&self.leases, key)
    }
}

/// A key without this prefix. A key that is too long for a lease is cut and ends with `…`, because
/// the names of skipped keys are kept, and a key may have a megabyte.
pub(crate) fn name(prefix: &str, key: &[u8]) -> String {
    let key = key.strip_prefix(prefix.as_bytes()).unwrap_or(key);
    match key.get(..LARGEST_NAME).filter(|_| key.len() > LARGEST_NAME) {
        // The last character may be incomplete.
        Some(first) => {
            let first = String::from_utf8_lossy(first);
            format!("{}…", first.trim_end_matches(char::REPLACEMENT_CHARACTER))
        }
        None => String::from_utf8_lossy(key).into_owned(),
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

/// The subnets that a name stands for.
fn subnets(name: &str) -> Result<Subnets, SkipReason> {
    if name.len() > LARGEST_NAME {
        let reason = format!("its name has more than {LARGEST_NAME} bytes");
        return Err(SkipReason::unreadable(&reason));
    }
    name.parse().map_err(|error: ParseError| SkipReason::unreadable(&error))
}

/// The lease of a key (without the common prefix) and its value, or why the key is skipped.
pub(crate) fn read(key: &str, kv: &KeyValue) -> Result<Entry, SkipReason> {
    let subnets = subnets(key)?;
    TooLarge::check(kv.value().len())?;
    let value =
        kv.value_str().map_err(|_| SkipReason::unreadable(&"the value is not UTF-8 text"))?;
    let attrs = LeaseAttrs::from_json(value).map_err(|error| SkipReason::unreadable(&error))?;
    let lease = Lease {
        subnets,
        attrs,
        expires: None,
        since: revision(kv.create_revision()),
        revision: revision(kv.mod_revision()),
    };
    let holder = (kv.lease() != 0).then(|| HolderId(kv.lease().cast_unsigned()));
    Ok(Entry { lease: lease.into(), holder })
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
    fn a_key_that_is_too_long_is_cut_and_refused_before_it_is_parsed() {
        let keys = Keys::new("/coreos.com/network");
        for name in ["x".repeat(1_400_000), "é".repeat(700_000), format!("x{}", "é".repeat(100))]
        {
            let key = format!("{}{name}", keys.leases());
            let cut = keys.name(key.as_bytes());
            assert!(cut.len() <= LARGEST_NAME + 3 && cut.ends_with('…'), "{cut}");
            assert!(name.starts_with(cut.trim_end_matches('…')), "{cut}");
            let error = subnets(&cut).unwrap_err().to_string();
            assert_eq!(error, "its name has more than 120 bytes");
        }
        let longest = "255.255.255.254-31&fd00:1111:2222:3333:4444:5555:6666:fffe-127";
        assert_eq!(keys.name(longest.as_bytes()), longest);
        assert!(longest.parse::<Subnets>().is_ok() && longest.len() < LARGEST_NAME);
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
