//! Two hosts with one public address.

use std::sync::Arc;

use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, SubnetManager};

use super::{Fixture, attrs, clear, soon};
use crate::manager::{Identity, LocalManager};
use crate::registry::{HolderId, Registry};

/// A service manager starts both daemons again and again. The second host has no state directory,
/// and so a new holder ID at each start.
pub(super) async fn one_of_two_hosts_keeps_the_lease(fixture: &Fixture<'_>) {
    clear(fixture).await;
    (fixture.put_config)(r#"{"Network":"10.77.0.0/16"}"#);
    let manager = |registry: &Arc<dyn Registry>, holder| {
        let identity =
            Identity { holder: HolderId(holder), previous: None, local_addresses: Vec::new() };
        LocalManager::new(Arc::clone(registry), identity)
    };
    let name = format!("flannel-suite-{}-{:p}", std::process::id(), fixture);
    let cache = std::env::temp_dir().join(name);
    let first = || manager(&fixture.registry, 0xaa).with_cache(&cache);
    let holds = first();
    let lease = holds.acquire_lease(&attrs(1)).await.expect("a lease");
    let second = async |holder| {
        let taken = manager(&fixture.other, holder).acquire_lease(&attrs(1)).await;
        assert_eq!(taken.expect("a lease").subnets, lease.subnets, "by its address");
    };
    second(0xbb).await;
    let end = soon("the lease ends", holds.hold_lease(&lease)).await;
    assert!(matches!(&end, Ok(LeaseEnd::Taken { by }) if by.contains("00bb")), "{end:?}");
    drop(holds);
    for holder in [0xbb, 0xcc] {
        second(holder).await;
        let again = first().acquire_lease(&attrs(1)).await;
        assert!(matches!(again, Err(Error::Refused { .. })), "it stays there: {again:?}");
    }
    clear(fixture).await;
    first().acquire_lease(&attrs(1)).await.expect("the lease was released");
    clear(fixture).await;
    // A file that stays only wastes space.
    let _ = std::fs::remove_file(&cache);
}
