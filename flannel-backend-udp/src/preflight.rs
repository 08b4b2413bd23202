//! The check that this process may open tun devices, before anything is changed.

use std::fs::OpenOptions;
use std::io::{Error, ErrorKind};
use std::path::Path;

/// The device with which programs make tun devices.
const TUN: &str = "/dev/net/tun";

/// Opens the device that makes tun devices, and closes it again. This loads the module, and does
/// not make a device.
///
/// # Errors
/// It cannot be opened. The text names the cure.
pub(crate) fn check() -> Result<(), String> {
    may_open(Path::new(TUN))
}

fn may_open(path: &Path) -> Result<(), String> {
    match OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{}: {error}: {}", path.display(), cure(&error))),
    }
}

fn cure(error: &Error) -> &'static str {
    match (error.kind(), error.raw_os_error()) {
        // `ENXIO` (6) and `ENODEV` (19): the file is there, and the kernel has no such device.
        (ErrorKind::NotFound, _) | (_, Some(6 | 19)) => {
            "load the module (modprobe tun). A container needs this device of the host too: with \
             Kubernetes, `privileged: true`"
        }
        (ErrorKind::PermissionDenied, _) => {
            "the limits of this process forbid it. A systemd unit needs `DeviceAllow=/dev/net/tun \
             rw`, a container of Kubernetes `privileged: true`"
        }
        _ => "the backend udp needs this device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_opened_is_named_with_the_cure() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("tun");
        let error = may_open(&missing).unwrap_err();
        assert!(error.starts_with(missing.to_str().unwrap()), "{error}");
        assert!(error.contains("No such file") && error.contains("modprobe tun"), "{error}");
        std::fs::write(&missing, "").unwrap();
        assert_eq!(may_open(&missing), Ok(()));
        // `EPERM` of a device cgroup, `EACCES` of the mode, `ENXIO` and `ENODEV`: no module.
        for (errno, word) in [
            (1, "DeviceAllow"),
            (13, "privileged"),
            (6, "modprobe"),
            (19, "modprobe"),
            (5, "the backend udp needs"),
        ] {
            let found = cure(&Error::from_raw_os_error(errno));
            assert!(found.contains(word), "{errno}: {found}");
        }
    }
}
