//! The source check where the kernel moves the packets, with the packets that it dropped.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use flannel_core::Result;
use flannel_core::kernel::{Annex, Changes, KernelError, Traffic};
use flannel_core::object::{Change, Key, Record};
use flannel_source_check::SourceCheck;

use crate::refuse;
use crate::traffic::Drops;

/// The name of the annex. Its table of nf_tables is `flannel-udp-sources`.
pub(crate) const NAME: &str = "udp-sources";
/// The reason of dropped packets. The kernel does not tell whether a node has the source address.
const REASON: &str = "foreign";

/// The check of sources. Clones are the same one.
#[derive(Debug, Clone)]
pub(crate) struct Sources {
    pub(crate) check: SourceCheck,
    drops: Arc<Mutex<Drops>>,
}

impl Default for Sources {
    fn default() -> Self {
        Self { check: SourceCheck::new(NAME), drops: Arc::default() }
    }
}

impl Sources {
    /// Checks that the kernel can check sources. Blocks.
    pub(crate) fn may_check(&self) -> Result<()> {
        self.check.may_check().map_err(|error| {
            refuse(format!(
                "the kernel cannot check the sources of packets: {error}: load the modules of \
                 nf_tables (modprobe nf_tables), let a process move the packets (\"Path\": \
                 \"process\"), or do not check them (\"SourceCheck\": false)"
            ))
        })
    }

    fn traffic_at(&self, dropped: u64, now: Instant) -> Traffic {
        let mut drops = self.drops.lock().unwrap_or_else(PoisonError::into_inner);
        let problem = drops.note(REASON, dropped, now).then(|| {
            let text = "packets that do not come from the node of their source address arrive at \
                        the tunnel, and are dropped: a host forges them, the lease of the node is \
                        not accepted here, or a NAT changes the address of the node"
                .to_owned();
            let patch = r#"flannelctl config patch '{"Backend": {"Path": "process"}}'"#;
            let command = format!("{patch} # if a NAT does it");
            (text, command)
        });
        Traffic {
            dropped: [(REASON, dropped)].into(),
            problems: problem.into_iter().collect(),
            ..Traffic::default()
        }
    }
}

impl Annex for Sources {
    fn name(&self) -> &'static str {
        self.check.name()
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        self.check.records()
    }

    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        self.check.apply(changes)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        self.check.changes()
    }

    fn wait(&self, key: &Key, timeout: Duration) -> Result<(), KernelError> {
        self.check.wait(key, timeout)
    }

    fn traffic(&self) -> Option<Traffic> {
        Some(self.traffic_at(self.check.dropped()?, Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_are_dropped_for_long_are_a_problem() {
        let (sources, start) = (Sources::default(), Instant::now());
        let at = |seconds: u64, dropped: u64| {
            let traffic = sources.traffic_at(dropped, start + Duration::from_secs(seconds));
            assert_eq!(traffic.dropped, [(REASON, dropped)].into());
            traffic.problems.len()
        };
        assert_eq!([at(0, 5), at(1, 6), at(20, 7), at(40, 8), at(60, 8)], [0, 0, 0, 1, 1]);
        assert_eq!(at(1000, 8), 0, "it is over");
    }
}
