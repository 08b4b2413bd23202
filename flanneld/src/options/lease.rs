//! The options of the store of leases, and of this host's files.

use std::path::PathBuf;
use std::time::Duration;

#[cfg(feature = "etcd")]
use flannel_options::EtcdFlags;
use flannel_options::RegistryUrl;
use flannel_options::go_flags::go_int;

/// The store of leases, and the files of this host's lease.
#[derive(Debug, Clone, clap::Args)]
#[non_exhaustive]
pub struct LeaseFlags {
    /// The store of leases: etcd, dir:PATH, or dir:PATH?assign=static for a directory with prepared
    /// leases
    #[arg(long, value_name = "URL")]
    #[cfg_attr(feature = "etcd", arg(default_value = "etcd"))]
    #[cfg_attr(
        not(feature = "etcd"),
        arg(required = false, required_unless_present = "kube_subnet_mgr",
            default_value_ifs(
                ["1", "t", "T", "true", "TRUE", "True"]
                    .map(|on| ("kube_subnet_mgr", on, "dir:/var/lib/flannel/none"))
            ))
    )]
    pub registry: RegistryUrl,

    /// The connection to etcd.
    #[cfg(feature = "etcd")]
    #[command(flatten)]
    pub etcd: EtcdFlags,

    /// Renew the lease when this many minutes are left of it, 1 to 1439
    #[arg(long, value_name = "MINUTES", default_value = "60", value_parser = go_int(1..=1439))]
    pub subnet_lease_renew_margin: i64,

    /// The file with this host's subnet for CNI plugins
    #[arg(long, value_name = "FILE", default_value = "/run/flannel/subnet.env")]
    pub subnet_file: PathBuf,

    /// The directory of this host's state
    #[arg(long, value_name = "DIR", default_value = "/var/lib/flannel")]
    pub state_dir: PathBuf,

    /// The file with the private key of the backend wireguard; default: WIREGUARD_KEY_FILE in the
    /// environment, or secrets/wireguard-key in --state-dir
    #[arg(long, value_name = "FILE")]
    pub wireguard_key_file: Option<PathBuf>,
}

impl LeaseFlags {
    /// The time before its end at which the lease is renewed.
    pub fn renew_margin(&self) -> Duration {
        Duration::from_secs(60 * self.subnet_lease_renew_margin.unsigned_abs())
    }
}
