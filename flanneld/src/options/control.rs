//! The options of health, metrics, control and capabilities.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use flannel_options::control::{DOCTOR_PORT, port};

use crate::config::{ControlConfig, ControlSocket};

/// `--capabilities`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Capabilities {
    /// The capabilities for changing the network, and those that the options make necessary.
    Least,
    /// All capabilities of the process.
    All,
}

/// The options of health, metrics and control.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct ControlFlags {
    /// The address of /healthz, /readyz and /metrics; 0.0.0.0 and `::` mean every address of both
    /// families
    #[arg(long, value_name = "ADDRESS", default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    pub healthz_ip: IpAddr,

    /// The port of /healthz, /readyz and /metrics; 0: none
    #[arg(long, value_name = "PORT", default_value = "0", allow_hyphen_values = true,
        value_parser = port)]
    pub healthz_port: u16,

    /// The socket for flannelctl, or off; by default flanneld.sock beside the subnet file, or
    /// NAME.sock beside a subnet file NAME.env
    #[arg(long, value_name = "FILE|off")]
    pub control_socket: Option<PathBuf>,

    /// The group whose members may read the daemon's state at the control socket, by name or
    /// number; only root and the daemon's own user may make changes
    #[arg(long, value_name = "GROUP", value_parser = group)]
    pub control_group: Option<u32>,

    /// The port at which this daemon answers flannelctl doctor of other nodes: TCP and UDP at the
    /// tunnel's address; TCP at the external interface's address if packets of pods can travel
    /// without a tunnel, or if the tunnel is encrypted; 0: none
    #[arg(long, value_name = "PORT", default_value = DOCTOR_PORT, value_parser = port)]
    pub doctor_port: u16,

    /// The time in which each path to a peer is probed at least once, in seconds; 0: paths are not
    /// probed
    #[arg(long, value_name = "SECONDS", default_value = "300", allow_hyphen_values = true,
        value_parser = clap::value_parser!(u32).range(..=86_400))]
    pub path_interval: u32,
}

/// Parses the name or the number of a group.
fn group(text: &str) -> Result<u32, String> {
    match text.parse() {
        // The kernel treats this number as no change.
        Ok(u32::MAX) => {
            return Err(format!("{text} is no group; expected one of getent group"));
        }
        Ok(number) => return Ok(number),
        Err(_) => {}
    }
    match nix::unistd::Group::from_name(text) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => {
            Err("this host has no such group; expected a name of getent group, or a number"
                .to_owned())
        }
        Err(errno) => {
            Err(format!("the groups of this host cannot be read: {errno}; expected a number"))
        }
    }
}

impl ControlFlags {
    /// The configuration that these flags ask for.
    pub(crate) fn config(&self) -> ControlConfig {
        ControlConfig {
            health: Some(SocketAddr::new(self.healthz_ip, self.healthz_port))
                .filter(|address| address.port() != 0),
            socket: match &self.control_socket {
                None => ControlSocket::BesideSubnetFile,
                Some(path) if path.as_os_str() == "off" => ControlSocket::Off,
                Some(path) => ControlSocket::At(path.clone()),
            },
            group: self.control_group,
            doctor_port: self.doctor_port,
            path_interval: Duration::from_secs(self.path_interval.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_given_by_name_or_number() {
        assert_eq!(group("0"), Ok(0));
        assert_eq!(group("root"), Ok(0));
        assert_eq!(group("4294967294"), Ok(4_294_967_294));
        assert!(group("4294967295").unwrap_err().contains("is no group"));
        assert!(group("no such group").unwrap_err().contains("getent group"));
    }
}
