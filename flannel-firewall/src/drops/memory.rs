//! The output of `iptables-legacy-save`, kept for some time.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::address::{Dual, Family};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use crate::error::Error;
use crate::iptables::program::{Programs, Variant};

/// [`LegacyMemory::forget`] keeps output younger than this, so that requests start few processes.
const MIN_AGE: Duration = Duration::from_secs(1);
/// The time limit for a program.
const PATIENCE: Duration = Duration::from_secs(2);

/// A cache of the output of `iptables-legacy-save`, or of its error. It saves processes: each read
/// of the legacy tables starts one, and the kernel reports no changes. The default caches nothing.
#[derive(Debug, Default)]
pub struct LegacyMemory {
    keep: Duration,
    saved: Mutex<Dual<Saved>>,
}

/// The output for a family, and when it was read.
#[derive(Debug, Clone)]
struct Saved {
    at: Instant,
    output: Result<String, Arc<Error>>,
}

impl LegacyMemory {
    /// A cache whose entries are valid for `keep`. If `keep` is zero, nothing is cached.
    pub fn new(keep: Duration) -> Self {
        Self { keep, saved: Mutex::default() }
    }

    /// Forgets the output, unless it is younger than a second.
    ///
    /// # Cancel safety
    /// The call can be dropped: it forgets everything or nothing.
    pub async fn forget(&self) {
        let mut saved = self.saved.lock().await;
        for family in Family::BOTH {
            saved[family].take_if(|saved| saved.at.elapsed() >= MIN_AGE);
        }
    }

    /// The output and its age. Simultaneous calls share one process.
    pub(super) async fn save(
        &self,
        programs: &Programs,
        family: Family,
    ) -> Result<(Duration, String), Error> {
        let mut saved = self.saved.lock().await;
        if let Some(known) = &saved[family]
            && known.at.elapsed() < self.keep
        {
            let output = known.output.clone().map_err(Error::Again)?;
            return Ok((known.at.elapsed(), output));
        }
        let output = run_save(programs, family).await.map_err(Arc::new);
        saved[family] = Some(Saved { at: Instant::now(), output: output.clone() });
        Ok((Duration::ZERO, output.map_err(Error::Again)?))
    }
}

async fn run_save(programs: &Programs, family: Family) -> Result<String, Error> {
    let programs = Programs { variant: Variant::Legacy, ..programs.clone() };
    let tool = programs.find(family)?;
    timeout(PATIENCE, tool.save()).await.unwrap_or_else(|_| {
        Err(Error::Late { program: format!("{}-save", tool.name), seconds: PATIENCE.as_secs() })
    })
}

#[cfg(test)]
mod tests {
    use test_support::write_script;

    use super::*;

    /// Legacy programs that run these commands, and a file with a line for each run.
    fn programs(commands: &str) -> (tempfile::TempDir, Programs) {
        let dir = tempfile::tempdir().unwrap();
        let count = dir.path().join("count");
        for program in ["iptables-legacy-save", "iptables-legacy-restore"] {
            let text = format!("#!/bin/sh\necho once >> {}\n{commands}\n", count.display());
            write_script(&dir.path().join(program), &text);
        }
        let programs = Programs { path: Some(dir.path().into()), ..Programs::default() };
        (dir, programs)
    }

    #[tokio::test]
    async fn repeated_reads_start_one_process_even_if_it_fails() {
        let (dir, programs) = programs("echo broken >&2; exit 3");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        for _ in 0..5 {
            let error = memory.save(&programs, Family::V4).await.unwrap_err().to_string();
            assert!(error.contains("iptables-legacy-save") && error.contains("broken"), "{error}");
        }
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\n");
    }

    #[tokio::test]
    async fn output_younger_than_a_second_is_not_forgotten() {
        let (dir, programs) = programs("echo '*filter'");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        let (_, output) = memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(output, "*filter\n");
        // A time in the future, so that the test passes on slow machines.
        let looked = async |at| memory.saved.lock().await.v4.as_mut().unwrap().at = at;
        looked(Instant::now() + MIN_AGE).await;
        memory.forget().await;
        memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\n");
        looked(Instant::now() - 2 * MIN_AGE).await;
        memory.forget().await;
        memory.save(&programs, Family::V4).await.unwrap();
        assert_eq!(std::fs::read_to_string(dir.path().join("count")).unwrap(), "once\nonce\n");
    }

    #[tokio::test]
    async fn a_hanging_program_is_ended() {
        let (_dir, programs) = programs("exec sleep 600");
        let memory = LegacyMemory::new(Duration::from_secs(3600));
        let error = memory.save(&programs, Family::V4).await.unwrap_err().to_string();
        assert_eq!(error, "iptables-legacy-save did not end within 2 s");
    }
}
