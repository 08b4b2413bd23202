//! Asking a subnet manager.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::time::{Duration, SystemTime};

use flannel_core::lease::{Origin, View};
use flannel_core::subnet::live_view;
use flannel_core::testing::FakeSubnets;
use tokio::time::Instant;

#[tokio::test(start_paused = true)]
async fn a_live_set_is_waited_for_unless_the_store_is_away_and_an_older_one_is_there() {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    subnets.put("10.1.7.0-24", "192.0.2.7");
    let live = live_view(&subnets, Duration::from_secs(5)).await.unwrap();
    for (written, patience) in [(None, 5), (Some(SystemTime::UNIX_EPOCH), 0)] {
        subnets.set_view(View { leases: live.leases.clone(), origin: Origin::Cached { written } });
        let begin = Instant::now();
        let view = live_view(&subnets, Duration::from_secs(5)).await.unwrap();
        assert_eq!(view.leases.len(), 1);
        assert_eq!(begin.elapsed().as_secs(), patience, "{written:?}");
    }
}
