//! A pair of nodes of Go flannel, with an etcd.

use std::net::IpAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, ensure};
use flannel_core::address::Family;
use flannel_lab::{Interrupter, Lab};

use super::{PATIENCE, Pair, pause};
use crate::parts::etcd::PREFIX;

const CONFIG: &str = r#"{"Network":"10.244.0.0/16","Backend":{"Type":"udp"}}"#;

/// The processes of the pair, which end with it.
pub(super) struct Processes(Vec<Child>);

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Pair {
    /// A pair with `program`, a flanneld of Go that was built with cgo.
    pub(super) fn of_go(program: &Path, interrupter: &Interrupter) -> anyhow::Result<Self> {
        let lab = Lab::builder().families([Family::V4]).backend("udp").hosts(2);
        let lab = lab.interrupter(interrupter.clone()).start()?;
        let hosts = lab.hosts();
        let Some(IpAddr::V4(address)) = hosts[0].addresses().v4 else {
            anyhow::bail!("a host without an address")
        };
        let mut processes = Processes(Vec::new());
        let mut spawn = |n: usize, command: &mut Command| -> anyhow::Result<()> {
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let child = hosts[n].namespace().spawn(command);
            processes.0.push(child.with_context(|| format!("{command:?}"))?);
            Ok(())
        };
        let url = format!("http://{address}:2379");
        let tool = |variable: &str, default: &str| {
            std::env::var_os(variable).unwrap_or_else(|| default.into())
        };
        let mut command = Command::new(tool("ETCD", "etcd"));
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        spawn(0, command.arg("--data-dir").arg(hosts[0].dir().join("etcd")))?;
        let begin = Instant::now();
        loop {
            let mut command = Command::new(tool("ETCDCTL", "etcdctl"));
            command.env("ETCDCTL_API", "3").args(["--endpoints", &url, "put"]);
            command.arg(format!("{PREFIX}/config")).arg(CONFIG);
            if hosts[0].namespace().output(&mut command)?.status.success() {
                break;
            }
            ensure!(begin.elapsed() < PATIENCE, "etcd does not answer at {url}");
            pause(std::time::Duration::from_millis(50));
        }
        for (n, host) in hosts.iter().enumerate() {
            let mut command = Command::new(program);
            command.args(["-etcd-endpoints", &url, "-iface", "eth0", "-subnet-file"]);
            spawn(n, command.arg(host.subnet_file()))?;
        }
        let matrix = lab.wait_until_reachable(PATIENCE)?;
        ensure!(
            matrix.is_complete(),
            "with {} the pods do not reach each other",
            program.display()
        );
        Ok(Self { lab, _processes: Some(processes) })
    }
}
