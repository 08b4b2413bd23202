//! Changes by other processes are reported. Changes by this process are not.

use super::*;
use crate::kernel::{Changes, Invalidation, KernelEvent};
use crate::object::Key;

/// Collects invalidations until `done` returns true. Panics if none arrives for 60 s.
async fn listen(
    changes: &mut dyn Changes,
    mut done: impl FnMut(&Invalidation) -> bool,
) -> Vec<Invalidation> {
    let mut received = Vec::new();
    loop {
        let next = tokio::time::timeout(std::time::Duration::from_secs(60), changes.next()).await;
        let invalidation = next.unwrap_or_else(|_| panic!("nothing more came after {received:?}"));
        let invalidation = invalidation.expect("the stream goes on");
        received.push(invalidation.clone());
        if done(&invalidation) {
            return received;
        }
    }
}

pub(super) async fn only_changes_by_others_are_reported(fixture: &Fixture<'_>) {
    let footprint = footprint(fixture.uplink);
    let base = [device(Family::V4, 1, fixture.uplink), device(Family::V6, 2, fixture.uplink)]
        .map(Object::from);
    apply(fixture, &puts(&base));
    let mut changes = fixture.kernel.changes().expect("a listener");
    for (family, n) in [(Family::V4, 1), (Family::V6, 2)] {
        let objects = &one_of_each(family, n, fixture.uplink)[1..];
        let unattributed = |o: &Object| matches!(o, Object::Fdb(_));
        let ours: Vec<Change> =
            objects.iter().filter(|o| !unattributed(o)).cloned().map(Change::Put).collect();
        apply(fixture, &ours);
        for object in objects.iter().rev() {
            let outcomes = fixture.other.apply(&footprint, &[Change::Delete(object.clone())]);
            assert_eq!(outcomes, [Outcome::Done], "{object}");
        }
        let last = objects.first().expect("objects").key();
        let received =
            listen(&mut *changes, |invalidation| mentions(invalidation, &last, true)).await;
        for object in objects.iter().filter(|o| !unattributed(o)) {
            let gone =
                received.iter().any(|invalidation| mentions(invalidation, &object.key(), true));
            // The kernel deletes routes by a nexthop object with it, and reports only some of them.
            let implied = matches!(object, Object::Route(Route { via: Via::Nexthop(_), .. }));
            assert!(gone || implied, "{object} was deleted by another: {received:?}");
            let here =
                received.iter().any(|invalidation| mentions(invalidation, &object.key(), false));
            // The kernel reports an IPv6 address a second time, later and without an author.
            let late = matches!(object, Object::Addr(addr) if addr.address.is_ipv6());
            assert!(!here || late, "{object} was put by ourselves: {received:?}");
        }
        let theirs = Neigh { link: link(n), address: ip(family, 9), mac: mac(9) };
        assert!(fixture.other.apply(&footprint, &[Change::Put(theirs.into())])[0].is_done());
        let want = KernelEvent::Present(theirs.into());
        listen(
            &mut *changes,
            |event| matches!(event, Invalidation::Objects(all, _) if all.contains(&want)),
        )
        .await;
    }
    assert!(fixture.other.apply(&footprint, &[Change::Delete(base[0].clone())])[0].is_done());
    listen(
        &mut *changes,
        |invalidation| matches!(invalidation, Invalidation::Link(name) if *name == link(1)),
    )
    .await;
    clear(fixture);
}

fn mentions(invalidation: &Invalidation, key: &Key, gone: bool) -> bool {
    let Invalidation::Objects(reports, _) = invalidation else { return false };
    reports.iter().any(|report| match report {
        KernelEvent::Failed(..) => false,
        KernelEvent::Deleted(k) => gone && k == key,
        report => !gone && report.key() == *key,
    })
}
