//! `flannelctl cleanup`: removes a daemon's kernel objects and its files, except the holder id and
//! the list of the host's networks.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use flannel_api::{Client, VERSION};
use flannel_core::kernel::Footprint;
use flannel_core::{Config, Kernel, Subnet};
use flannel_firewall::{Deviation, Programs, cleanup_for_go, cleanup_networks, leftovers};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_options::printable::line;
use flannel_options::state_dir;
use flannel_route::moving::NodeBackends;
use flannel_route::record_keepers::WithRecordKeepers;
use flannel_route::{Cleanup, cleanup as remove, ready_for_go, remove_former};
use flannel_subnet::Cache;
use serde_json::json;

use crate::error::{Error, Result};
use crate::options::CleanupFlags;
use crate::{Context, Output, config, offline};

/// Prefixes of the backends' device names, such as `flannel.1`, `flannel-v6.1` and `flannel0`.
const DEVICES: [&str; 3] = ["flannel.", "flannel-", "flannel0"];

/// Removes the objects or prepares them for Go flannel. With `--dry-run`, only prints the changes.
pub(crate) async fn cleanup(context: Context<'_>, flags: &CleanupFlags) -> Result<Output> {
    let Context { client, global, backends, .. } = context;
    let mut _alone = None;
    if !flags.dry_run {
        refuse_daemon(client)?;
        // A daemon may have another socket or none, so the lock of the state directory decides.
        // Without a state directory no daemon has run.
        let dir = &global.state_dir;
        let unknown = |error| Error::Refused(format!("--state-dir {}: {error}", dir.display()));
        if dir.try_exists().map_err(unknown)? {
            _alone = Some(state_dir::lock(dir).await?);
        }
    }
    let config = match &flags.net_config_path {
        Some(file) => config::of_file(file, backends)?,
        None => offline::config(global).await?,
    };
    let kernel = Arc::new(NetlinkKernel::open()?);
    let uplink = offline::uplink(&kernel, &config, &flags.interface.selectors())?;
    let backend = backends.find(&config.backend.kind)?;
    let mut footprint = backend.footprint(&config, Some(uplink))?;
    let mut account = Account::default();
    for config in moved(&global.state_dir, &config) {
        match backends.known_footprint(&config, Some(uplink)) {
            Some(other) => footprint.merge(other),
            // It is of another version.
            None => account.unknown.push(format!(
                "the objects of the backend {:?}, which the cluster has left: this version does \
                 not know it or its options",
                config.backend.kind
            )),
        }
    }
    account.kernel(&change_kernel(context, flags, &kernel, &footprint).await?);
    let former = old_networks(&global.state_dir, &config);
    let networks: Vec<_> = config.pod_networks().chain(former).collect();
    if flags.for_go {
        let (programs, devices) = (Programs::default(), &footprint.links);
        account.rules(cleanup_for_go(&programs, &networks, devices, flags.dry_run).await);
    } else {
        account.other_devices(&kernel, &footprint)?;
        for old in old_networks(&global.state_dir, &config) {
            account.kernel(&remove_former(&*kernel, &footprint, old, flags.dry_run)?);
        }
        account.firewall(&networks, flags.dry_run).await;
        // The files go last and only without failures, because they are needed to find objects.
        if account.failed.is_empty() {
            account.file(&global.subnet_file, flags.dry_run);
            account.file(&state_dir::backends(&global.state_dir), flags.dry_run);
            account.file(&state_dir::config(&global.state_dir), flags.dry_run);
            account.file(&state_dir::damaged_backends(&global.state_dir), flags.dry_run);
            account.file(Cache::open(state_dir::leases(&global.state_dir)).path(), flags.dry_run);
        }
    }
    Ok(account.output(flags.dry_run))
}

/// Removes the kernel objects and records of the network, or prepares them for Go flannel.
async fn change_kernel(
    context: Context<'_>,
    flags: &CleanupFlags,
    kernel: &Arc<NetlinkKernel>,
    footprint: &Footprint,
) -> Result<Cleanup> {
    let Context { global, backends, .. } = context;
    let work = if flags.for_go { ready_for_go } else { remove };
    // The backends that the config named before may have records too.
    let record_keepers: Vec<_> = backends
        .iter()
        .flat_map(|backend| backend.record_keepers(Some(&global.state_dir)))
        .collect();
    let mut footprint = footprint.clone();
    if !flags.for_go {
        footprint.record_keepers.extend(record_keepers.iter().map(|keeper| keeper.name()));
    }
    let kernel =
        WithRecordKeepers::new(Arc::clone(kernel) as Arc<dyn Kernel>, record_keepers).waiting();
    let dry_run = flags.dry_run;
    // On another thread, because a record keeper may need the runtime while this waits for it.
    let report = tokio::task::spawn_blocking(move || work(&kernel, &footprint, dry_run)).await;
    Ok(report.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?)
}

/// Checks that no daemon runs.
///
/// # Errors
/// A daemon listens, or this cannot be checked.
fn refuse_daemon(client: &Client) -> Result<()> {
    let socket = client.socket().unwrap_or_else(|| Path::new("")).display();
    match client.is_listening() {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::Refused(format!(
            "flanneld is running (it listens at {socket}) and would restore everything: stop it \
             first, or use --dry-run"
        ))),
        Err(error) => Err(Error::Refused(format!(
            "{socket}: {error}: it is not known whether flanneld runs, and a cleanup needs it \
             stopped"
        ))),
    }
}

/// The earlier pod networks of this host, without the networks of the config.
fn old_networks(state_dir: &Path, config: &Config) -> Vec<Subnet> {
    let mut recorded = state_dir::read_networks(&state_dir::networks(state_dir));
    recorded.retain(|network| config.pod_networks().all(|current| current != *network));
    recorded
}

/// The config with each backend that the host ran last. During a move there are several.
fn moved(state_dir: &Path, config: &Config) -> Vec<Config> {
    let text = state_dir::read(&state_dir::backends(state_dir)).ok().flatten();
    let backends = text.and_then(|text| NodeBackends::parse(&text).ok()).unwrap_or_default();
    backends
        .iter()
        .map(|usage| Config { backend: usage.backend.clone(), ..config.clone() })
        .collect()
}

/// The changes that were made, or are planned with `--dry-run`, and the failures.
#[derive(Debug, Default)]
struct Account {
    done: Vec<String>,
    failed: Vec<(String, String)>,
    /// Objects that cannot be read.
    unknown: Vec<String>,
}

impl Account {
    fn kernel(&mut self, report: &Cleanup) {
        self.done.extend(report.done.iter().map(ToString::to_string));
        let failed =
            report.failed.iter().map(|(change, error)| (change.to_string(), error.to_string()));
        self.failed.extend(failed);
    }

    /// Notes devices with names as of flannel that are not of this network.
    fn other_devices(&mut self, kernel: &NetlinkKernel, footprint: &Footprint) -> Result<()> {
        let facts = kernel.facts(&Selectors::default())?;
        let names = facts.interfaces.iter().map(|interface| interface.name);
        let others = names.filter(|name| {
            let is_like_ours = DEVICES.iter().any(|start| name.as_str().starts_with(start));
            is_like_ours && !footprint.links.contains(name)
        });
        self.unknown.extend(others.map(|name| {
            format!(
                "{name}, which is not of this network config. If nothing needs it: ip link delete \
                 {name}"
            )
        }));
        Ok(())
    }

    /// The rules of every mode for these networks. Notes the rules for other networks.
    async fn firewall(&mut self, networks: &[Subnet], dry_run: bool) {
        let programs = Programs::default();
        let own = cleanup_networks(&programs, networks, true).await;
        let done =
            if dry_run { None } else { Some(cleanup_networks(&programs, networks, false).await) };
        // Rules that could not be removed are there still.
        let stay = done.as_ref().is_none_or(|done| !done.failed.is_empty());
        let all = leftovers(&programs).await.found;
        let objects = |found: &[Deviation]| found.iter().map(|it| it.object.clone()).collect();
        self.others(objects(&all), &objects(&own.found), stay);
        self.rules(done.unwrap_or(own));
    }

    /// Notes the objects with rules for other pod networks: all objects, without those of these
    /// networks if they stay.
    fn others(&mut self, all: Vec<String>, own: &[String], stay: bool) {
        let others = all.into_iter().filter(|object| !(stay && own.contains(object)));
        self.unknown.extend(
            others.map(|object| format!("{object}, which has rules for another pod network")),
        );
    }

    fn rules(&mut self, report: flannel_firewall::Cleanup) {
        self.done.extend(report.found.iter().map(|there| format!("delete {}", there.object)));
        for error in report.failed {
            if error.is_guess() {
                self.unknown.push(error.to_string());
            } else {
                self.failed.push(("delete firewall rules".to_owned(), error.to_string()));
            }
        }
    }

    fn file(&mut self, path: &Path, dry_run: bool) {
        let change = format!("delete {}", path.display());
        let removed =
            if dry_run { fs::symlink_metadata(path).map(drop) } else { fs::remove_file(path) };
        match removed {
            Ok(()) => self.done.push(change),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => self.failed.push((change, error.to_string())),
        }
    }

    fn output(&self, dry_run: bool) -> Output {
        let failed =
            self.failed.iter().map(|(change, error)| json!({ "change": change, "error": error }));
        let value = json!({
            "version": VERSION,
            "dry_run": dry_run,
            "done": self.done,
            "failed": failed.collect::<Vec<_>>(),
            "unknown": self.unknown,
        });
        let mut text: String = self.done.iter().map(|change| line(change)).collect();
        for (change, error) in &self.failed {
            text += &line(&format!("FAILED: {change}: {error}"));
        }
        for object in &self.unknown {
            text += &line(&format!("not removed: {object}"));
        }
        let verb = if dry_run { "would be made" } else { "made" };
        let count = self.done.len();
        text += &match (count, self.failed.len()) {
            (0, 0) if !self.unknown.is_empty() => {
                "nothing else of flannel is there to change\n".to_owned()
            }
            (0, 0) => "nothing of flannel is there to change\n".to_owned(),
            (_, 0) => format!("{count} changes {verb}\n"),
            (_, failed) => format!("{count} changes {verb}, {failed} failed\n"),
        };
        Output { text, value, ok: self.failed.is_empty() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines do not depend on the width of the terminal, so that they can be copied.
    #[test]
    fn changes_failures_and_unknown_objects_are_shown() {
        let account = Account {
            done: vec!["delete route 10.1.7.0/24".into(), "delete link flannel.1".into()],
            failed: vec![(
                "delete firewall rules".into(),
                "iptables: Operation not permitted (os error 1)".into(),
            )],
            unknown: vec![
                "flannel.2, which is not of this network config. If nothing needs it: ip link \
                 delete flannel.2"
                    .into(),
            ],
        };
        let output = account.output(false);
        assert_eq!(output.text, include_str!("../pages/cleanup.txt"), "\n{}", output.text);
        assert!(!output.ok);
        let planned = Account { failed: Vec::new(), ..account };
        assert!(planned.output(true).text.ends_with("\n2 changes would be made\n"));
        let nothing = Account::default().output(true);
        assert_eq!(
            (nothing.text.as_str(), nothing.ok),
            ("nothing of flannel is there to change\n", true)
        );
        let name = || "a\nb\x1b".to_owned();
        let hostile =
            Account { done: vec![name()], failed: vec![(name(), name())], unknown: vec![name()] };
        let text = hostile.output(false).text;
        assert_eq!((text.lines().count(), text.contains('\x1b')), (4, false), "{text}");
    }

    /// A chain that several daemons share stays when the rules of this one are removed.
    #[test]
    fn own_rules_that_stay_are_not_of_another_network() {
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        for (stay, others) in [(true, &["chain B"][..]), (false, &["chain A", "chain B"])] {
            let mut account = Account::default();
            account.others(names(&["chain A", "chain B"]), &names(&["chain A"]), stay);
            let text = |other: &&str| format!("{other}, which has rules for another pod network");
            assert_eq!(account.unknown, others.iter().map(text).collect::<Vec<_>>());
        }
    }
}
