//! Runs the delegate. It gets the environment of this process with the `CNI_` variables of the
//! call. Its stderr is copied to this process's stderr.
//!
//! **Source**: cni `pkg/invoke: FindInPath, RawExec.ExecPlugin`.

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::{Command as Process, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::spec::call::{Call, Command};
use crate::spec::error::{Code, Error, Result};
use crate::spec::version::SpecVersion;

/// A plugin in one of the directories of `CNI_PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Delegate {
    kind: String,
    program: PathBuf,
}

impl Delegate {
    /// Finds the plugin `kind`.
    ///
    /// # Errors
    /// [`Code::NETWORK_CONFIG`]: no directory has it.
    pub(crate) fn find(kind: &str, call: &Call) -> Result<Self> {
        if kind.is_empty() || kind.contains('/') {
            return Err(Error::new(Code::NETWORK_CONFIG, format!("invalid plugin name: {kind:?}")));
        }
        let mut candidates = call.directories().map(|dir| dir.join(kind));
        let Some(program) = candidates.find(|program| program.is_file()) else {
            let msg = format!("failed to find plugin {kind:?} in path [{}]", call.path);
            return Err(Error::new(Code::NETWORK_CONFIG, msg));
        };
        Ok(Self { kind: kind.to_owned(), program })
    }

    /// Runs the plugin with `conf` on its stdin, and returns its stdout. If the plugin is too old
    /// to know STATUS or GC, as `bridge` before 1.5, the call succeeds and returns nothing.
    ///
    /// # Errors
    /// The plugin's own error. [`Code::IO`] if it cannot run, and [`Code::INTERNAL`] if it fails
    /// without an error object.
    pub(crate) fn run(&self, command: Command, call: &Call, conf: &[u8]) -> Result<Vec<u8>> {
        self.ask(command, call, conf).map(Option::unwrap_or_default)
    }

    /// Like [`Self::run`], but returns `None` if the plugin is too old to know STATUS or GC.
    ///
    /// # Errors
    /// Those of [`Self::run`].
    pub(crate) fn ask(
        &self,
        command: Command,
        call: &Call,
        conf: &[u8],
    ) -> Result<Option<Vec<u8>>> {
        let output = self.output(command, call, conf).map_err(|error| {
            Error::new(
                Code::IO,
                format!("failed to run plugin {}: {error}", self.program.display()),
            )
        })?;
        // A closed stderr is not an error of the call.
        let _ = io::stderr().write_all(&output.stderr);
        if output.status.success() {
            return Ok(Some(output.stdout));
        }
        match Error::from_json(&output.stdout) {
            Some(error) => {
                let is_optional = matches!(command, Command::Status | Command::Gc);
                if is_optional && error.msg.starts_with("unknown CNI_COMMAND") {
                    return Ok(None);
                }
                Err(error)
            }
            None => Err(self.failure(command, &output)),
        }
    }

    /// Checks that the plugin supports this version of the specification. A plugin that does not
    /// list its versions passes.
    ///
    /// # Errors
    /// [`Code::INCOMPATIBLE_VERSION`]: it lists other versions only.
    pub(crate) fn check_version(&self, call: &Call, version: &str) -> Result<()> {
        let conf = json!({ "cniVersion": SpecVersion::LATEST.as_str() }).to_string();
        let Ok(answer) = self.run(Command::Version, call, conf.as_bytes()) else { return Ok(()) };
        let answer: Value = serde_json::from_slice(&answer).unwrap_or_default();
        let Some(versions) = answer["supportedVersions"].as_array() else { return Ok(()) };
        let versions: Vec<&str> = versions.iter().filter_map(Value::as_str).collect();
        if versions.contains(&version) {
            return Ok(());
        }
        let program = self.program.display();
        let versions = versions.join(", ");
        let msg = format!(
            "plugin {:?} ({program}) does not support the cniVersion {version:?} of the network \
             config, but only {versions}: expected a newer plugin, or one of these versions",
            self.kind
        );
        Err(Error::new(Code::INCOMPATIBLE_VERSION, msg))
    }

    /// The error for a plugin that failed without an error object.
    fn failure(&self, command: Command, output: &Output) -> Error {
        let stdout = lossy(&output.stdout);
        let stderr = lossy(&output.stderr);
        let message = [stdout.trim(), stderr.trim()]
            .into_iter()
            .find(|text| !text.is_empty())
            .map_or_else(|| "no message".to_owned(), |text| format!("{text:?}"));
        let name = command.name();
        Error::new(
            Code::INTERNAL,
            format!("plugin {:?} failed at {name}: {message}: {}", self.kind, output.status),
        )
    }

    fn output(&self, command: Command, call: &Call, conf: &[u8]) -> io::Result<Output> {
        let mut process = Process::new(&self.program);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        process.env("CNI_COMMAND", command.name()).env("CNI_PATH", &call.path);
        process.env("CNI_CONTAINERID", &call.container).env("CNI_IFNAME", &call.ifname);
        process.env("CNI_NETNS", &call.netns);
        let mut child = spawn(&mut process)?;
        let mut stdin = child.stdin.take().expect("stdin is a pipe");
        std::thread::scope(|scope| {
            // On a thread, because a plugin may write before it has read everything, or not read.
            scope.spawn(move || stdin.write_all(conf));
            child.wait_with_output()
        })
    }
}

/// Starts the plugin. Waits up to five seconds while an installer writes the file.
fn spawn(process: &mut Process) -> io::Result<std::process::Child> {
    const PAUSE: Duration = Duration::from_millis(100);
    let mut tries = 0;
    loop {
        match process.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < 50 => {
                tries += 1;
            }
            done => return done,
        }
        #[expect(
            clippy::disallowed_methods,
            reason = "no event reports that a program file was closed"
        )]
        std::thread::sleep(PAUSE);
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    fn call(dir: &Path) -> Call {
        Call {
            command: Command::Del,
            container: "c1".into(),
            ifname: "eth0".into(),
            netns: String::new(),
            path: format!("/nonexistent:{}", dir.display()),
            netns_override: false,
        }
    }

    fn run(script: &str, conf: &[u8]) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let delegate = Delegate::find("plugin", &call(dir.path()))?;
        delegate.run(Command::Check, &call(dir.path()), conf).map(|out| lossy(&out))
    }

    #[test]
    fn a_delegate_gets_the_call_and_the_config() {
        let script =
            "echo $CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME [$CNI_NETNS] ${#CNI_PATH}; cat";
        let answer = run(script, b"conf").unwrap();
        assert!(answer.starts_with("CHECK c1 eth0 [] ") && answer.ends_with("\nconf"), "{answer}");
    }

    #[test]
    fn big_configs_and_answers_cause_no_deadlock() {
        let conf = vec![b'x'; 1 << 20];
        assert_eq!(
            run("head -c 1000000 /dev/zero | tr '\\0' y; wc -c", &conf).unwrap().len(),
            1_000_000 + 8
        );
        assert_eq!(run("exec 0<&-; echo done", &conf).unwrap(), "done\n");
    }

    #[test]
    fn the_delegates_errors_are_passed_on() {
        let error =
            run(r#"echo '{"code":11,"msg":"wait","details":"a bit"}'; exit 1"#, b"").unwrap_err();
        assert_eq!((error.code, error.to_string().as_str()), (Code(11), "wait; a bit"));
        for (script, says) in [
            (
                "echo gone wrong; exit 3",
                r#"plugin "plugin" failed at CHECK: "gone wrong": exit status: 3"#,
            ),
            ("echo on stderr >&2; exit 1", r#""on stderr": exit status: 1"#),
            ("exit 1", "no message: exit status: 1"),
            ("kill -9 $$", "no message: signal: 9"),
        ] {
            let error = run(script, b"").unwrap_err();
            assert!(error.code == Code::INTERNAL && error.msg.contains(says), "{script}: {error}");
        }
    }

    #[test]
    fn a_plugin_that_is_missing_or_cannot_run_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for kind in ["", "a/b", "../x"] {
            assert!(
                Delegate::find(kind, &call(dir.path()))
                    .unwrap_err()
                    .msg
                    .contains("invalid plugin name")
            );
        }
        fs::create_dir(dir.path().join("a-directory")).unwrap();
        for kind in ["absent", "a-directory"] {
            let error = Delegate::find(kind, &call(dir.path())).unwrap_err();
            assert!(error.code == Code::NETWORK_CONFIG && error.msg.contains(kind), "{error}");
        }
        let path = dir.path().join("no-program");
        fs::write(&path, "").unwrap();
        let delegate = Delegate::find("no-program", &call(dir.path())).unwrap();
        let error = delegate.run(Command::Del, &call(dir.path()), b"").unwrap_err();
        assert!(error.code == Code::IO && error.msg.contains(path.to_str().unwrap()), "{error}");
    }

    #[test]
    fn starting_a_plugin_waits_while_it_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plugin");
        let file = fs::File::create(&path).unwrap();
        (&file).write_all(b"#!/bin/sh\necho ready\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let mut process = Process::new(&path);
        assert_eq!(process.spawn().unwrap_err().kind(), io::ErrorKind::ExecutableFileBusy);
        let writer = std::thread::spawn(move || {
            std::thread::park_timeout(Duration::from_millis(50));
            drop(file);
        });
        let delegate = Delegate::find("plugin", &call(dir.path())).unwrap();
        assert_eq!(delegate.run(Command::Add, &call(dir.path()), b"").unwrap(), b"ready\n");
        writer.join().unwrap();
    }
}
