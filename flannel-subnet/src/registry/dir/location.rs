//! The location of a directory registry, such as `dir:PATH?assign=static`, and its file system.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use flannel_core::{Error, Result};
use nix::sys::statfs::statfs;

/// The way in which nodes get their subnets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Assign {
    /// Each node takes a free subnet.
    #[default]
    Free,
    /// An operator or a program writes the file of each node beforehand, and nodes never write.
    Static,
}

/// The options of a directory registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirOptions {
    /// The way in which nodes get their subnets.
    pub assign: Assign,
}

/// The location and options of a directory registry: `dir:/var/lib/flannel`,
/// `dir:/etc/flannel/net?assign=static`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirLocation {
    /// The directory.
    pub path: PathBuf,
    /// The options.
    pub options: DirOptions,
}

/// The error of a text that is not a location.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("registry {text:?}: {reason}")]
pub struct LocationError {
    /// The text.
    pub text: String,
    /// The reason, and the expected format.
    pub reason: String,
}

impl FromStr for DirLocation {
    type Err = LocationError;
    fn from_str(text: &str) -> Result<Self, LocationError> {
        let error = |reason: String| LocationError { text: text.to_owned(), reason };
        let Some(rest) = text.strip_prefix("dir:") else {
            return Err(error("expected dir:PATH, such as dir:/var/lib/flannel".into()));
        };
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        if path.is_empty() {
            return Err(error(
                "the path is empty; expected dir:PATH, such as dir:/var/lib/flannel".into(),
            ));
        }
        let mut options = DirOptions::default();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            options.assign = match option.split_once('=') {
                Some(("assign", "static")) => Assign::Static,
                Some(("assign", "free")) => Assign::Free,
                Some(("assign", other)) => {
                    return Err(error(format!("assign: {other:?} is not valid: static or free")));
                }
                _ => {
                    return Err(error(format!(
                        "option {option:?} is unknown; known: assign=static, assign=free"
                    )));
                }
            };
        }
        Ok(Self { path: path.into(), options })
    }
}

impl fmt::Display for DirLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dir:{}", self.path.display())?;
        match self.options.assign {
            Assign::Free => Ok(()),
            Assign::Static => f.write_str("?assign=static"),
        }
    }
}

/// File systems that do not report changes by other machines, and whose locks may not work.
///
/// **Source**: linux `include/uapi/linux/magic.h`, and the file systems' own sources.
const NETWORK_FILE_SYSTEMS: [(u32, &str); 18] = [
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xff53_4d42, "CIFS"),
    (0xfe53_4d42, "SMB2"),
    (0x0102_1997, "9p"),
    (0x6573_5546, "FUSE"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x00c3_6400, "Ceph"),
    (0x0116_1970, "GFS2"),
    (0x7461_636f, "OCFS2"),
    (0x0bd0_0bd0, "Lustre"),
    (0x7375_7245, "Coda"),
    (0x0000_564c, "NCP"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x2003_0528, "OrangeFS"),
    (0x786f_4256, "VirtualBox shared folder"),
];

/// The name of the network file system with this number, or `None` for a local file system.
fn network_file_system(magic: u32) -> Option<&'static str> {
    NETWORK_FILE_SYSTEMS.iter().find(|(number, _)| *number == magic).map(|(_, name)| *name)
}

impl DirLocation {
    /// An error about a file. `name` is its path below the directory, or empty for the directory.
    pub(super) fn error(
        &self,
        name: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Error {
        let path = if name.is_empty() { self.path.clone() } else { self.path.join(name) };
        Error::Store { store: format!("dir:{}", path.display()), source: source.into() }
    }

    /// Refuses a directory that is on a network file system, or whose `subnets` is.
    ///
    /// # Errors
    /// [`Error::Refused`], or an error of the file system.
    pub(super) fn check_file_system(&self) -> Result<()> {
        for path in [self.path.clone(), self.path.join("subnets")] {
            let store = || format!("dir:{}", path.display());
            let statfs = statfs(&path)
                .map_err(|errno| Error::Store { store: store(), source: errno.into() })?;
            // The kernel's magic numbers have 32 bits; their type differs between C libraries.
            if let Some(name) = network_file_system(statfs.filesystem_type().0 as u32) {
                return Err(Error::Refused {
                    store: store(),
                    reason: format!(
                        "it is on a network file system ({name}), which does not report changes \
                         by other machines; use a directory on a local disk (with ?assign=static \
                         and a copy on every machine, if there is more than one), or etcd"
                    )
                    .into(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_parsed_and_printed() {
        let location: DirLocation = "dir:/a/b?assign=static".parse().unwrap();
        assert_eq!(location.path.to_str(), Some("/a/b"));
        assert_eq!(location.options.assign, Assign::Static);
        assert_eq!(location.to_string(), "dir:/a/b?assign=static");
        assert_eq!("dir:x".parse::<DirLocation>().unwrap().to_string(), "dir:x");
        assert_eq!(
            "dir:x?assign=free".parse::<DirLocation>().unwrap().options,
            DirOptions::default()
        );
        for (bad, says) in [
            ("etcd:x", "dir:PATH"),
            ("dir:", "the path is empty"),
            ("dir:?assign=static", "the path is empty"),
            ("dir:/a?assign=dynamic", "\"dynamic\" is not valid: static or free"),
            ("dir:/a?assing=static", "option \"assing=static\" is unknown; known: assign=static"),
            ("dir:/a?static", "option \"static\" is unknown"),
        ] {
            let error = bad.parse::<DirLocation>().unwrap_err().to_string();
            assert!(error.contains(says) && error.contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn network_file_systems_are_recognized() {
        assert_eq!(network_file_system(0x6969), Some("NFS"));
        assert_eq!(network_file_system(0xff53_4d42), Some("CIFS"));
        assert_eq!(network_file_system(0xef53), None, "ext4");
        let check = |text: &str| text.parse::<DirLocation>().unwrap().check_file_system();
        let local = tempfile::tempdir().unwrap();
        std::fs::create_dir(local.path().join("subnets")).unwrap();
        check(&format!("dir:{}", local.path().display())).unwrap();
        let error = check("dir:/nowhere").unwrap_err().to_string();
        assert!(error.contains("dir:/nowhere"), "{error}");
    }
}
