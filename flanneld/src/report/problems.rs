//! Problems of the daemon. A node is ready if and only if no problem is an error. So a node that is
//! not ready always has a complete list of reasons.

use std::time::SystemTime;

use flannel_api::{
    LeaseLoss, Problem, ProblemCause, RejectionReport, Severity, SubnetsReport, texts,
};
use flannel_core::backend::{AddressDoubt, Advice, Datapath, ExternalInterface};
use flannel_core::object::Key;
use flannel_core::remedy::Trouble;
use flannel_core::status::{Advisory, Failure, Rejection};
use flannel_core::subnet::{Loss, Ownership, StoreKind, StoreStatus};
use flannel_core::{Config, Remedy};
use flannel_doctor::remedy::{
    first_rule, of_shared_address, one_vni, readdress, render, who_changes_rules,
};
use flannel_firewall::{Contested, Fault};
use libc::EEXIST;

use super::{refused_config, subnets_used};
use crate::observe::{FirewallRules, NetworkSnapshot, Running, Snapshot};

/// The largest number of problems of one kind that are listed one by one.
const MOST: usize = 5;
/// A pod network is nearly full from this share on, in percent.
const NEARLY_FULL: u64 = 80;

/// All problems, errors first.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<Problem> {
    let facts = &snapshot.facts;
    let mut found = Found::default();
    match &snapshot.network {
        Some(network) => found.of_network(network, snapshot),
        None => {
            let Trouble { text, remedy } = facts.waits_for.clone().unwrap_or_else(|| {
                Trouble::new("it has only just been started", Remedy::WatchStatus)
            });
            found.error(ProblemCause::NoNetwork { reason: text }, remedy);
        }
    }
    if let Some(store) = &snapshot.store {
        found.of_store(store);
    }
    if let Some(config) = &facts.waiting_config {
        found.of_waiting_config(config, snapshot.network.as_ref());
    }
    if let Some(network) = &snapshot.network {
        found.of_changes(network, snapshot);
        found.of_interface(&network.running);
    }
    // The sort is stable: within each severity the order above stays.
    found.0.sort_by_key(|found| found.severity);
    let deployment = snapshot.deployment();
    found
        .0
        .into_iter()
        .map(|found| {
            let hint = found.remedy.map(|remedy| render(&remedy, deployment));
            Problem { hint, ..Problem::new(found.severity, found.cause) }
        })
        .collect()
}

/// The first error, or `None` if the node is ready.
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

/// What makes the store answer again.
fn restored(store: &StoreStatus) -> Remedy {
    let failure = store.last_error.as_ref().map(|error| error.failure.clone());
    Remedy::RestoreStore { store: store.kind.clone(), failure: failure.unwrap_or_default() }
}

/// A problem with its remedy.
struct FoundProblem {
    severity: Severity,
    cause: ProblemCause,
    remedy: Option<Remedy>,
}

/// The problems that were found.
#[derive(Default)]
struct Found(Vec<FoundProblem>);

impl Found {
    fn error(&mut self, cause: ProblemCause, remedy: impl Into<Option<Remedy>>) {
        self.0.push(FoundProblem { severity: Severity::Error, cause, remedy: remedy.into() });
    }

    fn warning(&mut self, cause: ProblemCause, remedy: impl Into<Option<Remedy>>) {
        self.0.push(FoundProblem { severity: Severity::Warning, cause, remedy: remedy.into() });
    }

    fn of_network(&mut self, network: &NetworkSnapshot, snapshot: &Snapshot) {
        self.of_lease(network, snapshot);
        let Running { config, lapsed, .. } = &*network.running;
        let has_subnet_file = snapshot.facts.subnet_file;
        if !has_subnet_file && !lapsed {
            let encryption_first = config.require_encryption;
            self.error(ProblemCause::NoSubnetFile { encryption_first }, Remedy::WatchStatus);
        }
        self.of_kernel(network);
        // Without a lease there are no rules. Before the subnet file they are awaited, which takes
        // long only if they are required.
        if (has_subnet_file || config.require_encryption) && !lapsed {
            self.of_firewall(&network.running.firewall_rules.borrow());
        }
        self.of_encryption(network);
        self.of_leases(network);
        self.of_room(network, snapshot.store_kind());
    }

    fn of_lease(&mut self, network: &NetworkSnapshot, snapshot: &Snapshot) {
        let lease = network.own().to_string();
        let lapsed = network.running.lapsed;
        if let Ownership::Lost { why: Loss::Withdrawn(reason), .. } = &snapshot.ownership {
            let loss = LeaseLoss::Withdrawn { reason: reason.clone() };
            return self.error(ProblemCause::LeaseNotHeld { lease, loss }, None);
        }
        if let Some(Trouble { text, remedy }) = snapshot.facts.waits_for.as_ref().filter(|_| lapsed)
        {
            let loss = LeaseLoss::NoNetwork { reason: text.clone() };
            return self.error(ProblemCause::LeaseNotHeld { lease, loss }, remedy.clone());
        }
        let mut remedy = snapshot.store.as_ref().map_or(Remedy::ReadLog, restored);
        let loss = match &snapshot.ownership {
            _ if lapsed => LeaseLoss::Lapsed,
            Ownership::Held { .. } => return,
            Ownership::Lost { since, why: Loss::Unconfirmed } => {
                // The text of the problem has no age, because systemd is notified whenever that
                // text changes.
                let ago = snapshot.time.duration_since(*since).unwrap_or_default().as_secs();
                remedy = remedy.remark(format!("it expired {ago} s ago"));
                LeaseLoss::Unconfirmed
            }
            _ => LeaseLoss::NotGranted,
        };
        let remedy = remedy.remark(
            "when the store answers, the node gets its lease back, or reports its new holder",
        );
        self.error(ProblemCause::LeaseNotHeld { lease, loss }, remedy);
    }

    fn of_kernel(&mut self, network: &NetworkSnapshot) {
        let status = &network.status;
        if let Some(error) = &status.kernel_error {
            let error = error.to_string();
            self.error(ProblemCause::KernelUnreadable { error }, Remedy::ExamineNode);
        }
        // A peer whose own data is wrong must not make other nodes unready.
        let own = network.own();
        let is_of_peer = |key: &Key| match key {
            Key::Record(_, subnet) => own.iter().all(|own| own != *subnet),
            _ => false,
        };
        let mut of_peers = status.failing.iter().filter(|(key, _)| is_of_peer(key));
        if let Some((_, failure)) = of_peers.next() {
            let more = of_peers.count() as u64;
            let Failure { change, error, .. } = failure;
            let change = change.to_string();
            let error = error.to_string();
            self.warning(ProblemCause::PeerObjectRefused { change, error, more }, Remedy::ReadLog);
        }
        let mut others = status.failing.iter().filter(|(key, _)| !is_of_peer(key));
        if let Some((key, failure)) = others.next() {
            let more = others.count() as u64;
            let change = failure.change.to_string();
            let error = failure.error.to_string();
            let remedy = of_refusal(key, failure);
            self.error(ProblemCause::ObjectRefused { change, error, more }, remedy);
        }
        if !status.in_sync && status.kernel_error.is_none() && status.failing.is_empty() {
            let cause =
                if status.live { ProblemCause::Syncing } else { ProblemCause::LeasesFromCache };
            self.error(cause, Remedy::WatchStatus);
        }
    }

    fn of_firewall(&mut self, firewall_rules: &FirewallRules) {
        match firewall_rules {
            FirewallRules::Unwanted => {}
            FirewallRules::Pending => {
                self.error(ProblemCause::FirewallPending, Remedy::WatchStatus);
            }
            FirewallRules::Missing { why, remedy, requested } => {
                let error = why.clone();
                let remedy = remedy.clone();
                if *requested {
                    self.error(ProblemCause::FirewallFailed { error }, remedy);
                } else {
                    // They are only the default, and many hosts need none.
                    self.warning(ProblemCause::NoForwardRules { error }, remedy);
                }
            }
            FirewallRules::Kept(status) => self.of_kept_rules(&status.borrow()),
        }
    }

    fn of_kept_rules(&mut self, status: &flannel_firewall::Status) {
        match status.failure.as_ref().and_then(|failure| failure.errors.first()) {
            Some(error) => {
                let remedy = error.remedy();
                let error = error.to_string();
                self.error(ProblemCause::FirewallFailed { error }, remedy);
            }
            None if status.in_place => {}
            None => self.error(ProblemCause::FirewallPending, Remedy::WatchStatus),
        }
        if let Some(contest) = status.contest {
            self.of_contest(contest, status);
        }
        if status.dropped.unencrypted.is_recent(SystemTime::now()) {
            let remedy = Remedy::ListPeers.remark("which nodes have no encrypted offer?");
            self.warning(ProblemCause::UnencryptedDropped, remedy);
        }
        for error in status.leftovers.iter().filter(|error| !error.is_guess()) {
            let remedy = error.remedy();
            self.warning(ProblemCause::LeftoverRules { error: error.to_string() }, remedy);
        }
    }

    fn of_contest(&mut self, contest: Contested, status: &flannel_firewall::Status) {
        if contest == Contested::Place(Fault::Misplaced) {
            self.error(ProblemCause::FirewallContested, first_rule());
            return;
        }
        let found = status.last_repair.as_ref().map(|repair| &repair.found[..]).unwrap_or_default();
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        self.error(ProblemCause::FirewallChanged { found: found.join("; ") }, who_changes_rules());
    }

    fn of_encryption(&mut self, network: &NetworkSnapshot) {
        let Running { config, datapath, .. } = &*network.running;
        if config.require_encryption && datapath.encrypted.is_empty() {
            let backend = config.backend.kind.clone();
            let remedy = Remedy::PatchConfig("{\"RequireEncryption\": false}".to_owned())
                .remark("or name a Backend that encrypts");
            self.error(ProblemCause::BackendDoesNotEncrypt { backend }, remedy);
        }
    }

    fn of_leases(&mut self, network: &NetworkSnapshot) {
        let status = &network.status;
        for (subnets, why) in status.rejected.iter().take(MOST) {
            let remedy = match why {
                Rejection::Overlaps { .. }
                | Rejection::Contradicts { .. }
                | Rejection::ContradictsOwn(_) => Remedy::RestartDaemon
                    .remark("on the later of the two nodes: every node accepts the earlier lease"),
                Rejection::BelongsToAnother { .. } => Remedy::ListLeases.remark(
                    "that node publishes the MAC address or the WireGuard key of another one: is \
                     it a copy, or hostile?",
                ),
                Rejection::OwnAddress(_) => readdress(subnets),
                Rejection::Rejected(_) | Rejection::BadData(_) => {
                    Remedy::ListLeases.remark("which backend and address has that node?")
                }
                _ => Remedy::ReleaseLease(subnets.to_string()),
            };
            let lease = subnets.to_string();
            let rejection = RejectionReport::from(why);
            self.warning(ProblemCause::LeaseRejected { lease, rejection }, remedy);
        }
        if let Some(more @ 1..) = status.rejected.len().checked_sub(MOST) {
            let more = more as u64;
            self.warning(ProblemCause::MoreLeasesRejected { more }, Remedy::ListPeers);
        }
        for advisory in status.advisories.keys().take(MOST) {
            self.of_advisory(advisory, network);
        }
    }

    fn of_advisory(&mut self, advisory: &Advisory, network: &NetworkSnapshot) {
        match advisory {
            Advisory::SharedAddress { nodes, address, own } => {
                let remedy = of_shared_address(*address, network.peers().map(|peer| &**peer));
                let address = address.to_string();
                let cause = ProblemCause::SharedAddress { address, nodes: *nodes, own: *own };
                self.warning(cause, remedy);
            }
            Advisory::OfLease { subnets, advice } => {
                let remedy = match advice {
                    Advice::OtherVni { .. } => one_vni(),
                    Advice::OfAddress { .. } => readdress(subnets),
                    _ => Remedy::ListPeers,
                };
                let lease = subnets.to_string();
                let reason = advice.to_string();
                self.warning(ProblemCause::LeaseAdvisory { lease, reason }, remedy);
            }
            _ => {}
        }
    }

    fn of_room(&mut self, network: &NetworkSnapshot, store: &StoreKind) {
        for SubnetsReport { family, total, used, free } in subnets_used(network, store) {
            if used.saturating_mul(100) >= total.saturating_mul(NEARLY_FULL) {
                let cause = ProblemCause::NearlyFull { family, total, used, free };
                self.warning(cause, Remedy::FreeSubnets);
            }
        }
    }

    fn of_store(&mut self, store: &StoreStatus) {
        if let Some(error) = &store.last_error {
            let error = error.text.clone();
            self.warning(ProblemCause::StoreUnreachable { error }, restored(store));
        }
        for entry in store.skipped.iter().take(MOST) {
            let remedy = match &entry.wiped_node {
                Some(node) => Remedy::run(format!("kubectl describe node {node}"))
                    .remark("and look at the log of its flannel pod"),
                None => Remedy::ListLeases,
            };
            let cause = ProblemCause::StoreEntryWrong {
                store: store.store.clone(),
                key: entry.key.clone(),
                reason: entry.reason.clone(),
            };
            self.warning(cause, remedy);
        }
    }

    /// A config with other pod networks is used after a restart.
    fn of_waiting_config(&mut self, config: &Config, network: Option<&NetworkSnapshot>) {
        let covers = |network: &NetworkSnapshot| {
            network.running.config.networks.iter().all(|(family, old)| {
                config.networks[family].is_some_and(|new| new.network.covers(&old.network))
            })
        };
        let remedy = if network.is_some_and(covers) {
            // Pods keep their addresses.
            Remedy::RestartDaemon
        } else {
            Remedy::RestartDaemon.remark("and the pods, which do not survive another pod network")
        };
        let networks = texts(config.pod_networks());
        self.warning(ProblemCause::OtherPodNetworks { networks }, remedy);
    }

    /// Changes that a network that runs does not follow.
    fn of_changes(&mut self, network: &NetworkSnapshot, snapshot: &Snapshot) {
        if let Some(refused) = refused_config(snapshot) {
            let reason = refused.reason;
            self.warning(ProblemCause::ConfigNotUsed { reason }, Remedy::SetConfig);
        }
        let Running { lapsed, iface, .. } = &*network.running;
        if let Some(Trouble { text, remedy }) =
            snapshot.facts.waits_for.as_ref().filter(|_| !lapsed)
        {
            let reason = text.clone();
            self.warning(ProblemCause::RebuildBlocked { reason }, remedy.clone());
        }
        if let Some(reason) = snapshot.facts.unfit_interface.clone() {
            let remedy = Remedy::run(format!("ip address show {}", iface.name));
            self.warning(ProblemCause::InterfaceChanged { reason }, remedy);
        }
    }

    /// Properties of the external interface that make it less fit.
    fn of_interface(&mut self, running: &Running) {
        let Running { iface, datapath, .. } = running;
        if let Some(cause) = reduced_mtu(datapath, iface) {
            self.warning(cause, Remedy::run(format!("ip link show {}", iface.name)));
        }
        let isolated = iface.doubts.iter().find(|(_, doubt)| **doubt == AddressDoubt::Isolated);
        if let Some(address) = isolated.and_then(|(family, _)| iface.address[family]) {
            let interface = iface.name.to_string();
            let address = address.to_string();
            let remedy = Remedy::run("ip address").remark("name the right interface with --iface");
            self.warning(ProblemCause::InterfaceIsolated { interface, address }, remedy);
        }
    }
}

/// The problem that the external interface carries less than the config says, if it does.
pub(crate) fn reduced_mtu(datapath: &Datapath, iface: &ExternalInterface) -> Option<ProblemCause> {
    let configured = datapath.mtu_above(iface)?;
    Some(ProblemCause::MtuReduced {
        interface: iface.name.to_string(),
        configured,
        used: iface.mtu,
    })
}

/// What helps if the kernel refuses an object.
fn of_refusal(key: &Key, failure: &Failure) -> Remedy {
    match key {
        _ if failure.error.is_denied() => {
            Remedy::ShowCapabilities.remark("it needs CAP_NET_ADMIN in this network namespace")
        }
        // A device of another kind, which is not ours.
        Key::Link(name) if failure.error.is(EEXIST) => {
            Remedy::run(format!("ip link delete {name}"))
        }
        _ => Remedy::ExamineNode,
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::status::Status;
    use flannel_core::subnet::{LastError, StoreFailure};

    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    #[tokio::test]
    async fn requested_rules_that_are_not_in_place_make_a_node_not_ready() {
        let (status, live) = tokio::sync::watch::channel(flannel_firewall::Status::default());
        let (rules, firewall_rules) = tokio::sync::watch::channel(FirewallRules::Pending);
        let mut kernel = Status::default();
        kernel.in_sync = true;
        kernel.live = true;
        let (_subnets, mut running) = network(kernel).await;
        running.firewall_rules = firewall_rules;
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
        rules.send_replace(FirewallRules::Kept(live));
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
            status.in_place = true;
            status.failure = None;
            status.leftovers = vec![guess.into(), left.into()];
        });
        assert_eq!(seen(), (vec![warning], true));
        status.send_modify(|status| {
            status.leftovers.clear();
            status.contest = Some(Contested::Rules);
            status.last_repair = Some(flannel_firewall::Repair {
                at: SystemTime::now(),
                found: vec![flannel_firewall::Deviation {
                    object: "nftables table ip flannel-ipv4".into(),
                    fault: Fault::Missing,
                }],
            });
        });
        let fight = "error: another program changes the firewall rules again and again, which \
                     flannel then restores: nftables table ip flannel-ipv4: missing";
        assert_eq!(seen(), (vec![fight.to_owned()], true));
        status.send_modify(|status| status.contest = None);
        for (requested, text) in [
            (true, "error: the firewall rules are not in place: no iptables"),
            (false, "warning: there are no forward rules: no iptables"),
        ] {
            let remedy = Remedy::ReadLog;
            rules.send_replace(FirewallRules::Missing {
                why: "no iptables".into(),
                remedy,
                requested,
            });
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
            status.live = true;
            status.settled = true;
            for subnet in subnets {
                let change = Change::Put(record(subnet));
                let failure = Failure::new(&change, None, KernelError::Other("it failed".into()));
                status.failing.insert(change.object().key(), failure);
            }
            let snapshot = crate::report::tests::snapshot(status).await;
            let all = problems(&snapshot)
                .into_iter()
                .filter(|problem| problem.text.contains("it failed"));
            all.map(|problem| format!("{}: {}", problem.severity, problem.text)).collect()
        };
        let put = |subnet| format!("put record extension {subnet} commands: it failed");
        let own = own.as_str();
        let peers = ["10.1.8.0/24", "10.1.9.0/24"];
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
            assert_eq!(
                found.iter().any(|p| p.is_error() && p.text.contains("vxlan does not encrypt")),
                expected,
                "{found:?}"
            );
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
        status.in_sync = true;
        status.live = true;
        let (_subnets, mut running) = network(status).await;
        // Three peers, in a network of three.
        running.config = Config::parse(
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
        let of = |kind| StoreStatus::new("", kind);
        snapshot.store = Some(of(StoreKind::Etcd { endpoints: vec!["x".into()] }));
        assert_eq!(taken(&snapshot), 1);
        // In Kubernetes `SubnetMin` and `SubnetMax` have no effect.
        snapshot.store = Some(of(StoreKind::Kubernetes { url: "x".into() }));
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
        let remedy = none.remedy(&StoreKind::Other);
        observer.note(|facts| facts.waits_for = Some(Trouble::new(none.to_string(), remedy)));
        assert_eq!(
            texts(&observer.snapshot()),
            ["error: no network runs: x holds no network config yet"]
        );
        let hint = |snapshot: &Snapshot| {
            problems(snapshot).pop().and_then(|problem| problem.hint).unwrap()
        };
        assert_eq!(hint(&observer.snapshot()), "flannelctl config set FILE");

        let mut status = Status::default();
        status.in_sync = true;
        status.live = true;
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
        snapshot.store = Some(StoreStatus::default().with_last_error(Some(LastError {
            text: "no route to host".into(),
            failure: StoreFailure::Other,
            at: snapshot.time,
        })));
        assert_eq!(texts(&snapshot), ["warning: the store does not answer: no route to host"]);
        assert_eq!(hint(&snapshot), "# see the log of the program that embeds flannel");
        snapshot.is_embedded = false;
        assert_eq!(hint(&snapshot), "journalctl -u flanneld");
        let url = "https://10.96.0.1:443".into();
        snapshot.store.as_mut().unwrap().kind = StoreKind::Kubernetes { url };
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
