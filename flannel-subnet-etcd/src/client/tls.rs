//! The certificates and the key of a connection. They are read again when their files change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flannel_core::Credential;
use flannel_core::runtime::{blocking, lock};
use flannel_tls::{Identity, Pem, Trust, client_config};
use rustls::ClientConfig;
use tokio::time::timeout;

use crate::options::EtcdOptions;

/// The time for which a request waits for the files. A file system that does not answer must not
/// delay requests that have a connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// The metadata that show whether a file has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileVersion {
    device: u64,
    inode: u64,
    size: u64,
    modified_seconds: i64,
    modified_nanoseconds: i64,
}

impl FileVersion {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified_seconds: metadata.mtime(),
            modified_nanoseconds: metadata.mtime_nsec(),
        })
    }
}

/// The configuration of TLS that was read from the files.
pub(crate) struct TlsContent {
    /// The versions of the files before they were read. `None` stands for a missing file.
    pub(crate) versions: Vec<Option<FileVersion>>,
    /// The configuration, or why the files cannot be used.
    pub(crate) config: Result<Arc<ClientConfig>, String>,
}

/// The TLS files of a registry.
pub(crate) struct TlsFiles {
    options: EtcdOptions,
    /// The content that was read last.
    known: Mutex<Arc<TlsContent>>,
    /// Held by the only thread that reads the files. Nothing waits for it.
    reading: Arc<tokio::sync::Mutex<()>>,
}

impl TlsFiles {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read, or its certificate or key cannot be used.
    pub(crate) fn open(options: &EtcdOptions) -> Result<Self, String> {
        let versions = versions(options);
        let content = TlsContent { versions, config: Ok(read(options)?) };
        Ok(Self {
            options: options.clone(),
            known: Mutex::new(Arc::new(content)),
            reading: Arc::default(),
        })
    }

    /// The present content of the files. If another request is reading them, or if they cannot be
    /// read within a second, it is the content that was read last.
    pub(crate) async fn current(self: &Arc<Self>) -> Arc<TlsContent> {
        if let Ok(reading) = Arc::clone(&self.reading).try_lock_owned() {
            let files = Arc::clone(self);
            let refreshed = blocking(move || {
                files.refresh();
                drop(reading);
            });
            // After the time limit the thread goes on, for a later request.
            let _ = timeout(PATIENCE, refreshed).await;
        }
        Arc::clone(&lock(&self.known))
    }

    /// Reads the files if they have changed, or could not be used.
    fn refresh(&self) {
        let versions = versions(&self.options);
        let known = Arc::clone(&lock(&self.known));
        if known.versions != versions || known.config.is_err() {
            let content = TlsContent { versions, config: read(&self.options) };
            *lock(&self.known) = Arc::new(content);
        }
    }
}

fn versions(options: &EtcdOptions) -> Vec<Option<FileVersion>> {
    [&options.ca, &options.certificate, &options.key]
        .into_iter()
        .flatten()
        .filter_map(Credential::file)
        .map(FileVersion::of)
        .collect()
}

/// Reads the credentials.
fn read(options: &EtcdOptions) -> Result<Arc<ClientConfig>, String> {
    let trust = match &options.ca {
        Some(ca) => Trust::of(&pem(ca, "cafile")?).map_err(|error| error.to_string())?,
        None => Trust::System,
    };
    let identity = match (&options.certificate, &options.key) {
        (Some(certificate), Some(key)) => {
            let certificate = pem(certificate, "certfile")?;
            let key = pem(key, "keyfile")?;
            Some(Identity::of(&certificate, &key).map_err(|error| error.to_string())?)
        }
        _ => None,
    };
    let mut config = client_config(trust, identity.as_ref()).map_err(|error| error.to_string())?;
    config.alpn_protocols.push(b"h2".to_vec());
    Ok(Arc::new(config))
}

/// The text of a credential. `option` is Go flannel's name of the option.
fn pem(credential: &Credential, option: &str) -> Result<Pem, String> {
    let name = format!("{option} {credential}");
    match credential.read() {
        Ok(text) => Ok(Pem { name, text }),
        Err(error) => Err(format!("{name}: {error}")),
    }
}
