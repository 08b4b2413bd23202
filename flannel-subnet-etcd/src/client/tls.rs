//! The certificates and the key of a connection. They are read again when their files change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use etcd_client::{Certificate, Identity, TlsOptions};
use flannel_core::Credential;
use flannel_core::runtime::{blocking, lock};
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

/// The TLS options that were read from the files.
pub(crate) struct TlsContent {
    /// The versions of the files before they were read. `None` stands for a missing file.
    pub(crate) versions: Vec<Option<FileVersion>>,
    /// The options, or why the files cannot be used.
    pub(crate) options: Result<TlsOptions, String>,
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
    /// A file cannot be read, or has no certificate or key.
    pub(crate) fn open(options: &EtcdOptions) -> Result<Self, String> {
        let versions = versions(options);
        let content = TlsContent { versions, options: Ok(read(options)?) };
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
        if known.versions != versions || known.options.is_err() {
            let content = TlsContent { versions, options: read(&self.options) };
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

/// Reads the credentials. rustls supports TLS 1.2 and 1.3 only.
fn read(options: &EtcdOptions) -> Result<TlsOptions, String> {
    let mut tls = match &options.ca {
        Some(ca) => TlsOptions::new().ca_certificate(Certificate::from_pem(read_certificate(ca)?)),
        None => TlsOptions::new().with_native_roots(),
    };
    if let (Some(certificate), Some(key)) = (&options.certificate, &options.key) {
        let certificate = read_certificate(certificate)?;
        let key = read_pem(key, "PRIVATE KEY", "key")?;
        tls = tls.identity(Identity::from_pem(certificate, key));
    }
    Ok(tls)
}

fn read_certificate(credential: &Credential) -> Result<Vec<u8>, String> {
    read_pem(credential, "CERTIFICATE", "certificate")
}

/// Reads a credential that has a PEM section with this label, which is a `kind`.
fn read_pem(credential: &Credential, label: &str, kind: &str) -> Result<Vec<u8>, String> {
    let pem = credential.read().map_err(|error| format!("cannot read {credential}: {error}"))?;
    if has_section(&pem, label) {
        return Ok(pem);
    }
    match credential {
        Credential::File(path) => Err(format!("{} contains no PEM {kind}", path.display())),
        Credential::Value(_) => Err(format!("a value contains no PEM {kind}")),
    }
}

/// Whether a PEM text has a section whose name contains `name`.
fn has_section(pem: &[u8], name: &str) -> bool {
    String::from_utf8_lossy(pem)
        .lines()
        .any(|line| line.starts_with("-----BEGIN") && line.contains(name))
}
