//! The options of the `Backend` object.

use std::net::IpAddr;

use flannel_core::Subnets;
use flannel_core::address::Dual;
use flannel_core::backend::SourceCheck;
use flannel_core::config::BackendConfig;
use flannel_core::json::FieldError;
use flannel_udp::Prefix;
use serde::Deserialize;

use crate::device;

const DEFAULT_PORT: u16 = 8285;

/// The options of the backend `udp`.
///
/// **Source**: flannel `pkg/backend/udp/udp_amd64.go: RegisterNetwork`, which has `Port` only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// `Port`: the UDP port of all nodes. The default is 8285, and 0 stands for it.
    pub port: u16,
    /// `SourcePort`: whether `Port` is also the source port of all datagrams. Some firewalls
    /// require this. By default they leave from any port, so that nodes can spread flows over their
    /// processors.
    pub source_port: bool,
    /// `SourceCheck`: whether a packet is accepted only from the node that has its source address.
    /// The node may send from its public address, or from an address behind NAT that it has
    /// proved to have. Where the kernel moves the packets, a guard checks them, and only the public
    /// address counts. On by default.
    pub source_check: SourceCheck,
    /// `Path`: the code that moves the packets.
    pub path: Path,
}

/// What moves packets between pods and UDP datagrams on this node: the kernel or a process. The
/// datagrams are the same, so nodes with different values work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// The kernel if it can do what the other options demand, else a process.
    #[default]
    Auto,
    /// An ipip device of the kernel with UDP headers (Foo over UDP).
    Kernel,
    /// A process with a tun device.
    Process,
}

impl Options {
    /// The names of the fields.
    pub const NAMES: [&str; 4] = ["Port", "SourcePort", SourceCheck::NAME, "Path"];

    /// Reads the options.
    ///
    /// # Errors
    /// A field is wrong. The error names the first one.
    pub fn parse(config: &BackendConfig) -> Result<Self, FieldError> {
        let fields = config.fields()?;
        let [port, source_port, _, path] = Self::NAMES;
        let port: Option<u16> = fields.take(port, "a UDP port, 0 for 8285")?;
        Ok(Self {
            port: port.filter(|port| *port != 0).unwrap_or(DEFAULT_PORT),
            source_port: fields.take(source_port, "true or false")?.unwrap_or(false),
            source_check: SourceCheck::parse(config)?.unwrap_or(SourceCheck::Drop),
            path: fields.take(path, r#""auto", "kernel" or "process""#)?.unwrap_or_default(),
        })
    }

    /// The options of the data plane of a node with these addresses and subnets.
    pub(crate) fn data_plane(
        &self,
        addresses: &Dual<IpAddr>,
        own: &Subnets,
    ) -> flannel_udp::Options {
        flannel_udp::Options {
            device: device().to_string(),
            local: addresses.values().copied().collect(),
            port: self.port,
            own: own
                .iter()
                .map(|subnet| Prefix { address: subnet.base(), len: subnet.len() })
                .collect(),
            one_port: self.source_port,
            checks_source: self.source_check != SourceCheck::Off,
            counts_only: self.source_check == SourceCheck::Count,
            queues: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::Config;

    use super::*;

    fn parse(options: &str) -> Result<Options, FieldError> {
        let text = format!(r#"{{"Network":"10.1.0.0/16","Backend":{{"Type":"udp"{options}}}}}"#);
        Options::parse(&Config::parse(&text).unwrap().backend)
    }

    #[test]
    fn options_are_checked() {
        let source_check = SourceCheck::Drop;
        let defaults = Options { port: 8285, source_port: false, source_check, path: Path::Auto };
        assert_eq!(parse(""), Ok(defaults));
        assert_eq!(parse(r#","port":0"#), Ok(defaults));
        let all = parse(r#","Port":7,"SourcePort":true,"SourceCheck":false,"Path":"kernel""#);
        let source_check = SourceCheck::Off;
        let path = Path::Kernel;
        assert_eq!(all, Ok(Options { port: 7, source_port: true, source_check, path }));
        for (wrong, field) in [
            (r#","Port":65536"#, "Backend.Port"),
            (r#","Port":"8285""#, "Backend.Port"),
            (r#","SourcePort":1"#, "Backend.SourcePort"),
            (r#","SourceCheck":"no""#, "Backend.SourceCheck"),
            (r#","Path":"fast""#, "Backend.Path"),
        ] {
            assert_eq!(parse(wrong).unwrap_err().field, field);
        }
    }
}
