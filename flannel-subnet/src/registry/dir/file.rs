//! A lease as a file: Go flannel's lease value, `Mark` (the holder ID) and `TTL`.
//!
//! A file without `TTL` is a reservation, such as `{"PublicIP": "192.0.2.7"}`.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_core::address::ParseError;
use flannel_core::json::{FieldError, Fields};
use flannel_core::lease::{LARGEST_VALUE, LeaseAttrs, Revision, TooLarge};
use flannel_core::text::fnv1a;
use flannel_core::{Lease, Subnets};
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::registry::{Entry, HolderId, LeaseGrant};

/// Go's lease value in Go's order, then the fields of this implementation.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Wire<'a> {
    #[serde(rename = "PublicIP", borrow)]
    public_ip: &'a RawValue,
    #[serde(rename = "PublicIPv6", borrow)]
    public_ipv6: &'a RawValue,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    backend_type: Option<&'a RawValue>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    backend_data: Option<&'a RawValue>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    backend_v6_data: Option<&'a RawValue>,
    #[serde(borrow, default, skip_serializing_if = "Option::is_none")]
    other_offers: Option<&'a RawValue>,
    #[serde(rename = "Mark", default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    #[serde(rename = "TTL", default, skip_serializing_if = "Option::is_none")]
    ttl: Option<u64>,
}

/// The file's text.
pub(super) fn text(attrs: &LeaseAttrs, grant: Option<LeaseGrant>) -> String {
    let value = attrs.to_json();
    let mut wire: Wire<'_> = serde_json::from_str(&value).expect("a lease value has Go's fields");
    wire.holder = grant.map(|grant| grant.holder.to_string());
    // Whole seconds, rounded up: a lease must not end before its holder expects it.
    wire.ttl =
        grant.map(|grant| (grant.ttl.as_secs() + u64::from(grant.ttl.subsec_nanos() > 0)).max(1));
    let text = serde_json::to_string_pretty(&wire);
    text.expect("a struct of strings, numbers and raw values serializes") + "\n"
}

/// The largest network config that is read, in bytes.
const LARGEST_CONFIG: usize = 1 << 20;

/// The revision of each file that is too large to be read.
pub(super) const REVISION_OF_TOO_LARGE: Revision = Revision(u64::MAX);

/// The text of a file.
pub(super) struct FileText {
    pub(super) text: String,
    /// The file's time of modification.
    pub(super) modified: SystemTime,
}

/// The text of the network config.
///
/// # Errors
/// It is too large, or it is not a regular file. Reading another kind of file could block.
pub(super) fn config_text(path: &Path) -> io::Result<String> {
    match contents(path, LARGEST_CONFIG)? {
        Ok(file) => Ok(file.text),
        Err(TooLarge { size }) => {
            Err(io::Error::other(format!("it has {size} bytes, expected at most {LARGEST_CONFIG}")))
        }
    }
}

/// The text of the file of a lease, unless it is too large.
///
/// # Errors
/// It is not a regular file. Reading another kind of file could block.
pub(super) fn lease_text(path: &Path) -> io::Result<Result<FileText, TooLarge>> {
    contents(path, LARGEST_VALUE)
}

/// The text of a file, or its size as an inner `Err` if it has more than `largest` bytes.
fn contents(path: &Path, largest: usize) -> io::Result<Result<FileText, TooLarge>> {
    // A device is not even opened.
    check_regular(&fs::metadata(path)?)?;
    // Another file may have replaced it meanwhile, such as a pipe, whose opening would block.
    let flags = OFlag::O_NONBLOCK.bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    check_regular(&metadata)?;
    let size = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
    if size > largest {
        return Ok(Err(TooLarge { size }));
    }
    // It may grow, and a file of /proc has no length.
    let mut bytes = Vec::new();
    file.take(largest as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > largest {
        return Ok(Err(TooLarge { size: bytes.len() }));
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    Ok(Ok(FileText { text, modified: metadata.modified()? }))
}

fn check_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() { Ok(()) } else { Err(io::Error::other("it is not a file")) }
}

/// The content of a readable file. Many of them are kept in memory, so they are small.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeaseFile {
    /// Its revision is derived from the text.
    pub(super) lease: Arc<Lease>,
    /// `None` if the lease never expires.
    pub(super) grant: Option<Box<LeaseGrant>>,
}

impl LeaseFile {
    /// Reads the name and the text of a file.
    ///
    /// # Errors
    /// The wrong part, for a message.
    pub(super) fn read(name: &str, text: &str) -> Result<Self, String> {
        let subnets = name.parse().map_err(|error: ParseError| error.to_string())?;
        Self::parse(subnets, text).map_err(|error| error.to_string())
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// The wrong field.
    pub(super) fn parse(subnets: Subnets, text: &str) -> Result<Self, FieldError> {
        let attrs = LeaseAttrs::from_json(text)?;
        let fields = Fields::parse(text, "")?;
        let ttl: Option<u64> =
            fields.take("TTL", "a number of seconds; no TTL: the lease never expires")?;
        let holder: Option<HolderId> = fields.parsed("Mark", "1 to 16 hexadecimal digits")?;
        let grant = ttl.map(|ttl| LeaseGrant {
            // A lease that expires has a holder, even if no node can have its ID.
            holder: holder.unwrap_or(HolderId(0)),
            ttl: Duration::from_secs(ttl),
        });
        let lease =
            Lease { subnets, attrs, expires: None, since: Revision(0), revision: revision(text) };
        Ok(Self { lease: lease.into(), grant: grant.map(Box::new) })
    }

    /// The lease as a registry has it.
    pub(super) fn entry(&self) -> Entry {
        Entry {
            lease: Arc::clone(&self.lease),
            holder: self.grant.as_ref().map(|grant| grant.holder),
        }
    }

    /// The end if the file was modified at this time, or `None` if the lease never expires.
    pub(super) fn end(&self, modified: SystemTime) -> Option<SystemTime> {
        // If no clock can reach the time, the lease never expires.
        modified.checked_add(self.grant.as_ref()?.ttl)
    }
}

/// The revision of a text: a hash that all versions of this program compute equally. Never 0.
pub(super) fn revision(text: &str) -> Revision {
    Revision(fnv1a(text.as_bytes()).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GO: &str = concat!(
        r#"{"PublicIP":"192.0.2.7","PublicIPv6":null,"BackendType":"vxlan","#,
        r#""BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#
    );

    fn key() -> Subnets {
        "10.1.5.0-24".parse().unwrap()
    }

    #[test]
    fn a_lease_file_has_the_documented_bytes() {
        let attrs = LeaseAttrs::from_json(GO).unwrap();
        let grant = LeaseGrant { holder: HolderId(0xbeef), ttl: Duration::from_millis(86_399_001) };
        let golden = r#"{
  "PublicIP": "192.0.2.7",
  "PublicIPv6": null,
  "BackendType": "vxlan",
  "BackendData": {"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"},
  "Mark": "000000000000beef",
  "TTL": 86400
}
"#;
        let text = text(&attrs, Some(grant));
        assert_eq!(text, golden);
        let file = LeaseFile::parse(key(), &text).unwrap();
        let grant = LeaseGrant { holder: HolderId(0xbeef), ttl: Duration::from_secs(86_400) };
        assert_eq!(file.grant.as_deref(), Some(&grant));
        assert_eq!(file.lease.attrs.to_json(), GO);
        assert_eq!(
            super::text(&LeaseAttrs::default(), None),
            "{\n  \"PublicIP\": \"0.0.0.0\",\n  \"PublicIPv6\": null\n}\n"
        );
    }

    #[test]
    fn a_file_without_ttl_is_a_reservation() {
        let file = LeaseFile::parse(
            key(),
            r#"{"publicip": "192.0.2.7", "Mark": "1", "Comment": "rack 4"}"#,
        )
        .unwrap();
        assert_eq!(file.grant, None);
        assert_eq!(file.end(SystemTime::now()), None);
        let file = LeaseFile::parse(key(), r#"{"PublicIP": "192.0.2.7", "TTL": 60}"#).unwrap();
        assert_eq!(file.entry().holder, Some(HolderId(0)));
    }

    #[test]
    fn an_error_names_the_wrong_field() {
        for (bad, field) in [
            ("", "(document)"),
            (r#"{"TTL":-1}"#, "TTL"),
            (r#"{"TTL":"60"}"#, "TTL"),
            (r#"{"Mark":"xyz"}"#, "Mark"),
            (r#"{"PublicIP":"x"}"#, "PublicIP"),
        ] {
            assert_eq!(LeaseFile::parse(key(), bad).unwrap_err().field, field, "{bad}");
        }
    }

    #[test]
    fn a_revision_is_the_fnv_1a_hash() {
        assert_eq!(revision("foobar"), Revision(0x8594_4171_f739_67e8));
    }
}
