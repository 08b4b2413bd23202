//! The terminal that text is written to: its width and colours. `flannelctl` and the lab use it.
//!
//! Only terminals get colours. Everything that a colour shows is also a word.
//!
//! All output of both programs passes [`Terminal::print`] or [`print_error`]. They replace every
//! character that acts on a terminal, except for line feeds and the codes of [`Terminal::style`]. A
//! value from outside may have these too, so fields, cells and commands replace them before. This
//! also keeps tables aligned. A value in any other text needs [`inline`] or [`printable::line`].

use std::io::{self, IsTerminal, Write};

use flannel_options::printable::{self, inline};

/// The columns of a label, including the space after it.
const LABEL: usize = 11;
/// The minimum number of columns. Text for a narrower terminal has this width.
const NARROWEST: usize = 40;
/// The escape codes of [`Terminal::style`].
const CODES: [&str; 6] = ["\x1b[1m", "\x1b[32m", "\x1b[33m", "\x1b[1;31m", "\x1b[31m", "\x1b[0m"];

/// The properties of a terminal.
#[derive(Debug, Clone, Copy)]
pub struct Terminal {
    /// The number of columns, at least 40 if it comes from [`Terminal::of_stdout`].
    pub width: usize,
    /// Styled text gets escape codes.
    pub colours: bool,
}

/// The style of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// No escape codes.
    Plain,
    /// Bold, for labels and heads of tables.
    Bold,
    /// Green.
    Good,
    /// Yellow.
    Warning,
    /// Bold and red.
    Bad,
    /// Red without bold, for results that failed.
    Failed,
}

impl Terminal {
    /// The terminal of standard output.
    ///
    /// The width is the width of the terminal, else the number in the variable `COLUMNS`, else 80;
    /// at least 40. There are colours if standard output is a terminal, unless `NO_COLOR` is not
    /// empty or `TERM` is `dumb`.
    pub fn of_stdout() -> Self {
        let terminal = io::stdout().is_terminal();
        let size = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        let given = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let width = size.filter(|_| terminal).or(given).unwrap_or(80).max(NARROWEST);
        Self { width, colours: terminal && !unwanted }
    }

    /// Writes a page or JSON to standard output.
    ///
    /// # Errors
    /// The reader has closed the pipe, for example.
    pub fn print(&self, text: &str) -> io::Result<()> {
        write(&self.printable(text))
    }

    /// The text, in which only line feeds and the codes of [`Terminal::style`] act on the terminal.
    pub(crate) fn printable(&self, text: &str) -> String {
        let codes: &[&str] = if self.colours { &CODES } else { &[] };
        printable::page(text, codes)
    }

    /// Returns a text in a style; without colours, the text itself.
    pub fn style(&self, style: Style, text: &str) -> String {
        let code = match style {
            _ if !self.colours => return text.to_owned(),
            Style::Plain => return text.to_owned(),
            Style::Bold => "1",
            Style::Good => "32",
            Style::Warning => "33",
            Style::Bad => "1;31",
            Style::Failed => "31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }

    /// `label     text`. The text is wrapped to the right of the label.
    pub(crate) fn field(&self, label: &str, style: Style, text: &str) -> String {
        let mut out = String::new();
        let label = inline(label);
        for (n, line) in self.wrap(text, LABEL).iter().enumerate() {
            let label = if n == 0 { &*label } else { "" };
            // Padded before it is coloured, because colour codes have no width.
            out += &self.style(style, &format!("{label:<LABEL$}"));
            out += line;
            out.push('\n');
        }
        out
    }

    /// `repair: COMMAND` below a field's text. The command is not wrapped, so that it can be
    /// copied. A remark after `#` moves to further lines if the line is too long. A shell accepts
    /// them too.
    pub(crate) fn command(&self, word: &str, command: &str) -> String {
        let command = inline(command);
        let whole = format!("{:LABEL$}{word}: {command}\n", "");
        let Some((alone, remark)) =
            command.split_once(" # ").filter(|_| whole.chars().count() > self.width + 1)
        else {
            return whole;
        };
        let mut out = format!("{:LABEL$}{word}: {alone}\n", "");
        let indent = LABEL + word.len() + 2;
        for line in self.wrap(remark, indent + 2) {
            out += &format!("{:indent$}# {line}\n", "");
        }
        out
    }

    /// Wraps a text into printable lines that leave `indent` columns free. A longer word gets its
    /// own line.
    pub(crate) fn wrap(&self, text: &str, indent: usize) -> Vec<String> {
        let width = self.width.saturating_sub(indent).max(1);
        let mut lines = vec![String::new()];
        for word in text.split_whitespace().map(inline) {
            let last = lines.last_mut().expect("the list starts with one line");
            let len = last.chars().count();
            if len > 0 && len + 1 + word.chars().count() > width {
                lines.push(word.into_owned());
            } else {
                if len > 0 {
                    last.push(' ');
                }
                last.push_str(&word);
            }
        }
        lines
    }

    /// A table with a head. A cell may have several lines.
    pub(crate) fn table(&self, head: &[&str], rows: &[(Style, Vec<Vec<String>>)]) -> String {
        let head_row = (Style::Plain, head.iter().map(|text| vec![(*text).to_owned()]).collect());
        let all = || std::iter::once(&head_row).chain(rows);
        let width = |column: usize| {
            let lines = all().filter_map(|(_, row)| row.get(column)).flatten();
            lines.map(|line| inline(line).chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let mut out = String::new();
        for (style, row) in all() {
            for n in 0..row.iter().map(Vec::len).max().unwrap_or(0) {
                let mut line = String::new();
                for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                    let text = cell.get(n).map(|text| inline(text)).unwrap_or_default();
                    let gap = if column == 0 { "" } else { "  " };
                    line += &format!("{gap}{text:<width$}");
                }
                out += &self.style(*style, line.trim_end());
                out.push('\n');
            }
        }
        out
    }
}

/// Writes a message to standard error. A closed one is not an error.
pub fn print_error(text: &str) {
    let _ = io::stderr().write_all(printable::lines(text).as_bytes());
}

/// Writes printable text to standard output.
pub(crate) fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush())
}

/// A rounded duration: `3 s`, `5 min`, `3 h 12 min`, `4 d 2 h`.
pub(crate) fn span(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let minutes = seconds / 60;
    let hours = seconds / 3600;
    let days = seconds / 86_400;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min"),
        3600..86_400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// A rounded number of bytes: `512 B`, `1.5 KiB`, `3.0 GiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    // The unit belongs to the rounded number: 1023.96 KiB is 1.0 MiB.
    let mut number = bytes as f64;
    let mut unit = "B";
    let mut units = ["KiB", "MiB", "GiB", "TiB"].iter();
    while number >= 1023.95
        && let Some(next) = units.next()
    {
        number /= 1024.0;
        unit = *next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{number:.1} {unit}") }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
pub(crate) mod tests {
    use super::*;

    /// Compares a page of 80 and 120 columns with the files `pages/NAME_80.txt` and
    /// `pages/NAME_120.txt`. `UPDATE_PAGES=1` writes them. Only commands and rows of tables may be
    /// wider than the terminal.
    pub(crate) fn assert_page(name: &str, page: impl Fn(&Terminal) -> String) {
        for width in [80, 120] {
            let text = page(&Terminal { width, colours: false });
            let file = format!("{}/src/pages/{name}_{width}.txt", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("UPDATE_PAGES").is_some() {
                std::fs::write(&file, &text).unwrap();
            }
            let wide = |line: &&str| {
                line.chars().count() > width && !line.trim_start().starts_with("repair: ")
            };
            let wide: Vec<&str> = text
                .lines()
                .filter(wide)
                .filter(|line| !line.trim_start().starts_with("try: "))
                .collect();
            assert_eq!(wide, [""; 0], "{file}");
            assert_eq!(text, std::fs::read_to_string(&file).unwrap_or_default(), "{file}:\n{text}");
        }
    }

    #[test]
    fn bytes_have_a_fitting_unit() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1_048_575, "1.0 MiB"),
            (3 << 30, "3.0 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn text_is_wrapped_and_tables_are_aligned() {
        let terminal = Terminal { width: 30, colours: false };
        assert_eq!(
            terminal.field(
                "error",
                Style::Bad,
                "one two three four five a-very-long-word-that-does-not-fit"
            ),
            "error      one two three four\n           five\n           \
             a-very-long-word-that-does-not-fit\n"
        );
        let rows = [
            (Style::Plain, vec![vec!["a".to_owned(), "bcd".to_owned()], vec!["x".to_owned()]]),
            (Style::Plain, vec![vec![], vec!["yy".to_owned()]]),
        ];
        assert_eq!(terminal.table(&["H", "K"], &rows), "H    K\na    x\nbcd\n     yy\n");
        let bright = Terminal { width: 30, colours: true };
        assert_eq!(bright.style(Style::Good, "x"), "\x1b[32mx\x1b[0m");
        assert_eq!(bright.field("a", Style::Plain, "b"), "a          b\n");
    }

    #[test]
    fn a_value_cannot_act_on_the_terminal_or_forge_a_line() {
        let hostile = "a\x1b[2J\x1b[32m\x07\u{9b}\u{202e}\nb";
        let shown = "a\\u001b[2J\\u001b[32m\\u0007\\u009b\\u202e";
        let terminal = Terminal { width: 80, colours: true };
        let rows = [
            (Style::Plain, vec![vec![hostile.to_owned()], vec!["x".to_owned()]]),
            (Style::Plain, vec![vec!["y".to_owned()], vec!["z".to_owned()]]),
        ];
        let cell = format!("{shown}\\u000ab");
        let width = cell.len();
        for (page, expected) in [
            (terminal.table(&["H"], &rows), format!("H\n{cell}\ny\n")),
            (
                terminal.table(&["H", "K"], &rows),
                format!("{:width$}  K\n{cell}  x\n{:width$}  z\n", "H", "y"),
            ),
            (terminal.field("l", Style::Plain, hostile), format!("l          {shown} b\n")),
            (terminal.field(hostile, Style::Plain, ""), format!("{cell}\n")),
            (terminal.command("try", hostile), format!("           try: {cell}\n")),
        ] {
            assert_eq!(page, expected);
            assert_eq!(terminal.printable(&page), expected);
        }
    }

    #[test]
    fn only_styles_and_line_feeds_act_on_a_terminal_and_no_style_on_a_file() {
        use Style::{Bad, Bold, Failed, Good, Plain, Warning};
        let bright = Terminal { width: 80, colours: true };
        let plain = Terminal { width: 80, colours: false };
        for style in [Plain, Bold, Good, Warning, Bad, Failed] {
            let text = bright.style(style, "x\n");
            assert_eq!(bright.printable(&text), text);
            assert!(!plain.printable(&text).contains('\x1b'), "{style:?}");
        }
        assert_eq!(bright.printable("\x1b[H\x1b[2J\x07\n"), "\\u001b[H\\u001b[2J\\u0007\n");
    }

    #[test]
    fn printable_json_is_the_same_value() {
        let value = serde_json::json!({ "a\u{9b}\n": ["\x1b[2J\x7f\u{202e}\u{feff}\t\\"] });
        let terminal = Terminal { width: 80, colours: true };
        let text = terminal.printable(&value.to_string());
        assert!(text.is_ascii() && !text.contains(char::is_control), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn spans_are_rounded() {
        for (seconds, text) in [
            (-1.0, "0 s"),
            (59.9, "59 s"),
            (60.0, "1 min"),
            (3600.0, "1 h 0 min"),
            (86_399.0, "23 h 59 min"),
            (360_000.0, "4 d 4 h"),
        ] {
            assert_eq!(span(seconds), text);
        }
    }
}
