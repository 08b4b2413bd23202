//! Random numbers that identify probes. A party that does not see a probe cannot forge its answer.

/// A random number of the system's generator.
pub(crate) fn token() -> u64 {
    getrandom::u64().expect("Linux has getrandom since 3.17, and /dev/urandom")
}
