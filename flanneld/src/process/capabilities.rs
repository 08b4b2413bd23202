//! Drops the capabilities that the process does not need.
//!
//! Capabilities belong to threads. So they are dropped before the first thread is started. The
//! programs of iptables, which the daemon runs, keep the same capabilities.
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

use crate::options::{Capabilities, Options};

/// For changing the network, and for the raw socket of iptables.
const NEEDED: [Capability; 2] = [Capability::CAP_NET_ADMIN, Capability::CAP_NET_RAW];
/// Access to files of other users, to read and to write.
const FILES: [Capability; 2] = [Capability::CAP_DAC_READ_SEARCH, Capability::CAP_DAC_OVERRIDE];

/// Drops the capabilities that are not needed. Logs each capability that is kept for a file, with
/// the file. If dropping fails, this is logged, and the process keeps its capabilities; programs
/// that it runs may have fewer.
pub(crate) fn drop_needless(options: &Options) {
    if options.capabilities == Capabilities::All {
        return;
    }
    let effective = caps::read(None, CapSet::Effective);
    match drop_all_but(options) {
        Ok(kept) => kept.iter().for_each(|(path, capability)| {
            let path = path.display();
            let text = "a capability is kept, because another user owns the path";
            tracing::info!(%capability, %path, "{text}");
        }),
        Err(error) => {
            tracing::warn!(%error, "capabilities are not all dropped");
            if let Err(error) = effective.and_then(|effective| restore(&effective)) {
                tracing::warn!(%error, "files of other users may not be accessible");
            }
        }
    }
}

/// Joins the group of the control socket, because the owner of a file may give it to its own groups
/// without a capability. A failure is reported where the socket is opened.
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
            %group, error = %errno,
            "this process is not a member of --control-group, and cannot join it"
        );
    }
}

/// Makes the capabilities effective again, as far as they are still permitted.
fn restore(effective: &CapsHashSet) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    caps::set(None, CapSet::Effective, &effective.intersection(&permitted).copied().collect())
}

/// Returns the files that need a capability, with that capability, which is kept.
fn drop_all_but(options: &Options) -> Result<Vec<(PathBuf, Capability)>, CapsError> {
    let had = caps::read(None, CapSet::Permitted)?;
    let mut keep: CapsHashSet = NEEDED.into();
    if (1..1024).contains(&options.control.healthz_port) {
        keep.insert(Capability::CAP_NET_BIND_SERVICE);
    }
    // A sandbox that grants no other capabilities may forbid to drop any.
    if had.is_subset(&keep) {
        return Ok(Vec::new());
    }
    // The check below runs without these capabilities, so it finds the files out of reach.
    for capability in FILES {
        caps::drop(None, CapSet::Effective, capability)?;
    }
    let needed = out_of_reach(options);
    keep.extend(needed.iter().map(|(_, capability)| *capability));
    keep.retain(|capability| had.contains(capability));
    // A kernel refuses to drop capabilities that it does not know.
    for capability in caps::runtime::thread_all_supported().difference(&keep) {
        // A process without CAP_SETPCAP may not drop them, and cannot regain them either.
        if had.contains(&Capability::CAP_SETPCAP) {
            caps::drop(None, CapSet::Bounding, *capability)?;
        }
    }
    caps::clear(None, CapSet::Ambient)?;
    // Programs that root runs have the bounding set. Programs of other users have the ambient set.
    let inherited = if geteuid().is_root() { CapsHashSet::new() } else { keep.clone() };
    caps::set(None, CapSet::Inheritable, &inherited)?;
    caps::set(None, CapSet::Effective, &keep)?;
    caps::set(None, CapSet::Permitted, &keep)?;
    for capability in inherited {
        caps::raise(None, CapSet::Ambient, capability)?;
    }
    Ok(needed)
}

/// Files that the options name and that need a capability, with that capability.
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
    let files = options.kube.files().into_iter();
    #[cfg(feature = "etcd")]
    let files = {
        let etcd = options.lease.etcd.options();
        let credentials = [etcd.ca, etcd.certificate, etcd.key].into_iter().flatten();
        files.chain(credentials.filter_map(|credential| credential.file().map(Path::to_owned)))
    };
    files.collect()
}

/// The directories that are written to; of one that does not exist its nearest parent.
fn directories(options: &Options) -> BTreeSet<PathBuf> {
    let mut all = vec![options.lease.state_dir.as_path()];
    all.extend(options.lease.subnet_file.parent());
    all.extend(options.lease.wireguard_key_file.as_deref().and_then(Path::parent));
    all.extend(options.control.control_socket.as_deref().and_then(Path::parent));
    match &options.lease.registry {
        _ if options.kube.kube_subnet_mgr => {}
        RegistryUrl::Dir(location) => all.push(&location.path),
        RegistryUrl::Etcd => {}
    }
    let named = all.into_iter().filter(|path| !path.as_os_str().is_empty());
    named.filter_map(nearest_existing).collect()
}

/// The path, or else its nearest parent that exists.
fn nearest_existing(path: &Path) -> Option<PathBuf> {
    path.ancestors().find(|path| fs::symlink_metadata(path).is_ok()).map(Path::to_owned)
}
