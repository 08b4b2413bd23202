//! The real tools as witnesses and saboteurs, and stand-ins that count. The one thing to know: only the stand-ins are
//! given to the firewall, so what was not written down was not run.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use flannel_core::address::Family;
use flannel_firewall::{Programs, Variant};

use super::Kind;

/// The mark that a foreign rule gives to packets for this port is kube-proxy's bit and another one.
pub(crate) const MARKED_PORT: u16 = 4040;

/// Stand-ins for the programs of iptables: each writes down that it was run, and becomes the real one.
pub(crate) struct Tools(tempfile::TempDir);

impl Tools {
    pub(crate) fn install() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Another process writes them: a file that is open for writing anywhere cannot be run.
        let script = r#"cd "$1" || exit
            for program in iptables ip6tables; do for variant in -nft -legacy; do for role in -save -restore; do
                name=$program$variant$role
                real=$(PATH=$PATH:/usr/sbin:/sbin command -v $name) || { echo "install iptables: no $name" >&2; exit 1; }
                printf '#!/bin/sh\necho %s "$@" >>%s/log\nexport XTABLES_LOCKFILE=%s/lock\nexec %s "$@"\n' \
                    $name "$1" "$1" "$real" >$name
                chmod 755 $name
            done; done; done"#;
        let output =
            Command::new("sh").args(["-ec", script, "-"]).arg(dir.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let tools = Self(dir);
        tools.host_uses(Kind::IptablesNft);
        tools
    }

    /// What `iptables` means from now on.
    pub(crate) fn host_uses(&self, kind: Kind) {
        for name in ["iptables", "ip6tables"] {
            for role in ["save", "restore"] {
                let link = self.path(&format!("{name}-{role}"));
                let _ = std::fs::remove_file(&link);
                std::os::unix::fs::symlink(format!("{name}{}-{role}", kind.suffix()), link)
                    .unwrap();
            }
        }
    }

    /// `iptables` is a program of its own from now on, which runs another.
    pub(crate) fn host_has_wrappers_for(&self, kind: Kind) {
        self.host_uses(kind);
        let script =
            "cd $1; for link in iptables-save iptables-restore ip6tables-save ip6tables-restore; do
            cp --remove-destination $(readlink $link) $link; done";
        let status =
            Command::new("sh").args(["-ec", script, "-"]).arg(self.0.path()).status().unwrap();
        assert!(status.success());
    }

    /// What the firewall is given.
    pub(crate) fn programs(&self) -> Programs {
        Programs { variant: Variant::Host, path: Some(self.0.path().into()) }
    }

    /// The path of a stand-in.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// What was run so far, a line for each.
    pub(crate) fn runs(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    /// Runs the real `iptables` or `ip6tables` of a variant.
    pub(crate) fn iptables(&self, kind: Kind, family: Family, args: &str) -> String {
        let program = format!("{}{}", name(family), kind.suffix());
        let mut command = Command::new(&program);
        run(command.args(args.split_whitespace()).env("XTABLES_LOCKFILE", self.path("lock")), "")
    }

    /// Moves the second rule of a chain of table `nat` behind all others, at once.
    pub(crate) fn reorder_iptables(&self, kind: Kind, family: Family, chain: &str) {
        let rules = self.iptables(kind, family, &format!("-t nat -S {chain}"));
        let rule = rules.lines().filter(|line| line.starts_with("-A")).nth(1).unwrap();
        let mut restore = Command::new(format!("{}{}-restore", name(family), kind.suffix()));
        restore.arg("--noflush").env("XTABLES_LOCKFILE", self.path("lock"));
        run(&mut restore, &format!("*nat\n-D {chain} 2\n{rule}\nCOMMIT\n"));
    }

    /// All rules that the real `iptables-save` of a variant sees.
    pub(crate) fn save(&self, kind: Kind, family: Family) -> String {
        run(&mut Command::new(format!("{}{}-save", name(family), kind.suffix())), "")
    }

    /// Makes rules and tables of others, in all of the kernel's firewalls.
    pub(crate) fn make_foreign(&self) {
        for (keyword, number) in [("ip", "4"), ("ip6", "6")] {
            nft(&format!(
                "table {keyword} foreign {{ chain c {{ type filter hook prerouting priority mangle; \
                 udp dport {MARKED_PORT} meta mark set 0x4001; }}; }}
                 table inet flannel-ipv{number} {{ chain postrtg {{ counter; }}; }}"
            ));
        }
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            for family in Family::BOTH {
                for rule in [
                    "-t nat -A POSTROUTING -o nowhere -j MASQUERADE",
                    "-A FORWARD -i nowhere -m comment --comment FLANNEL-FWD -j ACCEPT",
                    "-t nat -N FOREIGN",
                    "-t nat -A FOREIGN -j RETURN",
                ] {
                    self.iptables(kind, family, rule);
                }
            }
        }
    }

    /// What the witnesses see, without what is ours and without counters.
    pub(crate) fn foreign_seen(&self) -> String {
        let mut seen = self.seen();
        seen.retain(|line| !is_ours(line));
        seen.join("\n")
    }

    /// What the witnesses see that is ours.
    pub(crate) fn ours_seen(&self) -> Vec<String> {
        let mut seen = self.seen();
        seen.retain(|line| is_ours(line));
        seen
    }

    fn seen(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for table in nft("list tables").lines() {
            lines.push(table.to_owned());
            // Those of iptables are told by iptables.
            if table.contains("foreign") || table.contains("inet") {
                lines.extend(nft(&format!("list {table}")).lines().map(str::to_owned));
            }
        }
        lines.retain(|line| !["nat", "filter"].iter().any(|table| line.ends_with(table)));
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            for family in Family::BOTH {
                let saved = self.save(kind, family);
                let lines_of_it = saved.lines().filter(|line| !line.starts_with('#'));
                lines.extend(lines_of_it.map(|line| {
                    let without_counters = line.split_once(" [").map_or(line, |(chain, _)| chain);
                    format!("{kind:?} {family} {without_counters}")
                }));
            }
        }
        lines
    }
}

fn is_ours(line: &str) -> bool {
    ["table ip flannel-", "table ip6 flannel-", "-j FLANNEL-", "-A FLANNEL-", ":FLANNEL-"]
        .iter()
        .any(|mark| line.contains(mark))
}

fn name(family: Family) -> &'static str {
    if family == Family::V4 { "iptables" } else { "ip6tables" }
}

/// Runs the real `nft`.
pub(crate) fn nft(script: &str) -> String {
    run(Command::new("nft").args(["-f", "-"]), script)
}

/// Moves the second rule of a chain, named with its table, behind all others, at once.
pub(crate) fn reorder_nft(chain: &str) {
    let listing = run(Command::new("nft").args(["-a", "-f", "-"]), &format!("list chain {chain}"));
    let rules = listing
        .lines()
        .filter(|line| !line.contains('{'))
        .filter_map(|line| line.split_once("# handle "));
    let (rule, handle) = rules.clone().nth(1).unwrap();
    nft(&format!("delete rule {chain} handle {handle}; add rule {chain} {}", rule.trim()));
}

fn run(command: &mut Command, input: &str) -> String {
    command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default()));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .unwrap_or_else(|error| panic!("install iptables and nftables: {command:?}: {error}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} {input}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}
