//! A node on which containers of a manifest run: directories that stand for the host's, and a network namespace.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use flannel_lab::Namespace;
use serde_json::Value;
use tempfile::TempDir;

/// A node that runs one pod.
pub(crate) struct Node {
    pub(crate) net: Namespace,
    image: PathBuf,
    pod: Value,
    dir: TempDir,
}

impl Node {
    /// A node for the pod of `set`, with the image's files in `image` and the config maps' in `config`.
    pub(crate) fn new(set: &Value, config: &Value, image: &Path) -> Self {
        let net = Namespace::new("node").unwrap();
        net.ip(
            "link set lo up\nlink add uplink type bridge\nlink set uplink up\naddr add 192.0.2.1/24 dev uplink\n\
             route add default via 192.0.2.254 dev uplink\n",
        )
        .unwrap();
        net.sysctl("net/ipv4/ip_forward", "1").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let node = Self { net, image: image.to_owned(), pod: set["spec"]["template"]["spec"].clone(), dir };
        let map = node.dir.path().join("config-map");
        fs::create_dir(&map).unwrap();
        for (name, text) in config["data"].as_object().unwrap() {
            fs::write(map.join(name), text.as_str().unwrap()).unwrap();
        }
        for volume in node.pod["volumes"].as_array().unwrap() {
            let Some(path) = volume["hostPath"]["path"].as_str() else { continue };
            let path = node.host(path);
            match volume["hostPath"]["type"].as_str().unwrap() {
                "DirectoryOrCreate" => fs::create_dir_all(path).unwrap(),
                "FileOrCreate" => {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(path, "").unwrap();
                }
                other => panic!("hostPath of type {other}"),
            }
        }
        node
    }

    /// Where a path of the host is.
    pub(crate) fn host(&self, path: &str) -> PathBuf {
        self.dir.path().join("host").join(path.trim_start_matches('/'))
    }

    /// The command that runs a container; `args` changes what it is told.
    pub(crate) fn container(&self, name: &str, args: impl FnOnce(Vec<String>) -> Vec<String>) -> Command {
        let all = ["initContainers", "containers"].map(|kind| self.pod[kind].as_array().unwrap());
        let container = all.into_iter().flatten().find(|container| container["name"] == name).unwrap();
        let texts = |value: &Value| -> Vec<String> {
            value.as_array().into_iter().flatten().map(|text| text.as_str().unwrap().to_owned()).collect()
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
        let capabilities = texts(&container["securityContext"]["capabilities"]["add"]);
        let mut command = self.inside(name, &capabilities, &mounts);
        command.args(texts(&container["command"])).args(args(texts(&container["args"])));
        command
    }

    /// A command in a root directory called `name`, to be completed with what it runs.
    pub(crate) fn inside(
        &self,
        name: &str,
        capabilities: &[String],
        mounts: &[(PathBuf, String)],
    ) -> Command {
        let root = self.dir.path().join(format!("root-{name}"));
        fs::create_dir(&root).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--", "sh", "-c", include_str!("container.sh"), "container"]);
        command.args([&root, &self.image]).arg(capabilities.join(" "));
        command.args(mounts.iter().map(|(source, target)| format!("{}:{target}", source.display())));
        command.arg("--");
        command
    }
}
