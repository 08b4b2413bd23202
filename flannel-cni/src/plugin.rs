//! The commands. The delegate's config is saved before the delegate runs, and removed when its DEL
//! has succeeded. So after any failure the next DEL can undo the ADD.
//!
//! **Source**: CNI specification 1.1.0, sections 2 and 4; cni-plugin `flannel.go`.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::delegate_conf::DelegateConf;
use crate::config::net_conf::{Attachment, NetConf, Object};
use crate::config::subnet_env;
use crate::delegate::Delegate;
use crate::saved::{self, GoFile, SavedConf};
use crate::spec::call::{Call, Command};
use crate::spec::error::{Code, Error, Result};
use crate::spec::version::SpecVersion;

/// Runs `call` with the network config `stdin`, and returns the text for stdout.
///
/// # Errors
/// The errors that the specification defines for the command, and the delegate's errors unchanged.
///
/// # Blocking
/// Waits until the delegate has ended, and for the disk.
pub fn run(call: &Call, stdin: &[u8]) -> Result<Vec<u8>> {
    if call.command == Command::Version {
        return Ok(SpecVersion::list().into_bytes());
    }
    let conf = NetConf::parse(stdin)?;
    run_with(call, &conf).map_err(|error| error.with_version(conf.version))
}

fn run_with(call: &Call, conf: &NetConf) -> Result<Vec<u8>> {
    if let Err(error) = saved::check_dir(&conf.data_dir) {
        return match call.command {
            Command::Del => del_without_saved(call, conf, &error).map(|()| Vec::new()),
            _ => Err(error),
        };
    }
    match call.command {
        Command::Add => return add(call, conf),
        Command::Del => del(call, conf)?,
        Command::Check => check(call, conf)?,
        Command::Status => status(call, conf)?,
        Command::Gc => gc(call, conf)?,
        Command::Version => unreachable!("answered by the caller"),
    }
    Ok(Vec::new())
}

fn add(call: &Call, conf: &NetConf) -> Result<Vec<u8>> {
    call.check_netns()?;
    let env = subnet_env::read(&conf.subnet_file)?;
    let delegate_conf = DelegateConf::new(conf, &env)?;
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    let bytes = delegate_conf.to_bytes();
    log(&format!(
        "delegateAdd: netconf sent to delegate plugin:\n{}",
        String::from_utf8_lossy(&bytes)
    ));

    let saved = SavedConf::new(&conf.data_dir, &call.container, &call.ifname);
    let earlier = saved.load_own()?;
    let is_attached = saved.load(&conf.name)?.is_some();
    saved.save(&bytes)?;
    let added =
        delegate.run(Command::Add, call, &bytes).and_then(|answer| result(answer, &delegate_conf));
    let Err(error) = added else { return added };
    // If an earlier ADD had no DEL yet, this call must not undo that ADD.
    let undone = match earlier {
        Some(earlier) => saved.save(&earlier),
        None if is_attached => saved.forget(),
        None => delegate.run(Command::Del, call, &bytes).and_then(|_| saved.forget()),
    };
    Err(match undone {
        Ok(()) => error,
        Err(undo) => error.with_details(&format!("cleaning up after it failed too: {undo}")),
    })
}

/// A delegate's result of ADD. If it has no version, it gets the version of the config.
///
/// **Source**: cni `pkg/invoke: fixupResultVersion`.
fn result(answer: Vec<u8>, conf: &DelegateConf) -> Result<Vec<u8>> {
    let parsed: Option<Object> = serde_json::from_slice(&answer).map_err(|error| {
        let text = String::from_utf8_lossy(&answer).into_owned();
        let msg = format!("plugin {:?} answered {text:?} to ADD: {error}", conf.kind());
        Error::new(Code::DECODING, msg)
    })?;
    let mut fields = parsed.unwrap_or_default();
    if fields.get("cniVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty()) {
        return Ok(answer);
    }
    fields.insert("cniVersion".into(), conf.version().into());
    Ok(Value::Object(fields).to_string().into_bytes())
}

/// The call of a DEL, without a namespace that ADD refuses. Its path, such as one with a process
/// id, was reused.
fn without_reused_netns(call: &Call) -> Call {
    let mut call = call.clone();
    if let Err(error) = call.check_netns() {
        log(&format!("{error}: the container's namespace is gone"));
        call.netns.clear();
    }
    call
}

/// DEL if no saved config may be used, for the reason `why`. The config that ADD would use now
/// releases the same addresses. An error would make the runtime retry until somebody corrects the
/// directory.
fn del_without_saved(call: &Call, conf: &NetConf, why: &Error) -> Result<()> {
    let call = &without_reused_netns(call);
    let current = subnet_env::read(&conf.subnet_file).and_then(|env| {
        let current = DelegateConf::new(conf, &env)?;
        Ok((Delegate::find(current.kind(), call)?, current))
    });
    match current {
        Ok((delegate, current)) => {
            log(&format!("{why}: ADD is undone with the current network config"));
            delegate.run(Command::Del, call, &current.to_bytes()).map(drop)
        }
        Err(error) => {
            log(&format!("{why}: ADD is not undone: {error}"));
            Ok(())
        }
    }
}

fn del(call: &Call, conf: &NetConf) -> Result<()> {
    let call = &without_reused_netns(call);
    let saved = SavedConf::new(&conf.data_dir, &call.container, &call.ifname);
    let Some(text) = saved.load(&conf.name)? else { return Ok(()) };
    let Some(usable) = usable(text, &saved.path(), conf) else { return Ok(()) };
    let delegate = Delegate::find(usable.conf.kind(), call)?;
    // The delegate understands the saved version. The result has the config's version.
    let bytes = match &conf.prev_result {
        Some(result) if usable.conf.version() == conf.version.as_str() => {
            usable.conf.with("prevResult", Value::Object(result.clone())).to_bytes()
        }
        _ => usable.text,
    };
    delegate.run(Command::Del, call, &bytes)?;
    saved.forget()
}

/// A delegate's config with which an ADD is undone.
struct UsableConf {
    conf: DelegateConf,
    text: Vec<u8>,
    /// It was not saved: the saved one is damaged.
    is_current: bool,
}

/// The config that undoes the ADD whose saved config is `text` in `file`. If the file is damaged,
/// as after a crash of the Go plugin, the config that ADD would use now releases the same
/// addresses. Returns `None` if there is no such config either, because an error would make the
/// runtime retry for ever.
fn usable(text: Vec<u8>, file: &Path, conf: &NetConf) -> Option<UsableConf> {
    if let Some(conf) = DelegateConf::from_saved(&text) {
        return Some(UsableConf { conf, text, is_current: false });
    }
    let file = file.display();
    let current = subnet_env::read(&conf.subnet_file).and_then(|env| DelegateConf::new(conf, &env));
    match current {
        Ok(current) => {
            log(&format!("{file} is damaged: its ADD is undone with the current network config"));
            let text = current.to_bytes();
            Some(UsableConf { conf: current, text, is_current: true })
        }
        Err(error) => {
            log(&format!("{file} is damaged: its ADD is not undone: {error}"));
            None
        }
    }
}

fn check(call: &Call, conf: &NetConf) -> Result<()> {
    conf.require(SpecVersion::WITH_CHECK, "CHECK")?;
    let saved = SavedConf::new(&conf.data_dir, &call.container, &call.ifname);
    let text = saved.load(&conf.name)?.ok_or_else(|| {
        let msg = format!("interface {} of container {} is unknown", call.ifname, call.container);
        Error::new(Code::UNKNOWN_CONTAINER, msg)
            .with_details(&format!("{} is not there", saved.path().display()))
    })?;
    let delegate_conf = DelegateConf::from_saved(&text).ok_or_else(|| {
        let path = saved.path();
        Error::new(Code::DECODING, format!("{} is not the config of a plugin", path.display()))
    })?;
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    // CHECK and the result have the config's version, which may have changed since ADD.
    let mut delegate_conf = delegate_conf.with("cniVersion", conf.version.as_str().into());
    if let Some(result) = &conf.prev_result {
        delegate_conf = delegate_conf.with("prevResult", with_gateways(result));
    }
    delegate.run(Command::Check, call, &delegate_conf.to_bytes()).map(drop)
}

/// Adds a gateway to each route that has none. It is the gateway of the first address of the
/// route's family, as the specification defines it. Without it, `bridge` and others look for a
/// route without a gateway at CHECK.
///
/// **Source**: CNI specification, section 5 (`gw`); plugins `pkg/ip: ValidateExpectedRoute`,
/// `pkg/ipam: ConfigureIface`.
fn with_gateways(result: &Object) -> Value {
    let mut result = result.clone();
    let is_v6 = |object: &Value, key: &str| Some(object.get(key)?.as_str()?.contains(':'));
    let ips = result.get("ips").and_then(Value::as_array).cloned().unwrap_or_default();
    for route in result.get_mut("routes").and_then(Value::as_array_mut).into_iter().flatten() {
        let Some(family) = is_v6(route, "dst") else { continue };
        let ip = ips.iter().find(|ip| is_v6(ip, "gateway") == Some(family));
        if let Some(gateway) = ip.map(|ip| ip["gateway"].clone())
            && let Some(fields) = route.as_object_mut()
            && fields.get("gw").is_none_or(Value::is_null)
        {
            fields.insert("gw".into(), gateway);
        }
    }
    Value::Object(result)
}

fn status(call: &Call, conf: &NetConf) -> Result<()> {
    conf.require(SpecVersion::WITH_STATUS_AND_GC, "STATUS")?;
    let not_available = |error: Error| Error { code: Code::NOT_AVAILABLE, ..error };
    let env = subnet_env::read(&conf.subnet_file).map_err(not_available)?;
    let delegate_conf = DelegateConf::new(conf, &env).map_err(not_available)?;
    let delegate = Delegate::find(delegate_conf.kind(), call).map_err(not_available)?;
    if delegate.ask(Command::Status, call, &delegate_conf.to_bytes())?.is_some() {
        return Ok(());
    }
    // It is too old to know STATUS, so it may be too old for ADD.
    delegate.check_version(call, delegate_conf.version()).map_err(not_available)?;
    // The delegate reports a missing plugin for addresses.
    if let Ok(ipam) = Delegate::find(delegate_conf.ipam_kind(), call) {
        ipam.check_version(call, delegate_conf.version()).map_err(not_available)?;
    }
    Ok(())
}

/// Undoes the ADD of interfaces that are not valid any more, and calls the delegate's GC with the
/// others. It continues after errors, and reports all of them.
fn gc(call: &Call, conf: &NetConf) -> Result<()> {
    conf.require(SpecVersion::WITH_STATUS_AND_GC, "GC")?;
    let Some(valid) = &conf.valid_attachments else {
        let msg =
            "network config: cni.dev/valid-attachments is missing: GC would remove everything";
        return Err(Error::new(Code::NETWORK_CONFIG, msg));
    };
    let files = saved::list(&conf.data_dir)?;
    let mut errors = Vec::new();
    for saved in &files.own {
        let is_valid = valid
            .iter()
            .any(|known| known.container == saved.container && known.ifname == saved.ifname);
        if !is_valid {
            errors.extend(undo(StaleFile::Own(saved), call, conf).err());
        }
    }
    for file in &files.of_go {
        if !valid.iter().any(|known| known.container == file.container) {
            // The delegate's GC is not enough: a delegate without GC succeeds and keeps the
            // address.
            errors.extend(undo(StaleFile::OfGo(file), call, conf).err());
        }
    }
    errors.extend(collect_garbage(valid, call, conf).err());
    let mut errors = errors.into_iter();
    let Some(first) = errors.next() else { return Ok(()) };
    Err(errors.fold(first, |all, error| all.with_details(&error.to_string())))
}

/// A file with the config of a container that is gone.
#[derive(Clone, Copy)]
enum StaleFile<'a> {
    Own(&'a SavedConf),
    /// The Go plugin's file does not name the interface.
    OfGo(&'a GoFile),
}

impl StaleFile<'_> {
    fn path(self) -> PathBuf {
        match self {
            Self::Own(saved) => saved.path(),
            Self::OfGo(file) => file.path.clone(),
        }
    }

    fn container(self) -> String {
        match self {
            Self::Own(saved) => saved.container.clone(),
            Self::OfGo(file) => file.container.clone(),
        }
    }

    /// The names of the interfaces that the delegate has made with this config.
    fn interfaces(self, conf: &DelegateConf) -> Vec<String> {
        match self {
            Self::Own(saved) => vec![saved.ifname.clone()],
            Self::OfGo(file) => conf.interfaces(&file.container),
        }
    }

    fn remove(self) -> Result<()> {
        match self {
            Self::Own(saved) => saved.forget(),
            Self::OfGo(file) => saved::remove(&file.path),
        }
    }
}

/// Calls DEL for the interfaces of a container that is gone, and removes its file. Skips files of
/// other networks. A damaged file stays, because it may be of another network.
fn undo(file: StaleFile<'_>, call: &Call, conf: &NetConf) -> Result<()> {
    let path = file.path();
    let Some(text) = saved::read(&path)? else { return Ok(()) };
    let Some(usable) = usable(text, &path, conf) else { return Ok(()) };
    if usable.conf.network() != conf.name {
        return Ok(());
    }
    for ifname in file.interfaces(&usable.conf) {
        let container = file.container();
        let call = Call { container, ifname, netns: String::new(), ..call.clone() };
        Delegate::find(usable.conf.kind(), &call)?.run(Command::Del, &call, &usable.text)?;
    }
    if usable.is_current { Ok(()) } else { file.remove() }
}

/// Calls the delegate's GC.
fn collect_garbage(valid: &[Attachment], call: &Call, conf: &NetConf) -> Result<()> {
    let delegate_conf = DelegateConf::new(conf, &subnet_env::read(&conf.subnet_file)?)?;
    let list =
        valid.iter().map(|known| json!({ "containerID": known.container, "ifname": known.ifname }));
    let delegate_conf = delegate_conf.with("cni.dev/valid-attachments", list.collect());
    Delegate::find(delegate_conf.kind(), call)?
        .run(Command::Gc, call, &delegate_conf.to_bytes())
        .map(drop)
}

/// Writes a line to stderr, which runtimes log. A closed stderr is not an error.
fn log(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_without_a_gateway_get_the_gateway_of_their_family() {
        let result = json!({
            "ips": [
                { "address": "10.1.5.2/24" },
                { "address": "10.1.5.2/24", "gateway": "10.1.5.1" },
                { "address": "10.1.6.2/24", "gateway": "10.1.6.1" }],
            "routes": [{ "dst": "10.1.0.0/16" }, { "dst": "0.0.0.0/0", "gw": "10.1.6.1" },
                { "dst": "10.2.0.0/16", "gw": null }, { "dst": "fd00::/48" }, "no route"],
            "more": 1,
        });
        let mut expected = result.clone();
        expected["routes"][0]["gw"] = "10.1.5.1".into();
        expected["routes"][2]["gw"] = "10.1.5.1".into();
        assert_eq!(with_gateways(result.as_object().unwrap()), expected);
        for other in
            [json!({}), json!({ "ips": null, "routes": null }), json!({ "ips": 1, "routes": [7] })]
        {
            assert_eq!(with_gateways(other.as_object().unwrap()), other);
        }
    }

    #[test]
    fn a_result_is_passed_on_unchanged_and_always_has_a_version() {
        let conf = DelegateConf::from_saved(br#"{"type":"bridge","cniVersion":"0.4.0"}"#).unwrap();
        let whole = br#" {"cniVersion":"0.3.1", "x":1e3} "#;
        assert_eq!(result(whole.to_vec(), &conf).unwrap(), whole);
        for (answer, passed_on) in [
            ("null", r#"{"cniVersion":"0.4.0"}"#),
            (r#"{"cniVersion":"","ips":[]}"#, r#"{"cniVersion":"0.4.0","ips":[]}"#),
        ] {
            assert_eq!(result(answer.into(), &conf).unwrap(), passed_on.as_bytes());
        }
        for bad in ["", "[]", "done", "{} {}"] {
            assert_eq!(result(bad.into(), &conf).unwrap_err().code, Code::DECODING, "{bad}");
        }
    }
}
