//! The control socket and the doctor's port.

use std::path::{Path, PathBuf};

use crate::command_line::go_flags::go_int;

/// The default of `--doctor-port`.
pub const DOCTOR_PORT: &str = "8473";
/// The name of the control socket in the directory of the subnet file.
const SOCKET: &str = "flanneld.sock";

/// The control socket for a value of `--control-socket`, or `None` if that is `off`.
pub fn socket(given: Option<&Path>, subnet_file: &Path) -> Option<PathBuf> {
    match given {
        Some(path) if path.as_os_str() == "off" => None,
        Some(path) => Some(path.to_owned()),
        None => Some(subnet_file.with_file_name(SOCKET)),
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
