//! Why rules cannot be put in place. The one thing to know: a message says what would help.

use std::path::PathBuf;
use std::process::ExitStatus;

use flannel_core::{Family, KernelError, Subnet};

const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EINVAL: i32 = 22;
const EPROTONOSUPPORT: i32 = 93;
const EOPNOTSUPP: i32 = 95;

/// Why the firewall is not as it should be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Rules cannot be made of these addresses.
    #[error("{family} {what} {subnet}: rules need an {family} subnet that is not the whole address space")]
    Subnet {
        /// Which of them.
        what: &'static str,
        /// The family that it was given for.
        family: Family,
        /// The subnet.
        subnet: Subnet,
    },
    /// The process lacks a privilege.
    #[error("{object}: not permitted ({detail}); grant CAP_NET_ADMIN{}", legacy_hint(.object))]
    NotPermitted {
        /// What was to be read or changed.
        object: String,
        /// What the kernel or the program said.
        detail: String,
    },
    /// A program of iptables is not there.
    #[error(
        "{program} is not in any of {searched}: install the package `iptables` (Debian, Fedora, Alpine, Arch), or set \
         \"EnableNFTables\": true in the network config, which needs no program"
    )]
    NoProgram {
        /// Its name.
        program: String,
        /// The directories that were searched.
        searched: String,
    },
    /// A program of iptables could not be run, or did not end.
    #[error("{}: {source}", .program.display())]
    Run {
        /// Its path.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A program of iptables failed.
    #[error("{} ({status}): {says}", .program.display())]
    Program {
        /// Its path.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// What it said on standard error.
        says: String,
    },
    /// The kernel has no nf_tables, or lacks a part of it.
    #[error(
        "{object}: the kernel does not know it ({source}); load the modules nf_tables, nft_chain_nat and nft_masq \
         (`modprobe`), or use iptables (no \"EnableNFTables\" in the network config)"
    )]
    NoNftables {
        /// What was to be read or changed.
        object: String,
        /// What the kernel said.
        source: KernelError,
    },
    /// The kernel refused an nf_tables request.
    #[error("{object}: {source}")]
    Kernel {
        /// What was to be read or changed.
        object: String,
        /// What the kernel said.
        source: KernelError,
    },
}

fn legacy_hint(object: &str) -> &'static str {
    if object.contains("iptables") || object.contains("ip6tables") {
        " (iptables-legacy needs CAP_NET_RAW too, and to write /run/xtables.lock)"
    } else {
        ""
    }
}

impl Error {
    /// What the kernel's refusal of something about `object` means.
    pub(crate) fn kernel(object: impl Into<String>, source: KernelError) -> Self {
        let object = object.into();
        match source.errno {
            EPERM => Self::NotPermitted { object, detail: source.to_string() },
            ENOENT | EINVAL | EPROTONOSUPPORT | EOPNOTSUPP => Self::NoNftables { object, source },
            _ => Self::Kernel { object, source },
        }
    }

    /// What it means that a program of iptables ended badly.
    pub(crate) fn program(program: PathBuf, status: ExitStatus, stderr: &[u8]) -> Self {
        let says = String::from_utf8_lossy(stderr).trim().replace('\n', "; ");
        if says.contains("Permission denied") || says.contains("Operation not permitted") {
            return Self::NotPermitted { object: program.display().to_string(), detail: says };
        }
        Self::Program { program, status, says }
    }
}
