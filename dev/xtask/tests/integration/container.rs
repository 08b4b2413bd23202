//! A node that runs containers of a manifest: directories instead of the host's, and a network
//! namespace.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use flannel_lab::Namespace;
use serde_json::Value;
use tempfile::TempDir;

use crate::objects::file;

/// The image's files, unoptimized. `FLANNEL_IMAGE` is a directory with them for users who cannot
/// build them.
pub(crate) fn image() -> &'static Path {
    static IMAGE: OnceLock<(PathBuf, Option<TempDir>)> = OnceLock::new();
    let build = || {
        if let Some(dir) = std::env::var_os("FLANNEL_IMAGE") {
            return (dir.into(), None);
        }
        let dir = tempfile::tempdir().unwrap();
        let mut script = Command::new(file("build-image-root.sh"));
        script.arg(dir.path()).envs([
            ("PROFILE", "dev"),
            // As in `test.sh`, where they are built already.
            ("CRATES", "--workspace --all-features"),
            ("FLANNEL_COMMIT", "of-a-test"),
        ]);
        let output = script.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (dir.path().to_owned(), Some(dir))
    };
    &IMAGE.get_or_init(build).0
}

/// The output of a command, which must succeed.
pub(crate) fn output_of(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let [stdout, stderr] = [stdout, stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(status.success(), "{command:?}: {status}: {stdout}{stderr}");
    stdout + &stderr
}

/// The name of a pod's node.
pub(crate) const NODE_NAME: &str = "node-1";

/// The API server's address and the service account, which a kubelet gives every pod.
pub(crate) struct Api {
    /// On the loopback interface.
    pub(crate) port: u16,
    /// `token`, `ca.crt` and `namespace`.
    pub(crate) account: PathBuf,
}

/// A node that runs one pod.
pub(crate) struct Node {
    pub(crate) net: Namespace,
    pub(crate) api: Option<Api>,
    pod: Value,
    dir: TempDir,
}

impl Node {
    /// A node for the pod of `set`, with the config maps' files in `config`.
    pub(crate) fn new(set: &Value, config: &Value) -> Self {
        let net = Namespace::new("node").unwrap();
        net.ip("link set lo up\n\
             link add uplink type bridge\n\
             link set uplink up\n\
             addr add 192.0.2.1/24 dev uplink\n\
             addr add 2001:db8::1/64 dev uplink nodad\n\
             route add default via 192.0.2.254 dev uplink\n\
             route add ::/0 via 2001:db8::fe dev uplink\n")
            .unwrap();
        net.sysctl("net/ipv4/ip_forward", "1").unwrap();
        net.sysctl("net/ipv6/conf/all/forwarding", "1").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let map = dir.path().join("config-map");
        fs::create_dir(&map).unwrap();
        for (name, text) in config["data"].as_object().unwrap() {
            fs::write(map.join(name), text.as_str().unwrap()).unwrap();
        }
        let mut node = Self { net, api: None, pod: Value::Null, dir };
        node.take(set);
        node
    }

    /// Replaces the pod by the pod of `set`, and creates missing directories of the host.
    pub(crate) fn take(&mut self, set: &Value) {
        self.pod = set["spec"]["template"]["spec"].clone();
        for volume in self.pod["volumes"].as_array().unwrap() {
            let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
            let of_machine = PathBuf::from(path);
            let path = self.host(path);
            match volume["hostPath"]["type"].as_str().unwrap() {
                "DirectoryOrCreate" => fs::create_dir_all(path).unwrap(),
                "FileOrCreate" => {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
                }
                "CharDevice" => {
                    let kind = fs::metadata(&of_machine).unwrap().file_type();
                    assert!(kind.is_char_device(), "{}", of_machine.display());
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    std::os::unix::fs::symlink(of_machine, path).unwrap();
                }
                other => panic!("hostPath of type {other}"),
            }
        }
    }

    /// The location of a path of the host.
    pub(crate) fn host(&self, path: &str) -> PathBuf {
        self.dir.path().join("host").join(path.trim_start_matches('/'))
    }

    /// The command that runs a container.
    pub(crate) fn container(&self, name: &str) -> Command {
        let all = ["initContainers", "containers"].map(|kind| self.pod[kind].as_array().unwrap());
        let container =
            all.into_iter().flatten().find(|container| container["name"] == name).unwrap();
        let texts = |value: &Value| -> Vec<String> {
            value
                .as_array()
                .into_iter()
                .flatten()
                .map(|text| text.as_str().unwrap().to_owned())
                .collect()
        };
        let mut mounts = Vec::new();
        for mount in container["volumeMounts"].as_array().unwrap() {
            let volumes = self.pod["volumes"].as_array().unwrap();
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).unwrap();
            let source = match volume["hostPath"]["path"].as_str() {
                Some(path) => self.host(path),
                None => self.dir.path().join("config-map"),
            };
            mounts.push((source, mount["mountPath"].as_str().unwrap().to_owned()));
        }
        let mut env = Vec::new();
        for variable in container["env"].as_array().into_iter().flatten() {
            let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
                Some("spec.nodeName") => NODE_NAME,
                Some(other) => panic!("fieldPath {other}"),
                None => variable["value"].as_str().unwrap(),
            };
            env.push(format!("{}={value}", variable["name"].as_str().unwrap()));
        }
        if let Some(api) = &self.api {
            mounts.push((
                api.account.clone(),
                "/var/run/secrets/kubernetes.io/serviceaccount".to_owned(),
            ));
            env.extend([
                "KUBERNETES_SERVICE_HOST=127.0.0.1".to_owned(),
                format!("KUBERNETES_SERVICE_PORT={}", api.port),
            ]);
        }
        let capabilities = texts(&container["securityContext"]["capabilities"]["add"]);
        let mut command = self.inside(name, &capabilities, &mounts);
        command
            .arg("env")
            .args(env)
            .args(texts(&container["command"]))
            .args(texts(&container["args"]));
        command
    }

    /// A command in a root directory called `name`, without the program.
    pub(crate) fn inside(
        &self,
        name: &str,
        capabilities: &[String],
        mounts: &[(PathBuf, String)],
    ) -> Command {
        let root = self.dir.path().join(format!("root-{name}"));
        // A container that starts again mounts its root file system there again.
        fs::create_dir_all(&root).unwrap();
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--",
            "sh",
            "-c",
            include_str!("container/container.sh"),
            "container",
        ]);
        command.arg(&root).arg(image()).arg(capabilities.join(" "));
        command
            .args(mounts.iter().map(|(source, target)| format!("{}:{target}", source.display())));
        command.arg("--");
        command
    }
}
