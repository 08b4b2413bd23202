//! The control socket and the doctor's port.

use std::path::{Path, PathBuf};

use crate::command_line::go_flags::go_int;

/// The default of `--doctor-port`.
pub const DOCTOR_PORT: &str = "8473";
/// The usual name of the subnet file, and the name of the control socket beside it.
const SUBNET_FILE: &str = "subnet.env";
const SOCKET: &str = "flanneld.sock";

/// The control socket for a value of `--control-socket`, or `None` if that is `off`. Without a
/// value it is `flanneld.sock` beside `subnet.env`, and `NAME.sock` beside a subnet file
/// `NAME.env`: daemons of several networks may have their files in one directory.
pub fn socket(given: Option<&Path>, subnet_file: &Path) -> Option<PathBuf> {
    match given {
        Some(path) if path.as_os_str() == "off" => None,
        Some(path) => Some(path.to_owned()),
        None if subnet_file.file_name().is_none_or(|name| name == SUBNET_FILE) => {
            Some(subnet_file.with_file_name(SOCKET))
        }
        None => Some(subnet_file.with_extension("sock")),
    }
}

/// Parses a port. A number below 1 becomes 0, which stands for no port.
///
/// **Source**: flannel `main.go`.
///
/// # Errors
/// The text is not a number, or the number is above 65535.
pub fn port(text: &str) -> Result<u16, String> {
    let number = go_int(i64::MIN..=65_535)(text)?;
    Ok(u16::try_from(number).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subnet_file_has_a_socket() {
        for (subnet_file, expected) in [
            ("/run/flannel/subnet.env", "/run/flannel/flanneld.sock"),
            ("/vxlan.env", "/vxlan.sock"),
            ("/hostgw.env", "/hostgw.sock"),
            ("/run/flannel/second", "/run/flannel/second.sock"),
        ] {
            assert_eq!(socket(None, subnet_file.as_ref()), Some(expected.into()));
            let given = Path::new("/a");
            assert_eq!(socket(Some(given), subnet_file.as_ref()), Some(given.into()));
        }
    }
}
