//! What is wrong, in sentences. The one thing to know: readiness is the absence of errors in this list, so that whoever
//! asks why a node is not ready gets the very reasons.

use flannel_core::{Disbelief, Status, StoreStatus};
use flannel_subnet::Ownership;
use serde::{Deserialize, Serialize};

use crate::observe::{NetworkSnapshot, Snapshot};
use crate::report::subnets_used;

/// So many of one kind are told one by one.
const MOST: usize = 5;
/// From this share on, in percent, a pod network is said to be nearly full.
const NEARLY_FULL: u64 = 80;

/// Something that is wrong, or worth knowing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Problem {
    /// `error`: the node is not ready; `warning`: it is.
    pub(crate) severity: String,
    /// A sentence without a full stop.
    pub(crate) text: String,
    /// What would help, where that is known.
    pub(crate) hint: Option<String>,
}

impl Problem {
    pub(crate) fn is_error(&self) -> bool {
        self.severity == "error"
    }

    fn error(text: impl Into<String>) -> Self {
        Self { severity: "error".to_owned(), text: text.into(), hint: None }
    }

    fn warning(text: impl Into<String>) -> Self {
        Self { severity: "warning".to_owned(), text: text.into(), hint: None }
    }

    fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

/// Everything that is wrong, errors first.
pub(crate) fn problems(snapshot: &Snapshot) -> Vec<Problem> {
    let mut found = Vec::new();
    match &snapshot.network {
        Some(network) => {
            found.extend(of_lease(network, snapshot));
            if !snapshot.subnet_file && !network.running.lapsed {
                found.push(Problem::error("the subnet file is not written yet: firewall rules come first"));
            }
            found.extend(of_kernel(network));
            found.extend(of_leases(&network.status));
            found.extend(of_room(network));
        }
        None => {
            let reason = snapshot.waits_for.as_deref().unwrap_or("it has only just been started");
            found.push(Problem::error(format!("no network runs: {reason}")));
        }
    }
    if let Some(store) = &snapshot.store {
        found.extend(of_store(store));
    }
    if let Some(config) = &snapshot.waiting_config {
        let networks: Vec<String> = config.pod_networks().map(|network| network.to_string()).collect();
        let text = format!("the network config has other pod networks now ({})", networks.join(", "));
        found.push(Problem::warning(text).hint("restart flanneld, and the pods, which do not survive that"));
    }
    let wrong = snapshot.store.as_ref().and_then(|store| store.wrong_config.as_ref());
    // Without a network the wait for a right one is told above.
    if let (Some(why), Some(_)) = (wrong.or(snapshot.refused_config.as_ref()), &snapshot.network) {
        let text = format!("the store's network config is not used, the last good one stays in force: {why}");
        found.push(Problem::warning(text).hint("put it right: flannelctl config set"));
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
    let reason = match snapshot.ownership {
        _ if network.running.lapsed => "it ran out, and the store does not answer".to_owned(),
        Ownership::Reserved | Ownership::For(_) => return None,
        Ownership::Nothing => "the store gave it to nobody, or to another".to_owned(),
        Ownership::Lapsed(since) => {
            let ago = snapshot.time.duration_since(since).unwrap_or_default().as_secs();
            format!("it ran out {ago} s ago, and the store did not confirm a renewal")
        }
    };
    let text = format!("this node does not hold its lease {lease}: {reason}");
    Some(
        Problem::error(text)
            .hint("make the store answer: then the node wins its lease back, or says who has it"),
    )
}

fn of_kernel(network: &NetworkSnapshot) -> Vec<Problem> {
    let status = &network.status;
    let mut found = Vec::new();
    if let Some(error) = &status.kernel_error {
        found.push(Problem::error(format!("the kernel cannot be read or watched: {error}")));
    }
    if let Some((_, failure)) = status.failing.iter().next() {
        let others = match status.failing.len() - 1 {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let text = format!("the kernel refuses: {}: {}{others}", failure.change, failure.error);
        let problem = Problem::error(text);
        // EPERM
        found.push(match failure.error.errno {
            1 => problem.hint("give flanneld CAP_NET_ADMIN in this network namespace"),
            _ => problem,
        });
    }
    if !status.in_sync && found.is_empty() {
        found.push(Problem::error(match status.live {
            true => "the kernel is being made equal to the leases",
            false => "the leases are those of an earlier run, since the store has not listed them yet",
        }));
    }
    found
}

fn of_leases(status: &Status) -> Vec<Problem> {
    let not_believed = |(subnets, why): (_, &Disbelief)| {
        let problem = Problem::warning(format!("the lease {subnets} is not believed: {why}"));
        match why {
            Disbelief::Overlaps { .. } | Disbelief::Contradicts { .. } => {
                problem.hint("stop the later of the two nodes: every node believes the earlier lease")
            }
            Disbelief::Rejected(_) => problem.hint("look which backend that node runs"),
            _ => problem,
        }
    };
    let mut found: Vec<Problem> = status.disbelieved.iter().take(MOST).map(not_believed).collect();
    if let Some(more) = status.disbelieved.len().checked_sub(MOST + 1) {
        found.push(
            Problem::warning(format!("{} more leases are not believed", more + 1)).hint("flannelctl peers"),
        );
    }
    found.extend(status.remarks.keys().take(MOST).map(Problem::warning));
    found
}

fn of_room(network: &NetworkSnapshot) -> Vec<Problem> {
    let nearly = |room: &crate::report::SubnetsReport| {
        room.used.saturating_mul(100) >= room.total.saturating_mul(NEARLY_FULL)
    };
    let tell = |room: crate::report::SubnetsReport| {
        let crate::report::SubnetsReport { family, total, used, free } = room;
        let text = format!("{used} of {total} {family} subnets are taken, {free} are free");
        Problem::warning(text).hint("release leases of nodes that are gone, or enlarge the pod network")
    };
    subnets_used(network).into_iter().filter(nearly).map(tell).collect()
}

fn of_store(store: &StoreStatus) -> Vec<Problem> {
    let mut found = Vec::new();
    if let Some((error, _)) = &store.last_error {
        found.push(Problem::warning(format!("the store does not answer: {error}")));
    }
    for (key, reason) in store.skipped.iter().take(MOST) {
        found.push(Problem::warning(format!("{}: {key} is skipped: {reason}", store.store)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::Observer;
    use crate::observe::tests::network;

    #[tokio::test]
    async fn errors_come_first_and_each_state_has_its_reason() {
        let texts = |snapshot: &Snapshot| -> Vec<String> {
            problems(snapshot).into_iter().map(|p| format!("{}: {}", p.severity, p.text)).collect()
        };
        let observer = Observer::default();
        assert_eq!(texts(&observer.snapshot()), ["error: no network runs: it has only just been started"]);
        observer.waits_for("holds no network config yet");
        assert_eq!(texts(&observer.snapshot()), ["error: no network runs: holds no network config yet"]);

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
        snapshot.ownership = Ownership::For(std::time::Duration::from_secs(60));
        assert_eq!(texts(&snapshot), [""; 0]);
        assert_eq!(line(&snapshot), "ready: 10.1.1.0-24, 0 peers");
        snapshot.store = Some(StoreStatus {
            last_error: Some(("no route to host".into(), snapshot.time)),
            ..StoreStatus::default()
        });
        assert_eq!(texts(&snapshot), ["warning: the store does not answer: no route to host"]);
        snapshot.ownership = Ownership::Lapsed(snapshot.time - std::time::Duration::from_secs(7));
        assert_eq!(
            texts(&snapshot),
            [
                "error: this node does not hold its lease 10.1.1.0-24: it ran out 7 s ago, and the store did not \
                 confirm a renewal",
                "warning: the store does not answer: no route to host"
            ]
        );
    }
}
