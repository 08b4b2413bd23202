//! The counters of a process, and the file in which they outlive the process.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::counters::{Counters, Counts};

/// The size of the file, in bytes: a write of a part of a page is not cut when the process is
/// killed. Spaces follow the counts.
const SIZE: usize = 1024;

/// The longest time until a change is in the file.
const SAVE: Duration = Duration::from_secs(1);

/// The counters, and the file in which they are saved. Without a file they end with the process.
#[derive(Debug, Default)]
pub(crate) struct SavedCounters {
    pub(crate) counters: Counters,
    saved: Mutex<Option<Saved>>,
    /// The counters may have changed since the last save.
    is_dirty: AtomicBool,
    /// The thread that saves. No thread with packets waits for a disk.
    saver: OnceLock<Thread>,
}

#[derive(Debug)]
struct Saved {
    file: File,
    counts: Counts,
    /// The last write failed.
    has_failed: bool,
}

impl SavedCounters {
    /// Keeps the counts in a file. Continues with those that are there.
    ///
    /// # Errors
    /// The file cannot be opened or read, or the thread that saves cannot be started.
    pub(crate) fn open(path: &Path) -> io::Result<Arc<Self>> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let counts = if text.is_empty() {
            Counts::default()
        } else {
            serde_json::from_slice(&text).unwrap_or_else(|error| {
                crate::report(&format!("{}: {error}; the counts begin at 0", path.display()));
                Counts::default()
            })
        };
        let opened = Self::default();
        opened.counters.add_all(&counts);
        *opened.saved() = Some(Saved { file, counts, has_failed: false });
        let opened = Arc::new(opened);
        let of_thread = Arc::downgrade(&opened);
        let builder = std::thread::Builder::new().name("counts".into()).stack_size(64 << 10);
        let thread = builder.spawn(move || keep_saved(&of_thread))?;
        let _ = opened.saver.set(thread.thread().clone());
        Ok(opened)
    }

    /// Says that counters may have changed. The thread that saves them wakes up once for many
    /// calls.
    pub(crate) fn mark_changed(&self) {
        if !self.is_dirty.load(Ordering::Relaxed)
            && !self.is_dirty.swap(true, Ordering::AcqRel)
            && let Some(saver) = self.saver.get()
        {
            saver.unpark();
        }
    }

    /// Takes over the counts of another process whose file has fewer.
    pub(crate) fn continue_from(&self, counts: &Counts) {
        self.counters.raise(counts);
    }

    fn saved(&self) -> MutexGuard<'_, Option<Saved>> {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the counts to the file, and returns them.
    pub(crate) fn save(&self) -> Counts {
        let mut saved = self.saved();
        let now = self.counters.read();
        if let Some(Saved { file, counts, has_failed }) = &mut *saved
            && *counts != now
        {
            match write(file, &now) {
                Ok(()) => {
                    *counts = now;
                    *has_failed = false;
                }
                Err(error) => {
                    if !*has_failed {
                        crate::report(&format!("the counts cannot be saved: {error}"));
                    }
                    *has_failed = true;
                }
            }
        }
        now
    }
}

impl Drop for SavedCounters {
    fn drop(&mut self) {
        if let Some(saver) = self.saver.get() {
            saver.unpark();
        }
    }
}

/// Saves the counters while they change, until they are dropped.
fn keep_saved(counters: &Weak<SavedCounters>) {
    loop {
        let Some(now) = counters.upgrade() else { return };
        if now.is_dirty.load(Ordering::Acquire) {
            drop(now);
            // A change during the last save has woken it up already.
            let until = Instant::now() + SAVE;
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                std::thread::park_timeout(left);
            }
            let Some(now) = counters.upgrade() else { return };
            now.is_dirty.store(false, Ordering::Release);
            now.save();
        } else {
            drop(now);
            std::thread::park();
        }
    }
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
    fn a_file_is_written_once_a_second_however_much_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counts");
        let counters = SavedCounters::open(&path).unwrap();
        let begin = Instant::now();
        let mut texts = std::collections::BTreeSet::new();
        while begin.elapsed() < 5 * SAVE / 2 {
            add(&counters.counters.no_peer, 1);
            counters.mark_changed();
            texts.insert(std::fs::read(&path).unwrap());
        }
        // The empty file, and one after each second.
        let most = 1 + begin.elapsed().as_secs() as usize;
        assert!((2..=most).contains(&texts.len()), "{} writes", texts.len());
    }

    #[test]
    fn counts_continue_after_a_kill_and_after_damage_they_begin_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("counts");
        let counters = SavedCounters::open(&path).unwrap();
        add(&counters.counters.no_peer, u64::MAX - 1);
        let first = counters.save();
        add(&counters.counters.no_peer, 1);
        // The largest counts fit.
        let text = serde_json::to_string(&first).unwrap();
        assert!(text.len() + text.matches(':').count() * 19 <= SIZE, "{text}");
        // It is not dropped: the process is killed before it saves again.
        let next = SavedCounters::open(&path).unwrap();
        assert_eq!(next.save(), first);
        assert_eq!(first.no_peer, u64::MAX - 1);
        counters.save();
        assert_eq!(SavedCounters::open(&path).unwrap().save().no_peer, u64::MAX);
        std::fs::write(&path, "{").unwrap();
        let again = SavedCounters::open(&path).unwrap();
        add(&again.counters.expired, 7);
        again.save();
        assert_eq!(SavedCounters::open(&path).unwrap().save().expired, 7);
    }
}
