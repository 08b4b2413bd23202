//! The options of the `Backend` object.

use std::path::PathBuf;

use flannel_core::config::BackendConfig;
use flannel_core::json::{FieldError, Fields};
use flannel_core::object::Secret;
use serde::Deserialize;

use crate::key::decode;

/// The options of the backend `wireguard`.
///
/// **Source**: flannel `pkg/backend/wireguard/wireguard.go: RegisterNetwork`. Different on purpose:
/// numbers outside their range are errors, and `PSKFile` is new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `ListenPort`: the UDP port of the IPv4 tunnel, or of the only tunnel. The default is 51820,
    /// and 0 stands for it.
    pub port: u16,
    /// `ListenPortV6`: the UDP port of the IPv6 tunnel of [`Mode::Separate`]. The default is
    /// 51821, and 0 stands for it.
    pub port_v6: u16,
    /// `MTU`: the MTU of the underlay, in bytes. `None` (0 in the config) stands for the MTU of
    /// the external interface. A node whose interface carries less uses that.
    pub mtu: Option<u32>,
    /// `PSK`, `PSKFile`: a key that all nodes share, besides their own keys, or `None`.
    pub psk: Option<Psk>,
    /// `PersistentKeepaliveInterval`: the seconds after which an idle tunnel sends an empty packet.
    /// 0, the default, stands for never. Nodes behind NAT need 25.
    pub keepalive: u16,
    /// `Mode`: the tunnels of a node.
    pub mode: Mode,
}

/// The source of the key that all nodes share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Psk {
    /// `PSK`: the key itself, 32 bytes.
    Key(Secret),
    /// `PSKFile`: a file on each node with the key as base64, such as a mounted Kubernetes Secret.
    File(PathBuf),
}

/// The tunnels of a node, and the addresses between which they run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// `separate`, the default: IPv4 packets travel between IPv4 addresses, and IPv6 packets
    /// between IPv6 addresses, each in a tunnel of its own.
    #[default]
    Separate,
    /// `auto`: one tunnel for both families. If a peer has addresses of both families, the tunnel
    /// normally runs to its IPv4 address. It runs to the IPv6 address if two conditions hold.
    /// First, the IPv6 addresses of both nodes are not private. Second, the IPv4 address of the
    /// peer is private, or this node publishes no IPv4 address.
    Auto,
    /// `ipv4`: one tunnel for both families, between IPv4 addresses.
    Ipv4,
    /// `ipv6`: one tunnel for both families, between IPv6 addresses.
    Ipv6,
}

impl Options {
    /// The names of the fields.
    pub const NAMES: [&str; 7] = [
        "ListenPort",
        "ListenPortV6",
        "MTU",
        "PSK",
        "PSKFile",
        "PersistentKeepaliveInterval",
        "Mode",
    ];

    /// Reads the options.
    ///
    /// # Errors
    /// A field is wrong. The error names the first one, and never shows the key.
    pub fn parse(config: &BackendConfig) -> Result<Self, FieldError> {
        let fields = config.fields()?;
        let [port, port_v6, mtu, _, _, keepalive, mode] = Self::NAMES;
        let port_of = |name, default: u16| {
            let port: Option<u16> = fields.take(name, &format!("a UDP port, 0 for {default}"))?;
            Ok(port.filter(|port| *port != 0).unwrap_or(default))
        };
        let mtu_range = "the underlay's MTU in bytes, 0 for the interface's";
        let mtu: Option<u16> = fields.take(mtu, mtu_range)?;
        let seconds = "seconds as a number from 0 (never) to 65535";
        Ok(Self {
            port: port_of(port, 51820)?,
            port_v6: port_of(port_v6, 51821)?,
            mtu: mtu.filter(|mtu| *mtu != 0).map(u32::from),
            psk: psk(&fields)?,
            keepalive: fields.take(keepalive, seconds)?.unwrap_or(0),
            mode: fields.take(mode, "separate, auto, ipv4 or ipv6")?.unwrap_or_default(),
        })
    }
}

fn psk(fields: &Fields) -> Result<Option<Psk>, FieldError> {
    let [_, _, _, psk, file, ..] = Options::NAMES;
    let wrong = || fields.error(psk, &"(not shown)", "32 bytes as base64, from `wg genpsk`");
    let key = fields.take::<String>(psk, "").map_err(|_| wrong())?.filter(|key| !key.is_empty());
    let path = fields.take::<String>(file, "the path of a file")?.filter(|path| !path.is_empty());
    // A key in the wrong field.
    if path.as_ref().is_some_and(|path| decode(path.as_bytes()).is_some()) {
        return Err(fields.error(file, &"(not shown)", format!("the path of a file, or {psk}")));
    }
    match (key, path) {
        (Some(_), Some(path)) => Err(fields.error(file, &path, format!("no {file} besides {psk}"))),
        (Some(key), None) => Ok(Some(Psk::Key(decode(key.as_bytes()).ok_or_else(wrong)?))),
        (None, Some(path)) if path.starts_with('/') => Ok(Some(Psk::File(path.into()))),
        (None, Some(path)) => Err(fields.error(file, &path, "an absolute path")),
        (None, None) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flannel_core::Config;

    fn parse(backend: &str) -> Result<Options, FieldError> {
        let config = format!(r#"{{"Network":"10.1.0.0/16","Backend":{backend}}}"#);
        Options::parse(&Config::parse(&config).unwrap().backend)
    }

    #[test]
    fn defaults_and_all_options() {
        let defaults = Options {
            port: 51820,
            port_v6: 51821,
            mtu: None,
            psk: None,
            keepalive: 0,
            mode: Mode::Separate,
        };
        for text in [
            r#"{"Type":"wireguard"}"#,
            r#"{"Type":"wireguard","PSK":"","PSKFile":"","MTU":0,"ListenPort":0,"Mode":null}"#,
        ] {
            assert_eq!(parse(text), Ok(defaults.clone()), "{text}");
        }
        let all = parse(
            r#"{"Type":"wireguard","listenport":7,"ListenPortV6":8,"MTU":1400,"Mode":"auto",
                "PSK":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
                "PersistentKeepaliveInterval":25}"#,
        );
        let key: [u8; 32] = std::array::from_fn(|n| n as u8);
        let psk = Some(Psk::Key(Secret::new(key)));
        let expected =
            Options { port: 7, port_v6: 8, mtu: Some(1400), psk, keepalive: 25, mode: Mode::Auto };
        assert_eq!(all, Ok(expected));
        let file = parse(r#"{"Type":"wireguard","PSKFile":"/etc/psk"}"#).unwrap().psk;
        assert_eq!(file, Some(Psk::File("/etc/psk".into())));
    }

    #[test]
    fn wrong_values_are_named_but_no_key_is_shown() {
        for (options, field, value) in [
            (r#""ListenPort":70000"#, "ListenPort", "70000"),
            (r#""ListenPortV6":-1"#, "ListenPortV6", "-1"),
            (r#""MTU":65536"#, "MTU", "65536"),
            (r#""PersistentKeepaliveInterval":"25s""#, "PersistentKeepaliveInterval", "\"25s\""),
            (r#""PersistentKeepaliveInterval":65536"#, "PersistentKeepaliveInterval", "65536"),
            (r#""Mode":"Auto""#, "Mode", "\"Auto\""),
            (r#""PSK":"hunter2""#, "PSK", "(not shown)"),
            (r#""PSK":["hunter2"]"#, "PSK", "(not shown)"),
            (r#""PSKFile":"psk""#, "PSKFile", "psk"),
            (
                r#""PSKFile":"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=""#,
                "PSKFile",
                "(not shown)",
            ),
            (r#""PSK":"hunter2","PSKFile":"/psk""#, "PSKFile", "/psk"),
        ] {
            let error = parse(&format!(r#"{{"Type":"wireguard",{options}}}"#)).unwrap_err();
            assert_eq!(error.field, format!("Backend.{field}"));
            assert_eq!(error.value, value);
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
