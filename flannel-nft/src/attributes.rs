//! Values in the attributes of messages.

use flannel_netlink::netfilter::{Attributes, Messages};

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

/// User data in the format of `nft`: type 0 for a comment, length, text, and a zero byte. A text of
/// more than 254 bytes is cut.
pub(crate) fn comment(text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(254)];
    let len = u8::try_from(text.len() + 1).expect("it was cut");
    [&[0, len], text, &[0]].concat()
}
