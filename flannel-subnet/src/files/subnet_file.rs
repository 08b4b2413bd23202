//! The file `subnet.env`: read, written, and watched for its removal.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use flannel_core::logging::LogRateLimiter;
use flannel_core::{Subnet, SubnetEnv, SubnetEnvError, Subnets};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::atomic;
use crate::clock::{Clock, SystemClock};
use crate::runtime::readable;

/// The pause between the removal of the file and its restoration. A program that removes it all the
/// time must not keep a core busy.
const RESTORE_PAUSE: Duration = Duration::from_millis(200);

/// The reason why a `subnet.env` cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubnetFileError {
    /// An error of the file system; `NotFound` if the file does not exist.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The content is wrong.
    #[error("{path}: {source}", path = path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The error.
        source: SubnetEnvError,
    },
}

/// Reads the file, as [`SubnetEnv::parse`] does.
///
/// # Errors
/// The file cannot be read, or its content is wrong.
///
/// # Blocking
/// Reads one small file.
pub fn read(path: &Path) -> Result<SubnetEnv, SubnetFileError> {
    let text = fs::read_to_string(path)
        .map_err(|source| SubnetFileError::Io { path: path.to_owned(), source })?;
    SubnetEnv::parse(&text)
        .map_err(|source| SubnetFileError::Content { path: path.to_owned(), source })
}

/// The subnets in the file of the last run, to get the same lease again. `None` if the file does
/// not exist or has no subnet. A wrong value of another key does not hide them.
///
/// # Errors
/// The file cannot be read, or has wrong values and no subnet.
///
/// # Blocking
/// Waits for the disk.
pub fn previous(path: &Path) -> Result<Option<Subnets>, SubnetFileError> {
    let read_error = match read(path) {
        Ok(env) => return Ok(env.previous()),
        Err(SubnetFileError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(error) => error,
    };
    let previous = fs::read_to_string(path).ok().and_then(|text| SubnetEnv::previous_in(&text));
    previous.map(Some).ok_or(read_error)
}

/// Writes the file in one step, and creates its directory (mode 0755). A new file has mode 0644
/// regardless of the umask. An existing one keeps its mode.
///
/// # Errors
/// [`SubnetFileError::Io`].
///
/// # Blocking
/// Waits for the disk.
pub fn write(path: &Path, env: &SubnetEnv) -> Result<(), SubnetFileError> {
    let error = |source| SubnetFileError::Io { path: path.to_owned(), source };
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(error)?;
    }
    atomic::replace(path, env.to_string().as_bytes(), 0o644, None).map_err(error)
}

/// What is known of the subnets of this node, to compare a file with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// It has no subnets.
    Nothing,
    /// It has these subnets.
    Subnets(Subnets),
    /// Its subnets will be inside these pod networks.
    Networks(Vec<Subnet>),
    /// It has these subnets of these pod networks.
    Both(Subnets, Vec<Subnet>),
}

impl Known {
    /// Whether a file with these subnets may be the one of this node. `networks` are those of the
    /// file, or `None` if they cannot be read.
    fn fits(&self, subnets: Subnets, networks: Option<&[Subnet]>) -> bool {
        let set = |networks: &[Subnet]| BTreeSet::from_iter(networks.iter().copied());
        match self {
            Self::Nothing => false,
            Self::Subnets(own) => *own == subnets,
            Self::Networks(all) => {
                subnets.iter().all(|subnet| all.iter().any(|network| network.covers(&subnet)))
            }
            Self::Both(own, all) => {
                *own == subnets && networks.is_none_or(|networks| set(networks) == set(all))
            }
        }
    }
}

/// Removes the file if it has other subnets or pod networks than this node. Returns the subnets of
/// the removed file, or `None` if the file stays. A file without a subnet stays: plugins refuse it.
///
/// # Errors
/// The file cannot be removed.
///
/// # Blocking
/// Waits for the disk.
pub fn remove_others(path: &Path, known: &Known) -> Result<Option<Subnets>, SubnetFileError> {
    let Ok(Some(there)) = previous(path) else { return Ok(None) };
    let networks = read(path).ok().map(|env| env.networks);
    if known.fits(there, networks.as_deref()) {
        return Ok(None);
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(SubnetFileError::Io { path: path.to_owned(), source }),
        Ok(()) => Ok(Some(there)),
    }
}

/// Calls `write` each time another program has removed the file at `path`. Returns only when
/// `write` fails, with its error. If the file cannot be watched, it never returns.
///
/// # Panics
/// The caller is not in a tokio runtime with I/O enabled.
///
/// # Cancel safety
/// A call of `write` may be dropped before it has finished. Nothing else is lost.
pub async fn restore<E>(
    path: &Path,
    write: impl AsyncFn() -> Result<(), E>,
) -> Result<Infallible, E> {
    let mut limiter = LogRateLimiter::default();
    loop {
        if let Err(error) = removed(path).await {
            tracing::debug!(path = %path.display(), %error, "the file is not watched");
            return std::future::pending().await;
        }
        if let Some(more) = limiter.line(SystemClock.boottime(), "removed") {
            tracing::warn!(
                path = %path.display(), more,
                "another program removed the file, restoring it"
            );
        }
        tokio::time::sleep(RESTORE_PAUSE).await;
        write().await?;
    }
}

/// Waits until another program removes the file at `path`.
async fn removed(path: &Path) -> io::Result<()> {
    let events = AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DELETE_SELF;
    loop {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        match inotify.add_watch(path, events | AddWatchFlags::IN_MOVE_SELF) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(()),
            watched => _ = watched?,
        }
        readable(OwnedFd::from(inotify))?.readable().await?.retain_ready();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
                       FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\n\
                       FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

    #[test]
    fn a_written_subnet_env_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/flannel/subnet.env");
        let missing = read(&path).unwrap_err();
        let SubnetFileError::Io { source, .. } = &missing else { panic!("{missing:?}") };
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
        let env = SubnetEnv::parse(ENV).unwrap();
        write(&path, &env).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), ENV);
        assert_eq!(read(&path).unwrap(), env);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o644);
        assert_eq!(mode(path.parent().unwrap()) & !0o755, 0, "only its owner may write to it");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_removed_file_is_written_again_and_a_changed_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/subnet.env");
        let other = dir.path().join("other");
        let env = SubnetEnv::parse(ENV).unwrap();
        write(&path, &env).unwrap();
        let written = AtomicUsize::new(0);
        let write_again = async || {
            written.fetch_add(1, Ordering::Relaxed);
            write(&path, &env)
        };
        let restored = || {
            test_support::eventually_async(
                Duration::from_secs(20),
                async || path.exists(),
                || "no file",
            )
        };
        let removals = async {
            fs::remove_file(&path).unwrap();
            restored().await;
            fs::write(&other, "FLANNEL_MTU=1").unwrap();
            fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).unwrap();
            fs::rename(&other, &path).unwrap();
            fs::remove_dir_all(path.parent().unwrap()).unwrap();
            restored().await;
        };
        tokio::select! {
            failed = restore(&path, write_again) => match failed.unwrap() {},
            () = removals => {}
        }
        assert_eq!(written.load(Ordering::Relaxed), 2);
        assert_eq!(read(&path).unwrap(), env);
    }

    #[test]
    fn a_file_of_other_subnets_or_networks_is_removed_and_one_of_the_same_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        let own: Subnets = "10.1.5.0-24&fd00:0:0:5::-64".parse().unwrap();
        let networks: Vec<Subnet> = ["fd00::/48", "10.1.0.0/16"].map(|n| n.parse().unwrap()).into();
        let removed = |text: &str, known: &Known| {
            fs::write(&path, text).unwrap();
            let there = remove_others(&path, known).unwrap();
            assert_eq!(there.is_some(), !path.exists());
            there.is_some()
        };
        let inside = Known::Networks(networks.clone());
        let both = Known::Both(own, networks);
        for known in [&Known::Subnets(own), &inside, &both] {
            assert!(!removed(ENV, known), "{known:?}");
        }
        assert!(removed(ENV, &Known::Nothing));
        for (from, to) in [
            ("10.1.5.1", "10.1.6.1"),
            ("10.1.5.1/24", "10.1.5.1/25"),
            ("fd00:0:0:5::1", "fd00:0:0:6::1"),
            ("FLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\n", ""),
        ] {
            let other = ENV.replace(from, to);
            assert!(removed(&other, &Known::Subnets(own)) && removed(&other, &both), "{from} {to}");
            assert!(!removed(&other, &inside), "{from} {to}");
        }
        for (from, to) in [("10.1.0.0/16", "10.0.0.0/8"), ("FLANNEL_IPV6_NETWORK=fd00::/48\n", "")]
        {
            assert!(removed(&ENV.replace(from, to), &both), "{from} {to}");
        }
        for (from, to) in [("10.1.5.1", "10.9.5.1"), ("fd00:0:0:5::1", "fd09:0:0:5::1")] {
            assert!(removed(&ENV.replace(from, to), &inside), "{from} {to}");
        }
        // Other values are not about the addresses of pods. Without a subnet there are none.
        assert!(!removed(&ENV.replace("1450", "1400"), &both));
        assert!(!removed("FLANNEL_MTU=1450\n", &both));
        fs::remove_file(&path).unwrap();
        assert_eq!(remove_others(&path, &Known::Nothing).unwrap(), None);
    }

    #[test]
    fn errors_name_the_file_and_the_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        fs::write(&path, "\nFLANNEL_SUBNET=10.1.5.1\n").unwrap();
        let error = read(&path).unwrap_err().to_string();
        let says = r#"line 2: FLANNEL_SUBNET is "10.1.5.1", expected an IPv4 subnet"#;
        assert_eq!(error, format!("{}: {says}", path.display()));
    }
}
