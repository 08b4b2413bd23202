//! Links between the Markdown files: each leads to a file and to a heading of it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::tree::Tree;

/// All problems, one per line: file, line number, problem.
pub(crate) fn problems(tree: &Tree) -> Result<Vec<String>> {
    let mut anchors = BTreeMap::new();
    for path in tree.ending(&[".md"]) {
        anchors.insert(path.clone(), headings(&tree.read(path)?));
    }
    let mut problems = Vec::new();
    for path in anchors.keys() {
        for (line, target) in targets(&tree.read(path)?) {
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = resolve(path, file);
            let known = anchors.get(&file);
            if file.is_empty() || !tree.has(&file) {
                problems.push(format!("{path}:{line}: {target}: there is no file {file}"));
            } else if !anchor.is_empty() && known.is_some_and(|all| !all.contains(anchor)) {
                problems.push(format!("{path}:{line}: {target}: {file} has no heading #{anchor}"));
            }
        }
    }
    Ok(problems)
}

/// The lines outside of code blocks, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut code = false;
    text.lines().enumerate().filter_map(move |(n, line)| {
        let fence = line.trim_start().starts_with("```");
        code ^= fence;
        (!code && !fence).then_some((n + 1, line))
    })
}

/// The targets of links inside the repository, with the numbers of their lines.
fn targets(text: &str) -> Vec<(usize, String)> {
    let mut targets = Vec::new();
    for (n, line) in prose(text) {
        let markdown = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let html = ["src=\"", "srcset=\"", "href=\""];
        let html = html.into_iter().flat_map(|attribute| {
            line.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
        });
        let inside = |target: &&str| !target.contains("://") && !target.starts_with("mailto:");
        targets.extend(markdown.chain(html).filter(inside).map(|target| (n, target.to_owned())));
    }
    targets
}

/// The path of a target, as seen from a file. Empty if it is outside of the repository.
fn resolve(from: &str, target: &str) -> String {
    if target.is_empty() {
        return from.to_owned();
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                if parts.pop().is_none() {
                    return String::new();
                }
            }
            part => parts.push(part),
        }
    }
    if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
}

/// The anchors of a file's headings, as GitHub and mdBook name them.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let text: String = title
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c))
            .collect();
        let anchor = text.replace(' ', "-");
        let mut unique = anchor.clone();
        let mut n = 0;
        while !anchors.insert(unique.clone()) {
            n += 1;
            unique = format!("{anchor}-{n}");
        }
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_from_its_file() {
        assert_eq!(resolve("docs/a.md", "../README.md"), "README.md");
        assert_eq!(resolve("docs/a.md", "b/c.md"), "docs/b/c.md");
        assert_eq!(resolve("README.md", "docs/"), "docs");
        assert_eq!(resolve("README.md", ""), "README.md");
        assert_eq!(resolve("README.md", "../x"), "");
        assert_eq!(resolve("docs/a.md", ".."), ".");
    }

    #[test]
    fn links_in_code_and_to_other_sites_are_not_checked() {
        let text = "[a](b.md#c) and [d](https://e)\n```\n[f](g)\n```\n<img src=\"h.svg\" alt=\"\">";
        assert_eq!(targets(text), [(1, "b.md#c".to_owned()), (5, "h.svg".to_owned())]);
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        let text = "# What `flanneld` does: A & B\n## Same\n## Same\n```\n# no heading\n```\n#no";
        let anchors: Vec<String> = headings(text).into_iter().collect();
        assert_eq!(anchors, ["same", "same-1", "what-flanneld-does-a--b"]);
    }
}
