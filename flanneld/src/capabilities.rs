//! What the process may do: no more than it needs, from the start on.
//!
//! The one thing to know: capabilities are the threads', and so they are dropped before the first thread is started. The
//! programs of iptables, which the daemon runs, keep what it keeps.
//!
//! **Source**: capabilities(7).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};
use flannel_options::RegistryUrl;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, Gid, faccessat, getegid, geteuid, getgroups, setgroups};

use crate::cli::Options;

/// `--capabilities`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Capabilities {
    /// What changing the network takes, and what the options make necessary beside that.
    Least,
    /// All that the process was started with.
    All,
}

/// Changing the network, and the raw socket of iptables.
const NEEDED: [Capability; 2] = [Capability::CAP_NET_ADMIN, Capability::CAP_NET_RAW];
/// Those that reach files of others, to read and to write.
const FILES: [Capability; 2] = [Capability::CAP_DAC_READ_SEARCH, Capability::CAP_DAC_OVERRIDE];

/// Drops what is not needed, and says what is kept beyond the usual and why. Where dropping is not possible, that is said,
/// and the process can do what it could; programs that it runs may be able to do less.
pub(crate) fn drop_needless(options: &Options) {
    if options.capabilities == Capabilities::All {
        return;
    }
    let effective = caps::read(None, CapSet::Effective);
    match drop_all_but(options) {
        Ok(reasons) => reasons.iter().for_each(|reason| tracing::info!("{reason}")),
        Err(error) => {
            tracing::warn!("capabilities are not all dropped: {error}");
            if let Err(error) = effective.and_then(|effective| restore(&effective)) {
                tracing::warn!("files of others may be out of reach: {error}");
            }
        }
    }
}

/// Joins the group that the control socket is for: the owner of a file may give it to groups that it is in, without a
/// capability. That it is not possible is told where the socket is opened.
pub(crate) fn join_control_group(options: &Options) {
    let Some(group) = options.control.control_group.map(Gid::from_raw) else { return };
    let joined = getgroups().and_then(|mut groups| {
        if groups.contains(&group) || getegid() == group {
            return Ok(());
        }
        groups.push(group);
        setgroups(&groups)
    });
    if let Err(errno) = joined {
        tracing::debug!(
            "--control-group {group}: this process is no member and cannot become one: {errno}"
        );
    }
}

/// What was effective is so again, as far as it is still permitted.
fn restore(effective: &CapsHashSet) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    caps::set(None, CapSet::Effective, &effective.intersection(&permitted).copied().collect())
}

fn drop_all_but(options: &Options) -> Result<Vec<String>, CapsError> {
    let had = caps::read(None, CapSet::Permitted)?;
    let mut keep: CapsHashSet = NEEDED.into();
    let mut reasons = Vec::new();
    if (1..1024).contains(&options.control.healthz_port) {
        keep.insert(Capability::CAP_NET_BIND_SERVICE);
    }
    // A sandbox that grants no more than that may well forbid to ask for less.
    if had.is_subset(&keep) {
        return Ok(reasons);
    }
    // Without them it shows which files would be out of reach.
    for capability in FILES {
        caps::drop(None, CapSet::Effective, capability)?;
    }
    for (path, capability) in out_of_reach(options) {
        keep.insert(capability);
        reasons.push(format!(
            "{capability} is kept, since {} belongs to somebody else",
            path.display()
        ));
    }
    keep.retain(|capability| had.contains(capability));
    // A kernel refuses to drop what is younger than itself.
    for capability in caps::runtime::thread_all_supported().difference(&keep) {
        // Who may not do that cannot win them back either.
        if had.contains(&Capability::CAP_SETPCAP) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    // Root's programs have what the bounding set leaves; those of others what is ambient.
    let inherited = if geteuid().is_root() { CapsHashSet::new() } else { keep.clone() };
    caps::set(None, CapSet::Inheritable, &inherited)?;
    caps::set(None, CapSet::Effective, &keep)?;
    caps::set(None, CapSet::Permitted, &keep)?;
    for capability in inherited {
        caps::raise(None, CapSet::Ambient, capability)?;
    }
    Ok(reasons)
}

/// Files that the options name and that take a capability to use.
fn out_of_reach(options: &Options) -> Vec<(PathBuf, Capability)> {
    let denied = |path: &Path, flags| {
        faccessat(AT_FDCWD, path, flags, AtFlags::AT_EACCESS) == Err(Errno::EACCES)
    };
    let [search, write] = FILES;
    let read = files(options).into_iter().filter(|path| denied(path, AccessFlags::R_OK));
    let read = read.map(|path| (path, search));
    let enter = AccessFlags::W_OK | AccessFlags::X_OK;
    let written = directories(options).into_iter().filter(|path| denied(path, enter));
    read.chain(written.map(|path| (path, write))).collect()
}

fn files(options: &Options) -> BTreeSet<PathBuf> {
    let files: BTreeSet<PathBuf> = options.kube.files().into_iter().collect();
    #[cfg(feature = "etcd")]
    let files = {
        let etcd = options.etcd.options();
        files
            .into_iter()
            .chain([etcd.cafile, etcd.certfile, etcd.keyfile].into_iter().flatten())
            .collect()
    };
    files
}

/// The directories that are written to, or as much of each as there is.
fn directories(options: &Options) -> BTreeSet<PathBuf> {
    let mut all = vec![options.state_dir.as_path()];
    all.extend(options.subnet_file.parent());
    all.extend(options.control.control_socket.as_deref().and_then(Path::parent));
    match &options.registry {
        _ if options.kube.kube_subnet_mgr => {}
        RegistryUrl::Dir(location) => all.push(&location.path),
        RegistryUrl::Etcd => {}
    }
    let there = |path: &Path| {
        path.ancestors().find(|path| fs::symlink_metadata(path).is_ok()).map(Path::to_owned)
    };
    let named = all.into_iter().filter(|path| !path.as_os_str().is_empty());
    named.filter_map(there).collect()
}
