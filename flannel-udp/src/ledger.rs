//! The counters of a process, and the file that keeps them when it is killed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::counters::{Counters, Counts};

/// The size of the file, in bytes: a write of a part of a page is not cut when the process is
/// killed. Spaces follow the counts.
const SIZE: usize = 1024;

/// The counters, and the file in which they are. Without a file they end with the process.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) counters: Counters,
    saved: Mutex<Option<Saved>>,
}

#[derive(Debug)]
struct Saved {
    file: File,
    counts: Counts,
}

impl Ledger {
    /// Keeps the counts in a file. Continues with those that are there.
    ///
    /// # Errors
    /// The file cannot be opened or read.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let ledger = Self::default();
        let counts = if text.is_empty() { Ok(Counts::default()) } else { read(&text) };
        let counts = counts.unwrap_or_else(|error| {
            crate::report(&format!("{}: {error}; the counts begin at 0", path.display()));
            Counts::default()
        });
        ledger.counters.add_all(&counts);
        *ledger.saved() = Some(Saved { file, counts });
        Ok(ledger)
    }

    fn saved(&self) -> MutexGuard<'_, Option<Saved>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the counts to the file, and returns them.
    pub(crate) fn save(&self) -> Counts {
        let mut saved = self.saved();
        let now = self.counters.read();
        if let Some(Saved { file, counts }) = &mut *saved
            && *counts != now
        {
            *counts = now;
            if let Err(error) = write(file, &now) {
                crate::report(&format!("the counts are not kept any more: {error}"));
                *saved = None;
            }
        }
        now
    }
}

fn read(text: &[u8]) -> serde_json::Result<Counts> {
    serde_json::from_slice(text)
}

fn write(file: &File, counts: &Counts) -> io::Result<()> {
    let mut text = serde_json::to_vec(counts)?;
    text.resize(SIZE, b' ');
    file.write_all_at(&text, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::add;

    #[test]
    fn counts_continue_after_a_kill_and_after_damage_they_begin_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counts");
        let ledger = Ledger::open(&path).unwrap();
        add(&ledger.counters.no_peer, u64::MAX - 1);
        let first = ledger.save();
        add(&ledger.counters.no_peer, 1);
        // The largest counts fit.
        let text = serde_json::to_string(&first).unwrap();
        assert!(text.len() + text.matches(':').count() * 19 <= SIZE, "{text}");
        // It is not dropped: the process is killed before it saves again.
        let next = Ledger::open(&path).unwrap();
        assert_eq!((next.save(), first.no_peer), (first, u64::MAX - 1));
        ledger.save();
        assert_eq!(Ledger::open(&path).unwrap().save().no_peer, u64::MAX);
        std::fs::write(&path, "{").unwrap();
        let again = Ledger::open(&path).unwrap();
        add(&again.counters.expired, 7);
        again.save();
        assert_eq!(Ledger::open(&path).unwrap().save().expired, 7);
    }
}
