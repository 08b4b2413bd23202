//! The commands. The delegate's config is saved before the delegate runs, and removed when its DEL
//! has succeeded. So after any failure the next DEL can undo the ADD.
//!
//! **Source**: CNI specification 1.1.0, sections 2 and 4; cni-plugin `flannel.go`.

use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

use crate::config::delegate_conf::DelegateConf;
use crate::config::net_conf::{Attachment, NetConf, Object};
use crate::config::subnet_env::SubnetEnv;
use crate::delegate::Delegate;
use crate::spec::call::{Call, Command};
use crate::spec::error::{Code, Error, Result};
use crate::spec::version::SpecVersion;
use crate::state::{self, State};

/// Runs `call` with the network config `stdin`, and returns the text for stdout.
///
/// # Errors
/// Those of the specification for each command, and the delegate's errors unchanged.
///
/// # Blocking
/// Until the delegate has ended, and for the disk.
pub fn run(call: &Call, stdin: &[u8]) -> Result<Vec<u8>> {
    if call.command == Command::Version {
        return Ok(SpecVersion::list().into_bytes());
    }
    let conf = NetConf::parse(stdin)?;
    let nothing = |()| Vec::new();
    let answer = state::check_dir(&conf.data_dir).and_then(|()| match call.command {
        Command::Add => add(call, &conf),
        Command::Del => del(call, &conf).map(nothing),
        Command::Check => check(call, &conf).map(nothing),
        Command::Status => status(call, &conf).map(nothing),
        Command::Gc => gc(call, &conf).map(nothing),
        Command::Version => unreachable!("answered above"),
    });
    answer.map_err(|error| error.with_version(conf.version))
}

fn add(call: &Call, conf: &NetConf) -> Result<Vec<u8>> {
    call.check_netns()?;
    let env = SubnetEnv::read(&conf.subnet_file)?;
    let delegate_conf = DelegateConf::new(conf, &env)?;
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    let bytes = delegate_conf.to_bytes();
    log(&format!(
        "delegateAdd: netconf sent to delegate plugin:\n{}",
        String::from_utf8_lossy(&bytes)
    ));

    let state = State::new(&conf.data_dir, &call.container, &call.ifname);
    let (earlier, attached) = (state.load_own()?, state.load(&conf.name)?.is_some());
    state.save(&bytes)?;
    let answer =
        delegate.run(Command::Add, call, &bytes).and_then(|answer| result(answer, &delegate_conf));
    let Err(error) = answer else { return answer };
    // If an earlier ADD had no DEL yet, this call must not undo that ADD.
    let undone = match earlier {
        Some(earlier) => state.save(&earlier),
        None if attached => state.forget(),
        None => delegate.run(Command::Del, call, &bytes).and_then(|_| state.forget()),
    };
    Err(match undone {
        Ok(()) => error,
        Err(undo) => error.with_details(&format!("cleaning up after it failed too: {undo}")),
    })
}

/// A delegate's result of ADD. If it has no version, the config's is added.
///
/// **Source**: cni `pkg/invoke: fixupResultVersion`.
fn result(answer: Vec<u8>, conf: &DelegateConf) -> Result<Vec<u8>> {
    let parsed: Result<Option<Object>, _> = serde_json::from_slice(&answer);
    let mut fields = parsed.map(Option::unwrap_or_default).map_err(|error| {
        let text = String::from_utf8_lossy(&answer).into_owned();
        let msg = format!("plugin {:?} answered {text:?} to ADD: {error}", conf.kind());
        Error::new(Code::DECODING, msg)
    })?;
    if fields.get("cniVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty()) {
        return Ok(answer);
    }
    fields.insert("cniVersion".into(), conf.version().into());
    Ok(Value::Object(fields).to_string().into_bytes())
}

fn del(call: &Call, conf: &NetConf) -> Result<()> {
    let mut call = call.clone();
    if let Err(error) = call.check_netns() {
        // ADD refuses such a namespace. The path, such as one with a process id, was reused.
        log(&format!("{error}: the container's namespace is gone"));
        call.netns.clear();
    }
    let call = &call;
    let state = State::new(&conf.data_dir, &call.container, &call.ifname);
    let Some(saved) = state.load(&conf.name)? else { return Ok(()) };
    let Some((delegate_conf, saved)) = usable(saved, &state.path(), conf) else { return Ok(()) };
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    // The delegate understands the saved version. The result has the config's version.
    let bytes = match &conf.prev_result {
        Some(result) if delegate_conf.version() == conf.version.as_str() => {
            delegate_conf.with("prevResult", Value::Object(result.clone())).to_bytes()
        }
        _ => saved,
    };
    delegate.run(Command::Del, call, &bytes)?;
    state.forget()
}

/// The delegate's config in `file`, and its text. If `saved` is damaged, as after a crash of the Go
/// plugin, the config that ADD would use now releases the same addresses. `None` without one: an
/// error would make the runtime retry for ever.
fn usable(saved: Vec<u8>, file: &Path, conf: &NetConf) -> Option<(DelegateConf, Vec<u8>)> {
    if let Some(delegate_conf) = DelegateConf::from_saved(&saved) {
        return Some((delegate_conf, saved));
    }
    let file = file.display();
    let current = SubnetEnv::read(&conf.subnet_file).and_then(|env| DelegateConf::new(conf, &env));
    match current {
        Ok(current) => {
            log(&format!("{file} is damaged: its ADD is undone with the current network config"));
            let text = current.to_bytes();
            Some((current, text))
        }
        Err(error) => {
            log(&format!("{file} is damaged: its ADD is not undone: {error}"));
            None
        }
    }
}

fn check(call: &Call, conf: &NetConf) -> Result<()> {
    conf.require(SpecVersion::WITH_CHECK, "CHECK")?;
    let state = State::new(&conf.data_dir, &call.container, &call.ifname);
    let saved = state.load(&conf.name)?.ok_or_else(|| {
        let msg = format!("interface {} of container {} is unknown", call.ifname, call.container);
        Error::new(Code::UNKNOWN_CONTAINER, msg)
            .with_details(&format!("{} is not there", state.path().display()))
    })?;
    let delegate_conf = DelegateConf::from_saved(&saved).ok_or_else(|| {
        let path = state.path();
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

/// Adds to routes without a gateway that of their family's address, as the specification defines
/// them. Without it, `bridge` and others look for a route without a gateway at CHECK.
///
/// **Source**: CNI specification, section 5 (`gw`); plugins `pkg/ip: ValidateExpectedRoute`,
/// `pkg/ipam: ConfigureIface`.
fn with_gateways(result: &Object) -> Value {
    let mut result = result.clone();
    let is_v6 = |object: &Value, key: &str| Some(object.get(key)?.as_str()?.contains(':'));
    let ips = result.get("ips").and_then(Value::as_array).cloned().unwrap_or_default();
    for route in result.get_mut("routes").and_then(Value::as_array_mut).into_iter().flatten() {
        let of_family =
            |ip: &&Value| is_v6(ip, "gateway").is_some_and(|v6| is_v6(route, "dst") == Some(v6));
        let gateway = ips.iter().find(of_family).map(|ip| ip["gateway"].clone());
        if let (Some(gateway), Some(fields)) = (gateway, route.as_object_mut())
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
    let env = SubnetEnv::read(&conf.subnet_file).map_err(not_available)?;
    let delegate_conf = DelegateConf::new(conf, &env).map_err(not_available)?;
    let delegate = Delegate::find(delegate_conf.kind(), call).map_err(not_available)?;
    delegate.run(Command::Status, call, &delegate_conf.to_bytes()).map(drop)
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
    let listing = state::list(&conf.data_dir)?;
    let mut errors = Vec::new();
    for state in &listing.states {
        let is_of =
            |known: &Attachment| known.container == state.container && known.ifname == state.ifname;
        if !valid.iter().any(is_of) {
            let names = |_: &DelegateConf| vec![state.ifname.clone()];
            let forget = || state.forget();
            let undone = undo(&state.path(), &state.container, names, (call, conf), forget);
            errors.extend(undone.err());
        }
    }
    for of_go in &listing.of_go {
        if !valid.iter().any(|known| known.container == of_go.container) {
            // The Go plugin's file does not name the interface. The delegate's GC is not enough: a
            // delegate without GC succeeds and keeps the address.
            let names = |saved: &DelegateConf| saved.interfaces(&of_go.container);
            let forget = || state::remove(&of_go.path);
            let undone = undo(&of_go.path, &of_go.container, names, (call, conf), forget);
            errors.extend(undone.err());
        }
    }
    errors.extend(collect_garbage(valid, call, conf).err());
    let mut errors = errors.into_iter();
    let Some(first) = errors.next() else { return Ok(()) };
    Err(errors.fold(first, |all, error| all.with_details(&error.to_string())))
}

/// Calls DEL for the interfaces `names` of a container that is gone, with the config in `file`, and
/// then `forget`. Skips other networks. A damaged file stays, because it may be of another network.
fn undo(
    file: &Path,
    container: &str,
    names: impl FnOnce(&DelegateConf) -> Vec<String>,
    (call, conf): (&Call, &NetConf),
    forget: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let Some(saved) = state::read(file)? else { return Ok(()) };
    let is_whole = DelegateConf::from_saved(&saved).is_some();
    let Some((delegate_conf, saved)) = usable(saved, file, conf) else { return Ok(()) };
    if delegate_conf.network() != conf.name {
        return Ok(());
    }
    for ifname in names(&delegate_conf) {
        let container = container.to_owned();
        let call = Call { container, ifname, netns: String::new(), ..call.clone() };
        Delegate::find(delegate_conf.kind(), &call)?.run(Command::Del, &call, &saved)?;
    }
    if is_whole { forget() } else { Ok(()) }
}

/// Calls the delegate's GC.
fn collect_garbage(valid: &[Attachment], call: &Call, conf: &NetConf) -> Result<()> {
    let delegate_conf = DelegateConf::new(conf, &SubnetEnv::read(&conf.subnet_file)?)?;
    let list =
        valid.iter().map(|known| json!({ "containerID": known.container, "ifname": known.ifname }));
    let delegate_conf = delegate_conf.with("cni.dev/valid-attachments", list.collect());
    Delegate::find(delegate_conf.kind(), call)?
        .run(Command::Gc, call, &delegate_conf.to_bytes())
        .map(drop)
}

/// Writes a line to stderr, which runtimes log. A closed stderr is no error.
fn log(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_without_a_gateway_get_that_of_their_family() {
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
