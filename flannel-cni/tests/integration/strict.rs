//! The plugin's protocol, with a delegate that accepts only calls that the specification allows
//! (`strict/delegate.sh`). Real processes, no privileges.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;
use test_support::write_script;

use crate::runtime::{Answer, Attach, answer, call, flannel, names};

const ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_MTU=1450\n\
    FLANNEL_IPMASQ=true\n";

/// A host with a `subnet.env`, a directory of plugins with the strict delegate as `bridge`, and a
/// state directory.
struct Host(TempDir);

/// One call of the delegate.
#[derive(Debug, PartialEq)]
struct Called {
    command: String,
    /// Container, interface, namespace and `CNI_ARGS`, with `|` between them.
    of: String,
    conf: String,
}

impl Host {
    fn new() -> Self {
        let host = Self(tempfile::tempdir().unwrap());
        fs::write(host.path("subnet.env"), ENV).unwrap();
        fs::create_dir(host.path("bin")).unwrap();
        fs::write(host.path("bin/bridge"), include_str!("strict/delegate.sh")).unwrap();
        fs::set_permissions(host.path("bin/bridge"), Permissions::from_mode(0o755)).unwrap();
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The state directory, as the Go plugin creates it.
    fn create_state(&self) {
        fs::create_dir_all(self.path("state")).unwrap();
        fs::set_permissions(self.path("state"), Permissions::from_mode(0o700)).unwrap();
    }

    /// The network config with `more` in it.
    fn conf(&self, more: &Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.1.0", "name": "cbr0", "type": "flannel",
            "subnetFile": self.path("subnet.env"), "dataDir": self.path("state"),
        });
        conf.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        conf
    }

    fn output(&self, command: &str, of: (&str, &str), conf: &str, env: &[(&str, &str)]) -> Output {
        let attach = Attach::new(of.0, of.1, Path::new("/nonexistent/netns"));
        call(&flannel(), command, &attach, self.path("bin").to_str().unwrap(), conf, None, env)
    }

    fn call(&self, command: &str, of: (&str, &str), more: &Value) -> Answer {
        answer(&self.output(command, of, &self.conf(more).to_string(), &[]))
    }

    fn add(&self, of: (&str, &str)) {
        self.call("ADD", of, &json!({})).unwrap();
    }

    /// The delegate's calls since the previous call of this function.
    fn called(&self) -> Vec<Called> {
        let text = fs::read_to_string(self.path("calls")).unwrap_or_default();
        let _ = fs::remove_file(self.path("calls"));
        text.lines()
            .map(|line| {
                let (command, rest) = line.split_once('|').unwrap();
                let (of, conf) = rest.rsplit_once("|{").unwrap();
                Called { command: command.into(), of: of.into(), conf: format!("{{{conf}") }
            })
            .collect()
    }

    fn commands(&self) -> Vec<String> {
        self.called()
            .into_iter()
            .map(|called| format!("{} {}", called.command, called.of))
            .collect()
    }

    fn fail(&self, command: &str, code: u64, msg: &str) {
        let error = json!({ "cniVersion": "1.1.0", "code": code, "msg": msg });
        fs::write(self.path(&format!("fail-{command}")), error.to_string()).unwrap();
    }

    fn repair(&self, command: &str) {
        fs::remove_file(self.path(&format!("fail-{command}"))).unwrap();
    }

    fn state(&self) -> Vec<String> {
        names(&self.path("state"))
    }

    /// The interfaces that the delegate has made.
    fn attached(&self) -> Vec<String> {
        names(&self.path("attached"))
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!(self.attached(), [""; 0]);
        assert_eq!(self.state(), [""; 0]);
    }
}

const ETH0: (&str, &str) = ("c1", "eth0");
const NET1: (&str, &str) = ("c1", "net1");
const NETNS: &str = "/nonexistent/netns";

/// The delegate's config for [`ENV`].
const DELEGATE: &str = concat!(
    r#"{"cniVersion":"1.1.0","hairpinMode":true,"ipMasq":false,"#,
    r#""ipam":{"ranges":[[{"subnet":"10.1.5.0/24"}]],"routes":[{"dst":"10.1.0.0/16"}],"#,
    r#""type":"host-local"},"isGateway":true,"mtu":1450,"name":"cbr0","#,
    r#""runtimeConfig":{"mac":"0a:00:00:00:00:01"},"type":"bridge"}"#
);

fn more() -> Value {
    json!({ "delegate": { "hairpinMode": true }, "capabilities": { "mac": true },
        "runtimeConfig": { "mac": "0a:00:00:00:00:01" } })
}

#[test]
fn add_saves_the_config_and_passes_config_and_answer_on() {
    let host = Host::new();
    let saved = host.path("state/c1:eth0");
    let env = [("CNI_ARGS", "A=1;B=2"), ("STRICT_SAVED", saved.to_str().unwrap())];
    let output = host.output("ADD", ETH0, &host.conf(&more()).to_string(), &env);
    // Unchanged, with white space and unknown keys.
    let answer = r#"{"cniVersion":"1.1.0",  "ips":[], "new": {"kept": true}}"#;
    assert_eq!(String::from_utf8(output.stdout).unwrap(), answer);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(DELEGATE) && stderr.contains("strict delegate: ADD"), "{stderr}");
    let of = format!("c1|eth0|{NETNS}|A=1;B=2");
    assert_eq!(host.called(), [Called { command: "ADD".into(), of, conf: DELEGATE.into() }]);
    assert_eq!(host.state(), ["c1", "c1:eth0"]);
    // Each plugin can use either name.
    for name in host.state() {
        assert_eq!(fs::read_to_string(host.path("state").join(name)).unwrap(), DELEGATE);
    }
}

#[test]
fn every_version_of_the_specification_is_supported() {
    for (version, checks) in [
        ("0.1.0", false),
        ("0.2.0", false),
        ("0.3.0", false),
        ("0.3.1", false),
        ("0.4.0", true),
        ("1.0.0", true),
        ("1.1.0", true),
    ] {
        let host = Host::new();
        let env = [("STRICT_VERSION", version)];
        let conf = host.conf(&json!({ "cniVersion": version })).to_string();
        let added = answer(&host.output("ADD", ETH0, &conf, &env)).unwrap();
        assert_eq!(added["cniVersion"], version);
        host.called();
        let check = host.conf(&json!({ "cniVersion": version, "prevResult": added })).to_string();
        let checked = answer(&host.output("CHECK", ETH0, &check, &env));
        assert_eq!(checked.is_ok(), checks, "{version}: {checked:?}");
        let called = host.called();
        assert_eq!(called.len(), usize::from(checks), "{version}");
        for call in called {
            let conf: Value = serde_json::from_str(&call.conf).unwrap();
            assert_eq!(call.command, "CHECK");
            assert_eq!(conf["prevResult"], added);
            assert_eq!(conf["cniVersion"], version);
        }
        assert_eq!(answer(&host.output("DEL", ETH0, &conf, &env)), Ok(Value::Null), "{version}");
        host.assert_nothing_is_left();
    }
    let host = Host::new();
    let env = [("STRICT_VERSION", "none"), ("STRICT_ANSWER", "{}")];
    let mut conf = host.conf(&json!({}));
    conf.as_object_mut().unwrap().remove("cniVersion");
    let added = answer(&host.output("ADD", ETH0, &conf.to_string(), &env)).unwrap();
    assert_eq!(added, json!({ "cniVersion": "0.1.0" }), "a result always has a version");
    for (version, command) in
        [("0.3.1", "CHECK"), ("1.0.0", "STATUS"), ("1.0.0", "GC"), ("1.2.0", "ADD")]
    {
        let error = host.call(command, ETH0, &json!({ "cniVersion": version })).unwrap_err();
        assert_eq!(error["code"], 1, "{error}");
        assert!(error["details"].as_str().unwrap().contains(version), "{error}");
    }
}

#[test]
fn the_state_is_removed_when_the_delegates_del_has_succeeded() {
    let host = Host::new();
    host.add(ETH0);
    host.called();
    host.fail("DEL", 11, "busy");
    for _ in 0..2 {
        let error = host.call("DEL", ETH0, &json!({})).unwrap_err();
        assert_eq!(error, json!({ "cniVersion": "1.1.0", "code": 11, "msg": "busy" }));
        assert_eq!(host.commands(), [format!("DEL c1|eth0|{NETNS}|")]);
        assert_eq!(host.state(), ["c1", "c1:eth0"]);
    }
    host.repair("DEL");
    // DEL needs neither subnet.env nor `delegate`.
    fs::remove_file(host.path("subnet.env")).unwrap();
    host.call("DEL", ETH0, &json!({ "delegate": { "type": "other" } })).unwrap();
    host.assert_nothing_is_left();
    assert_eq!(host.called().len(), 1);
    host.call("DEL", ETH0, &json!({})).unwrap();
    assert_eq!(host.called(), [], "there is nothing left to undo");
}

#[test]
fn del_without_the_plugin_keeps_the_state() {
    let host = Host::new();
    host.add(ETH0);
    fs::rename(host.path("bin/bridge"), host.path("bridge")).unwrap();
    let error = host.call("DEL", ETH0, &json!({})).unwrap_err();
    assert!(error["code"] == 7 && error["msg"].as_str().unwrap().contains("\"bridge\""), "{error}");
    fs::rename(host.path("bridge"), host.path("bin/bridge")).unwrap();
    host.call("DEL", ETH0, &json!({})).unwrap();
    host.assert_nothing_is_left();
}

/// The id of a container's process may be reused by a process of the host.
#[test]
fn del_never_touches_the_hosts_own_namespace() {
    let host = Host::new();
    host.add(ETH0);
    host.called();
    let own = Attach::new("c1", "eth0", Path::new("/proc/self/ns/net"));
    let conf = host.conf(&json!({})).to_string();
    let output =
        call(&flannel(), "DEL", &own, host.path("bin").to_str().unwrap(), &conf, None, &[]);
    assert_eq!(answer(&output), Ok(Value::Null));
    assert_eq!((host.commands(), host.state()), (vec!["DEL c1|eth0||".into()], vec![]));
}

#[test]
fn del_after_a_reboot_that_lost_the_state_succeeds() {
    let host = Host::new();
    host.add(ETH0);
    host.called();
    fs::remove_dir_all(host.path("state")).unwrap();
    host.call("DEL", ETH0, &json!({})).unwrap();
    assert_eq!(host.called(), []);
}

/// The current config releases the addresses too. Without `subnet.env` there is none.
#[test]
fn del_of_a_damaged_state_uses_the_current_config() {
    for damaged in [r#"{"type":"bri"#, "", "[]", "{}"] {
        let host = Host::new();
        // The second one is a file of the Go plugin.
        for file in ["c1:eth0", "c1"] {
            host.add(ETH0);
            fs::remove_dir_all(host.path("state")).unwrap();
            fs::create_dir(host.path("state")).unwrap();
            fs::write(host.path("state").join(file), damaged).unwrap();
            let del = || host.output("DEL", ETH0, &host.conf(&more()).to_string(), &[]);
            fs::rename(host.path("subnet.env"), host.path("gone")).unwrap();
            host.called();
            let output = del();
            assert_eq!(answer(&output), Ok(Value::Null));
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(stderr.contains("c1") && stderr.contains("damaged"), "{stderr}");
            assert_eq!((host.called(), host.state()), (vec![], vec![file.into()]));
            fs::rename(host.path("gone"), host.path("subnet.env")).unwrap();
            assert_eq!(answer(&del()), Ok(Value::Null));
            assert_eq!(host.called()[0].conf, DELEGATE, "{damaged} {file}");
            host.assert_nothing_is_left();
        }
    }
}

#[test]
fn every_interface_of_a_container_has_its_own_state() {
    let host = Host::new();
    host.add(ETH0);
    host.call("ADD", NET1, &more()).unwrap();
    assert_eq!(host.attached(), ["c1:eth0", "c1:net1"]);
    host.called();
    host.call("DEL", ETH0, &json!({})).unwrap();
    assert_eq!(host.attached(), ["c1:net1"]);
    assert_eq!(host.state(), ["c1", "c1:net1"]);
    assert!(!host.called()[0].conf.contains("runtimeConfig"));
    host.call("DEL", NET1, &json!({})).unwrap();
    host.assert_nothing_is_left();
    assert_eq!(host.called()[0].conf, DELEGATE);
}

#[test]
fn del_gets_the_result_if_it_has_the_saved_version() {
    let host = Host::new();
    let result = json!({ "prevResult": { "cniVersion": "1.1.0", "ips": [] } });
    host.call("ADD", ETH0, &more()).unwrap();
    host.call("DEL", ETH0, &result).unwrap();
    let with = DELEGATE.replace(
        r#""runtimeConfig""#,
        r#""prevResult":{"cniVersion":"1.1.0","ips":[]},"runtimeConfig""#,
    );
    assert_eq!(host.called().pop().unwrap().conf, with);

    host.call("ADD", ETH0, &more()).unwrap();
    host.call(
        "DEL",
        ETH0,
        &json!({ "cniVersion": "1.0.0", "prevResult": { "cniVersion": "1.0.0" } }),
    )
    .unwrap();
    assert_eq!(host.called().pop().unwrap().conf, DELEGATE);
}

#[test]
fn an_add_that_fails_is_undone() {
    let host = Host::new();
    host.fail("ADD", 999, "half way");
    let error = host.call("ADD", ETH0, &json!({})).unwrap_err();
    assert_eq!(error, json!({ "cniVersion": "1.1.0", "code": 999, "msg": "half way" }));
    let of = format!("c1|eth0|{NETNS}|");
    assert_eq!(host.commands(), [format!("ADD {of}"), format!("DEL {of}")]);
    host.assert_nothing_is_left();

    host.fail("DEL", 999, "stuck");
    let error = host.call("ADD", ETH0, &json!({})).unwrap_err();
    assert_eq!(error["msg"], "half way");
    assert_eq!(error["details"], "cleaning up after it failed too: stuck");
    assert_eq!(host.attached(), ["c1:eth0"]);
    host.repair("DEL");
    host.call("DEL", ETH0, &json!({})).unwrap();
    // The state for the retry was kept.
    host.assert_nothing_is_left();

    host.repair("ADD");
    let conf = host.conf(&json!({})).to_string();
    let error =
        answer(&host.output("ADD", ETH0, &conf, &[("STRICT_ANSWER", "done!")])).unwrap_err();
    assert!(error["code"] == 6 && error["msg"].as_str().unwrap().contains("\"done!\""), "{error}");
    host.assert_nothing_is_left();
}

#[test]
fn a_second_add_fails_and_undoes_nothing() {
    let host = Host::new();
    host.call("ADD", ETH0, &more()).unwrap();
    let error = host.call("ADD", ETH0, &json!({})).unwrap_err();
    assert_eq!(error["msg"], "strict: c1:eth0 exists already");
    assert_eq!(host.attached(), ["c1:eth0"]);
    host.called();
    host.call("DEL", ETH0, &json!({})).unwrap();
    assert_eq!(host.called()[0].conf, DELEGATE, "the config of the first ADD");

    // The Go plugin has made the ADD.
    fs::create_dir_all(host.path("attached")).unwrap();
    fs::write(host.path("attached/c1:eth0"), "").unwrap();
    fs::write(host.path("state/c1"), DELEGATE).unwrap();
    host.call("ADD", ETH0, &json!({})).unwrap_err();
    assert_eq!((host.attached(), host.state()), (vec!["c1:eth0".into()], vec!["c1".into()]));
}

#[test]
fn a_container_of_the_go_plugin_is_checked_and_disconnected() {
    let host = Host::new();
    host.add(ETH0);
    host.called();
    fs::remove_dir_all(host.path("state")).unwrap();
    host.create_state();
    fs::write(host.path("state/c1"), DELEGATE).unwrap();
    host.call("CHECK", ETH0, &json!({ "prevResult": {} })).unwrap();
    host.fail("DEL", 11, "busy");
    host.call("DEL", ETH0, &json!({})).unwrap_err();
    assert_eq!(host.state(), ["c1"]);
    host.repair("DEL");
    host.called();
    host.call("DEL", ETH0, &json!({})).unwrap();
    host.assert_nothing_is_left();
    assert_eq!(host.called()[0].conf, DELEGATE);
}

/// The Go plugin's file does not name the interface. A DEL of another network must not remove it.
#[test]
fn del_of_another_network_leaves_the_go_plugins_state() {
    let host = Host::new();
    host.create_state();
    fs::write(host.path("state/c1"), DELEGATE).unwrap();
    let other = json!({ "name": "other" });
    // First after an ADD that failed before it saved, then after one that succeeded.
    host.call("DEL", NET1, &other).unwrap();
    host.call("ADD", NET1, &other).unwrap();
    host.call("DEL", NET1, &other).unwrap();
    host.called();
    host.call("DEL", NET1, &other).unwrap();
    assert_eq!((host.called(), host.state()), (vec![], vec!["c1".into()]));
    let error = host.call("CHECK", NET1, &other).unwrap_err();
    assert_eq!(error["code"], 3, "{error}");
    host.call("DEL", ETH0, &json!({})).unwrap();
    assert_eq!((host.called()[0].conf.as_str(), host.state()), (DELEGATE, vec![]));
}

#[test]
fn check_calls_the_delegate_in_the_configs_version() {
    let host = Host::new();
    let old = host.conf(&json!({ "cniVersion": "0.3.1" })).to_string();
    answer(&host.output("ADD", ETH0, &old, &[("STRICT_VERSION", "0.3.1")])).unwrap();
    host.called();
    let result =
        json!({ "prevResult": { "cniVersion": "1.1.0", "ips": [{ "address": "10.1.5.2/24" }] } });
    assert_eq!(host.call("CHECK", ETH0, &result), Ok(Value::Null));
    let conf: Value = serde_json::from_str(&host.called()[0].conf).unwrap();
    assert_eq!(conf["prevResult"], result["prevResult"]);
    assert_eq!(conf["cniVersion"], "1.1.0");
    host.fail("CHECK", 123, "the address is gone");
    assert_eq!(host.call("CHECK", ETH0, &result).unwrap_err()["code"], 123);
    let error = host.call("CHECK", NET1, &result).unwrap_err();
    assert!(error["code"] == 3 && error["msg"].as_str().unwrap().contains("net1"), "{error}");
}

#[test]
fn status_reports_the_errors_that_add_would_return() {
    let host = Host::new();
    let status = |more: &Value| host.call("STATUS", ("", ""), more);
    assert_eq!(status(&more()), Ok(Value::Null));
    assert_eq!(host.called()[0].conf, DELEGATE);
    host.fail("STATUS", 51, "no addresses left");
    assert_eq!(status(&json!({})).unwrap_err()["code"], 51);
    host.repair("STATUS");
    let error = status(&json!({ "delegate": { "type": "absent" } })).unwrap_err();
    assert!(error["code"] == 50 && error["msg"].as_str().unwrap().contains("absent"), "{error}");
    // A plugin that knows STATUS is not asked for its versions.
    assert!(!host.path("asked-version").exists());
    // The bridge before 1.5, and before 1.2.
    host.fail("STATUS", 4, "unknown CNI_COMMAND: STATUS");
    assert_eq!(status(&json!({})), Ok(Value::Null));
    let whole = host.conf(&json!({})).to_string();
    let old = [("STRICT_VERSIONS", r#""0.4.0","1.0.0""#)];
    let error = answer(&host.output("STATUS", ("", ""), &whole, &old)).unwrap_err();
    let bridge = host.path("bin/bridge").display().to_string();
    let msg = error["msg"].as_str().unwrap();
    for says in ["\"bridge\"", &bridge, "cniVersion \"1.1.0\"", "only 0.4.0, 1.0.0"] {
        assert!(error["code"] == 50 && msg.contains(says), "{error}");
    }
    // The plugin for addresses gets the same config.
    let ipam = host.path("bin/host-local");
    write_script(&ipam, "#!/bin/sh\necho '{\"supportedVersions\":[\"0.3.1\"]}'\n");
    let error = status(&json!({})).unwrap_err();
    let msg = error["msg"].as_str().unwrap();
    assert!(error["code"] == 50 && msg.contains("\"host-local\"") && msg.contains("only 0.3.1"));
    fs::remove_file(ipam).unwrap();
    fs::remove_file(host.path("subnet.env")).unwrap();
    let error = status(&json!({})).unwrap_err();
    assert!(
        error["code"] == 50 && error["msg"].as_str().unwrap().contains("subnet.env"),
        "{error}"
    );
}

#[test]
fn gc_undoes_invalid_attachments_and_calls_the_delegate() {
    let host = Host::new();
    for of in [ETH0, NET1, ("c2", "eth0"), ("c3", "eth0")] {
        host.add(of);
    }
    // The strict delegate knows only one network.
    host.call("ADD", ("c4", "eth0"), &json!({ "name": "other" })).unwrap();
    fs::remove_file(host.path("attached/c4:eth0")).unwrap();
    fs::write(host.path("state/go-stale"), DELEGATE).unwrap();
    fs::write(host.path("state/go-valid"), DELEGATE).unwrap();
    fs::write(host.path("state/go-other"), DELEGATE.replace("cbr0", "other")).unwrap();
    let valid = json!([
        { "containerID": "c1", "ifname": "eth0" },
        { "containerID": "go-valid", "ifname": "eth0" },
    ]);
    let gc = |more: &Value| {
        let attach = Attach::new("", "", Path::new(""));
        let conf = host.conf(more).to_string();
        answer(&call(
            &flannel(),
            "GC",
            &attach,
            host.path("bin").to_str().unwrap(),
            &conf,
            None,
            &[],
        ))
    };
    host.called();
    assert_eq!(gc(&json!({ "cni.dev/valid-attachments": valid })), Ok(Value::Null));
    let mut called = host.called();
    let passed: Value = serde_json::from_str(&called.pop().unwrap().conf).unwrap();
    assert_eq!(passed["cni.dev/valid-attachments"], valid);
    let mut undone: Vec<String> =
        called.into_iter().map(|called| format!("{} {}", called.command, called.of)).collect();
    undone.sort();
    assert_eq!(undone, ["DEL c1|net1||", "DEL c2|eth0||", "DEL c3|eth0||", "DEL go-stale|eth0||"]);
    assert_eq!(host.attached(), ["c1:eth0"]);
    assert_eq!(host.state(), ["c1", "c1:eth0", "c4", "c4:eth0", "go-other", "go-valid"]);

    // GC continues after errors, and reports all.
    host.add(("c5", "eth0"));
    host.add(("c6", "eth0"));
    host.fail("DEL", 999, "stuck");
    host.fail("GC", 999, "no gc");
    fs::write(host.path("state/go-stale"), DELEGATE).unwrap();
    host.called();
    let error = gc(&json!({ "cni.dev/valid-attachments": valid })).unwrap_err();
    assert_eq!(error["msg"], "stuck");
    assert_eq!(error["details"], "stuck; stuck; no gc");
    assert_eq!(host.called().len(), 4);
    for kept in ["c5:eth0", "go-stale"] {
        assert!(host.state().contains(&kept.to_owned()), "{kept}");
    }
    host.repair("DEL");
    host.repair("GC");
    assert_eq!(gc(&json!({})).unwrap_err()["code"], 7, "a missing list is not an empty one");
    assert_eq!(host.attached(), ["c1:eth0", "c5:eth0", "c6:eth0"]);
    gc(&json!({ "cni.dev/valid-attachments": valid })).unwrap();
    assert_eq!(host.attached(), ["c1:eth0"]);

    // A damaged file is undone, and stays, because it may be of another network.
    host.add(("c7", "eth0"));
    fs::write(host.path("state/c7:eth0"), "").unwrap();
    // The delegate is too old for GC.
    host.fail("GC", 4, "unknown CNI_COMMAND: GC");
    gc(&json!({ "cni.dev/valid-attachments": valid })).unwrap();
    assert_eq!(host.attached(), ["c1:eth0"]);
    assert!(host.state().contains(&"c7:eth0".to_owned()));
}

/// A delegate without GC succeeds. `host-local` knows the names of the interfaces.
#[test]
fn gc_undoes_attachments_of_the_go_plugin_if_the_delegate_has_no_gc() {
    gc_undoes_attachments_of_the_go_plugin(&["eth0"], &[]);
    let reserved = [
        ("10.1.5.2", "go-stale\r\nnet1"),
        ("10.1.5.3", "another\r\nnet2"),
        ("10.1.5.4", "go-stale\r\nnet3"),
        ("fd00:1:0:5::4", "go-stale\r\nnet3"),
        ("last_reserved_ip.0", "10.1.5.4"),
    ];
    gc_undoes_attachments_of_the_go_plugin(&["net1", "net3"], &reserved);
}

fn gc_undoes_attachments_of_the_go_plugin(names: &[&str], reserved: &[(&str, &str)]) {
    let host = Host::new();
    host.create_state();
    for dir in ["attached", "networks/cbr0"] {
        fs::create_dir_all(host.path(dir)).unwrap();
    }
    for (address, text) in reserved {
        fs::write(host.path("networks/cbr0").join(address), text).unwrap();
    }
    let networks = format!(r#""ipam":{{"dataDir":{:?},"#, host.path("networks"));
    let saved = DELEGATE.replace(r#""ipam":{"#, &networks);
    assert_ne!(saved, DELEGATE);
    fs::write(host.path("state/go-stale"), saved).unwrap();
    let attached: Vec<String> = names.iter().map(|name| format!("go-stale:{name}")).collect();
    attached.iter().for_each(|name| fs::write(host.path("attached").join(name), "").unwrap());
    let gc = || {
        let conf = host.conf(&json!({ "cni.dev/valid-attachments": [] })).to_string();
        let attach = Attach::new("", "", Path::new(""));
        let path = host.path("bin");
        let env = [("STRICT_GC", "nothing")];
        answer(&call(&flannel(), "GC", &attach, path.to_str().unwrap(), &conf, None, &env))
    };
    host.fail("DEL", 999, "stuck");
    assert_eq!(gc().unwrap_err()["msg"], "stuck");
    assert_eq!((host.attached(), host.state()), (attached, vec!["go-stale".into()]));
    host.repair("DEL");
    assert_eq!(gc(), Ok(Value::Null));
    host.assert_nothing_is_left();
}

#[test]
fn bad_input_gets_an_error_object_and_changes_nothing() {
    let host = Host::new();
    let whole = host.conf(&json!({})).to_string();
    let long = "c".repeat(300);
    let huge = " ".repeat(5 << 20);
    for (command, of, conf, code, says) in [
        ("ADD", ETH0, &*huge, 6, "the network config has more than 4194304 bytes"),
        ("ADD", (&*long, "eth0"), &whole, 5, "File name too long"),
        ("ADD", ETH0, "", 6, "one JSON object"),
        ("ADD", ETH0, &whole[..whole.len() - 1], 6, "one JSON object"),
        ("ADD", ETH0, r#"{"cniVersion":"1.1.0"}"#, 7, "missing network name"),
        ("ADD", ("", "eth0"), &whole, 4, "CNI_CONTAINERID"),
        ("ADD", ("../c1", "eth0"), &whole, 4, "CNI_CONTAINERID"),
        ("ADD", ("c1", "eth0/x"), &whole, 4, "CNI_IFNAME"),
        ("REMOVE", ETH0, &whole, 4, "unknown CNI_COMMAND: REMOVE"),
        (
            "ADD",
            ETH0,
            &host.conf(&json!({ "delegate": { "type": "absent" } })).to_string(),
            7,
            "\"absent\" in path",
        ),
        ("ADD", ETH0, &host.conf(&json!({ "delegate": { "ipam": {} } })).to_string(), 7, "'ipam'"),
        (
            "ADD",
            ETH0,
            &host.conf(&json!({ "subnetFile": "/nonexistent/subnet.env" })).to_string(),
            11,
            "/nonexistent/subnet.env",
        ),
        (
            "ADD",
            ETH0,
            &host.conf(&json!({ "dataDir": "/proc/nonexistent" })).to_string(),
            5,
            "/proc/nonexistent/c1:eth0",
        ),
    ] {
        let error = answer(&host.output(command, of, conf, &[])).unwrap_err();
        assert!(error["code"] == code && error["msg"].as_str().unwrap().contains(says), "{error}");
        assert!(error["cniVersion"].is_string(), "{error}");
    }
    // For every command, with a state that only a valid config may touch.
    let saved = host.path("state/c1:eth0");
    host.create_state();
    fs::write(&saved, DELEGATE).unwrap();
    for command in ["ADD", "DEL", "CHECK", "STATUS", "GC"] {
        let unknown = whole.replace("1.1.0", "9.9.9");
        let wrong_path = whole.replace(r#""name""#, r#""dataDir":7,"name""#);
        let deep = "{\"a\":".repeat(100_000);
        for (conf, code, says) in [
            ("", 6, "one JSON object"),
            ("[]", 6, "one JSON object"),
            ("\u{fffd}", 6, "one JSON object"),
            (&whole[..whole.len() - 1], 6, "one JSON object"),
            (&*format!("{whole} {whole}"), 6, "one JSON object"),
            (&*unknown, 1, "incompatible CNI versions"),
            (r#"{"cniVersion":"1.1.0","type":"flannel"}"#, 7, "missing network name"),
            (r#"{"cniVersion":"1.1.0","type":"flannel","name":"a/b"}"#, 7, "network name"),
            (&*wrong_path, 7, "dataDir"),
            (&*deep, 6, "one JSON object"),
        ] {
            let error = answer(&host.output(command, ETH0, conf, &[])).unwrap_err();
            let message = format!("{} {}", error["msg"], error["details"]);
            assert!(error["code"] == code && message.contains(says), "{command} {conf}: {error}");
            assert!(error["cniVersion"].is_string(), "{command} {conf}: {error}");
        }
        assert_eq!(fs::read_to_string(&saved).unwrap(), DELEGATE, "{command}");
    }
    // A file that another user may have put there decides nothing.
    fs::set_permissions(host.path("state"), Permissions::from_mode(0o777)).unwrap();
    for command in ["ADD", "CHECK", "STATUS", "GC"] {
        let error = answer(&host.output(command, ETH0, &whole, &[])).unwrap_err();
        let msg = error["msg"].as_str().unwrap();
        assert!(error["code"] == 5 && msg.contains("its mode 0777"), "{command}: {error}");
    }
    assert_eq!(host.called(), []);
    // DEL uses the current config instead: a runtime would repeat a DEL that fails for ever.
    let output = host.output("DEL", ETH0, &whole, &[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("its mode 0777"), "{output:?}");
    assert_eq!(answer(&output), Ok(Value::Null));
    let called = host.called();
    assert_eq!((called.len(), called[0].command.as_str()), (1, "DEL"));
    assert_ne!(called[0].conf, DELEGATE);
    fs::rename(host.path("subnet.env"), host.path("env")).unwrap();
    assert_eq!(answer(&host.output("DEL", ETH0, &whole, &[])), Ok(Value::Null));
    fs::rename(host.path("env"), host.path("subnet.env")).unwrap();
    fs::rename(host.path("bin/bridge"), host.path("bridge")).unwrap();
    let output = host.output("DEL", ETH0, &whole, &[]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("ADD is not undone"), "{output:?}");
    assert_eq!(answer(&output), Ok(Value::Null));
    fs::rename(host.path("bridge"), host.path("bin/bridge")).unwrap();
    assert_eq!(fs::read_to_string(&saved).unwrap(), DELEGATE);
    fs::remove_dir_all(host.path("state")).unwrap();
    let own = Attach::new("c1", "eth0", Path::new("/proc/self/ns/net"));
    let output =
        call(&flannel(), "ADD", &own, host.path("bin").to_str().unwrap(), &whole, None, &[]);
    assert_eq!(answer(&output).unwrap_err()["code"], 8);
    assert_eq!((host.called(), host.state()), (vec![], vec![]));
}

#[test]
fn version_needs_no_input_and_a_manual_call_prints_the_versions() {
    let version = std::process::Command::new(flannel())
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .output()
        .unwrap();
    let version = answer(&version).unwrap();
    assert_eq!(version["cniVersion"], "1.1.0");
    assert_eq!(version["supportedVersions"].as_array().unwrap().len(), 7);
    let person = std::process::Command::new(flannel()).env_clear().output().unwrap();
    let message = String::from_utf8(person.stderr).unwrap();
    assert!(person.status.success() && person.stdout.is_empty());
    assert!(
        message.starts_with("CNI Plugin flannel version ")
            && message.ends_with("0.4.0, 1.0.0, 1.1.0\n"),
        "{message}"
    );
}

/// A crash leaves the new or the old state. The file is durable before its rename, and the rename
/// before the delegate runs.
#[test]
fn the_state_is_synced_before_the_delegate_runs() {
    let host = Host::new();
    let traced = host.path("traced");
    let trace = host.path("trace");
    let text = format!(
        "#!/bin/sh\nexec strace -f -y -qq -o {} -e trace=fsync,/^rename,execve {}\n",
        trace.display(),
        flannel().display()
    );
    write_script(&traced, &text);
    let attach = Attach::new("c1", "eth0", Path::new("/nonexistent/netns"));
    let path = host.path("bin");
    for time in ["first", "second"] {
        let conf = host.conf(&json!({})).to_string();
        let output = call(&traced, "ADD", &attach, path.to_str().unwrap(), &conf, None, &[]);
        answer(&output).unwrap_or_else(|error| panic!("{error} (strace is needed)"));
        let calls = fs::read_to_string(&trace).unwrap();
        let at = |what: &str, of: &Path| {
            let of = of.display().to_string();
            let found = calls.lines().position(|line| line.contains(what) && line.contains(&of));
            found.unwrap_or_else(|| panic!("{time} ADD: no {what} of {of}: {calls}"))
        };
        let state = host.path("state");
        // As after a reboot of the host.
        fs::remove_dir_all(host.path("attached")).unwrap();
        let order = [
            at("fsync(", &state.join(".c1:eth0")),
            at("rename", &state.join(".c1:eth0")),
            at("fsync(", Path::new(&format!("<{}>", state.display()))),
            at("execve(", &path.join("bridge")),
        ];
        assert!(order.is_sorted(), "{time} ADD: {calls}");
    }
}
