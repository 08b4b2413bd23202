//! The time of the CNI plugin for a pod: its start, and an ADD against a call of its delegate
//! alone.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::parts::report::{Latency, Report, percentile};
use anyhow::{Context, ensure};

/// The maximum median of the start, in milliseconds.
const START_P50_MS: f64 = 3.0;
const ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\n\
    FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// Measures `calls` calls of the plugin.
///
/// # Errors
/// It cannot run, or its answer is wrong.
pub(crate) fn run(plugin: &Path, calls: u32) -> anyhow::Result<Report> {
    let bytes = fs::metadata(plugin).with_context(|| plugin.display().to_string())?.len();
    let dir = tempfile::tempdir()?;
    let env = dir.path().join("subnet.env");
    let state = dir.path().join("state");
    let delegate = dir.path().join("nothing");
    fs::write(&env, ENV)?;
    fs::write(&delegate, "#!/bin/sh\necho '{\"cniVersion\":\"1.1.0\"}'\n")?;
    fs::set_permissions(&delegate, Permissions::from_mode(0o755))?;
    let conf = serde_json::json!({
        "cniVersion": "1.1.0",
        "name": "bench",
        "subnetFile": env,
        "dataDir": state,
        "delegate": { "type": "nothing" },
    });
    let conf = conf.to_string();
    let mut start = Vec::new();
    let mut add = Vec::new();
    let mut floor = Vec::new();
    for n in 0..calls {
        let call = |program: &Path, command| call(program, command, n, dir.path(), &conf);
        start.push(call(plugin, "VERSION")?);
        add.push(call(plugin, "ADD")?);
        floor.push(call(&delegate, "ADD")?);
    }
    // The Go plugin, which can be measured too, keeps one file for each container, ours two names.
    let kept = fs::read_dir(&state)?.count();
    ensure!(kept >= calls as usize, "{kept} files for {calls} containers");
    let latency = |figures: &[f64]| Latency {
        samples: figures.len(),
        p50_ms: percentile(figures, 50),
        p99_ms: percentile(figures, 99),
    };
    // VERSION, from the start of the process to its end; ADD with an empty delegate; the delegate
    // alone.
    let kinds = [("start", &start), ("add", &add), ("delegate", &floor)];
    let mut report = Report {
        samples: Some(calls as usize),
        // The size of a static program is the size of its file.
        bytes: Some(bytes),
        p50_ms: Some(percentile(&start, 50)),
        p99_ms: Some(percentile(&start, 99)),
        kinds: kinds.map(|(kind, figures)| (kind.to_owned(), latency(figures))).into(),
        ..Report::default()
    };
    report.at_most("start_p50_ms", report.p50_ms, START_P50_MS);
    Ok(report)
}

/// One call of a plugin, in milliseconds.
fn call(program: &Path, command: &str, n: u32, path: &Path, conf: &str) -> anyhow::Result<f64> {
    let mut process = Command::new(program);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    process.env("CNI_COMMAND", command).env("CNI_PATH", path).env("CNI_IFNAME", "eth0");
    process.env("CNI_CONTAINERID", format!("c{n}")).env("CNI_NETNS", "/nonexistent");
    let begin = Instant::now();
    let mut child = process.spawn().with_context(|| program.display().to_string())?;
    // A plugin may end without reading the config.
    let _ = child.stdin.take().context("no stdin")?.write_all(conf.as_bytes());
    let output = child.wait_with_output()?;
    let elapsed = begin.elapsed();
    let answer = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && answer.contains("1.1.0"),
        "{command}: {}: {answer}",
        output.status
    );
    Ok(elapsed.as_secs_f64() * 1e3)
}
