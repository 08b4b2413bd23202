//! Remedies for a store that does not answer, and the finding on one that is slow.

use std::time::Duration;

use flannel_core::subnet::{LockHolder, StoreFailure, StoreKind};
use flannel_core::{Error, Remedy};

use crate::finding::{Check, Finding};

/// A store that takes longer is slow.
pub const SLOW: Duration = Duration::from_secs(1);

/// What removes the cause of an error of a store of this kind, or of a network on it.
pub fn remedy_of(error: &Error, store: &StoreKind) -> Remedy {
    let failure = error.store_failure();
    if let StoreFailure::RivalHost { lease, reserved } = failure {
        let key = lease.to_string();
        return if reserved { Remedy::ReleaseReservation(key) } else { Remedy::ReleaseLease(key) };
    }
    let restore = || Remedy::RestoreStore { store: store.clone(), failure: failure.clone() };
    match error {
        Error::NoConfig { .. } | Error::Config { .. } | Error::Backend { .. } => Remedy::SetConfig,
        Error::OutOfSubnets { .. } => Remedy::FreeSubnets,
        Error::NotReady { .. } => Remedy::ListLeases.remark("has this node a subnet?"),
        Error::Refused { .. } if store.is_kubernetes() => restore(),
        Error::Store { .. } => restore(),
        _ => Remedy::ReadLog,
    }
}

/// The lock of the directory of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lock {
    /// No process holds it, or the store has none.
    Free,
    /// A process holds it; `None` if the kernel does not show which one.
    Held(Option<LockHolder>),
}

/// Returns a finding if the answer of a store `took` at least [`SLOW`]. Otherwise returns `None`.
/// `name` is its name. `lock` looks who holds the lock of its directory.
pub fn slow_store(
    name: &str,
    store: &StoreKind,
    took: Duration,
    lock: impl FnOnce() -> Lock,
) -> Option<Finding> {
    if took < SLOW {
        return None;
    }
    let lock = lock();
    let by = match &lock {
        Lock::Free => String::new(),
        Lock::Held(Some(holder)) => format!(": {holder} holds its lock"),
        Lock::Held(None) => ": another process holds its lock".to_owned(),
    };
    let text = format!("{name} does not answer within {} s{by}", SLOW.as_secs());
    let remedy = match (store, lock) {
        (StoreKind::Etcd { endpoints }, _) => {
            let endpoints = endpoints.join(",");
            Remedy::run(format!("etcdctl --endpoints {endpoints} endpoint status -w table"))
                .remark(
                    "is an etcd member down or slow? if not, the disk or the network of a member \
                     may be slow, or the network of this host",
                )
                .remark("if a DB SIZE is large: etcdctl defrag, one member at a time")
        }
        (StoreKind::Directory { .. }, Lock::Held(by)) => {
            Remedy::RestoreStore { store: store.clone(), failure: StoreFailure::Locked { by } }
        }
        _ => Remedy::ReadLog,
    };
    Some(Finding::warning(Check::Store, text).with_remedy(remedy))
}

#[cfg(test)]
mod tests {
    use flannel_api::Deployment;
    use flannel_core::subnet::StoreReason;

    use super::*;
    use crate::remedy::render;

    #[test]
    fn a_lease_that_a_rival_took_is_released() {
        for (reserved, command) in [
            (true, "flannelctl lease release '10.1.7.0-24' # if no other host has its public"),
            (false, "flannelctl lease release --force '10.1.7.0-24' # if that node is gone"),
        ] {
            let lease = "10.1.7.0-24".parse().unwrap();
            let reason = StoreReason::new("taken", StoreFailure::RivalHost { lease, reserved });
            let error = Error::Refused { store: "dir:/srv/flannel".into(), reason };
            let rendered = render(&remedy_of(&error, &StoreKind::Other), Deployment::Systemd);
            assert!(rendered.starts_with(command), "{rendered}");
        }
    }

    #[test]
    fn a_store_is_slow_from_a_second_on() {
        let etcd = StoreKind::Etcd { endpoints: vec!["http://a:2379".into()] };
        let directory = StoreKind::Directory { path: "/srv/flannel".into() };
        let found = |name: &str, store: &StoreKind, took, lock: Lock| {
            let found = slow_store(name, store, took, || lock)?;
            Some(format!("{} | {}", found.text, found.repair().unwrap_or_default()))
        };
        let soon = SLOW - Duration::from_millis(1);
        assert_eq!(found("etcd:http://a:2379", &etcd, soon, Lock::Free), None);
        let held = |name: &str| Lock::Held(Some(LockHolder { name: name.into(), pid: 4711 }));
        for (name, store, lock, expected) in [
            (
                "etcd:http://a:2379",
                &etcd,
                Lock::Free,
                "etcd:http://a:2379 does not answer within 1 s | etcdctl --endpoints http://a:2379 \
                 endpoint status -w table # is an etcd member down or slow? if not, the disk or \
                 the network of a member may be slow, or the network of this host; if a DB SIZE is \
                 large: etcdctl defrag, one member at a time",
            ),
            (
                "dir:/srv/flannel",
                &directory,
                held("flock"),
                "dir:/srv/flannel does not answer within 1 s: flock (process 4711) holds its lock \
                 | kill 4711 # it holds the lock of the store",
            ),
            (
                "dir:/srv/flannel",
                &directory,
                held("flannelctl"),
                "dir:/srv/flannel does not answer within 1 s: flannelctl (process 4711) holds its \
                 lock | iostat -x 1 3 # flannel itself holds the lock of the store: most likely \
                 its disk is slow",
            ),
            (
                "dir:/srv/flannel",
                &directory,
                Lock::Held(None),
                "dir:/srv/flannel does not answer within 1 s: another process holds its lock | \
                 fuser -v /srv/flannel/.lock # then end the process that holds the lock",
            ),
        ] {
            assert_eq!(found(name, store, SLOW, lock).as_deref(), Some(expected));
        }
    }
}
