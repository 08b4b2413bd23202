//! Values in the attributes of messages.

use crate::netfilter::{Attributes, Messages};

/// Adds a number in network byte order.
pub(crate) fn number(message: &mut Messages, kind: u16, value: u32) -> &mut Messages {
    message.attr(kind, &value.to_be_bytes())
}

/// The value of the first attribute of the type `kind`.
pub(crate) fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    Attributes(attributes).find(|(found, _)| *found == kind).map(|(_, value)| value)
}

/// The text, without its terminating zero byte, in the first attribute of the type `kind`.
pub(crate) fn text_in(attributes: &[u8], kind: u16) -> Option<String> {
    let text = find(attributes, kind)?.split(|byte| *byte == 0).next()?;
    String::from_utf8(text.to_vec()).ok()
}

/// The number, in network byte order, in the first attribute of the type `kind`.
pub(crate) fn number_in(attributes: &[u8], kind: u16) -> Option<u32> {
    Some(u32::from_be_bytes(find(attributes, kind)?.try_into().ok()?))
}

/// The longest text of a comment in bytes. The kernel takes 256 bytes of user data.
const MOST: usize = 253;

/// User data in the format of `nft`: type 0 for a comment, length, text, and a zero byte. A longer
/// text than the kernel takes is cut.
pub(crate) fn comment(text: &str) -> Vec<u8> {
    let end = (0..=text.len().min(MOST)).rev().find(|end| text.is_char_boundary(*end));
    let text = &text[..end.unwrap_or_default()];
    let len = u8::try_from(text.len() + 1).expect("it was cut");
    [&[0, len], text.as_bytes(), &[0]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_comment_is_cut_between_characters() {
        assert_eq!(comment("abc"), *b"\0\x04abc\0");
        assert_eq!(comment(&"é".repeat(200)).len(), 252 + 3);
        assert_eq!(comment(&"e".repeat(254)).len(), 256);
    }
}
