//! The options of the `Backend` object.

use flannel_core::config::BackendConfig;
use flannel_core::json::FieldError;

/// The kernel's default UDP port, not IANA's 4789.
const DEFAULT_PORT: u16 = 8472;

/// The options of the backend `vxlan`.
///
/// **Source**: flannel `pkg/backend/vxlan/vxlan.go: RegisterNetwork`. `MacPrefix` and `Name` are
/// for Windows and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// `VNI`: the network identifier, 1 to 16777215. The default is 1. Because of the length of
    /// device names, the backend accepts at most 9999999, and with IPv6 at most 9999.
    pub vni: u32,
    /// `Port`: the UDP port of all nodes. The default is 8472, and 0 stands for it.
    pub port: u16,
    /// `MTU`: the MTU of the underlay, in bytes. `None` (0 in the config) stands for the MTU of
    /// the external interface. A node whose interface carries less uses that.
    pub mtu: Option<u32>,
    /// `GBP`: whether packets carry their Group Based Policy. Off by default.
    pub gbp: bool,
    /// `Learning`: whether the device learns forwarding entries from traffic. Off by default.
    pub learning: bool,
    /// `DirectRouting`: whether peers on the same link are reached without a tunnel. Off by
    /// default.
    pub direct_routing: bool,
}

impl Options {
    /// The names of the fields. The last two are for Windows.
    pub const NAMES: [&str; 8] =
        ["VNI", "Port", "MTU", "GBP", "Learning", "DirectRouting", "MacPrefix", "Name"];

    /// Reads the options.
    ///
    /// # Errors
    /// A field is wrong. The error names the first one.
    pub fn parse(config: &BackendConfig) -> Result<Self, FieldError> {
        let fields = config.fields()?;
        let [vni, port, mtu, gbp, learning, direct_routing, ..] = Self::NAMES;
        let flag = |name| Ok::<_, FieldError>(fields.take(name, "true or false")?.unwrap_or(false));
        let vni_range = "a number from 1 to 16777215";
        let id = fields.take(vni, vni_range)?.unwrap_or(1);
        if !(1..=0xff_ffff).contains(&id) {
            return Err(fields.error(vni, &id, vni_range));
        }
        let port: Option<u16> = fields.take(port, "a UDP port, 0 for 8472")?;
        let mtu_range = "the underlay's MTU in bytes, 0 for the interface's";
        let mtu: Option<u16> = fields.take(mtu, mtu_range)?;
        Ok(Self {
            vni: id,
            port: port.filter(|port| *port != 0).unwrap_or(DEFAULT_PORT),
            mtu: mtu.filter(|mtu| *mtu != 0).map(u32::from),
            gbp: flag(gbp)?,
            learning: flag(learning)?,
            direct_routing: flag(direct_routing)?,
        })
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
            vni: 1,
            port: 8472,
            mtu: None,
            gbp: false,
            learning: false,
            direct_routing: false,
        };
        assert_eq!(parse(r#"{"Type":"vxlan"}"#).unwrap(), defaults);
        let all = r#"{"type":"vxlan","vni":7,"port":4789,"mtu":1400,
            "gbp":true,"learning":true,"directrouting":true}"#;
        let expected = Options {
            vni: 7,
            port: 4789,
            mtu: Some(1400),
            gbp: true,
            learning: true,
            direct_routing: true,
        };
        assert_eq!(parse(all).unwrap(), expected);
    }

    #[test]
    fn every_option_is_read_but_the_options_for_windows() {
        for (n, name) in Options::NAMES.into_iter().enumerate() {
            let parsed = parse(&format!(r#"{{"Type":"vxlan","{name}":[]}}"#));
            let field = parsed.err().map(|error| error.field);
            assert_eq!(field, (n < 6).then(|| format!("Backend.{name}")));
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (bad, field) in [
            (r#"{"Type":"vxlan","VNI":0}"#, "Backend.VNI"),
            (r#"{"Type":"vxlan","VNI":16777216}"#, "Backend.VNI"),
            (r#"{"Type":"vxlan","VNI":"1"}"#, "Backend.VNI"),
            (r#"{"Type":"vxlan","Port":65536}"#, "Backend.Port"),
            (r#"{"Type":"vxlan","MTU":-1}"#, "Backend.MTU"),
            (r#"{"Type":"vxlan","GBP":1}"#, "Backend.GBP"),
            (r#"{"Type":"vxlan","DirectRouting":"yes"}"#, "Backend.DirectRouting"),
        ] {
            assert_eq!(parse(bad).unwrap_err().field, field);
        }
    }
}
