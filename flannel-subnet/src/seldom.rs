//! Log lines about an event that another program may cause all the time.

use std::sync::Mutex;
use std::time::Duration;

use crate::runtime::lock;

/// The time in which equal events share a line.
const QUIET: Duration = Duration::from_secs(3600);

/// Decides which events get a line: the first one, one with another text, and of equal ones one an
/// hour.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<Option<Line>>);

/// The last line, with the number of events since then.
#[derive(Debug)]
struct Line {
    text: String,
    at: Duration,
    more: u64,
}

impl Seldom {
    /// The number of equal events without a line since the last line, if this event gets one.
    pub(crate) fn line(&self, now: Duration, text: &str) -> Option<u64> {
        let mut last = lock(&self.0);
        if let Some(last) = last.as_mut().filter(|last| last.text == text && now < last.at + QUIET)
        {
            last.more += 1;
            return None;
        }
        let next = Line { text: text.to_owned(), at: now, more: 0 };
        let more = last.replace(next).filter(|last| last.text == text).map_or(0, |last| last.more);
        Some(more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_events_share_a_line_for_an_hour() {
        let seldom = Seldom::default();
        let at = |seconds, text| seldom.line(Duration::from_secs(seconds), text);
        assert_eq!(at(0, "disk full"), Some(0));
        assert_eq!((at(5, "disk full"), at(3599, "disk full")), (None, None));
        assert_eq!(at(3600, "disk full"), Some(2));
        assert_eq!((at(3601, "disk full"), at(3602, "read-only")), (None, Some(0)));
    }
}
