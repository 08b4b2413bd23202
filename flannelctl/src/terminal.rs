//! The terminal that text is written to: its width and colours. `flannelctl` and the lab use it.
//!
//! Only terminals get colours. Everything that a colour shows is also a word.

use std::io::IsTerminal;

/// The columns of a label, including the space after it.
const LABEL: usize = 11;
/// The minimum number of columns. Text for a narrower terminal has this width.
const NARROWEST: usize = 40;

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
    /// The width is that of the terminal, else the number in the variable `COLUMNS`, else 80; at
    /// least 40. There are colours if standard output is a terminal, unless `NO_COLOR` is not
    /// empty or `TERM` is `dumb`.
    pub fn of_stdout() -> Self {
        let terminal = std::io::stdout().is_terminal();
        let size = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        let given = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        let width = size.filter(|_| terminal).or(given).unwrap_or(80).max(NARROWEST);
        Self { width, colours: terminal && !unwanted }
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
        for (n, line) in self.wrap(text, LABEL).iter().enumerate() {
            let label = if n == 0 { label } else { "" };
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

    /// Wraps a text into lines that leave `indent` columns free. A longer word gets its own line.
    pub(crate) fn wrap(&self, text: &str, indent: usize) -> Vec<String> {
        let width = self.width.saturating_sub(indent).max(1);
        let mut lines = vec![String::new()];
        for word in text.split_whitespace() {
            let last = lines.last_mut().expect("the list starts with one line");
            let len = last.chars().count();
            if len > 0 && len + 1 + word.chars().count() > width {
                lines.push(word.to_owned());
            } else {
                if len > 0 {
                    last.push(' ');
                }
                last.push_str(word);
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
            lines.map(|line| line.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..head.len()).map(width).collect();
        let mut out = String::new();
        for (style, row) in all() {
            for n in 0..row.iter().map(Vec::len).max().unwrap_or(0) {
                let mut line = String::new();
                for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                    let text = cell.get(n).map_or("", String::as_str);
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

/// A rounded duration: `3 s`, `5 min`, `3 h 12 min`, `4 d 2 h`.
pub(crate) fn span(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min"),
        3600..86_400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
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
