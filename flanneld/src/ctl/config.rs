//! `flannelctl config`: the network config, checked before anybody sees it.

use std::io::Read;
use std::path::Path;

use flannel_core::{Config, Error, LinkName};
use flannel_subnet::ConfigText;
use serde_json::json;

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
            let mut text = read(file)?;
            let config = check(&text)?;
            let registry = global.open_registry().await?;
            let seen = match registry.config().await {
                Ok(seen) => Some(seen),
                Err(Error::NoConfig { .. }) => None,
                Err(error) => return Err(error.into()),
            };
            let said = match &seen {
                Some(seen) if seen.text == text.text => "unchanged: the store holds exactly this",
                _ => {
                    registry.write_config(seen.as_ref(), &text.text).await?;
                    "written"
                }
            };
            let used = seen.as_ref().and_then(|seen| Config::parse(&seen.text).ok());
            let restart = used.is_some_and(|used| used.networks != config.networks);
            let note = match restart {
                true => format!("{said}; other pod networks are used from each daemon's next start on"),
                false => said.to_owned(),
            };
            text.location = registry.to_string();
            Ok(describe(&config, &text, &note, paper))
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
