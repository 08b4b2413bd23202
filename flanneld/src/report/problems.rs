//! Problems, as sentences. A node is ready if and only if no problem is an error. So a node that is
//! not ready always has a complete list of reasons.

use std::fmt::Display;
use std::time::SystemTime;

use flannel_api::{Problem, SubnetsReport, texts};
use flannel_core::object::Key;
use flannel_core::status::{Failure, Rejection};
use flannel_core::subnet::{Loss, Ownership, StoreStatus};
use flannel_doctor::commands::{
    LOG, SET_CONFIG, change_address, for_advisory, is_kubernetes, localize, release, restore_store,
};
use libc::EEXIST;

use super::{refused_config, subnets_used};
use crate::observe::{NetworkSnapshot, Rulebook, Running, Snapshot};

/// Commands that show how a state passes, and that find a cause.
const WATCH: &str = "flannelctl watch";
const DOCTOR: &str = "flannelctl doctor";
/// The largest number of problems of one kind that are listed one by one.
const MOST: usize = 5;
/// A pod network is nearly full from this share on, in percent.
const NEARLY_FULL: u64 = 80;

/// All problems, errors first.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<Problem> {
    let (facts, mut found) = (&snapshot.facts, Found::default());
    match &snapshot.network {
        Some(network) => {
            found.of_lease(network, snapshot);
            let Running { config, lapsed, .. } = &*network.running;
            if !facts.subnet_file && !lapsed {
                let why = if config.require_encryption {
                    "the firewall rule of RequireEncryption comes first, and until it is in \
                     place, no route to another node is made either"
                } else {
                    "firewall rules come first"
                };
                found.error(format!("the subnet file is not written yet: {why}"), WATCH);
            }
            found.of_kernel(network);
            // Without a lease there are no rules. Before the subnet file they are awaited, which
            // takes long only if they are required.
            if (facts.subnet_file || config.require_encryption) && !lapsed {
                found.of_firewall(&network.running.rulebook.borrow());
            }
            found.of_encryption(network);
            found.of_leases(network);
            found.of_room(network, snapshot.store_name());
        }
        None => {
            let starts = || ("it has only just been started".to_owned(), WATCH.to_owned());
            let (reason, cure) = facts.waits_for.clone().unwrap_or_else(starts);
            found.error(format!("no network runs: {reason}"), cure);
        }
    }
    if let Some(store) = &snapshot.store {
        found.of_store(store);
    }
    if let Some(config) = &facts.waiting_config {
        let networks = texts(config.pod_networks()).join(", ");
        let text = format!("the network config has other pod networks now ({networks})");
        let covers = |network: &NetworkSnapshot| {
            network.running.config.networks.iter().all(|(family, old)| {
                config.networks[family].is_some_and(|new| new.network.covers(&old.network))
            })
        };
        let hint = if snapshot.network.as_ref().is_some_and(covers) {
            // Pods keep their addresses.
            "systemctl restart flanneld"
        } else {
            "systemctl restart flanneld # and the pods, which do not survive another pod \
             network"
        };
        found.warning(text, hint);
    }
    if let Some(network) = &snapshot.network {
        if let Some(refused) = refused_config(snapshot) {
            let text = "the store's network config is not used, the last good one is still used";
            found.warning(format!("{text}: {}", refused.reason), SET_CONFIG);
        }
        if let Some((why, cure)) = facts.waits_for.as_ref().filter(|_| !network.running.lapsed) {
            let text = "the network is due to be rebuilt, and stays as it is, because no other one \
                        can be built";
            found.warning(format!("{text}: {why}"), cure);
        }
        if let Some(why) = &facts.unfit_interface {
            let text = "the external interface has changed, the network stays as it is";
            let hint = format!("ip address show {}", network.running.iface.name);
            found.warning(format!("{text}: {why}"), hint);
        }
    }
    let Found(mut found) = found;
    for problem in &mut found {
        problem.hint = problem.hint.take().map(|hint| localize(hint, snapshot.store_name()));
    }
    // The sort is stable: within each severity the order above stays.
    found.sort_by_key(|problem| !problem.is_error());
    found
}

/// The first error; `None`: the node is ready.
pub(crate) fn first_error(snapshot: &Snapshot) -> Option<String> {
    problems(snapshot).into_iter().find(Problem::is_error).map(|problem| problem.text)
}

/// The shortest description: `ready: 10.1.5.0-24, 3 peers`, `not ready: …`.
pub(crate) fn line(snapshot: &Snapshot) -> String {
    match (&snapshot.network, first_error(snapshot)) {
        (Some(network), None) => {
            format!("ready: {}, {} peers", network.own(), network.status.peers)
        }
        (_, Some(error)) => format!("not ready: {error}"),
        (None, None) => "not ready".to_owned(),
    }
}

/// The command that restores the store.
fn restored(store: &StoreStatus) -> String {
    restore_store(&store.store, store.last_error.as_ref().map_or("", |(error, _)| error.as_str()))
}

/// The problems that were found.
#[derive(Default)]
struct Found(Vec<Problem>);

impl Found {
    fn error(&mut self, text: impl Into<String>, hint: impl Into<String>) {
        self.0.push(Problem::error(text).with_hint(hint));
    }

    fn warning(&mut self, text: impl Into<String>, hint: impl Into<String>) {
        self.0.push(Problem::warning(text).with_hint(hint));
    }

    fn of_lease(&mut self, network: &NetworkSnapshot, snapshot: &Snapshot) {
        let not_held = format!("this node does not hold its lease {}", network.own());
        let lapsed = network.running.lapsed;
        if let Ownership::Lost { why: Loss::Withdrawn(why), .. } = &snapshot.ownership {
            self.0.push(Problem::error(format!("{not_held}: {why}")));
            return;
        }
        if let Some((why, cure)) = snapshot.facts.waits_for.as_ref().filter(|_| lapsed) {
            let text = "it expired, and none is requested, because no network could be built";
            self.error(format!("{not_held}: {text}: {why}"), cure);
            return;
        }
        // The text has no age, because systemd is notified whenever the text changes.
        let mut age = String::new();
        let reason = match &snapshot.ownership {
            _ if lapsed => "it expired, and the store does not answer",
            Ownership::Held { .. } => return,
            Ownership::Lost { since, why: Loss::Unconfirmed } => {
                let ago = snapshot.time.duration_since(*since).unwrap_or_default().as_secs();
                age = format!("it expired {ago} s ago; ");
                "it expired, and the store did not confirm a renewal"
            }
            _ => "the store has not granted it, or another node holds it",
        };
        let repair = snapshot.store.as_ref().map_or_else(|| LOG.to_owned(), restored);
        let joint = if repair.contains(" # ") { "; " } else { " # " };
        let then =
            "when the store answers, the node gets its lease back, or reports its new holder";
        self.error(format!("{not_held}: {reason}"), format!("{repair}{joint}{age}{then}"));
    }

    fn of_kernel(&mut self, network: &NetworkSnapshot) {
        let status = &network.status;
        if let Some(error) = &status.kernel_error {
            self.error(format!("the kernel cannot be read or watched: {error}"), DOCTOR);
        }
        // A peer whose own data is wrong must not make other nodes unready.
        let own = network.own();
        let is_of_peer = |(key, _): &(&Key, &Failure)| match key {
            Key::Record(_, subnet) => own.iter().all(|own| own != *subnet),
            _ => false,
        };
        let others = |all: usize| match all - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let mut of_peers = status.failing.iter().filter(is_of_peer);
        if let Some((_, failure)) = of_peers.next() {
            let others = others(1 + of_peers.count());
            self.warning(format!("{}: {}{others}", failure.change, failure.error), LOG);
        }
        let failing = || status.failing.iter().filter(|failing| !is_of_peer(failing));
        if let Some((key, failure)) = failing().next() {
            let others = others(failing().count());
            let text = format!("the kernel refuses: {}: {}{others}", failure.change, failure.error);
            let hint = match key {
                _ if failure.error.is_denied() => {
                    "systemctl show -p CapabilityBoundingSet flanneld # it needs CAP_NET_ADMIN in \
                     this network namespace"
                }
                // A device of another kind, which is not ours.
                Key::Link(name) if failure.error.is(EEXIST) => &format!("ip link delete {name}"),
                _ => DOCTOR,
            };
            self.error(text, hint);
        }
        if !status.in_sync && status.kernel_error.is_none() && status.failing.is_empty() {
            let text = if status.live {
                "syncing the kernel with the leases"
            } else {
                "the leases are those of an earlier run, because the store has not listed them \
                 yet"
            };
            self.error(text, WATCH);
        }
    }

    fn of_firewall(&mut self, rulebook: &Rulebook) {
        let yet = "the firewall rules are not in place yet";
        let missing = |why: &dyn Display| format!("the firewall rules are not in place: {why}");
        match rulebook {
            Rulebook::Unwanted => {}
            Rulebook::Pending => self.error(yet, WATCH),
            Rulebook::Missing { why, cure, requested: true } => self.error(missing(why), *cure),
            // They are only the default, and many hosts need none.
            Rulebook::Missing { why, cure, requested: false } => {
                self.warning(format!("there are no forward rules: {why}"), *cure);
            }
            Rulebook::Kept(status) => {
                let status = status.borrow();
                match status.failure.as_ref().and_then(|failure| failure.errors.first()) {
                    Some(error) => self.error(missing(error), error.cure()),
                    None if status.in_place => {}
                    None => self.error(yet, WATCH),
                }
                if status.contested {
                    let text = "another program puts its rules before the jump to the chain \
                                FLANNEL-ENCRYPTION again and again: packets of pods may leave \
                                unencrypted in between";
                    let hint = "iptables -t mangle -S POSTROUTING; ip6tables -t mangle -S \
                                POSTROUTING # which program makes the first rule?";
                    self.error(text, hint);
                }
                let now = SystemTime::now();
                if status.dropped.unencrypted.is_recent(now) {
                    let text = "packets to pods of other nodes are dropped, because they would \
                                leave unencrypted";
                    self.warning(text, "flannelctl peers # which nodes have no encrypted offer?");
                }
                for error in status.leftovers.iter().filter(|error| !error.is_guess()) {
                    let text = "rules that an earlier flannel may have left are not removed";
                    self.warning(format!("{text}: {error}"), error.cure());
                }
            }
        }
    }

    fn of_encryption(&mut self, network: &NetworkSnapshot) {
        let Running { config, datapath, .. } = &*network.running;
        if config.require_encryption && datapath.encrypted.is_empty() {
            let text = format!(
                "the network config has RequireEncryption, and its backend {} does not encrypt: \
                 packets to pods of other nodes are dropped",
                config.backend.kind
            );
            let hint = "flannelctl config patch '{\"RequireEncryption\": false}' # or name a \
                        Backend that encrypts";
            self.error(text, hint);
        }
    }

    fn of_leases(&mut self, network: &NetworkSnapshot) {
        let status = &network.status;
        for (subnets, why) in status.rejected.iter().take(MOST) {
            let hint = match why {
                Rejection::Overlaps { .. }
                | Rejection::Contradicts { .. }
                | Rejection::ContradictsOwn(_) => {
                    "systemctl restart flanneld # on the later of the two nodes: every node \
                     accepts the earlier lease"
                }
                Rejection::NotItsOwn { .. } => {
                    "flannelctl lease list # that node publishes the MAC address of another one: \
                     is it a clone, or hostile?"
                }
                Rejection::OwnAddress(_) => &change_address(subnets),
                Rejection::Rejected(_) | Rejection::BadData(_) => {
                    "flannelctl lease list # which backend and address has that node?"
                }
                _ => &release(subnets),
            };
            self.warning(format!("the lease {subnets} is rejected: {why}"), hint);
        }
        if let Some(more @ 1..) = status.rejected.len().checked_sub(MOST) {
            self.warning(format!("{more} more leases are rejected"), "flannelctl peers");
        }
        for text in status.advisories.keys().take(MOST) {
            self.warning(text, for_advisory(text, network.peers()));
        }
    }

    fn of_room(&mut self, network: &NetworkSnapshot, store: Option<&str>) {
        let command = if is_kubernetes(store) { "kubectl delete node" } else { "lease release" };
        for SubnetsReport { family, total, used, free } in subnets_used(network, store) {
            if used.saturating_mul(100) >= total.saturating_mul(NEARLY_FULL) {
                self.warning(
                    format!("{used} of {total} {family} subnets are taken, {free} are free"),
                    format!(
                        "flannelctl lease list # {command} releases those of nodes that are gone; \
                         or enlarge the network"
                    ),
                );
            }
        }
    }

    fn of_store(&mut self, store: &StoreStatus) {
        if let Some((error, _)) = &store.last_error {
            let text = format!("the store does not answer: {error}");
            self.warning(text, restored(store));
        }
        for (key, reason) in store.skipped.iter().take(MOST) {
            let text = format!("{}: {key} is wrong: {reason}", store.store);
            let hint = match key.strip_prefix("node ") {
                Some(node) if reason.contains("annotations were removed") => {
                    format!("kubectl describe node {node} # and look at the log of its flannel pod")
                }
                _ => "flannelctl lease list".to_owned(),
            };
            self.warning(text, hint);
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::status::Status;

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    #[tokio::test]
    async fn requested_rules_that_are_not_in_place_make_a_node_not_ready() {
        let (status, live) = tokio::sync::watch::channel(flannel_firewall::Status::default());
        let (book, rulebook) = tokio::sync::watch::channel(Rulebook::Pending);
        let mut kernel = Status::default();
        (kernel.in_sync, kernel.live) = (true, true);
        let (_subnets, mut running) = network(kernel).await;
        running.rulebook = rulebook;
        let observer = Observer::default();
        let _guard = observer.running(running);
        observer.note(|facts| facts.subnet_file = true);
        let seen = || {
            let mut snapshot = observer.snapshot();
            snapshot.ownership = Ownership::Held { until: None };
            let metrics = crate::metrics::metrics(&snapshot, crate::metrics::Format::Text);
            let found = problems(&snapshot)
                .into_iter()
                .map(|p| format!("{}: {}", p.severity, p.text))
                .collect();
            (found, metrics.contains("\nflannel_firewall_in_place 1\n"))
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
                since: SystemTime::now(),
                times: 1,
                errors: vec![error.into()],
            });
        });
        assert_eq!(seen(), (vec![failing], false));
        let left = flannel_firewall::Error::Leftovers { chains: "X".into() };
        let warning =
            format!("warning: rules that an earlier flannel may have left are not removed: {left}");
        // A host may have rules of other programs that cannot be read.
        let tables = "filter".into();
        let guess =
            flannel_firewall::Error::Unseen { family: flannel_core::address::Family::V4, tables };
        status.send_modify(|status| {
            (status.in_place, status.failure) = (true, None);
            status.leftovers = vec![guess.into(), left.into()];
        });
        assert_eq!(seen(), (vec![warning], true));
        for (requested, text) in [
            (true, "error: the firewall rules are not in place: no iptables"),
            (false, "warning: there are no forward rules: no iptables"),
        ] {
            let cure = "cure";
            book.send_replace(Rulebook::Missing { why: "no iptables".into(), cure, requested });
            assert_eq!(seen(), (vec![text.into()], false));
        }
    }

    /// Another node chooses the data of its lease.
    #[tokio::test]
    async fn a_failing_command_for_a_peer_is_a_warning_and_one_for_this_node_an_error() {
        use flannel_core::kernel::KernelError;
        use flannel_core::object::{Change, Object, Record};

        let own = network(Status::default()).await.1.handle.lease.subnets;
        let own = own.iter().next().unwrap().to_string();
        let record = |subnet: &str| {
            Object::from(Record::new("extension", subnet.parse().unwrap(), "commands"))
        };
        let seen = async |subnets: &[&str]| -> Vec<String> {
            let mut status = Status::default();
            (status.live, status.settled) = (true, true);
            for subnet in subnets {
                let change = Change::Put(record(subnet));
                let failure = Failure::new(&change, None, KernelError::Other("it failed".into()));
                status.failing.insert(change.object().key(), failure);
            }
            let snapshot = crate::report::tests::snapshot(status).await;
            let of_commands = |problem: &Problem| problem.text.contains("it failed");
            let all = problems(&snapshot).into_iter().filter(of_commands);
            all.map(|problem| format!("{}: {}", problem.severity, problem.text)).collect()
        };
        let put = |subnet| format!("put record extension {subnet} commands: it failed");
        let (own, peers) = (own.as_str(), ["10.1.8.0/24", "10.1.9.0/24"]);
        assert_eq!(seen(&peers).await, [format!("warning: {} (and 1 more)", put(peers[0]))]);
        assert_eq!(seen(&[own]).await, [format!("error: the kernel refuses: {}", put(own))]);
        assert_eq!(seen(&[own, peers[0]]).await.len(), 2);
    }

    #[tokio::test]
    async fn required_encryption_without_an_encrypted_datapath_is_an_error() {
        for (required, encrypted, expected) in
            [(true, false, true), (true, true, false), (false, false, false)]
        {
            let (_subnets, mut running) = network(Status::default()).await;
            running.config.require_encryption = required;
            let device = encrypted.then(|| "flannel.1".parse().unwrap());
            running.datapath.encrypted = device.into_iter().collect();
            let observer = Observer::default();
            let _guard = observer.running(running);
            let found = problems(&observer.snapshot());
            let about = |p: &Problem| p.is_error() && p.text.contains("vxlan does not encrypt");
            assert_eq!(found.iter().any(about), expected, "{found:?}");
        }
    }

    #[tokio::test]
    async fn the_hint_about_an_address_of_this_node_names_the_lease_that_has_it() {
        let own = Rejection::OwnAddress([192, 0, 2, 1].into());
        let similar = Rejection::Rejected(own.to_string());
        let mut status = Status::default();
        status.rejected = [("10.1.7.0-24", &own), ("10.1.8.0-24", &own), ("10.1.9.0-24", &similar)]
            .map(|(key, why)| (key.parse().unwrap(), why.clone()))
            .into_iter()
            .collect();
        let observer = Observer::default();
        let _guard = observer.running(network(status).await.1);
        let hints = problems(&observer.snapshot()).into_iter();
        let hints = hints.filter(|problem| problem.text.ends_with("would come back here"));
        let hints: Vec<_> = hints.map(|problem| problem.hint.unwrap()).collect();
        for (hint, key) in hints.iter().zip(["10.1.7.0-24", "10.1.8.0-24"]) {
            assert!(
                hint.starts_with(&format!("flannelctl lease release --force '{key}'")),
                "{hint}"
            );
            assert!(hint.ends_with(", else give it another --public-ip"), "{hint}");
        }
        assert!(hints.len() == 3 && hints[2].starts_with("flannelctl lease list"), "{hints:?}");
    }

    #[tokio::test]
    async fn a_nearly_full_network_is_a_problem_unless_kubernetes_assigns_subnets() {
        let observer = Observer::default();
        let mut status = Status::default();
        (status.in_sync, status.live) = (true, true);
        let (_subnets, mut running) = network(status).await;
        // Three peers, in a network of three.
        running.config = flannel_core::Config::parse(
            r#"{"Network":"10.1.0.0/16","SubnetLen":24,
                "SubnetMin":"10.1.7.0","SubnetMax":"10.1.9.0"}"#,
        )
        .unwrap();
        let _guard = observer.running(running);
        observer.note(|facts| facts.subnet_file = true);
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
        // In Kubernetes `SubnetMin` and `SubnetMax` have no effect.
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
        let none =
            crate::error::Error::from(flannel_core::Error::NoConfig { location: "x".into() });
        observer.note(|facts| facts.waits_for = Some((none.to_string(), none.cure("etcd:x"))));
        assert_eq!(
            texts(&observer.snapshot()),
            ["error: no network runs: x holds no network config yet"]
        );
        let hint = |snapshot: &Snapshot| {
            problems(snapshot).pop().and_then(|problem| problem.hint).unwrap()
        };
        assert_eq!(hint(&observer.snapshot()), SET_CONFIG);

        let mut status = Status::default();
        (status.in_sync, status.live) = (true, true);
        let _guard = observer.running(network(status).await.1);
        assert!(
            texts(&observer.snapshot())
                .iter()
                .any(|text| text.contains("the subnet file is not written yet"))
        );
        observer.note(|facts| facts.subnet_file = true);
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
        assert_eq!(hint(&snapshot), LOG);
        snapshot.store.as_mut().unwrap().store = "kube:https://10.96.0.1:443".into();
        assert!(hint(&snapshot).starts_with("curl -k https://10.96.0.1:443/readyz"));
        let since = snapshot.time - std::time::Duration::from_secs(7);
        snapshot.ownership = Ownership::Lost { since, why: Loss::Unconfirmed };
        assert_eq!(
            texts(&snapshot),
            [
                "error: this node does not hold its lease 10.1.1.0-24: it expired, and the store \
                 did not confirm a renewal",
                "warning: the store does not answer: no route to host"
            ]
        );
    }
}
