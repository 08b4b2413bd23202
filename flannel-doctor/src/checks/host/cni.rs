//! The check for CNI configs that are used instead of flannel's.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use flannel_core::Remedy;
use serde_json::Value;

use super::HostFacts;
use crate::finding::{Check, Finding};
use crate::remedy::quoted;

/// The directory in which container runtimes look for CNI configs.
pub(super) const CONFIGS: &str = "/etc/cni/net.d";

/// The CNI config that runtimes use, and flannel's. Runtimes use the first config by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Superseded {
    pub(super) used: PathBuf,
    pub(super) flannel: PathBuf,
}

pub(super) fn superseded(facts: &HostFacts) -> Option<Finding> {
    let Superseded { used, flannel } = facts.superseded.as_ref()?;
    let text = format!(
        "{} comes before {}: container runtimes use the first one, so new pods get no network of \
         flannel",
        used.display(),
        flannel.display()
    );
    let path = quoted(&used.to_string_lossy());
    let remedy = Remedy::run(format!("mv {path} {path}.unused"))
        .remark("if pods shall have flannel's network; then restart pods that got another one");
    Some(Finding::warning(Check::Cni, text).with_remedy(remedy))
}

/// Reads whether another config comes before flannel's. Runtimes read files with these extensions,
/// and skip those that are no configs.
pub(super) fn read_superseded(dir: &Path) -> Option<Superseded> {
    let is_config = |path: &PathBuf| {
        let extension = path.extension().and_then(OsStr::to_str);
        matches!(extension, Some("conf" | "conflist" | "json"))
    };
    let files = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> = files.filter(is_config).collect();
    files.sort();
    let mut configs = files.into_iter().filter_map(|path| Some((plugins(&path)?, path)));
    let (first, used) = configs.next()?;
    if first.iter().any(|plugin| leads_to_flannel(plugin)) {
        return None;
    }
    let (_, flannel) =
        configs.find(|(plugins, _)| plugins.iter().any(|plugin| plugin == "flannel"))?;
    Some(Superseded { used, flannel })
}

/// The types of the plugins in a config, or `None` if it is none.
fn plugins(path: &Path) -> Option<Vec<String>> {
    let config: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let kind = |plugin: &Value| plugin.get("type")?.as_str().map(str::to_owned);
    let all = match config.get("plugins") {
        Some(plugins) => plugins.as_array()?.iter().filter_map(kind).collect(),
        None => Vec::from_iter(kind(&config)),
    };
    (!all.is_empty()).then_some(all)
}

/// Whether the plugin is flannel's, or one that calls the plugins of other configs, as Multus and
/// CNI-Genie do.
fn leads_to_flannel(plugin: &str) -> bool {
    plugin == "flannel" || plugin.starts_with("multus") || plugin == "genie"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_before_flannels_is_found_unless_it_leads_to_flannel() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let write = |name: &str, text: &str| fs::write(file(name), text).unwrap();
        let read = || read_superseded(dir.path());
        assert_eq!(read_superseded(&file("none")), None);
        write("05-cilium.conflist", r#"{"plugins":[{"type":"cilium-cni"}]}"#);
        assert_eq!(read(), None, "this node may use another network");
        write("10-flannel.conflist", r#"{"plugins":[{"type":"flannel"},{"type":"portmap"}]}"#);
        let superseded = |used: &str| {
            Some(Superseded { used: file(used), flannel: file("10-flannel.conflist") })
        };
        assert_eq!(read(), superseded("05-cilium.conflist"));
        write("00-a.conf", r#"{"type":"bridge"}"#);
        assert_eq!(read(), superseded("00-a.conf"));
        for skipped in ["{", "{}", r#"{"plugins":[]}"#] {
            write("00-a.conf", skipped);
            assert_eq!(read(), superseded("05-cilium.conflist"), "{skipped}");
        }
        for leads in [
            r#"{"type":"multus"}"#,
            r#"{"plugins":[{"type":"multus-shim"}]}"#,
            r#"{"plugins":[{"type":"flannel"},{"type":"cilium-cni"}]}"#,
        ] {
            write("00-a.conf", leads);
            assert_eq!(read(), None, "{leads}");
        }
        fs::remove_file(file("00-a.conf")).unwrap();
        fs::rename(file("05-cilium.conflist"), file("05-cilium.conflist.unused")).unwrap();
        write("87-podman-bridge.conflist", r#"{"plugins":[{"type":"bridge"}]}"#);
        assert_eq!(read(), None);
    }
}
