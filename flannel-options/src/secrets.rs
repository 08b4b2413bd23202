//! Secrets of this node as files in its state directory.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use async_trait::async_trait;
use flannel_core::backend::{MakeSecret, Secrets};
use flannel_core::object::Secret;
use flannel_subnet::{read_own_file, replace_file};

/// A file for each secret: `secrets/NAME` in the state directory. Only its owner may read it.
#[derive(Debug, Clone)]
pub struct FileSecrets {
    dir: PathBuf,
}

impl FileSecrets {
    /// The secrets in this state directory.
    pub fn new(state_dir: &Path) -> Self {
        Self { dir: state_dir.join("secrets") }
    }

    fn file(&self, name: &str) -> io::Result<PathBuf> {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || !name.chars().all(fits) {
            let reason = format!("{name:?} is not the name of a secret: expected a-z, 0-9 and '-'");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        Ok(self.dir.join(name))
    }
}

#[async_trait]
impl Secrets for FileSecrets {
    async fn get_or_create(&self, name: &str, make: &MakeSecret<'_>) -> io::Result<Secret> {
        let file = self.file(name)?;
        let in_file = |error: io::Error| {
            io::Error::new(error.kind(), format!("{}: {error} (see --state-dir)", file.display()))
        };
        match read_own_file(&file) {
            Ok(bytes) if bytes.is_empty() => {
                Err(in_file(io::Error::new(io::ErrorKind::InvalidData, "it is empty: remove it")))
            }
            Ok(bytes) => Ok(Secret::new(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let secret = make()?;
                write(&self.dir, &file, &secret).map_err(in_file)?;
                Ok(secret)
            }
            Err(error) => Err(in_file(error)),
        }
    }
}

/// Writes the file atomically.
fn write(dir: &Path, file: &Path, secret: &Secret) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    replace_file(file, secret.expose(), 0o600)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[tokio::test]
    async fn a_secret_is_created_once_and_only_its_owner_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let secrets = FileSecrets::new(dir.path());
        let made = secrets.get_or_create("tunnel-1", &|| Ok(Secret::new(*b"one"))).await.unwrap();
        let again = FileSecrets::new(dir.path());
        let kept = again.get_or_create("tunnel-1", &|| panic!("the secret exists")).await.unwrap();
        assert_eq!((kept.expose(), made), (b"one".as_slice(), kept.clone()));
        let mode = |path: &str| fs::metadata(dir.path().join(path)).unwrap().permissions().mode();
        assert_eq!(mode("secrets") & 0o777, 0o700);
        assert_eq!(mode("secrets/tunnel-1") & 0o777, 0o600);
        std::os::unix::fs::symlink("tunnel-1", dir.path().join("secrets/planted")).unwrap();
        let planted = secrets.get_or_create("planted", &|| panic!("it exists")).await;
        assert!(planted.unwrap_err().to_string().contains("it is a symbolic link"));
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
