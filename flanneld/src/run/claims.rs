//! The claims of daemons on the devices, the pod networks and the subnet file of a host, so that
//! two daemons do not use the same ones.
//!
//! A claim is an abstract socket, to which nobody can connect. The kernel keeps the names of such
//! sockets for each network namespace, as it keeps devices, and frees them when a process ends,
//! however it ends.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use flannel_core::Config;
use flannel_core::kernel::Footprint;
use flannel_core::runtime::lock;
use nix::errno::Errno;
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::time::{Instant, sleep};

use crate::error::Error;

/// The first part of the names of the sockets.
const PREFIX: &str = "flanneld/claim/";
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
        let networks = config.pod_networks().map(|network| format!("pod network {network}"));
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

    /// Claims a name. False if another daemon has it.
    fn take(&self, name: &str) -> Result<bool, Error> {
        let mut held = lock(&self.0);
        if held.contains_key(name) {
            return Ok(true);
        }
        let about = |error: std::io::Error| Error::Kernel(error.into());
        // Programs print such names, and a name without spaces is easier to read there.
        let address = SockAddr::unix(format!("\0{PREFIX}{}", name.replace(' ', "/")));
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(about)?;
        match socket.bind(&address.map_err(about)?) {
            Ok(()) => _ = held.insert(name.to_owned(), socket),
            Err(error) if error.raw_os_error() == Some(Errno::EADDRINUSE as i32) => {
                return Ok(false);
            }
            Err(error) => return Err(about(error)),
        }
        Ok(true)
    }
}

/// The name of the claim on a file. Daemons in different containers may see it under different
/// paths.
fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().display();
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match fs::metadata(directory.unwrap_or_else(|| Path::new("."))) {
        Ok(it) => format!("subnet file {name} in {}:{}", it.dev(), it.ino()),
        Err(_) => format!("subnet file {}", path.display()),
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
    fn network_namespaces_have_claims_of_their_own() {
        let claims = [(), ()].map(|()| std::sync::Arc::new(Claims::default()));
        for claims in claims.clone() {
            in_netns(move || assert!(claims.take("device flannel.1").unwrap()));
        }
    }
}
