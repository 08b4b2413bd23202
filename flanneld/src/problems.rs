//! What is wrong, in sentences. The one thing to know: readiness is the absence of errors in this list, so that whoever
//! asks why a node is not ready gets the very reasons.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::{Problem, SubnetsReport};
use flannel_core::network::Rejection;
use flannel_core::object::Key;
use flannel_core::subnet::{Loss, Ownership, StoreStatus};
use flannel_core::{Lease, Subnets};
use flannel_doctor::commands::{is_kubernetes, localize, release, restore_directory, restore_etcd};

use crate::firewall::Rulebook;
use crate::observe::{NetworkSnapshot, Snapshot};
use crate::report::subnets_used;

/// Where more is told than in a sentence.
const LOG: &str = "journalctl -u flanneld";
/// So many of one kind are told one by one.
const MOST: usize = 5;
/// From this share on, in percent, a pod network is said to be nearly full.
const NEARLY_FULL: u64 = 80;

/// Everything that is wrong, errors first.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<Problem> {
    let mut found = Vec::new();
    match &snapshot.network {
        Some(network) => {
            found.extend(of_lease(network, snapshot));
            if !snapshot.subnet_file && !network.running.lapsed {
                let text = "the subnet file is not written yet: firewall rules come first";
                found.push(Problem::error(text).with_hint(LOG));
            }
            found.extend(of_kernel(network));
            // Without a lease there are none, and before the subnet file they are what it waits for.
            if snapshot.subnet_file && !network.running.lapsed {
                found.extend(of_firewall(&network.running.rulebook.borrow()));
            }
            found.extend(of_leases(network));
            found.extend(of_room(network, snapshot.store.as_ref()));
        }
        None => {
            let reason = snapshot.waits_for.as_deref().unwrap_or("it has only just been started");
            found.push(Problem::error(format!("no network runs: {reason}")).with_hint(LOG));
        }
    }
    if let Some(store) = &snapshot.store {
        found.extend(of_store(store));
    }
    if let Some(config) = &snapshot.waiting_config {
        let networks: Vec<String> =
            config.pod_networks().map(|network| network.to_string()).collect();
        let text =
            format!("the network config has other pod networks now ({})", networks.join(", "));
        found.push(
            Problem::warning(text)
                .with_hint("systemctl restart flanneld # and the pods, which do not survive that"),
        );
    }
    // A store that is away seems to hold none: whoever wrote one there would make it an empty one.
    let answers = snapshot.store.as_ref().filter(|store| store.last_error.is_none());
    let wrong = answers.and_then(|store| store.wrong_config.as_ref());
    // Without a network the wait for a right one is told above.
    if let (Some(why), Some(_)) = (wrong.or(snapshot.refused_config.as_ref()), &snapshot.network) {
        let text = format!(
            "the store's network config is not used, the last good one stays in force: {why}"
        );
        found.push(Problem::warning(text).with_hint("flannelctl config set FILE"));
    }
    if let (Some(why), Some(network)) = (&snapshot.unfit_interface, &snapshot.network) {
        let text =
            format!("the external interface is not what it was, everything stays as it is: {why}");
        let hint = format!("ip address show {}", network.running.iface.name);
        found.push(Problem::warning(text).with_hint(hint));
    }
    let store = snapshot.store.as_ref().map(|store| store.store.as_str());
    for problem in &mut found {
        problem.hint = problem.hint.take().map(|hint| localize(hint, store));
    }
    // Stable: the order above stays within each severity.
    found.sort_by_key(|problem| !problem.is_error());
    found
}

/// The shortest description: `ready: 10.1.5.0-24, 3 peers`, `not ready: …`.
pub(crate) fn line(snapshot: &Snapshot) -> String {
    let problems = problems(snapshot);
    match (&snapshot.network, problems.iter().find(|problem| problem.is_error())) {
        (Some(network), None) => {
            let lease = network.running.handle.lease.subnets;
            format!("ready: {lease}, {} peers", network.status.peers)
        }
        (_, Some(problem)) => format!("not ready: {}", problem.text),
        (None, None) => "not ready".to_owned(),
    }
}

fn of_lease(network: &NetworkSnapshot, snapshot: &Snapshot) -> Option<Problem> {
    let lease = network.running.handle.lease.subnets;
    if let Ownership::Lost { why: Loss::Withdrawn(why), .. } = &snapshot.ownership {
        return Some(Problem::error(format!("this node does not hold its lease {lease}: {why}")));
    }
    if let Some(why) = snapshot.waits_for.as_ref().filter(|_| network.running.lapsed) {
        let text = "it ran out, and none is asked for, since no network could be built";
        return Some(
            Problem::error(format!("this node does not hold its lease {lease}: {text}: {why}"))
                .with_hint(LOG),
        );
    }
    // Ages count on, and are no part of the text, which is what systemd and the log tell again when it changes.
    let (reason, age) = match &snapshot.ownership {
        _ if network.running.lapsed => ("it ran out, and the store does not answer", String::new()),
        Ownership::Held { .. } => return None,
        Ownership::Lost { since, why: Loss::Unconfirmed } => {
            let ago = snapshot.time.duration_since(*since).unwrap_or_default().as_secs();
            (
                "it ran out, and the store did not confirm a renewal",
                format!("it ran out {ago} s ago; "),
            )
        }
        _ => ("the store gave it to nobody, or to another", String::new()),
    };
    let text = format!("this node does not hold its lease {lease}: {reason}");
    let mend =
        snapshot.store.as_ref().map_or_else(|| LOG.to_owned(), |store| bring_back(&store.store));
    let joint = if mend.contains(" # ") { "; " } else { " # " };
    Some(Problem::error(text).with_hint(format!(
        "{mend}{joint}{age}when the store answers, the node wins its lease back, or says who has it"
    )))
}

/// What brings a store back, by its name.
fn bring_back(store: &str) -> String {
    match store.split_once(':') {
        Some(("dir", path)) => restore_directory(path.split('?').next().unwrap_or_default()),
        Some(("etcd", endpoints)) => restore_etcd(endpoints),
        _ => LOG.to_owned(),
    }
}

fn of_kernel(network: &NetworkSnapshot) -> Vec<Problem> {
    let status = &network.status;
    let mut found = Vec::new();
    if let Some(error) = &status.kernel_error {
        found.push(
            Problem::error(format!("the kernel cannot be read or watched: {error}")).with_hint(LOG),
        );
    }
    if let Some((key, failure)) = status.failing.iter().next() {
        let others = match status.failing.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let text = format!("the kernel refuses: {}: {}{others}", failure.change, failure.error);
        found.push(Problem::error(text).with_hint(match (failure.error.errno, key) {
            // EPERM
            (1, _) => {
                "systemctl show -p CapabilityBoundingSet flanneld # it needs CAP_NET_ADMIN in this network namespace"
                    .to_owned()
            }
            // EEXIST: of another kind, and not ours.
            (17, Key::Link(name)) => format!("ip link delete {name}"),
            _ => LOG.to_owned(),
        }));
    }
    if !status.in_sync && found.is_empty() {
        let problem = Problem::error(match status.live {
            true => "the kernel is being made equal to the leases",
            false => {
                "the leases are those of an earlier run, since the store has not listed them yet"
            }
        });
        found.push(problem.with_hint("flannelctl watch"));
    }
    found
}

fn of_firewall(rulebook: &Rulebook) -> Vec<Problem> {
    let yet = || Some(Problem::error("the firewall rules are not in place yet").with_hint(LOG));
    let mut leftovers = Vec::new();
    let rules = match rulebook {
        Rulebook::Unwanted => None,
        Rulebook::Pending => yet(),
        Rulebook::Missing { why, asked: true } => Some(
            Problem::error(format!("the firewall rules are not in place: {why}")).with_hint(LOG),
        ),
        // Nobody asked for them by name: many a host needs none.
        Rulebook::Missing { why, asked: false } => {
            Some(Problem::warning(format!("there are no forward rules: {why}")).with_hint(LOG))
        }
        Rulebook::Kept(status) => {
            let status = status.borrow();
            let left = |error| {
                format!("rules that an earlier flannel may have left are not removed: {error}")
            };
            let certain = status.leftovers.iter().filter(|error| !error.is_guess());
            leftovers.extend(certain.map(|error| Problem::warning(left(error)).with_hint(LOG)));
            match status.failure.as_ref().and_then(|failure| failure.errors.first()) {
                Some(error) => Some(
                    Problem::error(format!("the firewall rules are not in place: {error}"))
                        .with_hint(LOG),
                ),
                None if status.in_place => None,
                None => yet(),
            }
        }
    };
    rules.into_iter().chain(leftovers).collect()
}

fn of_leases(network: &NetworkSnapshot) -> Vec<Problem> {
    let status = &network.status;
    let not_believed = |(subnets, why): (&Subnets, &Rejection)| {
        let problem = Problem::warning(format!("the lease {subnets} is not believed: {why}"));
        problem.with_hint(match why {
            Rejection::Overlaps { .. } | Rejection::Contradicts { .. } => {
                "systemctl stop flanneld # on the later of the two nodes: every node believes the earlier lease"
                    .to_owned()
            }
            Rejection::Rejected(_) => "flannelctl lease list # which backend does that node run?".to_owned(),
            _ => release(subnets),
        })
    };
    let mut found: Vec<Problem> = status.rejected.iter().take(MOST).map(not_believed).collect();
    if let Some(more) = status.rejected.len().checked_sub(MOST + 1) {
        found.push(
            Problem::warning(format!("{} more leases are not believed", more + 1))
                .with_hint("flannelctl peers"),
        );
    }
    let remarks = status.advisories.keys().take(MOST);
    found.extend(
        remarks.map(|remark| Problem::warning(remark).with_hint(of_remark(remark, network))),
    );
    found
}

/// One about a public address that nodes share is mended by letting go the youngest of the others.
fn of_remark(remark: &str, network: &NetworkSnapshot) -> String {
    let address = remark.split([' ', ',']).find_map(|word| word.parse::<IpAddr>().ok());
    let own = network.running.handle.lease.subnets;
    let has_it = |lease: &&Arc<Lease>| {
        lease.subnets != own
            && lease.attrs.preferred.public.values().any(|public| Some(*public) == address)
    };
    let youngest = network.view.leases.iter().filter(has_it).max_by_key(|lease| lease.since);
    match youngest {
        Some(lease) => format!("{}, else give it another --public-ip", release(lease.subnets)),
        None => "flannelctl peers".to_owned(),
    }
}

fn of_room(network: &NetworkSnapshot, store: Option<&StoreStatus>) -> Vec<Problem> {
    let lets_go = if is_kubernetes(store.map(|store| store.store.as_str())) {
        "kubectl delete node"
    } else {
        "lease release"
    };
    let hint = format!(
        "flannelctl lease list # {lets_go} lets go those of nodes that are gone; or enlarge the network"
    );
    let nearly = |room: &SubnetsReport| {
        room.used.saturating_mul(100) >= room.total.saturating_mul(NEARLY_FULL)
    };
    let tell = |room: SubnetsReport| {
        let SubnetsReport { family, total, used, free } = room;
        let text = format!("{used} of {total} {family} subnets are taken, {free} are free");
        Problem::warning(text).with_hint(hint.as_str())
    };
    subnets_used(network, store).into_iter().filter(nearly).map(tell).collect()
}

fn of_store(store: &StoreStatus) -> Vec<Problem> {
    let mut found = Vec::new();
    if let Some((error, _)) = &store.last_error {
        let problem = Problem::warning(format!("the store does not answer: {error}"));
        found.push(problem.with_hint(bring_back(&store.store)));
    }
    for (key, reason) in store.skipped.iter().take(MOST) {
        let problem = Problem::warning(format!("{}: {key} is wrong: {reason}", store.store));
        found.push(problem.with_hint("flannelctl lease list"));
    }
    found
}

#[cfg(test)]
mod tests {
    use flannel_core::status::Status;

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    #[tokio::test]
    async fn rules_that_are_asked_for_and_not_in_place_make_a_node_not_ready() {
        let (status, live) = tokio::sync::watch::channel(flannel_firewall::Status::default());
        let (book, rulebook) = tokio::sync::watch::channel(Rulebook::Pending);
        let mut kernel = Status::default();
        (kernel.in_sync, kernel.live) = (true, true);
        let (_subnets, mut running) = network(kernel).await;
        running.rulebook = rulebook;
        let observer = Observer::default();
        let _guard = observer.running(running);
        observer.subnet_file_written();
        let seen = || {
            let mut snapshot = observer.snapshot();
            snapshot.ownership = Ownership::Held { until: None };
            let metrics = crate::metrics::metrics(&snapshot, crate::metrics::Format::Text);
            let told = problems(&snapshot)
                .into_iter()
                .map(|p| format!("{}: {}", p.severity, p.text))
                .collect();
            (told, metrics.contains("\nflannel_firewall_in_place 1\n"))
        };
        let yet = "error: the firewall rules are not in place yet".to_owned();
        assert_eq!(seen(), (vec![yet.clone()], false));
        book.send_replace(Rulebook::Kept(live));
        assert_eq!(seen(), (vec![yet], false));
        status.send_modify(|status| status.in_place = true);
        assert_eq!(seen(), (Vec::new(), true));
        let error = flannel_firewall::Error::Leftovers { chains: "X".into() };
        let failing = format!("error: the firewall rules are not in place: {error}");
        status.send_modify(|status| {
            status.in_place = false;
            status.failure = Some(flannel_firewall::Failure {
                since: std::time::SystemTime::now(),
                times: 1,
                errors: vec![error.into()],
            });
        });
        assert_eq!(seen(), (vec![failing], false));
        let left = flannel_firewall::Error::Leftovers { chains: "X".into() };
        let warning =
            format!("warning: rules that an earlier flannel may have left are not removed: {left}");
        // An ordinary host may have other people's rules where nobody here can look.
        let tables = "filter".into();
        let guess =
            flannel_firewall::Error::Unseen { family: flannel_core::address::Family::V4, tables };
        status.send_modify(|status| {
            (status.in_place, status.failure) = (true, None);
            status.leftovers = vec![guess.into(), left.into()];
        });
        assert_eq!(seen(), (vec![warning], true));
        for (asked, text) in [
            (true, "error: the firewall rules are not in place: no iptables"),
            (false, "warning: there are no forward rules: no iptables"),
        ] {
            book.send_replace(Rulebook::Missing { why: "no iptables".into(), asked });
            assert_eq!(seen(), (vec![text.into()], false));
        }
    }

    #[tokio::test]
    async fn the_room_for_leases_matters_where_nobody_else_gives_subnets() {
        let observer = Observer::default();
        let mut status = Status::default();
        (status.in_sync, status.live) = (true, true);
        let (_subnets, mut running) = network(status).await;
        // Three peers, in a network of three.
        running.config = flannel_core::Config::parse(
            r#"{"Network":"10.1.0.0/16","SubnetLen":24,"SubnetMin":"10.1.7.0","SubnetMax":"10.1.9.0"}"#,
        )
        .unwrap();
        let _guard = observer.running(running);
        observer.subnet_file_written();
        let mut snapshot = observer.snapshot();
        let taken = |snapshot: &Snapshot| {
            problems(snapshot)
                .iter()
                .filter(|problem| problem.text.contains("subnets are taken"))
                .count()
        };
        assert_eq!(taken(&snapshot), 1);
        snapshot.store = Some(StoreStatus { store: "etcd:x".into(), ..StoreStatus::default() });
        assert_eq!(taken(&snapshot), 1);
        // There `SubnetMin` and `SubnetMax` count for nothing.
        snapshot.store = Some(StoreStatus { store: "kube:x".into(), ..StoreStatus::default() });
        assert_eq!(taken(&snapshot), 0);
    }

    #[tokio::test]
    async fn errors_come_first_and_each_state_has_its_reason() {
        let texts = |snapshot: &Snapshot| -> Vec<String> {
            problems(snapshot).into_iter().map(|p| format!("{}: {}", p.severity, p.text)).collect()
        };
        let observer = Observer::default();
        assert_eq!(
            texts(&observer.snapshot()),
            ["error: no network runs: it has only just been started"]
        );
        observer.waits_for("holds no network config yet");
        assert_eq!(
            texts(&observer.snapshot()),
            ["error: no network runs: holds no network config yet"]
        );

        let mut status = Status::default();
        (status.in_sync, status.live) = (true, true);
        let _guard = observer.running(network(status).await.1);
        assert!(
            texts(&observer.snapshot())
                .iter()
                .any(|text| text.contains("the subnet file is not written yet"))
        );
        observer.subnet_file_written();
        let mut snapshot = observer.snapshot();
        let until = Some(snapshot.time + std::time::Duration::from_secs(60));
        snapshot.ownership = Ownership::Held { until };
        assert_eq!(texts(&snapshot), [""; 0]);
        assert_eq!(line(&snapshot), "ready: 10.1.1.0-24, 0 peers");
        snapshot.store = Some(StoreStatus {
            last_error: Some(("no route to host".into(), snapshot.time)),
            ..StoreStatus::default()
        });
        assert_eq!(texts(&snapshot), ["warning: the store does not answer: no route to host"]);
        let hint = |snapshot: &Snapshot| {
            problems(snapshot).pop().and_then(|problem| problem.hint).unwrap()
        };
        assert_eq!(hint(&snapshot), LOG);
        snapshot.store.as_mut().unwrap().store = "kube:https://10.96.0.1:443".into();
        assert!(hint(&snapshot).starts_with("kubectl -n kube-flannel logs"));
        let since = snapshot.time - std::time::Duration::from_secs(7);
        snapshot.ownership = Ownership::Lost { since, why: Loss::Unconfirmed };
        assert_eq!(
            texts(&snapshot),
            [
                "error: this node does not hold its lease 10.1.1.0-24: it ran out, and the store did not confirm a \
                 renewal",
                "warning: the store does not answer: no route to host"
            ]
        );
    }

    #[test]
    fn what_brings_a_store_back_is_a_command_for_its_kind() {
        for (store, command) in [
            (
                "dir:/srv/flannel?assign=static",
                "mount /srv/flannel || ls -la /srv/flannel # it is to be",
            ),
            (
                "etcd:http://127.0.0.1:2379",
                "systemctl restart etcd # on 127.0.0.1; which answer: etcdctl --endpoints http://127.0.0.1:2379 endpoint health",
            ),
            (
                "etcd:https://etcd-1:2379,https://[fd00::2]:2379",
                "systemctl restart etcd # on etcd-1, [fd00::2], where it does not run; which answer: etcdctl --endpoints https://etcd-1:2379,https://[fd00::2]:2379 endpoint health",
            ),
            ("kube:https://10.96.0.1", LOG),
        ] {
            assert!(bring_back(store).starts_with(command), "{}", bring_back(store));
        }
    }
}
