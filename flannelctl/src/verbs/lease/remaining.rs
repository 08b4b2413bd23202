//! The times for which the store keeps the leases.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_subnet::{Entry, Registry};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

/// The time limit for the times of all leases.
const PATIENCE: Duration = Duration::from_secs(5);
/// The number of requests that wait for an answer at one time.
const AT_ONCE: usize = 64;

/// The time for which the store keeps each lease without a renewal. After an error or [`PATIENCE`]
/// the store is not asked again, because the list is worth more than these times.
pub(super) async fn remaining(
    registry: &Arc<dyn Registry>,
    entries: &[Entry],
) -> BTreeMap<Subnets, Duration> {
    let end = Instant::now() + PATIENCE;
    let mut held = entries.iter().filter_map(|entry| Some((entry.lease.subnets, entry.holder?)));
    let mut asked = JoinSet::new();
    let mut all = BTreeMap::new();
    loop {
        while asked.len() < AT_ONCE
            && let Some((subnets, holder)) = held.next()
        {
            let registry = Arc::clone(registry);
            asked.spawn(async move { (subnets, registry.remaining(&subnets, holder).await) });
        }
        match timeout_at(end, asked.join_next()).await {
            Ok(Some(Ok((subnets, Ok(left))))) => all.extend(left.map(|left| (subnets, left))),
            _ => return all,
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_subnet::{HolderId, LeaseGrant, MemoryRegistry};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_distant_store_tells_the_times_of_5000_leases() {
        const LEASES: u64 = 5000;
        let ttl = Duration::from_secs(86_400);
        let memory = MemoryRegistry::new();
        for n in 0..LEASES {
            let subnets = format!("10.{}.{}.0-24", n / 256, n % 256).parse().unwrap();
            let grant = LeaseGrant { holder: HolderId(n + 1), ttl };
            memory.create(&subnets, &Default::default(), Some(grant)).await.unwrap();
        }
        let entries = memory.list().await.unwrap().entries;
        // One after the other, the answers would take 100 seconds.
        memory.set_reply_delay(Duration::from_millis(20));
        let registry: Arc<dyn Registry> = Arc::new(memory.clone());
        let begin = Instant::now();
        assert_eq!(remaining(&registry, &entries).await.len() as u64, LEASES);
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());

        memory.set_reply_delay(PATIENCE * 2);
        assert_eq!(remaining(&registry, &entries).await.len(), 0);
        memory.set_outage(true);
        let begin = Instant::now();
        memory.set_reply_delay(Duration::ZERO);
        assert_eq!((remaining(&registry, &entries).await.len(), begin.elapsed().as_secs()), (0, 0));
    }
}
