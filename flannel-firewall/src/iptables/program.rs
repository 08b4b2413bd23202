//! The programs `iptables-save` and `iptables-restore`, and the same programs for IPv6. No other
//! module of this crate starts processes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use flannel_core::address::Family;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::Error;

/// The time limit for a program, which may wait for a lock that is usually held for milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// The first version with `--wait` and `--random-fully`.
const MODERN: [u32; 3] = [1, 6, 2];
/// The variables that change where the programs find their parts.
const INHERITED: [&str; 2] = ["XTABLES_LIBDIR", "XTABLES_LOCKFILE"];

/// The variant and location of the iptables programs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Programs {
    /// The variant. The default is the program named `iptables`.
    pub variant: Variant,
    /// The directories to search, separated by `:`. `None` for `PATH`, `/usr/sbin` and `/sbin`.
    pub path: Option<OsString>,
    /// The lock file of `iptables-legacy`, whose use shows that rules may have changed. `None` for
    /// the file in the environment variable `XTABLES_LOCKFILE`, or else `/run/xtables.lock`.
    pub lock: Option<PathBuf>,
}

/// Variants of iptables, which keep the same rules in different parts of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Variant {
    /// The program named `iptables` on the host.
    #[default]
    Host,
    /// `iptables-nft`: rules in nf_tables.
    Nft,
    /// `iptables-legacy`: rules in the kernel's legacy tables.
    Legacy,
}

impl Variant {
    pub(crate) const ALL: [Self; 3] = [Self::Host, Self::Nft, Self::Legacy];
}

impl Programs {
    /// The programs for a family. An error if one is not installed.
    pub(crate) fn find(&self, family: Family) -> Result<Tool, Error> {
        let name = name(family, self.variant);
        let save = self.find_program(format!("{name}-save"))?;
        let restore = self.find_program(format!("{name}-restore"))?;
        Ok(Tool { name, save, restore, version: None })
    }

    fn find_program(&self, program: String) -> Result<PathBuf, Error> {
        let searched = self.path.clone().unwrap_or_else(usual_path);
        std::env::split_paths(&searched)
            .map(|dir| dir.join(&program))
            .find(|path| path.is_file())
            .ok_or_else(|| Error::NoProgram {
                program,
                searched: searched.to_string_lossy().into_owned(),
            })
    }

    /// The lock file of `iptables-legacy`.
    pub(crate) fn lock(&self) -> PathBuf {
        if let Some(lock) = &self.lock {
            return lock.clone();
        }
        match std::env::var_os("XTABLES_LOCKFILE") {
            Some(lock) => lock.into(),
            None => "/run/xtables.lock".into(),
        }
    }

    /// The programs for a family of all installed variants, each once.
    pub(crate) fn find_all(&self, family: Family) -> Vec<Tool> {
        let mut tools: Vec<Tool> = Vec::new();
        // The program `iptables` usually is a link to one of the other variants, so it comes last.
        for variant in Variant::ALL.into_iter().rev() {
            match (Self { variant, ..self.clone() }).find(family) {
                Ok(tool) if tools.iter().all(|known| !known.is(&tool)) => tools.push(tool),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "this variant is not searched for rules"),
            }
        }
        tools
    }
}

/// The programs of one variant for one family.
#[derive(Debug)]
pub(crate) struct Tool {
    /// The name of the variant, for example `ip6tables-legacy`.
    pub(crate) name: String,
    save: PathBuf,
    restore: PathBuf,
    /// `None` until the program was run.
    version: Option<Version>,
}

/// The version that a program prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    /// Whether it is 1.6.2 or later.
    modern: bool,
    /// The part of the kernel that has its rules.
    variant: Variant,
}

impl Tool {
    /// The part of the kernel that has its rules: [`Variant::Nft`] or [`Variant::Legacy`].
    ///
    /// `iptables` may be a script that runs either variant, so its version output decides.
    pub(crate) async fn variant(&mut self) -> Result<Variant, Error> {
        match &self.name {
            name if name.ends_with("-nft") => Ok(Variant::Nft),
            name if name.ends_with("-legacy") => Ok(Variant::Legacy),
            _ => Ok(self.version().await?.variant),
        }
    }

    /// Whether the two are names of one program.
    fn is(&self, other: &Self) -> bool {
        let target = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        target(&self.save) == target(&other.save)
    }

    /// All rules, as text.
    pub(crate) async fn save(&self) -> Result<String, Error> {
        run(&self.save, &[], "").await
    }

    /// Applies a script. The changes of each table are atomic.
    pub(crate) async fn restore(&mut self, script: &str) -> Result<(), Error> {
        self.run_restore(&[], script).await
    }

    /// Checks that the program may change these tables, which needs more privileges than reading.
    pub(crate) async fn probe(&mut self, tables: &[&str]) -> Result<(), Error> {
        let script: String = tables.iter().map(|table| format!("*{table}\nCOMMIT\n")).collect();
        self.run_restore(&["--test"], &script).await
    }

    /// Runs the program. It waits for the lock of iptables, if it supports that.
    async fn run_restore(&mut self, args: &[&str], script: &str) -> Result<(), Error> {
        let wait: &[&str] = if self.is_modern().await? { &["--wait"] } else { &[] };
        run(&self.restore, &[&["--noflush"], wait, args].concat(), script).await.map(drop)
    }

    /// Whether the program supports `--random-fully` and `--wait`.
    pub(crate) async fn is_modern(&mut self) -> Result<bool, Error> {
        Ok(self.version().await?.modern)
    }

    /// The version. The program is run for it once.
    async fn version(&mut self) -> Result<Version, Error> {
        if let Some(version) = self.version {
            return Ok(version);
        }
        // `iptables-restore` prints its version too, so no third program is needed.
        let version = match run(&self.restore, &["--version"], "").await {
            Ok(text) => Version::read(&text),
            // Old versions do not support the option.
            Err(Error::Program { .. }) => Version { modern: false, variant: Variant::Legacy },
            Err(error) => return Err(error),
        };
        tracing::debug!(program = self.name, ?version, "found");
        self.version = Some(version);
        Ok(version)
    }
}

impl Version {
    /// `iptables-restore v1.8.9 (nf_tables)` is 1.8.9 and keeps rules in nf_tables. Before 1.8 all
    /// programs use the legacy tables.
    fn read(text: &str) -> Self {
        let modern = numbers(text).is_none_or(|version| version >= MODERN);
        let variant = if text.contains("nf_tables") { Variant::Nft } else { Variant::Legacy };
        Self { modern, variant }
    }
}

fn name(family: Family, variant: Variant) -> String {
    let program = match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    };
    let suffix = match variant {
        Variant::Host => "",
        Variant::Nft => "-nft",
        Variant::Legacy => "-legacy",
    };
    format!("{program}{suffix}")
}

fn usual_path() -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    // A directory of PATH has no colon.
    std::env::join_paths(dirs).unwrap_or(path)
}

fn numbers(text: &str) -> Option<[u32; 3]> {
    let mut numbers = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?.split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some([next()?, next()?, next().unwrap_or(0)])
}

/// Runs a program to its end and returns its standard output. Dropping the future kills it.
async fn run(program: &Path, args: &[&str], input: &str) -> Result<String, Error> {
    let failed = |source| Error::Run { program: program.to_owned(), source };
    let mut command = Command::from(flannel_core::process::command(program, &INHERITED));
    command.args(args).env("LC_ALL", "C").kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    tracing::trace!(program = %program.display(), "starting a process");
    let mut child = command.spawn().map_err(failed)?;
    let mut stdin = child.stdin.take().expect("it is piped");
    let talk = async {
        // If the program stops reading, it prints the reason on standard error.
        let write = async {
            let _ = stdin.write_all(input.as_bytes()).await;
            drop(stdin);
        };
        tokio::join!(write, child.wait_with_output()).1
    };
    let output = tokio::time::timeout(PATIENCE, talk)
        .await
        .unwrap_or_else(|_| {
            let detail = format!("did not end within {} s and was killed", PATIENCE.as_secs());
            Err(std::io::Error::new(std::io::ErrorKind::TimedOut, detail))
        })
        .map_err(failed)?;
    if !output.status.success() {
        return Err(Error::program(program.to_owned(), output.status, &output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_shows_the_age_and_the_variant() {
        for (text, modern, variant) in [
            ("iptables-restore v1.8.9 (nf_tables)\n", true, Variant::Nft),
            ("iptables-restore v1.8.10 (legacy)", true, Variant::Legacy),
            ("iptables-restore v1.6.2", true, Variant::Legacy),
            ("iptables-restore v1.6.1", false, Variant::Legacy),
            ("iptables-restore v1.4.21", false, Variant::Legacy),
            ("something else", true, Variant::Legacy),
        ] {
            assert_eq!(Version::read(text), Version { modern, variant }, "{text}");
        }
    }

    #[test]
    fn the_error_for_a_missing_program_names_its_package() {
        let dir = tempfile::tempdir().unwrap();
        let programs = Programs { path: Some(dir.path().into()), ..Programs::default() };
        let error = programs.find(Family::V6).unwrap_err().to_string();
        assert!(error.starts_with("ip6tables-save is not in any of /"), "{error}");
        assert!(
            error.contains("install the package `iptables`") && error.contains("EnableNFTables"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_program_without_a_version_option_is_old_and_legacy() {
        let path = PathBuf::from("/bin/false");
        let mut tool =
            Tool { name: "iptables".into(), save: path.clone(), restore: path, version: None };
        assert!(!tool.is_modern().await.unwrap());
        assert_eq!(tool.variant().await.unwrap(), Variant::Legacy);
    }

    #[tokio::test]
    async fn the_standard_error_of_a_program_is_in_the_error() {
        let shell = async |script| run(Path::new("/bin/sh"), &["-c", script], "input").await;
        let failed = shell("cat; echo no such thing >&2; exit 3").await.unwrap_err().to_string();
        assert!(
            failed.contains("/bin/sh") && failed.contains("3") && failed.contains("no such thing"),
            "{failed}"
        );
        let error =
            shell("echo Permission denied '(you must be root)' >&2; exit 4").await.unwrap_err();
        assert!(
            matches!(error, Error::NotPermitted { .. })
                && error.to_string().contains("CAP_NET_ADMIN"),
            "{error}"
        );
    }
}
