//! Limits for repeated log messages.

use std::time::Duration;

/// Rate-limits repeated log messages: lets the first message, every change of the text, and one
/// repetition per hour pass.
#[derive(Debug, Default)]
pub struct LogRateLimiter {
    text: String,
    until: Duration,
    more: u64,
}

impl LogRateLimiter {
    /// Decides about a message at the time `now`, which is counted from any fixed moment. Returns
    /// `None` if the message must not be logged. Otherwise returns the number of equal messages
    /// that were suppressed since the last logged message.
    pub fn line(&mut self, now: Duration, text: &str) -> Option<u64> {
        if self.text == text && now < self.until {
            self.more += 1;
            return None;
        }
        let until = now + Duration::from_secs(3600);
        let last = std::mem::replace(self, Self { text: text.to_owned(), until, more: 0 });
        Some(if last.text == text { last.more } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_events_share_a_line_for_an_hour() {
        let mut limiter = LogRateLimiter::default();
        let mut at = |seconds, text| limiter.line(Duration::from_secs(seconds), text);
        assert_eq!(at(0, "disk full"), Some(0));
        assert_eq!((at(5, "disk full"), at(3599, "disk full")), (None, None));
        assert_eq!(at(3600, "disk full"), Some(2));
        assert_eq!((at(3601, "disk full"), at(3602, "read-only")), (None, Some(0)));
    }
}
