//! The commands. The delegate's config is saved before the delegate is called, and kept until its
//! DEL has succeeded, so whatever fails in between, the next DEL knows what to undo.
//!
//! **Source**: CNI specification 1.1.0, sections 2 and 4; cni-plugin `flannel.go`, `flannel_linux.go`.

use std::io::Write;

use serde_json::{Value, json};

use crate::call::{Call, Command};
use crate::delegate::Delegate;
use crate::delegate_conf::DelegateConf;
use crate::error::{Code, Error, Result};
use crate::net_conf::{Attachment, NetConf, Object};
use crate::state::{self, GoState, State};
use crate::subnet_env::SubnetEnv;
use crate::version::SpecVersion;

/// Carries out `call` with the network config `stdin`; returns what belongs on stdout.
///
/// # Errors
/// What the specification says for each command; the delegate's own errors come through as they are.
///
/// # Blocking
/// Until the delegate has ended, and for the disk.
pub fn run(call: &Call, stdin: &[u8]) -> Result<Vec<u8>> {
    if call.command == Command::Version {
        return Ok(SpecVersion::list().into_bytes());
    }
    let conf = NetConf::parse(stdin)?;
    let nothing = |()| Vec::new();
    let answer = match call.command {
        Command::Add => add(call, &conf),
        Command::Del => del(call, &conf).map(nothing),
        Command::Check => check(call, &conf).map(nothing),
        Command::Status => status(call, &conf).map(nothing),
        Command::Gc => gc(call, &conf).map(nothing),
        Command::Version => unreachable!("answered above"),
    };
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
    // An earlier ADD without a DEL: what it connected is not this one's to take down.
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

/// What a delegate answers to ADD, as it is; with the config's version if it has none.
///
/// **Source**: cni `pkg/invoke: fixupResultVersion`.
fn result(answer: Vec<u8>, conf: &DelegateConf) -> Result<Vec<u8>> {
    let parsed: Result<Option<Object>, _> = serde_json::from_slice(&answer);
    let mut fields = parsed.map(Option::unwrap_or_default).map_err(|error| {
        let said = String::from_utf8_lossy(&answer).into_owned();
        let msg = format!("plugin {:?} answered {said:?} to ADD: {error}", conf.kind());
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
        // ADD refuses it, so the path (of a process, say, whose number was given away again) means another one now.
        log(&format!("{error}: taken for a namespace that is gone"));
        call.netns.clear();
    }
    let call = &call;
    let state = State::new(&conf.data_dir, &call.container, &call.ifname);
    let Some(saved) = state.load(&conf.name)? else { return Ok(()) };
    let Some(delegate_conf) = DelegateConf::from_saved(&saved) else {
        // An error would come again with every retry, and the container would never go away.
        log(&format!("{} holds no network config: nothing to undo", state.path().display()));
        return Ok(());
    };
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    // What was saved is what the delegate understood. The result is of the config's version, and may not be.
    let bytes = match &conf.prev_result {
        Some(result) if delegate_conf.version() == conf.version.as_str() => {
            delegate_conf.with("prevResult", Value::Object(result.clone())).to_bytes()
        }
        _ => saved,
    };
    delegate.run(Command::Del, call, &bytes)?;
    state.forget()
}

fn check(call: &Call, conf: &NetConf) -> Result<()> {
    conf.require(SpecVersion::WITH_CHECK, "CHECK")?;
    let state = State::new(&conf.data_dir, &call.container, &call.ifname);
    let saved = state.load(&conf.name)?.ok_or_else(|| {
        let msg = format!(
            "nothing is known of interface {} of container {}",
            call.ifname, call.container
        );
        Error::new(Code::UNKNOWN_CONTAINER, msg)
            .with_details(&format!("{} is not there", state.path().display()))
    })?;
    let delegate_conf = DelegateConf::from_saved(&saved).ok_or_else(|| {
        let path = state.path();
        Error::new(Code::DECODING, format!("{} is not the config of a plugin", path.display()))
    })?;
    let delegate = Delegate::find(delegate_conf.kind(), call)?;
    // CHECK and the result are of the config's version, which may have changed since ADD.
    let mut delegate_conf = delegate_conf.with("cniVersion", conf.version.as_str().into());
    if let Some(result) = &conf.prev_result {
        delegate_conf = delegate_conf.with("prevResult", with_gateways(result));
    }
    delegate.run(Command::Check, call, &delegate_conf.to_bytes()).map(drop)
}

/// A result whose routes all say their gateway. flannel's have none, which stands for that of the address of their
/// family; but `bridge` and others look for a route without a gateway at CHECK, and never find one.
///
/// **Source**: CNI specification, section 5 (`gw`); plugins `pkg/ip: ValidateExpectedRoute`, `pkg/ipam:
/// ConfigureIface`.
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

/// Undoes what was saved for interfaces that are not to stay, and passes the others to the delegate. It goes on after
/// errors, and reports them all.
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
        let stays = |known: &Attachment| {
            known.container == state.container() && known.ifname == state.ifname()
        };
        if !valid.iter().any(stays) {
            errors.extend(undo(state, call, conf).err());
        }
    }
    for of_go in &listing.of_go {
        if !valid.iter().any(|known| known.container == of_go.container) {
            errors.extend(undo_of_go(of_go, call, conf).err());
        }
    }
    errors.extend(collect_garbage(valid, call, conf).err());
    let mut errors = errors.into_iter();
    let Some(first) = errors.next() else { return Ok(()) };
    Err(errors.fold(first, |all, error| all.with_details(&error.to_string())))
}

/// DEL for an interface whose container is gone, after which nothing is kept of it.
fn undo(state: &State, call: &Call, conf: &NetConf) -> Result<()> {
    match state.load_own()? {
        Some(saved) if disconnect(&saved, (state.container(), state.ifname()), call, conf)? => {
            state.forget()
        }
        _ => Ok(()),
    }
}

/// The same for what the Go plugin connected. Which interface that was its file does not say; mostly it is the usual one. GC alone does not
/// do: a delegate that knows none succeeds all the same, and the address would never be free again.
fn undo_of_go(of_go: &GoState, call: &Call, conf: &NetConf) -> Result<()> {
    match of_go.load()? {
        Some(saved) if disconnect(&saved, (&of_go.container, "eth0"), call, conf)? => {
            of_go.forget()
        }
        _ => Ok(()),
    }
}

/// DEL with a saved config, where there is no namespace any more. Returns whether it was this network's.
fn disconnect(
    saved: &[u8],
    (container, ifname): (&str, &str),
    call: &Call,
    conf: &NetConf,
) -> Result<bool> {
    let Some(delegate_conf) = DelegateConf::from_saved(saved) else {
        log(&format!(
            "what is kept of container {container} is no network config: nothing to undo"
        ));
        return Ok(false);
    };
    if delegate_conf.network() != conf.name {
        return Ok(false);
    }
    let (container, ifname) = (container.to_owned(), ifname.to_owned());
    let call = Call { container, ifname, netns: String::new(), ..call.clone() };
    Delegate::find(delegate_conf.kind(), &call)?.run(Command::Del, &call, saved)?;
    Ok(true)
}

/// GC for the delegate.
fn collect_garbage(valid: &[Attachment], call: &Call, conf: &NetConf) -> Result<()> {
    let delegate_conf = DelegateConf::new(conf, &SubnetEnv::read(&conf.subnet_file)?)?;
    let list =
        valid.iter().map(|known| json!({ "containerID": known.container, "ifname": known.ifname }));
    let delegate_conf = delegate_conf.with("cni.dev/valid-attachments", list.collect());
    Delegate::find(delegate_conf.kind(), call)?
        .run(Command::Gc, call, &delegate_conf.to_bytes())
        .map(drop)
}

/// A line on stderr, which runtimes log. That it cannot be written is no reason to fail.
fn log(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_without_a_gateway_get_that_of_their_family() {
        let result = json!({
            "ips": [{ "address": "10.1.5.2/24" }, { "address": "10.1.5.2/24", "gateway": "10.1.5.1" },
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
    fn a_result_is_passed_on_as_it_is_and_always_has_a_version() {
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
