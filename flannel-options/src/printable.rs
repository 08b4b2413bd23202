//! Text that cannot act on a terminal. The programs print values from outside, such as the backend
//! type in a lease or the name of a process. Their writers can use any character.
//!
//! Each character is replaced by its JSON escape, such as `\u001b`. So JSON text keeps its value:
//! such a character occurs only inside its strings, except for line feeds.

use std::borrow::Cow;
use std::io::{self, Write};

/// Whether a character acts on a terminal, or hides or reorders other characters: controls (C0, DEL
/// and C1), marks and overrides of the writing direction, separators of lines, and characters
/// without a width.
fn is_active(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
        )
}

/// A value for a place within a line. Line feeds are replaced too, so that it cannot forge a line.
pub fn inline(text: &str) -> Cow<'_, str> {
    if !text.contains(is_active) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_active(c) { out += &format!("\\u{:04x}", u32::from(c)) } else { out.push(c) }
    }
    Cow::Owned(out)
}

/// A text as one line. It ends with a line feed, which may be there already.
pub fn line(text: &str) -> String {
    inline(text.strip_suffix('\n').unwrap_or(text)).into_owned() + "\n"
}

/// A text of several lines. It keeps all line feeds, so pass each value through [`inline`] before
/// you insert it.
pub fn lines(text: &str) -> String {
    page(text, &[])
}

/// Does what [`lines`] does, but keeps `codes` too, which are the escape codes of the program.
pub fn page(text: &str, codes: &[&str]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['\n', '\x1b']) {
        let (before, from) = rest.split_at(at);
        let own = codes.iter().chain(&["\n"]).find(|code| from.starts_with(**code));
        let (found, after) = from.split_at(own.map_or(1, |code| code.len()));
        out += &inline(before);
        match own {
            Some(code) => out.push_str(code),
            None => out.push_str(&inline(found)),
        }
        rest = after;
    }
    out + &inline(rest)
}

/// A writer of lines. Each write must be a whole line. It becomes one printable line.
#[derive(Debug)]
pub struct Lines<W>(pub W);

impl<W: Write> Write for Lines<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        self.0.write_all(line(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_act_or_hide_are_replaced() {
        for (text, expected) in [
            ("vxlan, ü → 日本 \\u001b \u{a0}", "vxlan, ü → 日本 \\u001b \u{a0}"),
            ("\x1b]0;x\x07", "\\u001b]0;x\\u0007"),
            ("a\nb\tc\r\0\x7f", "a\\u000ab\\u0009c\\u000d\\u0000\\u007f"),
            ("\u{80}\u{9b}2J\u{9f}", "\\u0080\\u009b2J\\u009f"),
            ("a\u{202e}b\u{2066}c\u{61c}\u{200f}", "a\\u202eb\\u2066c\\u061c\\u200f"),
            ("\u{200b}\u{2028}\u{2060}\u{feff}", "\\u200b\\u2028\\u2060\\ufeff"),
        ] {
            assert_eq!(inline(text), expected);
            assert_eq!(line(text), format!("{expected}\n"));
        }
    }

    #[test]
    fn a_page_keeps_line_feeds_and_the_given_codes() {
        let text = "\x1b[1ma\x1b[0m\n\n\x1b[1;31m\x1b[2J\x1b";
        let rest = "\\u001b[1;31m\\u001b[2J\\u001b";
        assert_eq!(page(text, &["\x1b[0m", "\x1b[1m"]), format!("\x1b[1ma\x1b[0m\n\n{rest}"));
        assert_eq!(lines(text), format!("\\u001b[1ma\\u001b[0m\n\n{rest}"));
    }

    #[test]
    fn each_write_is_one_line() {
        let mut writer = Lines(Vec::new());
        for text in ["a\nb\x1b\n", "c", "\n"] {
            writer.write_all(text.as_bytes()).unwrap();
        }
        assert_eq!(String::from_utf8(writer.0).unwrap(), "a\\u000ab\\u001b\nc\n\n");
    }
}
