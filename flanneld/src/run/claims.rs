//! The claims of daemons on the devices, the pod networks and the subnet file of a host, so that
//! two daemons do not use the same ones.
//!
//! A claim is an abstract socket that listens. The kernel keeps the names of such sockets for each
//! network namespace, as it keeps devices, and frees them when a process ends, however it ends. Any
//! user may take such a name. So a claim counts only if root or the user of this daemon has it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use flannel_core::kernel::Footprint;
use flannel_core::runtime::lock;
use flannel_core::{Config, Subnet};
use nix::errno::Errno;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::time::{Instant, sleep};

use crate::error::Error;

/// The first part of the names of the sockets.
const PREFIX: &str = "flanneld/claim/";
/// The start of the claims on pod networks.
const POD_NETWORK: &str = "pod network ";
/// The largest number of characters of a file name in a claim. Longer names are known by their end.
const LONGEST: usize = 40;
/// The time that a start waits for a daemon that is about to end.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);

/// The claims of one daemon.
#[derive(Debug, Default)]
pub(super) struct Claims(Mutex<BTreeMap<String, Socket>>);

impl Claims {
    /// Claims the subnet file, before anything changes it. Waits two seconds for another daemon to
    /// end.
    ///
    /// # Errors
    /// Another daemon has it.
    ///
    /// # Cancel safety
    /// The claim may have been made.
    pub(super) async fn claim_file(&self, subnet_file: &Path) -> Result<(), Error> {
        let claimed = Error::SubnetFileClaimed { path: subnet_file.to_owned() };
        self.take_soon(&file_name(subnet_file), Instant::now(), claimed).await
    }

    /// Claims the devices of `footprint`, the pod networks of `config` and the subnet file, and
    /// gives up all other claims. Waits two seconds for another daemon to end.
    ///
    /// # Errors
    /// Another daemon has one of them.
    ///
    /// # Cancel safety
    /// Some claims may have been made, which the next call keeps or gives up.
    pub(super) async fn claim(
        &self,
        footprint: &Footprint,
        config: &Config,
        subnet_file: &Path,
    ) -> Result<(), Error> {
        let devices = footprint.links.iter().map(|link| format!("device {link}"));
        let networks = config.pod_networks().map(claim_of);
        let file = file_name(subnet_file);
        let wanted: Vec<String> = devices.chain(networks).chain([file.clone()]).collect();
        lock(&self.0).retain(|name, _| wanted.contains(name));
        let begin = Instant::now();
        for name in wanted {
            let claimed = if name == file {
                Error::SubnetFileClaimed { path: subnet_file.to_owned() }
            } else {
                Error::Claimed { what: name.clone() }
            };
            self.take_soon(&name, begin, claimed).await?;
        }
        Ok(())
    }

    /// Claims a name, for which it waits until two seconds after `begin`. The error is `claimed` if
    /// another daemon has it then.
    async fn take_soon(&self, name: &str, begin: Instant, claimed: Error) -> Result<(), Error> {
        while !self.take(name)? {
            if begin.elapsed() >= PATIENCE {
                return Err(claimed);
            }
            sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Claims a name. False if another daemon has it, or has an overlapping pod network.
    fn take(&self, name: &str) -> Result<bool, Error> {
        let mut held = lock(&self.0);
        if held.contains_key(name) {
            return Ok(true);
        }
        let about = |error: std::io::Error| Error::Kernel(error.into());
        let address = SockAddr::unix(format!("\0{PREFIX}{}", path_of(name))).map_err(about)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(about)?;
        match socket.bind(&address) {
            Ok(()) => socket.listen(1).map_err(about)?,
            Err(error) if error.raw_os_error() == Some(Errno::EADDRINUSE as i32) => {
                let Some(owner) = stranger(&address) else { return Ok(false) };
                tracing::warn!(name, owner, "a claim of a user that runs no flanneld is ignored");
            }
            Err(error) => return Err(about(error)),
        }
        // After the bind, so that of two daemons at least one sees the other.
        let mut others = claimed_networks().into_iter();
        let is_other = |other: &Subnet| !held.contains_key(&claim_of(*other));
        if let Some(network) = network_of(name)
            && others.any(|other| other != network && other.overlaps(&network) && is_other(&other))
        {
            return Ok(false);
        }
        held.insert(name.to_owned(), socket);
        Ok(true)
    }
}

/// The claim on a pod network.
fn claim_of(network: Subnet) -> String {
    format!("{POD_NETWORK}{network}")
}

/// The pod network of a claim. `None` for other claims.
fn network_of(name: &str) -> Option<Subnet> {
    name.strip_prefix(POD_NETWORK)?.parse().ok()
}

/// The part of a socket's name for a claim. Programs print such names, and a name without spaces is
/// easier to read there.
fn path_of(name: &str) -> String {
    name.replace(' ', "/")
}

/// The pod networks that daemons of this network namespace claim.
fn claimed_networks() -> Vec<Subnet> {
    let start = format!("@{PREFIX}{}", path_of(POD_NETWORK));
    let sockets = fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let names = sockets.lines().filter_map(|line| line.split_once(&start));
    names.filter_map(|(_, network)| network.trim().parse().ok()).collect()
}

/// The user ID of the process that has the name, if it is neither root nor the user of this
/// process. It is unknown, as text, if the process does not listen, which a daemon does.
fn stranger(address: &SockAddr) -> Option<String> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).ok()?;
    // Nobody accepts connections, so the queue of a daemon may be full.
    socket.set_nonblocking(true).ok()?;
    match socket.connect(address) {
        Ok(()) => {
            let owner = getsockopt(&socket, PeerCredentials).ok()?.uid();
            (owner != 0 && owner != geteuid().as_raw()).then(|| owner.to_string())
        }
        // The queue is full.
        Err(error) if error.raw_os_error() != Some(Errno::ECONNREFUSED as i32) => None,
        Err(_) => is_bound(address).then(|| "unknown".to_owned()),
    }
}

/// Whether a socket has the name.
fn is_bound(address: &SockAddr) -> bool {
    Socket::new(Domain::UNIX, Type::STREAM, None).is_ok_and(|socket| socket.bind(address).is_err())
}

/// The name of the claim on a file. Daemons in different containers may see it under different
/// paths. The name of a socket has at most 107 bytes.
fn file_name(path: &Path) -> String {
    let end = |text: String| {
        let skipped = text.chars().count().saturating_sub(LONGEST);
        text.chars().skip(skipped).filter(char::is_ascii).collect::<String>()
    };
    let name = path.file_name().unwrap_or_default().display().to_string();
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or_else(|| Path::new("."));
    // The daemon makes it anyway, and with it the file has the same name for each daemon.
    let _ = fs::create_dir_all(directory);
    match fs::metadata(directory) {
        Ok(it) => format!("subnet file {}:{} {}", it.dev(), it.ino(), end(name)),
        Err(_) => format!("subnet file {}", end(path.display().to_string())),
    }
}

#[cfg(test)]
mod tests {
    use flannel_netlink::testing::{in_netns, in_netns_async};

    use super::*;

    fn config(network: &str) -> Config {
        Config::parse(&format!(r#"{{"Network":"{network}"}}"#)).unwrap()
    }

    fn device(name: &str) -> Footprint {
        Footprint { links: [name.parse().unwrap()].into(), ..Footprint::default() }
    }

    #[test]
    fn one_daemon_has_a_device_or_network_until_it_gives_it_up() {
        in_netns_async(async || {
            tokio::time::pause();
            let [one, two] = [Claims::default(), Claims::default()];
            let (first, second) = (config("10.1.0.0/16"), config("10.2.0.0/16"));
            let dir = tempfile::tempdir().unwrap();
            let [a, b] = ["a.env", "b.env"].map(|name| dir.path().join(name));
            one.claim(&device("flannel.1"), &first, &a).await.unwrap();
            one.claim(&device("flannel.1"), &first, &a).await.unwrap();
            let link = dir.path().join("link");
            std::os::unix::fs::symlink(dir.path(), &link).unwrap();
            for (footprint, config, file, says) in [
                (device("flannel.1"), &second, &b, "device flannel.1"),
                (device("flannel.2"), &first, &b, "pod network 10.1.0.0/16"),
                (device("flannel.2"), &second, &link.join("a.env"), "--subnet-file"),
            ] {
                let error = two.claim(&footprint, config, file).await.unwrap_err().to_string();
                assert!(error.contains(says), "{error}");
            }
            two.claim(&device("flannel.2"), &second, &b).await.unwrap();
            // A device that is given up while another daemon waits for it.
            let [wanted, other] = ["flannel.1", "flannel.3"].map(device);
            let waiting = two.claim(&wanted, &second, &b);
            let moving = one.claim(&other, &first, &a);
            let (waited, moved) = tokio::join!(waiting, moving);
            waited.unwrap();
            moved.unwrap();
            drop(two);
            one.claim(&device("flannel.1"), &second, &b).await.unwrap();
        });
    }

    #[test]
    fn overlapping_pod_networks_clash_in_either_order() {
        in_netns_async(async || {
            tokio::time::pause();
            let dir = tempfile::tempdir().unwrap();
            let file = |name: &str| dir.path().join(name);
            for (first, second) in [("10.0.0.0/8", "10.1.0.0/16"), ("10.1.0.0/16", "10.0.0.0/8")] {
                let [one, two] = [Claims::default(), Claims::default()];
                one.claim(&device("flannel.1"), &config(first), &file("a")).await.unwrap();
                let claim = two.claim(&device("flannel.2"), &config(second), &file("b")).await;
                let error = claim.unwrap_err().to_string();
                assert!(error.contains(&format!("pod network {second}")), "{error}");
                two.claim(&device("flannel.2"), &config("192.168.0.0/16"), &file("b"))
                    .await
                    .unwrap();
            }
        });
    }

    #[test]
    fn names_that_no_daemon_has_do_not_stop_one() {
        in_netns_async(async || {
            let address = SockAddr::unix(format!("\0{PREFIX}device/flannel.1")).unwrap();
            let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
            socket.bind(&address).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let long = dir.path().join("missing").join("x".repeat(200));
            let claims = Claims::default();
            claims.claim(&device("flannel.1"), &config("10.1.0.0/16"), &long).await.unwrap();
            let other = Claims::default();
            tokio::time::pause();
            let error = other.claim_file(&long).await.unwrap_err();
            assert!(matches!(error, Error::SubnetFileClaimed { .. }), "{error}");
        });
    }

    #[test]
    fn network_namespaces_have_claims_of_their_own() {
        let claims = [(), ()].map(|()| std::sync::Arc::new(Claims::default()));
        for claims in claims.clone() {
            in_netns(move || assert!(claims.take("device flannel.1").unwrap()));
        }
    }
}
