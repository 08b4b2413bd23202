//! The leases that a backend sees while it prepares a network.

use std::sync::Arc;
use std::time::SystemTime;

use flannel_core::Kernel;
use flannel_core::address::Dual;
use flannel_core::backend::{ExternalInterface, MemorySecrets, Node};
use flannel_core::lease::{Origin, View};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn leases_are_live_unless_the_store_does_not_answer_and_a_cache_exists() {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    subnets.put("10.1.7.0-24", "192.0.2.7");
    let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, Dual::default());
    let kernel: Arc<dyn Kernel> = Arc::new(FakeKernel::default());
    let secrets = MemorySecrets::default();
    let node = Node::new(&uplink, "", &kernel, &secrets, &subnets);
    let live = node.leases().await.unwrap();
    for (written, patience) in [(None, 5), (Some(SystemTime::UNIX_EPOCH), 0)] {
        subnets.set_view(View { leases: live.leases.clone(), origin: Origin::Cached { written } });
        let begin = Instant::now();
        let view = node.leases().await.unwrap();
        assert_eq!(view.leases.len(), 1);
        assert_eq!(begin.elapsed().as_secs(), patience, "{written:?}");
    }
}
