//! `flannelctl config`: checks the network config, and writes it after the check.

mod encryption;
mod mistakes;
mod trial;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Read;
use std::path::Path;

use flannel_api::VERSION;
use flannel_backends::Backends;
use flannel_core::json::Members;
use flannel_core::{Config, Error as CoreError};
use flannel_subnet::{ConfigText, Registry};
use serde_json::json;
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::options::ConfigVerb;
use crate::terminal::{Style, Terminal};
use crate::{Context, Output};
use mistakes::{Parse, Refusal};
use trial::Trial;

/// Runs a verb of `config`.
pub(crate) async fn config(context: Context<'_>, verb: &ConfigVerb) -> Result<Output> {
    match verb {
        ConfigVerb::Check { file } => check_verb(context, file.as_deref()).await,
        ConfigVerb::Set { file, force } => set(context, file, *force).await,
        ConfigVerb::Patch { patch, force } => patch_verb(context, patch, *force).await,
    }
}

/// Checks the config in a file, or the one in the store.
async fn check_verb(context: Context<'_>, file: Option<&Path>) -> Result<Output> {
    let Context { global, backends, terminal, .. } = context;
    let (text, registry) = match file {
        Some(file) => (read(file)?, None),
        None => {
            let registry = global.open_registry().await?;
            (registry.config().await?, Some(registry))
        }
    };
    let in_kubernetes = global.only_kubernetes;
    let parse = if in_kubernetes { Config::parse_undivided } else { Config::parse };
    let mistakes = mistakes_in(&text, backends, parse)?;
    if !mistakes.is_empty() {
        return Err(Error::Lines(mistakes));
    }
    let config = check(&text, backends, parse)?;
    let mut output = describe(&config, &text, "", terminal);
    for note in mistakes::undivided(&text.text).iter().filter(|_| in_kubernetes) {
        output.text += &terminal.field("note", Style::Warning, note);
    }
    let trial = Trial::of(context.client, &text.text);
    trial.describe(&mut output, terminal);
    output.ok = trial.mistake().is_none();
    if config.require_encryption {
        let types = encryption::of_cluster(&context).await;
        encryption::describe(&mut output, &config, &types, backends, terminal);
    }
    if let Some(registry) = registry {
        let change = ConfigChange { config: &config, used: None };
        add_others(&mut output, &*registry, change, backends, terminal).await?;
    }
    Ok(output)
}

/// Writes the config of a file.
async fn set(context: Context<'_>, file: &Path, force: bool) -> Result<Output> {
    let Context { global, backends, terminal, .. } = context;
    let text = read(file)?;
    let mut mistakes = mistakes_in(&text, backends, Config::parse)?;
    let trial = try_usable(&context, &text.text);
    mistakes.extend(trial.as_ref().and_then(Trial::mistake));
    accept(&mistakes, force)?;
    let registry = global.make_registry().await?;
    let seen = match registry.config().await {
        Ok(seen) => Some(seen),
        Err(CoreError::NoConfig { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    let new = NewConfig { seen: seen.as_ref(), text: text.text, mistakes: &mistakes };
    let written = write(&*registry, new, backends, terminal).await;
    with_trial(written, trial, terminal)
}

/// Writes the config in the store with the changes of a patch.
async fn patch_verb(context: Context<'_>, patch: &str, force: bool) -> Result<Output> {
    let Context { global, backends, terminal, .. } = context;
    let registry = global.open_registry().await?;
    let seen = registry.config().await?;
    let text = patched(&seen, patch)?;
    let (mut caused, kept) = mistakes_in_patch(&seen, patch, &text, backends)?;
    let trial = try_usable(&context, &text);
    caused.extend(trial.as_ref().and_then(Trial::mistake));
    let all = [&caused[..], &kept].concat();
    // A patch may leave a mistake that daemons accept, and repair something else.
    let is_usable = validate(&text, backends, Config::parse).is_ok();
    accept(if is_usable { &caused } else { &all }, force)?;
    let new = NewConfig { seen: Some(&seen), text, mistakes: &all };
    let written = write(&*registry, new, backends, terminal).await;
    with_trial(written, trial, terminal)
}

/// The answer of this node about a config, or `None` if the config is not valid.
fn try_usable(context: &Context<'_>, text: &str) -> Option<Trial> {
    validate(text, context.backends, Config::parse).ok().map(|_| Trial::of(context.client, text))
}

/// Adds the answer of this node to an output.
fn with_trial(output: Result<Output>, trial: Option<Trial>, terminal: &Terminal) -> Result<Output> {
    let mut output = output?;
    if let Some(trial) = trial {
        trial.describe(&mut output, terminal);
    }
    Ok(output)
}

/// The mistakes in a config, each with the place of the config.
///
/// # Errors
/// It is not a JSON object.
fn mistakes_in(text: &ConfigText, backends: &Backends, parse: Parse) -> Result<Vec<String>> {
    let place = |mistake: String| format!("{}: {mistake}", text.location);
    match mistakes::find(&text.text, backends, parse) {
        Ok(found) => Ok(found.into_iter().map(place).collect()),
        Err(error) => Err(Error::Refused(place(error))),
    }
}

/// Refuses a config with mistakes, except by force.
fn accept(mistakes: &[String], force: bool) -> Result<()> {
    if mistakes.is_empty() || force {
        return Ok(());
    }
    let note = "nothing was written; --force writes the config in spite of its mistakes";
    Err(Error::Lines(mistakes.iter().cloned().chain([note.to_owned()]).collect()))
}

/// A config to write.
struct NewConfig<'a> {
    /// The config in the store, as it was read, or `None` if the store has none.
    seen: Option<&'a ConfigText>,
    text: String,
    mistakes: &'a [String],
}

/// Writes a config, unless the config in the store has changed since it was read.
async fn write(
    registry: &dyn Registry,
    new: NewConfig<'_>,
    backends: &Backends,
    terminal: &Terminal,
) -> Result<Output> {
    let NewConfig { seen, text, mistakes } = new;
    let text = ConfigText { location: registry.to_string(), text };
    let result = match seen {
        Some(seen) if seen.text == text.text => "unchanged: the store has this config already",
        _ => {
            registry.write_config(seen, &text.text).await?;
            "written"
        }
    };
    let used = seen.and_then(|seen| Config::parse(&seen.text).ok());
    let mut output = match validate(&text.text, backends, Config::parse) {
        Ok(config) => {
            let restart = used.as_ref().is_some_and(|used| used.networks != config.networks);
            let note = if restart {
                format!(
                    "{result}; each daemon uses the changed pod networks from its next start on"
                )
            } else {
                result.to_owned()
            };
            let mut output = describe(&config, &text, &note, terminal);
            if config.require_encryption {
                let types = encryption::of_store(registry).await;
                encryption::describe(&mut output, &config, &types, backends, terminal);
            }
            let change = ConfigChange { config: &config, used: used.as_ref() };
            add_others(&mut output, registry, change, backends, terminal).await?;
            output
        }
        Err(_) => {
            let headline = format!("{}: {result}; daemons refuse this config", text.location);
            let value = json!({ "version": VERSION, "location": text.location, "result": result });
            Output { text: terminal.field("warning", Style::Warning, &headline), value, ok: true }
        }
    };
    for mistake in mistakes {
        output.text += &terminal.field("mistake", Style::Warning, mistake);
    }
    output.value["mistakes"] = json!(mistakes);
    Ok(output)
}

/// A config, and the config before it.
struct ConfigChange<'a> {
    config: &'a Config,
    /// `None` if it is not known or did not change.
    used: Option<&'a Config>,
}

/// Adds the number of leases that do not offer the backend of the config, and the effect of a move
/// to it.
async fn add_others(
    output: &mut Output,
    registry: &dyn Registry,
    change: ConfigChange<'_>,
    backends: &Backends,
    terminal: &Terminal,
) -> Result<()> {
    let ConfigChange { config, used } = change;
    let mut others = BTreeMap::<String, usize>::new();
    let lease_type = backends.lease_type(config);
    for entry in registry.list().await?.entries {
        let attrs = &entry.lease.attrs;
        if !attrs.offers().any(|offer| offer.kind == lease_type || offer.public.is_empty()) {
            *others.entry(attrs.preferred.kind.to_string()).or_default() += 1;
        }
    }
    let kind = &config.backend.kind;
    if !others.is_empty() {
        let count = |(kind, count): (&String, &usize)| match &**kind {
            "" => format!("{count} offer no backend type, as those of udp"),
            kind => format!("{count} offer only {kind}"),
        };
        let text = format!(
            "of the leases, {}; their nodes move to {kind} when they read this config. Nodes of Go \
             flannel need a restart for it, and reach no node that offers only {kind} before",
            others.iter().map(count).collect::<Vec<_>>().join(", ")
        );
        output.text += &terminal.field("note", Style::Warning, &text);
    }
    let runs_alone = |kind: &str| backends.find(kind).is_ok_and(|backend| !backend.can_move());
    let from = used.map(|used| &used.backend.kind).filter(|from| *from != kind);
    let moves = from.is_some() || !others.is_empty();
    let alone = [from, Some(kind).filter(|_| moves)];
    let alone = alone.into_iter().flatten().map(String::as_str).find(|kind| runs_alone(kind));
    // A node without a backend type in its lease runs udp, or alloc.
    let alone = alone.or_else(|| others.contains_key("").then_some("udp"));
    if let Some(alone) = alone {
        let from = from.map(|from| format!(" from {from}")).unwrap_or_default();
        let text = format!(
            "the move{from} to {kind} loses packets: {alone} runs beside no other backend, so two \
             nodes reach each other again only when both have read this config"
        );
        output.text += &terminal.field("note", Style::Warning, &text);
    }
    output.value["other_offers"] = json!(others);
    output.value["move_loses_packets"] = json!(alone.is_some());
    Ok(())
}

/// The mistakes that a patch causes or has itself, and those that the config had before. Each has
/// its origin.
///
/// # Errors
/// One of the texts is not a JSON object.
fn mistakes_in_patch(
    seen: &ConfigText,
    patch: &str,
    text: &str,
    backends: &Backends,
) -> Result<(Vec<String>, Vec<String>)> {
    let before = mistakes::find(&seen.text, backends, Config::parse).map_err(Error::Refused)?;
    let after = mistakes::find(text, backends, Config::parse).map_err(Error::Refused)?;
    let (kept, caused): (Vec<_>, Vec<_>) =
        after.into_iter().partition(|mistake| before.contains(mistake));
    let caused = mistakes::repeated(patch).into_iter().chain(caused);
    let kept = kept.into_iter().map(|mistake| {
        let location = &seen.location;
        format!("{location}: {mistake}; PATCH does not cause this mistake, and does not correct it")
    });
    Ok((caused.map(|mistake| format!("PATCH: {mistake}")).collect(), kept.collect()))
}

/// Applies a patch to a config.
///
/// # Errors
/// The patch or the config is not a JSON object.
fn patched(seen: &ConfigText, patch: &str) -> Result<String> {
    let wrong = |what: &str, why: &dyn Display| {
        Error::Refused(format!(
            "{what} is not a JSON object: {why}; expected one such as {{\"Backend\": {{\"MTU\": \
             1400}}}}"
        ))
    };
    let patch: Members = serde_json::from_str(patch).map_err(|error| wrong("PATCH", &error))?;
    let mut config: Members =
        serde_json::from_str(&seen.text).map_err(|error| wrong(&seen.location, &error))?;
    merge(&mut config, patch).map_err(|error| wrong("PATCH", &error))?;
    serde_json::to_string(&config).map_err(|error| wrong("PATCH", &error))
}

/// **Source**: RFC 7396. Field names ignore case, as in a network config.
fn merge(into: &mut Members, patch: Members) -> serde_json::Result<()> {
    for (name, value) in patch.0 {
        let is_it = |(known, _): &(String, _)| known.eq_ignore_ascii_case(&name);
        // Of several fields with the same name the last one counts, as when a config is read.
        let last = into.0.iter().rposition(is_it);
        let at =
            into.0[..last.unwrap_or(into.0.len())].iter().filter(|member| !is_it(member)).count();
        let there = last.map(|last| into.0.remove(last));
        into.0.retain(|member| !is_it(member));
        if value.get() != "null" {
            let value = replaced(there.as_ref().map(|(_, value)| &**value), value)?;
            into.0.insert(at, (there.map_or(name, |(known, _)| known), value));
        }
    }
    Ok(())
}

/// Replaces a value by a patch. An object is patched member by member.
fn replaced(there: Option<&RawValue>, patch: Box<RawValue>) -> serde_json::Result<Box<RawValue>> {
    let Ok(members) = serde_json::from_str::<Members>(patch.get()) else { return Ok(patch) };
    let mut object: Members =
        there.and_then(|there| serde_json::from_str(there.get()).ok()).unwrap_or_default();
    merge(&mut object, members)?;
    serde_json::value::to_raw_value(&object)
}

/// The network config in a file, which a daemon in Kubernetes may use; `-` is standard input.
///
/// # Errors
/// It cannot be read, or is wrong.
pub(super) fn of_file(file: &Path, backends: &Backends) -> Result<Config> {
    let text = read(file)?;
    check(&text, backends, Config::parse)
        .or_else(|error| check(&text, backends, Config::parse_undivided).map_err(|_| error))
}

fn read(file: &Path) -> Result<ConfigText> {
    let mut text = String::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text).map(drop)
    } else {
        std::fs::read_to_string(file).map(|content| text = content)
    };
    let location = file.display().to_string();
    read.map_err(|error| Error::Refused(format!("{location}: {error}")))?;
    Ok(ConfigText { location, text })
}

/// Checks a config as a daemon does, but not against this node.
fn check(text: &ConfigText, backends: &Backends, parse: Parse) -> Result<Config> {
    validate(&text.text, backends, parse)
        .map_err(|refusal| Error::Refused(format!("{}: {}", text.location, refusal.text)))
}

/// Checks the config, the backend's options, and whether they suit the enabled families.
fn validate(text: &str, backends: &Backends, parse: Parse) -> std::result::Result<Config, Refusal> {
    let config = parse(text)?;
    backends.find(&config.backend.kind)?.validate(&config, None)?;
    Ok(config)
}

fn describe(config: &Config, text: &ConfigText, done: &str, terminal: &Terminal) -> Output {
    let headline = if done.is_empty() { "the config is valid" } else { done };
    let mut out = terminal.field("ok", Style::Good, &format!("{}: {headline}", text.location));
    let mut networks = Vec::new();
    for (family, pod) in config.networks.iter() {
        let count = pod.subnets();
        out += &terminal.field(
            &family.to_string(),
            Style::Bold,
            &format!("{}, split into {count} subnets from {} to {}", pod.network, pod.min, pod.max),
        );
        networks.push(json!({
            "family": family.to_string(),
            "network": pod.network.to_string(),
            "subnet_len": pod.subnet_len,
            "min": pod.min.to_string(),
            "max": pod.max.to_string(),
            "subnets": u64::try_from(count).unwrap_or(u64::MAX),
        }));
    }
    let implied = if config.backend.explicit {
        ""
    } else {
        ", because the config names none (Go flannel would use udp: name the type)"
    };
    out += &terminal.field("backend", Style::Bold, &format!("{}{implied}", config.backend.kind));
    let value = json!({
        "version": VERSION,
        "location": text.location,
        "result": headline,
        "networks": networks,
        "backend": config.backend.kind,
        "backend_named": config.backend.explicit,
        "nftables": config.nftables,
    });
    Output { text: out, value, ok: true }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn a_config_is_shown_with_its_defaults() {
        let text = ConfigText {
            location: "etcd:https://etcd-1:2379,https://etcd-2:2379".into(),
            text: r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#
                .into(),
        };
        let config = check(&text, &flannel_backends::all(), Config::parse).unwrap();
        let done = "written; each daemon uses the changed pod networks from its next start on";
        assert_page("config", |terminal| describe(&config, &text, done, terminal).text);
    }

    #[tokio::test]
    async fn leases_that_do_not_offer_the_backend_are_counted() {
        let text = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#;
        let registry = flannel_subnet::MemoryRegistry::with_config(text);
        let other = r#","OtherOffers":[{"PublicIP":"192.0.2.7","BackendType":"host-gw"}]"#;
        for (n, kind, others) in
            [(7, "vxlan", other), (8, "vxlan", ""), (9, "vxlan", ""), (10, "host-gw", "")]
        {
            let value = format!(r#"{{"PublicIP":"192.0.2.{n}","BackendType":"{kind}"{others}}}"#);
            let attrs = flannel_core::lease::LeaseAttrs::from_json(&value).unwrap();
            let subnets = format!("10.1.{n}.0-24").parse().unwrap();
            registry.create(&subnets, &attrs, None).await.unwrap();
        }
        let seen = registry.config().await.unwrap();
        let backends = flannel_backends::all();
        let terminal = Terminal { width: 200, colours: false };
        for (text, counts, note) in [
            (text.to_owned(), json!({ "vxlan": 2 }), "of the leases, 2 offer only vxlan; their"),
            (text.replace("host-gw", "vxlan"), json!({ "host-gw": 1 }), "1 offer only host-gw"),
        ] {
            let new = NewConfig { seen: Some(&seen), text, mistakes: &[] };
            let written = write(&registry, new, &backends, &terminal).await;
            let output = written.unwrap();
            assert_eq!(output.value["other_offers"], counts);
            assert!(output.text.contains(note), "{}", output.text);
        }
    }

    /// The lease type of udp is empty.
    #[tokio::test]
    async fn a_move_from_or_to_udp_is_described_and_loses_packets() {
        let config = |kind| format!(r#"{{"Network":"10.1.0.0/16","Backend":{{"Type":"{kind}"}}}}"#);
        let terminal = Terminal { width: 400, colours: false };
        let backends = flannel_backends::all();
        for (from, to, offer, parts) in [
            ("vxlan", "udp", "vxlan", ["1 offer only vxlan; their nodes move to udp when", "udp"]),
            ("udp", "vxlan", "", ["1 offer no backend type, as those of udp; their", "udp"]),
            ("alloc", "vxlan", "vxlan", ["the move from alloc to vxlan loses packets", "alloc"]),
            ("vxlan", "host-gw", "vxlan", ["1 offer only vxlan; their nodes move to host-gw", ""]),
            ("vxlan", "vxlan", "vxlan", ["backend", ""]),
        ] {
            let registry = flannel_subnet::MemoryRegistry::with_config(&config(from));
            let value = format!(r#"{{"PublicIP":"192.0.2.7","BackendType":"{offer}"}}"#);
            let attrs = flannel_core::lease::LeaseAttrs::from_json(&value).unwrap();
            registry.create(&"10.1.7.0-24".parse().unwrap(), &attrs, None).await.unwrap();
            let seen = registry.config().await.unwrap();
            let new = NewConfig { seen: Some(&seen), text: config(to), mistakes: &[] };
            let output = write(&registry, new, &backends, &terminal).await.unwrap();
            let [part, alone] = parts;
            assert!(output.text.contains(part), "{from} {to}: {}", output.text);
            let words = format!("loses packets: {alone} runs beside no other backend");
            let loses = !alone.is_empty();
            assert_eq!(output.text.contains(&words), loses, "{from} {to}: {}", output.text);
            assert_eq!(output.value["move_loses_packets"], loses);
            assert!(!output.text.contains("move to  when"), "{}", output.text);
        }
    }

    #[test]
    fn a_patch_changes_only_the_fields_that_it_names() {
        let text = r#"{"network": "10.1.0.0/16",
            "Backend": {"Type": "vxlan", "mtu": 1450, "VNI": 7}, "Mine": [1]}"#;
        let seen = ConfigText { location: "here".into(), text: text.into() };
        for (patch, expected) in [
            (
                r#"{"Backend":{"MTU":1400}}"#,
                concat!(
                    r#"{"network":"10.1.0.0/16","#,
                    r#""Backend":{"Type":"vxlan","mtu":1400,"VNI":7},"Mine":[1]}"#
                ),
            ),
            (
                r#"{"backend":{"vni":null},"mine":null}"#,
                r#"{"network":"10.1.0.0/16","Backend":{"Type":"vxlan","mtu":1450}}"#,
            ),
            (
                r#"{"Mine":{"a":{"b":null,"c":1}}}"#,
                concat!(
                    r#"{"network":"10.1.0.0/16","#,
                    r#""Backend":{"Type": "vxlan", "mtu": 1450, "VNI": 7},"#,
                    r#""Mine":{"a":{"c":1}}}"#
                ),
            ),
        ] {
            assert_eq!(patched(&seen, patch).unwrap(), expected, "{patch}");
        }
        for (seen, patch, part) in [
            (&seen, "1400", "PATCH is not a JSON object"),
            (&ConfigText { text: "[]".into(), ..seen.clone() }, "{}", "here is not a JSON object"),
        ] {
            let error = patched(seen, patch).unwrap_err().to_string();
            assert!(error.starts_with(part) && error.contains("\"MTU\": 1400"), "{error}");
        }
    }

    #[test]
    fn field_names_ignore_case_and_the_last_duplicate_counts() {
        let mtu = |text: &str| {
            flannel_backend_vxlan::Options::parse(&Config::parse(text).unwrap().backend)
                .unwrap()
                .mtu
        };
        for backend in [
            r#"{"Type":"vxlan","MTU":1450,"mtu":1430}"#,
            r#"{"Type":"vxlan","mtu":1450,"MTU":1430}"#,
            r#"{"Type":"vxlan","MTU":1450,"MTU":1430}"#,
        ] {
            let text = format!(
                r#"{{"Network":"10.1.0.0/16","backend":{{"Type":"host-gw"}},"Backend":{backend}}}"#
            );
            let seen = ConfigText { location: "here".into(), text };
            assert_eq!(mtu(&seen.text), Some(1430));
            let of = |patch: &str| mtu(&patched(&seen, patch).unwrap());
            assert_eq!(of(r#"{"BACKEND":{"Mtu":1400}}"#), Some(1400), "{backend}");
            assert_eq!(of(r#"{"BACKEND":{"Mtu":1400,"mTU":1399}}"#), Some(1399), "{backend}");
            assert_eq!(of(r#"{"Backend":{"mTU":null}}"#), None, "{backend}");
            assert_eq!(
                of(r#"{"Backend":{"VNI":7}}"#),
                Some(1430),
                "an unnamed field keeps its value: {backend}"
            );
            assert_eq!(of(r#"{"EnableNFTables":true}"#), Some(1430), "{backend}");
        }
    }

    #[test]
    fn a_mistake_names_the_patch_or_the_config() {
        let mistakes = |seen: &ConfigText, patch: &str| {
            let text = patched(seen, patch).unwrap();
            let (caused, kept) =
                mistakes_in_patch(seen, patch, &text, &flannel_backends::all()).unwrap();
            assert!(kept.iter().all(|mistake| mistake.starts_with("here: ")), "{kept:?}");
            assert!(caused.iter().all(|mistake| mistake.starts_with("PATCH: ")), "{caused:?}");
            [caused, kept].concat()
        };
        let seen = |text: &str| ConfigText { location: "here".into(), text: text.into() };
        let right = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;
        let dual = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
            "Backend":{"Type":"vxlan"}}"#;
        let wrong = r#"{"Network":"10.1.0.0/33","Backend":{"Type":"vxlan"}}"#;
        let old = r#"{"Network":"10.1.0.0/16","Netwrok":"","Backend":{"Type":"vxlan"}}"#;
        for (text, patch, parts) in [
            (right, r#"{"Backend":{"VNI":0}}"#, ["PATCH: ", "field Backend.VNI: 0"]),
            (right, r#"{"Network":"10.1.0.0/40"}"#, ["PATCH: ", "field Network"]),
            (right, r#"{"Backend":{"Type":"vlxan"}}"#, ["PATCH: ", "\"vlxan\""]),
            (
                dual,
                r#"{"Backend":{"MTU":1349}}"#,
                ["PATCH: ", "Backend.MTU 1349 is too small for IPv6: at least 1350"],
            ),
            (wrong, r#"{"Network":"10.1.0.0/40"}"#, ["PATCH: ", "10.1.0.0/40"]),
            (wrong, r#"{"Backend":{"MTU":1400}}"#, ["here: ", "PATCH does not cause this mistake"]),
            (right, r#"{"Backend":{"MUT":1400}}"#, ["PATCH: ", "expected Backend.MTU"]),
            (old, r#"{"Backend":{"VNI":7}}"#, ["here: ", "expected Network; PATCH does not"]),
            (right, r#"{"Backend":{"VNI":7,"vni":8}}"#, ["PATCH: ", "field Backend.VNI: 7"]),
        ] {
            let all = mistakes(&seen(text), patch);
            let [mistake] = &all[..] else { panic!("{patch}: {all:?}") };
            assert!(mistake.starts_with(parts[0]) && mistake.contains(parts[1]), "{mistake}");
        }
        assert_eq!(mistakes(&seen(wrong), r#"{"Network":"10.1.0.0/16"}"#), [""; 0]);
        assert_eq!(mistakes(&seen(dual), r#"{"Backend":{"MTU":1350}}"#), [""; 0]);
        // The names of the patch itself do not count: it may remove an unknown field.
        assert_eq!(mistakes(&seen(old), r#"{"Netwrok":null}"#), [""; 0]);
        let error = check(
            &seen(&dual.replace(r#""vxlan""#, r#""vxlan","MTU":1300"#)),
            &flannel_backends::all(),
            Config::parse,
        )
        .unwrap_err()
        .to_string();
        assert!(error.starts_with("here: ") && error.contains("at least 1350"), "{error}");
    }

    #[test]
    fn a_config_with_mistakes_is_written_by_force_only() {
        let mistakes = ["here: one".to_owned(), "here: two".to_owned()];
        let error = accept(&mistakes, false).unwrap_err().to_string();
        assert!(
            error.starts_with("here: one\nhere: two\n") && error.contains("--force"),
            "{error}"
        );
        assert!(accept(&mistakes, true).is_ok() && accept(&[], false).is_ok());
        let text = |text: &str| ConfigText { location: "here".into(), text: text.into() };
        let error = mistakes_in(&text("[]"), &flannel_backends::all(), Config::parse)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("here: field (document)"), "{error}");
    }
}
