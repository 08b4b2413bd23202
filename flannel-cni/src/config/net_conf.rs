//! The plugin's network config, which the runtime writes to stdin. The parts for a delegate stay
//! JSON objects, so that it also gets keys that this plugin does not know.
//!
//! **Source**: cni-plugin `flannel.go: NetConf`, cni `pkg/skel: validateConfig`.

use std::path::PathBuf;

use flannel_core::json::{FieldError, Fields};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::spec::call::is_name;
use crate::spec::error::{Code, Error, Result};
use crate::spec::version::{SpecVersion, VersionError};

/// A JSON object.
pub(crate) type Object = Map<String, Value>;

/// An interface of a container.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Attachment {
    #[serde(rename = "containerID")]
    pub(crate) container: String,
    pub(crate) ifname: String,
}

/// The network config.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NetConf {
    /// The version of the config, or the oldest one if the config names none.
    pub(crate) version: SpecVersion,
    /// The text of the version in the config.
    pub(crate) cni_version: Option<String>,
    pub(crate) name: String,
    pub(crate) subnet_file: PathBuf,
    /// The directory of the delegates' configs, which DEL needs.
    pub(crate) data_dir: PathBuf,
    pub(crate) delegate: Object,
    pub(crate) ipam: Object,
    pub(crate) runtime_config: Option<Object>,
    pub(crate) prev_result: Option<Object>,
    /// The interfaces that GC keeps.
    pub(crate) valid_attachments: Option<Vec<Attachment>>,
}

impl NetConf {
    /// Parses the runtime's text on stdin.
    ///
    /// # Errors
    /// [`Code::DECODING`], [`Code::INCOMPATIBLE_VERSION`] or [`Code::NETWORK_CONFIG`].
    pub(crate) fn parse(stdin: &[u8]) -> Result<Self> {
        let undecodable = |why: &str| {
            Error::new(Code::DECODING, format!("error unmarshall network config: {why}"))
        };
        let text = std::str::from_utf8(stdin).map_err(|error| undecodable(&error.to_string()))?;
        let fields = Fields::parse(text, "").map_err(|error| undecodable(&error.to_string()))?;
        let cni_version = fields
            .take::<String>("cniVersion", "a string")
            .map_err(|error| undecodable(&error.to_string()))?
            .filter(|text| !text.is_empty());
        let version = match &cni_version {
            Some(text) => text.parse().map_err(|error: VersionError| {
                Error::new(Code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
                    .with_details(&error.to_string())
            })?,
            None => SpecVersion::OLDEST,
        };
        Self::of_version(&fields, version, cni_version).map_err(|error| error.with_version(version))
    }

    fn of_version(
        fields: &Fields,
        version: SpecVersion,
        cni_version: Option<String>,
    ) -> Result<Self> {
        let invalid = |text: String| Error::new(Code::NETWORK_CONFIG, text);
        let wrong = |error: FieldError| invalid(format!("network config: {error}"));
        let name =
            fields.take::<String>("name", "the network's name").map_err(wrong)?.unwrap_or_default();
        if name.is_empty() {
            return Err(invalid("missing network name".into()));
        }
        if !is_name(&name) {
            return Err(
                invalid("invalid characters found in network name".into()).with_details(&name)
            );
        }
        let path = |field: &str, default: &str| {
            let path = fields.take::<String>(field, "a path").map_err(wrong)?;
            Ok::<_, Error>(path.unwrap_or_else(|| default.to_owned()).into())
        };
        let object = |field: &str| fields.take::<Object>(field, "a JSON object").map_err(wrong);
        let attachments = "a list such as [{\"containerID\": \"c1\", \"ifname\": \"eth0\"}]";
        Ok(Self {
            version,
            cni_version,
            name,
            subnet_file: path("subnetFile", "/run/flannel/subnet.env")?,
            data_dir: path("dataDir", "/var/lib/cni/flannel")?,
            delegate: object("delegate")?.unwrap_or_default(),
            ipam: object("ipam")?.unwrap_or_default(),
            runtime_config: object("runtimeConfig")?,
            prev_result: object("prevResult")?,
            valid_attachments: fields
                .take("cni.dev/valid-attachments", attachments)
                .map_err(wrong)?,
        })
    }

    /// Checks that the config's version has the operation.
    ///
    /// # Errors
    /// [`Code::INCOMPATIBLE_VERSION`].
    pub(crate) fn require(&self, since: SpecVersion, operation: &str) -> Result<()> {
        if self.version >= since {
            return Ok(());
        }
        let msg = format!("config version does not allow {operation}");
        let details =
            format!("config is {:?}, {operation} exists since {since}", self.version.as_str());
        Err(Error::new(Code::INCOMPATIBLE_VERSION, msg).with_details(&details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_get_the_defaults_of_the_go_plugin() {
        let conf = NetConf::parse(br#"{"name":"cbr0","delegate":null,"cniVersion":""}"#).unwrap();
        assert_eq!(conf.version, SpecVersion::OLDEST);
        assert_eq!(conf.cni_version, None);
        assert_eq!(conf.subnet_file.to_str(), Some("/run/flannel/subnet.env"));
        assert_eq!(conf.data_dir.to_str(), Some("/var/lib/cni/flannel"));
        assert!(conf.delegate.is_empty() && conf.ipam.is_empty() && conf.prev_result.is_none());
        assert!(conf.runtime_config.is_none() && conf.valid_attachments.is_none());
    }

    #[test]
    fn errors_have_the_codes_of_the_specification_and_name_the_field() {
        for (bad, code, expected) in [
            ("", 6, "one JSON object"),
            (r#"{"name":"x""#, 6, "one JSON object"),
            ("[]", 6, "one JSON object"),
            (r#"{"name":"x","cniVersion":1}"#, 6, "cniVersion"),
            (r#"{"name":"x","cniVersion":"2.0.0"}"#, 1, "incompatible CNI versions"),
            ("{}", 7, "missing network name"),
            (r#"{"name":"a/b"}"#, 7, "invalid characters found in network name; a/b"),
            (r#"{"name":"x","delegate":[]}"#, 7, "field delegate: [] is not valid"),
            (r#"{"name":"x","dataDir":7}"#, 7, "field dataDir: 7 is not valid, expected a path"),
            (r#"{"name":"x","cni.dev/valid-attachments":[{"ifname":"a"}]}"#, 7, "containerID"),
        ] {
            let error = NetConf::parse(bad.as_bytes()).unwrap_err();
            assert!(
                error.code == Code(code) && error.to_string().contains(expected),
                "{bad}: {error:?}"
            );
        }
        assert_eq!(NetConf::parse(b"\xff").unwrap_err().code, Code::DECODING);
    }

    #[test]
    fn an_operation_requires_its_version() {
        let of = |version: &str| {
            NetConf::parse(format!(r#"{{"name":"x","cniVersion":"{version}"}}"#).as_bytes())
                .unwrap()
        };
        of("0.4.0").require(SpecVersion::WITH_CHECK, "CHECK").unwrap();
        let error = of("0.3.1").require(SpecVersion::WITH_CHECK, "CHECK").unwrap_err();
        assert_eq!(error.msg, "config version does not allow CHECK");
        assert_eq!(
            of("1.0.0").require(SpecVersion::WITH_STATUS_AND_GC, "GC").unwrap_err().code,
            Code(1)
        );
    }
}
