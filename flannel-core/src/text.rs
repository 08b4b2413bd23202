//! Limits for texts in messages.

use std::borrow::Cow;

/// The largest number of characters of a value that a message quotes.
pub const QUOTED: usize = 120;

/// The largest number of characters of a reason in a message. A reason may quote several values.
pub const REASON: usize = 480;

/// The first `most` characters of a text, and `…` if it has more. Use it for a text that another
/// party has written, because such a text may have any size.
///
/// ```
/// use flannel_core::text::shorten;
///
/// assert_eq!(shorten("10.1.5.0-24", 120), "10.1.5.0-24");
/// assert_eq!(shorten("ééé", 2), "éé…");
/// ```
pub fn shorten(text: &str, most: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]).into(),
        None => text.into(),
    }
}
