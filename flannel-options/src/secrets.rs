//! Secrets of this node as files in its state directory.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use flannel_core::backend::{MakeSecret, Secrets};
use flannel_core::object::Secret;
use flannel_subnet::{read_own_file, replace_file};

/// Whether the content of a file is a secret of the expected form.
type IsValid = fn(&[u8]) -> bool;

/// A file for each secret: `secrets/NAME` in the state directory. Only its owner may read it.
#[derive(Debug, Clone)]
pub struct FileSecrets {
    dir: PathBuf,
    /// The files of secrets that are not in `dir`.
    elsewhere: BTreeMap<&'static str, PathBuf>,
    /// The files from which secrets are copied.
    sources: BTreeMap<&'static str, Source>,
}

/// A file from which a secret is copied.
#[derive(Debug, Clone)]
struct Source {
    file: PathBuf,
    is_valid: IsValid,
}

impl FileSecrets {
    /// The secrets in this state directory.
    pub fn new(state_dir: &Path) -> Self {
        Self {
            dir: state_dir.join("secrets"),
            elsewhere: BTreeMap::new(),
            sources: BTreeMap::new(),
        }
    }

    /// Keeps the secret with this name in another file.
    #[must_use]
    pub fn with_file(mut self, name: &'static str, file: PathBuf) -> Self {
        self.elsewhere.insert(name, file);
        self
    }

    /// If the secret with this name does not exist, or is older than `file`, it gets the content of
    /// `file`, such as a key that Go flannel has made. Without that file, or if its content is not
    /// `valid`, the secret is made or kept.
    #[must_use]
    pub fn adopting(mut self, name: &'static str, file: PathBuf, valid: IsValid) -> Self {
        self.sources.insert(name, Source { file, is_valid: valid });
        self
    }

    fn file(&self, name: &str) -> io::Result<PathBuf> {
        let is_plain =
            name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
        if name.is_empty() || !is_plain {
            let reason = format!("{name:?} is not the name of a secret: expected a-z, 0-9 and '-'");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Ok(self.elsewhere.get(name).cloned().unwrap_or_else(|| self.dir.join(name)))
    }

    /// The content of the file from which the secret is to be copied. `None` if the file does
    /// not exist, is older or is not valid.
    fn adopted(&self, name: &str) -> io::Result<Option<Secret>> {
        let Some(Source { file, is_valid }) = self.sources.get(name) else { return Ok(None) };
        let written = |file: &Path| fs::metadata(file).and_then(|it| it.modified()).ok();
        if written(&self.file(name)?) >= written(file) {
            return Ok(None);
        }
        match read_secret(file) {
            Ok(secret) if !is_valid(secret.expose()) => {
                let path = file.display();
                tracing::warn!(secret = name, file = %path, "a damaged secret is not copied");
                Ok(None)
            }
            Ok(secret) => {
                tracing::info!(secret = name, file = %file.display(), "a secret is copied");
                Ok(Some(secret))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Secrets for FileSecrets {
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret> {
        let file = self.file(name)?;
        let new = match (self.adopted(name)?, read_secret(&file)) {
            (Some(adopted), _) => adopted,
            (None, Err(error)) if error.kind() == io::ErrorKind::NotFound => make()?,
            (None, read) => return read,
        };
        write(&file, &new).map_err(|error| in_file(&file, &error))?;
        Ok(new)
    }
}

fn read_secret(file: &Path) -> io::Result<Secret> {
    let bytes = read_own_file(file).map_err(|error| in_file(file, &error))?;
    if bytes.is_empty() {
        let empty = io::Error::new(io::ErrorKind::InvalidData, "it is empty: remove it");
        return Err(in_file(file, &empty));
    }
    Ok(Secret::new(bytes))
}

fn in_file(file: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error} (see --state-dir)", file.display()))
}

/// Writes the file atomically, with the mode of Go flannel's key file.
fn write(file: &Path, secret: &Secret) -> io::Result<()> {
    if let Some(dir) = file.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    replace_file(file, secret.expose(), 0o400)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, UNIX_EPOCH};

    #[tokio::test]
    async fn a_secret_is_created_once_and_only_its_owner_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let secrets = FileSecrets::new(dir.path());
        let made = secrets.get_or_create("tunnel-1", &|| Ok(Secret::new(*b"one"))).await.unwrap();
        let again = FileSecrets::new(dir.path());
        let kept = again.get_or_create("tunnel-1", &|| panic!("the secret exists")).await.unwrap();
        assert_eq!(kept.expose(), b"one");
        assert_eq!(made, kept);
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode();
        assert_eq!(mode("secrets") & 0o777, 0o700);
        assert_eq!(mode("secrets/tunnel-1") & 0o777, 0o400);
        std::os::unix::fs::symlink("tunnel-1", dir.path().join("secrets/planted")).unwrap();
        let planted = secrets.get_or_create("planted", &|| panic!("it exists")).await;
        assert!(planted.unwrap_err().to_string().contains("it is a symbolic link"));
    }

    #[tokio::test]
    async fn a_secret_of_another_program_is_copied_once() {
        let dir = tempfile::tempdir().unwrap();
        let theirs = dir.path().join("wgkey");
        let secrets = |place: &str| {
            FileSecrets::new(&dir.path().join(place))
                .adopting("key", theirs.clone(), |content| content != b"damaged")
        };
        let get = async |secrets: &FileSecrets, made: &'static [u8]| {
            let make = || Ok(Secret::new(made));
            secrets.get_or_create("key", &make).await.map(|secret| secret.expose().to_vec())
        };
        let set_time = |path: &Path, seconds: u64| {
            let time = UNIX_EPOCH + Duration::from_secs(seconds);
            File::open(path).unwrap().set_modified(time).unwrap();
        };
        let ours = |place: &str| dir.path().join(place).join("secrets/key");
        assert_eq!(get(&secrets("before"), b"made").await.unwrap(), b"made");
        set_time(&ours("before"), 1_000);
        fs::write(&theirs, "").unwrap();
        assert!(get(&secrets("a"), b"made").await.unwrap_err().to_string().contains("wgkey"));
        fs::write(&theirs, "theirs").unwrap();
        set_time(&theirs, 500);
        assert_eq!(get(&secrets("a"), b"made").await.unwrap(), b"theirs");
        assert_eq!(get(&secrets("before"), b"again").await.unwrap(), b"made", "it is newer");
        // The other program ran in between, and made another one.
        fs::write(&theirs, "new").unwrap();
        set_time(&theirs, 2_000);
        assert_eq!(get(&secrets("before"), b"again").await.unwrap(), b"new");
        assert_eq!(get(&secrets("a"), b"again").await.unwrap(), b"theirs", "it is newer");
        fs::write(&theirs, "damaged").unwrap();
        set_time(&theirs, 1 << 40);
        assert_eq!(get(&secrets("a"), b"again").await.unwrap(), b"theirs", "it is kept");
        fs::write(&theirs, "new").unwrap();

        let file = dir.path().join("new/place");
        let elsewhere = secrets("b").with_file("key", file.clone());
        assert_eq!(get(&elsewhere, b"made").await.unwrap(), b"new");
        assert_eq!(fs::read(file).unwrap(), b"new");
    }

    #[tokio::test]
    async fn bad_names_and_damaged_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let secrets = FileSecrets::new(dir.path());
        for bad in ["", "../x", "A", "a/b", "a.new"] {
            let error = secrets.get_or_create(bad, &|| panic!("{bad}")).await.unwrap_err();
            assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
        }
        fs::create_dir(dir.path().join("secrets")).unwrap();
        fs::write(dir.path().join("secrets/empty"), "").unwrap();
        let error =
            secrets.get_or_create("empty", &|| panic!("the secret exists")).await.unwrap_err();
        assert!(error.to_string().contains("secrets/empty: it is empty"), "{error}");
        let failed = secrets.get_or_create("new", &|| Err(io::Error::other("no random bytes")));
        assert!(failed.await.is_err() && !dir.path().join("secrets/new").exists());
    }
}
