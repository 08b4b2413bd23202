//! Credential plugins: programs that print the credentials of a kubeconfig's user.
//!
//! **Source**: client-go `plugin/pkg/client/auth/exec`; `client.authentication.k8s.io/v1`.

use std::ffi::OsStr;
use std::io;
use std::process::{Output, Stdio};
use std::time::{Duration, SystemTime};

use flannel_core::text::{MAX_REASON_CHARS, shorten};
use flannel_tls::Pem;
use http::HeaderValue;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::config::{ExecConfig, ExecInteractiveMode};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::connection::bearer;
use super::tls::Client;

/// The time limit of a plugin. One that waits for a user would wait for ever.
const PATIENCE: Duration = Duration::from_secs(60);
/// The versions of the protocol. Both have the same fields.
const VERSIONS: [&str; 2] =
    ["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"];

/// The credentials that a plugin printed. They are not shown.
pub(crate) struct Credentials {
    /// The value of the header `Authorization`.
    pub(super) authorization: Option<HeaderValue>,
    pub(super) client: Option<Client>,
    /// `None` if they are valid until the server refuses them.
    pub(super) expires: Option<SystemTime>,
}

impl Credentials {
    pub(super) fn have_expired(&self) -> bool {
        self.expires.is_some_and(|expires| expires <= SystemTime::now())
    }
}

/// Runs a plugin.
///
/// # Errors
/// Its configuration is wrong, it fails, or it prints no credentials. The error does not show what
/// it prints.
pub(super) async fn credentials(exec: &ExecConfig) -> Result<Credentials, String> {
    let version = exec.api_version.as_deref().unwrap_or_default();
    if !VERSIONS.contains(&version) {
        return Err(format!("its apiVersion is {version:?}, expected {:?}", VERSIONS[0]));
    }
    if exec.interactive_mode == Some(ExecInteractiveMode::Always) {
        return Err("its interactiveMode is \"Always\", but nobody can answer it: expected \
                    \"Never\" or \"IfAvailable\""
            .to_owned());
    }
    let Some(program) = exec.command.as_deref().filter(|program| !program.is_empty()) else {
        return Err("its command is missing".to_owned());
    };
    let info = json!({
        "kind": "ExecCredential",
        "apiVersion": version,
        "spec": { "interactive": false, "cluster": exec.cluster },
    });
    let failed = |error: io::Error| {
        let hint = exec.install_hint.as_deref().filter(|_| error.kind() == io::ErrorKind::NotFound);
        let hint = hint.map(|hint| format!(": {}", shorten(hint.trim(), MAX_REASON_CHARS)));
        let hint = hint.unwrap_or_default();
        format!("{program}: {error}{hint}")
    };
    let output = timeout(PATIENCE, output(command(exec, program, &info)))
        .await
        .map_err(|_| format!("{program} has not ended after {} s", PATIENCE.as_secs()))?
        .map_err(failed)?;
    parse(&output, version).map_err(|error| format!("{program} {error}"))
}

/// The output of a command. If the future is dropped, the processes that the command has started
/// end too.
async fn output(mut command: Command) -> io::Result<Output> {
    let child = command.spawn()?;
    let leader = child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw);
    let waiting = std::pin::pin!(child.wait_with_output());
    // It is dropped before the child, whose process id is not used again until then.
    let mut group = Group(leader);
    let output = waiting.await;
    group.0 = None;
    output
}

/// A process group, which is killed when this is dropped.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            // It fails only if the group has ended.
            let _ = killpg(leader, Signal::SIGKILL);
        }
    }
}

fn command(exec: &ExecConfig, program: &str, info: &Value) -> Command {
    let names: Vec<String> = std::env::vars_os()
        .filter_map(|(name, _)| name.into_string().ok())
        .filter(|name| is_for_plugins(name))
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut command = Command::from(flannel_core::process::command(program, &names));
    command.args(exec.args.iter().flatten());
    for variable in exec.env.iter().flatten() {
        if let (Some(name), Some(value)) = (variable.get("name"), variable.get("value")) {
            command.env(name, value);
        }
    }
    command
        .env("KUBERNETES_EXEC_INFO", OsStr::new(&info.to_string()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Its messages may have secrets.
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true);
    command
}

/// Whether plugins get a variable of this process. They do not get its own options, among which
/// are the secrets of stores, and the sockets that systemd gives to it.
fn is_for_plugins(name: &str) -> bool {
    let own = ["FLANNEL", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY"];
    !own.iter().any(|own| name.starts_with(own))
}

fn parse(output: &Output, version: &str) -> Result<Credentials, String> {
    if !output.status.success() {
        return Err(format!(
            "fails ({}); its messages are not shown, because they may have credentials: run it by \
             hand to see them",
            output.status
        ));
    }
    // An error of serde would show a part of the text.
    let answer: Value = serde_json::from_slice(&output.stdout)
        .map_err(|_| "does not print an ExecCredential in JSON".to_owned())?;
    let printed = answer["apiVersion"].as_str().unwrap_or_default();
    if answer["kind"] != "ExecCredential" || printed != version {
        return Err(format!("prints no ExecCredential of the apiVersion {version:?}"));
    }
    let status = &answer["status"];
    let text = |field: &str| status[field].as_str().filter(|text| !text.is_empty());
    let authorization = text("token")
        .map(bearer)
        .transpose()
        .map_err(|error| format!("prints a token that cannot be used: {error}"))?;
    let pem = |field: &str| {
        let name = format!("{field} of the plugin");
        text(field).map(|text| Pem { name, text: text.as_bytes().to_vec() })
    };
    let client = match (pem("clientCertificateData"), pem("clientKeyData")) {
        (Some(certificate), Some(key)) => {
            Some(Client::of(&certificate, &key).map_err(|error| format!("fails: {error}"))?)
        }
        (None, None) => None,
        _ => {
            return Err(
                "prints only one of clientCertificateData and clientKeyData: expected both"
                    .to_owned(),
            );
        }
    };
    if authorization.is_none() && client.is_none() {
        return Err("prints neither a token nor a client certificate".to_owned());
    }
    let expires = match text("expirationTimestamp") {
        Some(text) => Some(
            serde_json::from_value::<Time>(text.into())
                .map_err(|_| "prints an expirationTimestamp that is not RFC 3339".to_owned())?
                .0
                .into(),
        ),
        None => None,
    };
    Ok(Credentials { authorization, client, expires })
}
