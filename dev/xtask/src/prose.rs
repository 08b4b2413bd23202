//! The language of all texts: the width of lines, phrases that are not plain English, and the
//! length of documents.

use anyhow::Result;

use crate::tree::Tree;

/// The columns of a line.
const WIDTH: usize = 100;

/// Phrases that are not plain English, with their replacements.
const PHRASES: [(&str, &str); 8] = [
    ("the one thing to know", "say it, without an announcement"),
    ("mend", "repair"),
    ("mended", "repaired"),
    ("mends", "repairs"),
    ("whoever", "the process that, the user that"),
    ("that which", "the noun"),
    ("put right", "repair"),
    ("what is wanted", "the desired object"),
];

/// Documents, with the maximum numbers of their lines and words.
const LENGTHS: [(&str, usize, usize); 3] = [
    ("README.md", 150, 1200),
    ("ARCHITECTURE.md", usize::MAX, 1500),
    ("CHANGELOG.md", 60, usize::MAX),
];

/// All problems, one per line: file, line number, problem.
pub(crate) fn problems(tree: &Tree) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    for path in tree.ending(&[".rs", ".md", ".sh", ".toml", ".yml", ".yaml"]) {
        let text = tree.read(path)?;
        let wide = match path.rsplit('.').next() {
            Some("rs") => wide_lines(&text, |_| false),
            Some("md") => wide_lines(&text, may_be_wide()),
            _ => Vec::new(),
        };
        problems.extend(wide.iter().map(|(line, columns)| {
            format!("{path}:{line}: {columns} columns, expected at most {WIDTH}")
        }));
        // This file contains all phrases.
        if path != "dev/xtask/src/prose.rs" {
            problems.extend(phrases(&text).iter().map(|(line, phrase, plain)| {
                format!("{path}:{line}: \"{phrase}\"; in plain English: {plain}")
            }));
        }
    }
    for (path, lines, words) in LENGTHS {
        let text = tree.read(path)?;
        let has_lines = text.lines().count();
        let has_words = text.split_whitespace().count();
        if has_lines > lines {
            problems.push(format!("{path}: {has_lines} lines, expected at most {lines}"));
        }
        if has_words > words {
            problems.push(format!("{path}: {has_words} words, expected at most {words}"));
        }
    }
    Ok(problems)
}

/// The lines that are too wide, with their widths.
fn wide_lines(text: &str, mut may_be: impl FnMut(&str) -> bool) -> Vec<(usize, usize)> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !may_be(line))
        .map(|(n, line)| (n + 1, line.chars().count()))
        .filter(|(_, columns)| *columns > WIDTH)
        .collect()
}

/// Whether a line of Markdown may be wide: tables, code blocks, and a line whose link is long.
fn may_be_wide() -> impl FnMut(&str) -> bool {
    let mut code = false;
    move |line| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        let longest = line.split_whitespace().map(|word| word.chars().count()).max().unwrap_or(0);
        let has_link = line.contains("](") || line.contains("://");
        code || fence || line.trim_start().starts_with('|') || (has_link && longest > WIDTH / 2)
    }
}

/// The phrases of a text, with the numbers of their lines.
fn phrases(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let line = line.to_lowercase();
        let words = |c: char| c.is_alphanumeric() || c == '_';
        for (phrase, plain) in PHRASES {
            let has_phrase = line.match_indices(phrase).any(|(at, _)| {
                !line[..at].ends_with(words) && !line[at + phrase.len()..].starts_with(words)
            });
            if has_phrase {
                found.push((n + 1, phrase, plain));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_are_whole_words() {
        let text = "We recommend and amend.\nWhoever mends it, mend_it or Mended.";
        let found: Vec<_> =
            phrases(text).into_iter().map(|(line, found, _)| (line, found)).collect();
        assert_eq!(found, [(2, "mended"), (2, "mends"), (2, "whoever")]);
    }

    #[test]
    fn prose_is_narrow_and_tables_code_and_links_may_be_wide() {
        let wide = "word ".repeat(30);
        let row = format!("| {wide} |");
        let link = format!("[{wide}](https://{})", "x".repeat(60));
        let text = format!("{wide}\n{row}\n```\n{wide}\n```\n{link}\n{wide}");
        let lines: Vec<_> = wide_lines(&text, may_be_wide()).iter().map(|(n, _)| *n).collect();
        assert_eq!(lines, [1, 7]);
        assert_eq!(wide_lines(&"é".repeat(100), |_| false), []);
        assert_eq!(wide_lines(&"é".repeat(101), |_| false), [(1, 101)]);
    }
}
