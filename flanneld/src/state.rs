//! What this host remembers across restarts: the mark by which it knows its own leases; and that one at a time has it.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use flannel_subnet::Mark;

use crate::error::Error;

/// The mark kept in `dir`, or a new one that is kept there from now on.
///
/// # Errors
/// The directory or the file cannot be read or written.
pub(crate) fn mark(dir: &Path) -> Result<Mark, Error> {
    let path = dir.join("mark");
    let failed = |error: io::Error| Error::File {
        path: path.clone(),
        reason: format!("{error} (see --state-dir)"),
    };
    match fs::read_to_string(&path) {
        Ok(text) => match text.trim().parse() {
            Ok(mark) => return Ok(mark),
            // Without it this host is known by its public address: no reason not to start.
            Err(error) => tracing::warn!(path = %path.display(), %error, "a new mark is made"),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let mark = Mark::random();
    fs::create_dir_all(dir).map_err(failed)?;
    replace(&path, &format!("{mark}\n")).map_err(failed)?;
    Ok(mark)
}

/// Writes a file of the state directory anew: whole, or not at all.
pub(crate) fn replace(path: &Path, text: &str) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = fs::File::create(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// What tells this machine from its clones: `/etc/machine-id`, else the mark.
pub(crate) fn identity(mark: Mark) -> String {
    let id = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = id.trim();
    if id.is_empty() { mark.to_string() } else { id.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_kept_and_a_broken_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("new");
        let first = mark(&state).unwrap();
        assert_eq!(mark(&state).unwrap(), first);
        fs::write(state.join("mark"), "nonsense").unwrap();
        let second = mark(&state).unwrap();
        assert_ne!(second, first);
        assert_eq!(mark(&state).unwrap(), second);
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = mark(&file).unwrap_err().to_string();
        assert!(error.contains("file/mark"), "{error}");
    }
}
