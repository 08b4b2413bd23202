//! The option `SourceCheck` of tunnels.

use crate::config::BackendConfig;
use crate::json::FieldError;

/// The option `SourceCheck` in the object `Backend` of a network config: what a node does with a
/// tunnel packet that does not come from the public address of an accepted peer, or whose inner
/// source is outside the subnets of that peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceCheck {
    /// `false`: it takes the packet, as any other.
    Off,
    /// `"count"`: it counts the packet, and takes it.
    Count,
    /// `true`: it counts the packet, and drops it.
    Drop,
}

impl SourceCheck {
    /// The name of the option.
    pub const NAME: &str = "SourceCheck";

    /// Reads the option. Returns `None` if the config does not have it.
    ///
    /// # Errors
    /// The value is not `true`, `false` or `"count"`.
    pub fn parse(config: &BackendConfig) -> Result<Option<Self>, FieldError> {
        let fields = config.fields()?;
        match fields.raw(Self::NAME).map(|raw| raw.get()) {
            None => Ok(None),
            Some("false") => Ok(Some(Self::Off)),
            Some("true") => Ok(Some(Self::Drop)),
            Some(r#""count""#) => Ok(Some(Self::Count)),
            Some(other) => Err(fields.error(Self::NAME, &other, r#"true, false or "count""#)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn parse(option: &str) -> Result<Option<SourceCheck>, FieldError> {
        let text = format!(r#"{{"Network":"10.1.0.0/16","Backend":{{"Type":"vxlan"{option}}}}}"#);
        SourceCheck::parse(&Config::parse(&text).unwrap().backend)
    }

    #[test]
    fn three_values_are_known_and_others_are_named() {
        for (option, expected) in [
            ("", None),
            (r#","SourceCheck":null"#, None),
            (r#","SourceCheck":true"#, Some(SourceCheck::Drop)),
            (r#","sourcecheck":false"#, Some(SourceCheck::Off)),
            (r#","SourceCheck":"count""#, Some(SourceCheck::Count)),
        ] {
            assert_eq!(parse(option), Ok(expected), "{option}");
        }
        for value in [r#""no""#, "1", r#""Count""#, "[]"] {
            let error = parse(&format!(r#","SourceCheck":{value}"#)).unwrap_err();
            let expected = r#"true, false or "count""#;
            let text =
                format!("field Backend.SourceCheck: {value} is not valid, expected {expected}");
            assert_eq!(error.to_string(), text);
        }
    }
}
