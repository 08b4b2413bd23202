//! `subnet.env`, which publishes this host's subnet to container runtimes and CNI plugins.
//!
//! Other programs parse the file, so it has the same bytes as Go flannel's file.
//!
//! **Source**: flannel `pkg/subnet/subnet.go: WriteSubnetFile, ReadCIDRFromSubnetFile`, which reads
//! the syntax of godotenv.

use std::convert::Infallible;
use std::fs::{self, DirBuilder};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use std::{fmt, io};

use flannel_core::address::{Dual, Family};
use flannel_core::logging::LogRateLimiter;
use flannel_core::{Subnet, Subnets};
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::atomic;
use crate::clock::{Clock, SystemClock};
use crate::runtime::readable;

/// The pause between the removal of the file and its restoration. A program that removes it all the
/// time must not keep a core busy.
const RESTORE_PAUSE: Duration = Duration::from_millis(200);

/// The content of `subnet.env`. `Display` is the text of the file.
///
/// ```
/// use flannel_subnet::SubnetEnv;
///
/// let env = SubnetEnv {
///     networks: ["10.1.0.0/16".parse().unwrap()].into_iter().collect(),
///     subnets: ["10.1.5.0/24".parse().unwrap()].into_iter().collect(),
///     mtu: 1450,
///     ip_masq: true,
/// };
/// assert!(env.to_string().contains("FLANNEL_SUBNET=10.1.5.1/24\n"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// The pod networks of the enabled families.
    pub networks: Dual<Subnet>,
    /// This host's subnets. The file has their second address, which is the address of the bridge.
    pub subnets: Dual<Subnet>,
    /// The MTU of pods, in bytes.
    pub mtu: u32,
    /// Whether flannel masquerades traffic that leaves the pod network.
    pub ip_masq: bool,
}

/// The reason why a `subnet.env` cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SubnetEnvError {
    /// An error of the file system; `NotFound` if the file does not exist.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A line is wrong.
    #[error("{path}, line {line}: {key}: {value:?} is not {expected}", path = path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The key, or the whole line if it has no key.
        key: String,
        /// The value.
        value: String,
        /// The expected kind of value.
        expected: &'static str,
    },
    /// A key is missing.
    #[error("{path}: {key} is missing", path = path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
    },
}

const fn network_key(family: Family) -> &'static str {
    match family {
        Family::V4 => "FLANNEL_NETWORK",
        Family::V6 => "FLANNEL_IPV6_NETWORK",
    }
}

const fn subnet_key(family: Family) -> &'static str {
    match family {
        Family::V4 => "FLANNEL_SUBNET",
        Family::V6 => "FLANNEL_IPV6_SUBNET",
    }
}

impl fmt::Display for SubnetEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for family in Family::BOTH {
            if let Some(network) = self.networks[family] {
                writeln!(f, "{}={network}", network_key(family))?;
            }
            if let Some(subnet) = self.subnets[family] {
                let host = subnet.nth(1).unwrap_or_else(|| subnet.base());
                writeln!(f, "{}={host}/{}", subnet_key(family), subnet.len())?;
            }
        }
        writeln!(f, "FLANNEL_MTU={}", self.mtu)?;
        writeln!(f, "FLANNEL_IPMASQ={}", self.ip_masq)
    }
}

impl SubnetEnv {
    /// This host's subnets as the identity of a lease, to get the same lease after a restart.
    /// `None` if the file has no subnet.
    pub fn previous(&self) -> Option<Subnets> {
        Subnets::new(self.subnets.values().copied())
    }

    /// Writes the file in one step, and creates its directory (mode 0755). A new file has mode 0644
    /// regardless of the umask. An existing one keeps its mode.
    ///
    /// # Errors
    /// [`SubnetEnvError::Io`].
    ///
    /// # Blocking
    /// Waits for the disk.
    pub fn write_atomic(&self, path: &Path) -> Result<(), SubnetEnvError> {
        let error = |source| SubnetEnvError::Io { path: path.to_owned(), source };
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o755).create(parent).map_err(error)?;
        }
        atomic::replace(path, self.to_string().as_bytes(), 0o644, None).map_err(error)
    }

    /// Calls `write` each time another program has removed the file at `path`. Returns only when
    /// `write` fails, with its error. If the file cannot be watched, it never returns.
    ///
    /// # Panics
    /// There is no tokio runtime with I/O enabled.
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

    /// Reads the file like a shell or dotenv: quotes, `export`, comments and `KEY: value` are
    /// accepted, unknown keys are ignored, host bits are cleared, and the last line of a key
    /// counts. Invalid items in a list of subnets are ignored. If not exactly one valid item is
    /// left, the family is absent.
    ///
    /// # Errors
    /// The message has the file, line, key, value, and the expected kind of value.
    ///
    /// # Blocking
    /// Reads one small file.
    pub fn read(path: &Path) -> Result<Self, SubnetEnvError> {
        let text = fs::read_to_string(path)
            .map_err(|source| SubnetEnvError::Io { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Parses the text of a file, as [`SubnetEnv::read`] does. `path` is for messages.
    ///
    /// # Errors
    /// As for [`SubnetEnv::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, SubnetEnvError> {
        let mut env =
            Self { networks: Dual::default(), subnets: Dual::default(), mtu: 0, ip_masq: false };
        let mut mtu = None;
        let mut ip_masq = None;
        for (number, text) in text.lines().enumerate() {
            let line = Line { path, number: number + 1, text };
            let Some((key, value)) = line.assignment()? else { continue };
            for family in Family::BOTH {
                if key == network_key(family) {
                    env.networks[family] = line.subnet(key, &value, family)?;
                } else if key == subnet_key(family) {
                    env.subnets[family] = line.subnet(key, &value, family)?;
                }
            }
            match key {
                "FLANNEL_MTU" => mtu = Some(line.parsed(key, &value, "a number of bytes")?),
                "FLANNEL_IPMASQ" => ip_masq = Some(line.parsed(key, &value, "true or false")?),
                _ => (),
            }
        }
        let missing = |key| SubnetEnvError::Missing { path: path.to_owned(), key };
        env.mtu = mtu.ok_or_else(|| missing("FLANNEL_MTU"))?;
        env.ip_masq = ip_masq.ok_or_else(|| missing("FLANNEL_IPMASQ"))?;
        Ok(env)
    }
}

/// Waits until the file at `path` does not exist.
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

struct Line<'a> {
    path: &'a Path,
    number: usize,
    text: &'a str,
}

impl<'a> Line<'a> {
    fn error(&self, key: &str, value: &str, expected: &'static str) -> SubnetEnvError {
        SubnetEnvError::Line {
            path: self.path.to_owned(),
            line: self.number,
            key: key.to_owned(),
            value: value.to_owned(),
            expected,
        }
    }

    /// The key and the value, or `None` for an empty line or a comment.
    fn assignment(&self) -> Result<Option<(&'a str, String)>, SubnetEnvError> {
        let text = self.text.trim();
        if text.is_empty() || text.starts_with('#') {
            return Ok(None);
        }
        let text = text.strip_prefix("export ").unwrap_or(text);
        let Some((key, value)) = text.split_once(['=', ':']) else {
            return Err(self.error(text, "", "an assignment such as FLANNEL_MTU=1450"));
        };
        let key = key.trim();
        let value = value.trim();
        for quote in ['"', '\''] {
            let Some(quoted) = value.strip_prefix(quote) else { continue };
            let Some((value, _)) = quoted.split_once(quote) else {
                return Err(self.error(key, value, "a value whose quotes are closed"));
            };
            return Ok(Some((key, value.to_owned())));
        }
        let value = match value.find(" #") {
            Some(comment) => &value[..comment],
            None => value,
        };
        Ok(Some((key, value.trim_end().to_owned())))
    }

    fn parsed<T: FromStr>(
        &self,
        key: &str,
        value: &str,
        expected: &'static str,
    ) -> Result<T, SubnetEnvError> {
        value.parse().map_err(|_| self.error(key, value, expected))
    }

    fn subnet(
        &self,
        key: &str,
        value: &str,
        family: Family,
    ) -> Result<Option<Subnet>, SubnetEnvError> {
        let expected = match family {
            Family::V4 => "an IPv4 subnet such as 10.1.5.1/24",
            Family::V6 => "an IPv6 subnet such as fd00:0:0:5::1/64",
        };
        let valid: Vec<Subnet> = value
            .split(',')
            .filter_map(|item| item.trim().parse::<Subnet>().ok())
            .filter(|subnet| subnet.family() == family && !subnet.is_everything())
            .collect();
        match valid[..] {
            [subnet] => Ok(Some(subnet)),
            // Invalid items are errors only outside of a list.
            _ if value.contains(',') => Ok(None),
            _ => Err(self.error(key, value, expected)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn env(subnets: &[(&str, &str)]) -> SubnetEnv {
        SubnetEnv {
            networks: subnets
                .iter()
                .map(|(network, _)| network.parse::<Subnet>().unwrap())
                .collect(),
            subnets: subnets.iter().map(|(_, subnet)| subnet.parse::<Subnet>().unwrap()).collect(),
            mtu: 1450,
            ip_masq: true,
        }
    }

    #[test]
    fn subnet_env_has_the_bytes_of_go_flannel() {
        let v4 = ("10.1.0.0/16", "10.1.5.0/24");
        let v6 = ("fd00::/48", "fd00:0:0:5::/64");
        let golden = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
                      FLANNEL_IPV6_NETWORK=fd00::/48\nFLANNEL_IPV6_SUBNET=fd00:0:0:5::1/64\n\
                      FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        assert_eq!(env(&[v4, v6]).to_string(), golden);
        let lines: Vec<&str> = golden.lines().collect();
        let v4_only = [lines[0], lines[1], lines[4], "FLANNEL_IPMASQ=false", ""].join("\n");
        assert_eq!(SubnetEnv { ip_masq: false, ..env(&[v4]) }.to_string(), v4_only);
        assert_eq!(env(&[v6]).to_string(), [lines[2], lines[3], lines[4], lines[5], ""].join("\n"));
    }

    #[test]
    fn a_written_subnet_env_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/flannel/subnet.env");
        let missing = SubnetEnv::read(&path).unwrap_err();
        let SubnetEnvError::Io { source, .. } = &missing else { panic!("{missing:?}") };
        assert_eq!(source.kind(), io::ErrorKind::NotFound);
        let env = env(&[("10.1.0.0/16", "10.1.5.0/24"), ("fd00::/48", "fd00:0:0:5::/64")]);
        env.write_atomic(&path).unwrap();
        assert_eq!(SubnetEnv::read(&path).unwrap(), env);
        assert_eq!(env.previous().unwrap().to_string(), "10.1.5.0-24&fd00:0:0:5::-64");
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
        let env = env(&[("10.1.0.0/16", "10.1.5.0/24")]);
        env.write_atomic(&path).unwrap();
        let written = AtomicUsize::new(0);
        let write = async || {
            written.fetch_add(1, Ordering::Relaxed);
            env.write_atomic(&path)
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
            failed = SubnetEnv::restore(&path, write) => match failed.unwrap() {},
            () = removals => {}
        }
        assert_eq!(written.load(Ordering::Relaxed), 2);
        assert_eq!(SubnetEnv::read(&path).unwrap(), env);
    }

    #[test]
    fn shell_and_dotenv_syntax_is_accepted() {
        let text = "# flannel\n\nexport FLANNEL_NETWORK=\"10.1.0.0/16\"\n\
                    FLANNEL_SUBNET: 10.1.5.77/24 # ours\nFLANNEL_MTU='1450'\n\
                    FLANNEL_IPMASQ = true\nOTHER=x=y\nFLANNEL_SUBNET=10.1.6.1/24\n\
                    FLANNEL_IPV6_NETWORK=fd00::/48,rubbish\n\
                    FLANNEL_IPV6_SUBNET=fd00::1/64,fd01::1/64\n";
        let mut expected = env(&[("10.1.0.0/16", "10.1.6.0/24")]);
        expected.networks.v6 = Some("fd00::/48".parse().unwrap());
        assert_eq!(SubnetEnv::parse(text, Path::new("x")).unwrap(), expected);
    }

    #[test]
    fn errors_name_file_line_key_value_and_the_expected_value() {
        for (bad, says) in [
            (
                "FLANNEL_SUBNET=10.1.5.1",
                r#"line 1: FLANNEL_SUBNET: "10.1.5.1" is not an IPv4 subnet such as"#,
            ),
            (
                "\nFLANNEL_SUBNET=fd00::1/64",
                r#"line 2: FLANNEL_SUBNET: "fd00::1/64" is not an IPv4"#,
            ),
            ("FLANNEL_IPV6_SUBNET=10.1.5.1/24", r#""10.1.5.1/24" is not an IPv6 subnet"#),
            ("FLANNEL_NETWORK=0.0.0.0/0", "FLANNEL_NETWORK"),
            ("FLANNEL_MTU=big", r#"FLANNEL_MTU: "big" is not a number of bytes"#),
            (
                "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=yes",
                r#"line 2: FLANNEL_IPMASQ: "yes" is not true or false"#,
            ),
            ("FLANNEL_MTU=\"1450", "quotes are closed"),
            ("nonsense", "an assignment such as FLANNEL_MTU=1450"),
            ("FLANNEL_IPMASQ=true", "FLANNEL_MTU is missing"),
            ("FLANNEL_MTU=1450", "FLANNEL_IPMASQ is missing"),
        ] {
            let error = SubnetEnv::parse(bad, Path::new("/run/flannel/subnet.env"))
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with("/run/flannel/subnet.env") && error.contains(says),
                "{bad}: {error}"
            );
        }
    }
}
