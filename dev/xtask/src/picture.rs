//! Pictures of the lab's output, in SVG, made from the bytes that the program wrote to a terminal.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The bytes that the lab wrote, with the escape codes of its colours.
pub(crate) const SOURCE: &str = "docs/lab.ansi";

/// The size of a character cell, and the margin, in pixels.
const CELL: (f64, usize) = (8.4, 18);
const MARGIN: usize = 16;

/// The colours of a picture.
struct Theme {
    path: &'static str,
    background: &'static str,
    text: &'static str,
    good: &'static str,
    bad: &'static str,
}

const THEMES: [Theme; 2] = [
    Theme {
        path: "docs/lab-light.svg",
        background: "#f6f8fa",
        text: "#1f2328",
        good: "#116329",
        bad: "#a40e26",
    },
    Theme {
        path: "docs/lab-dark.svg",
        background: "#161b22",
        text: "#e6edf3",
        good: "#7ee787",
        bad: "#ff7b72",
    },
];

/// Runs the lab on a terminal. Returns the bytes that it wrote there.
pub(crate) fn take(lab: &Path) -> Result<String> {
    // `script` of util-linux gives it a terminal. Its messages of progress go elsewhere.
    let command = format!("{} 2>/dev/null", lab.display());
    let mut script = Command::new("script");
    script.args(["-qec", &command, "/dev/null"]).env_remove("NO_COLOR").env("TERM", "xterm");
    let output = script.output().context("script of util-linux is needed")?;
    ensure!(output.status.success(), "{}: {}", lab.display(), output.status);
    Ok(String::from_utf8(output.stdout).context("the lab's output")?.replace("\r\n", "\n"))
}

/// The pictures: their paths and contents.
pub(crate) fn render_all(source: &str) -> Vec<(String, String)> {
    THEMES.iter().map(|theme| (theme.path.to_owned(), render(source, theme))).collect()
}

fn render(source: &str, theme: &Theme) -> String {
    let lines: Vec<Vec<(Style, String)>> = source.trim_end().lines().map(spans).collect();
    let columns = lines.iter().map(|line| line.iter().map(|(_, text)| text.chars().count()).sum());
    let columns: usize = columns.max().unwrap_or(0);
    let width = (columns as f64 * CELL.0).ceil() as usize + 2 * MARGIN;
    let height = lines.len() * CELL.1 + 2 * MARGIN;
    let Theme { background, text, good, bad, .. } = theme;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n<style>\ntext {{ font: 14px ui-monospace, \
         SFMono-Regular, Menlo, Consolas, \"Liberation Mono\", monospace; fill: {text}; \
         white-space: pre }}\n.b {{ font-weight: bold }}\n.g {{ fill: {good} }}\n\
         .r {{ fill: {bad} }}\n</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"6\" fill=\"{background}\"/>\n"
    );
    for (n, line) in lines.iter().enumerate().filter(|(_, line)| !line.is_empty()) {
        let y = MARGIN + n * CELL.1 + 14;
        let mut column = 0;
        for (style, text) in line {
            let x = MARGIN as f64 + column as f64 * CELL.0;
            let cells = text.chars().count();
            column += cells;
            if text.trim().is_empty() {
                continue;
            }
            let class = style.class();
            // The length is given, because another font than the first has another width.
            let length = cells as f64 * CELL.0;
            let _ = writeln!(
                svg,
                "<text{class} x=\"{x:.1}\" y=\"{y}\" textLength=\"{length:.1}\" \
                 xml:space=\"preserve\">{}</text>",
                escape(text)
            );
        }
    }
    svg + "</svg>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Style {
    bold: bool,
    /// The class of a colour, if it has one.
    colour: Option<char>,
}

impl Style {
    fn class(self) -> String {
        let bold = self.bold.then_some('b');
        let names: Vec<String> = bold.into_iter().chain(self.colour).map(String::from).collect();
        if names.is_empty() { String::new() } else { format!(" class=\"{}\"", names.join(" ")) }
    }

    /// The style after an escape code such as `1;31`.
    fn after(mut self, codes: &str) -> Self {
        for code in codes.split(';') {
            match code {
                "" | "0" => self = Self::default(),
                "1" => self.bold = true,
                "31" => self.colour = Some('r'),
                "32" => self.colour = Some('g'),
                _ => {}
            }
        }
        self
    }
}

/// The parts of a line, each in one style.
fn spans(line: &str) -> Vec<(Style, String)> {
    let mut style = Style::default();
    let mut spans = Vec::new();
    let mut rest = line;
    let mut first = true;
    while !rest.is_empty() || first {
        first = false;
        let (text, after) = rest.split_once("\x1b[").unwrap_or((rest, ""));
        if !text.is_empty() {
            spans.push((style, text.to_owned()));
        }
        let Some((codes, after)) = after.split_once('m') else { break };
        style = style.after(codes);
        rest = after;
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_become_styles() {
        let plain = Style::default();
        let bold = Style { bold: true, ..plain };
        let good = Style { colour: Some('g'), ..plain };
        assert_eq!(
            spans("\x1b[1mHOST\x1b[0m  a \x1b[32m✓ ok\x1b[0m"),
            [(bold, "HOST".into()), (plain, "  a ".into()), (good, "✓ ok".into())]
        );
        assert_eq!(spans(""), []);
    }

    #[test]
    fn a_picture_holds_each_character_at_its_column() {
        let svg = render("a<b\n\n\x1b[1;31mno\x1b[0m & x\n", &THEMES[0]);
        assert!(svg.contains(">a&lt;b</text>"), "{svg}");
        assert!(svg.contains("<text class=\"b r\" x=\"16.0\" y=\"66\""), "{svg}");
        assert!(svg.contains("x=\"32.8\" y=\"66\" textLength=\"33.6\""), "{svg}");
    }
}
