//! The errors of the firewall. If the user can remove the cause, the text says how.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitStatus;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::{Remedy, Subnet};
use libc::{EINVAL, ENOENT, EOPNOTSUPP, EPROTONOSUPPORT};

/// An error of the firewall.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No rules can be made for this pod network or subnet.
    #[error(
        "{family} {what} {subnet}: rules need an {family} subnet that is not the whole address \
         space"
    )]
    Subnet {
        /// `pod network`, `own subnet` or `exclusion`.
        what: &'static str,
        /// The family it was given for.
        family: Family,
        /// The subnet.
        subnet: Subnet,
    },
    /// The chosen source of masqueraded packets is of another family.
    #[error("masquerading of {family}: the source {address} is not an {family} address")]
    Source {
        /// The family that is masqueraded.
        family: Family,
        /// The source.
        address: IpAddr,
    },
    /// The process lacks a privilege.
    #[error("{object}: not permitted ({detail}); grant CAP_NET_ADMIN{}", legacy_hint(*.by_program))]
    NotPermitted {
        /// The object that was read or changed.
        object: String,
        /// The error of the kernel or the program.
        detail: String,
        /// Whether a program of iptables reported it, which may be iptables-legacy.
        by_program: bool,
    },
    /// A program of iptables is not installed.
    #[error(
        "{program} is not in any of {searched}: install the package `iptables` (Debian, Fedora, \
         Alpine, Arch), or set \"EnableNFTables\": true in the network config, which needs no \
         program"
    )]
    NoProgram {
        /// Its name.
        program: String,
        /// The directories that were searched.
        searched: String,
    },
    /// A program of iptables could not be run, or timed out.
    #[error("{}: {source}", .program.display())]
    Run {
        /// Its path.
        program: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A program of iptables that only reads timed out.
    #[error("{program} did not end within {seconds} s")]
    Late {
        /// Its name.
        program: String,
        /// The time limit, in seconds.
        seconds: u64,
    },
    /// The error of the last attempt, which [`LegacyMemory`](crate::LegacyMemory) remembers.
    #[error(transparent)]
    Again(std::sync::Arc<Self>),
    /// A program of iptables failed.
    #[error("{} ({status}): {says}", .program.display())]
    Program {
        /// Its path.
        program: PathBuf,
        /// Its exit status.
        status: ExitStatus,
        /// Its standard error.
        says: String,
    },
    /// Rules of an earlier flannel are in iptables, and no installed program can remove them.
    #[error(
        "{chains}: left by an earlier flannel, and there is no `iptables-nft` here to remove \
         them; install the package `iptables`, or restart the host"
    )]
    Leftovers {
        /// The chains.
        chains: String,
    },
    /// Legacy tables that may have rules of an earlier flannel are in use, and no installed program
    /// can read them.
    #[error(
        "{family} {tables} of iptables-legacy: in use, and there is no `iptables-legacy` here to \
         see whether an earlier flannel left rules there; if one did, install the program \
         `iptables-legacy`"
    )]
    Unseen {
        /// Their family.
        family: Family,
        /// Their names.
        tables: String,
    },
    /// The kernel has no nf_tables, or lacks a part of them.
    #[error(
        "{object}: the kernel does not know it ({source}); load the modules nf_tables, \
         nft_chain_nat and nft_masq (`modprobe`), or use iptables (no \"EnableNFTables\" in the \
         network config)"
    )]
    NoNftables {
        /// The object that was read or changed.
        object: String,
        /// The kernel's error.
        source: KernelError,
    },
    /// The kernel refused an nf_tables request.
    #[error("{object}: {source}")]
    Kernel {
        /// The object that was read or changed.
        object: String,
        /// The kernel's error.
        source: KernelError,
    },
}

fn legacy_hint(by_program: bool) -> &'static str {
    if by_program {
        " (iptables-legacy needs CAP_NET_RAW too, and to write /run/xtables.lock)"
    } else {
        ""
    }
}

impl Error {
    /// Whether nothing failed, but flannel may have rules that no installed program can read
    /// ([`Error::Unseen`]).
    pub fn is_guess(&self) -> bool {
        matches!(self, Self::Unseen { .. })
    }

    /// What removes the cause, or shows it.
    pub fn remedy(&self) -> Remedy {
        match self {
            Self::NoProgram { .. } => Remedy::PatchConfig("{\"EnableNFTables\": true}".to_owned())
                .remark("or install iptables"),
            Self::NotPermitted { .. } => Remedy::ShowCapabilities.remark(
                "it needs CAP_NET_ADMIN in this network namespace, for iptables-legacy also \
                 CAP_NET_RAW",
            ),
            Self::NoNftables { .. } => Remedy::run("modprobe -a nf_tables nft_chain_nat nft_masq"),
            Self::Leftovers { .. } => {
                Remedy::run("nft list ruleset").remark("install iptables, or restart the host")
            }
            Self::Again(error) => error.remedy(),
            Self::Kernel { .. } => Remedy::run("nft list ruleset"),
            Self::Subnet { .. } | Self::Source { .. } => Remedy::CheckConfig,
            Self::Run { .. } | Self::Late { .. } | Self::Program { .. } | Self::Unseen { .. } => {
                Remedy::run("iptables-save").remark("it must succeed")
            }
        }
    }

    /// The error for a refused request about `object`.
    pub(crate) fn kernel(object: impl Into<String>, source: KernelError) -> Self {
        let object = object.into();
        if source.is_denied() {
            Self::NotPermitted { object, detail: source.to_string(), by_program: false }
        } else if lacks_nftables(&source) {
            Self::NoNftables { object, source }
        } else {
            Self::Kernel { object, source }
        }
    }

    /// The error for a failed program of iptables.
    pub(crate) fn program(program: PathBuf, status: ExitStatus, stderr: &[u8]) -> Self {
        let mut says = String::from_utf8_lossy(stderr).trim().replace('\n', "; ");
        // iptables-legacy prints this text if a privilege or a kernel module is missing.
        let no_table = says.contains("unable to initialize table");
        let refused =
            says.contains("Permission denied") || says.contains("Operation not permitted");
        if refused || (no_table && lacks_privilege()) {
            let object = program.display().to_string();
            return Self::NotPermitted { object, detail: says, by_program: true };
        }
        if no_table {
            says.push_str(
                "; load the module of that table (`modprobe iptable_nat`, \
                `ip6table_nat`, …), or use iptables-nft",
            );
        }
        Self::Program { program, status, says }
    }
}

/// Whether the kernel refused a request because it lacks nf_tables, or a part of it.
pub(crate) fn lacks_nftables(error: &KernelError) -> bool {
    matches!(error.errno(), Some(ENOENT | EINVAL | EPROTONOSUPPORT | EOPNOTSUPP))
}

/// Whether the process lacks CAP_NET_ADMIN (bit 12) or CAP_NET_RAW (bit 13). False if that cannot
/// be read.
fn lacks_privilege() -> bool {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .is_some_and(|effective| effective >> 12 & 0b11 != 0b11)
}

#[cfg(test)]
mod tests {
    use libc::EPERM;

    use super::*;

    #[test]
    fn errors_of_the_kernel_say_how_to_remove_the_cause() {
        for (errno, want) in
            [(EPERM, "CAP_NET_ADMIN"), (ENOENT, "nft_masq"), (EPROTONOSUPPORT, "modprobe")]
        {
            let error = Error::kernel("nftables table ip flannel-ipv4", KernelError::new(errno))
                .to_string();
            assert!(
                error.starts_with("nftables table ip flannel-ipv4: ") && error.contains(want),
                "{error}"
            );
            assert!(!error.contains("legacy"), "{error}");
        }
        let error = Error::kernel("nftables", KernelError::new(105));
        assert!(matches!(&error, Error::Kernel { source, .. } if source.is(105)), "{error}");
    }
}
