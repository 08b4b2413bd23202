//! Pauses between attempts. Each is about twice as long as the last one. They are random, so that
//! nodes that failed together do not retry together.

use std::time::Duration;

/// The pauses between attempts.
///
/// ```
/// use flannel_subnet::Backoff;
/// use std::time::Duration;
///
/// let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
/// assert!(backoff.pause() <= Duration::from_secs(1));
/// assert!(backoff.pause() <= Duration::from_secs(2));
/// ```
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// The first pause is at most `first`. Later ones grow up to `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next pause is as short as the first one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// The next pause: from half of the current length to all of it.
    pub fn pause(&mut self) -> Duration {
        let whole = self.next;
        self.next = (2 * whole).min(self.longest);
        whole.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        for longest in [1, 2, 4, 5, 5] {
            let pause = backoff.pause();
            assert!(
                pause <= Duration::from_secs(longest) && 2 * pause >= Duration::from_secs(longest)
            );
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_secs(1));
    }
}
