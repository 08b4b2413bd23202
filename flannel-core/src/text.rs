//! Texts for messages.

use std::borrow::Cow;

/// The largest number of characters of a value that a message quotes. A longer value is cut with
/// [`shorten`].
pub const MAX_VALUE_CHARS: usize = 120;

/// The largest number of characters of a reason. It is larger than the limit of a value, because a
/// reason may quote several values.
pub const MAX_REASON_CHARS: usize = 480;

/// The first `most` characters of a text, and `…` if it has more. Another party may have written
/// the text, so that it has any size.
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
