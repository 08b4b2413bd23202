//! Versions of the CNI specification. An unknown version is an error.

use std::fmt;
use std::str::FromStr;

/// A version of the CNI specification that this plugin supports. The order is by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SpecVersion(usize);

const TEXTS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

impl SpecVersion {
    /// The version of a config that names none.
    pub const OLDEST: Self = Self(0);
    /// The first version with CHECK.
    pub const WITH_CHECK: Self = Self(4);
    /// The first version with STATUS and GC.
    pub const WITH_STATUS_AND_GC: Self = Self(6);
    /// The newest version.
    pub const LATEST: Self = Self(6);
    /// All versions, the oldest first.
    pub const ALL: [Self; 7] = [Self(0), Self(1), Self(2), Self(3), Self(4), Self(5), Self(6)];

    /// The text, such as `1.0.0`.
    pub fn as_str(self) -> &'static str {
        TEXTS[self.0]
    }

    /// The answer to VERSION.
    ///
    /// **Source**: cni `pkg/version: pluginInfo.Encode`, which always names the newest version.
    pub(crate) fn list() -> String {
        let versions: Vec<String> = TEXTS.iter().map(|text| format!("\"{text}\"")).collect();
        format!(
            "{{\"cniVersion\":\"{}\",\"supportedVersions\":[{}]}}\n",
            Self::LATEST,
            versions.join(",")
        )
    }
}

impl fmt::Display for SpecVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A version of the specification that this plugin does not support.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config is {0:?}, plugin supports {list}", list = format!("{TEXTS:?}").replace(',', ""))]
pub struct VersionError(pub String);

impl FromStr for SpecVersion {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        match TEXTS.iter().position(|known| *known == text) {
            Some(place) => Ok(Self(place)),
            None => Err(VersionError(text.to_owned())),
        }
    }
}

/// Go's name of a processor architecture, which is usual in names of binaries.
pub(crate) fn go_arch(rust: &str) -> &str {
    match rust {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_versions_are_parsed() {
        for (version, text) in [
            (SpecVersion::OLDEST, "0.1.0"),
            (SpecVersion::WITH_CHECK, "0.4.0"),
            (SpecVersion::WITH_STATUS_AND_GC, "1.1.0"),
            (SpecVersion::LATEST, "1.1.0"),
        ] {
            assert_eq!(version.to_string(), text);
            assert_eq!(text.parse(), Ok(version));
        }
        for bad in ["", "1", "1.0", "2.0.0", "v1.0.0", "1.1.0 "] {
            bad.parse::<SpecVersion>().unwrap_err();
        }
    }

    #[test]
    fn the_texts_equal_the_texts_of_the_go_plugin() {
        assert_eq!(
            SpecVersion::list(),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\
             \"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
        assert_eq!(
            "2.0.0".parse::<SpecVersion>().unwrap_err().to_string(),
            concat!(
                r#"config is "2.0.0", plugin supports "#,
                r#"["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]"#
            )
        );
    }
}
