//! The programs `iptables-save` and `iptables-restore`, and their IPv6 twins. This is the only
//! place where this crate starts a process.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use flannel_core::address::Family;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

use crate::error::Error;

/// A program that takes longer hangs; the lock that they wait for is held for milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// The first version with `--wait` and `--random-fully`.
const MODERN: [u32; 3] = [1, 6, 2];

/// Which programs of iptables are used, and where they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Programs {
    /// Which variant; by default the one that the host calls `iptables`.
    pub variant: Variant,
    /// Directories that are searched, separated by `:`; `None` searches `PATH`, `/usr/sbin` and `/sbin`.
    pub path: Option<OsString>,
}

/// Variants of iptables: the same rules, kept in different parts of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Variant {
    /// What the host calls `iptables`.
    #[default]
    Host,
    /// `iptables-nft`: rules in nf_tables.
    Nft,
    /// `iptables-legacy`: rules in the kernel's older tables.
    Legacy,
}

impl Variant {
    pub(crate) const ALL: [Self; 3] = [Self::Host, Self::Nft, Self::Legacy];
}

impl Programs {
    /// The programs for a family.
    pub(crate) fn find(&self, family: Family) -> Result<Tool, Error> {
        let name = name(family, self.variant);
        let found = |program: &str| {
            let searched = self.path.clone().unwrap_or_else(usual_path);
            let path = std::env::split_paths(&searched)
                .map(|dir| dir.join(program))
                .find(|path| path.is_file());
            path.ok_or_else(|| Error::NoProgram {
                program: program.to_owned(),
                searched: searched.to_string_lossy().into_owned(),
            })
        };
        let (save, restore) = (found(&format!("{name}-save"))?, found(&format!("{name}-restore"))?);
        Ok(Tool { name, save, restore, version: None })
    }

    /// The programs for a family of all variants that are there, each once.
    pub(crate) fn find_all(&self, family: Family) -> Vec<Tool> {
        let mut tools: Vec<Tool> = Vec::new();
        // The host's own name is a link to one of the others; it comes last, to be named after what it is.
        for variant in Variant::ALL.into_iter().rev() {
            match (Self { variant, ..self.clone() }).find(family) {
                Ok(tool) if tools.iter().all(|known| !known.is(&tool)) => tools.push(tool),
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "not looked for rules there"),
            }
        }
        tools
    }
}

/// The programs of one variant for one family.
#[derive(Debug)]
pub(crate) struct Tool {
    /// How the variant is called, for example `ip6tables-legacy`.
    pub(crate) name: String,
    save: PathBuf,
    restore: PathBuf,
    /// `None` until it was asked.
    version: Option<Version>,
}

/// What a program says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    /// It is 1.6.2 or later.
    modern: bool,
    /// Where it keeps rules.
    variant: Variant,
}

impl Tool {
    /// Where it keeps rules: [`Variant::Nft`] or [`Variant::Legacy`].
    ///
    /// What is called `iptables` may be a script that runs one or the other, so it is asked and not looked at.
    pub(crate) async fn variant(&mut self) -> Result<Variant, Error> {
        match &self.name {
            name if name.ends_with("-nft") => Ok(Variant::Nft),
            name if name.ends_with("-legacy") => Ok(Variant::Legacy),
            _ => Ok(self.version().await?.variant),
        }
    }

    /// Two names of one program.
    fn is(&self, other: &Self) -> bool {
        let same = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        same(&self.save) == same(&other.save)
    }

    /// All rules, as text.
    pub(crate) async fn save(&self) -> Result<String, Error> {
        run(&self.save, &[], "").await
    }

    /// Carries out a script: each table's part at once, or not at all.
    pub(crate) async fn restore(&mut self, script: &str) -> Result<(), Error> {
        self.run_restore(&[], script).await
    }

    /// Makes sure that it may change rules of these tables, without doing so; to read them takes less.
    pub(crate) async fn probe(&mut self, tables: &[&str]) -> Result<(), Error> {
        let script: String = tables.iter().map(|table| format!("*{table}\nCOMMIT\n")).collect();
        self.run_restore(&["--test"], &script).await
    }

    /// Waits for others who hold the lock, where it can.
    async fn run_restore(&mut self, args: &[&str], script: &str) -> Result<(), Error> {
        let wait: &[&str] = if self.is_modern().await? { &["--wait"] } else { &[] };
        run(&self.restore, &[&["--noflush"], wait, args].concat(), script).await.map(drop)
    }

    /// It knows `--random-fully` and `--wait`.
    pub(crate) async fn is_modern(&mut self) -> Result<bool, Error> {
        Ok(self.version().await?.modern)
    }

    /// Asked once.
    async fn version(&mut self) -> Result<Version, Error> {
        if let Some(version) = self.version {
            return Ok(version);
        }
        // `iptables-restore` tells its version too, so no third program is needed.
        let version = match run(&self.restore, &["--version"], "").await {
            Ok(text) => Version::read(&text),
            // Old ones do not know the question.
            Err(Error::Program { .. }) => Version { modern: false, variant: Variant::Legacy },
            Err(error) => return Err(error),
        };
        tracing::debug!(program = self.name, ?version, "found");
        self.version = Some(version);
        Ok(version)
    }
}

impl Version {
    /// `iptables-restore v1.8.9 (nf_tables)` is 1.8.9 and keeps rules in nf_tables. Before 1.8 none did.
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
    // A directory of PATH with a colon in it cannot be in PATH.
    std::env::join_paths(dirs).unwrap_or(path)
}

/// An option of the daemon, in the environment.
fn is_option(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"FLANNELD_")
}

fn numbers(text: &str) -> Option<[u32; 3]> {
    let mut numbers = text.split_whitespace().find_map(|word| word.strip_prefix('v'))?.split('.');
    let mut next = || numbers.next()?.parse().ok();
    Some([next()?, next()?, next().unwrap_or(0)])
}

/// Runs a program to its end; dropping the future ends it.
async fn run(program: &Path, args: &[&str], input: &str) -> Result<String, Error> {
    let failed = |source| Error::Run { program: program.to_owned(), source };
    let mut command = Command::new(program);
    command.args(args).env("LC_ALL", "C").kill_on_drop(true);
    // The daemon's options, a password among them, are nobody else's.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_option(name)) {
        command.env_remove(name);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    tracing::trace!(program = %program.display(), "starting a process");
    let mut child = command.spawn().map_err(failed)?;
    let mut stdin = child.stdin.take().expect("it is piped");
    let talk = async {
        // Whoever does not read to the end says why on standard error.
        let write = async {
            let _ = stdin.write_all(input.as_bytes()).await;
            drop(stdin);
        };
        tokio::join!(write, child.wait_with_output()).1
    };
    let output = tokio::time::timeout(PATIENCE, talk).await.unwrap_or_else(|_| {
        let what = format!("did not end within {} s and was ended", PATIENCE.as_secs());
        Err(std::io::Error::new(std::io::ErrorKind::TimedOut, what))
    });
    let output = output.map_err(failed)?;
    if !output.status.success() {
        return Err(Error::program(program.to_owned(), output.status, &output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_says_how_old_it_is_and_where_it_keeps_rules() {
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
    fn a_missing_program_is_named_with_its_package() {
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
    async fn a_program_too_old_for_the_question_is_used_as_such() {
        let path = PathBuf::from("/bin/false");
        let mut tool =
            Tool { name: "iptables".into(), save: path.clone(), restore: path, version: None };
        assert!(!tool.is_modern().await.unwrap());
        assert_eq!(tool.variant().await.unwrap(), Variant::Legacy);
    }

    #[tokio::test]
    async fn what_a_program_says_is_in_the_error() {
        let error =
            run(Path::new("/bin/sh"), &["-c", "cat; echo no such thing >&2; exit 3"], "input")
                .await;
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("/bin/sh") && error.contains("3") && error.contains("no such thing"),
            "{error}"
        );
        let refused = run(
            Path::new("/bin/sh"),
            &["-c", "echo Permission denied '(you must be root)' >&2; exit 4"],
            "",
        );
        let error = refused.await.unwrap_err();
        assert!(
            matches!(error, Error::NotPermitted { .. })
                && error.to_string().contains("CAP_NET_ADMIN"),
            "{error}"
        );
    }
}
