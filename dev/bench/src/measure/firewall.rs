//! Rules of iptables that another program deletes: the time until they are restored.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_lab::{Host, Lab};
use test_support::write_script;

use crate::parts::process::prepare;
use crate::parts::report::{Latency, Report};

/// The limit for each repair, in milliseconds.
const LIMIT_MS: f64 = 1000.0;
const PATIENCE: Duration = Duration::from_secs(30);
/// The programs that a daemon runs.
const PROGRAMS: [&str; 6] = [
    "iptables",
    "iptables-save",
    "iptables-restore",
    "ip6tables",
    "ip6tables-save",
    "ip6tables-restore",
];

pub(crate) fn run(samples: u32) -> anyhow::Result<Report> {
    let interrupter = prepare()?;
    let mut kinds = BTreeMap::new();
    for variant in ["nft", "legacy"] {
        let lab = Lab::builder().hosts(1).interrupter(interrupter.clone());
        let lab = lab.start()?;
        let [host] = lab.hosts() else { anyhow::bail!("the lab has one host") };
        let program = with_variant(lab.dir(), variant)?;
        host.start_daemon_of(&program, &["--ip-masq"])?;
        let rules = || host.run(&format!("iptables-{variant}"), &["-t", "nat", "-S"]);
        let waits_for = |wanted: &dyn Fn(&str) -> bool| -> anyhow::Result<()> {
            let begin = Instant::now();
            while !wanted(&rules()?) {
                interrupter.check()?;
                ensure!(begin.elapsed() < PATIENCE, "{}{}", rules()?, host.log()?);
            }
            Ok(())
        };
        waits_for(&|rules| rules.contains("-A FLANNEL-POSTRTG"))?;
        let healthy = rules()?;
        let mut figures = Vec::new();
        for n in 0..samples {
            // Changes that follow each other at once share one repair.
            interrupter.pause(Duration::from_millis(u64::from(100 + 37 * (n % 20))))?;
            delete(host, variant, n)?;
            let begin = Instant::now();
            waits_for(&|rules| rules == healthy)?;
            figures.push(begin.elapsed().as_secs_f64() * 1000.0);
        }
        kinds.insert(format!("iptables-{variant}"), Latency::of(&figures));
    }
    let worst = kinds.values().map(|latency| latency.p99_ms).fold(0.0, f64::max);
    let mut report =
        Report { samples: Some(samples as usize), p99_ms: Some(worst), kinds, ..Report::default() };
    report.at_most("p99_ms", report.p99_ms, LIMIT_MS);
    Ok(report)
}

/// Deletes a rule, all rules of a chain, or the jump to it.
fn delete(host: &Host, variant: &str, n: u32) -> anyhow::Result<()> {
    let args: &[&str] = match n % 3 {
        0 => &["-D", "FLANNEL-POSTRTG", "1"],
        1 => &["-F", "FLANNEL-POSTRTG"],
        _ => &["-F", "POSTROUTING"],
    };
    host.run(&format!("iptables-{variant}"), &[&["-t", "nat"], args].concat())?;
    Ok(())
}

/// A script that runs the bench itself with another variant of iptables in its search path.
fn with_variant(dir: &Path, variant: &str) -> anyhow::Result<PathBuf> {
    let programs = dir.join(variant);
    std::fs::create_dir(&programs)?;
    for program in PROGRAMS {
        let (name, action) = program.split_once('-').unwrap_or((program, ""));
        let file = [name, variant, action].join("-");
        let file = file.trim_end_matches('-');
        let output = Command::new("sh").args(["-c", &format!("command -v {file}")]).output()?;
        let path = String::from_utf8(output.stdout)?;
        ensure!(output.status.success(), "{file} is needed (Debian: apt-get install iptables)");
        symlink(path.trim(), programs.join(program))?;
    }
    let this = std::env::current_exe()?;
    let script = dir.join(format!("daemon-{variant}"));
    let text =
        format!("#!/bin/sh\nPATH={}:$PATH exec {} \"$@\"\n", programs.display(), this.display());
    write_script(&script, &text);
    Ok(script)
}
