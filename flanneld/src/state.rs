//! The identity of this host, by which it recognizes its own leases after a restart.

use std::path::Path;
use std::{fs, io};

use flannel_options::state_dir::{is_newer, read, replace};
use flannel_subnet::HolderId;

use crate::error::Error;

/// The holder ID kept in `dir`, or a new one that is kept there from now on.
///
/// # Errors
/// The directory or the file cannot be read or written.
pub(crate) fn holder_id(dir: &Path) -> Result<HolderId, Error> {
    let path = dir.join("mark");
    let failed = |error: io::Error| Error::file(&path, &format!("{error} (see --state-dir)"));
    match read(&path) {
        Ok(Some(text)) => match text.trim().parse() {
            Ok(holder) => return Ok(holder),
            // The public address identifies the host instead.
            Err(error) => tracing::warn!(path = %path.display(), %error, "a new holder ID is made"),
        },
        Ok(None) => {}
        Err(error) if is_newer(&error) => {
            tracing::warn!(path = %path.display(), %error, "a new holder ID is used for this run");
            return Ok(HolderId::random());
        }
        Err(error) => return Err(failed(error)),
    }
    let holder = HolderId::random();
    fs::create_dir_all(dir).map_err(failed)?;
    replace(&path, &format!("{holder}\n")).map_err(failed)?;
    Ok(holder)
}

/// The identity of this machine among its clones: `/etc/machine-id`, else the holder ID.
pub(crate) fn identity(holder: HolderId) -> String {
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = id.trim();
    if id.is_empty() { holder.to_string() } else { id.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_valid_holder_id_is_kept_and_one_of_a_newer_build_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mark");
        fs::write(&path, "00000000000000ab\n").unwrap();
        assert_eq!(holder_id(dir.path()).unwrap(), HolderId(0xab));
        let newer = "flannel-state 2\nid: 00000000000000ab\n";
        fs::write(&path, newer).unwrap();
        assert_ne!(holder_id(dir.path()).unwrap(), holder_id(dir.path()).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), newer);
    }

    #[test]
    fn builds_without_file_versions_can_read_the_holder_id() {
        let dir = tempfile::tempdir().unwrap();
        let holder = holder_id(dir.path()).unwrap();
        // Their rule: the trimmed file has 1 to 16 hexadecimal digits and nothing else.
        let text = fs::read_to_string(dir.path().join("mark")).unwrap();
        let digits = text.trim();
        assert!((1..=16).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit()));
        assert_eq!(u64::from_str_radix(digits, 16), Ok(holder.0));
        assert_eq!(fs::read_to_string(dir.path().join("version")).unwrap(), "flannel-state 1\n");
    }

    #[test]
    fn a_holder_id_is_kept_and_an_invalid_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let first = holder_id(&state).unwrap();
        assert_eq!(holder_id(&state).unwrap(), first);
        fs::write(state.join("mark"), "nonsense").unwrap();
        let second = holder_id(&state).unwrap();
        assert_ne!(second, first);
        assert_eq!(holder_id(&state).unwrap(), second);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = holder_id(&file).unwrap_err().to_string();
        assert!(error.contains("file/mark"), "{error}");
    }
}
