//! The calls of a container runtime: environment, stdin, and parsing of the answer.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use flannel_lab::Namespace;
use serde_json::Value;

/// The plugin under test. `FLANNEL_CNI` is the path of a copy for users who cannot read the build
/// directory.
pub(crate) fn flannel() -> PathBuf {
    std::env::var_os("FLANNEL_CNI").unwrap_or_else(|| env!("CARGO_BIN_EXE_flannel").into()).into()
}

/// The program that installs files. `INSTALL_CONF` is the path of a copy.
pub(crate) fn install_conf() -> PathBuf {
    std::env::var_os("INSTALL_CONF")
        .unwrap_or_else(|| env!("CARGO_BIN_EXE_install-conf").into())
        .into()
}

/// An interface of a container.
#[derive(Debug, Clone)]
pub(crate) struct Attach {
    pub(crate) container: String,
    pub(crate) ifname: String,
    pub(crate) netns: String,
}

impl Attach {
    pub(crate) fn new(container: &str, ifname: &str, netns: &Path) -> Self {
        Self {
            container: container.into(),
            ifname: ifname.into(),
            netns: netns.display().to_string(),
        }
    }
}

/// The result of a plugin: its stdout as JSON (`Null` if empty).
pub(crate) type Answer = Result<Value, Value>;

/// Calls `program`, in `host` if it is given.
pub(crate) fn call(
    program: &Path,
    command: &str,
    attach: &Attach,
    path: &str,
    conf: &str,
    host: Option<&Namespace>,
    more: &[(&str, &str)],
) -> Output {
    let mut process = Command::new(program);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    process
        .env("CNI_COMMAND", command)
        .env("CNI_PATH", path)
        .env("CNI_CONTAINERID", &attach.container);
    process.env("CNI_IFNAME", &attach.ifname).env("CNI_NETNS", &attach.netns);
    process.envs(more.iter().copied());
    let spawned = match host {
        Some(host) => host.spawn(&mut process).map_err(|e| e.to_string()),
        None => process.spawn().map_err(|e| e.to_string()),
    };
    let mut child = spawned.unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    // A plugin that ends before it has read everything reports the error on stdout.
    let _ = child.stdin.take().unwrap().write_all(conf.as_bytes());
    child.wait_with_output().unwrap()
}

/// The parsed answer: JSON or nothing.
pub(crate) fn answer(output: &Output) -> Answer {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let value = match text.trim() {
        "" => Value::Null,
        text => serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}")),
    };
    if output.status.success() {
        return Ok(value);
    }
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(value["code"].is_u64() && value["msg"].is_string(), "no error object: {text}");
    Err(value)
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
