//! Texts for messages, and the hash of a text.

use std::borrow::Cow;

/// The largest number of characters of a value that a message quotes. A longer value is cut with
/// [`shorten`].
pub const MAX_VALUE_CHARS: usize = 120;

/// The largest number of characters of a reason. It is larger than the limit of a value, because a
/// reason may quote several values.
pub const MAX_REASON_CHARS: usize = 480;

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

/// The FNV-1a hash of a text. It detects every change of a single byte, and is the same in every
/// version, unlike the hash of the standard library.
pub fn fnv1a(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
