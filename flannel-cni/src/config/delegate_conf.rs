//! The config of the delegate, the plugin that connects the container. It equals the Go plugin's
//! byte for byte, because either plugin reads it again at DEL.
//!
//! **Source**: cni-plugin `flannel.go: cmdAdd`, `flannel_linux.go: doCmdAdd, getDelegateIPAM`.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use flannel_core::json::compact;
use flannel_core::{Subnet, SubnetEnv};
use serde_json::{Value, json};

use crate::config::net_conf::{NetConf, Object};
use crate::spec::error::{Code, Error, Result};
use crate::spec::version::SpecVersion;

/// A delegate's config.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DelegateConf(Object);

impl DelegateConf {
    /// The delegate's config for a network config and a `subnet.env`.
    ///
    /// # Errors
    /// [`Code::NETWORK_CONFIG`]: a field of `delegate` or `ipam` is wrong.
    pub(crate) fn new(conf: &NetConf, env: &SubnetEnv) -> Result<Self> {
        let mut delegate = conf.delegate.clone();
        let invalid = |text: &str| Err(Error::new(Code::NETWORK_CONFIG, text));
        if delegate.get("type").is_some_and(|kind| !kind.is_string()) {
            return invalid("'delegate' dictionary, if present, must have (string) 'type' field");
        }
        if let Some(field) =
            ["name", "ipam"].into_iter().find(|field| delegate.contains_key(*field))
        {
            return invalid(&format!(
                "'delegate' dictionary must not have '{field}' field, it'll be set by flannel"
            ));
        }
        if let Some(runtime_config) = &conf.runtime_config {
            delegate.insert("runtimeConfig".into(), Value::Object(runtime_config.clone()));
        }
        delegate.insert("name".into(), conf.name.clone().into());
        let mut default = |key: &str, value: Value| {
            delegate.entry(key).or_insert(value);
        };
        default("type", "bridge".into());
        // The delegate masquerades if flannel does not.
        default("ipMasq", (!env.ip_masq).into());
        default("mtu", env.mtu.into());
        if delegate["type"] == "bridge" {
            delegate.entry("isGateway").or_insert(true.into());
        }
        if let Some(version) = &conf.cni_version {
            delegate.insert("cniVersion".into(), version.clone().into());
        }
        if delegate
            .get("cniVersion")
            .is_some_and(|version| !version.is_string() && !version.is_null())
        {
            return invalid(
                "'delegate' dictionary must have a (string) 'cniVersion' field, if any",
            );
        }
        delegate.insert("ipam".into(), ipam(conf, env)?);
        delegate.values_mut().for_each(write_numbers_as_go_does);
        Ok(Self(delegate))
    }

    /// Parses a saved config. Returns `None` if it is not a JSON object with a `type`.
    pub(crate) fn from_saved(bytes: &[u8]) -> Option<Self> {
        let conf = Self(serde_json::from_slice(bytes).ok()?);
        conf.text("type")?;
        Some(conf)
    }

    /// The name of the delegate.
    pub(crate) fn kind(&self) -> &str {
        self.text("type").unwrap_or_default()
    }

    /// The name of the plugin for addresses, or nothing.
    pub(crate) fn ipam_kind(&self) -> &str {
        self.0.get("ipam").and_then(|ipam| ipam.get("type")?.as_str()).unwrap_or_default()
    }

    /// The name of its network.
    pub(crate) fn network(&self) -> &str {
        self.text("name").unwrap_or_default()
    }

    /// The interfaces of a container for which `host-local` has reserved addresses in this network,
    /// or `eth0` if it has reserved none.
    ///
    /// **Source**: plugins `plugins/ipam/host-local/backend/disk: New, Store.Reserve`.
    pub(crate) fn interfaces(&self, container: &str) -> Vec<String> {
        let dir = self.0.get("ipam").and_then(|ipam| ipam.get("dataDir")?.as_str());
        let dir = Path::new(dir.unwrap_or("/var/lib/cni/networks")).join(self.network());
        let found: BTreeSet<String> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .filter_map(|entry| reserved_interface(&entry.ok()?.path(), container))
            .collect();
        if found.is_empty() { vec!["eth0".to_owned()] } else { found.into_iter().collect() }
    }

    /// Its version, or the oldest if it has none.
    pub(crate) fn version(&self) -> &str {
        self.text("cniVersion")
            .filter(|text| !text.is_empty())
            .unwrap_or(SpecVersion::OLDEST.as_str())
    }

    /// Sets a field.
    pub(crate) fn with(mut self, key: &str, value: Value) -> Self {
        self.0.insert(key.to_owned(), value);
        self
    }

    /// Its JSON text.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let text = serde_json::to_string(&self.0)
            .expect("a JSON object with strings as keys can be written");
        compact(&text).into_bytes()
    }

    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.as_str()
    }
}

/// The interface in a file of `host-local` for a reserved address, if it belongs to the container.
fn reserved_interface(file: &Path, container: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let (owner, ifname) = text.trim().split_once("\r\n")?;
    (owner == container).then(|| ifname.to_owned())
}

/// The config's `ipam`, with this host's subnets as ranges and a route to every network.
fn ipam(conf: &NetConf, env: &SubnetEnv) -> Result<Value> {
    let mut ipam = conf.ipam.clone();
    ipam.entry("type").or_insert("host-local".into());
    let subnets = env.subnets.values();
    let ranges = subnets.map(|subnet| json!([{ "subnet": subnet.to_string() }])).collect();
    ipam.insert("ranges".into(), ranges);
    let mut routes = match ipam.remove("routes") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(routes)) => routes,
        Some(other) => return Err(bad_routes(&other)),
    };
    for route in &mut routes {
        *route = checked(route)?;
    }
    routes.extend(env.networks.iter().map(|network| json!({ "dst": network.to_string() })));
    ipam.insert("routes".into(), routes.into());
    Ok(Value::Object(ipam))
}

/// Checks a route and normalizes its destination, which keeps its host bits.
fn checked(route: &Value) -> Result<Value> {
    let dst = route.get("dst").and_then(Value::as_str).and_then(normalized_destination);
    let Some((mut fields, dst)) = route.as_object().cloned().zip(dst) else {
        return Err(bad_routes(route));
    };
    fields.insert("dst".into(), dst.into());
    match fields.get("gw") {
        None => {}
        Some(Value::Null) => drop(fields.remove("gw")),
        Some(gateway) if gateway.as_str().is_some_and(|text| text.parse::<IpAddr>().is_ok()) => {}
        Some(_) => return Err(bad_routes(route)),
    }
    Ok(Value::Object(fields))
}

fn normalized_destination(text: &str) -> Option<String> {
    let len = text.parse::<Subnet>().ok()?.len();
    let address: IpAddr = text.split('/').next()?.parse().ok()?;
    Some(format!("{address}/{len}"))
}

fn bad_routes(value: &Value) -> Error {
    let expected = r#"a list such as [{"dst": "0.0.0.0/0", "gw": "10.1.5.1"}]"#;
    Error::new(
        Code::NETWORK_CONFIG,
        format!("failed to parse ipam.routes: {value}: expected {expected}"),
    )
}

/// Writes whole numbers without a point or an exponent, because a delegate in Go rejects `1e+06` as
/// an integer. Unlike in Go, integers keep all their digits.
fn write_numbers_as_go_does(value: &mut Value) {
    /// The largest number up to which all whole numbers are exact.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Number(number) if number.is_f64() => {
            if let Some(float) = number.as_f64()
                && float.fract() == 0.0
                && float.abs() <= EXACT
            {
                *value = (float as i64).into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(write_numbers_as_go_does),
        Value::Object(fields) => fields.values_mut().for_each(write_numbers_as_go_does),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::config::subnet_env;

    fn env() -> SubnetEnv {
        SubnetEnv {
            networks: vec!["10.1.0.0/16".parse().unwrap()],
            subnets: ["10.1.5.0/24".parse::<Subnet>().unwrap()].into_iter().collect(),
            mtu: 1450,
            ip_masq: true,
        }
    }

    fn conf(fields: &str) -> NetConf {
        NetConf::parse(format!(r#"{{"name":"cbr0"{fields}}}"#).as_bytes()).unwrap()
    }

    /// Each directory of `tests/golden` has a config, a `subnet.env`, and the config that the Go
    /// plugin (cni-plugin 092e6d26) makes of them.
    #[test]
    fn the_config_equals_the_config_of_the_go_plugin() {
        let mut seen = 0;
        for case in
            fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")).unwrap()
        {
            let dir = case.unwrap().path();
            let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
            let conf = NetConf::parse(read("conf.json").as_bytes()).unwrap();
            let delegate =
                DelegateConf::new(&conf, &subnet_env::read(&dir.join("subnet.env")).unwrap())
                    .unwrap();
            let bytes = String::from_utf8(delegate.to_bytes()).unwrap();
            assert_eq!(bytes, read("delegate.json"), "{}", dir.display());
            assert_eq!(DelegateConf::from_saved(bytes.as_bytes()).unwrap(), delegate);
            seen += 1;
        }
        assert_eq!(seen, 8);
    }

    #[test]
    fn fields_that_only_flannel_sets_are_refused() {
        for (fields, says) in [
            (r#","delegate":{"type":7}"#, "must have (string) 'type' field"),
            (r#","delegate":{"type":null}"#, "must have (string) 'type' field"),
            (r#","delegate":{"name":"x"}"#, "must not have 'name' field"),
            (r#","delegate":{"ipam":{}}"#, "must not have 'ipam' field"),
            (r#","delegate":{"cniVersion":1}"#, "must have a (string) 'cniVersion' field"),
            (r#","ipam":{"routes":{}}"#, "ipam.routes: {}"),
            (r#","ipam":{"routes":["x"]}"#, "ipam.routes: \"x\""),
            (r#","ipam":{"routes":[{"dst":"x"}]}"#, r#"ipam.routes: {"dst":"x"}"#),
            (r#","ipam":{"routes":[{"dst":"0.0.0.0/0","gw":"x"}]}"#, r#""gw":"x""#),
        ] {
            let error = DelegateConf::new(&conf(fields), &env()).unwrap_err();
            assert!(
                error.code == Code::NETWORK_CONFIG && error.msg.contains(says),
                "{fields}: {error}"
            );
        }
    }

    #[test]
    fn numbers_and_unknown_keys_are_kept() {
        let fields = r#","delegate":{"big":18446744073709551615,"huge":1e300},
            "ipam":{"routes":[{"dst":"10.9.1.1/8","gw":null,"table":7,"new":[1]}]}"#;
        let text = String::from_utf8(DelegateConf::new(&conf(fields), &env()).unwrap().to_bytes())
            .unwrap();
        for whole in
            [r#""big":18446744073709551615"#, r#"{"dst":"10.9.1.1/8","new":[1],"table":7}"#]
        {
            assert!(text.contains(whole), "{text}");
        }
        let huge: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(huge["huge"], 1e300);
    }

    #[test]
    fn a_text_without_a_type_is_not_a_saved_config() {
        for bad in ["", "{", "[]", "{}", r#"{"type":7}"#] {
            assert_eq!(DelegateConf::from_saved(bad.as_bytes()), None, "{bad}");
        }
    }
}
