//! `flannelctl config`: the network config, checked before anybody sees it.

use std::fmt::Display;
use std::io::Read;
use std::path::Path;

use flannel_core::{Config, Error, LinkName};
use flannel_subnet::{ConfigText, Registry};
use serde_json::{Map, Value, json};

use super::options::{ConfigVerb, Global};
use super::paper::{Ink, Paper};
use super::{Failure, Result, Said};
use crate::backends;
use crate::report::VERSION;

/// Checks, or checks and writes.
pub(crate) async fn config(global: &Global, paper: &Paper, verb: &ConfigVerb) -> Result<Said> {
    match verb {
        ConfigVerb::Check { file: Some(file) } => {
            let text = read(file)?;
            Ok(describe(&check(&text)?, &text, "", paper))
        }
        ConfigVerb::Check { file: None } => {
            let text = global.open_registry().await?.config().await?;
            Ok(describe(&check(&text)?, &text, "", paper))
        }
        ConfigVerb::Set { file } => {
            let text = read(file)?;
            check(&text)?;
            let registry = global.open_registry().await?;
            let seen = match registry.config().await {
                Ok(seen) => Some(seen),
                Err(Error::NoConfig { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            write(&*registry, seen.as_ref(), text.text, paper).await
        }
        ConfigVerb::Patch { patch } => {
            let registry = global.open_registry().await?;
            let seen = registry.config().await?;
            let text = patched(&seen, patch)?;
            write(&*registry, Some(&seen), text, paper).await
        }
    }
}

/// Writes a config over the one that was seen.
async fn write(
    registry: &dyn Registry,
    seen: Option<&ConfigText>,
    text: String,
    paper: &Paper,
) -> Result<Said> {
    let text = ConfigText { location: registry.to_string(), text };
    let config = check(&text)?;
    let said = match seen {
        Some(seen) if seen.text == text.text => "unchanged: the store holds exactly this",
        _ => {
            registry.write_config(seen, &text.text).await?;
            "written"
        }
    };
    let used = seen.and_then(|seen| Config::parse(&seen.text).ok());
    let restart = used.is_some_and(|used| used.networks != config.networks);
    let note = match restart {
        true => format!("{said}; other pod networks are used from each daemon's next start on"),
        false => said.to_owned(),
    };
    Ok(describe(&config, &text, &note, paper))
}

/// A config with some fields changed.
fn patched(seen: &ConfigText, patch: &str) -> Result<String> {
    let wrong = |what: &str, why: &dyn Display| {
        Failure::Refused(format!(
            "{what} is no JSON object, such as {{\"Backend\": {{\"MTU\": 1400}}}}: {why}"
        ))
    };
    let patch: Map<String, Value> = serde_json::from_str(patch).map_err(|error| wrong("PATCH", &error))?;
    let mut config: Map<String, Value> =
        serde_json::from_str(&seen.text).map_err(|error| wrong(&seen.location, &error))?;
    merge(&mut config, patch);
    Ok(Value::from(config).to_string())
}

/// **Source**: RFC 7396. Names are found in any case, as those of a network config are.
fn merge(into: &mut Map<String, Value>, patch: Map<String, Value>) {
    for (name, value) in patch {
        let known = into.keys().find(|known| known.eq_ignore_ascii_case(&name)).cloned();
        let name = known.unwrap_or(name);
        match (value, into.get_mut(&name)) {
            (Value::Null, _) => drop(into.remove(&name)),
            (Value::Object(patch), Some(Value::Object(there))) => merge(there, patch),
            (Value::Object(patch), _) => {
                let mut fresh = Map::new();
                merge(&mut fresh, patch);
                into.insert(name, fresh.into());
            }
            (value, _) => drop(into.insert(name, value)),
        }
    }
}

/// The network config in a file; `-` is standard input.
///
/// # Errors
/// It cannot be read, or is wrong.
pub(super) fn of_file(file: &Path) -> Result<Config> {
    check(&read(file)?)
}

fn read(file: &Path) -> Result<ConfigText> {
    let mut text = String::new();
    let read = match file.as_os_str() == "-" {
        true => std::io::stdin().read_to_string(&mut text).map(drop),
        false => std::fs::read_to_string(file).map(|content| text = content),
    };
    let location = file.display().to_string();
    read.map_err(|error| Failure::Refused(format!("{location}: {error}")))?;
    Ok(ConfigText { location, text })
}

/// As a daemon would: the config, then the backend's options.
fn check(text: &ConfigText) -> Result<Config> {
    let wrong = |source| Error::Config { location: text.location.clone(), source };
    let config = Config::parse(&text.text).map_err(wrong)?;
    let any: LinkName = "lo".parse().expect("it is a name that a link can have");
    backends::find(&config.backend.kind)?.owned(any, &config)?;
    Ok(config)
}

fn describe(config: &Config, text: &ConfigText, done: &str, paper: &Paper) -> Said {
    let headline = if done.is_empty() { "it is right" } else { done };
    let mut out = paper.field("ok", Ink::Good, &format!("{}: {headline}", text.location));
    let mut networks = Vec::new();
    for (family, pod) in config.networks.iter() {
        let (from, to, count) = (pod.min, pod.max, pod.subnets());
        out += &paper.field(
            &family.to_string(),
            Ink::Bold,
            &format!("{}, cut into {count} subnets from {from} to {to}", pod.network),
        );
        networks.push(json!({
            "family": family.to_string(),
            "network": pod.network.to_string(),
            "subnet_len": pod.subnet_len,
            "min": from.to_string(),
            "max": to.to_string(),
            "subnets": u64::try_from(count).unwrap_or(u64::MAX),
        }));
    }
    let implied = if config.backend.explicit {
        ""
    } else {
        ", since none is named (Go flannel takes udp then: name it)"
    };
    out += &paper.field("backend", Ink::Bold, &format!("{}{implied}", config.backend.kind));
    let value = json!({
        "version": VERSION,
        "location": text.location,
        "result": headline,
        "networks": networks,
        "backend": config.backend.kind,
        "backend_named": config.backend.explicit,
        "nftables": config.nftables,
    });
    Said { text: out, value, ok: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_changes_what_it_names_and_nothing_else() {
        let text =
            r#"{"network": "10.1.0.0/16", "Backend": {"Type": "vxlan", "mtu": 1450, "VNI": 7}, "Mine": [1]}"#;
        let seen = ConfigText { location: "here".into(), text: text.into() };
        for (patch, expected) in [
            (
                r#"{"Backend":{"MTU":1400}}"#,
                r#"{"Backend":{"Type":"vxlan","VNI":7,"mtu":1400},"Mine":[1],"network":"10.1.0.0/16"}"#,
            ),
            (
                r#"{"backend":{"vni":null},"mine":null}"#,
                r#"{"Backend":{"Type":"vxlan","mtu":1450},"network":"10.1.0.0/16"}"#,
            ),
            (
                r#"{"Mine":{"a":{"b":null,"c":1}}}"#,
                r#"{"Backend":{"Type":"vxlan","VNI":7,"mtu":1450},"Mine":{"a":{"c":1}},"network":"10.1.0.0/16"}"#,
            ),
        ] {
            assert_eq!(patched(&seen, patch).unwrap(), expected, "{patch}");
        }
        for (seen, patch, part) in [
            (&seen, "1400", "PATCH is no JSON object"),
            (&ConfigText { text: "[]".into(), ..seen.clone() }, "{}", "here is no JSON object"),
        ] {
            let error = patched(seen, patch).unwrap_err().to_string();
            assert!(error.starts_with(part) && error.contains("\"MTU\": 1400"), "{error}");
        }
    }
}
